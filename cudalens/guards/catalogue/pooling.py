"""Guards of max_unpool: bounds of the indices that max_pool returned."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cudalens.guards._base import guard
from cudalens.guards.engine import Need, Within


def _plane(
    indices: Tensor, pooled: Tensor, sizes: Sequence[int], asserts: str, *, narrows: bool = False
) -> Need:
    """Require one position in a plane of ``sizes`` for each pooled element."""
    count = math.prod(sizes)
    if indices.shape != pooled.shape or indices.dtype != torch.int64 or count <= 0:
        return None
    why = "Each index is a position in one flattened plane. The kernel asserts that it lies inside."
    need = Within("indices", 0, count - 1, unit="element", why=why, asserts=asserts)
    need.whole, need.narrows = f"a plane of {' × '.join(map(str, sizes))}", narrows
    return need


@guard("aten::max_unpool2d", records=("max_unpool2d",))
def max_unpool2d_indices_in_range(
    self: Tensor, indices: Tensor, output_size: Sequence[int]
) -> Need:
    """Every index is a position in the output plane: it is in [0, height * width - 1].

    The kernel compares 32 bits of it, so that 2**32 asserts nothing there.

    Source:   MaxUnpooling.cu:47 max_unpooling2d_forward_kernel, torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.max_unpool2d(ones(1, 1, 2), tensor([[[0, 3]]]), [2, 2])
    Violates: aten.max_unpool2d(ones(1, 1, 2), tensor([[[0, 4]]]), [2, 2])
    """
    return _plane(indices, self, output_size, "max_unpool2d", narrows=True)


@guard("aten::max_unpool3d", records=("max_unpool3d",))
def max_unpool3d_indices_in_range(
    self: Tensor, indices: Tensor, output_size: Sequence[int]
) -> Need:
    """Every index is a position in the output: it is in [0, depth * height * width - 1].

    Source:   MaxUnpooling.cu:69 max_unpooling3d_forward_kernel, torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.max_unpool3d(ones(1, 1, 1, 1), tensor([[[[7]]]]), [2, 2, 2], [2, 2, 2],
              [0, 0, 0])
    Violates: aten.max_unpool3d(ones(1, 1, 1, 1), tensor([[[[8]]]]), [2, 2, 2], [2, 2, 2],
              [0, 0, 0])
    """
    return _plane(indices, self, output_size, "max_unpool3d")
