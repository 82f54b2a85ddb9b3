"""Checks that are captured with a CUDA graph: what a replay launches, done here without one.

No graph is captured: the launches are kept, and run again as a replay would.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core.report_types import Violation
from cudalens.guards.captured import CAPTURED, MAX_CAPTURED, Captured
from cudalens.guards.pending import Claim, Pending

CPU = torch.device("cpu")
FOUND = Violation(headline="it is bad", explanation="Why.")


class Graph:
    """A stand-in for a captured graph with one check of a static tensor."""

    def __init__(self, values: Tensor, low: float, high: float) -> None:
        self.values = values
        self.captured = Captured()
        self.captured.prepare(CPU)
        self.captured.note(CPU, values.dtype, self._write, Claim(low, high, self._tell))
        self.captured._pages[CPU].rows.zero_()  # a capture launches nothing
        self.told: list[tuple[object, object, int | None]] = []

    def _write(self, low: Tensor, high: Tensor) -> None:
        torch.aminmax(self.values, out=(low, high))

    def _tell(self, smallest: object, largest: object) -> BaseException:
        self.told.append((smallest, largest, self.captured.replay))
        return ValueError(self.captured.with_replay(FOUND).explanation)

    def replay(self, *values: float) -> None:
        self.values.copy_(torch.tensor(values))
        for row in self.captured._pages[CPU].used:
            row.launch(self._write)


def test_the_first_bad_replay_is_named_and_the_next_one_again() -> None:
    graph = Graph(torch.zeros(3, dtype=torch.int64), 0, 9)
    assert graph.captured.collect() == []
    for values in ((0, 9, 3), (0, 1, 2), (4, 12, 2), (-5, 1, 2), (0, 1, 2)):
        graph.replay(*values)
    assert [str(error) for error in graph.captured.collect()] == [
        "Why. It was in replay 3 of a CUDA graph."
    ]
    assert graph.told == [(2, 12, 3)]
    assert graph.captured.collect() == []
    graph.replay(0, 0, 0)
    graph.replay(-1, 0, 0)
    graph.captured.collect()
    assert graph.told[1:] == [(-1, 0, 7)]
    assert graph.captured.with_replay(FOUND) is FOUND


@pytest.mark.parametrize(
    ("low", "values", "is_found"),
    [
        (0.0, (0.0, 1.0), False),
        (0.0, (math.nan, 1.0), True),
        (-math.inf, (-3.0, 1.0), False),
        (-math.inf, (-3.0, 2.0), True),
    ],
)
def test_numbers_and_open_intervals(low: float, values: tuple[float, ...], is_found: bool) -> None:
    graph = Graph(torch.zeros(2), low, 1.0)
    graph.replay(*values)
    assert bool(graph.captured.collect()) is is_found


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(CAPTURED, "_pages", {})
    monkeypatch.setattr(CAPTURED, "is_used", False)
    CAPTURED.prepare(CPU)
    monkeypatch.setattr(_torch, "is_capturing", lambda: True)
    yield


def test_the_queue_hands_on_what_is_captured(capturing: None) -> None:
    """Nothing of it is pending outside the graph, and whoever settles reads it."""
    pending = Pending()
    values = torch.tensor([1, 7])
    assert not pending
    claim = Claim(0, 6, lambda *pair: IndexError(pair))
    pending.note(CPU, torch.int64, lambda *pair: torch.aminmax(values, out=pair), claim)
    assert pending and pending.count == 0
    assert [error.args for error in pending.settle()] == [((1, 7),)]
    assert pending.settle() == []


def test_a_capture_makes_no_room(capturing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page would lie in the graph's own memory; and a page holds so many checks."""
    other = torch.device("meta")
    CAPTURED.prepare(other)
    assert not CAPTURED.has_room(other) and CAPTURED.has_room(CPU)
    CAPTURED._pages[CPU].used = [None] * MAX_CAPTURED  # type: ignore[list-item]
    assert not CAPTURED.has_room(CPU)


def test_room_is_made_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this thread allocates may have to be gone when inductor has prepared a graph."""
    threads = []
    zeros = torch.zeros

    def noted(*args: object, **kwargs: object) -> Tensor:
        threads.append(threading.get_ident())
        return zeros(*args, **kwargs)  # type: ignore[no-any-return, call-overload]

    monkeypatch.setattr(torch, "zeros", noted)
    with torch.inference_mode():
        Captured().prepare(CPU)
        made = _torch.zeros(2, 3, torch.uint8, CPU)
    assert len(threads) == 2 and threading.get_ident() not in threads
    assert not made.is_inference() and made.tolist() == [[0, 0, 0], [0, 0, 0]]
