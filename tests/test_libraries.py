"""The lane of the libraries: what its comparison notices, and what it runs."""

from __future__ import annotations

import ast
import re
from typing import Any

import numpy as np
import pytest
import torch

from tests.libraries import one
from tests.libraries.__main__ import PINS, ROOT, page, told
from tests.libraries.mistakes import MISTAKES, Mistake, judged
from tests.libraries.second_mistakes import SECOND_MISTAKES

PROGRAMS = sorted((ROOT / "tests" / "libraries" / "programs").glob("[a-z]*.py"))


@pytest.mark.parametrize(
    ("left", "right", "is_same"),
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.zeros(1), -torch.zeros(1), False),
        (torch.ones(2), torch.ones(2).double(), False),
        (torch.ones(2, 1), torch.ones(1, 2), False),
        ({"a": [1.0, torch.ones(1)]}, {"a": [1.0, torch.ones(1)]}, True),
        ({"a": 1.0}, {"a": 1.0 + 2**-52}, False),
        (np.ones(3, "f4"), np.ones(3, "f8"), False),
        ([[1], []], [[1, []]], False),
    ],
)
def test_results_are_compared_by_their_bytes(left: Any, right: Any, *, is_same: bool) -> None:
    assert (one.digest(left) == one.digest(right)) is is_same


def test_a_line_more_is_noticed_and_another_time_is_not() -> None:
    plain = "loss 0.25 in 1.5 s\ndone\n"
    assert one.printed_more("loss 0.25 in 1.7 s\ndone\n", plain) == []
    assert one.printed_more("loss 0.25 in 1.7 s\ncudalens: x\ndone\n", plain) == ["cudalens: x"]


def test_a_bar_of_progress_is_the_same_at_another_speed() -> None:
    plain = "saved: 100%|████| 2/2 [00:00<00:00, 8.54it/s]\n"
    slow = (
        "saved:  50%|██  | 1/2 [00:01<?, ?it/s]\nsaved: 100%|████| 2/2 [00:03<00:00,  1.70s/it]\n"
    )
    assert one.printed_more(slow, plain) == []
    assert one.printed_more(plain.replace("saved", "found"), plain) != []


def test_a_program_that_differs_is_told_and_marked() -> None:
    ways = {name: {"problem": ""} for name in one.WAYS}
    outcome = {"title": "a program", "ways": ways, "seconds": 3, "versions": ["torch 2.13.0"]}
    assert told("it", outcome) == ["| a program | = | = | = | = | = | = |  | 3 s"]
    ways["nan"] = {"problem": "other bits"}
    assert told("it", outcome)[1:] == ["    nan: other bits"]
    assert "| a program | = | = | = | x | = | = |  |" in page({"it": outcome})


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_each_program_names_libraries_that_are_pinned(path: Any) -> None:
    """``requirements.txt`` has the version of each; what others need in turn is not in it."""
    pins = set(re.findall(r"^([\w-]+)==", PINS.read_text(encoding="utf-8"), re.MULTILINE))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (named,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LIBRARIES"
    )
    assert pins & set(named)
    assert ast.get_docstring(tree)


def test_each_mistake_belongs_to_a_program_and_names_a_line_of_its_cell() -> None:
    mistakes = (*MISTAKES, *SECOND_MISTAKES)
    assert {item.program for item in mistakes} == {path.stem for path in PROGRAMS}
    for item in mistakes:
        assert item.line in map(str.strip, item.cell.splitlines())
        assert re.search(r"\d|nan|cpu|noise", item.headline), "the headline says no value"


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize(
    ("line", "headline", "says", "is_right"),
    [
        ("rows[at]", "at[1] = 3", "allowed -3 … 2", True),
        ("rows[at]", "at[0] = 3", "", False),
        ("at = torch.tensor([0, 3], device='cuda')", "at[1] = 3", "", False),
        ("rows[at]", "at[1] = 3", "resize", False),
    ],
)
def test_a_mistake_is_judged_by_line_value_and_words(
    line: str, headline: str, says: str, *, is_right: bool
) -> None:
    cell = "import torch\nrows = torch.zeros(3, device='cuda')\n"
    cell += "at = torch.tensor([0, 3], device='cuda')\nrows[at]\n"
    found = judged(Mistake("metrics", "an index", cell, line, headline, says))
    assert (found is None) is is_right
