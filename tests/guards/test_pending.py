"""Checks that are pending: slots that the device fills, read later and reported once, in order."""

from __future__ import annotations

import math
import threading
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from cudalens.core import _torch
from cudalens.guards import pending
from cudalens.guards.pending import Check, Pending

CPU = torch.device("cpu")
NO_THREAD = -1
"""No thread has this number: it comes no more."""


def check(low: float = 0, high: float = 9, **more: Any) -> Check:
    return Check(low, high, lambda smallest, largest: ValueError(f"{smallest}, {largest}"), **more)


@pytest.mark.parametrize(
    ("low", "high", "while_pending", "afterwards"),
    [
        (0, 9, True, True), (-1, 10, True, True), (1, 9, False, True), (0, 8, False, True),
        (3, 7, False, True), (4, 7, False, False), (3, 6, False, False),
    ],
)  # fmt: skip
def test_values_that_are_known_need_no_check_beside(
    low: float, high: float, while_pending: bool, afterwards: bool
) -> None:
    item = check()
    assert item.implies(low, high) is while_pending
    assert item.decide([3, 7], []) is False
    assert item.implies(low, high) is afterwards


@pytest.mark.parametrize(
    ("ends", "bad"),
    [([0, 9], False), ([-1, 9], True), ([0, 10], True), ([math.nan, math.nan], True)],
)
def test_a_check_is_decided_by_its_extremes_and_found_once(ends: list[Any], bad: bool) -> None:
    item, findings = check(), []
    assert item.decide(ends, findings) is bad
    assert findings == ([item] if bad else [])
    assert (item.is_pending, item.smallest is ends[0], item.largest is ends[1]) == (
        False,
        True,
        True,
    )
    if bad:
        assert item.decide([0, 9], findings) is False
        assert (findings, item.smallest is ends[0]) == ([item], True)


def test_a_check_is_for_its_thread_or_for_anybody_where_that_is_over() -> None:
    here, go, threads = threading.get_ident(), threading.Event(), []
    thread = threading.Thread(target=lambda: threads.append(threading.get_ident()) or go.wait(10))
    thread.start()
    while not threads:
        pass
    assert check().is_for(here)
    assert not check(thread=threads[0]).is_for(here)
    assert check(thread=threads[0]).is_for(threads[0])
    go.set()
    thread.join()
    assert check(thread=threads[0]).is_for(here)
    assert check(thread=NO_THREAD).is_for(here)


def test_checks_are_numbered_in_their_order() -> None:
    first, second = check(), check()
    assert first.number < second.number


def noted(*values: list[float], **more: Any) -> tuple[Pending, list[Check]]:
    queue, checks = Pending(), []
    for item in values:
        checks.append(check(**more))
        queue.note(torch.tensor(item), checks[-1])
    return queue, checks


def texts(errors: list[BaseException]) -> list[str]:
    return [str(error) for error in errors]


def test_what_is_pending_is_read_when_it_is_settled() -> None:
    queue, checks = noted([1, 2], [3, 10], [4.0, 5.5])
    assert (queue.count, bool(queue), queue.findings) == (3, True, [])
    assert all(item.is_pending for item in checks)
    assert texts(queue.settle()) == ["3, 10"]
    assert (queue.count, bool(queue), queue.findings) == (0, False, [])
    assert [(item.smallest, item.largest) for item in checks] == [(1, 2), (3, 10), (4.0, 5.5)]
    assert queue.settle() == []


def test_findings_come_in_the_order_of_their_calls_over_all_pages() -> None:
    queue, _ = noted([10], [11.0], [12], [-3.0])
    assert texts(queue.settle()) == ["10, 10", "11.0, 11.0", "12, 12", "-3.0, -3.0"]


def test_a_report_that_finds_nothing_raises_nothing() -> None:
    queue = Pending()
    queue.note(torch.tensor([99]), Check(0, 9, lambda smallest, largest: None))
    assert queue.settle() == []
    assert queue.findings == []


def test_a_full_page_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "MAX_PENDING", 3)
    queue, checks = noted([1], [10])
    assert queue.count == 2
    queue.note(torch.tensor([2]), check())
    assert queue.count == 0
    assert [item.is_pending for item in checks] == [False, False]
    assert queue.findings == [checks[1]]
    assert bool(queue)
    assert texts(queue.settle()) == ["10, 10"]


