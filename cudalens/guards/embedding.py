"""Guards of lookup tables: embedding, embedding bags, renormalisation, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

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
    assert_line,
    compares_32_bits,
    format_count,
    lookup_text,
    passes_narrowed,
)
from cudalens.guards._ranges import extremes, format_offender, lies_within, out_of_range

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
        place=f"the {format_count(rows, 'row')} of {{related}}",
        why=NARROWED if is_narrowed else why,
        device_text=None if is_narrowed else assert_line(device_text),
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
        headline=f"{format_offender('offsets', offenders)} is outside {before} … {count}: "
        "from the offset before it to the number of {related}",
        explanation="A bag runs from its offset to the next one, the last to the end of the "
        "indices; the kernel stops at a bag that ends before it starts.",
        offenders=offenders,
        bounds=Bounds(min=0, max=count, text=f"non-decreasing, 0 … {count}"),
        is_index=False,
        related="indices",
        size=count,
        device_text=_bag_text(mode, "offsets"),
    )


# --- quantized tables -----------------------------------------------------------------------------


@guard(
    "quantized::embedding_bag_byte_rowwise_offsets",
    "quantized::embedding_bag_4bit_rowwise_offsets",
    is_silent=True,
)
def quantized_bag_indices_in_range(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    pruned_weights: bool,
    include_last_offset: bool,
) -> Violation | None:
    """Every index that lies in a bag selects a row of the table: it lies in [0, rows - 1].

    Source:   quantized/cuda/EmbeddingBag.cu, torch 2.13.0: no assertion; the CPU raises
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
              zeros(3, 12, dtype=torch.uint8), tensor([0, 2]), tensor([0]))
    Violates: torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
              zeros(3, 12, dtype=torch.uint8), tensor([0, 3]), tensor([0]))
    """
    if weight.dim() != 2 or weight.dtype != torch.uint8 or indices.dtype not in INDEX_DTYPES:
        return None
    if pruned_weights or indices.dim() != (2 if offsets is None else 1):
        return None
    rows = weight.size(0)
    if lies_within(indices, 0, rows - 1):
        return None
    bad = (indices < 0) | (indices >= rows)
    if offsets is not None:
        bad &= _lies_in_bag(offsets, indices.numel(), include_last_offset)
    if not bool(bad.any()):
        return None
    return out_of_range(
        indices,
        argument="indices",
        low=0,
        high=rows - 1,
        bad=bad,
        place=f"the {format_count(rows, 'row')} of {{related}}",
        why="Each index reads one row of the table, from outside its memory here.",
        device_text=None,
        related="weight",
        size=rows,
        dim=0,
        is_silent=True,
        is_replay_safe=False,
    )


def _lies_in_bag(offsets: Tensor, count: int, include_last_offset: bool) -> Tensor:
    """Return bool[count], true for what a bag reads: from its offset up to the next one."""
    is_read = torch.zeros(count, dtype=torch.bool)
    ends = offsets.tolist() if include_last_offset else [*offsets.tolist(), count]
    for start, end in pairwise(ends):
        is_read[max(start, 0) : max(end, 0)] = True
    return is_read.to(offsets.device)


# --- gradients, whose kernels check nothing -------------------------------------------------------


_MODE_MAX = 2
_WRITES = "The kernel checks nothing and writes outside the gradient's memory."
_NO_SUCH_ROW = "No kernel checks the index, and the gradient has no such row."
_BAG_BACKWARD = ("aten::_embedding_bag_backward", "aten::_embedding_bag_dense_backward")


@guard("aten::embedding_dense_backward", is_silent=True)
def embedding_backward_indices_in_range(
    grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int
) -> Violation | None:
    """Every index has a row in the gradient: it lies in [0, num_weights - 1] or is padding_idx.

    Source:   no assertion: EmbeddingBackwardKernel.cu writes where the index points, torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.embedding_dense_backward(ones(2, 2), tensor([0, 2]), 3, -1, False)
    Violates: aten.embedding_dense_backward(ones(2, 2), tensor([0, 3]), 3, -1, False)
    """
    if grad_output.numel() == 0:
        return None
    return _no_row(indices, num_weights, padding_idx, why=_WRITES)


@guard(*_BAG_BACKWARD, is_silent=True, covers_inner=True)
def embedding_bag_backward_indices_in_range(
    grad: Tensor, indices: Tensor, num_weights: int, mode: int, padding_idx: int
) -> Violation | None:
    """Every index has a row in the gradient: it lies in [0, num_weights - 1] or is padding_idx.

    Source:   no assertion: EmbeddingBackwardKernel.cu writes where the index points, torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten._embedding_bag_dense_backward(ones(1, 2), tensor([0, 2]), tensor([0, 0]),
              tensor([2]), tensor([]), 3, False, 0, None)
    Violates: aten._embedding_bag_dense_backward(ones(1, 2), tensor([0, 3]), tensor([0, 0]),
              tensor([2]), tensor([]), 3, False, 0, None)
    """
    if mode == _MODE_MAX or grad.numel() == 0:
        return None
    return _no_row(
        indices,
        num_weights,
        padding_idx,
        why=_NO_SUCH_ROW,
    )


@guard(*_BAG_BACKWARD, is_silent=True, covers_inner=True)
def embedding_bag_backward_maxima_in_range(
    grad: Tensor, maximum_indices: Tensor, num_weights: int, mode: int, padding_idx: int
) -> Violation | None:
    """Every index of a maximum is below num_weights, or is padding_idx; a negative one is none.

    Source:   no assertion: EmbeddingBag.cu, EmbeddingBag_accGradParametersKernel_max, torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten._embedding_bag_dense_backward(ones(1, 2), tensor([0, 2]), tensor([0, 0]),
              tensor([2]), tensor([[2, 0]]), 3, False, 2, None)
    Violates: aten._embedding_bag_dense_backward(ones(1, 2), tensor([0, 2]), tensor([0, 0]),
              tensor([2]), tensor([[3, 0]]), 3, False, 2, None)
    """
    if mode != _MODE_MAX or maximum_indices.numel() == 0 or maximum_indices.shape != grad.shape:
        return None
    if maximum_indices.dtype not in INDEX_DTYPES or extremes(maximum_indices)[1] < num_weights:
        return None
    bad = (maximum_indices >= num_weights) & (maximum_indices != padding_idx)
    if not bool(bad.any()):
        return None
    return out_of_range(
        maximum_indices,
        argument="maximum_indices",
        low=0,
        high=num_weights - 1,
        bad=bad,
        place=f"the {format_count(num_weights, 'row')} of the gradient",
        why=_NO_SUCH_ROW,
        device_text=None,
        size=num_weights,
        dim=0,
        is_silent=True,
        is_replay_safe=False,
    )


@guard("aten::_embedding_bag_per_sample_weights_backward", is_silent=True)
def embedding_bag_weight_backward_indices_in_range(
    grad: Tensor, weight: Tensor, indices: Tensor, padding_idx: int
) -> Violation | None:
    """Every index still selects a row of the table: it lies in [0, rows - 1] or is padding_idx.

    Source:   no assertion: EmbeddingBag.cu, _embedding_bag_per_sample_weights_backward_kernel,
              torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten._embedding_bag_per_sample_weights_backward(ones(1, 2), ones(3, 2),
              tensor([0, 2]), tensor([0]), tensor([0, 0]), 0)
    Violates: aten._embedding_bag_per_sample_weights_backward(ones(1, 2), ones(3, 2),
              tensor([0, 3]), tensor([0]), tensor([0, 0]), 0)
    """
    if grad.numel() == 0 or weight.dim() != 2:
        return None
    return _no_row(
        indices,
        weight.size(0),
        padding_idx,
        why="The kernel checks nothing and reads outside the table's memory.",
        related="weight",
    )


def _no_row(
    indices: Tensor,
    rows: int,
    padding_idx: int,
    *,
    why: str,
    related: str | None = None,
) -> Violation | None:
    if indices.dtype not in INDEX_DTYPES or lies_within(indices, 0, rows - 1):
        return None
    bad = ((indices < 0) | (indices >= rows)) & (indices != padding_idx)
    if not bool(bad.any()):
        return None
    is_inside = 0 <= padding_idx < rows
    return out_of_range(
        indices,
        argument="indices",
        low=0,
        high=rows - 1,
        also=() if is_inside else ((padding_idx, "padding_idx"),),
        bad=bad,
        place=f"the {format_count(rows, 'row')} of " + ("{related}" if related else "the gradient"),
        why=why,
        device_text=None,
        related=related,
        size=rows,
        dim=0,
        is_silent=True,
        is_replay_safe=False,
    )
