"""The magics in a real shell: a checked cell behaves as if the magic were not there."""

from __future__ import annotations

import gc
import io
import json
import linecache
import re
import sys
import textwrap
import traceback
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest.mock import Mock

import IPython
import pytest
import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionResult

import cudalens
from cudalens import simulate
from cudalens.guards.process import PROCESS
from cudalens.notebook import _ipython, cells, magics
from cudalens.session.options import Options
from cudalens.source.cell_text import counted_lines, typed_lines
from tests.builders import make_report
from tests.processes import python
from tests.releases import needs_rehearsal
from tests.shells import ANSI, BAD, SETUP, Notebook, new_shell

NESTED = f"get_ipython().run_cell('1 / 0')\n{BAD}"
"""A cell that runs a cell stays checked to its end."""
IN_TRACEBACK = re.compile(r"^Cell In\[(\d+)\], (line .*)$", flags=re.MULTILINE)
IN_OLD_TRACEBACK = re.compile(
    r"^<ipython-input-(\d+)-\w+> in (.*)\n(?:(?!<ipython).*\n)*?-+> (\d+) ", flags=re.MULTILINE
)
"""As IPython 7 writes it."""
TIME_SWALLOWS = IPython.version_info < (9, 4)
"""``%time`` shows an exception itself, and the cell goes on."""


def stopped(notebook: Notebook, cell: str) -> ExecutionResult:
    """Run a cell that a guard stops."""
    result = notebook.run(cell)
    assert isinstance(result.error_in_exec, cudalens.DeviceIndexError)
    return result


def blocks(notebook: Notebook) -> list[str]:
    """Return the lines of cells in the traceback that the shell has shown."""
    old = [
        (cell, f"line {line}" + ("" if name.startswith("<") else f", in {name}"))
        for cell, name, line in IN_OLD_TRACEBACK.findall(notebook.out)
    ]
    found = IN_TRACEBACK.findall(notebook.out) or old
    assert {int(cell) for cell, _ in found} <= {notebook.count}
    return [place for _, place in found]


@pytest.fixture
def bare(capsys: pytest.CaptureFixture[str]) -> Iterator[Notebook]:
    """A shell of its own, without the extension."""
    with new_shell() as shell:
        yield Notebook(shell, capsys)


def innermost(trace: TracebackType | None) -> tuple[str, int, str]:
    """Return file, line and function of the frame that raised."""
    frame = traceback.extract_tb(trace)[-1]
    return frame.filename, frame.lineno, frame.name


# --- as if the magic were not there ---------------------------------------------------------------

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


@pytest.mark.parametrize(("wait", "lines"), [("await look_up()", [5, 4, 3]), ("plain()", [5, 3])])
def test_a_finding_names_the_calls_of_the_cell_only(
    notebook: Notebook, wait: str, lines: list[int]
) -> None:
    """Whether the cell awaits or not, the line of the magic called nothing."""
    body = f"def plain():\n    return {BAD}\nasync def look_up(): return plain()\n{wait}"
    stopped(notebook, f"%%cudacheck\n{body}")
    report = cudalens.last_report()
    assert report.prevented
    assert [frame.line for frame in report.frames if frame.is_user] == lines


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


@pytest.mark.parametrize("above", ["# a comment\n", "import os\n", "if True:\n    "])
def test_below_another_line_the_magic_says_where_it_belongs(notebook: Notebook, above: str) -> None:
    result = notebook.run(f"{above}%%cudacheck --nan\nran = True")
    assert notebook.err == "UsageError: %%cudacheck must be the first line of the cell\n"
    assert not result.success and "ran" not in notebook.names


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


