"""Code that ``%time`` runs is found again in its cell, or nothing is said about its lines."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from types import CodeType

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import cudalens
from cudalens import timed
from cudalens.files import is_user_file, source_lines
from cudalens.guarding import PROCESS
from cudalens.model import Report
from cudalens.stack import StackEntry, place_of

EXEC = "<timed exec>"
BAD = "F.embedding(ids, table)"
Run = Callable[[str], "Report | None"]


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """A shell without the extension, and nothing noted before or after."""
    config = Config()
    config.HistoryManager.hist_file = ":memory:"
    hook, paths = sys.excepthook, list(sys.path)
    shell = InteractiveShell.instance(config=config)
    yield shell
    if "cudalens" in shell.extension_manager.loaded:
        shell.extension_manager.unload_extension("cudalens")
    timed.forget()
    shell.history_manager.end_session()
    InteractiveShell.clear_instance()
    sys.excepthook, sys.path[:] = hook, paths


@pytest.fixture
def run(shell: InteractiveShell) -> Run:
    """Run a cell with the extension; give the last report."""
    for cell in (
        "%load_ext cudalens",
        "import torch, torch.nn.functional as F",
        "table = torch.zeros(5, 2, requires_grad=True); ids = torch.tensor([1, 7, 2])",
    ):
        shell.run_cell(cell, store_history=True)

    def run(cell: str) -> Report | None:
        shell.run_cell(cell, store_history=True)
        return cudalens.last_report()

    return run


def code_of(text: str, name: str = EXEC, mode: str = "exec") -> CodeType:
    """Compile a text as the magic does."""
    return compile(text, name, mode, dont_inherit=True)


def where(code: CodeType) -> tuple[int, int] | None:
    """Tell how far the lines and columns of a code are moved."""
    home = timed.home_of(code)
    return None if home is None else (home.lines, home.columns)


@pytest.mark.parametrize(
    ("raw", "text", "moved"),
    [
        ("%%time\na = 1", "a = 1", (1, 0)),
        ("%%time\n\n\na = 1", "a = 1", (3, 0)),
        ("\n\n%%time\na = 1", "a = 1", (1, 0)),
        ("\n\n%%cudacheck\n\n%%time\na = 1\n", "a = 1", (5, 0)),
        ("%%capture\n%%time\na = 1", "a = 1", (2, 0)),
        ("b = 2\n%time a = 1", "a = 1", (1, 6)),
        ("b = 2\nif b:\n    %time  a = 1", "a = 1", (2, 11)),
        ("%time --no-raise-error a = 1", "a = 1", (0, 23)),
        ("%cudacheck --nan -r found %time a = 1", "a = 1", (0, 32)),
        ("b = c = %time a = 1", "a = 1", None),
        ("b.c, d = %time a = 1", "a = 1", (0, 15)),
        ("%timeit a = 1", "a = 1", None),
        ("if b == %time a = 1", "a = 1", None),
        ("%%time\na = 2", "a = 1", None),
        ("%%time\na =  1", "a = 1", None),
        ("%%writefile x.py\n%%time\na = 1", "a = 1", None),
        ("%%timeit\na = 1", "a = 1", None),
        ("a = 1", "a = 1", None),
        ("%%time\n!a \\\n  b\na = 1", "a = 1", None),
        ("%%time\na = (", "a = 1", None),
    ],
)
def test_code_is_where_the_cell_gives_the_very_same(
    shell: InteractiveShell, raw: str, text: str, moved: tuple[int, int] | None
) -> None:
    """Another value, other columns or other lines are another code."""
    timed.note(1, raw)
    assert where(code_of(text)) == moved


def test_a_cell_whose_lines_the_shell_joins_tells_no_line(shell: InteractiveShell) -> None:
    """Its code is found, and which line is which is not certain."""
    raw = "%%time\n!ls \\\n  .\na = 1"
    timed.note(1, raw)
    body = shell.transform_cell(raw.partition("\n")[2])
    assert body.count("\n") == 2
    assert timed.home_of(code_of(body)) is None


def test_inner_code_and_the_parts_of_the_magic_are_found(shell: InteractiveShell) -> None:
    """The last expression is compiled by itself, and a function is called long after."""
    text = "def f():\n    return 1\nf()"
    timed.note(1, f"%%time\n{text}")
    head, _, last = text.rpartition("\n")
    inner = next(item for item in code_of(head).co_consts if isinstance(item, CodeType))
    alone = code_of(f"\n\n{last}", "<timed eval>", "eval")
    assert [where(code) for code in (code_of(head), inner, alone)] == [(1, 0)] * 3


def test_the_newest_of_two_like_cells_is_meant(shell: InteractiveShell) -> None:
    """A cell that is run again has a new number."""
    timed.note(1, "%%time\na = 1")
    first = timed.home_of(code_of("a = 1"))
    timed.note(2, "# again\n%time a = 1")
    second = timed.home_of(code_of("a = 1"))
    assert first is not None
    assert second is not None
    assert (first.filename, second.lines) != (second.filename, first.lines)
    assert source_lines(second.filename) == ["# again", "pass; a = 1"]


def test_the_name_alone_says_nothing(shell: InteractiveShell) -> None:
    """Without a note the code is nobody's, as before; a note of another cell gives no line."""
    entry = StackEntry(code_of("a = 1"), 1, 0)
    assert not is_user_file(EXEC)
    timed.note(1, "%time b = 2")
    assert is_user_file(EXEC)
    assert not place_of(entry).is_user
    timed.note(2, "%time a = 1")
    assert place_of(entry).is_user
    timed.forget()
    assert not is_user_file(EXEC)
    assert place_of(entry).home is None


