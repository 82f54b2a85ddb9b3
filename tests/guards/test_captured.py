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
from cudalens.guards.captured import CAPTURED, MAX_CAPTURED, Captured, launch
from cudalens.guards.deferred import violation_of
from cudalens.guards.engine import Within
from cudalens.guards.pending import Check, Pending

CPU = torch.device("cpu")


class Graph:
    """A stand-in for a captured graph with one check of a static tensor."""

    def __init__(self, values: Tensor, low: float, high: float) -> None:
        self.values, self.low, self.high = values, low, high
        self.captured = Captured()
        self.captured.prepare(CPU)
        self.captured.note(values, Check(low, high, self._report))
        self.rows = self.captured._rows[CPU].values
        self.rows.zero_()  # a capture launches nothing
        self.reports: list[tuple[object, object, int]] = []

    def _report(self, smallest: object, largest: object, replay: int) -> BaseException:
        self.reports.append((smallest, largest, replay))
        return ValueError(replay)

    def replay(self, *values: float) -> None:
        self.values.copy_(torch.tensor(values))
        launch(self.rows[0], self.values, self.low, self.high)


def test_the_first_bad_replay_is_named_and_the_next_one_again() -> None:
    graph = Graph(torch.zeros(3, dtype=torch.int64), 0, 9)
    assert graph.captured.collect() == []
    for values in ((0, 9, 3), (0, 1, 2), (4, 12, 2), (-5, 1, 2), (0, 1, 2)):
        graph.replay(*values)
    assert [error.args for error in graph.captured.collect() if error] == [(3,)]
    assert graph.reports == [(2, 12, 3)]
    assert graph.captured.collect() == []
    graph.replay(0, 0, 0)
    graph.replay(-1, 0, 0)
    graph.captured.collect()
    assert graph.reports[1:] == [(-1, 0, 7)]


def test_a_finding_gives_its_replay() -> None:
    need = Within("index", 0, 9, unit="row", why="Why.")
    assert violation_of(need, 2, 12).explanation == "Why."
    assert violation_of(need, 2, 12, replay=3).explanation == (
        "Why. It was in replay 3 of a CUDA graph."
    )


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
    monkeypatch.setattr(CAPTURED, "_rows", {})
    monkeypatch.setattr(CAPTURED, "is_used", False)
    CAPTURED.prepare(CPU)
    monkeypatch.setattr(_torch, "is_capturing", lambda: True)
    yield


def test_the_queue_hands_on_what_is_captured(capturing: None) -> None:
    """Nothing of it is pending outside the graph, and whoever settles reads it."""
    pending = Pending()
    values = torch.tensor([1, 7])
    assert not pending
    pending.note(values, Check(0, 6, lambda *ends: IndexError(ends)))
    assert pending and pending.count == 0
    assert [error.args for error in pending.settle()] == [((1, 7, 1),)]
    assert pending.settle() == []


def test_a_capture_makes_no_room(capturing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page would lie in the graph's own memory; and a page holds so many checks."""
    other = torch.device("meta")
    CAPTURED.prepare(other)
    assert not CAPTURED.has_room(other) and CAPTURED.has_room(CPU)
    CAPTURED._rows[CPU].checks = [(None, torch.int64)] * MAX_CAPTURED
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
