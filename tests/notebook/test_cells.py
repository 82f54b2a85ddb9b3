"""What cells that are not checked do to the check of others."""

from __future__ import annotations

import sys
from linecache import getline
from pathlib import Path
from traceback import walk_tb
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from IPython.core.compilerop import CachingCompiler

from cudalens.core.errors import DeviceIndexError, NonFiniteError
from cudalens.guards.process import PROCESS
from cudalens.notebook import cells, magics
from cudalens.notebook.cells import CellWatch, _Cell
from cudalens.session.options import Options
from cudalens.session.succession import SUCCESSION
from cudalens.source.files import CELLS, CellRegistry
from tests.shells import Notebook, new_shell

FAST, NAN = Options(fast=True), Options(nan=True)

MADE = "%%cudacheck\ny = torch.arange(3, device='cuda')"


@pytest.mark.parametrize(("silent", "is_kept"), [(True, True), (False, False)])
def test_what_a_front_end_runs_unseen_ends_no_succession(
    notebook: Notebook, silent: bool, is_kept: bool
) -> None:
    """A front end only looks at the variables. A cell of the user's that calls may write."""
    notebook.run(MADE)
    assert SUCCESSION._earlier is not None
    notebook.shell.run_cell("vars().get('y').device", silent=silent)
    assert (SUCCESSION._earlier is not None) is is_kept


def test_after_a_call_by_hand_the_shell_shows_the_next_exception(notebook: Notebook) -> None:
    """What a check by hand raises is for the code that asked for it, that of a cell for all."""
    notebook.shell.run_cell_magic("cudacheck", "", "z = 1")
    assert notebook.names["z"] == 1
    notebook.run("1 / 0")
    assert notebook.out.count("ZeroDivisionError: ") == 1


def test_options_of_a_cell_do_not_check_the_next(notebook: Notebook) -> None:
    checked = []
    notebook.names["note"] = lambda: checked.append(PROCESS.is_installed)
    for cell in ("%%cudacheck\nnote()", "note()", "%cudacheck note()", "note()"):
        notebook.run(cell)
    assert checked == [True, False, True, False]


def test_a_debugger_is_shown_a_cell_as_it_was_typed(notebook: Notebook) -> None:
    """And is given what the shell gives it; Python has another text for the magic's line."""
    notebook.run("%%cudacheck\n1 / 0")
    name = sys.last_traceback.tb_next.tb_frame.f_code.co_filename
    watch, shown = magics.front_end_of(notebook.shell)._watch, []
    watch._debugger = lambda *args, **options: shown.append((getline(name, 1), args, options))
    notebook.shell.InteractiveTB.debugger(3, force=True)
    assert shown == [("%%cudacheck\n", (3,), {"force": True})]
    assert getline(name, 1) == "# %%cudacheck\n"


# --- the text of a cell ---------------------------------------------------------------------------


@pytest.fixture
def watch() -> CellWatch:
    """Return the cells of a shell that does nothing."""
    return CellWatch(
        SimpleNamespace(user_ns={"onn": 1}, input_transformers_cleanup=[], execution_count=5)
    )


def read(watch: CellWatch, text: str) -> str:
    return "".join(watch._read(text.splitlines(keepends=True)))


@pytest.mark.parametrize(
    ("text", "read_as", "options"),
    [
        ("%%cudacheck\na\nb\n", "# %%cudacheck\na\nb\n", Options()),
        ("%%cudacheck --fast\na\n", "# %%cudacheck --fast\na\n", Options(fast=True)),
        ("  %%cudacheck\na\n", "# %%cudacheck\na\n", Options()),
        ("%cudacheck --nan f(x)\n", "f(x)\n", Options(nan=True)),
        ("%cudacheck onn\n", "onn\n", Options()),
        ("a\n", "a\n", None),
        ("%%cudacheck --help\na\n", None, None),
        ("%%cudacheck f(x)\na\n", None, None),
        ("%%cudacheck --bogus\na\n", None, None),
        ("%%cudacheck", "# %%cudacheck\n", Options()),
        ("%cudacheck f(x)\nb\n", None, None),
        ("%cudacheck off\n", "%cudacheck off\n\n", None),
        ("%cudacheck onnn\n", "%cudacheck onnn\n\n", None),
        ("%cudacheck\n", "%cudacheck\n\n", None),
        ("%cudachecked f(x)\n", None, None),
        ("%%time\n%%cudacheck\na\n", None, None),
        ("%%cudacheck\n%%time\na\n", "%%time\na\n", Options()),
    ],
)
def test_the_magic_that_checks_a_whole_cell_becomes_a_comment(
    watch: CellWatch, text: str, read_as: str | None, options: Options | None
) -> None:
    """``None`` stands for the text itself: the magic answers what it does not take."""
    assert read(watch, text) == (text if read_as is None else read_as)
    assert watch._next.options == options


