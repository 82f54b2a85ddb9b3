"""Code that ``%time`` runs has the name and the lines of its cell."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from traceback import extract_tb

import pytest
from IPython.core.compilerop import CachingCompiler
from IPython.core.interactiveshell import InteractiveShell

import cudalens
from cudalens.core.report import Report
from cudalens.notebook.statement import CellPlace
from cudalens.notebook.timed import place_timed
from tests.shells import BAD, Notebook, forget

Run = Callable[[str], "Report | None"]


@pytest.fixture
def run(notebook: Notebook) -> Run:
    """Run a cell with the extension; return the last report."""
    notebook.run("table.requires_grad_()")

    def run(cell: str) -> Report | None:
        notebook.run(cell)
        return cudalens.last_report()

    return run


def test_a_function_of_a_timed_cell_fails_in_another(run: Run) -> None:
    """Its line is one of the cell that defined it; the frames tell both cells."""
    run(f"%%time\ndef look(ids):\n    return {BAD}")
    report = run("%%cudacheck\n%%time\nlook(ids)\n1")
    assert (report.source.cell, report.source.line) == (3, 3)
    assert [(item.cell, item.line) for item in report.frames if item.is_user] == [(4, 3), (3, 3)]
    assert "ids[1] = 7 is outside the 5 rows of table" in report.to_text()


@pytest.fixture
def old_time(notebook: Notebook) -> None:
    """The magic as it is before IPython 9.4: it shows an exception itself."""
    shell = notebook.shell

    def time(line: str, cell: str = "") -> None:
        expr = shell.transform_cell(cell or line)
        try:
            exec(shell.compile(ast.parse(expr), "<timed exec>", "exec"), shell.user_ns)
        except Exception:
            shell.showtraceback()

    for kind in ("cell", "line"):
        shell.magics_manager.magics[kind]["time"] = time


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("%%cudacheck\n%%time\ntable @ table", 3),
        ("%%cudacheck\nimport asyncio\nawait asyncio.sleep(0)\n%time table @ table", 4),
        ("%cudacheck on\n", None),
        ("%cudacheck %time table @ table", 1),
    ],
)
def test_an_exception_that_the_magic_shows_itself_is_explained(
    run: Run, old_time: None, cell: str, line: int | None
) -> None:
    report = run(cell)
    if line is None:
        report, line = run("a = 1\n%time table @ table"), 2
    assert report.kind == "host_error"
    assert "table and table shapes cannot be multiplied" in report.to_text()
    assert report.source.line == line
    assert "table @ table" in str(report.source.text)
    assert run("%cudacheck 1") is report


def test_each_exception_that_the_magic_shows_is_a_new_one(run: Run, old_time: None) -> None:
    """The second may have the address of the first, which is gone by then."""
    cell = "%%cudacheck\n%time table @ table\nx = [0]\n%time table @ table"
    reports = [run(cell) for _ in range(5)]
    assert None not in reports
    assert len(set(map(id, reports))) == 5
    assert run("%%cudacheck\n1") is reports[-1]


def test_what_a_check_inside_has_shown_is_not_shown_again(
    run: Run, old_time: None, notebook: Notebook
) -> None:
    run("%cudacheck on")
    run("a = 1\n%cudacheck %time table @ table")
    assert len(notebook.shown) == 1


@pytest.mark.parametrize("inner", ["table @ table", "%time table @ table"])
@pytest.mark.parametrize("is_old", [False, True])
def test_an_exception_of_a_cell_that_is_run_inside_is_not_of_the_cell(
    run: Run, request: pytest.FixtureRequest, inner: str, is_old: bool
) -> None:
    if is_old:
        request.getfixturevalue("old_time")
    assert run(f"%%cudacheck\nget_ipython().run_cell('{inner}')\nz = 1") is None


# --- certain or silent ----------------------------------------------------------------------------

OK = "ok = torch.tensor([1], device='cuda'); d = {}"
AT_I = BAD.replace("ids", "i")
LOOK = f"f = lambda ids: {BAD}\nf(ids)"
MADE = "%%time\n{} = lambda x: F.embedding(x, table)"


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        # The same text without the magic is another cell; with it once more, the newer one.
        ((f"%%time\n{BAD}\n1", BAD), (0, 1)),
        ((f"%%time\n{BAD}\n1",) * 2, (0, 2)),
        ((f"%%time\n{LOOK}\n1", LOOK), (0, 1)),
        ((f"%%time\n{LOOK}\n1",) * 2, (0, 2)),
        # Of two lines alike the call of the magic tells which.
        (
            (f"i = ok\n%time r = {AT_I}\ni = ids\n%time r = {AT_I}",),
            (0, 4, f"%time r = {AT_I}", 10),
        ),
        ((f"if 0:\n    %time {BAD}\nelse:\n    %time {BAD}",), (0, 4, f"%time {BAD}", 10)),
        ((f"s = '''\n%time {BAD}\n'''\n%time {BAD}",), (0, 4, f"%time {BAD}", 6)),
        ((MADE.format("f"), MADE.format("f"), "f(ids)"), (1, 2)),
        ((f"%%time\nx = 1\n%cudacheck {BAD}",), (0, 3, f"%cudacheck {BAD}", 11)),
    ],
)
def test_the_line_that_runs_is_named(
    run: Run, cells: tuple[str, ...], found: tuple[object, ...]
) -> None:
    """How many cells ago it is, its number, its text, its column."""
    run("%cudacheck on")
    for cell in (OK, *cells):
        report = run(cell)
    source, newest = report.source, 4 + len(cells)
    place = (newest - source.cell, source.line, source.text, source.column)
    assert place[: len(found)] == found


@pytest.mark.parametrize(
    ("cell", "lines"),
    [
        (
            "%%time\nhalf = table * 0.5\nloss = half.exp().sum()\nloss.backward()\nloss.backward()",
            {3, 4, 5},
        ),
        # Code without a cell leaves the line of its call: what IPython allows before the magic is
        # more than we know.
        (
            "d = {}\nhalf = table * 0.5\nd['x'] = %time half.exp()\n"
            "half.sum().backward()\nhalf.sum().backward()",
            {3, 4, 5},
        ),
    ],
)
def test_a_backward_error_names_the_timed_line_of_its_forward(
    run: Run, cell: str, lines: set[int]
) -> None:
    """The recorder keeps the timed lines too, and the lens tells them."""
    report = run(f"%%cudacheck\n{cell}\n")
    assert report.kind == "autograd_error"
    assert (report.source.line, report.source.text) == (6, cell.rpartition("\n")[2])
    assert lines <= {op.source.line for op in report.history if op.source is not None}


def test_a_report_of_timed_code_is_that_of_any_code(run: Run) -> None:
    ids = "ids = torch.tensor(batch, device='cuda') + 0"
    body = f"for batch in [[1, 2], [3, 9]]:\n    {ids}\n    rows = {BAD}\n"
    texts = []
    for above in ("%%cudacheck\n\n", "%%cudacheck\n%%time\n"):
        report = run(above + body)
        text = " ".join(report.to_text().split()).replace(f"In [{report.source.cell}]", "In [N]")
        # Before 9.4 the magic shows an exception itself, and the cell goes on.
        texts.append(text.replace(" This error did not leave the cell. 1 call was stopped.", ""))
    assert ids in texts[0]
    assert texts[0] == texts[1]


def test_unloading_leaves_the_compiler_as_it_was(notebook: Notebook) -> None:
    """Beside it: loaded, the traceback of the shell names the line of the cell."""
    for is_loaded in (True, False):
        notebook.run("a = 1\n%time 1 / 0")
        last = extract_tb(sys.last_value.__traceback__)[-1]
        assert (last.filename == "<timed eval>") is not is_loaded
        assert last.lineno == (2 if is_loaded else 1)
        assert not is_loaded or notebook.out.count("a = 1") == 1
        notebook.run("%unload_ext cudalens")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_shells_are_left_as_they_were_in_any_order(notebook: Notebook, order: tuple[int]) -> None:
    """What the extension changes is the shell's own, not that of its class."""
    other = InteractiveShell(config=notebook.shell.config)
    shells = [notebook.shell, other]
    kinds = [type(CachingCompiler()), CachingCompiler.__call__]
    try:
        other.run_line_magic("load_ext", "cudalens")
        for at in order:
            shells[at].run_line_magic("unload_ext", "cudalens")
    finally:
        forget(other)
    assert [type(shell.compile) for shell in shells] == [kinds[0]] * 2
    assert CachingCompiler.__call__ is kinds[1]
    assert all("run_ast_nodes" not in vars(shell) for shell in shells)


