"""Guards of advanced indexing, and of single elements picked by a flat index or a mask."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Bounds, Violation, format_count
from cudalens.core.tensor_values import find_offenders
from cudalens.guards._base import guard
from cudalens.guards._ranges import unexpanded
from cudalens.guards.catalogue._dims import NEGATIVES_WRAP, broadcast, copies_whole_rows
from cudalens.guards.engine import INDEX_DTYPES, MASK_DTYPES, Asserts, Condition, Need, Within

Indices = Sequence[Tensor | None]
_UNCHECKED = "The kernel of this write checks nothing and writes outside the tensor's memory."


def _selectors(source: Tensor, indices: Indices) -> list[tuple[int, int]]:
    """Pair the places of integer indices with dimensions; none where nothing is launched.

    Nor where torch refuses.  ``None`` passes one dimension by, a mask of k dimensions passes k by.
    """
    selectors: list[tuple[int, int]] = []
    untouched = list(source.shape)
    dim = 0
    for place, index in enumerate(indices):
        if index is None:
            dim += 1
        elif index.dtype in MASK_DTYPES:
            if tuple(source.shape[dim : dim + index.dim()]) != tuple(index.shape):
                return []
            dim += index.dim()
        else:
            if dim >= source.dim() or index.dtype not in INDEX_DTYPES or index.numel() == 0:
                return []
            selectors.append((place, dim))
            untouched[dim] = 1 if untouched[dim] else 0
            dim += 1
    is_launched = dim <= source.dim() and 0 not in untouched
    fits = len(selectors) < 2 or _common_shape(indices, ()) is not None
    return selectors if is_launched and fits else []


def _masks(indices: Indices) -> list[Tensor]:
    return [index for index in indices if index is not None and index.dtype in MASK_DTYPES]


def _common_shape(indices: Indices, masks: Sequence[Tensor]) -> tuple[int, ...] | None:
    counts = [(int(mask.count_nonzero()),) for mask in masks if mask.dim()]
    integers = [index for index in indices if index is not None and index.dtype not in MASK_DTYPES]
    return broadcast([*(index.shape for index in integers), *counts])


def _fits_selection(values: Tensor, source: Tensor, indices: Indices) -> bool:
    """Return whether torch can spread ``values`` over what the indices select."""
    # A mask of k dimensions takes the place of k indices.
    slots = [
        (index.dim() if index is not None and index.dtype in MASK_DTYPES else 1, index is not None)
        for index in indices
    ]
    used = [is_index for width, is_index in slots for _ in range(width)]
    used += [False] * (source.dim() - len(used))
    picked = _common_shape(indices, _masks(indices))
    if picked is None:
        return False
    sizes = [size for size, is_index in zip(source.shape, used, strict=True) if not is_index]
    first, count = used.index(True), sum(used)
    # The result of indices with a gap between them comes first.
    front = first if all(used[first : first + count]) else 0
    selected = (*sizes[:front], *picked, *sizes[front:])
    return broadcast((selected, values.shape)) == selected


def _selection(
    source: Tensor, indices: Indices, *, asserts: Asserts, values: Tensor | None = None
) -> Need:
    """Require the indices of one call.

    Args:
        values: what is written, where torch looks at its shape before the launch.
    """
    selectors = _selectors(source, indices)
    if not selectors:
        return None

    def is_refused(*_: object) -> bool:
        # A mask that selects nothing makes the whole selection empty; torch refuses one that
        # selects a number of elements that the index does not fit.
        masks = _masks(indices)
        if masks and 0 in (_common_shape(indices, masks) or (0,)):
            return True
        return values is not None and not _fits_selection(values, source, indices)

    why = NEGATIVES_WRAP if asserts else _UNCHECKED
    needs = []
    for place, dim in selectors:
        size = source.size(dim)
        need = Within("indices", -size, size - 1, item=place, of="self", dim=dim, why=why)
        need.skip_if, need.asserts = is_refused, asserts
        needs.append(need)
    return needs


def _writes_by_sorting(values: Tensor, accumulate: bool) -> bool:
    """Return whether the write sorts its indices first; that kernel checks them in another way."""
    return accumulate or (torch.are_deterministic_algorithms_enabled() and values.numel() > 1)


@guard(
    "aten::index.Tensor",
    "aten::index.Tensor_out",
    "aten::_unsafe_index.Tensor",
    records=("index_get", "gather_rows_fast"),
    frequency="very common",
)
def index_in_range(self: Tensor, indices: Indices) -> Need:
    """Every index is in [-size, size - 1] of the dimension that it selects from.

    Source:   IndexKernel.cu:111 and IndexKernelUtils.cu:19 (whole rows), torch 2.13.0
    Cost:     one reduction for each integer index tensor, one copy for all; masks cost nothing
    Passes:   aten.index(zeros(3, 4), [tensor([2, -3]), tensor([-4, 3])])
    Violates: aten.index(zeros(3, 4), [tensor([2, -3]), tensor([-4, 4])])
    """

    def key(*_: object) -> str:
        used = [place for place, index in enumerate(indices) if index is not None]
        return "gather_rows_fast" if used == [0] and copies_whole_rows(self, 0) else "index_get"

    return _selection(self, indices, asserts=key)


@guard(
    "aten::index_put.default",
    "aten::index_put.out",
    "aten::index_put_.default",
    "aten::_unsafe_index_put.default",
    "aten::_index_put_impl.default",
    "aten::_index_put_impl.out",
    "aten::_index_put_impl_.default",
    records=("index_put", "index_put_sort"),
    frequency="very common",
    covers_inner=True,
)
def index_put_in_range(
    self: Tensor, indices: Indices, values: Tensor, accumulate: bool, unsafe: bool = False
) -> Need:
    """Every index is in [-size, size - 1] of the dimension that it writes to.

    Source:   IndexKernel.cu:111, or TensorCompare.cu:109 (accumulate, not unsafe), torch 2.13.0
    Cost:     one reduction for each integer index tensor, one copy for all; masks cost nothing
    Passes:   aten.index_put_(zeros(3), [tensor([2, -3])], ones(2))
    Violates: aten.index_put_(zeros(3), [tensor([2, 3])], ones(2), True)
    """
    if values.dtype != self.dtype:
        return None
    if not _writes_by_sorting(values, accumulate):
        return _selection(self, indices, asserts="index_get", values=values)
    return None if unsafe else _selection(self, indices, asserts="assert_async")


@guard(
    "aten::_index_put_impl_.default",
    "aten::_index_put_impl.default",
    "aten::_index_put_impl.out",
    is_silent=True,
)
def index_backward_in_range(
    self: Tensor, indices: Indices, values: Tensor, accumulate: bool, unsafe: bool
) -> Need:
    """Every index that accumulates unchecked is in [-size, size - 1], as in indexing's backward.

    Source:   no assertion: Indexing.cu makeLinearIndex skips its check for unsafe, torch 2.13.0
    Cost:     one reduction for each integer index tensor, one copy for all; masks cost nothing
    Passes:   aten._index_put_impl_(zeros(3), [tensor([2, -3])], ones(2), True, True)
    Violates: aten._index_put_impl_(zeros(3), [tensor([2, 3])], ones(2), True, True)
    """
    is_unchecked = unsafe and _writes_by_sorting(values, accumulate)
    if values.dtype != self.dtype or not is_unchecked:
        return None
    return _selection(self, indices, asserts=None)


# --- single elements: take, put, masked_scatter ---------------------------------------------------


_FLAT = NEGATIVES_WRAP.replace("its dimension", "the tensor, counted over all its elements")


@guard("aten::take", "aten::put", "aten::put_", records=("take", "put"))
def flat_index_in_range(self: Tensor, index: Tensor, source: Tensor | None = None) -> Need:
    """Every index is in [-numel, numel - 1]: it counts over all elements, not a dimension.

    Source:   IndexKernel.cu:339 cuda_take_put_kernel, torch 2.13.0
    Cost:     one reduction over the index, one copy of two numbers
    Passes:   aten.take(zeros(2, 3), tensor([-6, 5]))
    Violates: aten.take(zeros(2, 3), tensor([0, 6]))
    """
    count = self.numel()
    if count == 0 or index.dtype != torch.int64:
        return None
    if source is not None and (source.dtype != self.dtype or source.numel() != index.numel()):
        return None
    return Within("index", -count, count - 1, of="self", unit="element", why=_FLAT, asserts="take")


@guard(
    "aten::masked_scatter",
    "aten::masked_scatter_",
    records=("masked_scatter",),
    frequency="common",
    waits=True,
)
def masked_scatter_source_suffices(self: Tensor, mask: Tensor, source: Tensor) -> Need:
    """The mask, spread over the tensor, selects a number of elements in [0, source.numel()].

    Source:   IndexKernel.cu:400 masked_scatter_size_check, torch 2.13.0
    Cost:     one count over the mask, one copy of one number; none if the source fills the tensor
    Passes:   aten.masked_scatter(zeros(3), tensor([True, False, True]), ones(2))
    Violates: aten.masked_scatter(zeros(3), tensor([True, True, True]), ones(2))
    """
    shape = broadcast((self.shape, mask.shape))
    if shape is None or mask.dtype != torch.bool or source.dtype != self.dtype:
        return None
    if source.numel() >= math.prod(shape):
        return None
    return Condition(lambda: _selects_too_many(mask, shape, source.numel()))


def _selects_too_many(mask: Tensor, shape: tuple[int, ...], available: int) -> Violation | None:
    distinct = unexpanded(mask)
    selected = int(distinct.count_nonzero()) * (math.prod(shape) // distinct.numel())
    if selected <= available:
        return None
    spread = mask.expand(shape)
    beyond = spread & (spread.reshape(-1).cumsum(0).reshape(shape) > available)
    bad = beyond.sum_to_size(mask.shape) > 0 if mask.shape != shape else beyond
    return Violation(
        argument="mask",
        headline=f"{{argument}} selects {format_count(selected, 'element')} but {{related}} has "
        f"{available}",
        explanation="Each selected element takes the next one of the source in turn. The kernel "
        "stops when the source is too short.",
        offenders=find_offenders(mask, bad),
        bounds=Bounds(min=0, max=available, text=f"at most {available} selected"),
        is_index=False,
        related="source",
        size=available,
        device_text=assert_text("masked_scatter"),
    )
