"""What cells that are not checked do to the check of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cudalens.core.errors import DeviceIndexError
from cudalens.guards.process import PROCESS
from cudalens.notebook import cells
from cudalens.notebook.cells import CellWatch, _Cell
from cudalens.session.options import Options
from cudalens.session.succession import SUCCESSION
from tests.shells import Notebook

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
