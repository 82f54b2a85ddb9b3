"""A tensor on the way back from the one at fault, and which of its elements are followed."""

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
    """A tensor on the way, and the listed bad elements in it."""

    tensor: Ref
    origins: tuple[Position, ...]
    """Their positions in the tensor at fault."""
    positions: Sequence[Position] | None = None
    """Their places in the tensor, or those of the rows that hold them."""
    values: Tensor | None = None
    """Their values on the host; ``None`` where a call has computed others of them."""
    bad: tuple[Tensor, Tensor] | None = None
    """Flat places and values of all its bad elements, on the host, where they are known."""
    state: str = "unknown"
    """``bad`` if it is proven to have had them, ``good`` if none of them, ``other`` if it had bad
    values, perhaps others, and ``unknown`` for a tensor that is dead or was written to since."""

    def relisted(self, shape: Position) -> Marked:
        """Return it with the first few of its bad elements listed, where none is."""
        if self.positions or self.bad is None or not len(self.bad[0]):
            return self
        places, values = (item[:MAX_LISTED] for item in self.bad)
        positions = [unravel(int(place), shape) for place in places]
        return self._replace(origins=((),) * len(positions), positions=positions, values=values)

    def found_again(self) -> Marked:
        """Return it with the elements listed that have the followed values, if it is alive.

        Where a row of it was is not known of a view that is dead.
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
    """Return the inputs of ``stack`` or ``cat`` that the followed elements are of, by place.

    An input may be dead.  Empty where the dimension is not known.

    Args:
        marked: the result of the call.
        dim: in which ``stack`` counts its inputs, where that is known.
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
        # ``cat`` converts to a common dtype: the values of an input in another one are others.
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
    """Return the flat places that ``x[key] = value`` wrote, numbered as those of the value.

    All others are -1.  ``None`` where they are not known, or another call is meant.

    Args:
        marked: ``x``, or the tensor that ``x`` is a view of.
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
    """Return at which flat places the view is that ``x[key] = value`` wrote to: bool[elements].

    ``None`` where it is no view or that is not known.

    Args:
        marked: the tensor that ``x`` is a view of.
    """
    shape, whole = _shapes_of(call, marked, snapshot) or ((), None)
    if whole is None:
        return None
    numbers = in_base(torch.arange(math.prod(shape)), shape, call.layout, math.prod(whole))
    return None if numbers is None else numbers >= 0


def _shapes_of(
    call: Recorded, marked: Marked, snapshot: Snapshot
) -> tuple[Position, Position | None] | None:
    """Return the shape of ``x`` in ``x[key] = value``, and of its base where ``x`` is a view."""
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
