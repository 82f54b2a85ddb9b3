"""Showing a report: one bundle, with the interactive view where it can live."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cudalens.core.report import Hint, Report
from cudalens.notebook import display
from cudalens.session.findings import SwallowedFinding
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
    wanted = {"version_major": 2, "version_minor": 0, "model_id": "m1"}
    assert row["data"][display.WIDGET_TYPE] == wanted


@pytest.mark.parametrize(
    "why", ["option", "environment", "word", "terminal", "unattended", "old", "fails"]
)
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
    if why == "word":  # only 1 asks for it where nobody looks
        monkeypatch.setenv("CUDALENS_WIDGETS", "yes")
    if why == "old":  # an ipywidgets that the lens was not seen with
        monkeypatch.setattr(importlib.metadata, "version", lambda _: "7.7.1")
    kernel = None if why == "terminal" else object()
    shell = screen(kernel=kernel, allow_stdin=why not in ("unattended", "word"))
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
    terminal = screen(kernel=None)
    display.publish(terminal, REPORT, widgets=True)
    assert len(sent(terminal)) == 1


def test_nothing_is_shown_when_nothing_is_wrong() -> None:
    shell = screen(kernel=None)
    session: Any = SimpleNamespace(report=None, written=(), swallowed=False)
    display.finish(shell, session, Options(report="found"))
    assert sent(shell) == []
    assert shell.user_ns == {"found": None}


def ended(**parts: Any) -> Any:
    """Return a session that has ended with a report."""
    ends = dict.fromkeys(("swallowed", "is_reminder", "is_shown_early"))
    facts = {"report": REPORT, "written": (), "display_name": "n", **ends, **parts}
    return SimpleNamespace(**facts)


@pytest.fixture
def nothing_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no report have been shown before."""
    monkeypatch.setattr(display.Shown, "report", None)


@pytest.mark.usefixtures("nothing_shown")
@pytest.mark.parametrize(
    ("kernel", "early", "shown"),
    [(object(), False, [{}]), (None, False, [{}]), (None, True, []),
     (object(), True, [{"transient": {"display_id": "n"}, "update": True}])],
)  # fmt: skip
def test_a_report_that_was_shown_early_is_replaced_where_that_can_be(
    kernel: object, early: bool, shown: list[dict[str, Any]]
) -> None:
    shell = screen(kernel=kernel)
    display.finish(shell, ended(is_shown_early=early), Options(widgets=False, report="found"))
    calls = [
        {k: v for k, v in call.items() if k in ("transient", "update")} for call in sent(shell)
    ]
    assert calls == shown
    assert display.Shown.report is (REPORT if shown else None)
    assert shell.user_ns == {"found": REPORT}


@pytest.mark.usefixtures("nothing_shown")
@pytest.mark.parametrize("is_reminder", [True, False])
def test_a_failure_of_an_earlier_block_is_not_shown_again(is_reminder: bool) -> None:
    shell = screen(kernel=None)
    display.finish(shell, ended(is_reminder=is_reminder), Options())
    assert len(sent(shell)) == (not is_reminder)


@pytest.mark.parametrize(
    ("before", "is_shown", "shows"),
    [
        (REPORT, True, False),
        (REPORT, False, True),
        (None, True, True),
        (replace(REPORT, explanation="less"), True, True),
    ],
)
def test_what_a_check_inside_has_shown_is_shown_again_where_more_is_known(
    before: Report | None, is_shown: bool, shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display.Shown, "report", before)
    shell = screen(kernel=None)
    display.finish(shell, ended(), Options(), is_shown=is_shown)
    assert bool(sent(shell)) is shows


@pytest.mark.usefixtures("nothing_shown")
@pytest.mark.parametrize(
    ("swallowed", "line"),
    [
        (
            SwallowedFinding(other="KeyError"),
            "cudalens: warning: an error did not leave the cell, and KeyError was raised later: "
            "y[3] = 10 is outside\n",
        ),
        (SwallowedFinding(other="KeyError", was_raised_while_handled=True), ""),
        (None, ""),
    ],
)
def test_a_finding_that_was_swallowed_is_told_in_a_line_too(
    swallowed: SwallowedFinding | None, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    display.finish(screen(kernel=None), ended(swallowed=swallowed), Options())
    assert capsys.readouterr().err == line


@pytest.mark.usefixtures("nothing_shown")
def test_a_report_that_cannot_be_shown_hides_no_error_and_names_its_files(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shell = screen(kernel=None)
    shell.display_pub.publish.side_effect = ValueError("closed")
    display.finish(shell, ended(written=(Path("a.html"), Path("b.json"))), Options())
    said = capsys.readouterr()
    assert said.err == "cudalens: the report could not be shown: ValueError('closed')\n"
    assert said.out == "cudalens: the report is in a.html\ncudalens: the report is in b.json\n"


@pytest.mark.parametrize("has_shell", [True, False])
@pytest.mark.parametrize("has_report", [True, False])
def test_the_loss_of_a_device_is_shown_under_the_name_that_will_replace_it(
    has_shell: bool, has_report: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = screen(kernel=object())
    monkeypatch.setattr(display, "running_shell", lambda: shell if has_shell else None)
    session = display.new_session(Options(max_ops=3))
    assert session.max_ops == 3
    session.report = REPORT if has_report else None
    flushed = Mock()
    monkeypatch.setattr(display.sys.stdout, "flush", flushed)
    assert session.show_early is not None
    session.show_early()
    assert flushed.called is (has_shell and has_report)  # torch may abort next
    if has_shell and has_report:
        (call,) = sent(shell)
        assert call["transient"] == {"display_id": session.display_name}
        assert set(call["data"]) == {"text/plain", "text/html"}
    else:
        assert sent(shell) == []


@pytest.mark.parametrize(("version", "is_new"), [("8.0.0", True), ("9.1", True), ("7.8", False),
    ("nightly", False), (None, False)])  # fmt: skip
def test_the_row_needs_the_ipywidgets_that_it_was_seen_with(
    version: str | None, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Mock(return_value=version)
    if version is None:
        found.side_effect = importlib.metadata.PackageNotFoundError
    monkeypatch.setattr(importlib.metadata, "version", found)
    assert display._has_new_widgets() is is_new
    assert found.call_args.args == ("ipywidgets",)


@pytest.mark.parametrize(
    ("parent", "is_attended"),
    [
        (None, True), ({}, True), ({"content": {}}, True),
        ({"content": {"allow_stdin": True}}, True), ({"content": {"allow_stdin": False}}, False),
    ],
)  # fmt: skip
def test_who_may_be_asked_sits_at_the_front_end(parent: Any, is_attended: bool) -> None:
    assert display._is_attended(SimpleNamespace(get_parent=lambda: parent)) is is_attended
    assert display._is_attended(SimpleNamespace())


def test_the_action_of_a_shown_report_is_its_line() -> None:
    hint = Hint(text="they look 1-based", fix="f(y - 1)", tried=True)
    assert display.action_line(Report(headline="y", hints=(hint,))) == "try: f(y - 1)"
    assert display.action_line(Report(headline="y")) == ""
    assert display.action_line(None) == ""
