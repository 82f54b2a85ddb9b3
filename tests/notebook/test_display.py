"""Showing a report: one bundle, with the interactive view where it can live."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cudalens.core.report import Report
from cudalens.notebook import display
from cudalens.session.options import Options

REPORT = Report(headline="y[3] = 10 is outside")


class Screen:
    """Stands for a shell: keeps what is published."""

    def __init__(self, *, kernel: object | None, allow_stdin: bool = True) -> None:
        self.kernel = kernel
        self.allow_stdin = allow_stdin
        self.display_pub = self
        self.user_ns: dict[str, Any] = {}
        self.bundles: list[dict[str, Any]] = []
        self.sent: list[tuple[dict[str, Any] | None, bool]] = []

    def get_parent(self) -> dict[str, Any]:
        return {"content": {"allow_stdin": self.allow_stdin}}

    def publish(
        self,
        *,
        data: dict[str, Any],
        metadata: dict[str, Any],
        transient: dict[str, Any] | None = None,
        update: bool = False,
    ) -> None:
        self.bundles.append(data)
        self.sent.append((transient, update))


class View:
    """Stands for the interactive view: knows how it is kept."""

    model_id = "m1"
    last: View

    def __init__(self, keep: Callable[[], None]) -> None:
        self.keep = keep
        View.last = self


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return reports an interactive view, whether or not ipywidgets is installed."""
    monkeypatch.setattr("cudalens.render.widget.build", lambda report, keep: View(keep))
    monkeypatch.delenv("CUDALENS_WIDGETS", raising=False)


def test_the_view_lies_in_one_bundle_with_its_twins_which_can_take_its_place(view: None) -> None:
    """A front end picks the richest form that it knows; the text is always there."""
    screen = Screen(kernel=object())
    display.publish(screen, REPORT, widgets=True)
    display.publish(screen, REPORT, widgets=True)
    assert set(screen.bundles[0]) == {display.WIDGET_TYPE, "text/plain", "text/html"}
    assert screen.bundles[0][display.WIDGET_TYPE]["model_id"] == "m1"
    View.last.keep()
    names = [transient["display_id"] for transient, _ in screen.sent if transient]
    assert names[0] != names[1] == names[2]
    assert [update for _, update in screen.sent] == [False, False, True]
    assert set(screen.bundles[2]) == {"text/plain", "text/html"}


@pytest.mark.parametrize("why", ["option", "environment", "terminal", "unattended", "old"])
def test_static_output(view: None, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """It has no name: nobody will replace it, and a name would make no two runs alike."""
    if why == "environment":
        monkeypatch.setenv("CUDALENS_WIDGETS", "0")
    if why == "old":  # an ipywidgets that the lens was not seen with
        monkeypatch.setattr(importlib.metadata, "version", lambda _: "7.7.1")
    kernel = None if why == "terminal" else object()
    screen = Screen(kernel=kernel, allow_stdin=why != "unattended")
    display.publish(screen, REPORT, widgets=why != "option")
    assert screen.sent == [(None, False)]
    assert [set(bundle) for bundle in screen.bundles] == [{"text/plain", "text/html"}]


def test_the_environment_can_ask_for_the_view(view: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDALENS_WIDGETS=1 shows it where nobody is known to look, and with any ipywidgets."""
    monkeypatch.setenv("CUDALENS_WIDGETS", "1")
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "7.7.1")
    screen = Screen(kernel=object(), allow_stdin=False)
    display.publish(screen, REPORT, widgets=True)
    assert display.WIDGET_TYPE in screen.bundles[0]


def test_a_view_that_fails_leaves_the_static_report(
    view: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cudalens.render.widget.build", Mock(side_effect=ImportError("none")))
    screen = Screen(kernel=object())
    display.publish(screen, REPORT, widgets=True)
    assert [set(bundle) for bundle in screen.bundles] == [{"text/plain", "text/html"}]
    assert capsys.readouterr().err.count("\n") == 1


def test_nothing_is_shown_when_nothing_is_wrong() -> None:
    screen = Screen(kernel=None)
    session: Any = SimpleNamespace(report=None, written=(), swallowed=False)
    display.finish(screen, session, Options(report="found"))
    assert screen.bundles == []
    assert screen.user_ns == {"found": None}