def test_where_torch_is_missing_the_cell_is_not_run(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    notebook.run("%%cudacheck\nran = True")
    assert notebook.err.startswith("UsageError: cudalens needs torch")
    assert "ran" not in notebook.names


def test_a_cell_whose_lines_cannot_be_noted_is_checked_and_says_so(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no lines")

    monkeypatch.setattr("cudalens.notebook.cells.typed_lines", fail)
    stopped(notebook, f"%%cudacheck\n{BAD}")
    (line,) = cudalens.last_report().limits
    assert line.startswith("lines of the cell unavailable: ValueError: no lines")


def test_a_cuda_error_of_a_class_that_nobody_may_write_to(notebook: Notebook) -> None:
    """Its report is shown beside it, and the exception is the user's own."""
    cell = FROZEN.replace("int", "str\n    def __str__(self): return self.code")
    result = notebook.run(f"%%cudacheck\n{cell}raise E('CUDA error: mine')")
    assert type(result.error_in_exec).__name__ == "E"
    assert "E: CUDA error: mine" in notebook.out and "FrozenInstance" not in notebook.out
    assert len(notebook.shown) == 1


def test_a_call_by_hand_runs_a_cell(notebook: Notebook) -> None:
    """Whoever calls the magic gets the exception, which is not shown besides."""
    notebook.shell.run_cell_magic("cudacheck", "", "v = 20\nv + 1")
    assert (notebook.names["_"], notebook.names["v"]) == (21, 20)
    with pytest.raises(ZeroDivisionError) as caught:
        notebook.shell.run_cell_magic("cudacheck", "", "1 / 0")
    assert innermost(caught.tb)[1] == 2
    result = notebook.run("get_ipython().run_cell_magic('cudacheck', '-r found', '1 / 0')")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert notebook.out.count("ZeroDivisionError: ") == 1
    assert "run_cell" not in notebook.out.replace("get_ipython().run_cell_magic", "")
    assert notebook.names["found"] is None


@pytest.mark.parametrize("magic", ["run_cell_magic('cudacheck', '', B)", "run_line_magic(*ARGS)"])
def test_a_call_by_hand_counts_as_the_cell_that_makes_it(notebook: Notebook, magic: str) -> None:
    """The shell has raised its count for the next cell by then, or not, by its release."""
    notebook.run(f"B = 'a = 1\\n{BAD}'; ARGS = 'cudacheck', 'for _ in [1]:\\n    {BAD}'")
    result = stopped(notebook, f"get_ipython().{magic}")
    report = cudalens.last_report()
    assert report.source.cell == result.execution_count
    assert f"In [{result.execution_count}] line" in notebook.shown[0]["text/plain"]


# --- one statement --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("%cudacheck 1 + 2", 3),
        ("%cudacheck --fast 'a  b' + \"$x {x}\"", "a  b$x {x}"),
        ("%cudacheck v = 5\nv", 5),
        ("v = %cudacheck 2 * 3\nv", 6),
        ("def f(n):\n    got = %cudacheck n * 2\n    return got\nf(4)", 8),
        ("total = 0\nfor i in range(3):\n    %cudacheck total += i\ntotal", 3),
        ("%cudacheck await __import__('asyncio').sleep(0, 9)", 9),
        ("%cudacheck 3;", None),
        ("on = 4\n%cudacheck on + 1", 5),
    ],
)
def test_one_statement(notebook: Notebook, cell: str, value: Any) -> None:
    result = notebook.run(cell)
    assert result.success, notebook.out
    assert result.result == value


# --- options and help -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell",
    [
        "%%cudacheck --bogus\nran = True",
        "%%cudacheck --max-ops 0\nran = True",
        "%%cudacheck something\nran = True",
        "%cudacheck --bogus ran = True",
        "%cudacheck --fast",
        "%cudacheck on --bogus",
        "%%cudacheck --bogus\nimport asyncio\nawait asyncio.sleep(0)\nran = True",
    ],
)
def test_misuse_is_one_line_and_an_error(notebook: Notebook, cell: str) -> None:
    result = notebook.run(cell)
    assert type(result.error_in_exec).__name__ == "UsageError"
    assert notebook.err.startswith("UsageError: ")
    assert notebook.err.count("\n") == 1
    assert "ran" not in notebook.names