def test_blank_lines_above_stay_and_those_below_a_comment_stay_blank(watch: CellWatch) -> None:
    blank = "#\N{NO-BREAK SPACE}"
    assert read(watch, "\n%%cudacheck\na\n") == f"{blank}\n# %%cudacheck\na\n"
    assert watch._comments == {blank, "# %%cudacheck"}
    assert read(watch, "\na\n") == "\na\n"
    assert watch._comments == set()


def test_inside_a_running_cell_the_magic_stays_for_the_magic_itself(watch: CellWatch) -> None:
    whole = _Cell(typed=["%%time", "a", "b"], number=4)
    watch._cells = [whole]
    assert read(watch, "%%cudacheck\nc\n") == "%%cudacheck\nc\n"
    assert (watch._next.options, watch._next.part_of) == (None, None)
    assert read(watch, "a\nb\n") == "# %%time\na\nb\n"
    assert watch._next.part_of is whole and watch._next.typed == whole.typed
    watch._is_by_hand = True
    assert read(watch, "%%cudacheck --fast\nc\n") == "# %%cudacheck --fast\nc\n"
    assert watch._next.options == Options(fast=True) and watch._next.is_by_hand


def test_where_torch_is_missing_the_magic_says_so(
    watch: CellWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells.importlib, "import_module", Mock(side_effect=ImportError))
    assert read(watch, "%%cudacheck\na\n") == "%%cudacheck\na\n"
    assert watch._next.options is None


