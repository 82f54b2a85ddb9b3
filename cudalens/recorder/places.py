"""Positions and values of single elements, mapped from one tensor to another."""

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
    """Return positions after a reshape, which keeps the row-major order of the elements."""
    if not positions or old is None or new is None or math.prod(old) != math.prod(new):
        return None
    if len(positions[0]) == len(old):
        return [unravel(ravel(item, old), tuple(new)) for item in positions]
    return positions if tuple(old[:1]) == tuple(new[:1]) else None  # rows


def in_memory(
    positions: Sequence[Position] | None, view: Tensor | None, base: Tensor | None
) -> list[Position] | None:
    """Return positions in a living view as positions in its base, ``None`` if unknown."""
    if not positions or view is None or base is None or not base.is_contiguous():
        return None
    is_dense = view.layout == base.layout == torch.strided and len(positions[0]) == view.dim()
    # After `x.data = y` an older view of x still has the old memory.
    if not is_dense or base.untyped_storage()._cdata != view.untyped_storage()._cdata:
        return None
    start = view.storage_offset() - base.storage_offset()
    steps = view.stride()
    places = [start + sum(map(operator.mul, item, steps)) for item in positions]
    if not all(0 <= place < base.numel() for place in places):
        return None
    return [unravel(place, tuple(base.shape)) for place in places]


def written_places(shape: Any, key: Sequence[Any], source: Any) -> Tensor:
    """Return which element of the value ``x[key] = value`` writes to each element of ``x``.

    Both are flat, row-major indices. -1 where it writes nothing.

    Args:
        shape: the shape of ``x``.
        source: the shape of the value.

    Example:
        >>> written_places((2, 3), [1, slice(1, None)], (2,))
        tensor([-1, -1, -1, -1,  0,  1])
    """
    numbers = torch.full(shape, -1, dtype=torch.int64)
    numbers[tuple(key)] = torch.arange(math.prod(source)).reshape(tuple(source))
    return numbers.reshape(-1)


def in_base(numbers: Tensor, shape: Any, layout: Any, count: int) -> Tensor | None:
    """Scatter one number for each element of a view to the elements of its base, -1 elsewhere.

    Args:
        shape: the shape of the view.
        layout: its offset in the contiguous base, and its strides.
        count: number of elements of the base.

    Example:
        >>> in_base(torch.tensor([7, -1]), (2,), (1, (2,)), 4)  # x[1::2] of four
        tensor([-1,  7, -1, -1])
    """
    start, strides = layout
    places = torch.full(tuple(shape), start)
    for dim, (size, step) in enumerate(zip(shape, strides, strict=True)):
        along = torch.arange(size) * step
        places += along.reshape([-1 if at == dim else 1 for at in range(len(shape))])
    places, is_written = places.reshape(-1), numbers >= 0
    if len(places) and not 0 <= places.min() <= places.max() < count:
        return None
    found = torch.full((count,), -1)
    found[places[is_written]] = numbers[is_written]
    return found


def address_of(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage, the same for all of its views.

    ``None`` for a tensor without a storage, such as a sparse one, and for an empty one.
    """
    try:
        return tensor.untyped_storage().data_ptr() or None
    except RuntimeError:  # NotImplementedError is one
        return None


def values_at(tensor: Any, positions: Any) -> Tensor:
    """Return the elements at some positions as a 1-d tensor on the CPU."""
    return torch.stack([tensor.detach()[position] for position in positions]).cpu()


def contains(tensor: Tensor, value: Tensor) -> bool:
    """Return whether a tensor contains a value; NaN equals NaN here."""
    value = value.to(tensor.device)
    return bool(((tensor == value) | ((tensor != tensor) & (value != value))).any())  # noqa: PLR0124


def is_among(values: Tensor, tensor: Tensor) -> Tensor:
    """Return bool[values]: which of them a tensor contains; NaN equals NaN here."""
    tensor = tensor.detach().to(values)
    return torch.isin(values, tensor) | ((values != values) & (tensor != tensor).any())  # noqa: PLR0124


def joined_at(
    stem: str,
    shape: Position,
    parts: Sequence[Position],
    positions: Sequence[Position],
    dim: int | None = None,
) -> list[tuple[int, Position]] | None:
    """Return, for positions in a ``stack`` or ``cat``, the input and the position in it.

    ``None`` for another function, and if the shapes fit more than one dimension.

    Args:
        shape, parts: shapes of the result and of the inputs.
        dim: the new dimension of ``stack``, if known.

    Example:
        >>> joined_at("cat", (5,), [(2,), (3,)], [(1,), (4,)])
        [(0, (1,)), (1, (2,))]
    """
    is_stack = stem == "stack"
    if not is_stack and (stem not in ("cat", "concat") or {*map(len, parts)} != {len(shape)}):
        return None

    def fits(at: int, size: int) -> bool:
        rest = {shape[:at] + shape[at + 1 :]}
        if is_stack:
            return size == len(parts) and rest == {*parts} and dim in (None, at)
        is_sum = size == sum(part[at] for part in parts)
        return is_sum and rest == {part[:at] + part[at + 1 :] for part in parts}

    dims = [at for at, size in enumerate(shape) if fits(at, size)]
    if len(dims) != 1:
        return None
    at, found = dims[0], []
    # After a reshape that kept only the rows, a position has one coordinate.
    if any(len(item) <= at for item in positions):
        return None
    for item in positions:
        part, place = (item[at], 0) if is_stack else (0, item[at])
        while not is_stack and place >= parts[part][at]:
            place -= parts[part][at]
            part += 1
        own = () if is_stack else (place,)
        found.append((part, (*item[:at], *own, *item[at + 1 :])))
    return found
