"""What all bad values have in common, each looked at."""

from __future__ import annotations

import ast
import sys
from types import FrameType
from typing import Any

import pytest
import torch

from cudalens.core.evidence_types import BadSlice, Marks
from cudalens.core.graph_types import FIRST_BAD, ProvenanceStep
from cudalens.core.report_types import LineRef, Violation
from cudalens.evidence import marks as marks_module
from cudalens.evidence import value_facts
from cudalens.evidence.marks import marks_of, nan_slice, slice_of, vanished
from tests.hostcells import SETUP, run_cell
from tests.probes import asked


def marks(values: list[int], *, size: int = 5, **more: Any) -> Marks:
    tensor = more.pop("tensor", torch.tensor(values))
    bad = (tensor < 0) | (tensor >= size)
    violation = Violation(headline="", size=size)
    options = {"others": (), "steps": (), "frames": (), **more}
    return marks_of(violation, tensor, bad, **options)


@pytest.mark.parametrize(
    ("values", "value", "is_size"),
    [
        ([1, 7, 7], 7, False),
        ([1, 7, 8], None, False),
        ([1, 5, 5], 5, True),
        ([1, 5, 2], None, True),
        ([1, 5, 6], None, False),
        ([1, 7, 2], None, False),
    ],
)
def test_one_number(values: list[int], value: int | None, is_size: bool) -> None:
    found = marks(values)
    assert (found.value, found.is_size) == (value, is_size)


@pytest.mark.parametrize(
    ("weight", "name"), [([1, 0, 0], "w"), ([0, 0, 0], None), ([1, 0, 1], None), ([2, 1, 1], None)]
)
def test_a_weight_that_is_zero_at_the_bad_places_alone(weight: list[int], name: str | None) -> None:
    others = [("y", torch.tensor([1, 7, 7])), ("w", torch.tensor(weight).float())]
    assert marks([1, 7, 7], others=others).zero_at == name


def test_copies_of_an_expanded_tensor() -> None:
    assert marks([], tensor=torch.tensor([[1], [7]]).expand(2, 4)).copies == 4
    assert marks([1, 7]).copies == 1


@pytest.mark.parametrize(("op", "is_maker"), [("torch.argmax", True), ("torch.add", False)])
def test_the_maker_of_integers(op: str, is_maker: bool) -> None:
    steps = [ProvenanceStep(op="torch.Tensor.long"), ProvenanceStep(op=op)]
    assert marks([1, 7], steps=steps).maker == (steps[1] if is_maker else None)


@pytest.mark.parametrize("note", [None, FIRST_BAD])
def test_topk_makes_positions_only_where_the_values_begin(note: str | None) -> None:
    """The values that it gives were there before, and are no positions."""
    step = ProvenanceStep(op="torch.topk", note=note)
    assert marks([1, 7], steps=[step]).maker == (step if note else None)


