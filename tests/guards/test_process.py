"""The guards of a process: installed while anybody wants them, findings told to one session."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from cudalens import DeviceIndexError
from cudalens.guards import process
from cudalens.guards.process import Guarding, ReportedLines


class Interceptor:
    """Keeps what it is asked."""

    def __init__(self, devices: Any) -> None:
        self.devices, self.log, self.checked_ops, self.fails = devices, [], 5, False

    def set_deferred(self, is_deferred: bool, in_compiled: bool) -> None:
        self.log.append((is_deferred, in_compiled))

    def install(self) -> None:
        self.log.append("install")
        if self.fails:
            raise ValueError

    def uninstall(self) -> None:
        self.log.append("uninstall")

    def settle(self) -> str:
        return "settled"


@pytest.fixture
def warnings_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done with the warnings of users."""
    log: list[str] = []
    fake = SimpleNamespace(
        install=lambda: log.append("install"), remove=lambda: log.append("remove")
    )
    monkeypatch.setattr(process, "user_warnings", fake)
    return log


def test_guards_are_there_while_anybody_wants_them(warnings_of: list[str]) -> None:
    guards, made = Guarding(), []
    make = lambda devices: made.append(Interceptor(devices)) or made[-1]
    assert (guards.is_installed, guards.checked_ops, guards.settle()) == (False, 0, None)
    assert guards.last_check == "none"
    guards.release()
    guards.acquire(make)
    guards.acquire(make)
    assert (len(made), guards.is_installed, guards.checked_ops) == (1, True, 5)
    assert guards.settle() == "settled"
    guards.release()
    assert guards.is_installed
    guards.release()
    assert not guards.is_installed
    assert made[0].log.count("uninstall") == 1
    assert warnings_of == ["install", "install", "remove"]
    guards.acquire(make)
    assert len(made) == 2
    guards.release()


def test_they_look_later_while_all_accept_that(warnings_of: list[str]) -> None:
    guards, item = Guarding(), Interceptor(None)
    make = lambda devices: item
    assert not guards.is_deferred
    guards.acquire(make, is_deferred=True)
    assert (guards.is_deferred, item.log[-2:]) == (True, [(True, True), "install"])
    guards.acquire(make)
    assert (guards.is_deferred, item.log[-2]) == (False, (False, True))
    guards.release(is_deferred=True)
    assert item.log[-1] == (False, False)
    guards.acquire(make, in_compiled=True)
    assert item.log[-2] == (False, True)
    guards.release(in_compiled=True)
    assert item.log[-1] == (False, False)
    guards.release(is_deferred=True)  # nobody wanted that: the last one goes
    assert not guards.is_installed
    assert not guards.is_deferred


def test_what_cannot_be_installed_is_taken_out(warnings_of: list[str]) -> None:
    guards, item = Guarding(), Interceptor(None)
    item.fails = True
    with pytest.raises(ValueError):
        guards.acquire(lambda devices: item)
    assert not guards.is_installed
    assert item.log[-1] == "uninstall"


def test_new_guards_are_put_in_at_once(warnings_of: list[str]) -> None:
    guards, item = Guarding(), Interceptor(None)
    guards.refresh()
    guards.acquire(lambda devices: item)
    guards.refresh()
    assert item.log[-2:] == ["uninstall", "install"]
    guards.release()


def test_the_devices_of_a_block(warnings_of: list[str]) -> None:
    guards, seen = Guarding(), []
    with guards.acting_on("cpu", "cuda"):
        with suppress(ValueError), guards.acting_on("cpu"):
            raise ValueError
        guards.acquire(lambda devices: seen.append(devices) or Interceptor(devices))
        guards.release()
    guards.acquire(lambda devices: seen.append(devices) or Interceptor(devices))
    guards.release()
    assert seen == [frozenset({"cpu", "cuda"}), None]


class Session:
    """An open session that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.reported: ReportedLines = WeakKeyDictionary()

    def add_finding(self, report: Any) -> None:
        self.told.append(report)

    def call_failed(self, error: BaseException, arguments: Any) -> None:
        self.told.append((error, arguments))

    def internal_error(self, line: str) -> None:
        self.told.append(line)


def elsewhere(run: Any) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_a_thread_works_for_its_own_innermost_session() -> None:
    guards, one, two, theirs = Guarding(), Session(), Session(), Session()
    assert guards.listener is None
    stop_one, stop_two = guards.listen(one), guards.listen(two)
    assert guards.listener is two
    seen: list[Any] = []
    elsewhere(lambda: seen.append(guards.listener))  # it has opened none: they are one thread's
    assert seen == [two]
    opened, go = threading.Event(), threading.Event()

    def run() -> None:
        guards.listen(theirs)
        opened.set()
        go.wait(10)  # another thread would get the number of one that is over

    thread = threading.Thread(target=run)
    thread.start()
    opened.wait(10)
    assert guards.listener is two
    assert guards.listeners == (one, two, theirs)
    elsewhere(lambda: seen.append(guards.listener))
    go.set()
    thread.join()
    assert seen[-1] is None  # of two threads it is not known which
    stop_two()
    stop_two()
    assert guards.listener is one
    stop_one()
    assert guards.listener is theirs


def test_what_a_session_is_told(warnings_of: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    guards, session, report = Guarding(), Session(), SimpleNamespace()
    guards.add_finding(report)  # type: ignore[arg-type]
    assert guards.last is report
    guards.call_failed(ValueError(), ())
    stop = guards.listen(session)
    error, report = ValueError(), SimpleNamespace(number=2)
    guards.add_finding(report)  # type: ignore[arg-type]
    assert guards.last is report
    guards.call_failed(error, (1,))
    guards.call_failed(DeviceIndexError("found", None), (1,))  # type: ignore[arg-type]
    guards.internal_error("ours")
    assert session.told == [report, (error, (1,)), "ours"]
    assert capsys.readouterr().err == ""
    stop()


def test_what_was_reported_is_of_the_session_or_of_the_guards_as_installed(
    warnings_of: list[str],
) -> None:
    guards, session = Guarding(), Session()
    guards.acquire(lambda devices: Interceptor(devices))
    installed = guards.reported
    stop = guards.listen(session)
    assert guards.reported is session.reported
    stop()
    guards.acquire(lambda devices: Interceptor(devices))
    assert guards.reported is installed
    guards.release()
    guards.release()
    guards.acquire(lambda devices: Interceptor(devices))
    assert guards.reported is not installed
    guards.release()


def test_without_a_session_a_line_of_ours_is_printed_once_and_not_too_many(
    capsys: pytest.CaptureFixture[str],
) -> None:
    guards = Guarding()
    for number in [1, 1, *range(2, 25)]:
        guards.internal_error(f"line {number}")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"cudalens: line {number}" for number in range(1, 21)]
