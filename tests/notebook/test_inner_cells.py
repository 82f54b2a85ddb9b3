"""Cells that a checked cell runs: their lines are those of the user's cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import cudalens
from cudalens.diagnosis.diagnose import format_message
from tests.shells import BAD, SETUP, Notebook


def place() -> tuple[int | str | None, int | None, str | None]:
    """Return cell or file, line and text of the last report."""
    report = cudalens.last_report()
    return report.source.cell or report.source.file, report.source.line, report.source.text


CELLS = {
    "below the magic": f"%%cudacheck\n%%capture out\nx = 1\n{BAD}\ny = 2",
    "with blank lines": f"%%cudacheck\n\n%%capture out\n\n{BAD}",
    "above the magic": f"%%capture out\n%%cudacheck\nx = 1\n{BAD}",
    "in itself": f"%%cudacheck\n%%capture a\n%%capture b\n{BAD}",
    "timed": f"%%cudacheck\n%%capture out\nx = 1\n%time {BAD}",
    "in a timed cell": f"%%cudacheck\n%%time\n%%capture out\n{BAD}",
    "with another magic": f"%%cudacheck\n%%capture out\n%precision 3\n{BAD}",
}


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_number_and_line_are_those_of_the_cell_that_was_typed(
    notebook: Notebook, cell: str
) -> None:
    """A plain cell of the same text, run next, has its own number and lines."""
    notebook.run(cell)
    line = next(n for n, text in enumerate(cell.split("\n"), start=1) if BAD in text)
    assert place() == (notebook.count, line, cell.split("\n")[line - 1])
    body = cell.split("\n", cell.count("%%"))[-1]
    notebook.run("%cudacheck on")
    notebook.run(body)
    inside = body.strip("\n").split("\n")
    line = next(n for n, text in enumerate(inside, start=1) if BAD in text)
    assert place() == (notebook.count, line, inside[line - 1])


def test_inner_cells_keep_their_lines_in_the_every_cell_mode(notebook: Notebook) -> None:
    """Under ``on`` the line of ``%%capture`` is the first; a function keeps its place."""
    notebook.run("%cudacheck on")
    notebook.run(f"%%capture out\ndef f():\n    {BAD}\nf()")
    number = notebook.count
    assert place() == (number, 3, BAD)
    notebook.run("f()")
    assert place() == (number, 3, BAD)


def test_a_text_that_the_cell_does_not_hold_has_no_number(notebook: Notebook) -> None:
    """Which of the cells it is that another cell ran is known, a number of its own it has none."""
    notebook.run(
        f"%%cudacheck\nget_ipython().run_cell('x = 1')\nget_ipython().run_cell('\\n{BAD}')"
    )
    assert place() == (f"<cell 2 run by In [{notebook.count}]>", 1, BAD)


FAILING = f"x = 1\n{BAD}"


@pytest.mark.parametrize(
    ("texts", "known"),
    [
        ([FAILING], 1),
        (["x = 1", "", ["x = 1\n", BAD]], 2),
        (["a = 1", f"if a > 1:\n  {BAD}\na = 2", f"if a > 1:\n  {BAD}\na = 2"], 3),
    ],
)
def test_a_cell_of_a_notebook_that_was_run_is_named_by_its_notebook(
    notebook: Notebook, tmp_path: Path, texts: list[str | list[str]], known: int
) -> None:
    """The how manieth that was run; an empty one is not."""
    path = tmp_path / "other.ipynb"
    cells = [new_markdown_cell("# A"), *(new_code_cell(text, execution_count=9) for text in texts)]
    path.write_text(json.dumps(new_notebook(cells=cells)))
    notebook.run(f"%%cudacheck\n%run {path}")
    name = f"<cell {known} run by In [{notebook.count}] from other.ipynb>"
    assert place() == (name, 2, BAD)
    report = cudalens.last_report()
    assert report is not None and f"{name}:2: {BAD}" in format_message(report)


def test_an_ipython_script_has_its_name_and_lines(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "setup.ipy").write_text(f"%precision 3\n{BAD}\n")
    notebook.run(f"%%cudacheck\n%run {tmp_path / 'setup.ipy'}")
    assert place() == (f"<cell 1 run by In [{notebook.count}] from setup.ipy>", 2, BAD)


def test_a_script_that_stopped_is_not_called_handled(notebook: Notebook, tmp_path: Path) -> None:
    """The shell printed the error: that is known.  Where an except clause took it, nothing is."""
    script = tmp_path / "script.py"
    script.write_text(f"{SETUP}\n{BAD}\nprint('after')\n")
    notebook.run(f"%%cudacheck\n%run {script}")
    assert place() == (str(script), 4, BAD)
    assert notebook.err.splitlines()[0] == (
        "cudalens: warning: IPython printed an error while the cell ran, as %run, %%capture and "
        f"a failing display do: {cudalens.last_report().headline}"
    )
    notebook.run(f"%%cudacheck\ntry:\n    {BAD}\nexcept IndexError:\n    pass")
    said = f"cudalens: warning: an error did not leave the cell: {cudalens.last_report().headline}"
    assert notebook.err.splitlines()[0] == said
