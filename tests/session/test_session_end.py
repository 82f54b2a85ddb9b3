"""How a block ends in the cases that few programs meet: what is asked, and what is left alone."""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

import cudalens
from cudalens.core.report import RankResult, Report
from cudalens.core.reported import attach, report_beside
from cudalens.diagnosis.diagnose import format_message
from cudalens.evidence import lost_context
from cudalens.guards.process import PROCESS
from cudalens.session import session as module
from cudalens.session.findings import Outcome
from cudalens.session.session import CheckSession
from cudalens.source.locate import CallSite
from tests.builders import make_report


def caught(run: Any) -> Any:
    """Return the exception with which a call ends."""
    try:
        run()
    except BaseException as error:
        return error
    raise AssertionError


def mismatch() -> None:
    torch.ones(2) @ torch.ones(3)


def silent() -> Report:
    return Report(kind="silent", headline="wrong")


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nan", ["loud", "", None, 2])
def test_another_word_for_nan_is_refused(nan: Any) -> None:
    with pytest.raises(ValueError, match='it is True, False or "strict"'):
        cudalens.check(nan=nan)


def test_deferred_guards_are_fast() -> None:
    assert [cudalens.check(deferred=it).fast for it in (True, False)] == [True, False]
    assert cudalens.check(fast=True).fast and not cudalens.check(fast=True).deferred
    plain = cudalens.check()
    assert (plain.nan, plain.sync, plain.max_ops, plain.force_eager) == (False, True, 4096, True)
    assert cudalens.check(nan="strict", max_ops=3).nan == "strict"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nan": True, "force_eager": False}, "functions stay compiled"),
        ({"nan": True, "force_eager": True}, None),
        ({"force_eager": False}, None),
    ],
)
def test_where_nan_is_not_looked_for_it_is_said(
    options: dict[str, bool], said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with cudalens.check(**options) as session:
        assert (session.recorder is None) is not options["force_eager"]
    line = "" if said is None else f"cudalens: NaN and infinity are not looked for: {said}\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("options", "waits", "is_strict"),
    [
        ({}, True, None),
        ({"sync": False}, False, None),
        ({"nan": True}, True, False),
        ({"nan": "strict"}, True, True),
        ({"nan": True, "fast": True}, False, False),
        ({"nan": "strict", "deferred": True}, False, True),
    ],
)
def test_the_recorder_waits_and_watches_as_the_block_was_asked_to(
    options: dict[str, Any], waits: bool, is_strict: bool | None
) -> None:
    with cudalens.check(**options) as session:
        assert session.recorder.is_synchronous is waits
        watch = session.recorder.watch
        assert (watch and watch.is_strict) is is_strict


@pytest.mark.parametrize(("kept", "seqs"), [(2, [2, 3]), (3, [1, 2, 3])])
def test_the_recorder_keeps_as_many_calls_as_the_block_was_asked_to(
    kept: int, seqs: list[int]
) -> None:
    with cudalens.check(max_ops=kept) as session:
        torch.ones(1).add(1).mul(2)
        assert [call.seq for call in session.recorder.snapshot().calls] == seqs


