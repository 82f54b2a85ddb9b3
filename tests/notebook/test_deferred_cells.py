"""Deferred cells, also under ``%cudacheck on``: what is pending is told where its cell ends."""

from __future__ import annotations

import pytest

from cudalens import DeviceIndexError, last_report
from cudalens.guards.pending import PENDING
from tests.shells import BAD, Notebook


@pytest.mark.parametrize("how", ["%%cudacheck --deferred\n", "%cudacheck on --deferred"])
def test_a_finding_is_told_where_its_cell_ends(notebook: Notebook, how: str) -> None:
    """Also when its last op is the bad one: with a report at its line, and an empty queue."""
    magic = notebook.under(how)
    notebook.run(f"{magic}result = {BAD}\nprint('ran on')")
    report, error = last_report(), notebook.error
    assert report is not None and report.deferred
    assert report.source is not None and report.source.line == (2 if magic else 1)
    assert isinstance(error, DeviceIndexError) and error.report is report
    assert "DeviceIndexError: " in notebook.out
    assert any(
        "contained 7, which is outside the 5 rows" in item.get("text/plain", "")
        for item in notebook.shown
    )
    assert not PENDING
    notebook.run(f"{magic}result = table[:2].sum().item()")
    assert (notebook.error, notebook.shown) == (None, [])


@pytest.mark.parametrize("line", [2, 4])
def test_a_finding_at_the_end_of_a_cell_has_its_line_in_the_traceback(
    line: int, notebook: Notebook
) -> None:
    lines = ["%%cudacheck --deferred", "a = 1", "b = 2", "c = 3"]
    lines[line - 1] = call = f"rows = {BAD}"
    notebook.run("\n".join(lines))
    assert isinstance(notebook.error, DeviceIndexError)
    assert f"{line} {call}" in notebook.out.partition("Traceback")[2]
