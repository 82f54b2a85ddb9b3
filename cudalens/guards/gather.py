"""Guards of gather and scatter: an index tensor of the shape of the data."""

from __future__ import annotations

import torch
from torch import Tensor

from cudalens.facts import Violation
from cudalens.guards import _asserts
from cudalens.guards._base import guard
from cudalens.guards._dims import Text, dim_size, fits, index_of_dim
from cudalens.guards._ranges import lies_within, out_of_range


@guard(
    "aten::gather",
    records=("gather_scatter", "gather_rows_fast"),
    frequency="very common",
)
def gather_index_in_range(self: Tensor, dim: int, index: Tensor) -> Violation | None:
    """Every index lies in [0, size - 1] of the dimension that it reads from.

    Source:   ScatterGatherKernel.cu:203 and IndexKernelUtils.cu:19 (whole rows), torch 2.13.0
    Cost:     one reduction over the index without its expanded repeats, one copy of two numbers
    Passes:   aten.gather(zeros(2, 3), 1, tensor([[0, 2]]))
    Violates: aten.gather(zeros(2, 3), 1, tensor([[0, -1]]))
    """
    place = dim_size(self, dim)
    if place is None or not fits(index.shape, self.shape, but=place[0]):
        return None
    return index_of_dim(
        index,
        self,
        dim,
        guard="gather_index_in_range",
        device_text=lambda: _asserts.gather_text(self, place[0], index),
    )


def _scatter(
    self: Tensor, dim: int, index: Tensor, src: Tensor | None, *, guard: str, device_text: Text
) -> Violation | None:
    place = dim_size(self, dim)
    if place is None or not fits(index.shape, self.shape, but=place[0]):
        return None
    if src is not None and (src.dtype != self.dtype or not fits(index.shape, src.shape)):
        return None
    return index_of_dim(
        index,
        self,
        dim,
        guard=guard,
        device_text=device_text,
        # Deterministic algorithms write by index_put_, where negative values count from the end.
        wraps=src is not None and torch.are_deterministic_algorithms_enabled(),
    )


@guard(
    "aten::scatter.src",
    "aten::scatter.src_out",
    "aten::scatter_.src",
    "aten::scatter.reduce",
    "aten::scatter.reduce_out",
    "aten::scatter_.reduce",
    records=("gather_scatter",),
    frequency="very common",
)
def scatter_index_in_range(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Violation | None:
    """Every index lies in [0, size - 1] of the dimension that it writes to.

    Source:   ScatterGatherKernel.cu:203, torch 2.13.0
    Cost:     one reduction over the index, one copy of two numbers
    Passes:   aten.scatter(zeros(2, 3), 1, tensor([[0, 2]]), ones(1, 2))
    Violates: aten.scatter(zeros(2, 3), 1, tensor([[0, 3]]), ones(1, 2))
    """
    return _scatter(
        self,
        dim,
        index,
        src,
        guard="scatter_index_in_range",
        device_text=_asserts.GATHER_SCATTER,
    )


@guard(
    "aten::scatter.value",
    "aten::scatter.value_out",
    "aten::scatter_.value",
    "aten::scatter.value_reduce",
    "aten::scatter.value_reduce_out",
    "aten::scatter_.value_reduce",
    records=("scatter_value",),
    frequency="very common",
)
def scatter_value_index_in_range(self: Tensor, dim: int, index: Tensor) -> Violation | None:
    """Every index lies in [0, size - 1] of the dimension that the value is written to.

    Source:   ScatterGatherKernel.cu:449, torch 2.13.0
    Cost:     one reduction over the index, one copy of two numbers
    Passes:   aten.scatter_(zeros(2, 3), 1, tensor([[0, 2]]), 1.0)
    Violates: aten.scatter_(zeros(2, 3), 1, tensor([[0, 3]]), 1.0)
    """
    return _scatter(
        self,
        dim,
        index,
        None,
        guard="scatter_value_index_in_range",
        device_text=_asserts.SCATTER_VALUE,
    )


@guard(
    "aten::scatter_add",
    "aten::scatter_add_",
    records=(
        "gather_scatter",
        "scatter_add_rows_fast",
        "scatter_add_tma",
        "scatter_add_cutedsl",
    ),
    frequency="very common",
)
def scatter_add_index_in_range(
    self: Tensor, dim: int, index: Tensor, src: Tensor
) -> Violation | None:
    """Every index lies in [0, size - 1] of the dimension that it adds to.

    Source:   ScatterGatherKernel.cu:203, IndexKernelUtils.cu:122 and TmaScatterAddKernel.cu:150
              (whole rows), torch 2.13.0
    Cost:     one reduction over the index without its expanded repeats, one copy of two numbers
    Passes:   aten.scatter_add_(zeros(2, 3), 1, tensor([[0, 2]]), ones(1, 2))
    Violates: aten.scatter_add_(zeros(2, 3), 1, tensor([[0, -1]]), ones(1, 2))
    """
    return _scatter(
        self,
        dim,
        index,
        src,
        guard="scatter_add_index_in_range",
        device_text=lambda: _asserts.scatter_add_text(self, dim, index),
    )


@guard(
    "aten::scatter_reduce.two",
    "aten::scatter_reduce.two_out",
    "aten::scatter_reduce_.two",
    records=("gather_scatter", "scatter_add_rows_fast", "scatter_add_tma"),
    frequency="common",
)
def scatter_reduce_index_in_range(
    self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str
) -> Violation | None:
    """Every index lies in [0, size - 1] of the dimension that it reduces into.

    Source:   ScatterGatherKernel.cu:203, IndexKernelUtils.cu:122 and TmaScatterAddKernel.cu:150
              (whole rows, sum), torch 2.13.0
    Cost:     one reduction over the index without its expanded repeats, one copy of two numbers
    Passes:   aten.scatter_reduce(zeros(2, 3), 1, tensor([[0, 2]]), ones(1, 2), "amax")
    Violates: aten.scatter_reduce(zeros(2, 3), 1, tensor([[0, 3]]), ones(1, 2), "amax")
    """

    def text() -> str:
        is_sum = reduce == "sum"
        return _asserts.scatter_add_text(self, dim, index) if is_sum else _asserts.GATHER_SCATTER

    return _scatter(self, dim, index, src, guard="scatter_reduce_index_in_range", device_text=text)


@guard("aten::take_along_dim", is_silent=True, is_composite=True)
def take_along_dim_indices_in_range(
    self: Tensor, indices: Tensor, dim: int | None
) -> Violation | None:
    """With a dim, every index lies in [-size, size - 1]; torch takes others modulo the size.

    Source:   take_along_dim in TensorAdvancedIndexing.cpp, torch 2.13.0: no kernel sees the index
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.take_along_dim(zeros(3), tensor([-3, 2]), 0)
    Violates: aten.take_along_dim(zeros(3), tensor([-3, 3]), 0)
    """
    if dim is None or self.dim() == 0 or indices.is_floating_point():
        return None  # without a dim gather's guard sees the index
    size = self.size(dim)
    if lies_within(indices, -size, size - 1):
        return None
    return out_of_range(
        indices,
        guard="take_along_dim_indices_in_range",
        argument="indices",
        low=-size,
        high=size - 1,
        place=f"dimension {dim} (size {size}) of {{related}}",
        why="The index is taken modulo the size: another element than the one asked for is read.",
        related="self",
        size=size,
        dim=dim,
        is_silent=True,
    )
