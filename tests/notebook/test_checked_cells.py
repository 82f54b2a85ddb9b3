"""Checked cells in a real shell: as if the magic were not there, and named as they were typed."""

from __future__ import annotations

import linecache
import re
import sys

import IPython
import pytest

import cudalens
from cudalens.guards.process import PROCESS
from cudalens.notebook import _ipython, cells
from tests.processes import python
from tests.shells import ANSI, BAD, SETUP, Notebook, innermost

IN_TRACEBACK = re.compile(r"^Cell In\[(\d+)\], (line .*)$", flags=re.MULTILINE)
IN_OLD_TRACEBACK = re.compile(
    r"^<ipython-input-(\d+)-\w+> in (.*)\n(?:(?!<ipython).*\n)*?-+> (\d+) ", flags=re.MULTILINE
)
"""As IPython 7 writes it."""
TIME_SWALLOWS = IPython.version_info < (9, 4)
"""``%time`` shows an exception itself, and the cell goes on."""


def blocks(notebook: Notebook) -> list[str]:
    """Return the lines of cells in the traceback that the shell has shown."""
    old = [
        (cell, f"line {line}" + ("" if name.startswith("<") else f", in {name}"))
        for cell, name, line in IN_OLD_TRACEBACK.findall(notebook.out)
    ]
    found = IN_TRACEBACK.findall(notebook.out) or old
    assert {int(cell) for cell, _ in found} <= {notebook.count}
    return [place for _, place in found]


FROZEN = """\
from dataclasses import dataclass
@dataclass(frozen=True)
class E(Exception):
    code: int
"""

BODIES = {
    "value": "a = 3\na + 1",
    "silenced value": "a = 3\na + 1;",
    "print": "print('{a} $a', \"it's\")",
    "triple quotes": 't = """\n  a\n\n%b\n"""\nt',
    "shell escape": "got = !echo one\nlist(got)",
    "line magic inside": "%time 3",
    "cell magic inside": "%%capture got\nprint('inside')",
    "future import": "from __future__ import annotations\nf = lambda: 1\ndef g(a: Nowhere): ...",
    "await": "import asyncio\nawait asyncio.sleep(0, 7)",
    "error": "def f():\n    return 1 / 0\n\nf()",
    "frozen exception": FROZEN + "raise E(3)",
    "exit": "raise SystemExit(3)",
    "blank lines above": "\n\n1 / 0",
    "indented": "    a = 1\n    a / 0",
    "syntax error": "a = (\n",
    "help": "len?",
}