def test_the_copy_of_a_page_waits_for_what_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the stream that copies knows nothing of the one that fills."""
    queue, _ = noted([10])
    (page,) = queue._pages.values()
    steps = Mock()
    steps.stream.return_value = nullcontext()
    page._stream, page._copying, page._is_filled = object(), steps.copying, steps.is_filled
    page._values = steps.values
    steps.values.__getitem__ = lambda _, part: page._filled[part]
    monkeypatch.setattr(torch.cuda, "stream", steps.stream)
    monkeypatch.setattr(_torch, "wait_for", steps.wait_for)
    queue.note(torch.tensor([3]), check())
    assert texts(queue.settle()) == ["10, 10"]
    assert steps.mock_calls == [
        call.is_filled.record(page._stream),
        call.stream(steps.copying),
        call.copying.wait_event(steps.is_filled),
        call.values.copy_(page._filled, non_blocking=True),
        call.wait_for(steps.copying),
    ]


@pytest.mark.parametrize(
    ("thread", "others", "found"),
    [
        ("here", (), 1),
        (None, (), 2),
        ("here", ("other",), 2),
        ("other", (), 1),
        ("other", ("here",), 2),
    ],
)
def test_findings_of_threads_at_work_are_left_to_them(
    thread: str | None, others: tuple[str, ...], found: int
) -> None:
    go, started = threading.Event(), threading.Event()
    worker = threading.Thread(target=lambda: (started.set(), go.wait(10)))
    worker.start()
    started.wait(10)
    idents = {"here": threading.get_ident(), "other": worker.ident, None: None}
    try:
        queue = Pending()
        for number, name in enumerate(("here", "other")):
            item = check(thread=idents[name])
            queue.note(torch.tensor([10 + number]), item)
        errors = queue.settle(idents[thread], [idents[name] for name in others])  # type: ignore[misc]
        assert len(errors) == found
        assert len(queue.findings) == 2 - found
        assert queue.has_finding() is (thread == "other" and not others)
        assert bool(queue) is (found < 2)
    finally:
        go.set()
        worker.join()


def test_without_a_finding_there_is_none_to_raise() -> None:
    queue, _ = noted([1])
    assert not queue.has_finding()
    queue.settle()
    assert not queue.has_finding()


def test_slots_made_in_inference_mode_are_read_outside_it_too(sim: object) -> None:
    queue, index = Pending(), torch.tensor([10], device="cuda")
    with torch.inference_mode():
        queue.note(index, check())
    assert texts(queue.settle()) == ["10, 10"]


def test_what_could_not_be_read_stays_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, _ = noted([10])
    page = next(iter(queue._pages.values()))
    with monkeypatch.context() as patched:
        patched.setattr(type(page), "read", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            queue.settle()
    assert bool(queue)
    assert texts(queue.settle()) == ["10, 10"]


def test_a_child_process_begins_anew() -> None:
    queue, _ = noted([10], [11])
    queue.prepare(CPU)
    queue.forked()
    assert (queue.inherited, queue.count, bool(queue), queue._replays) == (2, 0, False, {})
    assert queue.settle() == []


def test_what_is_cleared_is_forgotten_but_for_captured_graphs() -> None:
    queue, _ = noted([10])
    queue.prepare(CPU)
    queue.findings.append(check())
    queue.clear()
    assert (queue.count, bool(queue)) == (0, False)
    assert len(queue._replays) == 2


# --- captured graphs -----------------------------------------------------------------------------


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a graph is being captured: the last of them."""
    states = [True]
    monkeypatch.setattr(_torch, "is_capturing", lambda: states[-1])
    return states


@pytest.mark.parametrize("used_up", [1, 1.0])
def test_in_a_capture_there_must_be_room(
    used_up: float, monkeypatch: pytest.MonkeyPatch, capturing: list[bool]
) -> None:
    monkeypatch.setattr(pending, "MAX_CAPTURED", 2)
    queue = Pending()
    assert not queue.can_note(CPU)
    queue.prepare(CPU)
    assert queue.can_note(CPU)
    for _ in range(2):
        queue.note(torch.tensor([used_up]), check())
    assert not queue.can_note(CPU)  # of these there is none left
    capturing.append(False)
    assert queue.can_note(CPU)


@pytest.mark.parametrize("values", [[3, 4], [3.0, 4.5]])
def test_each_replay_widens_the_extremes_until_one_is_bad(
    capturing: list[bool], values: list[float]
) -> None:
    queue, item = Pending(), check()
    queue.prepare(CPU)
    assert not queue
    queue.note(torch.tensor(values), item)
    assert bool(queue)
    assert queue.count == 0
    replays = queue._replays[CPU, isinstance(values[1], float)]
    assert queue.settle() == []
    assert (item.smallest, item.largest) == (values[0], values[1])
    replays.launch(torch.tensor([5, 2]), 0)
    assert queue.settle() == []
    assert (item.smallest, item.largest) == (2, 5)
    replays.launch(torch.tensor([12]), 0)
    assert len(queue.settle()) == 1
    assert bool(queue)  # it may be replayed again
    replays.launch(torch.tensor([7]), 0)
    assert queue.settle() == []
    assert (item.smallest, item.largest) == (7, 7)


def test_a_bad_replay_leaves_the_extremes_of_other_checks(capturing: list[bool]) -> None:
    queue, first, second = Pending(), check(), check()
    queue.prepare(CPU)
    queue.note(torch.tensor([12]), first)
    queue.note(torch.tensor([3, 4]), second)
    assert len(queue.settle()) == 1
    assert queue.settle() == []
    assert (second.smallest, second.largest) == (3, 4)


@pytest.mark.parametrize("is_host", [True, False])
def test_room_for_graphs_is_made_once_for_a_device(
    is_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the first check there, and none on the host."""
    monkeypatch.setattr(_torch, "is_host", lambda device: is_host)
    queue, _ = noted([1])
    rooms = dict(queue._replays)
    assert [*rooms] == ([] if is_host else [(CPU, False), (CPU, True)])
    queue.note(torch.tensor([1.0]), check())
    assert queue._replays == rooms
