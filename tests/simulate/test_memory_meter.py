"""The memory meter counts rightly whatever comes between its steps: exceptions, other threads."""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch

from cudalens.simulate.memory import BLOCK_BYTES, MemoryMeter

# What a handler raises inside coverage's own tracer leaves its lock held for ever.
pytestmark = pytest.mark.no_cover

CODE = {item.__code__ for item in vars(MemoryMeter).values() if inspect.isfunction(item)}
CODE.add(MemoryMeter.allocated_bytes.fget.__code__)  # type: ignore[attr-defined]
WAIT_S = 60
HIGH = 1 << 40
"""A peak that is never reached, so that no sum corrects what is added up."""


class StopError(Exception):
    """What a handler raises."""


def storage(blocks: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(blocks * BLOCK_BYTES)


def work(meter: MemoryMeter, kept: list[Any]) -> None:
    """Track, grow, shrink and free storages, two of them at once."""
    for blocks in (1, 2, 3):
        kept.append(storage(blocks))
        meter.track(kept[-1])
    grown, shrunk = kept[0], kept[2]
    grown.resize_(5 * BLOCK_BYTES)
    meter.track(grown)
    shrunk.resize_(0)
    meter.track(shrunk)
    del grown, shrunk
    del kept[:2]
    kept.append(storage(4))
    meter.track(kept[-1])
    meter.track(storage(1))


def work_and_read(meter: MemoryMeter, kept: list[Any]) -> None:
    work(meter, kept)
    meter.reset_peak()
    assert meter.allocated_bytes >= 4 * BLOCK_BYTES


def is_stopped(meter: MemoryMeter, kept: list[Any], instant: int) -> bool:
    """Work with an exception before one bytecode of the meter; return whether it came."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if frame.f_code not in CODE:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        if count == instant and event == "opcode":
            raise StopError
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # asked for before: else Python 3.12 tells of none
    sys.settrace(trace)
    try:
        work_and_read(meter, kept)
    except StopError:
        return True
    finally:
        sys.settrace(before)
    return False


def agrees(meter: MemoryMeter, kept: list[Any]) -> bool:
    """Return whether it counts what lives, tracked again, and nothing when nothing does."""
    list(map(meter.track, kept))  # a loop's variable would hold the last one
    expected = sum(item.nbytes() for item in kept)
    is_right = meter.allocated_bytes == expected == meter._running <= meter.peak_bytes
    kept.clear()
    return is_right and meter.allocated_bytes == 0 and not meter._sizes and not meter._freed


def test_an_exception_before_any_bytecode_loses_no_count() -> None:
    """No size is lost or counted twice, wherever the meter is left, and its peak is not too low."""
    wrong, instant = [], 1
    while is_stopped(meter := MemoryMeter(), kept := [], instant):
        wrong += [] if agrees(meter, kept) else [instant]
        instant += 1
    assert wrong == []
    assert instant > 300
    assert agrees(meter, kept)


def test_the_peak_is_that_of_each_moment() -> None:
    """What is freed before the next one is tracked does not count; a reset begins anew."""
    meter = MemoryMeter()
    first, second = storage(2), storage(3)
    meter.track(first)
    meter.track(second)
    del second
    third = storage(1)
    meter.track(third)
    assert (meter.allocated_bytes, meter.peak_bytes) == (3 * BLOCK_BYTES, 5 * BLOCK_BYTES)
    meter.reset_peak()
    assert meter.peak_bytes == 3 * BLOCK_BYTES
    first.resize_(4 * BLOCK_BYTES)
    meter.track(first)
    assert meter.peak_bytes == 5 * BLOCK_BYTES


def others(meter: MemoryMeter, kept: list[Any]) -> None:
    """Do what another thread, or a handler that raises nothing, may do between two steps."""
    kept.append(storage(2))
    meter.track(kept[-1])
    meter.track(storage(3))
    kept[0].resize_((1 + len(kept)) * BLOCK_BYTES)
    meter.track(kept[0])
    assert meter.allocated_bytes <= meter.peak_bytes
    meter.track(storage(4))  # freed, and not gone through


Work = Callable[[MemoryMeter, list[Any]], None]


def is_shared(
    run: Work, meter: MemoryMeter, kept: list[Any], theirs: list[Any], instant: int
) -> bool:
    """Work and in it let ``others`` work once, where a call of the meter's comes back."""
    seen = 0

    def watch(frame: FrameType, event: str, arg: object) -> None:
        nonlocal seen
        if event in ("call", "c_return") and frame.f_code in CODE:
            seen += 1
            if seen == instant:
                others(meter, theirs)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        run(meter, kept)
    finally:
        sys.setprofile(before)
    return seen >= instant


@pytest.mark.parametrize(("run", "peak"), [(work, HIGH), (work_and_read, 0)])
def test_what_others_do_between_any_steps_is_counted(run: Work, peak: int) -> None:
    """Python goes to another thread, or to a handler, where a call comes back."""
    wrong, instant = [], 1
    meter, kept, theirs = MemoryMeter(), list[Any](), list[Any]()
    meter.peak_bytes = peak
    while is_shared(run, meter, kept, theirs, instant):
        meter._forget_freed()
        kept += theirs
        theirs.clear()
        is_kept = meter._running == sum(item.nbytes() for item in kept) <= meter.peak_bytes
        wrong += [] if agrees(meter, kept) and is_kept else [instant]
        meter, instant = MemoryMeter(), instant + 1
        meter.peak_bytes = peak
    assert wrong == []
    assert instant > 20


@pytest.fixture
def switching() -> Iterator[None]:
    """Let Python go from one thread to another as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
def test_threads_track_and_free_at_the_same_time() -> None:
    """As the thread of the backward pass does beside the main thread."""
    meter, kept = MemoryMeter(), []
    meter.peak_bytes = HIGH

    def run(_: int) -> None:
        for number in range(3000):
            item = storage(1 + number % 3)
            meter.track(item)
            if number % 100 == 0:
                kept.append(item)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert len(kept) == 120
    meter._forget_freed()
    assert meter._running == sum(item.nbytes() for item in kept)
    assert meter.peak_bytes == HIGH
    assert agrees(meter, kept)


def track_and_free(meter: MemoryMeter) -> None:
    """Let several be freed at once, which the meter goes through in a loop."""
    several = [storage(1) for _ in range(20)]
    for item in several:
        meter.track(item)


@pytest.mark.usefixtures("no_callback_of_the_collector")
def test_timers_leave_nothing_locked() -> None:
    """Another thread still tracks after real signals have stopped the main thread."""
    meter, kept, came = MemoryMeter(), [], 0

    def handler(number: int, frame: Any) -> None:
        raise StopError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for number in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.000003 * number)
                while True:
                    track_and_free(meter)
            except StopError:
                came += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert came == 300
    other = threading.Thread(target=lambda: meter.track(storage(2)), daemon=True)
    other.start()
    other.join(WAIT_S)
    assert not other.is_alive()
    kept.append(storage(3))
    assert agrees(meter, kept)
