"""Guards of lookup tables: embedding, embedding bags, renormalisation, and their gradients.

The gradients are looked at for those who go on after a bad forward call: deferred guards and the
rehearsal device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Bounds, Violation
from cudalens.guards._base import guard
from cudalens.guards._ranges import violation_at
from cudalens.guards.catalogue._dims import compares_32_bits, lookup_key
from cudalens.guards.engine import INDEX_DTYPES, Condition, Need, Within

_MODE_MAX = 2


def _bag_key(mode: int, check: str) -> str:
    return f"embedding_bag_{check}_{'max' if mode == _MODE_MAX else 'sum_mean'}"


_READS_A_ROW = "Each index reads one row of the table, and there is no such row."
_ADDS_A_ROW = (
    "Each index adds one row of the table to its bag, and there is no such row. "
    "The padding_idx must be a row, too."
)


@guard(
    "aten::embedding",
    records=("index_select_small", "gather_rows_fast", "gather_scatter"),
    frequency="very common",
    covers_inner=True,
)
def embedding_indices_in_range(weight: Tensor, indices: Tensor) -> Need:
    """Every index selects a row of the table: it is in [0, rows - 1].

    At most 16 indices are compared by 32 bits, so that 2**32 asserts nothing there.

    Source:   IndexKernelUtils.cu:19 and Indexing.cu:1524 (at most 16 indices), torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.embedding(zeros(3, 2), tensor([0, 2]))
    Violates: aten.embedding(zeros(3, 2), tensor([0, 3]))
    """
    # A table without columns gives an empty result, and nothing is launched.
    shape = weight.shape
    if len(shape) != 2 or shape[1] == 0 or indices.dtype not in INDEX_DTYPES:
        return None
    row = Within("indices", 0, shape[0] - 1, of="weight", dim=0, unit="row", why=_READS_A_ROW)
    row.asserts = lambda weight, indices: lookup_key(weight, 0, indices)
    row.narrows = compares_32_bits
    return row


@guard("aten::embedding_renorm_", "aten::embedding_renorm", records=("embedding_renorm",))
def embedding_renorm_indices_in_range(self: Tensor, indices: Tensor) -> Need:
    """Every index to renormalise selects a row: it is in [-rows, rows - 1].

    Source:   Embedding.cu:252 embedding_renorm_wrap_indices_kernel, torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.embedding_renorm_(ones(3, 2), tensor([-3, 2]), 1.0, 2.0)
    Violates: aten.embedding_renorm_(ones(3, 2), tensor([0, 3]), 1.0, 2.0)
    """
    if self.dim() != 2 or indices.dtype not in INDEX_DTYPES:
        return None
    # Releases before 2.12 have no assertion here: the kernel reads on.
    why = "Each index selects a row whose norm is cut to max_norm, and there is no such row."
    rows, key = self.size(0), "embedding_renorm"
    return Within("indices", -rows, rows - 1, of="self", dim=0, unit="row", why=why, asserts=key)


@guard(
    "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
    records=("embedding_bag_index",),
    frequency="common",
)
def embedding_bag_indices_in_range(
    weight: Tensor, indices: Tensor, offsets: Tensor, mode: int, include_last_offset: bool
) -> Need:
    """Every index of every bag selects a row of the table: it is in [0, rows - 1].

    Source:   EmbeddingBag.cu:88 (max) and 148 (sum, mean), torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten._embedding_bag(zeros(3, 2), tensor([0, 2]), tensor([0, 1]))
    Violates: aten._embedding_bag(zeros(3, 2), tensor([0, 3]), tensor([0, 1]))
    """
    bags = offsets.numel() - int(include_last_offset)
    if weight.dim() != 2 or weight.size(1) == 0 or bags <= 0 or indices.dtype not in INDEX_DTYPES:
        return None
    last, key = weight.size(0) - 1, _bag_key(mode, "index")
    return Within("indices", 0, last, of="weight", dim=0, unit="row", why=_ADDS_A_ROW, asserts=key)


@guard(
    "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
    records=("embedding_bag_offsets",),
    waits=True,
)
def embedding_bag_offsets_rise(
    weight: Tensor, indices: Tensor, offsets: Tensor, mode: int, include_last_offset: bool
) -> Need:
    """No bag ends before it starts: each offset is in [offset before it, indices.numel()].

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
    key = _bag_key(mode, "offsets")
    return Condition(lambda: _falling_offset(offsets, bags, indices.numel(), key))


