"""The magics: what each does in a real shell, and alone."""

from __future__ import annotations

import gc
import io
import json
import re
import sys
import textwrap
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from IPython.core.error import UsageError

import cudalens
from cudalens import simulate
from cudalens.guards.process import PROCESS
from cudalens.notebook import cells, magics
from cudalens.session.options import Options
from tests.builders import make_report
from tests.processes import python
from tests.releases import needs_rehearsal
from tests.shells import BAD, SETUP, Notebook, innermost, new_shell


@pytest.fixture
def bare(capsys: pytest.CaptureFixture[str]) -> Iterator[Notebook]:
    """A shell of its own, without the extension."""
    with new_shell() as shell:
        yield Notebook(shell, capsys)


# --- whole cells ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("wait", "lines"), [("await look_up()", [5, 4, 3]), ("plain()", [5, 3])])
def test_a_finding_names_the_calls_of_the_cell_only(
    notebook: Notebook, wait: str, lines: list[int]
) -> None:
    """Whether the cell awaits or not, the line of the magic called nothing."""
    body = f"def plain():\n    return {BAD}\nasync def look_up(): return plain()\n{wait}"
    notebook.stopped(f"%%cudacheck\n{body}")
    report = cudalens.last_report()
    assert report.prevented
    assert [frame.line for frame in report.frames if frame.is_user] == lines


@pytest.mark.parametrize("above", ["# a comment\n", "import os\n", "if True:\n    "])
def test_below_another_line_the_magic_says_where_it_belongs(notebook: Notebook, above: str) -> None:
    result = notebook.run(f"{above}%%cudacheck --nan\nran = True")
    assert notebook.err == "UsageError: %%cudacheck must be the first line of the cell\n"
    assert not result.success and "ran" not in notebook.names


def test_where_torch_is_missing_the_cell_is_not_run(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    notebook.run("%%cudacheck\nran = True")
    assert notebook.err.startswith("UsageError: cudalens needs torch")
    assert "ran" not in notebook.names


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
    result = notebook.stopped(f"%%cudacheck\n# a comment\nrows = {BAD}")
    assert len(notebook.shown) == 1
    assert set(notebook.shown[0]) == {"text/plain", "text/html"}
    assert "7 is outside the 5 rows" in notebook.shown[0]["text/plain"]
    report = cudalens.last_report()
    assert (report.source.cell, report.source.line) == (result.execution_count, 3)
    assert report.source.text == f"rows = {BAD}"
    assert notebook.run("%%cudacheck\ntable.sum().item()").result == 0.0
    assert notebook.shown == []


# --- sub-commands ---------------------------------------------------------------------------------


def test_on_checks_every_following_cell(notebook: Notebook) -> None:
    notebook.run("%cudacheck on -r found")
    assert notebook.run("1 + 1").result == 2
    result = notebook.stopped(f"a = 1\n{BAD}")
    assert len(notebook.shown) == 1
    assert innermost(result.error_in_exec.__traceback__)[1] == 2
    assert notebook.names["found"] is not None
    assert notebook.run("%cudacheck off").success
    unchecked = notebook.run("F.embedding(ids.cpu(), table.cpu())")  # the CPU looks for itself
    assert isinstance(unchecked.error_in_exec, IndexError)
    assert notebook.shown == []


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
    bare.stopped(f"%%cudacheck\n{BAD}")
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
"""


def test_loading_brings_few_modules_and_no_torch() -> None:
    """What a report needs comes with the first one: loading stays at 20 ms."""
    done = python("-c", LOADING, fresh=True)
    lines = done.stdout.splitlines()
    assert lines.count("False False") == 2, done.stderr
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
