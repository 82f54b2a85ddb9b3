"""What it takes to open a checked cell: counted in calls of ours, as the clock is not ours."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import cudalens
from cudalens.guards.plans import guarded_ops
from tests.shells import Notebook

PACKAGE = str(Path(cudalens.__file__).parent)
CELL = "%%cudacheck\nbegun()"


def calls_until_begun(notebook: Notebook) -> Counter[str]:
    """Run a checked cell; return the calls of ours before its first line, by function."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_qualname] += 1

    notebook.names["begun"] = lambda: sys.setprofile(None)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        notebook.run(CELL)
    finally:
        sys.setprofile(before)
    assert notebook.error is None
    return calls


def test_a_cell_is_opened_in_few_calls(notebook: Notebook) -> None:
    """Two for each op with a guard, whose kernel is made anew, and as many for all the rest."""
    notebook.run(CELL.replace("begun()", "1"))
    calls = calls_until_begun(notebook)
    ops = len(guarded_ops())
    assert ops <= calls["Interceptor._kernel"] < ops * 1.1  # some have a second, above autograd
    assert sum(calls.values()) <= 500


def test_a_new_guard_is_the_only_one_that_is_planned(notebook: Notebook) -> None:
    notebook.run(CELL.replace("begun()", "1"))
    assert calls_until_begun(notebook)["_guarded_op"] == 0
    remove = cudalens.register_guard("aten::relu.default", lambda self: None)
    try:
        assert calls_until_begun(notebook)["_guarded_op"] == 1
    finally:
        remove()
    assert calls_until_begun(notebook)["_guarded_op"] == 0
