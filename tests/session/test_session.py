"""What a checked block promises: the report, the exceptions, the files, and nothing left behind."""

from __future__ import annotations

import gc
import inspect
import json
import pickle
import re
import traceback
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import cudalens
from cudalens import DeviceAssertError, DeviceIndexError, DeviceValueError, Report, guards, simulate
from cudalens.core.report import RankResult
from cudalens.core.report_types import Violation
from cudalens.core.reported import report_beside
from cudalens.evidence import finding
from cudalens.guards.process import PROCESS
from cudalens.recorder import Recorder
from cudalens.session.findings import MAX_FINDINGS
from tests.blocks import cuda, line_of, overwritten, own_op, report_of, reported_on
from tests.releases import takes_modulo

pytestmark = pytest.mark.usefixtures("sim")


def good() -> Tensor:
    return F.embedding(cuda(1, 2), torch.ones(5, 2, device="cuda"))


def bad(value: int = 7) -> Tensor:
    return F.embedding(cuda(1, value), torch.ones(5, 2, device="cuda"))


def bad_value() -> Tensor:
    return F.binary_cross_entropy(cuda(0.5, 1.5), cuda(0.0, 1.0))


def mismatch() -> Tensor:
    return torch.ones(2, 3, device="cuda") @ torch.ones(2, 3, device="cuda")


# --- check() -------------------------------------------------------------------------------------


def test_a_good_block_has_no_report() -> None:
    with cudalens.check() as session:
        value = good()
    assert value.tolist() == [[1.0, 1.0]] * 2
    assert session.report is None
    assert (session.findings, session.warnings, session.swallowed) == ((), (), None)
    assert cudalens.last_report() is None


def test_a_bad_block_raises_and_reports() -> None:
    """The report says what, where and how it was called; the exception carries the same one."""
    with pytest.raises(DeviceIndexError) as caught, cudalens.check() as session:
        bad()
    report = session.report
    assert caught.value.report is report
    assert cudalens.last_report() is report
    assert (report.kind, report.certainty, report.prevented) == ("device_assert", "proven", True)
    assert report.context_usable
    assert report.headline_schema == "indices[1] = 7 is outside the 5 rows of weight"
    assert report.op.name == "aten::embedding"
    assert report.op.api == "torch.nn.functional.embedding"
    assert report.source.line == line_of(bad, "F.embedding")
    assert report.source.text == inspect.getsource(bad).splitlines()[1].strip()
    assert Path(report.source.file).name == "test_session.py"
    assert report.replay.outcome == "raised"
    assert report.timing.checked_ops >= 1
    assert report.environment.simulated
    assert report.limits == ()


def test_the_next_block_starts_afresh(tmp_path: Path) -> None:
    session = cudalens.check(html=tmp_path / "a.html")
    with pytest.raises(DeviceIndexError), session:
        bad()
    assert session.written == (tmp_path / "a.html",)
    assert PROCESS.last_check.endswith(" recorded, a problem found")
    with session:
        good()
    assert PROCESS.last_check.startswith("1 guarded call checked, ")
    assert PROCESS.last_check.endswith(" recorded, nothing found")
    assert session.report is None
    assert (session.findings, session.written) == ((), ())
    with pytest.raises(DeviceIndexError), session:
        bad(8)
    assert "= 8 " in session.report.headline_schema


@pytest.mark.parametrize(
    ("number", "kind"), [(0, ValueError), (-1, ValueError), ("a", TypeError), (2.0, TypeError)]
)
def test_a_number_of_ops_out_of_range_is_refused(number: Any, kind: type[Exception]) -> None:
    """A recorder that keeps nothing is a mistake; so is what is no whole number.  One op is not."""
    with pytest.raises(kind, match=re.escape(f"max_ops = {number!r}: the recorder keeps a whole")):
        cudalens.check(max_ops=number)
    assert cudalens.check(max_ops=1).max_ops == 1


