"""CONTRIBUTING.md holds: its code runs as pasted, its make targets and files exist."""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import tensor

import cudalens
from cudalens import DeviceAssertError, simulate
from cudalens import guards as catalogue
from cudalens.core.report import ErrorFacts, Evidence
from cudalens.diagnosis.host_errors import Verdict, explain_host_error
from cudalens.diagnosis.host_errors import _base as messages
from cudalens.guards import _base, engine
from tests.cpu_guards import guarded, positions
from tests.guards.test_catalogue import evaluate

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


BLOCK = re.compile(r"^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
PYTHON = [textwrap.dedent(body) for body in BLOCK.findall(TEXT)]


def holding(text: str) -> str:
    """Return the only Python block with a text in it."""
    (found,) = [block for block in PYTHON if text in block]
    return found


@pytest.mark.usefixtures("untouched_catalogue")
def test_the_guard_of_the_walk_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pasted into a file of the catalogue it passes its own examples, for the op it speaks of."""
    monkeypatch.setattr(engine, "assert_text", lambda key: f"MyLookup.cu:12: {key}")
    library = torch.library.Library("aten", "FRAGMENT")
    try:
        library.define("my_lookup(Tensor table, Tensor index) -> Tensor")
        library.impl("my_lookup", lambda table, index: table + 0, "CPU")
        exec(holding("aten::my_lookup"), {})
        entry = _base._registered[-1]
        catalogue._enter(entry)
        assert [str(op) for op in _base.resolve(entry)] == ["aten.my_lookup.default"]
        with guarded() as collector:
            assert collector.look(lambda: evaluate(entry.passes)) is None
            found = collector.look(lambda: evaluate(entry.violates))
        assert found is not None
        assert positions(found) == [(1,)]
        assert entry.source and entry.cost and entry.precondition.endswith(".")
    finally:
        library._destroy()


@pytest.mark.usefixtures("untouched_catalogue")
def test_the_guards_of_ones_own_act(sim: simulate.Simulation) -> None:
    names: dict[str, Any] = {}
    exec(holding("register_guard"), names)
    table, bad = torch.zeros(3, device="cuda"), tensor([0, 3]).to("cuda")
    with cudalens.guard(), pytest.raises(DeviceAssertError, match="index contains 3"):
        names["lookup"](table, bad)
    names = {}
    exec(holding("from cudalens.guards import lies_within"), names)
    found = names["index_in_range"](table, bad)
    assert positions(found) == [(1,)]
    assert names["index_in_range"](table, tensor([0, 2]).to("cuda")) is None


def test_the_cause_of_the_walk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pasted into a file of patterns it puts its own message into words, and no other."""
    monkeypatch.setattr(messages, "_patterns", list(messages._patterns))

    def told(text: str) -> Verdict:
        error = ErrorFacts(type_name="RuntimeError", bases=("RuntimeError",), message=text)
        return explain_host_error(Evidence(error=error), error)

    message = "my_lookup: table must have 2 dimensions, got 3"
    assert told(message).pattern is None
    exec(holding("my_rank"), {})
    found = told(message)
    assert found.headline == "table has 3 dimensions, my_lookup takes 2"
    assert (found.pattern, found.argument) == ("my_rank", "table")
    assert told("something else happened").pattern is None


def test_no_block_is_left_out() -> None:
    assert len(PYTHON) == 4


def test_the_targets_exist() -> None:
    told = set(re.findall(r"\bmake ([a-z-]+)", TEXT))
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    known = {line.split()[0] for line in listed.stdout.splitlines() if line.strip()}
    assert told
    assert told <= known


def missing(text: str) -> list[str]:
    """Return the files and folders of the checkout that a text names and that are not there."""
    named = re.findall(r"`((?:cudalens|tests|docs|benchmarks|notebooks)/[\w./-]*)`", text)
    return [path for path in named if not (ROOT / path).exists()]


def test_the_files_exist() -> None:
    """What the walk leads through is there; a file that is not would be told."""
    assert missing(TEXT) == []
    assert missing("see `cudalens/guards/nowhere.py`") == ["cudalens/guards/nowhere.py"]