@pytest.mark.filterwarnings("ignore:To exit")
@pytest.mark.parametrize("options", ["", " --fast", " --no-widgets --nan"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_cell_behaves_as_without_the_magic(notebook: Notebook, body: str, options: str) -> None:
    assert behaviour(notebook, body) == behaviour(notebook, f"%%cudacheck{options}\n{body}")


def behaviour(notebook: Notebook, cell: str) -> list[object]:
    """Run a cell; return all that it did."""
    result = notebook.run(cell)
    return [
        result.success,
        repr(result.result),
        _without_numbers(notebook.out),
        repr(notebook.names["_"]),
        {name for name in notebook.names if not name.startswith("_")},
        essence(result.error_before_exec),
        essence(result.error_in_exec),
    ]


def essence(error: BaseException | None) -> tuple[str, str]:
    """Type and text of an exception; a syntax error's text names a line, which differs by one."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return type(error).__name__, re.sub(r"line \d+", "line", text)


def _without_numbers(output: str) -> list[str]:
    """Output lines without what differs from run to run: times, counters and tracebacks."""
    if "Traceback" in output or "Error" in output:
        return []
    lines = [line for line in output.splitlines() if not line.startswith(("CPU", "Wall"))]
    return [re.sub(r"Out\[\d+\]", "Out", line) for line in lines]


@pytest.mark.parametrize(
    ("cell", "lines"),
    [
        ("%%cudacheck\n1 / 0", ["line 2"]),
        ("%%cudacheck --fast\n\n\n1 / 0", ["line 4"]),
        ("\n\n%%cudacheck\n1 / 0", ["line 4"]),
        ("%%cudacheck\n    \n    a = 1\n    a / 0", ["line 4"]),
        ("%%cudacheck\n%time a = 1\n!true\n1 / 0", ["line 4"]),
        ("%%cudacheck\nimport asyncio\nawait asyncio.sleep(0)\n1 / 0", ["line 4"]),
        ("%%cudacheck\ns = '''\n\n'''\ndef f():\n    1 / 0\nf()", ["line 7", "line 6, in f()"]),
        ("a = 1\n%cudacheck a / 0", ["line 2"]),
        ("for i in (1, 0):\n    %cudacheck 1 / i", ["line 2"]),
        ("b = 1\nb = %cudacheck b / 0", ["line 2"]),
        ("def f(n):\n    %cudacheck n / 0\nf(1)", ["line 3", "line 2, in f(n)", "line 2"]),
        ("%%cudacheck\na = 1\n%cudacheck a / 0", ["line 3"]),
        ("def f():\n    return 1 / 0\n%cudacheck 1\nf()", ["line 4", "line 2, in f()"]),
        (f"%%cudacheck\ndef f():\n    return {BAD}\nf()", ["line 4", "line 3, in f()"]),
    ],
)
def test_the_traceback_shows_the_users_frames_at_the_lines_of_the_cell(
    notebook: Notebook, cell: str, lines: list[str]
) -> None:
    """As without the magic: neither its call nor the machinery below it."""
    notebook.run(cell)
    filename, number, _ = innermost(sys.last_traceback)  # where the debugger lands
    assert innermost(sys.last_value.__traceback__)[:2] == (filename, number)
    assert blocks(notebook) == lines
    assert lines[-1].split(",")[0] == f"line {number}"
    text = cell.split("\n")[number - 1].replace("%cudacheck ", "")
    assert linecache.getline(filename, number).strip() == text.strip()
    assert "hidden" not in notebook.out
    assert "cudalens" not in notebook.out


@pytest.mark.parametrize("last", ["a = (", "return b", "await b"])
def test_a_cell_that_does_not_compile_is_as_without_the_magic(
    notebook: Notebook, last: str
) -> None:
    """One that does not parse is not run; of others the shell runs the statements above."""
    notebook.shell.autoawait = last != "await b"
    result = notebook.run(f"%%cudacheck\nb = 1\n{last}")
    assert isinstance(result.error_before_exec, SyntaxError)
    assert result.error_before_exec.lineno == 3
    assert ("b" in notebook.names) is (last != "a = (")
    assert "cudalens" not in notebook.out and PROCESS.is_installed is False


@pytest.mark.parametrize(
    "cell", ["%%cudacheck --nan\n{}", "\n%%cudacheck\n%pwd\n{}", "%cudacheck {}"]
)
def test_what_was_typed_is_what_the_shell_shows(notebook: Notebook, cell: str) -> None:
    """In its history and in its traceback, where the magic's line is near enough."""
    cell = cell.format("1 / 0")
    result = notebook.run(cell)
    number = result.execution_count
    assert notebook.names["In"][number] == notebook.names["_ih"][number] == cell
    assert notebook.names[f"_i{number}"] == cell
    notebook.run(f"%history {number}")
    assert notebook.out == f"{cell}\n"
    notebook.run(cell)
    assert "# %%" not in notebook.out
    assert ("%%cudacheck" in notebook.out) is cell.lstrip().startswith("%%")


@pytest.mark.parametrize("above", ["%%capture out\n%%cudacheck", "%%cudacheck\n%%capture out"])
def test_magics_above_the_code_are_shown_as_typed(notebook: Notebook, above: str) -> None:
    notebook.run(f"{above}\n1 / 0  # %%none")
    shown = notebook.out + ANSI.sub("", notebook.names["out"].stdout)
    assert "# %%c" not in shown and all(line in shown for line in above.split("\n"))
    assert "# %%none" in shown


@pytest.mark.parametrize(
    ("text", "status"),
    [("%%cudacheck\n1", "incomplete"), ("%%cudacheck\n1\n\n", "complete"), ("1", "complete")],
)
def test_a_terminal_waits_for_the_rest_of_the_cell(
    notebook: Notebook, text: str, status: str
) -> None:
    assert notebook.shell.check_complete(text)[0] == status


def test_a_silent_cell_is_checked_too(notebook: Notebook) -> None:
    """The shell tells only that something is run: `ipython notebook.ipynb` runs its cells so."""
    assert notebook.shell.run_cell("%%cudacheck\npass", silent=True).success
    assert not PROCESS.is_installed
    result = notebook.shell.run_cell(f"%%cudacheck\n{BAD}", silent=True)
    assert isinstance(result.error_in_exec, cudalens.DeviceIndexError)
    assert len(notebook.shell.display_pub.outputs) == 1
    assert not PROCESS.is_installed
    assert not notebook.shell.run_cell(f"{BAD}.sum().item()", silent=True).success


def test_a_cell_whose_lines_cannot_be_noted_is_checked_and_says_so(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no lines")

    monkeypatch.setattr("cudalens.notebook.cells.typed_lines", fail)
    notebook.stopped(f"%%cudacheck\n{BAD}")
    (line,) = cudalens.last_report().limits
    assert line.startswith("lines of the cell unavailable: ValueError: no lines")


def test_a_cuda_error_of_a_class_that_nobody_may_write_to(notebook: Notebook) -> None:
    """Its report is shown beside it, and the exception is the user's own."""
    cell = FROZEN.replace("int", "str\n    def __str__(self): return self.code")
    result = notebook.run(f"%%cudacheck\n{cell}raise E('CUDA error: mine')")
    assert type(result.error_in_exec).__name__ == "E"
    assert "E: CUDA error: mine" in notebook.out and "FrozenInstance" not in notebook.out
    assert len(notebook.shown) == 1


@pytest.mark.parametrize("magic", ["run_cell_magic('cudacheck', '', B)", "run_line_magic(*ARGS)"])
def test_a_call_by_hand_counts_as_the_cell_that_makes_it(notebook: Notebook, magic: str) -> None:
    """The shell has raised its count for the next cell by then, or not, by its release."""
    notebook.run(f"B = 'a = 1\\n{BAD}'; ARGS = 'cudacheck', 'for _ in [1]:\\n    {BAD}'")
    result = notebook.stopped(f"get_ipython().{magic}")
    report = cudalens.last_report()
    assert report.source.cell == result.execution_count
    assert f"In [{result.execution_count}] line" in notebook.shown[0]["text/plain"]


@pytest.mark.parametrize(
    ("cells", "typed"),
    [
        ([f"%%cudacheck\na = 1\n{BAD}"], ["%%cudacheck", "a = 1", BAD]),
        ([f"%%cudacheck  --fast\n{BAD}"], ["%%cudacheck  --fast", BAD]),
        ([f"\n%%cudacheck\n{BAD}"], ["", "%%cudacheck", BAD]),
        ([f"%%time\n%%cudacheck\n{BAD}"], ["%%time", "%%cudacheck", BAD]),
        ([f"%%cudacheck\n%pwd\nx = %pwd\n{BAD}"], ["%%cudacheck", "%pwd", "x = %pwd", BAD]),
        ([f"%%cudacheck\n\n%pwd\n{BAD}"], ["%%cudacheck", "", "%pwd", BAD]),
        # Somebody turned the magic off for one cell, and checks every cell.
        (["%cudacheck on", f"# %%cudacheck\n{BAD}"], ["# %%cudacheck", BAD]),
    ],
)
def test_the_lines_around_are_those_that_were_typed(
    notebook: Notebook, cells: list[str], typed: list[str]
) -> None:
    """The magic's own line is no Python, and is shown nonetheless as it stands in the cell."""
    for cell in cells:
        notebook.run(cell)
    report = cudalens.last_report()
    assert [line.text for line in report.source.context] == typed


@pytest.mark.parametrize(
    ("body", "line", "text", "column"),
    [
        (f"%time rows = {BAD}", 1, f"%time rows = {BAD}", 13),
        (f"a = 1\nrows = %time {BAD}", 2, f"rows = %time {BAD}", 13),
        (f"if True:\n    %time  {BAD}", 2, f"%time  {BAD}", 11),
        (f"a = 1\n%cudacheck --fast %time {BAD}", 2, f"%cudacheck --fast %time {BAD}", 24),
        (f"%%time\na = 1\n{BAD}", 3, BAD, 0),
        (f"%%time\n{BAD}\na = 1\na", 2, BAD, 0),
        (f"\n\n%%time\n\n\n{BAD}\n\n", 6, BAD, 0),
        (f"%%time\nfor _ in range(2):\n    %time rows = {BAD}", 3, f"%time rows = {BAD}", 17),
        (f"%%time\n%pwd\nrows = ({BAD},\n  1)", 3, f"rows = ({BAD},", 8),
        (f"rows = {BAD}\n%pwd", 1, f"rows = {BAD}", 7),
    ],
)
@pytest.mark.parametrize("is_on", [False, True])
def test_a_line_that_calls_a_magic_is_named_as_it_was_typed(
    notebook: Notebook,
    body: str,
    line: int,
    text: str,
    column: int | None,
    is_on: bool,
) -> None:
    """Python runs another text there, and counts the lines of a timed one from the magic on."""
    if is_on:
        notebook.run("%cudacheck on")
        line -= len(body) - len(body.lstrip())  # the shell drops blank lines above a cell
    result = notebook.run(body if is_on else f"%%cudacheck\n{body}")
    if not (TIME_SWALLOWS and "%time" in body):
        assert isinstance(result.error_in_exec, cudalens.DeviceIndexError)
    report = cudalens.last_report()
    assert report.source.cell == result.execution_count
    assert (report.source.line, report.source.text) == (line + (not is_on), text)
    columns = report.source.column, report.source.end_column
    assert columns == ((None, None) if column is None else (column, column + len(BAD)))
    assert text in notebook.shown[0]["text/plain"]


@pytest.mark.parametrize("above", ["", "\n", "\n\n\n"])
def test_a_line_below_blank_lines_is_counted_as_the_shell_counts_it(
    notebook: Notebook, above: str
) -> None:
    notebook.run(f"{above}{SETUP}\n\ndef f():\n    {BAD}\n")
    result = notebook.run("%%cudacheck\nf()")
    assert isinstance(result.error_in_exec, cudalens.DeviceIndexError)
    source = cudalens.last_report().source
    assert (source.line, source.text) == (6, BAD)


def test_a_statement_finding_names_its_line(notebook: Notebook) -> None:
    notebook.stopped(f"a = 1\nrows = %cudacheck {BAD}")
    report = cudalens.last_report()
    assert (report.source.line, report.source.text) == (2, f"rows = %cudacheck {BAD}")
    assert report.source.column == len("rows = %cudacheck ")


def test_a_swallowed_finding_is_a_warning(notebook: Notebook) -> None:
    """An error behind it that ends the cell is the report, and not blamed on the clause."""
    caught = f"%%cudacheck\ntry:\n    {BAD}\nexcept RuntimeError:\n    "
    assert notebook.run(f"{caught}pass\n'went on'").result == "went on"
    said = "cudalens: warning: an error did not leave the cell: ids[1] = 7 is outside"
    assert notebook.err.startswith(said)
    assert len(notebook.shown) == 1
    assert "1 call was stopped" in cudalens.last_report().explanation
    notebook.run(f"{caught}pass\n{{}}['missing']")
    said = "cudalens: warning: an error did not leave the cell, and KeyError was raised later: "
    assert notebook.err.startswith(said)


@pytest.mark.parametrize("between", ["pass\n", ""], ids=["behind the clause", "in the clause"])
def test_the_error_that_ended_the_cell_is_shown_and_the_caught_one_counted(
    notebook: Notebook, between: str
) -> None:
    caught = f"%%cudacheck\ntry:\n    {BAD}\nexcept RuntimeError:\n    {between}"
    result = notebook.run(f"{caught}torch.ones(2, 3) @ torch.ones(2, 3)")
    assert cudalens.last_report().kind == "host_error"
    assert len(result.error_in_exec.__notes__) == len(notebook.shown) == 1
    assert "cudalens: warning" not in notebook.err
    told = "1 more in this cell did not end it: device assert: ids[1] = 7 is outside"
    assert told in cudalens.last_report().explanation


@pytest.mark.parametrize("failing", ["torch.ones(2, 3) @ torch.ones(4, 5)", BAD])
def test_beside_its_report_an_exception_says_its_first_line_alone(
    notebook: Notebook, failing: str
) -> None:
    """Item 35.7: nothing is said twice; the exception itself still says all, also to a program."""
    notebook.run("%cudacheck on")
    result = notebook.run(failing)
    said, error = notebook.out + notebook.err, result.error_in_exec
    assert len(notebook.shown) == 1
    assert str(error).split("\n")[0] in said
    rest = [*str(error).split("\n")[1:], *getattr(error, "__notes__", [])]
    assert rest
    assert not [line for line in rest if line in said]
    assert "site-packages/torch" not in said


def test_notes_are_printed_where_the_shell_shows_none(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the traceback, as in IPython before 8.14; those of the user are the user's."""
    monkeypatch.setattr(_ipython, "version", lambda: (8, 13))
    monkeypatch.setattr(cells, "is_reported", lambda error, report: False)
    result = notebook.run("%%cudacheck\ntorch.ones(2, 3) @ torch.ones(4, 5)")
    assert result.error_in_exec.__notes__[0] in notebook.err
    for notes in ("None", "5", "[3, 'mine']"):
        assert not notebook.run(f"e = ValueError()\ne.__notes__ = {notes}\nraise e").success
        assert "Error in callback" not in notebook.out + notebook.err


@pytest.mark.skipif(IPython.version_info < (8,), reason="keeps the text that was compiled")
def test_blank_lines_above_the_magic_are_blank_in_the_traceback(notebook: Notebook) -> None:
    notebook.run("\n\n%%cudacheck\n1/0  # of the user")
    lines = [line.rstrip() for line in notebook.out.splitlines()]
    assert "      2" in lines  # an old IPython shows fewer lines above
    assert any(line.endswith("4 1/0  # of the user") for line in lines)


@pytest.mark.parametrize("above", ["%%cudacheck", "\n\n%%cudacheck --fast"])
def test_a_debugger_shows_the_cell_as_it_was_typed(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, above: str
) -> None:
    """And so does the same traceback in a later cell."""
    notebook.run(f"{above}\n{BAD}")
    monkeypatch.setattr("builtins.input", lambda *_: "q")
    notebook.run("%debug")
    lines = [line.split(maxsplit=1)[-1] for line in notebook.out.splitlines() if line.strip()]
    assert above.strip() in lines
    assert BAD in notebook.out
    assert "# %" not in notebook.out
    notebook.run("%tb")
    assert f"{above.count(chr(10)) + 1} {above.strip()}" in notebook.out + notebook.err


def test_a_bare_comment_sign_stays_below_blank_lines(notebook: Notebook) -> None:
    notebook.run("\n\n%%cudacheck\n#\n1/0")
    lines = [line.rstrip() for line in notebook.out.splitlines()]
    at = next(at for at, line in enumerate(lines) if line.endswith("5 1/0"))
    assert lines[at - 2 : at] == ["      3 %%cudacheck", "      4 #"]


NESTED = f"get_ipython().run_cell('1 / 0')\n{BAD}"
"""A cell that runs a cell stays checked to its end."""


@pytest.mark.parametrize("cell", [f"%%cudacheck\n{BAD}", f"a = 1\n%cudacheck {BAD}", NESTED])
def test_under_on_a_cell_shows_one_report(notebook: Notebook, cell: str) -> None:
    """A check, or a cell, inside a checked cell does not explain the same failure twice."""
    notebook.run("%cudacheck on")
    notebook.stopped(cell)
    assert len(notebook.shown) == 1


@pytest.mark.parametrize("inner", ["%cudacheck ", "%%cudacheck\n"])
@pytest.mark.parametrize("statement", [BAD, "table @ table"])
def test_a_check_inside_a_check_shows_one_report(
    notebook: Notebook, inner: str, statement: str
) -> None:
    """Both have it, and it is shown once; what only the outer one saw is shown as well."""
    assert not notebook.run(f"%%cudacheck -r outer\n{inner}{statement}").success
    assert len(notebook.shown) == 1
    assert notebook.names["outer"] is cudalens.last_report()
    swallowed = f"try: {BAD}\nexcept IndexError: pass\n"
    if not inner.startswith("%%"):
        assert not notebook.run(f"%%cudacheck\n{swallowed}{inner}{statement}").success
        assert len(notebook.shown) == 2


FIRST = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell('%load_ext cudalens')
print('torch' in sys.modules)
shell.run_cell('%cudacheck 1')
print('torch' in sys.modules)
"""


def test_the_first_check_imports_torch() -> None:
    done = python("-c", FIRST, fresh=True)
    assert re.findall("True|False", done.stdout) == ["False", "True"], done.stderr