@pytest.mark.parametrize("name", ["sync", "force_eager", "widgets"])
def test_an_option_is_turned_off_in_either_form(name: str) -> None:
    forms = ({}, {name: False}, {f"no_{name}": True}, {name: False, f"no_{name}": True})
    assert [getattr(cudalens.check(**form), name) for form in forms] == [True, *[False] * 3]


def test_fast_finds_the_same_without_a_recorder() -> None:
    report = report_of(bad, fast=True)
    assert report.headline_schema == "indices[1] = 7 is outside the 5 rows of weight"
    assert report.source.line == line_of(bad, "F.embedding")
    assert report.history == ()
    assert report.timing.recorded_ops == 0


# --- nesting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fails", "kind", "notes"), [(bad, "device_assert", 0), (mismatch, "host_error", 1)]
)
def test_nested_sessions_agree_on_the_report(
    fails: Callable[[], Tensor], kind: str, notes: int
) -> None:
    """An error that leaves both blocks is the same in both, and is noted once at most."""
    with pytest.raises(RuntimeError) as caught, cudalens.check() as outer:
        with cudalens.check() as inner:
            fails()
    assert inner.report.headline_schema == outer.report.headline_schema
    assert outer.report.kind == kind
    assert not outer.swallowed and not inner.swallowed
    assert reported_on(caught.value) is outer.report
    assert len(getattr(caught.value, "__notes__", [])) == notes


def test_an_inner_session_leaves_the_outer_one_open() -> None:
    with pytest.raises(DeviceIndexError), cudalens.check() as outer:
        with cudalens.check() as inner:
            good()
        bad()
    assert inner.report is None
    assert "= 7 " in outer.report.headline_schema


# --- install, uninstall, guard -------------------------------------------------------------------


def test_install_nests_and_uninstall_is_idempotent() -> None:
    """A session inside leaves the guards; ``conftest.py`` asserts that none are left."""
    cudalens.uninstall()
    assert not PROCESS.is_installed
    cudalens.install()
    cudalens.install()
    cudalens.uninstall()
    with cudalens.check():
        good()
    assert PROCESS.is_installed
    with pytest.raises(DeviceIndexError) as caught:
        bad()
    cudalens.uninstall()
    cudalens.uninstall()
    assert not PROCESS.is_installed
    assert cudalens.last_report() is caught.value.report
    cudalens.install()
    assert PROCESS.is_installed
    cudalens.uninstall()


def test_without_guards_the_device_asserts(sim: simulate.Simulation) -> None:
    """The test of the others: what the guards prevent does happen without them."""
    bad()
    with pytest.raises(RuntimeError, match="device-side assert") as caught:
        torch.cuda.synchronize()
    assert not isinstance(caught.value, DeviceAssertError)
    assert sim.is_poisoned


def test_guard_removes_itself_after_an_error() -> None:
    with pytest.raises(DeviceIndexError), cudalens.guard():
        bad()
    assert not PROCESS.is_installed
    with cudalens.guard(), cudalens.guard():
        pass


# --- guards of the user's own --------------------------------------------------------------------


def test_what_a_guard_did_not_count_is_null() -> None:
    """A sentence names no element and no bound; a violation that does has both."""

    def as_sentence(rows: Tensor) -> str | None:
        return "row 9 is not in the table" if int(rows.max()) == 9 else None

    def as_violation(rows: Tensor) -> Violation | None:
        return guards.out_of_range(rows, argument="rows", low=0, high=9, place="the 10 rows")

    made = []
    with own_op("lookup(Tensor rows) -> Tensor", torch.clone) as lookup, ExitStack() as ending:
        ending.enter_context(cudalens.guard())
        assert lookup(cuda(9)).tolist() == [9]
        for check in (as_sentence, as_violation):
            ending.callback(cudalens.register_guard(lookup, check))
            with pytest.raises(DeviceAssertError):  # at once, though guards were installed before
                lookup(cuda(9 if check is as_sentence else 10))
        assert lookup(cuda(8)).tolist() == [8]
        for row in (9, 10):
            with pytest.raises(DeviceAssertError), cudalens.check() as session:
                lookup(cuda(row))
            made.append(json.loads(session.report.to_json()))
            assert "CUDA" in session.report.to_text() and session.report.to_html()
    assert (made[0]["offenders"], made[0]["bounds"]) == (None, None)
    assert made[1]["offenders"]["first"] == [{"position": [0], "value": 10, "sample": None}]
    assert (made[1]["bounds"]["min"], made[1]["bounds"]["max"]) == (0, 9)


