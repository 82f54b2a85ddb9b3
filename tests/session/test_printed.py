"""Tracebacks that are printed while a check is open show no frame of ours (issue 17, item 5)."""

from __future__ import annotations

import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudalens
from cudalens import simulate
from cudalens.core._python import Frameless, came_from_outside
from cudalens.session import options
from cudalens.session.printed import OwnFramesHidden
from tests.blocks import own_op
from tests.shells import ANSI, BAD, SETUP, Notebook

OWN = str(Path(cudalens.__path__[0]))
UNRESOLVED = "failed resolving"


def fail() -> None:
    """Read row 7 of a table of 5."""
    F.embedding(torch.tensor([1, 7], device="cuda"), torch.zeros(5, 2, device="cuda"))


def handled(show: Callable[[IndexError], None]) -> None:
    try:
        fail()
    except IndexError as error:
        show(error)


def as_a_cause(error: IndexError) -> None:
    try:
        raise KeyError from error
    except KeyError as caused:
        traceback.print_exception(caused)


def in_a_thread() -> None:
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()


PRINTED = {
    "print_exc": partial(handled, lambda _: traceback.print_exc()),
    "print_tb": partial(handled, lambda error: traceback.print_tb(error.__traceback__)),
    "logging": partial(handled, lambda _: logging.getLogger("test_printed").exception("failed")),
    "as a cause": partial(handled, as_a_cause),
    "in a thread": in_a_thread,
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("way", PRINTED.values(), ids=PRINTED)
def test_item_5_what_python_prints_has_the_users_frames_only(
    way: Callable[[], None],
    sim: simulate.Simulation,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The user's and torch's frames are there, ours are not; afterwards nothing is replaced."""
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    monkeypatch.setattr(logging.getLogger("test_printed"), "handlers", [logging.StreamHandler()])
    before = (traceback.TracebackException.__init__, traceback.extract_tb, threading.excepthook)
    with cudalens.check():
        way()
    after = (traceback.TracebackException.__init__, traceback.extract_tb, threading.excepthook)
    assert after == before
    printed = capsys.readouterr().err
    assert "in fail" in printed and "functional.py" in printed
    assert OWN not in printed


def test_item_5_a_failure_of_ours_alone_is_printed_whole() -> None:
    """A traceback that holds nothing but our frames tells of a defect of ours: it is kept."""
    with OwnFramesHidden():
        try:
            options._positive("0")
        except ValueError as error:
            text = "".join(traceback.format_tb(error.__traceback__.tb_next))
    assert "options.py" in text


def wrong_shape() -> None:
    torch.ones(3, device="cuda") + torch.ones(4, device="cuda")


def not_finite() -> None:
    torch.log(-torch.ones(3, device="cuda"))


def waits() -> None:
    torch.cuda.synchronize(7)


def called_back() -> None:
    """Fail in an op of the user's own, which torch calls in the middle of ours."""
    with own_op("hit(Tensor x) -> Tensor", user_kernel) as hit:
        hit(torch.ones(3, device="cuda"))


def user_kernel(x: torch.Tensor) -> torch.Tensor:
    msg = "of the user's own"
    raise ValueError(msg)


def functions_of(error: BaseException) -> list[str]:
    """Return the names of the functions in a traceback that is printed now."""
    frames = traceback.extract_tb(error.__traceback__)
    assert not [frame.filename for frame in frames if frame.filename.startswith(OWN)]
    return [frame.name for frame in frames][1:]  # without the test itself


KEPT = {
    wrong_shape: ["wrong_shape"],
    fail: ["fail", "embedding"],
    waits: ["waits"],
    called_back: ["called_back", "__call__", "user_kernel"],
    not_finite: ["not_finite"],
}
OPENED: dict[str, Callable[[], Any]] = {
    "sync": partial(cudalens.check, sync=True),
    "fast": partial(cudalens.check, fast=True),
    "nan": partial(cudalens.check, nan=True),
    "guards": cudalens.guard,
    # On the rehearsal device, as with a GPU, whose kernels leave no Python frame.
    "nothing": nullcontext,
}
RAISED = [
    *product((wrong_shape, fail, waits, called_back), ("sync", "fast", "nan")),
    *product((wrong_shape, waits, called_back), ["nothing"]),
    *((not_finite, "nan"), (fail, "guards")),
]


@pytest.mark.parametrize(("way", "opened"), RAISED)
def test_item_5_an_exception_that_is_kept_is_printed_without_our_frames_later(
    way: Callable[[], None], opened: str, sim: simulate.Simulation
) -> None:
    """After the check nothing is replaced any more: the exception itself holds none of them."""
    with OPENED[opened](), pytest.raises(Exception) as caught:
        way()
    assert functions_of(caught.value) == KEPT[way]


def test_item_5_an_interrupted_op_keeps_the_frames_that_tell_of_the_interrupt(
    sim: simulate.Simulation,
) -> None:
    """A handler is known by the frame that it was given, and that one is ours."""

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, before)
        msg = "too late"
        raise TimeoutError(msg)

    before = signal.signal(signal.SIGALRM, handler)
    with pytest.raises(TimeoutError) as caught:
        Frameless(signal.raise_signal)(signal.SIGALRM)
    assert came_from_outside(caught.value)


class Failing(torch.utils.data.Dataset[torch.Tensor]):
    """A data set that reads a row which is not there."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return F.embedding(torch.tensor([9]), torch.zeros(3, 2))


def message_of_worker() -> str:
    loader = torch.utils.data.DataLoader(Failing(), num_workers=1)
    with pytest.raises(IndexError) as caught:
        next(iter(loader))
    return str(caught.value)


def test_item_5_a_workers_exception_has_the_text_that_it_has_without_a_check() -> None:
    """ "Original Traceback" is the same, word for word."""
    unchecked = message_of_worker()
    with cudalens.check():
        checked = message_of_worker()
    assert "Original Traceback" in unchecked
    assert checked == unchecked


SHOWN = {
    "%run": "%run {script}",
    "%%capture": f"%%capture out\n{BAD}",
    "__repr__": f"class R:\n    def __repr__(self):\n        {BAD}\nR()",
    "handled": f"try:\n    {BAD}\nexcept Exception:\n    get_ipython().showtraceback()",
}


@pytest.mark.parametrize("how", ["%%cudacheck\n", "%cudacheck on"])
@pytest.mark.parametrize("code", SHOWN.values(), ids=SHOWN)
def test_item_5_what_the_shell_prints_has_the_users_frames_only(
    notebook: Notebook, code: str, how: str, tmp_path: Path
) -> None:
    """Nothing of ours and no argument that could not be resolved; then the shell is as before."""
    script = tmp_path / "script.py"
    script.write_text(f"{SETUP}\n{BAD}\n")
    notebook.run(notebook.under(how) + code.format(script=script))
    printed = ANSI.sub("", notebook.names["out"].stdout) if "capture" in code else notebook.out
    assert "is outside the 5 rows" in printed and "functional.py" in printed
    assert OWN not in printed and UNRESOLVED not in printed


def hit(x: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGINT)
    return x.clone()


@pytest.mark.parametrize("how", ["%%cudacheck\n", "%cudacheck on", "%cudacheck "])
def test_item_29_an_interrupt_shows_no_frame_of_ours(notebook: Notebook, how: str) -> None:
    """It comes inside an op, which we have passed on."""
    with own_op("hit(Tensor x) -> Tensor", hit):
        notebook.run(f"{notebook.under(how)}torch.ops.mine.hit(table)")
    assert isinstance(notebook.error, KeyboardInterrupt)
    assert "KeyboardInterrupt" in notebook.out and "in hit" in notebook.out
    assert OWN not in notebook.out and UNRESOLVED not in notebook.out
