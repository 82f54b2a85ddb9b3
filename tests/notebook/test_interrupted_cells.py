"""What comes while a checked cell is being opened or closed: the cell raises it, or is checked.

The shell prints what a callback of its events raises and goes on with the cell, so that an
interrupt there would let the cell run without its check, as a success.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from traceback import walk_stack
from typing import Any

import pytest
import torch
from torch import nn

import cudalens
from cudalens import DeviceIndexError
from cudalens.guards.process import PROCESS
from cudalens.notebook import cells
from tests.amount import AMOUNT
from tests.shells import BAD, Notebook

# What a handler raises inside coverage's own tracer leaves its lock held for ever.
pytestmark = [pytest.mark.no_cover, pytest.mark.usefixtures("no_callback_of_the_collector")]

OURS = str(Path(cudalens.__file__).parent)
STEPS = {
    "probe": "cudalens.evidence.lost_context.probe",
    "guards": "cudalens.session.process.acquire",
    "options": "cudalens.notebook.cells.new_session",
    "names": "cudalens.notebook.cells.CellWatch._note_name",
}
CELL = f"ran.append(1)\n{BAD}"


class TimeOutError(Exception):
    """What a signal handler of the user's raises."""


@pytest.fixture
def ran(notebook: Notebook) -> list[int]:
    notebook.names["ran"] = ran = []
    return ran


def interrupting(*args: Any, **kwargs: Any) -> Any:
    signal.raise_signal(signal.SIGINT)


def timed_out(*args: Any, **kwargs: Any) -> Any:
    def handler(number: int, frame: Any) -> None:
        raise TimeOutError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)