# --- exceptions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "own", "plain", "other"),
    [
        (bad, DeviceIndexError, IndexError, ValueError),
        (bad_value, DeviceValueError, ValueError, IndexError),
    ],
)
def test_a_finding_is_caught_as_on_cuda_as_on_the_cpu_and_by_our_names(
    run: Callable[[], Tensor], own: type[Exception], plain: type[Exception], other: type[Exception]
) -> None:
    with cudalens.guard(), pytest.raises(RuntimeError) as caught:
        run()
    assert type(caught.value) is own
    assert issubclass(own, DeviceAssertError) and issubclass(own, plain)
    assert not issubclass(own, other)


def test_the_message_is_complete_without_the_report() -> None:
    with cudalens.guard(), pytest.raises(DeviceIndexError) as caught:
        ids = cuda(1, 7)
        F.embedding(ids, torch.ones(5, 2, device="cuda"))
    text = str(caught.value)
    for part in (
        "ids[1] = 7",
        "0 … 4",
        "1 of 2",
        "torch.nn.functional.embedding",
        "aten::embedding",
        "argument ids (indices)",
        f"test_session.py:{caught.value.report.source.line}",
        "CUDA   is fine",
    ):
        assert part in text


def test_errors_survive_pickling() -> None:
    """Worker processes send exceptions: type, message and report arrive."""
    with pytest.raises(DeviceIndexError) as caught, cudalens.check():
        bad()
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(caught.value, protocol))
        assert type(copy) is DeviceIndexError
        assert str(copy) == str(caught.value)
        assert copy.report == caught.value.report


def test_the_traceback_ends_in_the_users_frame() -> None:
    """A debugger opened afterwards lands where the user called the op."""
    with pytest.raises(DeviceIndexError) as caught, cudalens.check():
        bad()
    entries = traceback.extract_tb(caught.value.__traceback__)
    assert entries[-1].name == "bad"
    assert "cudalens" not in {Path(entry.filename).parent.name for entry in entries}


# --- swallowed and several -----------------------------------------------------------------------


def swallow(values: tuple[int, ...], leaves: int | None = None) -> None:
    """Look up each value in a loop that goes on after all findings but that of ``leaves``."""
    for value in values:
        try:
            bad(value)
        except IndexError:
            if value == leaves:
                raise


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ((7,), ["1 call was stopped"]),
        ((7, 8, 7, 7, 9), ["4 more", "= 7 is", "(2 times)", "= 8 is", "= 9 is"]),
    ],
)
def test_a_swallowed_finding_is_reported_with_its_count(
    values: tuple[int, ...], parts: list[str]
) -> None:
    """In a loop that goes on; alike ones are listed once."""
    with cudalens.check() as session:
        swallow(values)
    assert session.swallowed
    assert "= 7 " in session.report.headline_schema
    told = session.report.explanation
    assert [told.count(part) for part in parts] == [1] * len(parts)
    assert sorted(parts, key=told.index) == parts
    assert cudalens.last_report() is session.report
    assert len(session.findings) == len(values)