@pytest.mark.parametrize(
    "cell",
    [
        "%cudacheck",
        "%cudacheck --help",
        "%cudacheck -h",
        "%%cudacheck --help",
        "%%cudacheck --help\n",
        "%%cudacheck --help\n\nran = True",
        "%%cudacheck?",
        "%cudacheck?",
    ],
)
def test_every_way_to_ask_shows_the_same_help(notebook: Notebook, cell: str) -> None:
    result = notebook.run(cell)
    assert result.success
    assert magics.HELP.strip() in textwrap.dedent(notebook.out)
    assert "ran" not in notebook.names


@pytest.mark.parametrize("cell", ["%%cudacheck", "%%cudacheck\n", "%%cudacheck --fast\n\n  \n"])
def test_an_empty_cell_says_nothing(notebook: Notebook, cell: str) -> None:
    head, end, body = cell.partition("\n")
    for text in (cell, f"{head} -r found{end}{body}"):
        notebook.names["found"] = before = object()
        assert notebook.run(text).success
        assert (notebook.out, notebook.err, notebook.shown) == ("", "", [])
        assert notebook.names["found"] is (before if text is cell else None)


# --- findings -------------------------------------------------------------------------------------


def test_a_finding_is_shown_once_and_raised(notebook: Notebook) -> None:
    result = stopped(notebook, f"%%cudacheck\n# a comment\nrows = {BAD}")
    assert len(notebook.shown) == 1
    assert set(notebook.shown[0]) == {"text/plain", "text/html"}
    assert "7 is outside the 5 rows" in notebook.shown[0]["text/plain"]
    report = cudalens.last_report()
    assert (report.source.cell, report.source.line) == (result.execution_count, 3)
    assert report.source.text == f"rows = {BAD}"
    assert notebook.run("%%cudacheck\ntable.sum().item()").result == 0.0
    assert notebook.shown == []


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


@pytest.mark.parametrize(
    ("raw", "text", "typed"),
    [
        ("%a\nb", "get_ipython().x\nb\n", ["%a", "b"]),
        ("\n\n%a", "get_ipython().x\n", ["%a"]),
        ("%%a\nb\nc", "get_ipython().x\n", ["%%a"]),
        ("\n%%cudacheck -r x\n%a", "#\n# %%cudacheck -r x\nget_ipython().x\n", ...),
        ("!a \\\n b\nc", "get_ipython().x\nc\n", []),
        (">>> %a\n>>> b", "get_ipython().x\nb\n", []),
    ],
)
def test_typed_lines_are_given_where_they_are_certain(raw: str, text: str, typed: Any) -> None:
    """A magic over several lines, or prompts that were pasted along, move or change the others."""
    lines = counted_lines(raw, "%%cudacheck")
    assert typed_lines(lines, text) == (raw.split("\n") if typed is ... else typed)


def test_a_statement_finding_names_its_line(notebook: Notebook) -> None:
    stopped(notebook, f"a = 1\nrows = %cudacheck {BAD}")
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


# --- sub-commands ---------------------------------------------------------------------------------


def test_on_checks_every_following_cell(notebook: Notebook) -> None:
    notebook.run("%cudacheck on -r found")
    assert notebook.run("1 + 1").result == 2
    result = stopped(notebook, f"a = 1\n{BAD}")
    assert len(notebook.shown) == 1
    assert innermost(result.error_in_exec.__traceback__)[1] == 2
    assert notebook.names["found"] is not None
    assert notebook.run("%cudacheck off").success
    unchecked = notebook.run("F.embedding(ids.cpu(), table.cpu())")  # the CPU looks for itself
    assert isinstance(unchecked.error_in_exec, IndexError)
    assert notebook.shown == []


@pytest.mark.parametrize("cell", [f"%%cudacheck\n{BAD}", f"a = 1\n%cudacheck {BAD}", NESTED])
def test_under_on_a_cell_shows_one_report(notebook: Notebook, cell: str) -> None:
    """A check, or a cell, inside a checked cell does not explain the same failure twice."""
    notebook.run("%cudacheck on")
    stopped(notebook, cell)
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