def test_what_was_noted_is_bounded_and_forgotten(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of a cell that drops out, and of all in the end, leave Python's cache."""
    monkeypatch.setattr(timed, "_MAX_CELLS", 2)
    names = []
    for number in range(3):
        timed.note(number, f"%time a = {number}")
        home = timed.home_of(code_of(f"a = {number}"))
        assert home is not None
        names.append(home.filename)
    assert [name in linecache.cache for name in names] == [False, True, True]
    assert timed.home_of(code_of("a = 0")) is None
    timed.forget()
    assert not any(name in linecache.cache for name in names)


def test_a_transformer_that_fails_finds_nothing(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is somebody else's, and a report has more to say than this line."""
    timed.note(1, "%time a = 1")

    def fail(cell: str) -> str:
        raise LookupError(cell)

    monkeypatch.setattr(shell, "transform_cell", fail)
    assert timed.home_of(code_of("a = 1")) is None


def test_text_that_parses_and_does_not_compile_is_passed_over(shell: InteractiveShell) -> None:
    """The cell below it has its turn."""
    timed.note(1, "%time a = 1")
    timed.note(2, "%time return 1")
    timed.note(3, "%time (")
    assert where(code_of("a = 1")) == (0, 6)


def test_without_a_shell_nothing_is_looked_for() -> None:
    """The module talks to a shell that runs, and never makes one."""
    timed.note(1, "%time a = 1")
    try:
        assert timed.home_of(code_of("a = 1")) is None
    finally:
        timed.forget()


def test_a_function_of_a_timed_cell_fails_in_another(run: Run) -> None:
    """Its line is one of the cell that defined it; the frames tell both cells."""
    with PROCESS.acting_on("cpu", "cuda"):
        run(f"%%time\ndef look(ids):\n    return {BAD}")
        report = run("%%cudacheck\n%%time\nlook(ids)\n1")
    assert report is not None
    assert report.source is not None
    assert (report.source.cell, report.source.line) == (4, 3)
    assert [(item.cell, item.line) for item in report.frames if item.is_user] == [(5, 3), (4, 3)]
    assert "ids[1] = 7 is outside the 5 rows of table" in report.to_text()


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
    run: Run, shell: InteractiveShell, cell: str, line: int | None
) -> None:
    """As it does before IPython 9.4: the cell goes on, and is told of all the same."""

    def shows_itself(line: str, cell: str = "") -> None:
        try:
            exec(code_of(shell.transform_cell(cell or line)), shell.user_ns)
        except Exception:
            shell.showtraceback()

    for kind in ("cell", "line"):
        shell.magics_manager.magics[kind]["time"] = shows_itself
    report = run(cell)
    if line is None:
        report, line = run("a = 1\n%time table @ table"), 2
    assert report is not None
    assert report.kind == "host_error"
    assert "table has 5 rows" in report.to_text()
    assert report.source is not None
    assert report.source.line == line
    assert "table @ table" in str(report.source.text)
    assert run("%cudacheck 1") is report


def test_an_exception_that_something_else_has_shown_is_not_of_the_cell(
    run: Run, shell: InteractiveShell
) -> None:
    """A cell that runs another one, which fails: the outer one is good."""
    assert run("%%cudacheck\nget_ipython().run_cell('table @ table')") is None


def test_a_backward_error_names_the_timed_line_of_its_forward(run: Run) -> None:
    """The recorder keeps the timed lines too, and the lens tells them."""
    cell = (
        "%%cudacheck\n%%time\nhalf = table * 0.5\nloss = half.exp().sum()\n"
        "loss.backward()\nloss.backward()\n"
    )
    report = run(cell)
    assert report is not None
    assert report.kind == "autograd_error"
    assert report.source is not None
    assert (report.source.line, report.source.text) == (6, "loss.backward()")
    lines = {op.source.line for op in report.history if op.source is not None}
    assert {3, 4, 5} <= lines


def test_a_report_of_timed_code_is_that_of_any_code(run: Run) -> None:
    """Names, values, their origin and the advice are the same; the line is the next one."""
    body = f"for batch in [[1, 2], [3, 9]]:\n    ids = torch.tensor(batch) + 0\n    rows = {BAD}\n"
    texts = []
    for above in ("%%cudacheck\n\n", "%%cudacheck\n%%time\n"):
        with PROCESS.acting_on("cpu", "cuda"):
            report = run(above + body)
        assert report is not None
        assert report.source is not None
        text = " ".join(report.to_text().split()).replace(f"In [{report.source.cell}]", "In [N]")
        # Before 9.4 the magic shows an exception itself, and the cell goes on.
        texts.append(text.replace(" The block handled it; a guard fired once.", ""))
    assert "ids = torch.tensor(batch) + 0" in texts[0]
    assert texts[0] == texts[1]


def test_unloading_leaves_no_note(run: Run, shell: InteractiveShell) -> None:
    """Nothing that was told to Python's cache or to us stays."""
    run("%time a = 1")
    assert is_user_file(EXEC)
    run("%unload_ext cudalens")
    assert not is_user_file(EXEC)
    assert torch.zeros(1).item() == 0.0