@pytest.mark.parametrize("leaves", [7, 8, 9])
def test_of_several_findings_the_one_that_leaves_is_the_report(leaves: int) -> None:
    with pytest.raises(DeviceIndexError, match=f"= {leaves}"), cudalens.check() as session:
        swallow((7, 8, 9), leaves=leaves)
    assert f"= {leaves} " in session.report.headline_schema
    number = len(session.findings) - 1
    listed = session.report.explanation.partition(f"{number} more in this block did not end it: ")
    assert (listed[2] != "") is (leaves > 7)
    assert [f"= {value} " in listed[2] for value in (7, 8)] == [leaves > 7, leaves > 8]
    assert not session.swallowed


def test_only_the_last_of_many_findings_leaves() -> None:
    """It is the report, though only the first are kept whole."""
    with pytest.raises(DeviceIndexError, match="= 99"), cudalens.check() as session:
        swallow((*range(7, 7 + MAX_FINDINGS), 99), leaves=99)
    assert "= 99 " in session.report.headline_schema
    assert f"{MAX_FINDINGS} more in this block did not end it: " in session.report.explanation


def swallowed(function: Callable[[], object]) -> None:
    with suppress(RuntimeError):
        function()


def error_behind(function: Callable[[], object]) -> tuple[BaseException, Any]:
    """The exception that leaves a block behind a swallowed finding, and the session."""
    with pytest.raises(Exception) as caught, cudalens.check() as session:
        function()
    assert cudalens.last_report() is session.report is not None
    return caught.value, session


def in_other_words(how: str) -> Callable[[], None]:
    """A library on torch that catches the finding and raises an error of its own."""
    name = f"torch/in_other_words_{how}.py"
    text = (
        "def look(bad):\n    try:\n        bad()\n    except IndexError as error:\n"
        f"        raise IndexError('outside') {'from error' if how == 'from' else ''}\n"
    )
    names: dict[str, Any] = {"__name__": "torch.in_other_words"}
    folder = Path(torch.__file__).parent.parent
    exec(compile(text, str(folder / name), "exec"), names)
    return lambda: names["look"](bad)


def behind(function: Callable[[], object]) -> Callable[[], object]:
    """Fail after a finding was swallowed."""
    return lambda: (swallowed(bad), function())


def in_the_clause(cause: BaseException | None) -> Callable[[], None]:
    def run() -> None:
        try:
            bad()
        except IndexError:
            raise OSError("mine") from cause

    return run


def in_the_handler() -> None:
    try:
        bad()
    except IndexError:
        mismatch()


LATER = "This error did not leave the block, and {} was raised later. 1 call was stopped."
CAUGHT = "1 more in this block did not end it: device assert: cuda(1, value)[1] = 7 is outside"
HANDLED = "{} was raised while this error was being handled. 1 call was stopped."


@pytest.mark.parametrize(
    ("run", "kind", "told", "note", "is_another"),
    [
        # torch's own ended the block: the report is of it, and counts what was caught before.
        (behind(mismatch), RuntimeError, CAUGHT, "cudalens: torch.ones(2, 3", True),
        (in_the_handler, RuntimeError, CAUGHT, "cudalens: torch.ones(2, 3", True),
        (behind(lambda: {}["missing"]), KeyError, LATER, None, False),
        # Python knows what was being handled, also where the user hides it.
        (in_the_clause(None), OSError, HANDLED, None, False),
        (in_the_clause(KeyError("mine")), OSError, HANDLED, None, False),
        # With ``from`` a library says that it is the same failure: one report, nothing more.
        (in_other_words("from"), IndexError, HANDLED, "cudalens: cuda(1, value)[1] = 7", False),
        (in_other_words("alone"), IndexError, HANDLED, "cudalens: cuda(1, value)[1] = 7", False),
    ],
    ids=[
        "torch's",
        "in the handler",
        "the user's",
        "of the clause",
        "cause hidden",
        "retold",
        "names no cause",
    ],
)
def test_an_error_behind_a_swallowed_finding(
    run: Callable[[], object], kind: type, told: str, note: str | None, is_another: bool
) -> None:
    """What is said of it, and whether it is another failure, with a report of its own."""
    error, session = error_behind(run)
    assert type(error) is kind
    explanation, notes = session.report.explanation, getattr(error, "__notes__", [])
    assert told.format(kind.__name__) in explanation
    own = report_beside(error)
    assert (own is None, notes == []) == (note is None, note is None)
    assert note is None or (notes[0].startswith(note) and len(notes) == 1)
    assert (session.report.kind == "host_error") is is_another
    assert ("more in this " in explanation) is is_another
    assert own in (None, session.report)
    assert (session.swallowed is None) is is_another


