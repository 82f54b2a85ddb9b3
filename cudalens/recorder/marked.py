"""A tensor on the way back from the one at fault, and which of its elements are followed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cudalens.core.report_types import unravel
from cudalens.recorder.calls import Recorded
from cudalens.recorder.history import Snapshot
from cudalens.recorder.places import Position, joined_at, values_at
from cudalens.recorder.tensor_refs import Ref

MAX_LISTED = 20
MAX_SEARCHED = 1 << 20
"""A tensor of more elements is not searched for values."""


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
