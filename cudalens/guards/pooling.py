"""Guards of pooling ops that are handed the positions of their maxima."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cudalens.guards._base import guard
from cudalens.guards.engine import Asserts, Need, Within

_WHY = "Each index is a position in one flattened plane; the kernel stops at one outside it."
_WHY_UNCHECKED = "The kernel checks nothing and adds to memory outside the plane."


def _plane(
    indices: Tensor,
    pooled: Tensor,
    sizes: Sequence[int],
    *,
    asserts: Asserts = None,
    of: str | None = None,
    narrows: bool = False,
) -> Need:
    """Require one position in a plane of ``sizes`` for each pooled element."""
    count = math.prod(sizes)
    if indices.shape != pooled.shape or indices.dtype != torch.int64 or count <= 0:
        return None
    need = Within("indices", 0, count - 1, of=of, unit="element", asserts=asserts, why=_WHY)
    need.whole = f"a plane of {' × '.join(map(str, sizes))}" + (" of {related}" if of else "")
    need.narrows = narrows
    if asserts is None:
        need.why, need.is_replay_safe = _WHY_UNCHECKED, False
    return need


@guard("aten::max_unpool2d", records=("max_unpool2d",))
def max_unpool2d_indices_in_range(
    self: Tensor, indices: Tensor, output_size: Sequence[int]
) -> Need:
    """Every index is a position in the output plane: it lies in [0, height * width - 1].

    The kernel compares 32 bits of it, so that 2**32 asserts nothing there.

    Source:   MaxUnpooling.cu:47 max_unpooling2d_forward_kernel, torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.max_unpool2d(ones(1, 1, 2), tensor([[[0, 3]]]), [2, 2])
    Violates: aten.max_unpool2d(ones(1, 1, 2), tensor([[[0, 4]]]), [2, 2])
    """
    return _plane(indices, self, output_size, asserts="max_unpool2d", narrows=True)


@guard("aten::max_unpool3d", records=("max_unpool3d",))
def max_unpool3d_indices_in_range(
    self: Tensor, indices: Tensor, output_size: Sequence[int]
) -> Need:
    """Every index is a position in the output: it lies in [0, depth * height * width - 1].

    Source:   MaxUnpooling.cu:69 max_unpooling3d_forward_kernel, torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.max_unpool3d(ones(1, 1, 1, 1), tensor([[[[7]]]]), [2, 2, 2], [2, 2, 2],
              [0, 0, 0])
    Violates: aten.max_unpool3d(ones(1, 1, 1, 1), tensor([[[[8]]]]), [2, 2, 2], [2, 2, 2],
              [0, 0, 0])
    """
    return _plane(indices, self, output_size, asserts="max_unpool3d")


@guard("aten::fractional_max_pool2d_backward", records=("fractional_max_pool2d_backward",))
def fractional_max_pool2d_indices_in_range(
    grad_output: Tensor, self: Tensor, indices: Tensor
) -> Need:
    """Every index is a position in the input plane: it lies in [0, height * width - 1].

    The kernel compares 32 bits of it, so that 2**32 asserts nothing there.

    Source:   FractionalMaxPool2d.cu:120 (negative) and 123 (too large), torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.fractional_max_pool2d_backward(ones(1, 1, 1), zeros(1, 2, 2), [2, 2], [1, 1],
              tensor([[[3]]]))
    Violates: aten.fractional_max_pool2d_backward(ones(1, 1, 1), zeros(1, 2, 2), [2, 2], [1, 1],
              tensor([[[4]]]))
    """
    plane, key = self.shape[-2:], "fractional_max_pool2d"
    asserts = (f"{key}_negative", f"{key}_too_large")
    return _plane(indices, grad_output, plane, asserts=asserts, of="self", narrows=True)


@guard("aten::fractional_max_pool3d_backward", records=("fractional_max_pool3d_backward",))
def fractional_max_pool3d_indices_in_range(
    grad_output: Tensor, self: Tensor, indices: Tensor
) -> Need:
    """Every index is a position in the input: it lies in [0, depth * height * width - 1].

    Source:   FractionalMaxPool3d.cu:140 (negative) and 146 (too large), torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.fractional_max_pool3d_backward(ones(1, 1, 1, 1), zeros(1, 2, 2, 2), [2, 2, 2],
              [1, 1, 1], tensor([[[[7]]]]))
    Violates: aten.fractional_max_pool3d_backward(ones(1, 1, 1, 1), zeros(1, 2, 2, 2), [2, 2, 2],
              [1, 1, 1], tensor([[[[-1]]]]))
    """
    plane, key = self.shape[-3:], "fractional_max_pool3d"
    asserts = (f"{key}_negative", f"{key}_too_large")
    return _plane(indices, grad_output, plane, asserts=asserts, of="self")


@guard("aten::adaptive_max_pool2d_backward", is_silent=True)
def adaptive_max_pool2d_indices_in_range(
    grad_output: Tensor, self: Tensor, indices: Tensor
) -> Need:
    """Every index is a position in the input plane: it lies in [0, height * width - 1].

    Source:   no assertion: AdaptiveMaxPooling2d.cu adds wherever the index points, torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.adaptive_max_pool2d_backward(ones(1, 1, 1), zeros(1, 2, 2), tensor([[[3]]]))
    Violates: aten.adaptive_max_pool2d_backward(ones(1, 1, 1), zeros(1, 2, 2), tensor([[[4]]]))
    """
    return _plane(indices, grad_output, self.shape[-2:], of="self")


@guard("aten::adaptive_max_pool3d_backward", is_silent=True)
def adaptive_max_pool3d_indices_in_range(
    grad_output: Tensor, self: Tensor, indices: Tensor
) -> Need:
    """Every index is a position in the input: it lies in [0, depth * height * width - 1].

    Source:   no assertion: AdaptiveMaxPooling3d.cu adds wherever the index points, torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.adaptive_max_pool3d_backward(ones(1, 1, 1, 1), zeros(1, 1, 2, 2),
              tensor([[[[3]]]]))
    Violates: aten.adaptive_max_pool3d_backward(ones(1, 1, 1, 1), zeros(1, 1, 2, 2),
              tensor([[[[4]]]]))
    """
    return _plane(indices, grad_output, self.shape[-3:], of="self")
