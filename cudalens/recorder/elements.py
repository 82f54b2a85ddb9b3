"""The elements whose way is followed: positions in a tensor, not the tensor as a whole.

Another element of the same tensor may have been bad earlier and good in between, so that a line
is blamed only for the very elements that the failing op was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cudalens.core.tensor_values import HOST_NUMEL, ravel, unravel

LIMIT = 64
"""So many bad elements of a tensor are followed: more than a report lists."""
Position = tuple[int, ...]
Geometry = tuple[Sequence[int], Sequence[int], int]
"""Shape, stride and offset of what a tensor shows of its memory."""


@dataclass(frozen=True)
class Elements:
    """Bad elements at one moment of their way."""

    places: tuple[Position, ...]
    origins: tuple[Position, ...]
    """Where each of them stands in the tensor that the way begins with."""
    living: Tensor | None = None
    """The tensor that the places are positions of, with the values of then; ``None`` where it is
    dead and only its shape is known."""
    shape: tuple[int, ...] = ()
    is_exact: bool = True
    """Whether each of them is followed; else an unknown one of them is."""

    def at(self, places: Sequence[Position | None], **changes: Any) -> Elements:
        """Return the same elements at other places; those at ``None`` are no longer followed."""
        kept = [pair for pair in zip(places, self.origins, strict=True) if pair[0] is not None]
        return replace(
            self,
            places=tuple(place for place, _ in kept if place is not None),
            origins=tuple(origin for _, origin in kept),
            **changes,
        )

    def among(self, wanted: Sequence[bool]) -> Elements:
        """Return those that are marked."""
        pairs = zip(self.places, wanted, strict=True)
        return self.at([place if is_in else None for place, is_in in pairs])

    def values(self) -> Tensor | None:
        """Return the values that they have, on the host."""
        return None if self.living is None else values_at(self.living, self.places)

    def seen_in(self, tensor: Tensor) -> Elements | None:
        """Return the same elements as positions of another tensor with the same memory."""
        if self.living is None or tensor is self.living:
            return self if tensor is self.living else None
        if not _shares_memory(tensor, self.living):
            return None
        places = self.places_in(geometry_of(tensor))
        return None if None in places else self.at(places, living=tensor, shape=tuple(tensor.shape))

    def places_in(self, shown: Geometry) -> list[Position | None]:
        """Return where the living elements stand in another view; ``None`` for those outside."""
        if self.living is None:
            return [None] * len(self.places)
        _, stride, offset = geometry_of(self.living)
        return [
            _place_of(offset + sum(i * step for i, step in zip(place, stride, strict=True)), shown)
            for place in self.places
        ]

    def reshaped(self, shape: Sequence[int]) -> Elements | None:
        """Return them in a shape that holds the same elements in the same order."""
        if math.prod(shape) != math.prod(self.shape):
            return None
        flat = (ravel(place, self.shape) for place in self.places)
        places = [unravel(index, tuple(shape)) for index in flat]
        return self.at(places, living=None, shape=tuple(shape))

    def spread_from(self, shape: Sequence[int]) -> Elements | None:
        """Return where elements of a result came from in an input that was broadcast to it."""
        lost = len(self.shape) - len(shape)
        if lost < 0:
            return None
        sizes = zip(shape, self.shape[lost:], strict=True)
        if any(size not in (1, result) for size, result in sizes):
            return None
        places = [
            tuple(0 if size == 1 else i for i, size in zip(place[lost:], shape, strict=True))
            for place in self.places
        ]
        return self.at(places, living=None, shape=tuple(shape))


def first_bad(tensor: Tensor, test: Callable[[Tensor], bool]) -> Elements:
    """Find the first bad elements of a tensor in row-major order, by halving what holds some."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= HOST_NUMEL:
        flat = flat.cpu()
    found: list[int] = []
    starts = reversed(range(0, flat.numel(), HOST_NUMEL))
    waiting = [(start, min(start + HOST_NUMEL, flat.numel())) for start in starts]
    while waiting and len(found) < LIMIT:
        start, end = waiting.pop()
        if not test(flat[start:end]):
            continue
        if end - start == 1:
            found.append(start)
            continue
        middle = (start + end) // 2
        waiting += [(middle, end), (start, middle)]
    shape = tuple(tensor.shape)
    places = tuple(unravel(index, shape) for index in found)
    return Elements(places, places, tensor, shape)


def values_at(tensor: Tensor, places: Sequence[Position]) -> Tensor:
    """Return the elements at some positions as one row on the host."""
    if not places or tensor.dim() == 0:
        return tensor.detach().reshape(-1)[: len(places)].cpu()
    index = torch.tensor(places, device=tensor.device).unbind(1)
    return tensor.detach()[index].cpu()


def places_of(tensor: Tensor, value: Tensor) -> list[Position] | None:
    """Find a value in a tensor; ``None`` where it stands more often than can be followed."""
    is_nan = tensor.dtype.is_floating_point and bool(value.isnan())
    same = tensor.isnan() if is_nan else tensor == value.to(tensor.device)
    if int(same.count_nonzero()) > LIMIT:
        return None
    return [tuple(place) for place in same.nonzero().tolist()]


def geometry_of(tensor: Tensor) -> Geometry:
    """Return what a tensor shows of its memory."""
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _shares_memory(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.device != right.device:
        return False
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def _place_of(address: int, shown: Geometry) -> Position | None:
    """Return the position of an element of the memory in a view, ``None`` where it shows it not."""
    shape, stride, offset = shown
    rest, place = address - offset, [0] * len(shape)
    for at in sorted(range(len(shape)), key=lambda at: -stride[at]):
        if stride[at] > 0 and shape[at] > 1:
            place[at], rest = divmod(rest, stride[at])
            if not 0 <= place[at] < shape[at]:
                return None
    return tuple(place) if rest == 0 and 0 not in shape else None
