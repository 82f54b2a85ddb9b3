"""Guards of sequences of different lengths that lie one behind the other in one tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cudalens.core.report_types import Violation
from cudalens.guards._base import guard
from cudalens.guards._dims import counted, spans_lie_inside

_READS = "A sequence runs from its offset to the next one; the kernels take it from beyond {}."
_FLASH = ("aten::_flash_attention_forward", "aten::_flash_attention_backward")
_EFFICIENT = ("aten::_efficient_attention_forward", "aten::_efficient_attention_backward")


@guard(*_FLASH, is_silent=True)
def flash_query_sequences_lie_in_query(query: Tensor, cum_seq_q: Tensor | None) -> Violation | None:
    """Every sequence of queries that is not empty lies in [0, rows] of the packed query.

    Source:   flash_fwd_kernel.h and flash_bwd_kernel.h, torch 2.13.0: no assertion
    Cost:     one reduction over the offsets, one copy of two numbers; none without offsets
    Passes:   aten._flash_attention_forward(zeros(3, 1, 8), zeros(3, 1, 8), zeros(3, 1, 8),
              tensor([0, 1, 3]), tensor([0, 1, 3]), 2, 2, 0.0, False, False)
    Violates: aten._flash_attention_forward(zeros(3, 1, 8), zeros(3, 1, 8), zeros(3, 1, 8),
              tensor([0, 1, 4]), tensor([0, 1, 3]), 3, 2, 0.0, False, False)
    """
    return _packed(query, cum_seq_q, argument="cum_seq_q", related="query", dim=0)


@guard(*_FLASH, is_silent=True)
def flash_key_sequences_lie_in_key(key: Tensor, cum_seq_k: Tensor | None) -> Violation | None:
    """Every sequence of keys that is not empty lies in [0, rows] of the packed key.

    Source:   flash_fwd_kernel.h and flash_bwd_kernel.h, torch 2.13.0: no assertion
    Cost:     one reduction over the offsets, one copy of two numbers; none without offsets
    Passes:   aten._flash_attention_forward(zeros(3, 1, 8), zeros(3, 1, 8), zeros(3, 1, 8),
              tensor([0, 1, 3]), tensor([0, 1, 3]), 2, 2, 0.0, False, False)
    Violates: aten._flash_attention_forward(zeros(3, 1, 8), zeros(3, 1, 8), zeros(3, 1, 8),
              tensor([0, 1, 3]), tensor([0, 1, 4]), 2, 3, 0.0, False, False)
    """
    # With pages of keys (four dimensions) the offsets are not positions in the tensor.
    return _packed(key, cum_seq_k, argument="cum_seq_k", related="key", dim=0)


@guard(*_EFFICIENT, is_silent=True)
def efficient_query_sequences_lie_in_query(
    query: Tensor, cu_seqlens_q: Tensor | None
) -> Violation | None:
    """Every sequence of queries that is not empty lies in [0, rows] of the packed query.

    Source:   mem_eff_attention/kernel_forward.h, torch 2.13.0: no assertion
    Cost:     one reduction over the offsets, one copy of two numbers; none without offsets
    Passes:   aten._efficient_attention_forward(zeros(1, 3, 1, 8), zeros(1, 3, 1, 8),
              zeros(1, 3, 1, 8), None, tensor([0, 3]).int(), tensor([0, 3]).int(), 3, 3, 0.0, 0)
    Violates: aten._efficient_attention_forward(zeros(1, 3, 1, 8), zeros(1, 3, 1, 8),
              zeros(1, 3, 1, 8), None, tensor([0, 4]).int(), tensor([0, 3]).int(), 4, 3, 0.0, 0)
    """
    return _packed(query, cu_seqlens_q, argument="cu_seqlens_q", related="query", dim=1)


@guard(*_EFFICIENT, is_silent=True)
def efficient_key_sequences_lie_in_key(
    key: Tensor, cu_seqlens_k: Tensor | None
) -> Violation | None:
    """Every sequence of keys that is not empty lies in [0, rows] of the packed key.

    Source:   mem_eff_attention/kernel_forward.h, torch 2.13.0: no assertion
    Cost:     one reduction over the offsets, one copy of two numbers; none without offsets
    Passes:   aten._efficient_attention_forward(zeros(1, 3, 1, 8), zeros(1, 3, 1, 8),
              zeros(1, 3, 1, 8), None, tensor([0, 3]).int(), tensor([0, 3]).int(), 3, 3, 0.0, 0)
    Violates: aten._efficient_attention_forward(zeros(1, 3, 1, 8), zeros(1, 3, 1, 8),
              zeros(1, 3, 1, 8), None, tensor([0, 3]).int(), tensor([0, 4]).int(), 3, 4, 0.0, 0)
    """
    return _packed(key, cu_seqlens_k, argument="cu_seqlens_k", related="key", dim=1)


def _packed(
    data: Tensor, offsets: Tensor | None, *, argument: str, related: str, dim: int
) -> Violation | None:
    if offsets is None or offsets.dim() != 1 or data.dim() != 3 + dim or data.numel() == 0:
        return None
    rows = data.size(dim)
    return spans_lie_inside(
        offsets,
        rows,
        argument=argument,
        place=f"the {counted(rows, 'row')} of {{related}}",
        why=_READS.format("the tensor"),
        related=related,
        dim=dim,
    )


@guard("aten::_jagged_to_padded_dense_forward", is_silent=True)
def jagged_rows_lie_in_values(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int]
) -> Violation | None:
    """Every row of a jagged tensor lies in [0, values.size(0)], up to the length it is cut to.

    Source:   NestedTensorTransformerFunctions.cu, torch 2.13.0: no assertion
    Cost:     one reduction over the offsets, one copy of two numbers
    Passes:   aten._jagged_to_padded_dense_forward(ones(3, 1), [tensor([0, 1, 3])], [2])
    Violates: aten._jagged_to_padded_dense_forward(ones(3, 1), [tensor([0, 1, 4])], [3])
    """
    if len(offsets) != 1 or len(max_lengths) != 1 or values.numel() == 0:
        return None
    if offsets[0].dim() != 1:
        return None
    rows = values.size(0)
    return spans_lie_inside(
        offsets[0],
        rows,
        argument="offsets",
        place=f"the {counted(rows, 'row')} of {{related}}",
        why=_READS.format("the values"),
        related="values",
        longest=max_lengths[0],
        list_position=0,
    )
