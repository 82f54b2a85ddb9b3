"""Code that ``%time`` runs is found again in its cell, or nothing is said about its lines."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from types import CodeType

import pytest
from IPython.core.interactiveshell import InteractiveShell

import cudalens
from cudalens.core.report import Report
from cudalens.source import timed_cells
from cudalens.source.files import is_user_file, source_lines
from cudalens.source.stack import StackEntry, place_of
from tests.shells import BAD, Notebook, new_shell

EXEC = "<timed exec>"
Run = Callable[[str], "Report | None"]


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """A shell without the extension, and nothing noted before or after."""
    with new_shell() as shell:
        yield shell
        timed_cells.forget()


@pytest.fixture
def run(notebook: Notebook) -> Run:
    """Run a cell with the extension; return the last report."""
    notebook.run("table.requires_grad_()")

    def run(cell: str) -> Report | None:
        notebook.run(cell)
        return cudalens.last_report()

    return run


def code_of(text: str, name: str = EXEC, mode: str = "exec") -> CodeType:
    """Compile a text as the magic does."""
    return compile(text, name, mode, dont_inherit=True)


def note(text: str, typed: str, line: int | None = None) -> None:
    """Note a text of the first cell."""
    timed_cells.note_timed(text, 1, typed.split("\n"), line)


def where(code: CodeType) -> tuple[int, int] | None:
    """Return how far the lines and columns of a code are moved."""
    position = timed_cells.cell_position_of(code)
    return None if position is None else (position.lines, position.columns)


@pytest.mark.parametrize(
    ("text", "typed", "line", "moved"),
    [
        ("# %%time\na = 1", "%%time\na = 1", None, (0, 0)),
        ("a = 1", "b = 2\n%time a = 1", 1, (1, 6)),
        ("a = 1", "if b:\n    %time  a = 1", 1, (1, 11)),
        ("a = 1", "%time --no-raise-error a = 1", 0, (0, 23)),
        ("a = 1", "b = %time   a =  1", 0, (0, None)),
        ("a = 2", "%time a = 2", 0, None),
        ("a =  1", "%time a =  1", 0, None),
        ("a = (", "%time a = (", 0, None),
        ("return 1", "%time return 1", 0, None),
    ],
)
def test_code_is_where_a_text_gives_the_very_same(
    shell: InteractiveShell, text: str, typed: str, line: int | None, moved: object
) -> None:
    note(text, typed, line)
    assert where(code_of(text if moved else "a = 1")) == moved


def test_inner_code_and_the_parts_of_the_magic_are_found(shell: InteractiveShell) -> None:
    """The last expression is compiled by itself, and a function is called long after."""
    text = "#\ndef f():\n    return 1\nf()"
    note(text, f"%%time\n{text[2:]}")
    head, _, last = text.rpartition("\n")
    inner = next(item for item in code_of(head).co_consts if isinstance(item, CodeType))
    alone = code_of(f"\n\n\n{last}", "<timed eval>", "eval")
    assert [where(code) for code in (code_of(head), inner, alone)] == [(0, 0)] * 3


def test_the_newest_of_two_like_cells_is_meant(shell: InteractiveShell) -> None:
    note("a = 1", "%time a = 1", 0)
    first = timed_cells.cell_position_of(code_of("a = 1"))
    timed_cells.note_timed("a = 1", 2, ["# again", "%time a = 1"], 1)
    second = timed_cells.cell_position_of(code_of("a = 1"))
    assert (first.filename, second.lines) != (second.filename, first.lines)
    assert source_lines(second.filename) == ["", "pass; a = 1"]


def test_the_name_alone_says_nothing(shell: InteractiveShell) -> None:
    """Without a note the code is nobody's, as before; a note of another cell gives no line."""
    assert not is_user_file(EXEC)
    note("b = 2", "%time b = 2", 0)
    assert is_user_file(EXEC)
    assert not place_of(StackEntry(code_of("a = 1"), 1, 0)).is_user
    note("a = 1", "%time a = 1", 0)
    assert place_of(StackEntry(code_of("a = 1"), 1, 0)).is_user
    timed_cells.forget()
    assert not is_user_file(EXEC)
    assert place_of(StackEntry(code_of("a = 1"), 1, 0)).typed_at is None


def test_what_was_noted_is_bounded_and_forgotten(shell: InteractiveShell) -> None:
    names = []
    for number in range(timed_cells._MAX_TEXTS + 1):
        note(f"a = {number}", f"%time a = {number}", 0)
        names.append(timed_cells.cell_position_of(code_of(f"a = {number}")).filename)
    assert len(timed_cells._texts) == len(timed_cells._answers) == timed_cells._MAX_TEXTS
    assert timed_cells.cell_position_of(code_of("a = 0")) is None
    assert all(name in linecache.cache for name in names)
    timed_cells.forget()
    assert not any(name in linecache.cache for name in names)


def test_a_function_of_a_timed_cell_fails_in_another(run: Run) -> None:
    """Its line is one of the cell that defined it; the frames tell both cells."""
    run(f"%%time\ndef look(ids):\n    return {BAD}")
    report = run("%%cudacheck\n%%time\nlook(ids)\n1")
    assert (report.source.cell, report.source.line) == (3, 3)
    assert [(item.cell, item.line) for item in report.frames if item.is_user] == [(4, 3), (3, 3)]
    assert "ids[1] = 7 is outside the 5 rows of table" in report.to_text()


@pytest.fixture
def old_time(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """The magic as it is before IPython 9.4: it shows an exception itself."""
    shell = notebook.shell

    def time(line: str, cell: str = "") -> None:
        try:
            exec(code_of(shell.transform_cell(cell or line)), shell.user_ns)
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
SPACED = ("y = F.embedding(ids,  table)", "'a'; y = F.embedding(ids, table)")
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
        # With an option the magic joins its words with one blank, maybe to those of another cell.
        *(
            (
                (f"%time {' '.join(text.split())}".replace("ids", "ok"), f"a = 1\n%time {text}"),
                (0, 2, f"%time {text}"),
            )
            for text in SPACED
        ),
        # Of two cells with the same text the newer is named, maybe not that of the function.
        ((MADE.format("f"), MADE.format("f"), "f(ids)"), (1, 2)),
        ((f"%%time\nx = 1\n%cudacheck {BAD}",), (0, 3, BAD, 0)),
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
        texts.append(text.replace(" It did not leave the block; a guard fired once.", ""))
    assert ids in texts[0]
    assert texts[0] == texts[1]


def test_unloading_leaves_no_note(run: Run) -> None:
    run("%time a = 1")
    assert is_user_file(EXEC)
    run("%unload_ext cudalens")
    assert not is_user_file(EXEC)
