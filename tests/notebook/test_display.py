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


def screen(*, kernel: object | None, allow_stdin: bool = True) -> Any:
    """Stand for a shell, which keeps what is published."""
    shell = Mock(kernel=kernel, user_ns={})
    shell.get_parent.return_value = {"content": {"allow_stdin": allow_stdin}}
    return shell


def sent(shell: Any) -> list[dict[str, Any]]:
    """Return what each call has published, by the names of its arguments."""
    return [call.kwargs for call in shell.display_pub.publish.call_args_list]


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Give reports an interactive view, ipywidgets installed or not; return how each is kept."""
    kept: list[Callable[[], None]] = []

    def build(report: Report, keep: Callable[[], None]) -> Any:
        kept.append(keep)
        return SimpleNamespace(model_id="m1")

    monkeypatch.setattr("cudalens.render.widget.build", build)
    monkeypatch.delenv("CUDALENS_WIDGETS", raising=False)
    return kept


def test_the_view_lies_in_one_bundle_with_its_twins_which_can_take_its_place(view: Any) -> None:
    """A front end picks the richest form that it knows; the text is always there."""
    shell = screen(kernel=object())
    display.publish(shell, REPORT, widgets=True)
    display.publish(shell, REPORT, widgets=True)
    view[-1]()
    first, second, static = sent(shell)
    assert set(first["data"]) == {display.WIDGET_TYPE, "text/plain", "text/html"}
    assert first["data"][display.WIDGET_TYPE]["model_id"] == "m1"
    assert first["transient"] != second["transient"] == static["transient"]
    assert [call.get("update", False) for call in sent(shell)] == [False, False, True]
    assert set(static["data"]) == {"text/plain", "text/html"}


@pytest.mark.parametrize("why", ["option", "environment", "terminal", "unattended", "old", "fails"])
def test_static_output(
    view: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], why: str
) -> None:
    """It has no name: nobody will replace it, and a name would make no two runs alike.

    A view that fails leaves it too, with one line on stderr.
    """
    if why == "fails":
        monkeypatch.setattr("cudalens.render.widget.build", Mock(side_effect=ImportError("none")))
    if why == "environment":
        monkeypatch.setenv("CUDALENS_WIDGETS", "0")
    if why == "old":  # an ipywidgets that the lens was not seen with
        monkeypatch.setattr(importlib.metadata, "version", lambda _: "7.7.1")
    kernel = None if why == "terminal" else object()
    shell = screen(kernel=kernel, allow_stdin=why != "unattended")
    display.publish(shell, REPORT, widgets=why != "option")
    (call,) = sent(shell)
    assert set(call) == {"data", "metadata"}
    assert set(call["data"]) == {"text/plain", "text/html"}
    assert capsys.readouterr().err.count("\n") == (why == "fails")


def test_the_environment_can_ask_for_the_view(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDALENS_WIDGETS=1 shows it where nobody is known to look, and with any ipywidgets."""
    monkeypatch.setenv("CUDALENS_WIDGETS", "1")
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "7.7.1")
    shell = screen(kernel=object(), allow_stdin=False)
    display.publish(shell, REPORT, widgets=True)
    assert display.WIDGET_TYPE in sent(shell)[0]["data"]


def test_nothing_is_shown_when_nothing_is_wrong() -> None:
    shell = screen(kernel=None)
    session: Any = SimpleNamespace(report=None, written=(), swallowed=False)
    display.finish(shell, session, Options(report="found"))
    assert sent(shell) == []
    assert shell.user_ns == {"found": None}
