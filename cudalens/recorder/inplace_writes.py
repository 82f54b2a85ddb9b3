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

from cudalens.recorder.calls import Recorded, names
from cudalens.recorder.elements import Elements, Geometry, geometry_of
from cudalens.recorder.lineage import Lineage, value_inputs, written_values
from cudalens.recorder.tensor_refs import Ref, is_ref

IsBad = Callable[[Tensor], bool]
_MAX_MARKED = 1 << 27
"""Elements of a tensor that are marked one by one."""

_RESHAPES = names("as_strided_ detach_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_")
"""Functions that write no element."""
_RENEWS = frozenset(["resize_", "resize_as_", "set_", "data"])
"""Functions after which the tensor has other memory."""
_FILLS = names(
    "bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_ "
    "zero_"
)
"""Functions that write to all elements, whatever was there."""
_ADDS = ("index_add_", "scatter_add_", "index_reduce_", "scatter_reduce_")


def _mark_dimension(marks: Tensor, given: Sequence[Any]) -> Any:
    return marks.index_fill_(given[1], given[2], True)


_MARKS: dict[str, Callable[[Tensor, Sequence[Any]], Any]] = {
    "__setitem__": lambda marks, given: marks.__setitem__(given[1], True),
    "masked_fill_": lambda marks, given: marks.masked_fill_(given[1], True),
    "masked_scatter_": lambda marks, given: marks.masked_fill_(given[1], True),
    "index_put_": lambda marks, given: marks.index_put_(tuple(given[1]), torch.tensor(True)),
    "put_": lambda marks, given: marks.view(-1).index_fill_(0, given[1].reshape(-1), True),
    **dict.fromkeys(("index_fill_", "index_copy_", "index_add_", "index_reduce_"), _mark_dimension),
    **dict.fromkeys(
        ("scatter_", "scatter_add_", "scatter_reduce_"),
        lambda marks, given: marks.scatter_(given[1], given[2], True),
    ),
}
"""Of each function that writes to some elements what marks them, given its arguments."""


def adds(call: Recorded) -> bool:
    """Return whether a call added what it wrote to what was there."""
    given = call.given or ()
    accumulates = call.api.stem in ("index_put_", "put_") and any(given[3:4])
    return accumulates or call.api.stem in _ADDS


def written_number(call: Recorded) -> float | None:
    """Return the one number of the host's that a call wrote to some elements."""
    value = next(iter(written_values(call)), None) if call.api.keeps else None
    living = value() if is_ref(value) else None
    if living is not None and living.is_cpu and living.dim() == 0:
        value = living.item()
    return value if type(value) in (int, float, bool) else None