def failing(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("no room for it")


WAYS = {KeyboardInterrupt: interrupting, TimeOutError: timed_out, ValueError: failing}


@pytest.mark.parametrize("how", ["%%cudacheck\n", "%cudacheck on"])
@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("step", STEPS)
def test_a_check_that_cannot_be_opened_leaves_a_cell_that_raises(
    step: str,
    kind: type[BaseException],
    how: str,
    notebook: Notebook,
    ran: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    magic = notebook.under(how)
    with monkeypatch.context() as patch:
        patch.setattr(STEPS[step], WAYS[kind])
        result = notebook.run(magic + CELL)
    if step in ("probe", "names") and kind is ValueError:  # parts that can be done without
        assert isinstance(notebook.error, DeviceIndexError)
        assert "no room for it" in notebook.error.report.to_text()
        return
    assert type(notebook.error) is kind
    assert not result.success
    assert not ran
    assert "Error in callback" not in notebook.out + notebook.err
    first = "%%cudacheck" if magic else "ran.append(1)"
    assert f"1 {first}" in notebook.out or step == "names"
    is_told = "could not be opened, so the cell was not run" in notebook.out + notebook.err
    assert is_told is (kind is ValueError)
    notebook.run(magic + CELL)
    assert isinstance(notebook.error, DeviceIndexError)


def test_checks_that_cannot_be_opened_can_be_turned_off(
    notebook: Notebook, ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook.run("%cudacheck on")
    monkeypatch.setattr(STEPS["guards"], failing)
    notebook.run("ran.append(1)")
    assert isinstance(notebook.error, ValueError)
    notebook.run("%cudacheck off")
    assert notebook.error is None
    notebook.run("ran.append(2)")
    assert ran == [2]


def test_the_name_of_a_report_is_none_where_the_check_was_not_opened(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cell in ("1 +", "2"):
        notebook.names["found"] = "of an earlier cell"
        notebook.run(f"%%cudacheck -r found\n{cell}")
        assert notebook.names["found"] is None
        monkeypatch.setattr(STEPS["guards"], failing)


def test_an_interrupt_before_the_shell_has_told_of_a_cell_leaves_it_checked(
    notebook: Notebook, ran: list[int]
) -> None:
    """At the first instant of the callback nothing of ours can take note of it."""
    interrupt_at("_before_any", notebook, f"%%cudacheck\n{CELL}")
    assert isinstance(notebook.error, DeviceIndexError | KeyboardInterrupt)
    assert "KeyboardInterrupt" in notebook.out


def test_an_interrupt_once_a_cell_is_noted_ends_it(notebook: Notebook, ran: list[int]) -> None:
    interrupt_at("_before_any", notebook, f"%%cudacheck\n{CELL}", behind="append")
    assert isinstance(notebook.error, KeyboardInterrupt)
    assert "Error in callback" not in notebook.out
    assert not ran


def test_an_interrupt_where_the_end_is_told_is_put_right_by_the_next_cell(
    notebook: Notebook,
) -> None:
    interrupt_at("_after", notebook, "%%cudacheck\n1")
    notebook.run("2")
    assert PROCESS.listeners == ()
    assert not PROCESS.is_installed


def interrupt_at(function: str, notebook: Notebook, cell: str, behind: str = "") -> None:
    """Run a cell and interrupt it where a function of the cells' module begins.

    Args:
        behind: the function of C that it calls before, where it is not to begin only.
    """

    def watch(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        is_there = event == "c_return" and arg.__name__ == behind if behind else event == "call"
        if is_there and code.co_name == function and code.co_filename == cells.__file__:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(watch)
    try:
        notebook.run(cell)
    finally:
        sys.setprofile(None)


# --- at random ------------------------------------------------------------------------------------


def state() -> dict[str, object]:
    """Return what a check may change of the process."""
    return {
        "guards": (PROCESS.is_installed, PROCESS.listeners),
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "signal handlers": [signal.getsignal(item) for item in (signal.SIGINT, signal.SIGCHLD)],
        "module hooks": dict(nn.modules.module._global_forward_pre_hooks),
        "file descriptor 2": os.fstat(2).st_ino,
        "descriptors": len([*Path("/proc/self/fd").iterdir()]),
    }


IN_ONE_NET = ("core", "diagnosis", "evidence", "render", "source")
"""What a report is made by: an interrupt in it goes the same way, wherever it comes."""
ENTRIES = ("_before_any", "_before")
"""Where they begin nothing of ours can take note of it; a test above says what happens then."""


class Interrupter:
    """Interrupts the process at one step of ours: where a function begins or a call comes back."""

    def __init__(self, instant: int) -> None:
        self.count, self.has_come, self._instant = 0, False, instant
        self.places: dict[object, int] = {}
        """The first instant of each place, by the stack of what opens and closes a check."""

    def __enter__(self) -> Interrupter:
        sys.setprofile(self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _watch(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        is_step = event == "call" or (event == "c_return" and arg.__name__ != "__enter__")
        if not (is_step and code.co_filename.startswith(OURS)) or "/simulate/" in code.co_filename:
            return
        self.count += 1
        self._note_place(frame, event)
        if self.count >= self._instant and not self.has_come and not is_in_no_grad(frame):
            self.has_come = True
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    def _note_place(self, frame: Any, event: str) -> None:
        if self._instant < sys.maxsize or (event == "call" and frame.f_code.co_name in ENTRIES):
            return
        stack = [item for item, _ in walk_stack(frame) if item.f_code.co_filename.startswith(OURS)]
        parts = [Path(item.f_code.co_filename).parent.name for item in stack]
        if parts[0] not in IN_ONE_NET:
            near = [it for it, part in zip(stack, parts, strict=True) if part not in IN_ONE_NET]
            place = event, *((item.f_code, item.f_lasti) for item in near)
            self.places.setdefault(place, self.count)


def is_in_no_grad(frame: Any) -> bool:
    """Cut in two, torch's no_grad leaves its mode, without us too."""
    return any("grad_mode.py" in item.f_code.co_filename for item, _ in walk_stack(frame))


@pytest.fixture
def quiet_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


HOW = [
    "%%cudacheck\n",
    "%cudacheck on",
    pytest.param("%%cudacheck --fast\n", marks=pytest.mark.thorough),
    pytest.param("%%cudacheck --nan\n", marks=pytest.mark.thorough),
]


@pytest.mark.usefixtures("quiet_signals")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are listed on Linux")
@pytest.mark.parametrize("how", HOW)
def test_a_cell_interrupted_at_any_instant_raises_or_is_checked(
    how: str, notebook: Notebook, ran: list[int]
) -> None:
    """Never does it run without its check, and nothing of it stays behind the next cell."""
    magic = notebook.under(how)
    notebook.run(magic + CELL)  # the first one imports
    with Interrupter(sys.maxsize) as steps:
        notebook.run(magic + CELL)
    notebook.run("pass")
    gc.collect()  # what earlier tests left open may be closed at any time
    before, ends = state(), {DeviceIndexError: 0, KeyboardInterrupt: 0}
    instants = list(steps.places.values())
    tried = min(AMOUNT.cell_interrupts, len(instants))
    for instant in random.Random(47).sample(instants, tried):
        ran.clear()
        with Interrupter(instant) as interrupter, suppress(KeyboardInterrupt):
            result = None
            result = notebook.run(magic + CELL)
        kind = KeyboardInterrupt if result is None else type(notebook.error)
        assert kind in ends, (instant, kind, notebook.out)
        ends[kind] += 1
        assert kind is DeviceIndexError or interrupter.has_come
        assert "Error in callback" not in notebook.out + notebook.err
        notebook.run("ids.sum().item()")
        assert notebook.error is None, instant
        now = state()
        assert {name: now[name] for name in now if now[name] != before[name]} == {}, instant
    assert ends[KeyboardInterrupt] > 0.9 * tried
