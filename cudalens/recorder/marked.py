"""The current tensor of a provenance walk, and which of its elements are followed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudalens.core.report_types import unravel
from cudalens.recorder.calls import Recorded
from cudalens.recorder.history import Snapshot
from cudalens.recorder.places import Position, in_base, joined_at, values_at, written_places
from cudalens.recorder.tensor_refs import Ref, is_ref

MAX_LISTED = 20
MAX_SEARCHED = 1 << 20
"""A tensor of more elements is not searched for values."""
MAX_PLACES = 1 << 20
"""Up to this many bad elements are followed; up to four times as many elements have a key."""


class Marked(NamedTuple):
    """A tensor on the walk back from the bad one, and the listed bad elements in it."""

    tensor: Ref
    origins: tuple[Position, ...]
    """The positions of the listed elements in the bad tensor."""
    positions: Sequence[Position] | None = None
    """Their positions in this tensor, or those of the rows that contain them."""
    values: Tensor | None = None
    """Their values on the CPU, ``None`` behind a call that computed new values from them."""
    bad: tuple[Tensor, Tensor] | None = None
    """Flat indices and values of all bad elements, on the CPU, if known."""
    state: str = "unknown"
    """``bad`` if it provably had these elements, ``good`` if it had no bad value, ``other`` if it
    had some bad values, ``unknown`` if it was freed or written to since."""

    def relisted(self, shape: Position) -> Marked:
        """Return a copy that lists the first bad elements, if it lists none."""
        if self.positions or self.bad is None or not len(self.bad[0]):
            return self
        places, values = (item[:MAX_LISTED] for item in self.bad)
        positions = [unravel(int(place), shape) for place in places]
        return self._replace(origins=((),) * len(positions), positions=positions, values=values)

    def found_again(self) -> Marked:
        """Return a copy that lists the elements with the followed values, if the tensor is alive.

        For a walk through a freed view, whose position in this tensor is unknown.
        """
        living = self.tensor()
        if living is None or self.values is None or not 0 < living.numel() <= MAX_SEARCHED:
            return self
        own = living.detach().cpu()
        places = torch.isin(own, self.values.to(own.dtype)).nonzero()[:MAX_LISTED]
        positions = [tuple(place) for place in places.tolist()]
        if not positions:
            return self
        origins = ((),) * len(positions)
        values = values_at(own, positions)
        return self._replace(origins=origins, positions=positions, values=values)


def parts_of(call: Recorded, marked: Marked, snapshot: Snapshot, dim: int | None) -> list[Marked]:
    """Return the inputs of ``stack`` or ``cat`` that the followed elements came from.

    By position, so that an input may have been freed.  Empty if the dimension is unknown.

    Args:
        marked: the result of the call.
        dim: the new dimension of ``stack``, if known.
    """
    shapes = [snapshot.meta_of(item)[0] for item in call.inputs]
    shape, dtype = snapshot.meta_of(marked.tensor)
    if not marked.positions or shape is None or None in shapes:
        return []
    sizes = [*map(tuple, shapes)]
    places = joined_at(call.api.stem, tuple(shape), sizes, marked.positions, dim) or []
    found: dict[int, list[int]] = {}
    for number, (part, _) in enumerate(places):
        found.setdefault(part, []).append(number)
    parts = []
    for part, numbers in found.items():
        source = call.inputs[part]
        # ``cat`` promotes to a common dtype: an input of another dtype has other values.
        is_same = marked.values is not None and snapshot.meta_of(source)[1] == dtype
        parts.append(
            Marked(
                source,
                tuple(marked.origins[it] for it in numbers),
                [places[it][1] for it in numbers],
                marked.values[numbers] if is_same and marked.values is not None else None,
                state=marked.state,
            )
        )
    return parts


def places_written(call: Recorded, marked: Marked, snapshot: Snapshot) -> Tensor | None:
    """Return, for each element of a tensor, which element of the value ``x[key] = value`` wrote.

    Flat indices, -1 where it wrote nothing.  ``None`` if unknown, or for another function.

    Args:
        marked: the tensor: ``x`` or its base.
    """
    shapes, key = _shapes_of(call, marked, snapshot), []
    for part in call.key if shapes is not None else ():
        living: Any = part() if is_ref(part) else part
        if is_ref(part):
            is_kept = living is not None and snapshot.is_untouched(part, call.seq)
            if not is_kept or living.device.type == "meta":
                return None
            living = living.detach().cpu()
        key.append(living)
    source = snapshot.meta_of(call.operand)[0] if is_ref(call.operand) else ()
    if shapes is None or source is None:
        return None
    shape, whole = shapes
    numbers = written_places(shape, key, source)
    return numbers if whole is None else in_base(numbers, shape, call.layout, math.prod(whole))


def places_shown(call: Recorded, marked: Marked, snapshot: Snapshot) -> Tensor | None:
    """Return bool[elements of the base]: true where the view ``x`` of ``x[key] = value`` lies.

    ``None`` if ``x`` is no view, or its layout is unknown.

    Args:
        marked: the base of ``x``.
    """
    shape, whole = _shapes_of(call, marked, snapshot) or ((), None)
    if whole is None:
        return None
    numbers = in_base(torch.arange(math.prod(shape)), shape, call.layout, math.prod(whole))
    return None if numbers is None else numbers >= 0


def _shapes_of(
    call: Recorded, marked: Marked, snapshot: Snapshot
) -> tuple[Position, Position | None] | None:
    """Return the shape of ``x`` in ``x[key] = value``, and that of its base if it is a view."""
    if call.key is None or marked.bad is None or len(call.written) != 1:
        return None
    target = call.written[0].tensor
    (shape, dtype), (whole, own) = snapshot.meta_of(target), snapshot.meta_of(marked.tensor)
    if shape is None or whole is None or math.prod(whole) > 4 * MAX_PLACES:
        return None
    if target is marked.tensor:
        return shape, None
    is_view = snapshot.whole(target) is marked.tensor and dtype == own and call.layout is not None
    return (shape, whole) if is_view else None