class InplaceWrites:
    """Judges the writes to one tensor, newest first."""

    def __init__(self, lineage: Lineage, is_bad: IsBad) -> None:
        self._lineage = lineage
        self._is_bad = is_bad
        self.unknown = 0
        """To so many elements, at most, later calls have written nobody knows what."""

    def brought(self, call: Recorded, current: Ref, elements: Elements | None) -> bool | None:
        """Return whether a call brought the bad values; ``None`` when neither can be proven.

        Args:
            current: the bad tensor as it was right after the call.
            elements: those of its bad elements that are followed.
        """
        stem, written = call.api.stem, call.written[0]
        if stem in _RESHAPES:
            return False
        if stem in _RENEWS or call.api.is_foreign:
            return None
        is_whole = not call.api.keeps
        is_view = self._lineage.base_of(written.tensor) is not None or written.base is not None
        if is_whole and (self._lineage.same(written.tensor, current) or not is_view):
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

    def bad_number(self, call: Recorded, elements: Elements | None) -> float | None:
        """Return the one bad number that a call wrote to some elements, where one of the followed
        elements has it.
        """
        number = written_number(call)
        if number is None or not self._is_bad_number(call, number):
            return None
        values = None if elements is None else elements.values()
        is_theirs = values is None or adds(call) or bool((values == number).any())
        return number if is_theirs else None

    def is_filling(self, call: Recorded) -> bool:
        """Return whether what a call wrote does not depend on what was there."""
        return not adds(call) if call.api.keeps else call.api.stem in _FILLS

    # --- by the elements -------------------------------------------------------------------------

    def reached(self, call: Recorded, current: Ref, elements: Elements) -> Elements | None:
        """Return those of the elements that a call wrote to; ``None`` where that is not known."""
        written = call.written[0]
        living = written.tensor()
        if living is None and self._lineage.same(written.tensor, current):
            living = current()
        if written.shape is not None:
            shown: Geometry = (written.shape, written.stride, written.offset)
        elif living is not None:
            shown = geometry_of(living)
        elif elements.living is None and self._lineage.same(written.tensor, current):
            shown = (elements.shape, (), 0)
        else:
            return None
        if elements.living is not None:
            places = elements.places_in(shown)
        elif self._lineage.same(written.tensor, current):
            places = list(elements.places)
        else:
            return None
        if math.prod(shown[0]) > _MAX_MARKED:
            return None
        if not call.api.keeps:
            return elements.among([place is not None for place in places])
        given = self._given(call)
        if given is None:
            return None
        marks = torch.zeros(tuple(shown[0]), dtype=torch.bool)
        try:
            _MARKS[call.api.stem](marks, given)
        except (IndexError, RuntimeError):  # its mask or indices are not what they were
            return None
        return elements.among([place is not None and bool(marks[place]) for place in places])

    def _given(self, call: Recorded) -> list[Any] | None:
        """Return what a call was given to choose with, on the host, where all of it lives on."""

        def living(value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                return type(value)(map(living, value))
            if not is_ref(value):
                return value
            tensor = value()
            if tensor is None or not self._lineage.is_untouched(value, call.seq):
                raise LookupError
            return tensor.cpu()

        try:
            return [None, *map(living, (call.given or ())[1 : call.api.value_at])]
        except LookupError:
            return None

    # --- by the values ---------------------------------------------------------------------------

    def _by_values(self, call: Recorded, elements: Elements) -> bool | None:
        """Judge a write to elements that nobody knows."""
        if elements.living is None:
            return None  # whether they were bad then is not known
        values = [item for item in value_inputs(call) if item is not call.written[0].tensor]
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
        """Return whether a living tensor has a bad value."""
        return tensor.device.type != "meta" and tensor.numel() > 0 and self._is_bad(tensor)

    def _is_good(self, call: Recorded, values: Sequence[Ref]) -> bool:
        """Return whether all values that a call wrote are proven to be good."""
        if not call.api.keeps or adds(call):
            return False
        if (number := written_number(call)) is not None:
            return not self._is_bad_number(call, number)
        dtype = self._lineage.meta_of(call.written[0].tensor)[1]
        return bool(values) and all(
            (living := item()) is not None
            and living.dtype == dtype
            and self._lineage.is_untouched(item, call.seq)
            and not self.test(living)
            for item in values
        )

    def _is_bad_number(self, call: Recorded, number: float) -> bool:
        dtype = self._lineage.meta_of(call.written[0].tensor)[1]
        return self.test(torch.tensor([number], dtype=dtype))

    # --- by their count --------------------------------------------------------------------------

    def _most_elements(self, call: Recorded) -> int | None:
        """Return an upper bound of the number of elements that a call wrote to."""
        written = call.written[0]
        shape = written.shape or self._lineage.meta_of(written.tensor)[0]
        chosen = call.given[1 : call.api.value_at] if call.given is not None else ()
        flat = [part for item in chosen for part in (item if isinstance(item, tuple) else (item,))]
        metas = [self._lineage.meta_of(item) for item in flat if is_ref(item)]
        masks = (None, torch.bool, torch.uint8)
        if not metas or shape is None or any(dtype in masks for _, dtype in metas):
            return None
        if call.api.stem.startswith("scatter_"):
            return int(math.prod(metas[0][0]))
        # Which dimensions the indices stand for is not known: at most it is the short ones.
        rest = sorted(shape)[len(metas) :]
        chosen_at = torch.broadcast_shapes(*(size for size, _ in metas))
        return int(math.prod(chosen_at) * math.prod(rest))
