"""What listens to a kernel's stderr, over a stream of the test's own."""

from __future__ import annotations

import io
import sys

import pytest

from cudalens.notebook.printed_asserts import PrintedAsserts

LINE = "Loss.cu:245: f: block: [0,0,0], thread: [0,0,0] Assertion `t >= 0` failed.\n"


class KernelStream(io.StringIO):
    """A stream with what every kernel's has, and without the hooks of the newer ones."""

    pub_thread = object()


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
