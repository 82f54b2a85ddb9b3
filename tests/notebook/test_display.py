"""Showing a report: one bundle, with the interactive view where it can live."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbclient
import nbformat
import pytest
from jupyter_client.manager import start_new_kernel

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
    monkeypatch.setattr(display.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(display, "renderer", lambda name: lambda report, keep: View(keep))
    monkeypatch.delenv("CUDALENS_WIDGETS", raising=False)


def test_the_view_lies_in_the_same_bundle_as_its_twins(view: None) -> None:
    """A front end picks the richest form that it knows; the text is always there."""
    screen = Screen(kernel=object())
    display.publish(screen, REPORT, widgets=True)
    (bundle,) = screen.bundles
    assert set(bundle) == {display.WIDGET_TYPE, "text/plain", "text/html"}
    assert bundle[display.WIDGET_TYPE]["model_id"] == "m1"


def test_a_kept_view_is_replaced_by_its_twins(view: None) -> None:
    """The output of that name, and of no other, becomes text and HTML."""
    screen = Screen(kernel=object())
    display.publish(screen, REPORT, widgets=True)
    display.publish(screen, REPORT, widgets=True)
    View.last.keep()
    names = [transient["display_id"] for transient, _ in screen.sent if transient]
    assert names[0] != names[1] == names[2]
    assert [update for _, update in screen.sent] == [False, False, True]
    assert set(screen.bundles[2]) == {"text/plain", "text/html"}


def test_static_output_has_no_name(view: None) -> None:
    """Nobody will replace it, and a name of its own would make no two runs alike."""
    screen = Screen(kernel=object())
    display.publish(screen, REPORT, widgets=False)
    assert screen.sent == [(None, False)]


@pytest.mark.parametrize("why", ["option", "environment", "terminal", "unattended", "old"])
def test_static_output(view: None, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Each way to ask for static output gives text and HTML only."""
    if why == "environment":
        monkeypatch.setenv("CUDALENS_WIDGETS", "0")
    if why == "old":  # an ipywidgets that the lens was not seen with
        monkeypatch.setattr(importlib.metadata, "version", lambda _: "7.7.1")
    kernel = None if why == "terminal" else object()
    screen = Screen(kernel=kernel, allow_stdin=why != "unattended")
    display.publish(screen, REPORT, widgets=why != "option")
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
    """One line says so."""

    def broken(name: str) -> None:
        raise ImportError("no ipywidgets")

    monkeypatch.setattr(display, "renderer", broken)
    screen = Screen(kernel=object())
    display.publish(screen, REPORT, widgets=True)
    assert [set(bundle) for bundle in screen.bundles] == [{"text/plain", "text/html"}]
    assert capsys.readouterr().err.count("\n") == 1


def test_nothing_is_shown_when_nothing_is_wrong() -> None:
    """But a variable that was asked for is bound."""
    screen = Screen(kernel=None)
    session: Any = SimpleNamespace(report=None, swallowed=False)
    display.finish(screen, session, Options(report="found"))
    assert screen.bundles == []
    assert screen.user_ns == {"found": None}


SHOW = """\
from cudalens.notebook.display import publish
from cudalens.core.report import Report
publish(get_ipython(), Report(headline="y[3] = 10 is outside"), widgets=True)"""


@pytest.mark.parametrize("is_attended", [True, False])
def test_a_real_kernel_knows_whether_somebody_looks(is_attended: bool) -> None:
    """JupyterLab, Notebook and VS Code may ask for input; nbclient and all built on it may not."""
    root = str(Path(__file__).parents[2])
    manager, client = start_new_kernel(env={**os.environ, "PYTHONPATH": root})
    shown: list[dict[str, Any]] = []

    def take(message: dict[str, Any]) -> None:
        if message["msg_type"] == "display_data":
            shown.append(message["content"]["data"])

    try:
        client.execute_interactive(SHOW, allow_stdin=is_attended, output_hook=take, timeout=60)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    (bundle,) = shown
    assert {"text/html", "text/plain"} <= set(bundle)
    assert (display.WIDGET_TYPE in bundle) is is_attended


def test_nbclient_gets_the_static_report() -> None:
    """So do papermill, nbconvert --execute and nbval, which run on it."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SHOW)])
    nbclient.NotebookClient(book, timeout=60, kernel_name="python3").execute()
    (output,) = book.cells[0].outputs
    assert set(output.data) == {"text/html", "text/plain"}
    assert "widgets" not in book.metadata