def test_an_interrupt_while_a_cell_is_read_is_raised_by_the_cell(
    watch: CellWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_read_cell", Mock(side_effect=KeyboardInterrupt))
    assert read(watch, "a\n") == "raise KeyboardInterrupt\n"


# --- the check of a cell --------------------------------------------------------------------------


class Session:
    """A session that takes note of what is done with it."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.late: BaseException | None = None
        self.is_followed = False

    def open(self) -> None:
        self.done.append("opened")

    def internal_error(self, line: str) -> None:
        self.done.append(line)

    def close(self, error: BaseException | None) -> BaseException | None:
        self.done.append(("closed", error))
        return self.late

    def remove(self) -> None:
        self.done.append("removed")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    """Return the session that a cell gets; ``done`` has what was shown of it, too."""
    made = Session()
    monkeypatch.setattr(cells, "new_session", lambda options: made)
    monkeypatch.setattr(
        cells, "finish", lambda shell, it, options, is_shown: made.done.append((options, is_shown))
    )
    return made


LOUD, SILENT = SimpleNamespace(silent=False), SimpleNamespace(silent=True)


@pytest.mark.parametrize(
    ("own", "always", "typed", "info", "inner", "opens"),
    [
        (None, None, "a", LOUD, False, None),
        (FAST, None, "a", LOUD, False, FAST),
        (FAST, NAN, "a", LOUD, False, FAST),
        (None, NAN, "a", LOUD, False, NAN),
        (None, NAN, "a", SILENT, False, None),
        (FAST, NAN, "a", SILENT, False, FAST),
        (None, NAN, "a", LOUD, True, None),
        (FAST, NAN, "a", LOUD, True, FAST),
        (None, NAN, "%cudacheck off", LOUD, False, None),
        (None, NAN, " %unload_ext cudalens ", LOUD, False, None),
        (None, NAN, "%cudacheck off --fast", LOUD, False, NAN),
    ],
)
def test_which_cells_are_checked(
    watch: CellWatch, session: Session, own: Options | None, always: Options | None, typed: str,
    info: Any, inner: bool, opens: Options | None,
) -> None:  # fmt: skip
    cell = _Cell(options=own, typed=["", typed])
    watch.always = always
    watch._cells = [*([_Cell(session=Mock())] if inner else []), cell]
    watch._open(cell, info)
    assert cell.options == opens
    assert (cell.session is session) is cell.was_checked is (opens is not None)
    assert session.done == (["opened"] if opens else [])
    assert session.is_followed is (opens is not None and not inner)


def test_a_call_by_hand_is_followed_by_nobody(watch: CellWatch, session: Session) -> None:
    cell = _Cell(options=FAST, is_by_hand=True)
    watch._cells = [cell]
    watch._open(cell, LOUD)
    assert not session.is_followed


def test_a_finding_of_a_cell_before_is_kept_and_the_check_opened(
    watch: CellWatch, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = DeviceIndexError("found", None)
    opened = Mock(side_effect=[late, None])
    monkeypatch.setattr(session, "open", opened)
    cell = _Cell(options=FAST)
    watch._open(cell, LOUD)
    assert (cell.late, cell.was_checked, opened.call_count) == (late, True, 2)


def test_a_cell_whose_check_cannot_be_opened_does_not_run(
    watch: CellWatch, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, noted in ((ValueError("ours"), True), (KeyboardInterrupt(), False)):
        monkeypatch.setattr(session, "open", Mock(side_effect=error))
        cell = _Cell(options=FAST)
        with pytest.raises(type(error)) as caught:
            watch._open(cell, LOUD)
        assert (cell.session, cell.was_checked) == (None, False)
        assert (getattr(caught.value, "__notes__", []) == [cells.NOT_OPENED]) is noted


def test_what_went_wrong_as_a_cell_began_is_a_limit_or_the_users_interrupt(
    watch: CellWatch, session: Session
) -> None:
    cell = _Cell(options=FAST, failure=ValueError("ours"))
    watch._open(cell, LOUD)
    assert session.done[0] == "opened" and "ours" in session.done[1]
    with pytest.raises(KeyboardInterrupt):
        watch._open(_Cell(options=FAST, failure=KeyboardInterrupt()), LOUD)


def test_a_cell_is_closed_once_and_its_report_shown(watch: CellWatch, session: Session) -> None:
    error = ValueError("mine")
    session.late = DeviceIndexError("found", None)
    cell = _Cell(options=FAST, session=session, explained=error)  # type: ignore[arg-type]
    assert watch._close(cell, error) is session.late
    assert watch._close(cell, error) is None
    assert session.done == [("closed", error), "removed", (FAST, True)]
    for explained, left in ((error, None), (None, error), (ValueError(), error)):
        session.done.clear()
        cell = _Cell(session=session, explained=explained)  # type: ignore[arg-type]
        watch._close(cell, left)
        assert session.done[-1] == (Options(), False)


@pytest.mark.parametrize(("was_checked", "name", "bound"), [(False, "found", True),
    (True, "found", False), (False, None, False)])  # fmt: skip
def test_the_variable_of_a_cell_that_did_not_run_holds_no_earlier_report(
    watch: CellWatch, was_checked: bool, name: str | None, bound: bool
) -> None:
    watch.shell.user_ns["found"] = "earlier"
    cell = _Cell(options=Options(report=name), was_checked=was_checked)
    assert watch._closed(cell, None) is None
    assert (watch.shell.user_ns["found"] is None) is bound


def test_a_failure_of_ours_at_the_end_is_a_line_and_an_interrupt_comes_out(
    watch: CellWatch, session: Session, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for error, comes_out in ((ValueError("ours"), False), (KeyboardInterrupt(), True)):
        monkeypatch.setattr(session, "close", Mock(side_effect=error))
        cell = _Cell(options=FAST, was_checked=True, session=session)  # type: ignore[arg-type]
        assert watch._closed(cell, None) is (error if comes_out else None)
        assert cell.session is None and session.done[-1] == "removed"
        assert ("ours" in capsys.readouterr().err) is not comes_out


def test_an_exception_that_a_check_inside_has_explained_is_remembered(watch: CellWatch) -> None:
    error, other = ValueError("mine"), ValueError("another")
    assert not watch.note_explained(error)
    assert watch.shown_by_time is None
    watch._cells = [_Cell(), _Cell(shown_by_time=other)]
    assert [watch.note_explained(it) for it in (error, error, other)] == [False, True, False]
    assert watch._cells[0].explained is None
    assert watch.shown_by_time is other


def test_a_cell_is_over_once_its_code_does_not_run() -> None:
    async def run() -> None:
        pass

    going = run()
    assert _Cell().is_over and not _Cell(run=going).is_over
    going.close()
    assert _Cell(run=going).is_over


@pytest.mark.parametrize(
    ("silent", "raw", "ends"),
    [
        (True, "a", (True, True)), (False, "a", (False, True)), (False, "  ", (False, False)),
        (False, None, (False, True)),
    ],
)  # fmt: skip
def test_the_end_of_a_cell_is_told_by_one_event_or_the_other(
    watch: CellWatch, monkeypatch: pytest.MonkeyPatch, silent: bool, raw: str | None,
    ends: tuple[bool, bool],
) -> None:  # fmt: skip
    ended: list[Any] = []
    monkeypatch.setattr(watch, "_end", ended.append)
    watch._after_any()
    watch._after(None)
    assert ended == []
    watch._cells = [_Cell(is_silent=silent)]
    watch._after_any()
    assert bool(ended) is ends[0]
    ended.clear()
    watch._after(None if raw is None else SimpleNamespace(info=SimpleNamespace(raw_cell=raw)))
    assert bool(ended) is ends[1]


@pytest.mark.parametrize(
    ("comments", "line", "shown"),
    [
        ({"# %%cudacheck"}, "   1 # %%cudacheck", "   1 %%cudacheck"),
        ({"# %%cudacheck"}, "   1 # another", "   1 # another"),
        ({"#\N{NO-BREAK SPACE}"}, "      1 #\N{NO-BREAK SPACE}", "      1 "),
        ({""}, "   1 # ", "   1 # "),
        (set(), "   1 # %%cudacheck", "   1 # %%cudacheck"),
    ],
)
def test_a_traceback_shows_the_lines_of_magics_as_they_were_typed(
    watch: CellWatch, comments: set[str], line: str, shown: str
) -> None:
    printed: list[Any] = []
    watch._print = lambda kind, error, lines: printed.append(lines)
    watch._comments = comments
    watch._print_traceback(ValueError, ValueError("mine"), [line])
    watch._comments, watch._comments_of = set(), {__file__: comments, "other": {"# x"}}
    try:
        raise ValueError("mine")
    except ValueError as error:
        watch._print_traceback(ValueError, error, [line, "# x"])
    assert printed == [[shown], [shown, "# x"]]


# --- a cell that the shell runs -------------------------------------------------------------------


async def body() -> None:
    """Stand for the code of a cell."""


@pytest.mark.parametrize("failing", ["_begun", "_open", None])
@pytest.mark.parametrize("has_cell", [True, False])
def test_code_whose_check_cannot_be_opened_is_dropped_and_another_raises(
    watch: CellWatch, monkeypatch: pytest.MonkeyPatch, failing: str | None, has_cell: bool
) -> None:
    code, error = body(), ValueError("ours")
    cell = _Cell()
    watch._cells = [cell] if has_cell else []
    watch._run_nodes = lambda *args, **options: code
    watch.shell.run_code = lambda code, result: (code, result)
    monkeypatch.setattr(watch, "_begun", lambda info: cell)
    monkeypatch.setattr(watch, "_open", lambda cell, info: None)
    if failing:
        monkeypatch.setattr(watch, failing, Mock(side_effect=error))
    result = SimpleNamespace(info=SILENT)
    made = watch._run_checked([], "<the cell>", result=result)
    assert (made is code) is (code.cr_frame is not None) is (failing is None)
    if failing:
        with pytest.raises(ValueError, match="ours"):
            exec(made[0])
        assert (made[0].co_filename, made[1]) == ("<the cell>", result)
        assert cell.run is (made if has_cell else None)
    code.close()


def test_what_is_no_cell_is_run_as_it_is(watch: CellWatch) -> None:
    watch._run_nodes = Mock(return_value="theirs")
    assert watch._run_checked([], "a", "last", compiler=3) == "theirs"
    watch._run_nodes.assert_called_once_with([], "a", "last", compiler=3)


@pytest.mark.parametrize(
    ("cells", "silent", "told"),
    [
        ("", False, ["any", "one"]), ("", True, ["any"]), ("noted", False, []),
        ("noted running", False, ["any", "one"]), ("running noted", False, []),
    ],
)  # fmt: skip
def test_a_cell_of_whose_beginning_nobody_has_told_begins_where_it_runs(
    watch: CellWatch, monkeypatch: pytest.MonkeyPatch, cells: str, silent: bool, told: list[str]
) -> None:
    going, seen = body(), list[str]()

    def before_any() -> None:
        watch._cells.append(_Cell())
        seen.append("any")

    monkeypatch.setattr(watch, "_before_any", before_any)
    monkeypatch.setattr(watch, "_before", lambda info: seen.append("one"))
    watch._cells = [_Cell(run=going if kind == "running" else None) for kind in cells.split()]
    assert watch._begun(SimpleNamespace(silent=silent)) is watch._cells[-1]
    assert seen == told
    going.close()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CellRegistry:
    """Return what is known of the cells of a shell that keeps no map of their names."""
    made = CellRegistry()
    monkeypatch.setattr(cells, "CELLS", made)
    return made


@pytest.fixture
def named(watch: CellWatch) -> CellWatch:
    """Return the cells of a shell that calls the code of each as its text."""
    watch.shell.compile = SimpleNamespace(get_code_name=lambda raw, text, number: text)
    return watch


def note(
    watch: CellWatch, cell: _Cell, text: str, *, stores: bool = False, number: int = 7
) -> None:
    """Note the name of a cell that runs inside those that do."""
    watch._cells.append(cell)
    info = SimpleNamespace(raw_cell=text, transformed_cell=text, store_history=stores)
    watch._note_name(cell, info, number)


def test_the_outermost_cell_has_its_number_and_one_inside_that_of_its_place(
    named: CellWatch, registry: CellRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that goes into the history has its own; any other is named by what runs it."""
    whole = _Cell(typed=["%%time", "a"])
    registry.titles["whole"] = "of an earlier one"
    note(named, whole, "whole", number=3)
    assert (whole.number, registry.numbers_of_shell, registry.titles) == (3, {"whole": 3}, {})
    note(named, stored := _Cell(), "stored", stores=True, number=4)
    assert (stored.number, registry.numbers_of_shell) == (4, {"whole": 3, "stored": 4})
    for cell in (_Cell(part_of=whole), _Cell(is_by_hand=True)):
        note(named, cell, "inside")
        assert (cell.number, registry.numbers["inside"]) == (3, 3)
    note(named, _Cell(), "other")
    monkeypatch.setattr(cells._ipython, "running_script", lambda: "a.ipynb")
    note(named, other := _Cell(), "of a script")
    assert (other.number, registry.numbers["other"]) == (None, None)
    assert registry.titles == {
        "other": "<cell 3 run by In [3]>",
        "of a script": "<cell 4 run by In [3] from a.ipynb>",
    }


def test_cells_inside_one_without_a_number_have_none(
    named: CellWatch, registry: CellRegistry
) -> None:
    named._cells = [_Cell()]
    note(named, cell := _Cell(is_by_hand=True), "inside")
    assert (cell.number, registry.titles["inside"]) == (None, "<cell 1 run by In [0]>")


def test_a_shell_that_keeps_the_names_of_its_cells_is_asked_for_them(
    named: CellWatch, registry: CellRegistry
) -> None:
    named.shell.compile._filename_map = {"whole": 3}
    named._comments = {"# %%time"}
    note(named, _Cell(typed=["%%time", "a"]), "# %%time\na")
    assert registry.numbers_of_shell == {}
    assert registry.typed == {"# %%time\na": ("%%time", "a")}
    assert named._comments_of == {"# %%time\na": {"# %%time"}}


# --- the end of a cell ----------------------------------------------------------------------------


def ended(raw: str = "a", *, stores: bool = True, error: BaseException | None = None) -> Any:
    """Return the result of a cell."""
    info = SimpleNamespace(raw_cell=raw, store_history=stores)
    return SimpleNamespace(info=info, error_in_exec=error, success=error is None)


@pytest.fixture
def ending(watch: CellWatch) -> CellWatch:
    """Return the cells of a shell with a history, whose last one is cell 2."""
    watch.shell.history_manager = SimpleNamespace(input_hist_parsed=["", "one", "two"])
    watch.shell.showtraceback = Mock()
    watch._cells = [_Cell(number=2)]
    return watch


@pytest.mark.parametrize(
    ("raw", "stores", "number", "kept"),
    [
        ("%%cudacheck --nan\nx\n", True, 2, "%%cudacheck --nan\nx"),
        ("\n%cudacheck x", True, 2, "\n%cudacheck x"),
        ("x = 1\n%cudacheck x", True, 2, "two"),
        ("%%cudachecks\nx", True, 2, "two"),
        ("%%cudacheck\nx", False, 2, "two"),
        ("%%cudacheck\nx", True, None, "two"),
    ],
)
def test_the_history_has_the_magic_above_a_cell(
    ending: CellWatch, raw: str, stores: bool, number: int | None, kept: str
) -> None:
    ending._cells[-1].number = number
    ending._end(ended(raw, stores=stores))
    assert ending.shell.history_manager.input_hist_parsed == ["", "one", kept]
    assert ending._cells == []


@pytest.mark.parametrize(
    ("version", "is_beside", "report", "said"),
    [
        ((8, 13), False, None, "cudalens: mine\n"), ((8, 14), False, None, ""),
        ((8, 13), True, None, "cudalens: try: f(y)\n"), ((8, 13), True, "its own", ""),
    ],
)  # fmt: skip
def test_an_old_shell_has_the_notes_of_an_exception_printed(
    ending: CellWatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    version: tuple[int, int], is_beside: bool, report: object, said: str,
) -> None:  # fmt: skip
    """Beside its report the one action alone, which an error that has a report says itself."""
    monkeypatch.setattr(cells._ipython, "version", lambda: version)
    monkeypatch.setattr(cells, "is_reported", lambda error, it: is_beside)
    monkeypatch.setattr(cells, "action_line", lambda it: "try: f(y)")
    error = ValueError("bad")
    error.__notes__ = ["cudalens: mine", "of the user"]
    error.report = report  # type: ignore[attr-defined]
    ending._end(ended(error=error))
    assert capsys.readouterr().err == said


LATE, EARLIER, MINE = (
    DeviceIndexError("late", None),
    DeviceIndexError("e", None),
    ValueError("mine"),
)


@pytest.mark.parametrize(
    ("closed", "kept", "error", "shown", "left"),
    [
        (LATE, None, None, LATE, LATE), (None, EARLIER, None, EARLIER, EARLIER),
        (LATE, EARLIER, None, LATE, LATE), (LATE, None, MINE, LATE, MINE),
        (None, None, MINE, None, MINE), (None, None, None, None, None),
    ],
)  # fmt: skip
def test_what_comes_to_light_where_a_cell_ends_is_shown_and_ends_a_good_one(
    ending: CellWatch, monkeypatch: pytest.MonkeyPatch, closed: BaseException | None,
    kept: BaseException | None, error: BaseException | None, shown: BaseException | None,
    left: BaseException | None,
) -> None:  # fmt: skip
    given: list[Any] = []
    monkeypatch.setattr(ending, "_closed", lambda cell, error: given.append(error) or closed)
    monkeypatch.setattr(cells, "give_line", lambda shell, error: given.append(error))
    ending._cells[-1].late = kept
    result = ended(error=error)
    ending._end(result)
    assert given == [error, *([shown] if shown else [])]
    calls = [call.args[0] for call in ending.shell.showtraceback.call_args_list]
    assert calls == ([(type(shown), shown, None)] if shown else [])
    assert result.error_in_exec is left


def test_the_innermost_cell_ends_and_what_is_timed_is_kept_until_all_have(
    ending: CellWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``%time`` has shown is the error of its cell, where the shell knows of none."""
    errors: list[Any] = []
    monkeypatch.setattr(ending, "_closed", lambda cell, error: errors.append(error))
    outer, inner = _Cell(number=2), _Cell(shown_by_time=MINE)
    ending._cells, ending._timed = [outer, inner], {"f(x)": None}
    ending._end(None)
    assert (ending._cells, ending._timed) == ([outer], {"f(x)": None})
    ending._end(None)
    assert (ending._cells, ending._timed, errors) == ([], {}, [MINE, None])


# --- tracebacks -----------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def forward(self, error: BaseException) -> None:
        raise error


@pytest.fixture
def showing(watch: CellWatch, monkeypatch: pytest.MonkeyPatch) -> CellWatch:
    """Return the cells of a shell that takes note of what it shows."""
    watch.shell.InteractiveTB = SimpleNamespace(tb=None)
    watch._show = Mock()
    monkeypatch.setattr(sys, "last_traceback", None, raising=False)
    return watch


def files(trace: TracebackType | None) -> set[str]:
    return {Path(frame.f_code.co_filename).name for frame, _ in walk_tb(trace)}


@pytest.mark.parametrize(
    ("error", "is_beside", "is_cut"),
    [
        (DeviceIndexError("mine", None), False, True), (NonFiniteError("mine", None), False, True),
        (ValueError("mine"), False, False), (ValueError("mine"), True, True),
    ],
)  # fmt: skip
def test_torchs_frames_are_shown_where_no_report_says_the_rest_and_a_debugger_has_them(
    showing: CellWatch, monkeypatch: pytest.MonkeyPatch, error: Exception, is_beside: bool,
    is_cut: bool,
) -> None:  # fmt: skip
    hidden: list[Any] = []
    monkeypatch.setattr(cells, "is_reported", lambda error, report: is_beside)
    monkeypatch.setattr(cells, "hide_own_frames", hidden.append)
    with pytest.raises(type(error)) as caught:
        Net()(error)
    showing._showtraceback((type(error), error, caught.tb), tb_offset=1)
    (((kind, given, trace),), options) = showing._show.call_args
    assert (kind, given, options, hidden) == (type(error), error, {"tb_offset": 1}, [error])
    assert files(trace) == {"test_cells.py", *(() if is_cut else ["module.py"])}
    for kept in (sys.last_traceback, showing.shell.InteractiveTB.tb):
        assert files(kept) == {"test_cells.py", "module.py"}


def test_an_exception_that_is_handled_is_shown_and_each_check_told_of_it(
    showing: CellWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    listener = SimpleNamespace(note_shown=told.append)
    monkeypatch.setattr(type(PROCESS), "listeners", (listener, object(), listener))
    try:
        raise MINE
    except ValueError:
        showing._showtraceback()
    assert showing._show.call_args.args[0][:2] == (ValueError, MINE)
    assert told == [MINE, MINE]
    showing._showtraceback((None, None, None), tb_offset=2)
    showing._show.assert_called_with((None, None, None), tb_offset=2)
    assert told == [MINE, MINE]


@pytest.mark.parametrize("is_by_hand", [True, False])
def test_a_cell_that_fails_is_closed_before_it_is_shown(
    showing: CellWatch, monkeypatch: pytest.MonkeyPatch, is_by_hand: bool
) -> None:
    """One that was called by hand is not shown, and the cell around it knows the error."""
    closed: list[Any] = []
    monkeypatch.setattr(showing, "_close", lambda cell, error: closed.append((cell, error)))
    first, outer, cell = _Cell(), _Cell(), _Cell(is_by_hand=is_by_hand)
    showing._cells = [first, outer, cell]
    showing._showtraceback((ValueError, MINE, None), running_compiled_code=True)
    assert closed == [(cell, MINE)]
    assert showing._show.called is not is_by_hand
    assert (first.explained, outer.explained) == (None, MINE if is_by_hand else None)


@pytest.mark.parametrize("is_time", [True, False])
def test_what_time_shows_is_kept_in_the_innermost_cell(
    showing: CellWatch, monkeypatch: pytest.MonkeyPatch, is_time: bool
) -> None:
    monkeypatch.setattr(cells._ipython, "is_shown_by_time", lambda frame: is_time)
    showing._cells = [_Cell(), _Cell()]
    showing._showtraceback((ValueError, MINE, None))
    kept = [cell.shown_by_time for cell in showing._cells]
    assert kept == [None, MINE if is_time else None]


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("is_beside", [True, False])
def test_behind_shift_enter_a_frame_has_its_arrow_line_alone_beside_a_report(
    watch: CellWatch, has_kernel: bool, is_beside: bool
) -> None:
    frame = "Cell In[3]\n      1 a\n----> 2 b"
    watch.shell.kernel = object() if has_kernel else None
    traceback = SimpleNamespace(structured_traceback=lambda *args: [*args, frame])
    watch.shell.InteractiveTB, before = traceback, traceback.structured_traceback
    with pytest.raises(ValueError, match="mine"), watch._arrow_lines(is_beside):
        is_short = has_kernel and is_beside
        short = "Cell In[3]\n----> 2 b" if is_short else frame
        assert traceback.structured_traceback("head") == ["head", short]
        raise MINE
    assert traceback.structured_traceback is before


# --- loading and unloading ------------------------------------------------------------------------


def test_the_cell_that_loads_the_extension_is_known_to_a_shell_without_a_map() -> None:
    with new_shell() as shell:
        shell.compile._filename_map = None
        code = compile("load(shell)", "the cell", "exec").replace(co_name="<cell line: 1>")
        try:
            exec(code, {"load": magics.load, "shell": shell})
            assert CELLS.numbers_of_shell == {"the cell": shell.execution_count}
        finally:
            magics.unload(shell)
        assert CELLS.numbers_of_shell == {}


def test_a_shell_that_is_left_tells_of_no_cell_and_hands_nothing_on() -> None:
    with new_shell() as shell:
        magics.load(shell)
        assert SUCCESSION.sees_cells
        SUCCESSION._earlier = object()
        watch = magics.front_end_of(shell)._watch
        watch._cells, watch.always = [_Cell(), _Cell()], FAST
        magics.unload(shell)
        assert (SUCCESSION.sees_cells, SUCCESSION._earlier) == (False, None)
        assert (watch._cells, watch.always) == ([], None)
        names = {"run_ast_nodes", "showtraceback", "_showtraceback"}
        assert not names & vars(shell).keys()
        assert type(shell.compile).__call__ is CachingCompiler.__call__


@pytest.mark.parametrize("over", [0, 1, 2])
def test_a_cell_of_whose_end_nobody_has_told_ends_where_the_next_begins(
    watch: CellWatch, monkeypatch: pytest.MonkeyPatch, over: int
) -> None:
    going = body()
    watch._cells = [_Cell(run=None if at < over else going) for at in range(2)][::-1]
    monkeypatch.setattr(watch, "_end", lambda result: watch._cells.pop())
    read, watch._is_by_hand = watch._next, True
    watch._before_any()
    assert len(watch._cells) == 3 - over and watch._cells[-1] is read
    assert watch._next is not read and not watch._is_by_hand
    going.close()


@pytest.mark.parametrize(
    ("cells_before", "silent", "number"),
    [(1, True, 5), (1, False, None), (1, None, None), (0, True, None)],
)
def test_a_silent_cell_inside_another_gets_its_name_where_it_begins(
    watch: CellWatch, monkeypatch: pytest.MonkeyPatch, cells_before: int, silent: bool | None,
    number: int | None,
) -> None:  # fmt: skip
    """The shell tells of one that is not silent later, and of the outermost it names itself."""
    info = None if silent is None else SimpleNamespace(silent=silent)
    monkeypatch.setattr(cells._ipython, "info_of_running_cell", lambda: info)
    noted: list[Any] = []
    monkeypatch.setattr(watch, "_note_name", lambda *given: noted.append(given))
    going = body()
    watch._cells = [_Cell(run=going)] * cells_before
    watch._before_any()
    assert noted == ([] if number is None else [(watch._cells[-1], info, number)])
    monkeypatch.setattr(watch, "_note_name", Mock(side_effect=MINE))
    watch._cells = [_Cell(run=going)] * cells_before
    watch._before_any()
    assert watch._cells[-1].failure is (None if number is None else MINE)
    going.close()


@pytest.mark.parametrize(
    ("version", "stores", "number"),
    [((9, 8), True, 4), ((9, 8), False, 5), ((9, 7), True, 5), ((9, 7), False, 5)],
)
def test_the_number_of_a_cell_is_that_before_the_shell_has_raised_its_count(
    watch: CellWatch, monkeypatch: pytest.MonkeyPatch, version: Any, stores: bool, number: int
) -> None:
    monkeypatch.setattr(cells._ipython, "version", lambda: version)
    noted = Mock(side_effect=[None, MINE])
    monkeypatch.setattr(watch, "_note_name", noted)
    watch._cells, info = [_Cell()], SimpleNamespace(store_history=stores)
    for failure in (None, MINE):
        watch._before(info)
        assert (watch._cells[-1].is_silent, watch._cells[-1].failure) == (False, failure)
    assert noted.call_args.args == (watch._cells[-1], info, number)