@pytest.mark.parametrize(
    ("code", "dtype", "wanted"),
    [
        ("y = x / (n + 1e-8)", "float16", ("1e-08 is 0",)),
        ("y = x.clamp(max=1.0 - 1e-6)", "float16", ("1.0 - 1e-06 is 1",)),
        ("y = x.clamp(max=1.0 - 1e-6)", "float32", ()),
        ("y = x.clamp(max=1.0 - 1e-2)", "float16", ()),
        ("y = x / (n + 1e-8)", "float32", ()),
        ("y = x / (n + 1e-3)", "float16", ()),
        ("y = x / (n + 1e-8)", "bfloat16", ()),
        ("y = x / (n + 0.0)", "float16", ()),
        ("y = (x + 1e-8) / (n + 1e-8)", "torch.float16", ("1e-08 is 0",)),
        ("y = x.clamp(max=1 - 1e-6)", "float16", ("1 - 1e-06 is 1",)),
        ("y = x.clamp(min=1.0 + 1e-6)", "float16", ("1.0 + 1e-06 is 1",)),
        ("y = x.clamp(min=1.0 + 0.0)", "float16", ()),
        # Below 1.0 the numbers of a dtype are twice as close.
        ("y = x * (1.0 + 4e-4)", "float16", ("1.0 + 0.0004 is 1",)),
        ("y = x * (1.0 - 4e-4)", "float16", ()),
    ],
)
def test_constants_that_vanish(code: str, dtype: str, wanted: tuple[str, ...]) -> None:
    assert vanished(ast.parse(code), dtype) == wanted


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        ("HOLE = -7\nOTHER = -8", [("HOLE", -7, "HOLE = -7")]),
        ("hole = -7", []),
        ("HOLE = -7.0", []),
        (
            "HOLE = EMPTY = -7",
            [("HOLE", -7, "HOLE = EMPTY = -7"), ("EMPTY", -7, "HOLE = EMPTY = -7")],
        ),
    ],
)
def test_the_programs_name_for_a_bad_value(
    made: str, wanted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Marks] = []
    inner = value_facts.marks_of

    def watched(*args: Any, **kwargs: Any) -> Marks:
        found.append(inner(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(value_facts, "marks_of", watched)
    cell = f"{SETUP}{made}\nt = nn.Embedding(5, 2).cuda()\nt(torch.tensor([1, -7]).cuda())"
    assert not run_cell(cell, fast=False).shown.limits
    said = [(it.name, it.value, it.line and it.line.text) for it in found[0].constants]
    assert said == wanted


def test_a_name_of_two_scopes_is_that_of_the_inner_one() -> None:
    cell = "HOLE = -8\nclass Net:\n    HOLE = -9\n    def run(self, HOLE):\n        here()\n"

    def ask(frames: list[FrameType]) -> dict[str, int]:
        return {it.name: it.value for it in marks([-7, -8, -9, 1], frames=frames).constants}

    assert asked(f"{cell}Net().run(-7)", ask) == [{"HOLE": -7}]
    assert asked(f"{cell.replace('HOLE = -8', 'GAP = -8')}Net().run(-6)", ask) == [
        {"GAP": -8, "HOLE": -9}
    ]


@pytest.mark.parametrize(("dtype", "is_said"), [("half", True), ("float", False)])
@pytest.mark.usefixtures("sim")
def test_a_constant_of_the_forward_line_that_vanishes(dtype: str, *, is_said: bool) -> None:
    """The node that made the NaN runs in the line of ``backward``."""
    outcome = run_cell(
        f"{SETUP}x = torch.ones(2, dtype=torch.{dtype}, device='cuda', requires_grad=True)\n"
        "y = torch.log1p(-x * (1.0 - 1e-6))\n"
        "y.masked_fill(x > 0, 0.0).sum().backward()",
        fast=False,
        nan=True,
    )
    texts = [it.text for it in outcome.report.observations] if outcome.report else []
    assert ("1.0 - 1e-06 is 1 in float16" in texts) is is_said


@pytest.mark.parametrize(
    ("rows", "columns", "wanted"),
    [
        (slice(None), 4, BadSlice("x", 1, 4, 16, is_full=True)),
        (slice(4), 4, BadSlice("x", 1, 4, 4, is_full=False)),
        (3, slice(None), BadSlice("x", 0, 3, 6, is_full=True)),
        # Three of them may be in one of six columns by chance, and two columns are not one.
        (slice(3), 4, None),
        (slice(None), slice(4, None), None),
    ],
)
def test_one_column_or_row_has_all_bad_values(
    rows: Any, columns: Any, wanted: BadSlice | None
) -> None:
    bad = torch.zeros(16, 6, dtype=torch.bool)
    bad[rows, columns] = True
    assert slice_of("x", bad) == wanted
    assert slice_of("x", bad.reshape(-1)) is None


def test_bad_values_that_have_two_places_in_common_have_no_one_slice() -> None:
    bad = torch.zeros(9, 9, 9, dtype=torch.bool)
    bad[3, 4] = True
    assert slice_of("x", bad) is None


def test_nan_in_a_column_of_another_tensor() -> None:
    x, out = torch.zeros(16, 6), torch.full((16, 6), torch.nan)
    assert nan_slice(out, [("out", out), ("x", x)]) is None
    x[:, 4] = torch.nan
    x[:, 2] = -1.0  # bad too, where it is a probability
    held = BadSlice("x", 1, 4, 16, is_full=True, is_nan=True)
    assert nan_slice(out, [("out", out), ("x", x)]) == held
    assert nan_slice(x, []) == held._replace(name=None)


@pytest.mark.parametrize(
    ("text", "names"), [("ids = [END]", ["END"]), ("ids = [BEND]", []), (None, [])]
)
def test_a_name_of_one_past_the_last_only_where_it_stands(
    text: str | None, names: list[str]
) -> None:
    """Such a number may be equal to any of the program's; another bad number is named anyway."""
    source = None if text is None else LineRef(line=1, text=text)
    steps = [ProvenanceStep(op="torch.tensor", source=source), ProvenanceStep(op="x")]

    def named(bad: int) -> list[str]:
        cell = f"END = {bad}\nhere()"
        (found,) = asked(cell, lambda frames: marks([1, bad, bad], steps=steps, frames=frames))
        return [it.name for it in found.constants]

    assert named(5) == names
    assert named(7) == ["END"]


def test_more_than_four_kinds_have_no_names() -> None:
    cell = "END = 7\nhere()"

    def named(values: list[int]) -> int:
        (found,) = asked(cell, lambda frames: marks(values, frames=frames))
        return len(found.constants)

    assert [named([*range(5, 5 + count), 7]) for count in (4, 5)] == [1, 0]


GAP = 9


def test_a_constant_of_an_outer_file_has_its_line() -> None:
    here = sys._getframe()
    (found,) = asked("here()", lambda frames: marks([1, 9, 9], frames=[here, *frames]).constants)
    assert [(it.name, it.line and it.line.text) for it in found] == [("GAP", "GAP = 9")]


def test_constants_of_a_class_and_a_name_with_two_values() -> None:
    cell = "class Net:\n    HOLE = 9\n    def run(self):\n        here()\nNet().run()"
    (found,) = asked(cell, lambda frames: marks([1, 9, 9], frames=frames))
    assert [(it.name, it.value) for it in found.constants] == [("HOLE", 9)]
    outer = cell.replace("here()", "inner()").replace("class", "def inner():\n    here()\nclass", 1)
    assert asked(outer, lambda frames: marks([1, 9, 9], frames=frames).constants[0].name) == [
        "HOLE"
    ]
    twice = "END = 8\nEND = 7\nhere()"
    (found,) = asked(twice, lambda frames: marks([1, 7, 7], frames=frames).constants)
    assert [it.line and it.line.text for it in found] == ["END = 7"]


def test_a_sparse_tensor_shows_no_copies() -> None:
    sparse = torch.tensor([[0, 7]]).to_sparse()
    assert marks_module._copies(sparse) == 1
    assert marks_module._copies(torch.ones(1, 1).expand(1, 3)) == 3
    assert marks_module._copies(torch.ones(1).expand(1)) == 1


def test_a_tensor_of_another_shape_is_no_mask_of_the_bad_places() -> None:
    bad = torch.tensor([1, 7, 7])
    assert marks([1, 7, 7], others=[("w", torch.tensor([[1, 0, 0]]))]).zero_at is None
    assert marks([7, 7], others=[("y", torch.zeros(2)), ("z", torch.zeros(2))]).zero_at == "y"
    assert marks([0, -1], tensor=bad * 0, others=[("y", bad * 0)]).zero_at is None
