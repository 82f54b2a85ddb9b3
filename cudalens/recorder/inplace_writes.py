"""Did a write in place bring the bad values?  Proven from what lives on, or not said.

The elements that a call wrote to are known where it wrote to all of them, to a view, or where its
mask or indices live on.  Of the followed elements it brought those that it wrote to, since later
writes are judged first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cudalens.recorder.elements import Elements, Geometry, geometry_of
from cudalens.recorder.lineage import Lineage, value_inputs
from cudalens.recorder.ops import Call, aten
from cudalens.recorder.tensor_refs import Ref

IsBad = Callable[[Tensor], bool]
_MAX_MARKED = 1 << 27
"""Elements of a tensor that are marked one by one."""

_RESHAPES = aten("as_strided_ detach_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_")
"""Calls that write no element."""
_RENEWS = aten("resize_ resize_as_ set_")
"""Calls after which the tensor has other memory."""
_PLACES = aten(
    "index_put_ _index_put_impl_ index_fill_ index_copy_ put_ scatter_ masked_fill_ masked_scatter_"
)
"""Calls that write their values as they are to some of the elements."""
_CHANGES = aten("index_add_ index_reduce_ scatter_add_ scatter_reduce_ fill_diagonal_")
"""Calls that change some of the elements."""
_BY_ONE_INDEX = aten(
    "index_fill_ index_copy_ index_add_ index_reduce_ scatter_ scatter_add_ scatter_reduce_ put_"
)
"""Calls whose first index says, in one dimension, to which elements they write."""
_FILLS = aten(
    "bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_ "
    "zero_"
)
"""Calls that write to all elements, whatever was there."""


class InplaceWrites:
    """Judges the writes to one tensor, newest first."""

    def __init__(self, lineage: Lineage, is_bad: IsBad) -> None:
        self._lineage = lineage
        self._is_bad = is_bad
        self.unknown = 0
        """To so many elements, at most, later calls have written nobody knows what."""

    def brought(self, call: Call, current: Ref, elements: Elements | None) -> bool | None:
        """Return whether a call brought the bad values; ``None`` when neither can be proven.

        Args:
            current: the bad tensor as it was right after the call.
            elements: those of its bad elements that are followed.
        """
        name = call.facts.name
        if name in _RESHAPES:
            return False
        if name in _RENEWS or call.facts.is_foreign:
            return None
        is_whole = name not in _PLACES and name not in _CHANGES
        is_view = self._lineage.base_of(call.output) is not None or call.base is not None
        if is_whole and (self._lineage.same(call.output, current) or not is_view):
            return True
        if elements is None:
            return None
        reached = self.reached(call, current, elements)
        if reached is None:
            return None if is_whole else self._by_values(call, elements)
        if not reached.places:
            return False
        if not elements.is_exact and len(reached.places) < len(elements.places):
            return None
        return True if len(reached.places) > self.unknown else None

    def bad_number(self, call: Call, elements: Elements | None) -> float | None:
        """Return the one bad number that a call wrote to some elements, where one of the followed
        elements has it.
        """
        number = call.noted.number
        if number is None or not self._is_bad_number(call, number):
            return None
        values = None if elements is None else elements.values()
        is_theirs = values is None or call.adds or bool((values == number).any())
        return number if is_theirs else None

    def is_filling(self, call: Call) -> bool:
        """Return whether what a call wrote does not depend on what was there."""
        if call.facts.name in _PLACES:
            return not call.adds
        return call.facts.name in _FILLS

    # --- by the elements -------------------------------------------------------------------------

    def reached(self, call: Call, current: Ref, elements: Elements) -> Elements | None:
        """Return those of the elements that a call wrote to; ``None`` where that is not known."""
        living = call.output()
        if call.view is not None:
            shown: Geometry = (call.view.shape, call.view.stride, call.view.offset)
        elif living is not None:
            shown = geometry_of(living)
        elif elements.living is None and self._lineage.same(call.output, current):
            shown = (elements.shape, (), 0)
        else:
            return None
        dtype = self._lineage.meta_of(call.output)[1] if call.view is None else call.view.dtype
        if elements.living is not None:
            places = elements.places_in(shown) if dtype == elements.living.dtype else None
        else:
            places = list(elements.places) if self._lineage.same(call.output, current) else None
        selection = self._selection(call, len(shown[0]))
        if places is None or selection is None or math.prod(shown[0]) > _MAX_MARKED:
            return None
        if selection == (...,):
            return elements.among([place is not None for place in places])
        marks = torch.zeros(tuple(shown[0]), dtype=torch.bool)
        try:
            marks[selection] = True
        except (IndexError, RuntimeError):  # its mask or indices are not what they were
            return None
        return elements.among([place is not None and bool(marks[place]) for place in places])

    def _selection(self, call: Call, dimensions: int) -> tuple[Any, ...] | None:
        """Return the mask or the indices with which a call chose, where all of them live on."""
        name = call.facts.name
        if name not in _PLACES and name not in _CHANGES:
            return (...,)
        if name in ("aten::masked_fill_", "aten::masked_scatter_"):
            chosen = call.inputs[1:2]
        elif name == "aten::index_put_":
            chosen = call.inputs[1:-1]
        elif dimensions == 1 and name in _BY_ONE_INDEX:
            chosen = call.inputs[1:2]
        else:
            return None
        living = [item() for item in chosen if self._lineage.is_untouched(item, call.seq)]
        found = tuple(item.cpu() for item in living if item is not None)
        is_mask = [item.dtype in (torch.bool, torch.uint8) for item in found]
        used = sum(item.dim() if m else 1 for item, m in zip(found, is_mask, strict=True))
        # Of a None among the indices, which stands for a whole dimension, no trace is left.
        return found if len(found) == len(chosen) and used == dimensions else None

    # --- by the values ---------------------------------------------------------------------------

    def _by_values(self, call: Call, elements: Elements) -> bool | None:
        """Judge a write to elements that nobody knows."""
        if elements.living is None:
            return None  # whether they were bad then is not known
        values = [item for item in value_inputs(call) or () if item is not call.output]
        if any(self.carries(item, call.seq) for item in values):
            return None
        if self._is_good(call, values):
            return False
        count = self._most_elements(call)
        if count is None or not elements.is_exact:
            return None
        if len(elements.places) <= count + self.unknown:
            return None
        self.unknown += count
        return False

    def carries(self, tensor: Ref, since: int) -> bool:
        """Return whether a tensor, read by call number ``since``, lives on with a bad value."""
        living = tensor()
        return (
            living is not None and self._lineage.is_untouched(tensor, since) and self.test(living)
        )

    def test(self, tensor: Tensor) -> bool:
        """Return whether a living tensor holds a bad value."""
        return tensor.device.type != "meta" and tensor.numel() > 0 and self._is_bad(tensor)

    def _is_good(self, call: Call, values: Sequence[Ref]) -> bool:
        """Return whether all values that a call wrote are proven to be good."""
        if call.facts.name not in _PLACES or call.adds:
            return False
        if call.noted.number is not None:
            return not self._is_bad_number(call, call.noted.number)
        dtype = self._lineage.meta_of(call.output)[1]
        return bool(values) and all(
            (living := item()) is not None
            and living.dtype == dtype
            and self._lineage.is_untouched(item, call.seq)
            and not self.test(living)
            for item in values
        )

    def _is_bad_number(self, call: Call, number: float) -> bool:
        dtype = self._lineage.meta_of(call.output)[1]
        return self.test(torch.tensor([number], dtype=dtype))

    # --- by their count --------------------------------------------------------------------------

    def _most_elements(self, call: Call) -> int | None:
        """Return an upper bound of the number of elements that a call wrote to."""
        name, shape = call.facts.name, self._lineage.meta_of(call.output)[0]
        if call.view is not None:
            shape = call.view.shape
        chosen = call.inputs[1:-1] if name == "aten::index_put_" else call.inputs[1:2]
        metas = [self._lineage.meta_of(item) for item in chosen]
        masks = (None, torch.bool, torch.uint8)
        if not metas or shape is None or any(dtype in masks for _, dtype in metas):
            return None
        if name.startswith("aten::scatter_"):
            return int(math.prod(metas[0][0]))
        if not name.startswith("aten::index_"):
            return None
        # Which dimensions the indices stand for is not known: at most it is the short ones.
        rest = sorted(shape)[len(metas) :]
        chosen_at = torch.broadcast_shapes(*(size for size, _ in metas))
        return int(math.prod(chosen_at) * math.prod(rest))
