"""The smallest and the largest int64 as an index: found, and written as the number that it is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cudalens
from tests.amount import AMOUNT

pytestmark = pytest.mark.usefixtures("sim")
SIZE = 3
FROM_THE_END: dict[str, Callable[[Tensor], object]] = {
    "x[i]": lambda i: table()[i],
    "x[i] = y": lambda i: table().__setitem__(i, table()[:1]),
    "x[i] = number": lambda i: table().__setitem__(i, 1.0),
    "index_put_": lambda i: table().index_put_((i,), table()[:1], accumulate=True),
    "take": lambda i: torch.take(table()[:, 0], i),
    "put_": lambda i: table()[:, 0].contiguous().put_(i, table()[0, :1]),
    "index_fill_": lambda i: table().index_fill_(0, i, 1.0),
}
"""A negative index counts from the end."""
NOT_NEGATIVE: dict[str, Callable[[Tensor], object]] = {
    "index_select": lambda i: table().index_select(0, i),
    "index_add_": lambda i: table().index_add_(0, i, table()[:1]),
    "index_copy_": lambda i: table().index_copy_(0, i, table()[:1]),
    "gather": lambda i: table().gather(0, i[:, None]),
    "scatter_": lambda i: table().scatter_(0, i[:, None], 1.0),
    "scatter_add_": lambda i: table().scatter_add_(0, i[:, None], table()[:1, :1]),
    "scatter_reduce_": lambda i: table().scatter_reduce_(0, i[:, None], table()[:1, :1], "sum"),
    "embedding": lambda i: F.embedding(i, table()),
    "embedding_bag": lambda i: F.embedding_bag(i[None], table()),
    "cross_entropy": lambda i: F.cross_entropy(table()[:1, :SIZE], i),
}
SMALLEST, LARGEST = -(2**63), 2**63 - 1


def table() -> Tensor:
    return torch.ones(SIZE, SIZE, device="cuda")


CASES = [
    *product(
        ("full", "fast", "deferred"),
        (SMALLEST, LARGEST, -SIZE - 1, -SIZE, SIZE, SIZE - 1),
        (*FROM_THE_END, *NOT_NEGATIVE),
    )
]


@pytest.mark.parametrize(("mode", "value", "name"), CASES[:: AMOUNT.extreme_step])
def test_an_extreme_index_is_found_and_written_right(name: str, value: int, mode: str) -> None:
    """Also in what the report computes from it: advice, positions, the replay."""
    is_good = (-SIZE if name in FROM_THE_END else 0) <= value < SIZE
    call = {**FROM_THE_END, **NOT_NEGATIVE}[name]
    session = cudalens.check(**({} if mode == "full" else {mode: True}))
    try:
        with session:
            call(torch.tensor([value], device="cuda"))
    except cudalens.DeviceIndexError as error:
        assert not is_good
        report = error.report
        assert str(value) in report.headline
        assert report.offenders.min == report.offenders.max == value
        assert report.limits == ()
    assert (session.report is None) == is_good
    assert session.internal_errors == []