BURN = "burn.cu:1: burn: block: [0,0,0], thread: [0,0,0] Assertion `fire` failed."
"""As CUDA prints it: the check waits for nothing else to be printed."""


def test_a_fault_of_the_device_behind_a_swallowed_finding_is_remembered(
    sim: simulate.Simulation,
) -> None:
    """The report is of it and says that CUDA is gone; the next block points back to it."""
    with cudalens.check() as alive:
        swallowed(bad)
    assert alive.report.context_usable is True

    def run() -> None:
        swallowed(bad)
        sim.device_assert("session_test::burn", BURN)
        torch.cuda.synchronize()

    error, session = error_behind(run)
    assert report_beside(error) is session.report
    assert "= 7 is outside" in session.report.explanation
    assert session.report.context_usable is False
    with pytest.raises(RuntimeError) as caught, cudalens.check() as again:
        torch.cuda.synchronize()
    assert again.is_reminder
    assert report_beside(caught.value) is again.report
    assert again.report.headline_schema == report_beside(error).headline_schema


def test_a_fault_that_nobody_raised_outranks_a_finding_that_was_caught(
    sim: simulate.Simulation,
) -> None:
    """It is met at the end of the block; the cell ran on."""
    with cudalens.check() as session:
        swallowed(bad)
        sim.device_assert("session_test::burn", BURN)
    assert not session.swallowed
    assert session.report.headline_schema.startswith("CUDA asserted `fire`")
    assert session.report.context_usable is False
    assert "1 more in this block did not end it: " in session.report.explanation


# --- other exceptions ----------------------------------------------------------------------------


class MuteError(Exception):
    """Cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no str of mine")


class OddError(RuntimeError):
    """Has a truth of its own, for which nobody asks."""

    def __bool__(self) -> bool:
        raise ValueError("asked")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mine"),
        IndexError("mine"),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        MuteError(),
        OddError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_foreign_exception_is_untouched(error: BaseException) -> None:
    before = dict(vars(error))
    with pytest.raises(type(error)) as caught, cudalens.check() as session:
        good()
        raise error
    assert caught.value is error
    assert session.report is None
    assert vars(error) == before


@pytest.mark.parametrize(
    ("error", "is_noted"),
    [(KeyError("mine"), False), (ProcessExitedException("exited", 0, 1, 1), True)],
    ids=["the user's", "the launcher's"],
)
def test_what_the_ranks_report_stands_beside_the_launchers_exception_alone(
    error: Exception, is_noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_ranks = Report(kind="device_assert", headline="ids[0] = 9 is outside", ranks=(RankResult(),))
    monkeypatch.setattr("cudalens.session.session.combined", lambda results: of_ranks)
    with pytest.raises(type(error)) as caught, cudalens.check() as session:
        raise error
    assert caught.value is error
    assert session.report is not None and session.report.headline == of_ranks.headline
    assert report_beside(error) is (session.report if is_noted else None)
    assert len(getattr(error, "__notes__", ())) == is_noted


# --- silent --------------------------------------------------------------------------------------


def take(index: int) -> Tensor:
    return torch.take_along_dim(torch.zeros(3, device="cuda"), cuda(index), 0)


@takes_modulo
def test_a_loop_makes_one_report_of_a_silent_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line once, and once more in the next check: the rest costs no report."""
    made = Mock(wraps=finding._reported)
    monkeypatch.setattr(finding, "_reported", made)
    for _ in range(2):
        with cudalens.check(fast=True) as session:
            for index in (2, 3, 4, 5):
                take(index)
            take_along = [torch.take_along_dim(cuda(0.0), cuda(1), 0) for _ in range(3)]
        assert len(session.warnings) == 2
        assert len(take_along) == 3
    assert made.call_count == 4


