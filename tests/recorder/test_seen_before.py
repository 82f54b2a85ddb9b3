"""What earlier calls of a line gave the argument at fault, from what the guards have read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudalens
from cudalens.recorder.earlier_calls import files_of
from cudalens.recorder.sites import Site
from tests.blocks import cuda

pytestmark = pytest.mark.usefixtures("sim")
TABLE = torch.zeros(10, 2)


def seen(code: Any, **options: Any) -> tuple[float, ...] | None:
    """Run a function in a check; return calls, smallest and largest value seen before."""
    with pytest.raises(cudalens.DeviceAssertError) as caught, cudalens.check(**options):
        code()
    report = caught.value.report
    assert report is not None
    before = report.seen_before
    return before and (before.calls, before.min, before.max)


def look_up(*batches: torch.Tensor) -> None:
    table = TABLE.to("cuda")
    for ids in batches:
        F.embedding(ids, table)


def test_earlier_calls_of_the_line_are_counted_with_their_range() -> None:
    assert seen(lambda: look_up(cuda(1, 5), cuda(2, 7), cuda(3), cuda(10))) == (3, 1, 7)


def test_the_first_call_has_seen_nothing() -> None:
    assert seen(lambda: look_up(cuda(10))) is None


def test_another_line_is_another_range() -> None:
    def code() -> None:
        look_up(cuda(1, 5))
        F.embedding(cuda(10), TABLE.to("cuda"))

    assert seen(code) is None


def test_two_layers_of_one_line_are_told_apart() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Embedding(10, 2), nn.Embedding(5, 2)

        def forward(self, ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
            return self.first(ids) + self.second(others)

    net = Two().to("cuda")

    def code() -> None:
        for others in (cuda(1), cuda(2), cuda(5)):
            net(cuda(9), others)

    assert seen(code) == (2, 1, 2)


def test_an_index_of_several_is_its_own() -> None:
    def code() -> None:
        table = TABLE.to("cuda")
        for column in (1, 0, 2):
            table[cuda(7), cuda(column)]

    assert seen(code) == (2, 0, 1)


@pytest.mark.parametrize(
    ("size", "ignored", "known"),
    [(4, -100, (2, 1, 6)), (4, 1, (2, 1, 6)), (400, 1, (2, 1, 6)), (400, -100, None)],
)
def test_what_was_ignored_is_no_value(size: int, ignored: int, known: Any) -> None:
    """Of many labels the ignored ones become class 0 before they are looked at: nothing is said."""

    def code() -> None:
        scores = torch.zeros(size, 7, device="cuda")
        for last in (5, 6, 9):
            labels = [ignored, 1, *[last] * (size - 2)]
            F.cross_entropy(scores, torch.tensor(labels, device="cuda"))

    assert seen(code) == known


def test_numbers_between_bounds_have_a_range_too() -> None:
    def code() -> None:
        for high in (0.5, 0.75, 1.5):
            torch.bernoulli(cuda(0.25, high))

    assert seen(code) == (2, 0.25, 0.75)


def test_without_a_recorder_nothing_is_known() -> None:
    assert seen(lambda: look_up(cuda(1), cuda(10)), fast=True) is None


def test_the_ring_may_have_lost_the_calls() -> None:
    batches = [cuda(at % 10) for at in range(30)]
    assert seen(lambda: look_up(*batches, cuda(10)), max_ops=4) == (30, 0, 9)


def test_a_check_inside_a_check_has_seen_them_too() -> None:
    with cudalens.check():
        assert seen(lambda: look_up(cuda(1, 5), cuda(2, 7), cuda(10))) == (2, 1, 7)


def test_the_check_around_it_has_seen_what_was_called_inside() -> None:
    table = TABLE.to("cuda")

    def look(*ids: int) -> None:
        F.embedding(cuda(*ids), table)

    def code() -> None:
        for number in (1, 4):
            with cudalens.check():
                look(number)
        look(10)

    assert seen(code) == (2, 1, 4)


class Store(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.k = torch.zeros(size, 2).cuda()

    def forward(self, at: torch.Tensor) -> None:
        self.k.index_copy_(0, at, torch.ones(1, 2).cuda())


@pytest.mark.parametrize(("size", "others"), [(8, [("stores.0", 4, 0, 3, 8)]), (3, [])])
def test_the_line_is_counted_in_all_modules_and_that_with_another_bound_is_named(
    size: int, others: list[tuple[object, ...]]
) -> None:
    stores = [Store(size), Store(3)]

    def code() -> None:
        for step in range(5):
            for store in stores if size == 8 else reversed(stores):
                store(cuda(step))

    with pytest.raises(cudalens.DeviceAssertError) as caught, cudalens.check():
        code()
    report = caught.value.report
    assert report is not None and report.seen_before is not None
    before = report.seen_before
    calls = 7 if size == 8 else 6
    assert (before.calls, before.min, before.max) == (calls, 0, 3 if size == 8 else 2)
    found = [(it.module, it.calls, it.min, it.max, it.size) for it in before.other_modules]
    assert found == others


def test_a_loss_that_is_made_anew_is_the_same_line() -> None:
    def train(*batches: torch.Tensor) -> None:
        loss = nn.CrossEntropyLoss()
        for labels in batches:
            loss(torch.zeros(len(labels), 4).cuda(), labels)

    def code() -> None:
        train(cuda(0, 1), cuda(3))
        kept.append(nn.CrossEntropyLoss())
        train(cuda(1), cuda(4))

    kept: list[nn.Module] = []
    assert seen(code) == (3, 0, 3)


def test_the_files_of_calls_are_those_of_every_line_that_led_to_them() -> None:
    def code(name: str) -> Any:
        return compile("", name, "exec")

    outer = Site("forward", (code("train.py"), 0, None))
    shared = Site("forward", (code("net.py"), 0, outer))
    calls: Any = [SimpleNamespace(site=it) for it in ((code("loss.py"), 0, shared), outer, None)]
    assert files_of(calls) == {"train.py", "net.py", "loss.py"}
    assert files_of(calls[1:]) == {"train.py"}
    assert files_of([]) == set()
