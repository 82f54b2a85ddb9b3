"""Guards of the lookup tables: embedding, embedding bags and renormalisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Bounds, Violation
from cudalens.core.tensor_values import find_offenders
from cudalens.guards._base import guard
from cudalens.guards._dims import (
    INDEX_DTYPES,
    NARROWED,
    Text,
    compares_32_bits,
    counted,
    lookup_text,
    passes_narrowed,
    written,
)
from cudalens.guards._ranges import lies_within, out_of_range, spelled

_MODE_MAX = 2


def _bag_text(mode: int, check: str) -> str:
    return assert_text(f"embedding_bag_{check}_{'max' if mode == _MODE_MAX else 'sum_mean'}")


def _rows_outside(
    indices: Tensor,
    rows: int,
    *,
    related: str,
    why: str,
    device_text: Text,
    wraps: bool = False,
    narrows: Callable[[], bool] | None = None,
) -> Violation | None:
    if indices.dtype not in INDEX_DTYPES:
        return None
    low = -rows if wraps else 0
    if lies_within(indices, low, rows - 1):
        return None
    is_narrowed = narrows is not None and narrows() and passes_narrowed(indices, rows - 1)
    return out_of_range(
        indices,
        argument="indices",
        low=low,
        high=rows - 1,
        place=f"the {counted(rows, 'row')} of {{related}}",
        why=NARROWED if is_narrowed else why,
        device_text=None if is_narrowed else written(device_text),
        related=related,
        size=rows,
        dim=0,
    )


@guard(
    "aten::embedding",
    records=("index_select_small", "gather_rows_fast", "gather_scatter"),
    frequency="very common",
    covers_inner=True,
)
def embedding_indices_in_range(weight: Tensor, indices: Tensor) -> Violation | None:
    """Every index selects a row of the table: it lies in [0, rows - 1].

    At most 16 indices are compared by 32 bits, so that 2**32 asserts nothing there.

    Source:   IndexKernelUtils.cu:19 and Indexing.cu:1524 (at most 16 indices), torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.embedding(zeros(3, 2), tensor([0, 2]))
    Violates: aten.embedding(zeros(3, 2), tensor([0, 3]))
    """
    # A table without columns gives an empty result, and nothing is launched.
    if weight.dim() != 2 or weight.size(1) == 0:
        return None
    return _rows_outside(
        indices,
        weight.size(0),
        related="weight",
        why="Each index reads one row of the table; the kernel stops at a row that is not there.",
        device_text=lambda: lookup_text(weight, 0, indices),
        narrows=lambda: compares_32_bits(weight, indices),
    )


@guard(
    "aten::embedding_renorm_",
    "aten::embedding_renorm",
    records=("embedding_renorm",),
)
def embedding_renorm_indices_in_range(self: Tensor, indices: Tensor) -> Violation | None:
    """Every index to renormalise selects a row: it lies in [-rows, rows - 1].

    Source:   Embedding.cu:252 embedding_renorm_wrap_indices_kernel, torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.embedding_renorm_(ones(3, 2), tensor([-3, 2]), 1.0, 2.0)
    Violates: aten.embedding_renorm_(ones(3, 2), tensor([0, 3]), 1.0, 2.0)
    """
    if self.dim() != 2:
        return None
    return _rows_outside(
        indices,
        self.size(0),
        related="self",
        # Releases before 2.12 have no assertion here: the kernel reads on.
        why="Each index names a row whose norm is cut to max_norm; there is no such row.",
        device_text=assert_text("embedding_renorm"),
        wraps=True,
    )


@guard(
    "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
    records=("embedding_bag_index",),
    frequency="common",
)
def embedding_bag_indices_in_range(
    weight: Tensor, indices: Tensor, offsets: Tensor, mode: int, include_last_offset: bool
) -> Violation | None:
    """Every index of every bag selects a row of the table: it lies in [0, rows - 1].

    Source:   EmbeddingBag.cu:88 (max) and 148 (sum, mean), torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten._embedding_bag(zeros(3, 2), tensor([0, 2]), tensor([0, 1]))
    Violates: aten._embedding_bag(zeros(3, 2), tensor([0, 3]), tensor([0, 1]))
    """
    bags = offsets.numel() - int(include_last_offset)
    if weight.dim() != 2 or weight.size(1) == 0 or bags <= 0:
        return None
    return _rows_outside(
        indices,
        weight.size(0),
        related="weight",
        why="Each index adds one row of the table to its bag, and the kernel stops at a row that "
        "is not there; padding_idx is no exception.",
        device_text=lambda: _bag_text(mode, "index"),
    )


@guard(
    "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
    records=("embedding_bag_offsets",),
)
def embedding_bag_offsets_rise(
    weight: Tensor, indices: Tensor, offsets: Tensor, mode: int, include_last_offset: bool
) -> Violation | None:
    """No bag ends before it starts: each offset lies in [offset before it, indices.numel()].

    The first offset counts as 0 whatever it is; with include_last_offset the last is not used.

    Source:   EmbeddingBag.cu:76 (max) and 137 (sum, mean), torch 2.13.0
    Cost:     one comparison and one reduction over the offsets, one copy of one truth value
    Passes:   aten._embedding_bag(zeros(3, 2), tensor([0, 2]), tensor([0, 2, 2]))
    Violates: aten._embedding_bag(zeros(3, 2), tensor([0, 2]), tensor([0, 2, 1]))
    """
    bags = offsets.numel() - int(include_last_offset)
    if bags <= 1 or weight.dim() != 2 or weight.size(1) == 0 or offsets.dim() != 1:
        return None
    if offsets.dtype not in INDEX_DTYPES:
        return None
    count = indices.numel()
    inner = offsets[1:bags]
    bounds = torch.cat([offsets.new_zeros(1), inner, offsets.new_full((1,), count)])
    if not bool((bounds[1:] < bounds[:-1]).any()):
        return None
    bad = torch.zeros_like(offsets, dtype=torch.bool)
    bad[1:bags] = (inner < bounds[: bags - 1]) | (inner > count)
    offenders = find_offenders(offsets, bad)
    (at,) = offenders.first[0].position
    before = 0 if at == 1 else offsets[at - 1].item()
    return Violation(
        argument="offsets",
        headline=f"{spelled('offsets', offenders)} is outside {before} … {count}: from the offset "
        "before it to the number of {related}",
        explanation="A bag runs from its offset to the next one, the last to the end of the "
        "indices; the kernel stops at a bag that ends before it starts.",
        offenders=offenders,
        bounds=Bounds(min=0, max=count, text=f"non-decreasing, 0 … {count}"),
        is_index=False,
        related="indices",
        size=count,
        device_text=_bag_text(mode, "offsets"),
    )
