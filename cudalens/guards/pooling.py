"""Guards of pooling ops that are handed the positions of their maxima."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Violation
from cudalens.guards._base import guard
from cudalens.guards._dims import NARROWED, format_count, passes_narrowed
from cudalens.guards._ranges import lies_within, out_of_range

_WHY = "Each index is a position in one flattened plane; the kernel stops at one outside it."
_WHY_UNCHECKED = "The kernel checks nothing and adds to memory outside the plane."


def _plane(
    indices: Tensor,
    sizes: Sequence[int],
    *,
    device_text: str | None,
    beyond_text: str | None = None,
    related: str | None = None,
    narrows: bool = False,
) -> Violation | None:
    """Check positions in planes of ``sizes``; ``beyond_text`` is printed for those too large.

    Args:
        narrows: whether the kernel cuts the positions to 32 bits before it compares them.
    """
    count = math.prod(sizes)
    if indices.dtype != torch.int64 or count <= 0 or lies_within(indices, 0, count - 1):
        return None
    is_narrowed = narrows and passes_narrowed(indices, count - 1, is_signed=True)
    why = NARROWED if is_narrowed else _WHY
    if is_narrowed:
        device_text = beyond_text = None
    found = out_of_range(
        indices,
        argument="indices",
        low=0,
        high=count - 1,
        place=f"the {format_count(count, 'element')} of a plane of "
        + " × ".join(str(size) for size in sizes)
        + (" of {related}" if related else ""),
        why=_WHY_UNCHECKED if device_text is None and not is_narrowed else why,
        device_text=device_text,
        related=related,
        size=count,
        is_silent=device_text is None and not is_narrowed,
        is_replay_safe=device_text is not None or is_narrowed,
    )
    value = found.offenders.first[0].value
    if beyond_text is not None and isinstance(value, int) and value >= count:
        return replace(found, device_text=beyond_text)
    return found


@guard("aten::max_unpool2d", records=("max_unpool2d",))
def max_unpool2d_indices_in_range(
    self: Tensor, indices: Tensor, output_size: Sequence[int]
) -> Violation | None:
    """Every index is a position in the output plane: it lies in [0, height * width - 1].

    The kernel compares 32 bits of it, so that 2**32 asserts nothing there.

    Source:   MaxUnpooling.cu:47 max_unpooling2d_forward_kernel, torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.max_unpool2d(ones(1, 1, 2), tensor([[[0, 3]]]), [2, 2])
    Violates: aten.max_unpool2d(ones(1, 1, 2), tensor([[[0, 4]]]), [2, 2])
    """
    if indices.shape != self.shape:
        return None
    return _plane(
        indices,
        output_size,
        device_text=assert_text("max_unpool2d"),
        narrows=True,
    )


@guard("aten::max_unpool3d", records=("max_unpool3d",))
def max_unpool3d_indices_in_range(
    self: Tensor, indices: Tensor, output_size: Sequence[int]
) -> Violation | None:
    """Every index is a position in the output: it lies in [0, depth * height * width - 1].

    Source:   MaxUnpooling.cu:69 max_unpooling3d_forward_kernel, torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.max_unpool3d(ones(1, 1, 1, 1), tensor([[[[7]]]]), [2, 2, 2], [2, 2, 2],
              [0, 0, 0])
    Violates: aten.max_unpool3d(ones(1, 1, 1, 1), tensor([[[[8]]]]), [2, 2, 2], [2, 2, 2],
              [0, 0, 0])
    """
    if indices.shape != self.shape:
        return None
    return _plane(
        indices,
        output_size,
        device_text=assert_text("max_unpool3d"),
    )


@guard("aten::fractional_max_pool2d_backward", records=("fractional_max_pool2d_backward",))
def fractional_max_pool2d_indices_in_range(
    grad_output: Tensor, self: Tensor, indices: Tensor
) -> Violation | None:
    """Every index is a position in the input plane: it lies in [0, height * width - 1].

    The kernel compares 32 bits of it, so that 2**32 asserts nothing there.

    Source:   FractionalMaxPool2d.cu:120 (negative) and 123 (too large), torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.fractional_max_pool2d_backward(ones(1, 1, 1), zeros(1, 2, 2), [2, 2], [1, 1],
              tensor([[[3]]]))
    Violates: aten.fractional_max_pool2d_backward(ones(1, 1, 1), zeros(1, 2, 2), [2, 2], [1, 1],
              tensor([[[4]]]))
    """
    if indices.shape != grad_output.shape:
        return None
    return _plane(
        indices,
        self.shape[-2:],
        device_text=assert_text("fractional_max_pool2d_negative"),
        beyond_text=assert_text("fractional_max_pool2d_too_large"),
        related="self",
        narrows=True,
    )


@guard("aten::fractional_max_pool3d_backward", records=("fractional_max_pool3d_backward",))
def fractional_max_pool3d_indices_in_range(
    grad_output: Tensor, self: Tensor, indices: Tensor
) -> Violation | None:
    """Every index is a position in the input: it lies in [0, depth * height * width - 1].

    Source:   FractionalMaxPool3d.cu:140 (negative) and 146 (too large), torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.fractional_max_pool3d_backward(ones(1, 1, 1, 1), zeros(1, 2, 2, 2), [2, 2, 2],
              [1, 1, 1], tensor([[[[7]]]]))
    Violates: aten.fractional_max_pool3d_backward(ones(1, 1, 1, 1), zeros(1, 2, 2, 2), [2, 2, 2],
              [1, 1, 1], tensor([[[[-1]]]]))
    """
    if indices.shape != grad_output.shape:
        return None
    return _plane(
        indices,
        self.shape[-3:],
        device_text=assert_text("fractional_max_pool3d_negative"),
        beyond_text=assert_text("fractional_max_pool3d_too_large"),
        related="self",
    )


@guard("aten::adaptive_max_pool2d_backward", is_silent=True)
def adaptive_max_pool2d_indices_in_range(
    grad_output: Tensor, self: Tensor, indices: Tensor
) -> Violation | None:
    """Every index is a position in the input plane: it lies in [0, height * width - 1].

    Source:   no assertion: AdaptiveMaxPooling2d.cu adds wherever the index points, torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.adaptive_max_pool2d_backward(ones(1, 1, 1), zeros(1, 2, 2), tensor([[[3]]]))
    Violates: aten.adaptive_max_pool2d_backward(ones(1, 1, 1), zeros(1, 2, 2), tensor([[[4]]]))
    """
    if indices.shape != grad_output.shape:
        return None
    return _plane(
        indices,
        self.shape[-2:],
        device_text=None,
        related="self",
    )


@guard("aten::adaptive_max_pool3d_backward", is_silent=True)
def adaptive_max_pool3d_indices_in_range(
    grad_output: Tensor, self: Tensor, indices: Tensor
) -> Violation | None:
    """Every index is a position in the input: it lies in [0, depth * height * width - 1].

    Source:   no assertion: AdaptiveMaxPooling3d.cu adds wherever the index points, torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.adaptive_max_pool3d_backward(ones(1, 1, 1, 1), zeros(1, 1, 2, 2),
              tensor([[[[3]]]]))
    Violates: aten.adaptive_max_pool3d_backward(ones(1, 1, 1, 1), zeros(1, 1, 2, 2),
              tensor([[[[4]]]]))
    """
    if indices.shape != grad_output.shape:
        return None
    return _plane(
        indices,
        self.shape[-3:],
        device_text=None,
        related="self",
    )
