"""Deferred cells, also under ``%cudacheck on``: what is pending is told where its cell ends."""

from __future__ import annotations

from typing import Any

from cudalens import DeviceIndexError, last_report
from cudalens.guards.pending import PENDING
from tests.notebook.conftest import BAD
from tests.shells import run

LAST = f"result = {BAD}"


def test_a_finding_leaves_the_cell_that_made_it(shell: Any) -> None:
    """Also when its last op is the bad one: with a report at its line, and an empty queue."""
    error, shown = run(shell, f"%%cudacheck --deferred\n{LAST}\nprint('ran on')")
    assert isinstance(error, DeviceIndexError)
    assert error.report is not None and error.report.deferred
    assert error.report.source is not None and error.report.source.line == 2
    assert any("7 is outside the 5 rows" in item.get("text/plain", "") for item in shown)
    assert not PENDING
    assert run(shell, "%%cudacheck --deferred\nresult = table[:2].sum().item()") == (None, [])


def test_cells_under_on_show_what_was_pending(shell: Any) -> None:
    """The cell has ended by then: its report is shown, and nothing is raised."""
    run(shell, "%cudacheck on --deferred")
    error, shown = run(shell, LAST)
    run(shell, "%cudacheck off")
    report = last_report()
    assert error is None and report is not None and report.deferred
    assert any("7 is outside the 5 rows" in item.get("text/plain", "") for item in shown)
    assert not PENDING
