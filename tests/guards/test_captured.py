"""Checks that are captured with a CUDA graph: what a replay launches, done here without one.

No graph is captured: the launches are kept, and run again as a replay would.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.guards import pending
from cudalens.guards.pending import MAX_CAPTURED, Check, Pending

CPU = torch.device("cpu")
Replay = Callable[..., None]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pending]:
    """A queue with room for captures, while one is under way."""
    made = Pending()
    made.prepare(CPU)
    monkeypatch.setattr(_torch, "is_capturing", lambda: True)
    yield made


def captured(queue: Pending, values: Tensor, low: float, high: float) -> Replay:
    """Capture a check of a static tensor; return what replays it with other values."""
    slots = queue._replays[CPU, values.is_floating_point()]
    before = slots._slots.clone()
    queue.note(values, Check(low, high, lambda *ends: ValueError(*ends)))
    slots._slots.copy_(before)  # a capture launches nothing

    def replay(*now: float) -> None:
        values.copy_(torch.tensor(now))
        slots.launch(values, len(slots.checks) - 1)

    return replay


def found(queue: Pending) -> list[tuple[object, ...]]:
    return [error.args for error in queue.settle()]


def test_the_extremes_of_all_replays_are_told_and_those_of_later_ones_again(queue: Pending) -> None:
    replay = captured(queue, torch.zeros(3, dtype=torch.int64), 0, 9)
    assert queue and queue.count == 0
    assert found(queue) == []
    for values in ((0, 9, 3), (1, 1, 2)):
        replay(*values)
    assert found(queue) == []
    for values in ((4, 12, 2), (-5, 1, 2), (0, 1, 2)):
        replay(*values)
    assert found(queue) == [(-5, 12)]
    assert found(queue) == []
    replay(1, 1, 1)
    replay(-1, 0, 0)
    assert found(queue) == [(-1, 1)]


def test_a_finding_that_waits_for_its_thread_keeps_its_values(queue: Pending) -> None:
    replay = captured(queue, torch.zeros(3, dtype=torch.int64), 0, 9)
    replay(4, 12, 2)
    other = threading.get_ident() + 1
    for _ in range(2):
        assert queue.settle(other) == []
    replay(1, 1, 1)
    assert found(queue) == [(2, 12)]


@pytest.mark.parametrize(
    ("low", "values", "is_found"),
    [
        (0.0, (0.0, 1.0), False),
        (0.0, (math.nan, 1.0), True),
        (-math.inf, (-3.0, 1.0), False),
        (-math.inf, (-3.0, 2.0), True),
        (0.0, (math.inf, math.inf), True),
    ],
)
def test_numbers_and_open_intervals(
    queue: Pending, low: float, values: tuple[float, ...], is_found: bool
) -> None:
    replay = captured(queue, torch.zeros(2), low, 1.0)
    assert found(queue) == []
    replay(*values)
    assert bool(found(queue)) is is_found


def test_a_capture_makes_no_room(queue: Pending) -> None:
    """It would lie in the graph's own memory; and there is room for so many checks."""
    assert not queue.can_note(torch.device("meta")) and queue.can_note(CPU)
    for is_float in (False, True):
        checks = queue._replays[CPU, is_float].checks
        checks.extend([Check(0, 1, lambda *ends: None)] * MAX_CAPTURED)
        assert not queue.can_note(CPU)
        checks.pop()
        assert queue.can_note(CPU)


def test_a_graph_of_the_parents_is_not_read_in_a_child(queue: Pending) -> None:
    captured(queue, torch.zeros(3, dtype=torch.int64), 0, 9)(4, 12, 2)
    queue.forked()
    assert not queue and not queue.can_note(CPU) and found(queue) == []


def test_room_is_made_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this thread allocates may have to be gone when inductor has prepared a graph."""
    threads = []
    zeros = torch.zeros

    def noted(*args: object, **kwargs: object) -> Tensor:
        threads.append(threading.get_ident())
        return zeros(*args, **kwargs)  # type: ignore[no-any-return, call-overload]

    monkeypatch.setattr(torch, "zeros", noted)
    with torch.inference_mode():
        pending.Pending().prepare(CPU)
        made = _torch.zeros(2, 3, torch.uint8, CPU)
    assert len(threads) == 3 and threading.get_ident() not in threads
    assert not made.is_inference() and made.tolist() == [[0, 0, 0], [0, 0, 0]]
