"""What the guards of indexed dimensions share: sizes, shapes, which kernel is picked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, tensor, zeros

from cudalens.guards.catalogue._dims import (
    NEGATIVES_STOP,
    NEGATIVES_WRAP,
    broadcast,
    compares_32_bits,
    copies_whole_rows,
    counts_in_32_bits,
    dim_size,
    fits,
    index_add_key,
    index_of_dim,
    lookup_key,
    rows_key,
)
from cudalens.guards.engine import Within

MOST = 2**31 - 1
BYTE = torch.zeros(1, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("shape", "dim", "expected"),
    [
        ((2, 3), 0, (0, 2)),
        ((2, 3), 1, (1, 3)),
        ((2, 3), -1, (1, 3)),
        ((2, 3), -2, (0, 2)),
        ((2, 3), 2, None),
        ((2, 3), -3, None),
        ((), 0, (0, 1)),
        ((), -1, (0, 1)),
        ((), 1, None),
    ],
)
def test_a_dimension_and_its_size(shape: Any, dim: int, expected: Any) -> None:
    assert dim_size(zeros(shape), dim) == expected


@pytest.mark.parametrize(
    ("inner", "outer", "but", "expected"),
    [
        ((2, 3), (2, 3), -1, True),
        ((2, 4), (2, 3), -1, False),
        ((3, 3), (2, 3), -1, False),
        ((2, 9), (2, 3), 1, True),
        ((3, 9), (2, 3), 1, False),
        ((2,), (2, 3), -1, False),
        ((), (1,), -1, True),
        ((1,), (), -1, True),
    ],
)
def test_a_shape_fits_into_another(inner: Any, outer: Any, but: int, expected: bool) -> None:
    assert fits(inner, outer, but=but) is expected


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([], ()),
        ([(2, 1), (3,)], (2, 3)),
        ([(3,), (2, 1)], (2, 3)),
        ([(2, 3), (2,)], None),
        ([(3,), (0,)], None),
        ([(1,), (4,), (1,)], (4,)),
        ([(0,), (1,)], (0,)),
        ([(5, 1, 3), (4, 1)], (5, 4, 3)),
    ],
)
def test_the_common_shape_is_that_of_torch(shapes: Any, expected: Any) -> None:
    assert broadcast(shapes) == expected
    if expected is None:
        with pytest.raises(RuntimeError):
            torch.broadcast_shapes(*shapes)
    else:
        assert tuple(torch.broadcast_shapes(*shapes)) == expected


def test_a_kernel_counts_in_32_bits_below_the_largest_number_of_them() -> None:
    assert counts_in_32_bits(BYTE.expand(MOST - 1))
    assert not counts_in_32_bits(BYTE.expand(MOST))
    assert not counts_in_32_bits(BYTE, BYTE.expand(MOST))


def test_steps_in_memory_count_like_elements() -> None:
    def apart(step: int) -> Tensor:
        return torch.empty_strided((2,), (step,), device="meta")

    assert counts_in_32_bits(apart(MOST - 1))
    assert not counts_in_32_bits(apart(MOST))


@pytest.mark.parametrize(
    ("shape", "dim", "wraps", "low", "high"),
    [((4, 3), 0, False, 0, 3), ((4, 3), -1, False, 0, 2), ((4, 3), 0, True, -4, 3)],
)
def test_the_interval_of_an_index(shape: Any, dim: int, wraps: bool, low: int, high: int) -> None:
    need = index_of_dim(tensor([0]), zeros(shape), dim, asserts="index_copy", wraps=wraps)
    assert isinstance(need, Within)
    assert (need.argument, need.of, need.dim) == ("index", "self", dim % 2)
    assert (need.low, need.high, need.asserts) == (low, high, "index_copy")
    assert need.why == (NEGATIVES_WRAP if wraps else NEGATIVES_STOP)


def test_no_index_is_asked_for_where_torch_refuses_the_call() -> None:
    index, data = tensor([0]), zeros(2, 0)
    assert index_of_dim(index, data, 2, asserts=None) is None
    assert index_of_dim(index.short(), data, 0, asserts=None) is None
    assert index_of_dim(index.int(), data, 0, asserts=None) is not None
    # A dimension without elements: only kernels that count from the end have a check before.
    assert index_of_dim(index, data, 1, asserts=None, wraps=True) is None
    assert index_of_dim(index, data, 1, asserts=None) is not None


@pytest.mark.parametrize("count", [16, 17])
def test_more_than_16_indices_take_another_kernel(count: int) -> None:
    index, is_small = torch.zeros(count, dtype=torch.int64), count == 16
    assert index_add_key(index) == ("index_add_small" if is_small else "index_add_large")
    assert compares_32_bits(zeros(3), index) is is_small
    rows, columns = zeros(3, 4), zeros(3, 3)
    small = "index_select_small"
    assert lookup_key(rows, 0, index) == (small if is_small else "gather_rows_fast")
    assert lookup_key(rows, 1, index) == (small if is_small else "gather_scatter")
    assert lookup_key(columns, 0, index) == (small if is_small else "gather_scatter")


def test_a_source_beyond_32_bits_is_compared_whole() -> None:
    assert not compares_32_bits(BYTE.expand(MOST), tensor([0]))


@pytest.mark.parametrize(
    ("source", "dim", "expected"),
    [
        (zeros(3, 4), 0, True),
        (zeros(3, 4), -2, True),
        (zeros(3, 4), 1, False),
        (zeros(3, 5), 0, False),
        (zeros(3, 2, dtype=torch.float64), 0, True),
        (zeros(4, 4).t(), 0, False),
        (zeros(16), 0, False),
        (zeros(16, dtype=torch.complex128), 0, False),
        (zeros(20)[4:16].view(3, 4), 0, True),
        (zeros(20)[1:13].view(3, 4), 0, False),
    ],
)
def test_rows_of_16_aligned_bytes_are_copied_whole(
    source: Tensor, dim: int, expected: bool
) -> None:
    assert copies_whole_rows(source, dim) is expected


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (tensor([[0], [1]]).expand(2, 4), "fast"),
        (tensor([0, 1]), "gather_scatter"),
        (tensor([[0, 1, 2, 3]]), "gather_scatter"),
        (tensor([[0, 1, 2, 3]]).expand(3, 4), "gather_scatter"),
        (tensor([[[0], [1]]]).expand(1, 2, 4), "gather_scatter"),
        (tensor([[[0]], [[1]]]).expand(2, 3, 4), "fast"),
    ],
)
def test_an_expanded_index_takes_the_kernel_of_rows(index: Tensor, expected: str) -> None:
    assert rows_key("fast", zeros(3, 4), 0, index) == expected
    assert rows_key("fast", zeros(3, 5), 0, index) == "gather_scatter"
