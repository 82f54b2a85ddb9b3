"""Guards of the ops that index one dimension: gather and scatter, and rows chosen by a list."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from cudalens.guards._base import RELEASE, guard
from cudalens.guards._ranges import lies_within
from cudalens.guards.catalogue._dims import (
    broadcast,
    compares_32_bits,
    counts_in_32_bits,
    dim_size,
    fits,
    index_add_key,
    index_of_dim,
    lookup_key,
    rows_key,
)
from cudalens.guards.engine import Asserts, Need, Within

_GATHERS_ROWS = partial(rows_key, "gather_rows_fast")
_ADDS_ROWS = partial(rows_key, "scatter_add_rows_fast")


@guard("aten::gather", records=("gather_scatter", "gather_rows_fast"), frequency="very common")
def gather_index_in_range(self: Tensor, dim: int, index: Tensor) -> Need:
    """Every index is in [0, size - 1] of the dimension that it reads from.

    Source:   ScatterGatherKernel.cu:203 and IndexKernelUtils.cu:19 (whole rows), torch 2.13.0
    Cost:     one reduction over the index without its expanded repeats, one copy of two numbers
    Passes:   aten.gather(zeros(2, 3), 1, tensor([[0, 2]]))
    Violates: aten.gather(zeros(2, 3), 1, tensor([[0, -1]]))
    """
    place = dim_size(self, dim)
    if place is None or not fits(index.shape, self.shape, but=place[0]):
        return None
    return index_of_dim(index, self, dim, asserts=_GATHERS_ROWS)


def _scatter(
    self: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor | None,
    *,
    asserts: Asserts,
    is_put: bool,
    adds: bool,
) -> Need:
    """Require an index of scatter.

    Args:
        is_put: whether deterministic algorithms write by ``index_put_`` instead.
        adds: whether values for one place are added.
    """
    place = dim_size(self, dim)
    if place is None or not fits(index.shape, self.shape, but=place[0]):
        return None
    if src is not None and (src.dtype != self.dtype or not fits(index.shape, src.shape)):
        return None
    # In index_put_ negative values count from the end.
    is_put = is_put and torch.are_deterministic_algorithms_enabled()
    if is_put:
        asserts = "assert_async" if adds or index.numel() > 1 else "index_get"
    return index_of_dim(index, self, dim, asserts=asserts, wraps=is_put)


@guard(
    "aten::scatter",
    "aten::scatter_",
    records=("gather_scatter", "scatter_value"),
    frequency="very common",
)
def scatter_index_in_range(
    self: Tensor, dim: int, index: Tensor, src: Tensor | None = None, reduce: str | None = None
) -> Need:
    """Every index is in [0, size - 1] of the dimension that it writes to.

    Source:   ScatterGatherKernel.cu:203, :449 (one value for all), torch 2.13.0
    Cost:     one reduction over the index, one copy of two numbers
    Passes:   aten.scatter(zeros(2, 3), 1, tensor([[0, 2]]), ones(1, 2))
    Violates: aten.scatter(zeros(2, 3), 1, tensor([[0, 3]]), ones(1, 2))
    """
    key = "scatter_value" if src is None else "gather_scatter"
    is_put = src is not None and reduce in (None, "add")
    return _scatter(self, dim, index, src, asserts=key, is_put=is_put, adds=reduce is not None)


@guard(
    "aten::scatter_add",
    "aten::scatter_add_",
    "aten::scatter_reduce.two",
    "aten::scatter_reduce.two_out",
    "aten::scatter_reduce_.two",
    records=(
        *("gather_scatter", "scatter_add_rows_fast", "scatter_add_tma", "scatter_add_cutedsl"),
        "scatter_value",
    ),
    frequency="very common",
)
def scatter_reduce_index_in_range(
    self: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str = "sum",
    include_self: bool = True,
) -> Need:
    """Every index is in [0, size - 1] of the dimension that it adds to or reduces into.

    Source:   ScatterGatherKernel.cu:203, IndexKernelUtils.cu:122 and TmaScatterAddKernel.cu:150
              (whole rows, sum), torch 2.13.0; without include_self a fill at :449 comes first
    Cost:     one reduction over the index without its expanded repeats, one copy of two numbers
    Passes:   aten.scatter_add_(zeros(2, 3), 1, tensor([[0, 2]]), ones(1, 2))
    Violates: aten.scatter_add_(zeros(2, 3), 1, tensor([[0, -1]]), ones(1, 2))
    """

    def key(*_: Any) -> str:
        if not include_self:
            return "scatter_value"
        return _ADDS_ROWS(self, dim, index) if reduce == "sum" else "gather_scatter"

    is_put = include_self and reduce in ("sum", "mean")
    return _scatter(self, dim, index, src, asserts=key, is_put=is_put, adds=True)


_MODULO_SINCE = (2, 10)
"""The oldest torch known to take an index modulo the size; up to 2.8 it is gather that sees it."""


@guard(
    *(["aten::take_along_dim"] if RELEASE >= _MODULO_SINCE else []),
    is_silent=True,
    is_composite=True,
)
def take_along_dim_indices_in_range(self: Tensor, indices: Tensor, dim: int | None) -> Need:
    """With a dim, every index is in [-size, size - 1]; torch takes others modulo the size.

    Source:   take_along_dim in TensorAdvancedIndexing.cpp, torch 2.13.0: no kernel sees the index
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.take_along_dim(zeros(3), tensor([-3, 2]), 0)
    Violates: aten.take_along_dim(zeros(3), tensor([-3, 3]), 0)
    """
    if dim is None or indices.dtype != torch.int64 or self.dim() != indices.dim():
        return None  # without a dim gather's guard sees the index; the others torch refuses
    place = dim_size(self, dim)
    if place is None or self.dim() == 0:
        return None
    dim, size = place
    others = [(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in (self, indices)]
    if broadcast(others) is None:
        return None
    why = "The index is taken modulo the size: the kernel would read another element."
    return Within("indices", -size, size - 1, of="self", dim=dim, why=why)


# --- rows chosen by a list of indices -------------------------------------------------------------


_SCATTERED_SINCE = (2, 14)


def _is_row_write(self: Tensor, dim: int, index: Tensor, source: Tensor) -> bool:
    """Return whether the arguments of a write fit by shape and dtype, and anything is written."""
    place = dim_size(self, dim)
    if place is None or index.dim() > 1 or source.dtype != self.dtype or source.numel() == 0:
        return False
    rows = dim_size(source, dim)
    if rows is None or rows[1] != index.numel():
        return False
    at = place[0]
    return (*self.shape[:at], *self.shape[at + 1 :]) == (
        *source.shape[:at],
        *source.shape[at + 1 :],
    )


@guard(
    "aten::index_select",
    records=("index_select_small", "gather_rows_fast", "gather_scatter", "index_select_sparse"),
    frequency="very common",
)
def index_select_index_in_range(self: Tensor, dim: int, index: Tensor) -> Need:
    """Every index is in [0, size - 1] of the dimension; in [-size, size - 1] of a sparse one.

    At most 16 indices are compared by 32 bits, so that 2**32 asserts nothing there.

    Source:   Indexing.cu:1524 (at most 16 indices), IndexKernelUtils.cu:19,
              ScatterGatherKernel.cu:203, Indexing.cu:1854 (sparse), torch 2.13.0
    Cost:     one reduction over the index, one copy of two numbers
    Passes:   aten.index_select(zeros(2, 3), 1, tensor([0, 2]))
    Violates: aten.index_select(zeros(2, 3), 1, tensor([0, -1]))
    """
    place = dim_size(self, dim)
    if place is None or index.dim() > 1:
        return None
    if self.layout == torch.sparse_coo:
        # A dense dimension of a sparse tensor is selected from its values: that call comes next.
        if place[0] >= self.sparse_dim() or index.dtype != torch.int64:
            return None
        return index_of_dim(index, self, dim, asserts="index_select_sparse", wraps=True)
    if self.layout != torch.strided or index.numel() == 0:
        return None
    if 0 in (*self.shape[: place[0]], *self.shape[place[0] + 1 :]):  # rows without elements
        return None
    if self.dim() == 0 and index.numel() != 1:  # torch refuses it
        return None
    return index_of_dim(
        index,
        self,
        dim,
        asserts=lookup_key,
        narrows=lambda self, dim, index: compares_32_bits(self, index),
    )


@guard(
    "aten::index_add",
    "aten::index_add_",
    "aten::index_reduce",
    "aten::index_reduce_",
    records=("index_add_small", "index_add_large", "add_dense_sparse"),
    frequency="common",
    covers_inner=True,
)
def index_add_index_in_range(
    self: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str | None = None,
    include_self: bool = True,
) -> Need:
    """Every index is in [0, size - 1] of the dimension that it adds to or reduces into.

    Dense plus sparse ends here too: its kernel calls index_add_ with the flattened sparse indices.
    The kernel compares 32 bits, so that 2**32 asserts nothing there.

    Source:   Indexing.cu:1030 (at most 16 indices) and 1089; IndexKernel.cu:154 for a reduction
              without include_self, torch 2.13.0
    Cost:     one reduction over the index, one copy of two numbers
    Passes:   aten.index_add_(zeros(3, 2), 0, tensor([0, 2]), ones(2, 2))
    Violates: aten.index_add_(zeros(3, 2), 0, tensor([0, -1]), ones(2, 2))
    """
    if not _is_row_write(self, dim, index, source):
        return None
    # Deterministic algorithms add by index_put_, where negative values count from the end.
    if reduce is None and torch.are_deterministic_algorithms_enabled():
        return index_of_dim(index, self, dim, asserts="assert_async", wraps=True)

    def key(*_: Any) -> str:
        # Without include_self the rows are first filled by index_fill_, which lets negatives wrap.
        size = (dim_size(self, dim) or (0, 0))[1]
        is_filled = include_self or lies_within(index, -size, size - 1)
        return index_add_key(index) if is_filled else "index_fill"

    narrows = include_self and _narrows
    return index_of_dim(index, self, dim, asserts=key, narrows=narrows)


def _narrows(self: Tensor, dim: int, index: Tensor, source: Tensor, *_: Any) -> bool:
    """Return whether the kernel cuts the indices to 32 bits before it compares them."""
    # Later releases hand rows over to scatter_add_ or scatter_reduce_, which compare all bits.
    is_scattered = RELEASE >= _SCATTERED_SINCE and dim % max(self.dim(), 1) == 0
    return not is_scattered and counts_in_32_bits(self, index, source)


@guard("aten::index_copy", "aten::index_copy_", records=("index_copy",), frequency="common")
def index_copy_index_in_range(self: Tensor, dim: int, index: Tensor, source: Tensor) -> Need:
    """Every index is in [0, size - 1] of the dimension that it copies to.

    Source:   IndexKernel.cu:193, torch 2.13.0
    Cost:     one reduction over the index, one copy of two numbers
    Passes:   aten.index_copy_(zeros(3, 2), 0, tensor([0, 2]), ones(2, 2))
    Violates: aten.index_copy_(zeros(3, 2), 0, tensor([0, -1]), ones(2, 2))
    """
    if index.dtype != torch.int64 or not _is_row_write(self, dim, index, source):
        return None
    if self.numel() == 0:
        return None
    # Deterministic algorithms write by index_put_, where negative values count from the end.
    is_put = torch.are_deterministic_algorithms_enabled()
    put = "assert_async" if source.numel() > 1 else "index_get"  # several are sorted first
    return index_of_dim(index, self, dim, asserts=put if is_put else "index_copy", wraps=is_put)


@guard(
    "aten::index_fill.int_Scalar",
    "aten::index_fill.int_Tensor",
    "aten::index_fill.int_Scalar_out",
    "aten::index_fill.int_Tensor_out",
    "aten::index_fill_.int_Scalar",
    "aten::index_fill_.int_Tensor",
    records=("index_fill",),
)
def index_fill_index_in_range(self: Tensor, dim: int, index: Tensor) -> Need:
    """Every index is in [-size, size - 1] of the dimension that it fills.

    Source:   IndexKernel.cu:154, torch 2.13.0
    Cost:     one reduction over the index, one copy of two numbers
    Passes:   aten.index_fill_(zeros(3, 2), 0, tensor([-3, 2]), 1.0)
    Violates: aten.index_fill_(zeros(3, 2), 0, tensor([0, 3]), 1.0)
    """
    if index.dtype != torch.int64 or index.dim() > 1 or self.numel() == 0:
        return None
    return index_of_dim(index, self, dim, asserts="index_fill", wraps=True)