# --- the compiler of a shell ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filename", "text", "name", "line", "column"),
    [
        ("<timed exec>", "f(x)", "cell", 4, 6),
        ("<timed eval>", "f(x)", "cell", 4, 6),
        ("<timed exec>", "unknown", "<timed exec>", 1, 0),
        ("<timed exec>", "nowhere", "<timed exec>", 1, 0),
        ("<other>", "f(x)", "<other>", 1, 0),
    ],
)
def test_only_code_of_time_gets_the_place_of_its_text(
    filename: str, text: str, name: str, line: int, column: int
) -> None:
    compiler = CachingCompiler()
    undo = place_timed(compiler, {"f(x)": CellPlace("cell", 3, "%time "), "nowhere": None})
    expr = text  # the variable in which %time has it
    code = compiler(ast.parse("f(x)"), filename, "exec")
    first = next(place for place in code.co_positions() if place[2] is not None and place[3])
    assert (code.co_filename, code.co_names, expr) == (name, ("f", "x"), text)
    assert (first[0], first[2]) == (line, column)
    assert eval(compiler(ast.parse("1 + 1", mode="eval"), "other", symbol="eval")) == 2
    assert type(compiler).__module__ == CachingCompiler.__module__
    undo()
    assert type(compiler) is CachingCompiler
    assert compiler(ast.parse("f(x)"), "<timed exec>", "exec").co_filename == "<timed exec>"


def test_a_compiler_that_somebody_else_has_replaced_stays_replaced() -> None:
    class Theirs(CachingCompiler):
        pass

    compiler = CachingCompiler()
    undo = place_timed(compiler, {})
    assert isinstance(compiler, CachingCompiler)
    compiler.__class__ = Theirs
    undo()
    assert type(compiler) is Theirs
