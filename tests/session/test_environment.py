"""A whole process under a check, as the environment asks for it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cudalens.session import environment
from tests.builders import make_report


class Session:
    """An open session with a report, which may have been shown."""

    def __init__(self, report: Any = None, *, is_shown: bool = False) -> None:
        self.report, self.is_shown_early, self.closed = report, is_shown, []

    def open(self) -> Session:
        return self

    def close(self, error: Any) -> None:
        self.closed.append(error)


@pytest.mark.parametrize(("mode", "deferred"), [("fast", False), ("deferred", True)])
def test_guards_alone_are_installed(
    monkeypatch: pytest.MonkeyPatch, mode: str, deferred: bool
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(environment.process, "install", lambda **options: asked.append(options))
    environment.begin(mode)
    assert asked == [{"deferred": deferred}]


def test_another_word_is_told_with_those_that_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment.begin("of")
    said = capsys.readouterr().err
    assert said.startswith("cudalens: CUDALENS='of' is none of on")
    assert "deferred" in said


@pytest.mark.parametrize("mode", ["on", "nan", "nan=strict"])
@pytest.mark.parametrize(
    ("report", "is_shown", "times"),
    [(make_report(), False, 1), (make_report(), True, 0), (None, False, 0)],
)
def test_a_block_lasts_as_long_as_the_process_and_its_report_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str, report: Any,
    is_shown: bool, times: int,
) -> None:  # fmt: skip
    session, at_exit, options = Session(report, is_shown=is_shown), [], []

    def opened(**given: Any) -> Session:
        options.append(given)
        return session

    monkeypatch.setattr(environment, "CheckSession", opened)
    register = lambda func, *args: at_exit.append((func, args))
    monkeypatch.setattr(environment, "atexit", SimpleNamespace(register=register))
    monkeypatch.setattr(sys, "last_value", error := ValueError(), raising=False)
    environment.begin(mode)
    assert options == [environment.MODES[mode]]
    ((end, given),) = at_exit
    end(*given)
    assert session.closed == [error]
    assert capsys.readouterr().err.count(make_report().headline) >= times
    session.show_early()  # type: ignore[attr-defined]
    assert (make_report().headline in capsys.readouterr().err) is (report is not None)
    end(*given)
    assert (make_report().headline in capsys.readouterr().err) is bool(times)
