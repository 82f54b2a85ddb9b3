"""Places and values of single elements, and where another tensor has the same ones."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cudalens.core.report_types import ravel, unravel

Position = tuple[int, ...]


def reshaped(positions: Sequence[Position] | None, old: Any, new: Any) -> Sequence[Position] | None:
    """Return positions in a tensor of another shape that has all elements in the same order."""
    if not positions or old is None or new is None or math.prod(old) != math.prod(new):
        return None
    if len(positions[0]) == len(old):
        return [unravel(ravel(item, old), tuple(new)) for item in positions]
    return positions if tuple(old[:1]) == tuple(new[:1]) else None  # rows


def in_memory(
    positions: Sequence[Position] | None, view: Tensor | None, base: Tensor | None
) -> list[Position] | None:
    """Return the positions in a tensor of elements that a living view of it shows."""
    if not positions or view is None or base is None or not base.is_contiguous():
        return None
    is_dense = view.layout == base.layout == torch.strided and len(positions[0]) == view.dim()
    if not is_dense or base.untyped_storage()._cdata != view.untyped_storage()._cdata:
        return None
    start = view.storage_offset() - base.storage_offset()
    steps = view.stride()
    places = [start + sum(map(operator.mul, item, steps)) for item in positions]
    if not all(0 <= place < base.numel() for place in places):
        return None
    return [unravel(place, tuple(base.shape)) for place in places]


def values_at(tensor: Any, positions: Any) -> Tensor:
    """Return some elements as one row on the host."""
    return torch.stack([tensor.detach()[position] for position in positions]).cpu()


def contains(tensor: Tensor, value: Tensor) -> bool:
    """Return whether a tensor has an element of a value; NaN is equal to NaN."""
    value = value.to(tensor.device)
    return bool(((tensor == value) | ((tensor != tensor) & (value != value))).any())  # noqa: PLR0124
