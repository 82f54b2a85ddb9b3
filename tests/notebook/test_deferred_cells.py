"""Deferred cells, also under ``%cudacheck on``: what is pending is told where its cell ends."""

from __future__ import annotations

from cudalens import DeviceIndexError, last_report
from cudalens.guards.pending import PENDING
from tests.shells import BAD, Notebook

LAST = f"result = {BAD}"


def test_a_finding_leaves_the_cell_that_made_it(notebook: Notebook) -> None:
    """Also when its last op is the bad one: with a report at its line, and an empty queue."""
    notebook.run(f"%%cudacheck --deferred\n{LAST}\nprint('ran on')")
    error = notebook.error
    assert isinstance(error, DeviceIndexError)
    assert error.report is not None and error.report.deferred
    assert error.report.source is not None and error.report.source.line == 2
    assert any("7 is outside the 5 rows" in item.get("text/plain", "") for item in notebook.shown)
    assert not PENDING
    notebook.run("%%cudacheck --deferred\nresult = table[:2].sum().item()")
    assert (notebook.error, notebook.shown) == (None, [])


def test_cells_under_on_show_what_was_pending(notebook: Notebook) -> None:
    """The cell has ended by then: its report is shown, and nothing is raised."""
    notebook.run("%cudacheck on --deferred")
    notebook.run(LAST)
    report = last_report()
    assert notebook.error is None and report is not None and report.deferred
    assert any("7 is outside the 5 rows" in item.get("text/plain", "") for item in notebook.shown)
    assert not PENDING