@takes_modulo
def test_several_silent_findings_are_counted_and_listed() -> None:
    """The first is the report; one alone, however often its line runs, lists nothing."""
    with cudalens.check() as session:
        for _ in range(3):
            take(5)
    assert (session.report.kind, len(session.warnings)) == ("silent", 1)
    assert not session.report.prevented and not session.swallowed
    assert "more in this " not in session.report.explanation
    with cudalens.check() as session:
        take(5)
        torch.take_along_dim(cuda(0.0), cuda(8), 0)
        torch.take_along_dim(cuda(0.0), cuda(9), 0)
    assert "= 5 is outside" in session.report.headline_schema
    listed = session.report.explanation.partition("2 more in this block: ")[2]
    assert "= 8 is outside" in listed.partition("; ")[0]
    assert "= 9 is outside" in listed.partition("; ")[2]
    assert "silent" not in listed


@takes_modulo
@pytest.mark.parametrize(
    ("fails", "kind", "ending"),
    [
        (bad, "device_assert", partial(pytest.raises, RuntimeError)),
        (mismatch, "host_error", partial(pytest.raises, RuntimeError)),
        (partial(swallowed, bad), "device_assert", nullcontext),
    ],
    ids=["assert", "host error", "swallowed"],
)
def test_an_error_outranks_a_silent_finding_and_lists_it(
    fails: Callable[[], object], kind: str, ending: Callable[[], Any]
) -> None:
    with ending(), cudalens.check() as alone:
        fails()
    assert "more in this " not in alone.report.explanation
    with ending() as caught, cudalens.check() as session:
        take(5)
        fails()
    assert session.report.kind == kind
    assert caught is None or session.report is reported_on(caught.value)
    (silently,) = session.warnings
    assert f"1 more in this block: silent: {silently.headline}." in session.report.explanation


@takes_modulo
def test_a_silent_finding_without_a_session_is_a_python_warning_of_each_installation() -> None:
    for _ in range(2):
        with cudalens.guard(), pytest.warns(match="= 3 is outside") as got:
            take(2), take(3), take(4)
        assert [item.category for item in got] == [cudalens.SilentFindingWarning]


@takes_modulo
def test_a_silent_finding_of_a_block_that_nobody_shows_is_a_python_warning() -> None:
    """One for the block, at its line; a front end's session has its report shown."""
    with pytest.warns(cudalens.SilentFindingWarning) as got, cudalens.check() as session:
        take(5), take(6)
    (told,) = got
    assert session.report.kind == "silent" and session.report.headline in str(told.message)
    assert told.filename == __file__
    with warnings.catch_warnings(action="error"), cudalens.CheckSession() as session:
        take(5), take(6)
    assert session.report.kind == "silent"


@takes_modulo
def test_an_exception_needs_no_warning_beside_it() -> None:
    with warnings.catch_warnings(action="error", category=cudalens.SilentFindingWarning):
        with pytest.raises(ZeroDivisionError), cudalens.check():
            take(5)
            _ = 1 / 0
        with cudalens.check() as session:
            swallowed(bad)
        assert session.report.kind == "device_assert"


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("html", "json"), [("r.html", "r.json"), ("page", "data.html")])
def test_the_option_says_the_form_whatever_the_file_is_called(
    html: str, json: str, tmp_path: Path
) -> None:
    page, data = tmp_path / html, tmp_path / json
    report = report_of(bad, html=str(page), json=data)
    assert page.read_text("utf-8") == report.to_html()
    assert data.read_text("utf-8") == report.to_json()
    assert report.limits == ()


