"""Guard of the lookup tables of quantised numbers, whose CUDA kernel checks nothing."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from cudalens.core.report_types import Violation
from cudalens.guards._base import guard
from cudalens.guards._dims import INDEX_DTYPES, counted
from cudalens.guards._ranges import lies_within, out_of_range


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
        place=f"the {counted(rows, 'row')} of {{related}}",
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
