"""Showing a report: one bundle, with the interactive view where it can live."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cudalens.core.report import Hint, Report
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
def view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give reports an interactive row, ipywidgets installed or not."""
    monkeypatch.setattr(
        "cudalens.render.widget.live", lambda report: SimpleNamespace(model_id="m1")
    )
    monkeypatch.delenv("CUDALENS_WIDGETS", raising=False)


def test_the_row_is_an_output_of_its_own_below_the_static_report(view: None) -> None:
    """A reopened page shows the first without a kernel, whatever becomes of the second."""
    shell = screen(kernel=object())
    display.publish(shell, REPORT, widgets=True)
    static, row = sent(shell)
    assert set(static["data"]) == {"text/plain", "text/html"}
    assert set(row["data"]) == {"text/plain", display.WIDGET_TYPE}
    assert row["data"]["text/plain"] == ""
    assert row["data"][display.WIDGET_TYPE]["model_id"] == "m1"


@pytest.mark.parametrize("why", ["option", "environment", "terminal", "unattended", "old", "fails"])
def test_static_output(
    view: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], why: str
) -> None:
    """It has no name: nobody will replace it, and a name would make no two runs alike.

    A view that fails leaves it too, with one line on stderr.
    """
    if why == "fails":
        monkeypatch.setattr("cudalens.render.widget.live", Mock(side_effect=ImportError("none")))
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


def test_the_environment_can_ask_for_the_view(view: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDALENS_WIDGETS=1 shows it where nobody is known to look, and with any ipywidgets."""
    monkeypatch.setenv("CUDALENS_WIDGETS", "1")
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "7.7.1")
    shell = screen(kernel=object(), allow_stdin=False)
    display.publish(shell, REPORT, widgets=True)
    assert display.WIDGET_TYPE in sent(shell)[1]["data"]


def test_nothing_is_shown_when_nothing_is_wrong() -> None:
    shell = screen(kernel=None)
    session: Any = SimpleNamespace(report=None, written=(), swallowed=False)
    display.finish(shell, session, Options(report="found"))
    assert sent(shell) == []
    assert shell.user_ns == {"found": None}


def test_the_action_of_a_shown_report_is_its_line() -> None:
    hint = Hint(text="they look 1-based", fix="f(y - 1)", tried=True)
    assert display.action_line(Report(headline="y", hints=(hint,))) == "try: f(y - 1)"
    assert display.action_line(Report(headline="y")) == ""
    assert display.action_line(None) == ""
