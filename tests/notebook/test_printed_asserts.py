"""What listens to a kernel's stderr, over a stream of the test's own."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from cudalens.notebook.printed_asserts import PrintedAsserts

LINE = "Loss.cu:245: f: block: [0,0,0], thread: [0,0,0] Assertion `t >= 0` failed.\n"


class KernelStream(io.StringIO):
    """A stream with what every kernel's has, and without the hooks of the newer ones."""

    pub_thread: object = object()


class HookedStream(KernelStream):
    """A newer one, whose thread shows each text to its hooks."""

    class pub_thread:
        schedule = staticmethod(lambda call: call())

    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[Any] = []
        self.register_hook, self.unregister_hook = self.hooks.append, self.hooks.remove


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_line_may_come_in_pieces_and_all_of_them_go_on(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    stream = KernelStream()
    monkeypatch.setattr(sys, "stderr", stream)
    printed = PrintedAsserts()
    printed.attach()
    text = f"before\n{LINE}after\n{LINE}" + "\r progress" * 1000
    for at in range(0, len(text), size):
        sys.stderr.write(text[at : at + size])
    assert stream.getvalue() == text
    assert "`t >= 0` failed. (2 times" in printed.text() and "before" not in printed.text()
    assert len(printed._begun) < 5000
    printed.detach()
    assert vars(stream) == {}


def test_a_newer_stream_shows_its_texts_and_keeps_its_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = HookedStream()
    monkeypatch.setattr(sys, "stderr", stream)
    printed, write = PrintedAsserts(), stream.write
    calls: list[Any] = []
    with monkeypatch.context() as context:  # hooks belong to the thread that sends the texts
        context.setattr(HookedStream.pub_thread, "schedule", calls.append)
        printed.attach()
    assert (stream.hooks, len(calls)) == ([], 1)
    calls[0]()
    assert stream.write == write
    (hook,) = stream.hooks
    for message in ({"content": {"text": LINE}}, {"content": {}}, {}):
        assert hook(message) is message
    assert printed.text() == LINE.strip()
    printed.detach()
    assert stream.hooks == []
    printed.attach()
    stream.pub_thread = None  # type: ignore[assignment,misc]
    printed.detach()  # the kernel ends
    printed.detach()


def test_a_line_that_has_just_begun_counts_and_the_end_of_a_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", KernelStream())
    printed = PrintedAsserts()
    printed.attach()
    assert sys.stderr.write("x" * 5000 + "\r" + LINE.strip()) == 5000 + len(LINE)
    assert "`t >= 0`" in printed.text()
    sys.stderr.write("\n")
    assert "`t >= 0`" in printed.text() and printed._begun == ""
    printed.detach()


@pytest.mark.parametrize(("lines", "kept"), [(800, True), (2000, False)])
def test_only_so_much_is_kept(lines: int, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", KernelStream())
    printed = PrintedAsserts()
    printed.attach()
    for _ in range(lines // 100):
        sys.stderr.write(("y" * (len(LINE) - 12) + " Assertion `\n") * 100)
    sys.stderr.write(LINE)
    assert ("`t >= 0`" in printed.text()) is kept
    assert len(printed._asserts) < 2**17
    printed.detach()


def test_a_wrapper_put_around_ours_works_on_and_nothing_more_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream that somebody had wrapped before gets his method back."""
    written: list[str] = []
    stream = KernelStream()
    monkeypatch.setattr(sys, "stderr", stream)
    printed = PrintedAsserts()
    printed.attach()
    ours = stream.write
    stream.write = lambda text: written.append(text) or ours(text)  # type: ignore[method-assign,func-returns-value]
    wrapper = stream.write
    printed.detach()
    sys.stderr.write(LINE)
    assert (stream.getvalue(), written, printed.text()) == (LINE, [LINE], "")
    printed.attach()
    printed.detach()
    assert stream.write is wrapper


def test_in_a_terminal_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    printed = PrintedAsserts()
    printed.attach()
    assert vars(plain) == {}
    sys.stderr.write(LINE)
    printed.detach()
    assert printed.text() == ""