def test_a_file_that_cannot_be_written_is_a_line_beside_the_other_limits(tmp_path: Path) -> None:
    session = cudalens.check(html=tmp_path)  # a folder
    with pytest.raises(DeviceIndexError), session:
        session.internal_errors.append("a part of the check failed")
        bad()
    own, failure = session.report.limits
    assert own == "a part of the check failed"
    assert failure.startswith(f"{tmp_path.name} was not written: ")
    assert session.written == ()


def test_a_block_that_changes_the_directory_takes_no_file_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with pytest.raises(DeviceIndexError), cudalens.check(json="r.json"):
        monkeypatch.chdir(elsewhere)
        bad()
    assert [item.name for item in tmp_path.iterdir() if item.is_file()] == ["r.json"]
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(("name", "place"), [("~/r.json", "home"), ("./~/r.json", "here/~")])
def test_a_tilde_is_the_user_s_home(
    name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a shell, which does not read the options of a cell."""
    for folder in ("home", "here/~"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    report_of(bad, json=name)
    assert [item.parent for item in tmp_path.rglob("r.json")] == [tmp_path / place]


# --- lifetime ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fast": True}, None], ids=["full", "fast", "installed"])
def test_no_tensor_outlives_the_error(
    options: dict[str, Any] | None, sim: simulate.Simulation
) -> None:
    gc.collect()
    before = sim.memory_allocated()
    references: list[weakref.ref[Tensor]] = []

    def step() -> None:
        table = torch.ones(5, 200, device="cuda")
        ids = cuda(1, 7)
        references.extend(map(weakref.ref, (table, ids)))
        F.embedding(ids, table)

    gc.disable()
    try:
        try:
            with cudalens.guard() if options is None else cudalens.check(**options):
                step()
        except IndexError as error:
            report = error.report
        assert report is not None
        assert [reference() for reference in references] == [None, None]
        assert sim.memory_allocated() == before
    finally:
        gc.enable()


def test_no_tensor_outlives_a_swallowed_finding(sim: simulate.Simulation) -> None:
    with cudalens.check() as session:
        good()
        gc.collect()  # what earlier code left must not be freed in between
        before = sim.memory_allocated()
        swallowed(bad)
        assert session.findings
        assert sim.memory_allocated() == before


@takes_modulo
@pytest.mark.parametrize("fast", [True, False])
def test_a_function_that_runs_on_frees_what_it_deletes(
    fast: bool, sim: simulate.Simulation
) -> None:
    """A report looks at the variables of the user's functions and keeps none of them."""
    gc.collect()  # what earlier code left must not be freed in between
    before = sim.memory_allocated()
    batch = torch.ones(4, 256, device="cuda")
    index = cuda(9, 0, 0, 0).reshape(4, 1)
    with cudalens.check(fast=fast) as session:
        torch.take_along_dim(batch, index * 256, 1)
    assert session.report.kind == "silent"
    with suppress(IndexError), cudalens.check(fast=fast) as session:
        batch.gather(1, index + 256)
    assert session.report.kind == "device_assert" and not session.swallowed
    del batch, index
    gc.collect()
    assert sim.memory_allocated() == before


def test_variables_that_the_user_holds_are_left_alone() -> None:
    """What ``locals()`` gave is the user's, also where Python keeps one such dictionary alone."""
    number = 5
    mine = locals()
    with pytest.raises(IndexError), cudalens.check():
        bad()
    assert mine["number"] == number


def test_a_step_frees_its_tensors_as_without_a_check(sim: simulate.Simulation) -> None:
    def train() -> tuple[int, int]:
        gc.collect()  # what earlier code left must not be freed in between
        torch.cuda.reset_peak_memory_stats()
        start = sim.memory_allocated()
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            loss = F.cross_entropy(model(torch.ones(16, 32, device="cuda")), cuda(*[1] * 16))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated() - start, sim.memory_allocated() - start

    plain = train()
    with cudalens.check() as session:
        checked = train()
    assert session.report is None
    # A check reads its own scalars back: one block of the allocator for each guard that looks.
    assert checked[0] - plain[0] <= 4 * 512
    assert checked[1] == plain[1]


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are listed on Linux")
def test_sessions_leave_no_descriptor_behind() -> None:
    with cudalens.check():
        good()
    before = open_descriptors()
    for number in range(6):
        with suppress(IndexError), cudalens.check():
            bad(7 if number % 2 else 2)
    assert open_descriptors() == before


# --- backward ------------------------------------------------------------------------------------


def in_a_hook() -> None:
    leaf = torch.ones(2, 3, device="cuda", requires_grad=True)
    held = leaf * 2
    held.register_hook(lambda grad: grad.gather(1, cuda(0, 9).reshape(2, 1)).expand(2, 3))  # fails
    held.sum().backward()  # forward


class Picking(torch.autograd.Function):
    """Gathers with a bad index in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.gather(1, cuda(0, 9).reshape(2, 1)).expand_as(grad)  # fails


def custom_function() -> None:
    leaf = torch.ones(2, 3, device="cuda", requires_grad=True)
    Picking.apply(leaf).sum().backward()


def recomputed() -> None:
    ids = cuda(0, 1).reshape(2, 1)
    leaf = torch.ones(2, 3, device="cuda", requires_grad=True)

    def block(x: Tensor) -> Tensor:
        picked = x.gather(1, ids)  # fails
        return picked.exp()

    loss = checkpoint(block, leaf, use_reentrant=False).sum()
    ids.data[0] = 9
    loss.backward()


@pytest.mark.parametrize(
    ("run", "place", "op"),
    [
        # The backward op, at the line that called backward.
        (overwritten, overwritten, "scatter_add"),
        # Code of the user's that backward runs, at its own line.
        (in_a_hook, in_a_hook, "gather"),
        (custom_function, Picking, "gather"),
        (recomputed, recomputed, "gather"),
    ],
)
def test_what_backward_runs_names_its_line(
    run: Callable[[], None], place: Callable[..., Any], op: str
) -> None:
    report = report_of(run)
    assert report.phase == "backward"
    assert report.op.name.rstrip("_") == f"aten::{op}"
    assert report.source.line == line_of(place, "# fails")
    assert [item.value for item in report.offenders.first] == [9]
    if run is overwritten:  # the forward call that the op belongs to
        assert report.forward_source.line == line_of(overwritten, "# forward")


# --- the end of a block --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("not of CUDA"), None),
        (RuntimeError("lost in our table"), None),
        (RuntimeError("CUDA error: misaligned address"), "cuda_error"),
    ],
)
def test_the_last_wait_blames_the_device_for_its_own_errors_only(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: str | None
) -> None:
    """An error of the device is the block's; what fails in our waiting is a line of ours."""
    monkeypatch.setattr(Recorder, "synchronize", Mock(side_effect=error))
    with cudalens.check() as session:
        torch.ones(2, device="cuda") + 1
    assert (session.report and session.report.kind) == kind
    line = f"device unavailable: {type(error).__name__}: {error.args[0]}"
    assert session.internal_errors == ([] if kind else [line])


def test_transforms_work_after_a_tensor_could_not_be_printed(
    sim: simulate.Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a shell keeps of the exception does not leave torch's transforms turned off."""
    x = torch.ones(3, device="cuda")
    printer = Mock(side_effect=RuntimeError("no room"))
    monkeypatch.setattr(torch._tensor_str, "_tensor_str", printer)
    with pytest.raises(RuntimeError, match="no room") as kept, cudalens.check():
        repr(x)
    squares = torch.func.grad(lambda a: (a * a).sum())
    assert torch.vmap(squares)(torch.ones(1, 2)).tolist() == [[2, 2]]
    assert kept.value.__traceback__ is not None
