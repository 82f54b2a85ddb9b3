"""The memory meter counts what lives, whatever comes between its steps."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from cudalens.simulate.memory import BLOCK_BYTES, MemoryMeter


class StopError(Exception):
    """What a handler raises."""


def storage(blocks: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(blocks * BLOCK_BYTES)


def agrees(meter: MemoryMeter, kept: list[Any]) -> bool:
    """Return whether it counts what lives, and nothing when nothing does."""
    expected = sum(item.nbytes() for item in kept)
    is_right = meter.allocated_bytes == expected <= meter.peak_bytes
    kept.clear()
    return is_right and meter.allocated_bytes == 0 and not meter._sizes


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
    first.resize_(0)
    meter.track(first)
    kept = [first, third]
    del first, third
    assert agrees(meter, kept)


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

    def run(_: int) -> None:
        for number in range(3000):
            item = storage(1 + number % 3)
            meter.track(item)
            if number % 100 == 0:
                kept.append(item)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert len(kept) == 120
    assert agrees(meter, kept)


def track_and_free(meter: MemoryMeter) -> None:
    for item in [storage(1) for _ in range(20)]:
        meter.track(item)


# Coverage holds a lock while it counts; what a handler raises there leaves it locked for ever.
@pytest.mark.no_cover
@pytest.mark.usefixtures("no_callback_of_the_collector")
def test_a_handler_that_raises_spoils_no_count() -> None:
    """What was tracked before and what is tracked afterwards is counted, and freed."""
    meter, kept, came = MemoryMeter(), [storage(5)], 0
    meter.track(kept[0])

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
    kept.append(storage(3))
    meter.track(kept[-1])
    assert agrees(meter, kept)