def _falling_offset(offsets: Tensor, bags: int, count: int, key: str) -> Violation | None:
    inner = offsets[1:bags]
    bounds = torch.cat([offsets.new_zeros(1), inner, offsets.new_full((1,), count)])
    if not bool((bounds[1:] < bounds[:-1]).any()):
        return None
    bad = torch.zeros_like(offsets, dtype=torch.bool)
    bad[1:bags] = (inner < bounds[: bags - 1]) | (inner > count)
    at = int(bad.nonzero()[0])
    before = 0 if at == 1 else offsets[at - 1].item()
    return violation_at(
        offsets,
        bad,
        f"is outside {before} … {count}: from the offset before it to the number of {{related}}",
        argument="offsets",
        explanation="A bag runs from its offset to the next one, the last to the end of the "
        "indices. The kernel asserts on a bag that ends before it starts.",
        bounds=Bounds(min=0, max=count, text=f"non-decreasing, 0 … {count}"),
        is_index=False,
        related="indices",
        size=count,
        device_text=assert_text(key),
    )


# --- gradients, whose kernels check nothing -------------------------------------------------------


_WRITES = "The kernel checks nothing and writes outside the gradient's memory."
_NO_SUCH_ROW = "No kernel checks the index, and the gradient has no such row."
_BAG_BACKWARD = ("aten::_embedding_bag_backward", "aten::_embedding_bag_dense_backward")


@guard("aten::embedding_dense_backward", is_silent=True)
def embedding_backward_indices_in_range(
    grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int
) -> Need:
    """Every index has a row in the gradient: it is in [0, num_weights - 1] or is padding_idx.

    Source:   no assertion: EmbeddingBackwardKernel.cu writes where the index points, torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.embedding_dense_backward(ones(2, 2), tensor([0, 2]), 3, -1, False)
    Violates: aten.embedding_dense_backward(ones(2, 2), tensor([0, 3]), 3, -1, False)
    """
    if grad_output.numel() == 0:
        return None
    return _gradient_row(indices, num_weights, padding_idx, _WRITES)


@guard(*_BAG_BACKWARD, is_silent=True, covers_inner=True)
def embedding_bag_backward_indices_in_range(
    grad: Tensor, indices: Tensor, num_weights: int, mode: int, padding_idx: int
) -> Need:
    """Every index has a row in the gradient: it is in [0, num_weights - 1] or is padding_idx.

    Source:   no assertion: EmbeddingBackwardKernel.cu writes where the index points, torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten._embedding_bag_dense_backward(ones(1, 2), tensor([0, 2]), tensor([0, 0]),
              tensor([2]), tensor([]), 3, False, 0, None)
    Violates: aten._embedding_bag_dense_backward(ones(1, 2), tensor([0, 3]), tensor([0, 0]),
              tensor([2]), tensor([]), 3, False, 0, None)
    """
    if mode == _MODE_MAX or grad.numel() == 0:
        return None
    return _gradient_row(indices, num_weights, padding_idx, _NO_SUCH_ROW)


@guard("aten::_embedding_bag_per_sample_weights_backward", is_silent=True)
def embedding_bag_weight_backward_indices_in_range(
    grad: Tensor, weight: Tensor, indices: Tensor, padding_idx: int
) -> Need:
    """Every index still selects a row of the table: it is in [0, rows - 1] or is padding_idx.

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
    why = "The kernel checks nothing and reads outside the table's memory."
    return _gradient_row(indices, weight.size(0), padding_idx, why)


def _gradient_row(indices: Tensor, rows: int, padding_idx: int, why: str) -> Need:
    if indices.dtype not in INDEX_DTYPES:
        return None
    row = Within("indices", 0, rows - 1, dim=0, unit="row", whole="the table", why=why)
    row.also_allowed, row.also_allowed_name = padding_idx, "padding_idx"
    row.is_replay_safe = False
    return row