def test_options_stand_before_or_behind_a_word(notebook: Notebook) -> None:
    """One rule for every sub-command; what is no option there is one line."""
    for line in ("last --no-widgets", "--no-widgets last", "status --fast", "off --no-sync"):
        assert notebook.run(f"%cudacheck {line}").success, line
    notebook.run("%cudacheck --fast on --max-ops 9")
    assert "every following cell is checked" in notebook.out
    assert magics.front_end_of(notebook.shell)._watch.always == Options(fast=True, max_ops=9)
    notebook.run("%cudacheck last --help")
    assert "usage" in notebook.out
    for line, word in (("status --fast x", "'x'"), ("last --bogus", "--bogus")):
        result = notebook.run(f"%cudacheck {line}")
        assert type(result.error_in_exec).__name__ == "UsageError"
        assert word in str(result.error_in_exec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused where there is a GPU")
@pytest.mark.parametrize(
    ("word", "missing"),
    [
        ("last", "no report yet\n"),
        ("explain", "nothing to explain: no exception of torch was shown\n"),
    ],
)
def test_a_report_shown_again_is_bound_and_written_too(
    notebook: Notebook, tmp_path: Path, word: str, missing: str
) -> None:
    """The check was made without the options; a file that cannot be written is named."""
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    notebook.run("1 / 0")  # nothing to explain
    assert notebook.run(f"%cudacheck {word} -r again --html {page}").success
    assert (notebook.out, notebook.shown, notebook.names["again"]) == (missing, [], None)
    assert list(tmp_path.iterdir()) == []
    notebook.run(f"%%cudacheck\n{BAD}")
    assert notebook.run(f"%cudacheck {word} -r again --html {page} --json {data}").success
    assert notebook.out == "".join(f"cudalens: the report is in {at}\n" for at in (page, data))
    report = cudalens.last_report()
    assert notebook.names["again"] is report
    assert page.read_text("utf-8") == report.to_html()
    assert json.loads(data.read_text("utf-8")) == report.to_dict()
    for name in (page / "r.json", tmp_path):  # below a file, and a folder
        assert notebook.run(f"%cudacheck {word} --json {name}").success
        assert f"{name.name} was not written" in notebook.shown[0]["text/plain"]
        assert "the report is in" not in notebook.out


@needs_rehearsal
def test_simulate_turns_the_rehearsal_device_on_and_off(bare: Notebook) -> None:
    bare.run("%load_ext cudalens")
    bare.run("%cudacheck simulate")
    assert bare.out.count("\n") == 1
    assert "Rehearsal" in bare.out
    assert "Not a GPU" in bare.out
    bare.run(SETUP)
    stopped(bare, f"%%cudacheck\n{BAD}")
    assert bare.run("(table + 1).sum().item()").result == 10.0
    bare.run("%cudacheck status")
    assert "a rehearsal and not a GPU" in bare.out
    bare.run("%cudacheck simulate off")
    assert simulate.current() is None
    bare.run("%cudacheck simulate off")
    assert "no rehearsal device" in bare.out


def test_a_refused_simulation_is_one_line(bare: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    bare.run("%load_ext cudalens")
    refused = Mock(side_effect=simulate.SimulationError("restart the kernel first"))
    monkeypatch.setattr("cudalens.simulate.activation.start", refused)
    result = bare.run("%cudacheck simulate")
    assert not result.success
    assert bare.err == "UsageError: restart the kernel first\n"


# --- loading and unloading ------------------------------------------------------------------------


def test_loading_is_silent_and_twice_says_the_usual(bare: Notebook) -> None:
    assert bare.run("%load_ext cudalens").success
    assert (bare.out, bare.err) == ("", "")
    bare.run("%load_ext cudalens")
    assert "already loaded" in bare.out


@pytest.mark.parametrize("loads", [1, 2])
def test_unloading_restores_everything(bare: Notebook, loads: int) -> None:
    """``%load_ext`` loads once; code that calls the hook itself may do so twice."""

    def state() -> Any:
        shell = bare.shell
        return (
            {kind: set(found) for kind, found in shell.magics_manager.magics.items()},
            {name: list(calls) for name, calls in shell.events.callbacks.items()},
            list(shell.input_transformers_post),
            list(shell.input_transformers_cleanup),
            {"showtraceback", "_showtraceback"} & vars(shell).keys(),
            set(shell.user_ns),
        )

    bare.run("1")
    before = state()
    bare.run("%load_ext cudalens")
    for _ in range(loads - 1):
        magics.load(bare.shell)
    bare.run("%cudacheck on")
    bare.run("%%cudacheck\n1")
    assert state()[:3] != before[:3]
    bare.run("%unload_ext cudalens")
    after = state()
    assert after[:5] == before[:5]
    assert {name for name in after[5] - before[5] if not name.startswith("_")} == set()
    assert not PROCESS.is_installed
    assert not bare.run("%%cudacheck\n1").success


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused where there is a GPU")
def test_unloading_ends_the_simulation_that_the_magic_began(bare: Notebook) -> None:
    bare.run("%load_ext cudalens")
    bare.run("%cudacheck simulate")
    bare.run("%unload_ext cudalens")
    assert simulate.current() is None
    with simulate.start(announce=False) as running:
        bare.run("%load_ext cudalens")
        bare.run("%cudacheck simulate")
        bare.run("%unload_ext cudalens")
        assert simulate.current() is running


def test_unloading_gives_a_replaced_magic_back(bare: Notebook) -> None:
    def cudacheck(line: str) -> str:
        return "mine"

    bare.shell.register_magic_function(cudacheck, "line")
    bare.run("%load_ext cudalens")
    bare.run("%unload_ext cudalens")
    assert bare.run("%cudacheck").result == "mine"


LOADING = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
before = set(sys.modules)
shell.run_cell('%load_ext cudalens')
print(*sorted(set(sys.modules) - before))
shell.run_cell('%cudacheck --help')
shell.run_cell('1 + 1')
print('torch' in sys.modules, 'ipywidgets' in sys.modules)
shell.run_cell('%load_ext cudalens')
shell.run_cell('%unload_ext cudalens')
print('cudacheck' in shell.magics_manager.magics['line'], 'torch' in sys.modules)
shell.run_cell('%load_ext cudalens')
shell.run_cell('%cudacheck 1')
print('torch' in sys.modules)
"""


def test_loading_brings_few_modules_and_no_torch() -> None:
    """What a report needs comes with the first one: loading stays at 20 ms."""
    done = python("-c", LOADING, fresh=True)
    lines = done.stdout.splitlines()
    assert lines.count("False False") == 2, done.stderr
    assert lines[-1] == "True"
    brought = lines[0].split()
    ours = [name for name in brought if name.startswith("cudalens.")]
    assert 0 < len(ours) <= 22
    late = {"cudalens.core.report_types", "cudalens.source.stack", "pure_eval"}
    assert not (late | {"importlib.metadata", "uuid", "difflib"}) & {*brought}


@pytest.mark.parametrize(("word", "meant"), [("explian", "explain"), ("stauts", "status")])
def test_a_misspelt_command_is_refused_with_the_one_that_was_meant(
    notebook: Notebook, word: str, meant: str
) -> None:
    notebook.run(f"%cudacheck {word}")
    assert notebook.err.endswith(f"did you mean %cudacheck {meant}?\n")


def test_a_variable_that_is_named_much_like_a_command_is_a_statement(notebook: Notebook) -> None:
    notebook.run("explian = 3")
    assert notebook.run("%cudacheck explian").result == 3


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


# --- the magics alone -----------------------------------------------------------------------------


@pytest.fixture
def front_end(monkeypatch: pytest.MonkeyPatch) -> magics.FrontEnd:
    """Return the magics of a shell that does nothing."""
    return magics.FrontEnd(SimpleNamespace(user_ns={"known": 1}, user_global_ns={}, kernel=None))


@pytest.mark.parametrize(
    ("line", "cell", "said"),
    [
        ("--fast", None, "nothing to check: give a statement, or put %%cudacheck over a cell"),
        ("f(x)", "a", "%%cudacheck takes options only, not 'f(x)': put the code below it"),
        ("status --fast x", None, "%cudacheck status takes options only, not 'x'"),
        ("simulate off --nan 1 2", None, "%cudacheck simulate off takes options only, not '1 2'"),
        (
            "stauts",
            None,
            "there is no command and no variable 'stauts'; did you mean %cudacheck status?",
        ),
    ],
)
def test_a_misuse_says_what_to_write(
    front_end: magics.FrontEnd, line: str, cell: str | None, said: str
) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
        front_end.cudacheck(line, cell)


def test_without_torch_a_check_says_why_it_cannot_be_imported(
    front_end: magics.FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = Mock(side_effect=ImportError("libcudart.so is missing"))
    monkeypatch.setattr(magics.importlib, "import_module", missing)
    said = "cudalens needs torch, which cannot be imported here (libcudart.so is missing)"
    for words in (("", "a"), ("known", None), ("on", None), ("explain", None)):
        with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
            front_end.cudacheck(*words)


class Checked(nullcontext[None]):
    """A session that does nothing."""

    shown_error: BaseException | None = None


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Checked, Options, bool]]:
    """Return each session that was shown, its options, and whether its error was explained."""
    shown: list[tuple[Checked, Options, bool]] = []
    monkeypatch.setattr(magics, "new_session", lambda options: Checked())
    monkeypatch.setattr(
        magics, "finish", lambda shell, it, options, is_shown: shown.append((it, options, is_shown))
    )
    return shown


def test_a_variable_of_a_function_may_be_named_much_like_a_command(
    front_end: magics.FrontEnd, sessions: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [compile("stauts + 1", "a", "eval")]
    monkeypatch.setattr(magics.statement, "compiled", lambda shell, text: parts)
    assert front_end.cudacheck("--fast stauts", None, {"stauts": 3}) == 4
    assert [options for _, options, _ in sessions] == [Options(fast=True)]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), None])
@pytest.mark.parametrize("before", [True, False])
def test_an_error_of_a_statement_is_explained_once(
    front_end: magics.FrontEnd, sessions: list[Any], error: BaseException | None, before: bool
) -> None:
    cell = cells._Cell(explained=error if before else None)
    front_end._watch._cells = [cell]
    with nullcontext() if error is None else pytest.raises(type(error)):
        with front_end._reported(Options()):
            if error is not None:
                raise error
    ((session, _, is_shown),) = sessions
    assert (session.shown_error, is_shown) == (None, before and error is not None)
    assert cell.explained is error


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("is_explained", [True, False])
def test_what_time_shows_within_a_statement_is_its_error(
    front_end: magics.FrontEnd, sessions: list[Any], is_new: bool, is_explained: bool
) -> None:
    error = ValueError("mine")
    cell = cells._Cell(explained=error if is_explained else None)
    front_end._watch._cells = [cell]
    cell.shown_by_time = None if is_new else error
    with front_end._reported(Options()):
        cell.shown_by_time = error
    ((session, _, is_shown),) = sessions
    assert (session.shown_error, is_shown) == ((error, is_explained) if is_new else (None, False))


def test_the_commands_say_what_every_cell_is_from_now_on(
    front_end: magics.FrontEnd,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("cudalens.session.process.status", lambda: "the rest")
    front_end.cudacheck("on --fast")
    assert front_end._watch.always == Options(fast=True)
    front_end.cudacheck("status")
    front_end.cudacheck("off")
    assert front_end._watch.always is None
    front_end.cudacheck("status")
    assert capsys.readouterr().out.splitlines() == [
        "cudacheck is on: every following cell is checked",
        "cells:        checked",
        "the rest",
        "cudacheck is off",
        "cells:        checked under %%cudacheck only; %cudacheck on: every cell",
        "the rest",
    ]


@pytest.mark.parametrize("has_error", [True, False])
def test_explain_is_given_the_variables_the_last_error_and_what_cuda_printed(
    front_end: magics.FrontEnd, monkeypatch: pytest.MonkeyPatch, has_error: bool
) -> None:
    explain, error = Mock(return_value=None), ValueError("mine")
    monkeypatch.setattr("cudalens.session.explain.explain", explain)
    monkeypatch.setattr(front_end._printed, "text", lambda: "an assertion")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    if not has_error:
        monkeypatch.delattr(sys, "last_value")
    front_end.cudacheck("explain")
    names = front_end.shell.user_ns
    explain.assert_called_once_with(names, error if has_error else None, "an assertion")


def test_a_report_that_is_shown_again_says_which_file_was_not_written(
    front_end: magics.FrontEnd, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = make_report(limits=("one is unknown",))
    write, publish = Mock(return_value=([Path("a.html")], ["b.json was not written"])), Mock()
    monkeypatch.setattr("cudalens.session.exit.write_files", write)
    monkeypatch.setattr(magics, "publish", publish)
    monkeypatch.setattr(cudalens, "last_report", lambda: report)
    front_end.cudacheck("last -r again --html a.html --json b.json --no-widgets")
    write.assert_called_once_with(report, "a.html", "b.json")
    found = front_end.shell.user_ns["again"]
    assert found.limits == ("one is unknown", "b.json was not written")
    publish.assert_called_once_with(front_end.shell, found, widgets=False)
    assert capsys.readouterr().out == "cudalens: the report is in a.html\n"


class Flushed(io.StringIO):
    """Standard output that knows how much of it was handed on."""

    seen = ""

    def flush(self) -> None:
        self.seen = self.getvalue()


def test_a_rehearsal_is_announced_before_it_starts_and_ends_with_the_magics_that_began_it(
    front_end: magics.FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, started, seen = Flushed(), Mock(), list[str]()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.delitem(sys.modules, magics._ACTIVATION)
    results = iter([started, None])  # one that is running is not started again
    monkeypatch.setattr(
        "cudalens.session.process.start_simulation",
        lambda: seen.append(out.seen) or next(results),  # type: ignore[func-returns-value]
    )
    for _ in range(2):
        front_end.cudacheck("simulate")
    assert seen[0] == "starting the rehearsal device ...\n"
    for name in ("_watch", "_printed"):
        monkeypatch.setattr(front_end, name, Mock())
    front_end.shell.magics_manager = SimpleNamespace(magics={"line": {}, "cell": {}})
    front_end.detach()
    started.stop.assert_called_once_with()


def test_the_asserts_that_cuda_prints_are_listened_to_while_the_extension_is_loaded(
    bare: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a magic of somebody else's is back in each of its kinds."""
    done: list[str] = []
    for name in ("attach", "detach"):
        monkeypatch.setattr(magics.PrintedAsserts, name, lambda self, it=name: done.append(it))
    found = bare.shell.magics_manager.magics
    found["cell"]["cudacheck"] = theirs = object()
    magics.load(bare.shell)
    assert done == ["attach"] and {"cudacheck", "%cudacheck"} <= found["line"].keys()
    magics.load(bare.shell)
    magics.unload(bare.shell)
    magics.unload(bare.shell)
    assert done == ["attach", "detach"]
    assert found["cell"]["cudacheck"] is theirs
    assert not {"cudacheck", "%cudacheck"} & found["line"].keys()


def test_a_shell_that_nobody_holds_is_freed_without_unloading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the first shell of a process IPython itself keeps the module."""
    for _ in range(2):
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        with new_shell() as shell:
            magics.load(shell)
            dropped = weakref.ref(shell)
        del shell
        monkeypatch.undo()
        gc.collect()
    assert dropped() is None
