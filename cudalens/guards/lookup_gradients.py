"""Guards of the gradients of lookup tables, whose kernels check nothing."""

from __future__ import annotations

from torch import Tensor

from cudalens.core.report_types import Violation
from cudalens.guards._base import guard
from cudalens.guards._dims import INDEX_DTYPES, counted
from cudalens.guards._ranges import extremes, lies_within, out_of_range

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
        place=f"the {counted(num_weights, 'row')} of the gradient",
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
        place=f"the {counted(rows, 'row')} of " + ("{related}" if related else "the gradient"),
        why=why,
        device_text=None,
        related=related,
        size=rows,
        dim=0,
        is_silent=True,
        is_replay_safe=False,
    )