@pytest.mark.parametrize(
    ("options", "waits"),
    [({}, True), ({"sync": False}, False), ({"fast": True}, False), ({"deferred": True}, False)],
)
@pytest.mark.parametrize("lost", ["lost", None])
def test_a_block_asks_first_whether_the_device_was_lost_before(
    options: dict[str, bool], waits: bool, lost: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def probe(*, wait: bool) -> str | None:
        asked.append(wait)
        return lost

    monkeypatch.setattr(module.lost_context, "probe", probe)
    with cudalens.check(**options) as session:
        assert asked == [waits]
        assert session._was_lost is (lost is not None)


def test_the_device_text_is_read_where_it_may_be() -> None:
    for reads in (True, False):
        session = cudalens.check()
        session.reads_stderr = reads
        with session:
            assert (session.device_text is not None) is reads


# --- findings -------------------------------------------------------------------------------------


def test_a_finding_of_another_thread_is_one_where_it_was_the_first() -> None:
    def found_in_thread(session: CheckSession, report: Report) -> None:
        thread = threading.Thread(target=session.add_finding, args=(report,))
        thread.start()
        thread.join()

    session = cudalens.check()
    session.add_finding(silent())
    found_in_thread(session, silent())
    assert not session._is_of_thread
    found_in_thread(session, make_report())
    assert session._is_of_thread
    session.add_finding(make_report())
    assert session._is_of_thread
    other = cudalens.check()
    other.add_finding(make_report())
    found_in_thread(other, make_report())
    assert not other._is_of_thread


def test_where_the_second_finding_becomes_the_error_the_thread_of_the_first_is_not_told() -> None:
    first, second = make_report(headline="first"), make_report(headline="second")
    for leading, is_of_thread in ((first, True), (second, False)):
        session = cudalens.check()
        thread = threading.Thread(target=session.add_finding, args=(first,))
        thread.start()
        thread.join()
        session.add_finding(second)
        session.note_shown(SimpleNamespace(report=first))  # type: ignore[arg-type]
        error = ValueError("mine")
        error.__cause__ = cudalens.DeviceIndexError("found", leading)
        outcome = session._conclude(error, 0.0)
        assert outcome.finding is leading and outcome.swallowed is not None
        assert outcome.swallowed.is_of_thread is is_of_thread
        assert outcome.swallowed.was_shown is is_of_thread
        assert outcome.swallowed.other == "ValueError"
        assert not outcome.swallowed.was_raised_while_handled


def test_only_the_first_finding_counts_as_shown() -> None:
    first, second = make_report(), make_report()
    for report, shown in ((first, True), (second, False), (None, False)):
        session = cudalens.check()
        session.note_shown(SimpleNamespace(report=None))  # type: ignore[arg-type]
        session.add_finding(first)
        session.add_finding(second)
        session.note_shown(SimpleNamespace(report=report))  # type: ignore[arg-type]
        assert session._was_shown is shown


# --- what a guarded call raises -------------------------------------------------------------------


@pytest.mark.parametrize("has_recorder", [True, False])
def test_the_exception_of_a_guarded_call_is_explained_whatever_its_kind(
    has_recorder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder knows the call of each exception; without one its identity is kept."""
    raised = caught(lambda: int("no number"))
    raised.__traceback__ = raised.__traceback__.tb_next or raised.__traceback__
    while raised.__traceback__.tb_next is not None:
        raised.__traceback__ = raised.__traceback__.tb_next
    session = cudalens.check(fast=True)
    session.recorder = SimpleNamespace(call_of=lambda error: None) if has_recorder else None
    session.call_failed(raised, ())
    assert (session._explained(raised, 0.0) is None) is has_recorder
    other = caught(lambda: int("no number"))
    assert session._explained(other, 0.0) is None
    assert session._explained(None, 0.0) is None


def test_what_code_below_a_guarded_call_raises_is_the_users() -> None:
    def inner() -> None:
        raise ValueError("mine")

    raised = caught(inner)
    assert raised.__traceback__.tb_next is not None
    session = cudalens.check(fast=True)
    session.call_failed(raised, ())
    assert session._explained(raised, 0.0) is None


def test_exceptions_are_told_apart_by_their_words_too() -> None:
    error = ValueError("a", 3, "b")
    assert module._identity(error) == (id(error), ValueError, ("a", "b"))


# --- the loss of the device -----------------------------------------------------------------------


@pytest.fixture
def explained(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Return the exceptions that were explained early."""
    errors: list[BaseException] = []

    def explain(error: BaseException, *rest: Any) -> Report:
        errors.append(error)
        return make_report()

    monkeypatch.setattr(module, "explained_early", explain)
    monkeypatch.setattr(module, "outlive_lost_device", lambda *held: None)
    return errors


def test_the_loss_of_the_device_is_reported_and_shown_once(
    explained: list[BaseException], tmp_path: Path
) -> None:
    session, shown = cudalens.check(html=tmp_path / "a.html"), list[Any]()
    session.show_early = lambda: shown.append(session.report)
    error = RuntimeError("lost")
    for _ in range(2):
        session._on_device_end(error)
    assert explained == [error]
    assert shown == [session.report] and session.is_shown_early
    assert cudalens.last_report() is session.report
    assert session.written == (tmp_path / "a.html",) and (tmp_path / "a.html").exists()


@pytest.mark.parametrize("why", ["lost before", "of another thread", "shown by nobody"])
def test_where_the_loss_of_the_device_is_not_shown_early(
    explained: list[BaseException], why: str
) -> None:
    session = cudalens.check()
    session._was_lost = why == "lost before"
    session._thread += why == "of another thread"
    session._on_device_end(RuntimeError("lost"))
    assert not session.is_shown_early
    assert bool(explained) is (why == "shown by nobody")


@pytest.mark.parametrize(("fatal", "has_recorder", "reported"), [
    (True, False, True), (False, False, False), (True, True, False)
])  # fmt: skip
def test_a_guarded_call_that_loses_the_device_reports_it_where_no_recorder_does(
    explained: list[BaseException], monkeypatch: pytest.MonkeyPatch,
    fatal: bool, has_recorder: bool, reported: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(module.lost_context, "is_fatal", lambda error: fatal)
    session = cudalens.check(fast=True)
    session.recorder = SimpleNamespace() if has_recorder else None
    for _ in range(2):
        session.call_failed(caught(mismatch), ())
    assert len(explained) == reported


def test_the_early_report_is_that_of_the_exception_it_was_made_of() -> None:
    session, report = cudalens.check(), make_report()
    error, other = caught(mismatch), caught(mismatch)
    session._early, session._early_error = report, lambda: error  # type: ignore[assignment]
    assert session._explained(error, 0.0) is report
    made = session._explained(other, 0.0)
    assert made is not None and made is not report


@pytest.mark.parametrize("fatal", ["a call", None])
def test_at_the_end_the_early_report_stands_unless_the_call_at_fault_is_known(
    fatal: str | None,
) -> None:
    session, report, error = cudalens.check(), make_report(), caught(mismatch)
    session.recorder = SimpleNamespace(fatal=fatal, call_of=lambda error: None)
    assert session._explained_late(error, 0.0) is not report
    session._early = report
    assert (session._explained_late(caught(mismatch), 0.0) is report) is (fatal is None)
    assert session._explained_late(None, 0.0) is None


def test_an_interrupt_of_the_end_leaves_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    session = cudalens.check()
    monkeypatch.setattr(session, "close", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), session:
        assert session in PROCESS.listeners
    assert session not in PROCESS.listeners and session.recorder is None


@pytest.mark.parametrize(
    ("options", "raised", "was_lost", "is_over", "waits"),
    [
        ({}, None, False, False, True),
        ({}, ValueError("mine"), False, False, True),
        ({}, ValueError("mine"), True, False, False),
        ({}, None, True, False, True),
        ({}, KeyboardInterrupt(), False, False, False),
        ({}, KeyboardInterrupt(), False, True, True),
        ({"sync": False}, None, False, False, False),
    ],
)
def test_at_its_end_a_block_waits_for_the_device(
    options: dict[str, bool], raised: BaseException | None, was_lost: bool, is_over: bool,
    waits: bool,
) -> None:  # fmt: skip
    waited: list[bool] = []
    session = cudalens.check(**options)
    assert session._late(raised) is None  # nothing was recorded
    session.recorder = SimpleNamespace(is_over=is_over, synchronize=lambda: waited.append(True))
    session._was_lost = was_lost
    assert session._late(raised) is None
    assert bool(waited) is waits


@pytest.mark.parametrize("is_of_device", [True, False])
def test_what_the_wait_raises_is_the_devices_or_a_failure_of_the_check(
    is_of_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("lost")

    def fail() -> None:
        raise error

    monkeypatch.setattr(lost_context, "is_of_device", lambda error: is_of_device)
    session = cudalens.check()
    session.recorder = SimpleNamespace(is_over=False, synchronize=fail)
    assert session._late(None) is (error if is_of_device else None)
    assert len(session.internal_errors) == (not is_of_device)


# --- processes that the block has started ---------------------------------------------------------


@pytest.mark.parametrize("has_started", [True, False])
@pytest.mark.parametrize("is_launchers", [True, False])
def test_a_launchers_exception_says_nothing_of_its_own(
    has_started: bool, is_launchers: bool
) -> None:
    """What else ends a block that has started processes is explained as in any block."""
    session: Any = cudalens.check()
    session._ranks = SimpleNamespace(has_started=has_started, results=tuple)
    error = ProcessRaisedException("failed", 0, 1) if is_launchers else caught(mismatch)
    outcome = session._conclude(error, 0.0)
    if is_launchers:
        assert outcome.error is None or not has_started
    else:
        assert outcome.error is not None and outcome.error.kind == "host_error"


def test_what_the_ranks_report_stands_back_where_the_exception_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_ranks, own, error = silent(), make_report(), caught(mismatch)
    monkeypatch.setattr(module, "combined", lambda results: of_ranks)
    session: Any = cudalens.check()
    session._ranks = SimpleNamespace(has_started=True, results=tuple)
    assert session._conclude(error, 0.0).error is of_ranks
    attach(error, own, "as an inner check does")
    assert session._conclude(error, 0.0).error is own


# --- the report of the block, of the process and of the exception ---------------------------------


@pytest.mark.parametrize("kind", ["plain", "of ranks", "reminder"])
def test_only_a_failure_of_this_process_is_remembered_for_later_blocks(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered: list[Report] = []
    monkeypatch.setattr(module.lost_context, "remember", remembered.append)
    report = make_report(ranks=(RankResult(rank=0),) if kind == "of ranks" else ())
    session = cudalens.check()
    session.is_reminder = kind == "reminder"
    session._report(Outcome(finding=report), None)
    assert session.report is cudalens.last_report() is report
    assert remembered == ([report] if kind == "plain" else [])


def test_an_exception_gets_the_report_as_it_is_at_the_end() -> None:
    before, session = make_report(), cudalens.check()
    session.internal_error("a limit")
    session.internal_error("a limit")
    found, other = cudalens.DeviceIndexError("found", before), caught(mismatch)
    attach(other, before, "a note")
    plain = caught(mismatch)
    for error in (found, other, plain):
        session._report(Outcome(finding=before), error)
    assert session.report is not None and session.report.limits == ("a limit",)
    assert found.report == report_beside(other) == session.report
    assert report_beside(plain) is None
    session._report(Outcome(), other)
    assert session.report == report_beside(other)


def test_a_file_that_cannot_be_written_is_a_limit_of_the_report(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    session = cudalens.check(html=tmp_path / "file" / "a.html", json=tmp_path / "b.json")
    session._report(Outcome(finding=make_report()), None)
    assert session.written == (tmp_path / "b.json",)
    assert session.report is not None
    assert [line.partition(":")[0] for line in session.report.limits] == ["a.html was not written"]


@pytest.mark.parametrize("followed", [True, False])
def test_whether_a_block_is_followed_is_asked_at_its_end(
    followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def is_followed(frame: Any, error: BaseException | None) -> bool:
        asked.append((frame.f_code.co_name, error))
        return followed

    handed: list[Any] = []
    end = module.SUCCESSION.end

    def watched(recorder: Any) -> None:
        handed.append(recorder)
        end(None)

    monkeypatch.setattr(module.SUCCESSION, "is_followed", is_followed)
    monkeypatch.setattr(module.SUCCESSION, "end", watched)
    with cudalens.check() as session:
        recorder = session.recorder
    assert session.is_followed is followed
    assert handed == [recorder if followed else None]
    with pytest.raises(KeyError) as left, cudalens.check():
        raise KeyError
    name = "test_whether_a_block_is_followed_is_asked_at_its_end"
    assert asked == [(name, None), (name, left.value)]


@pytest.mark.parametrize(
    ("report", "error", "warns"),
    [(silent(), None, True), (silent(), ValueError("mine"), False), (make_report(), None, False),
     (None, None, False)],
)  # fmt: skip
def test_what_raises_nothing_is_a_warning_of_the_line_behind_the_block(
    report: Report | None, error: Exception | None, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def conclude(self: CheckSession, *_: object) -> Outcome:
        kinds = {"silent": report} if report is not None and report.kind == "silent" else {}
        return Outcome(**kinds, finding=None if kinds else report)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckSession, "_conclude", conclude)
    with warnings.catch_warnings(record=True) as told, suppress(ValueError):
        warnings.simplefilter("always")
        with cudalens.check():
            if error is not None:
                raise error
    lines = [(item.category, item.filename) for item in told]
    assert lines == ([(cudalens.SilentFindingWarning, __file__)] if warns else [])


@pytest.mark.parametrize(
    "options",
    [
        {"fast": True}, {"deferred": True}, {"nan": "strict"}, {"sync": False}, {"max_ops": 9},
        {"force_eager": False}, {},
    ],
)  # fmt: skip
def test_the_processes_of_a_block_get_its_options_and_not_its_files(
    options: dict[str, Any], tmp_path: Path
) -> None:
    with cudalens.check(html=tmp_path / "a.html", **options) as session:
        assert session._ranks is not None
        made = session._ranks._make()
    names = ("fast", "deferred", "nan", "sync", "max_ops", "force_eager")
    assert [getattr(made, name) for name in names] == [getattr(session, name) for name in names]
    assert made._files == [None, None] and session._files[0] is not None


# --- a beginning and an end that go wrong ---------------------------------------------------------


@pytest.mark.parametrize("part", ["acquire", "begin", None])
def test_a_beginning_that_fails_leaves_nothing_installed(
    part: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails in the check itself is a limit; the user's interrupt, or a finding, is raised."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    if part is not None:
        owner = module.process if part == "acquire" else module.SUCCESSION
        monkeypatch.setattr(owner, part, interrupt)
    session, before = cudalens.check(), module.PROCESS.listeners
    with suppress(KeyboardInterrupt):
        assert session.open() is session
    assert module.PROCESS.is_installed is (part is None)
    assert module.PROCESS.listeners == (*before, *[session][part is not None :])
    session.remove()
    assert not module.PROCESS.is_installed and module.PROCESS.listeners == before


@pytest.mark.parametrize(
    ("options", "error", "is_raised"),
    [
        ({"deferred": True}, None, True),
        ({"deferred": True}, SystemExit(0), True),
        ({"deferred": True}, ValueError("mine"), False),
        ({"force_eager": False}, None, True),
        ({"fast": True}, None, None),
    ],
)
def test_what_deferred_or_compiled_guards_find_at_the_end_is_raised_unless_an_error_is(
    options: dict[str, bool], error: BaseException | None, is_raised: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    session = CheckSession(**options)  # type: ignore[arg-type]
    found = cudalens.DeviceIndexError("found late", make_report())

    def run() -> None:
        with session:
            monkeypatch.setattr(module.PROCESS, "settle", lambda: found)
            if error is not None:
                raise error

    try:
        left = caught(run)
    except AssertionError:
        left = None
    assert left is (found if is_raised else error)
    notes = [] if is_raised is not False else ["cudalens: found before this: found late"]
    assert getattr(error, "__notes__", []) == notes
    assert (session.report is not None) is (is_raised is True)


@pytest.mark.parametrize("error", [None, ValueError("mine")])
def test_what_the_shell_has_shown_is_raised_at_the_end_where_no_error_is(
    error: Exception | None,
) -> None:
    with cudalens.check(fast=True) as session:
        late = cudalens.NonFiniteError("shown", make_report(kind="nonfinite"))
        session.recorder = SimpleNamespace(
            watch=SimpleNamespace(late=late), limits=["ours"], recorded_ops=3,
            is_over=False, synchronize=lambda: None, call_of=lambda error: None,
        )  # fmt: skip
        assert session.close(error) is (late if error is None else None)
    assert not hasattr(error, "__notes__")
    assert session.recorded_ops == 3
    assert session.internal_errors == ["ours"]  # what the recorder failed to do, told of the block


@pytest.mark.parametrize("is_told", [True, False])
def test_the_line_that_the_traceback_tells_goes_into_the_words_of_the_exception(
    is_told: bool,
) -> None:
    before, session = make_report(source=None), cudalens.check()
    place = make_report().source
    error = cudalens.DeviceIndexError(format_message(before), before)
    site = CallSite(source=place) if is_told else None
    session._report(Outcome(finding=before, site=site), error)
    assert session.report is not None
    assert session.report.source == (place if is_told else None)
    assert str(error) == format_message(session.report if is_told else before)
    assert (str(error) != format_message(before)) is is_told


@pytest.mark.parametrize("left", [ValueError("left"), None])
def test_what_left_the_block_goes_before_what_the_shell_has_shown(
    left: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BaseException | None] = []
    monkeypatch.setattr(CheckSession, "_conclude", lambda self, error, at: seen.append(error))
    session, shown = cudalens.check(), KeyError("shown")
    session.shown_error = shown
    for error in (left, None):
        assert session.open().close(error) is None
    assert seen == [left or shown, None]


def test_a_finding_that_comes_back_without_its_report_gets_that_of_its_words() -> None:
    found, session = make_report(headline="found"), cudalens.check()
    session.add_finding(found)
    error = cudalens.DeviceIndexError("found")
    assert session._own(error) is error and error.report is found
    assert session.findings == (found,)
    inner = cudalens.NonFiniteError("inner", make_report(kind="nonfinite"))  # of an inner session
    assert session._own(inner) is inner
    assert session.findings == (found, inner.report)
    assert session._own(ValueError("mine")) is None
