"""Guards of the ops that address single elements: take, put and masked_scatter."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Bounds, Violation
from cudalens.core.tensor_values import find_offenders
from cudalens.guards._base import guard
from cudalens.guards._dims import NEGATIVES_WRAP, broadcast, counted
from cudalens.guards._ranges import lies_within, out_of_range, unexpanded


def _flat_index(self: Tensor, index: Tensor) -> Violation | None:
    count = self.numel()
    if count == 0 or index.dtype != torch.int64 or lies_within(index, -count, count - 1):
        return None
    return out_of_range(
        index,
        argument="index",
        low=-count,
        high=count - 1,
        place=f"the {counted(count, 'element')} of {{related}}",
        why=NEGATIVES_WRAP.replace("its dimension", "the tensor, counted over all its elements"),
        device_text=assert_text("take"),
        related="self",
        size=count,
    )


@guard("aten::take", records=("take",))
def take_index_in_range(self: Tensor, index: Tensor) -> Violation | None:
    """Every index lies in [-numel, numel - 1]: it counts over all elements, not a dimension.

    Source:   IndexKernel.cu:339 cuda_take_put_kernel, torch 2.13.0
    Cost:     one reduction over the index, one copy of two numbers
    Passes:   aten.take(zeros(2, 3), tensor([-6, 5]))
    Violates: aten.take(zeros(2, 3), tensor([0, 6]))
    """
    return _flat_index(self, index)


@guard("aten::put", "aten::put_", records=("put",))
def put_index_in_range(self: Tensor, index: Tensor, source: Tensor) -> Violation | None:
    """Every index lies in [-numel, numel - 1]: it counts over all elements, not a dimension.

    Source:   IndexKernel.cu:339 cuda_take_put_kernel, torch 2.13.0
    Cost:     one reduction over the index, one copy of two numbers
    Passes:   aten.put_(zeros(2, 3), tensor([-6, 5]), ones(2))
    Violates: aten.put_(zeros(2, 3), tensor([0, -7]), ones(2))
    """
    if source.dtype != self.dtype or source.numel() != index.numel():
        return None
    return _flat_index(self, index)


@guard(
    "aten::masked_scatter",
    "aten::masked_scatter_",
    records=("masked_scatter",),
    frequency="common",
)
def masked_scatter_source_suffices(self: Tensor, mask: Tensor, source: Tensor) -> Violation | None:
    """The mask, spread over the tensor, selects a number of elements in [0, source.numel()].

    Source:   IndexKernel.cu:400 masked_scatter_size_check, torch 2.13.0
    Cost:     one count over the mask, one copy of one number; none if the source fills the tensor
    Passes:   aten.masked_scatter(zeros(3), tensor([True, False, True]), ones(2))
    Violates: aten.masked_scatter(zeros(3), tensor([True, True, True]), ones(2))
    """
    shape = broadcast((self.shape, mask.shape))
    if shape is None or mask.dtype != torch.bool or source.dtype != self.dtype:
        return None
    available = source.numel()
    if available >= math.prod(shape) or mask.numel() == 0:
        return None
    distinct = unexpanded(mask)
    selected = int(distinct.count_nonzero()) * (math.prod(shape) // distinct.numel())
    if selected <= available:
        return None
    spread = mask.expand(shape)
    beyond = spread & (spread.reshape(-1).cumsum(0).reshape(shape) > available)
    bad = beyond.sum_to_size(mask.shape) > 0 if mask.shape != shape else beyond
    return Violation(
        argument="mask",
        headline=f"{{argument}} selects {counted(selected, 'element')} but {{related}} has "
        f"{available}",
        explanation="Each selected element takes the next one of the source in turn; the kernel "
        "stops when the source is too short.",
        offenders=find_offenders(mask, bad),
        bounds=Bounds(min=0, max=available, text=f"at most {available} selected"),
        is_index=False,
        related="source",
        size=available,
        device_text=assert_text("masked_scatter"),
    )
