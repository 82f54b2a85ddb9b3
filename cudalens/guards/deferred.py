"""Look at the values of a call later: the second engine over what guards require.

At the call two kernels are launched and the host does not wait: one writes the extremes of the
index into a slot (:mod:`cudalens.guards.pending`), one makes the index that the op is given, with
values that are in bounds.  A good call gets the values that it had.  When the extremes have come
back and are bad, the guard looks at the kept tensor as it looks at once.

What waits as before, see :func:`is_deferred`: conditions that are no interval of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cudalens.guards._base import Guard, schema_parameters
from cudalens.guards._ranges import FLOATS, unexpanded
from cudalens.guards.engine import INDEX_DTYPES, Between, Within, in_bounds, interval
from cudalens.guards.past_calls import PendingCall, Tell, is_strided, items_of
from cudalens.guards.pending import PENDING, Check

Deferrable = Within | Between
_DTYPES: dict[type, frozenset[torch.dtype] | tuple[torch.dtype, ...]] = {
    Within: frozenset({*INDEX_DTYPES, torch.uint8}),
    Between: FLOATS,
}
"""What is looked at without a wait: intervals, of these dtypes; an odd dtype waits."""


# --- which requirements need no wait, and with what a call goes on --------------------------------


def is_deferred(need: object, tensor: Tensor | None = None) -> bool:
    """Return whether a requirement is looked at without a wait: an interval, not a condition.

    Args:
        tensor: what it is about, where that is known.
    """
    if isinstance(need, Within) and (
        (need.masks_first and need.mask is not None) or need.high < need.low
    ):
        return False
    dtypes = _DTYPES.get(type(need), ())
    return bool(dtypes) and (tensor is None or tensor.dtype in dtypes)


def look_later(
    need: Deferrable, tensor: Tensor, note: Callable[[Tensor, float, float], None]
) -> Tensor:
    """Have the extremes noted, and return the tensor that the op is to be given.

    Args:
        note: notes the extremes of a tensor, and between which numbers they must lie.
    """
    if tensor.numel() == 0:
        return tensor
    distinct = unexpanded(tensor)
    if isinstance(need, Between):
        note(distinct, need.low, need.high)
        return _spread(in_bounds(need, distinct), tensor)
    low, high, marked = interval(need)
    seen = distinct
    if marked is not None and need.masks_first:
        seen = distinct.masked_fill(distinct == marked, need.low)
    note(seen, low, high)
    return _spread(in_bounds(need, distinct), tensor)


def _spread(distinct: Tensor, tensor: Tensor) -> Tensor:
    return distinct if distinct.shape == tensor.shape else distinct.expand(tensor.shape)


class LaterLook:
    """One call of a guarded op, looked at without a wait by one guard after the other.

    Args:
        given: every argument by its name in the schema.
        tell: reports what is found.
    """

    def __init__(self, op: Any, given: dict[str, Any], tell: Tell) -> None:
        self.replaced: dict[str, Any] = {}
        """What the op is to be given in place of some arguments."""
        self.checks: list[Check] = []
        self._op, self._given, self._tell = op, given, tell
        self._call: PendingCall | None = None

    def takes(self, guard: Guard) -> bool:
        """Look later for one guard; return ``False`` where it has to be asked at once."""
        asked = [self._given[name] for name in guard.parameters]
        need = guard.requires(*asked)
        if need is None:
            return True
        if not all(is_strided(item) for item in asked if isinstance(item, Tensor)):
            return False  # nothing could stand in for it later
        needs = need if isinstance(need, list) else [need]
        if not all(is_deferred(item) and is_deferred(item, self._tensor(item)) for item in needs):
            return False
        for item in needs:
            self._look(guard, item)
        return True

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments with those that are replaced."""
        if not self.replaced:
            return args, kwargs
        listed, named = list(args), dict(kwargs)
        for slot in schema_parameters(self._op):
            if slot.name in self.replaced:
                if slot.position < len(listed):
                    listed[slot.position] = self.replaced[slot.name]
                else:
                    named[slot.name] = self.replaced[slot.name]
        return tuple(listed), named

    def drop(self) -> None:
        """Forget the checks of a call that torch refused."""
        for check in self.checks:
            check.tell = None

    def _tensor(self, need: Deferrable) -> Tensor:
        value, item = self._given[need.argument], getattr(need, "item", None)
        tensor: Tensor = value if item is None else value[item]
        return tensor

    def _look(self, guard: Guard, need: Deferrable) -> None:
        name, item, tensor = need.argument, getattr(need, "item", None), self._tensor(need)
        is_replaced = not guard.is_composite

        def note(seen: Tensor, low: float, high: float) -> None:
            call = self._call
            if call is None:
                call = self._call = PendingCall(self._op, self._given, self._tell)
            deciding = [tensor, *self._beside(guard, need)]
            held = sum(map(call.hold, deciding))
            found = partial(call.found, guard, is_replaced, [call.kept(one) for one in deciding])
            check = Check(low, high, found, held)
            PENDING.note(
                seen.device, seen.dtype, lambda *pair: torch.aminmax(seen, out=pair), check
            )
            self.checks.append(check)

        safe = look_later(need, tensor, note)
        if not is_replaced or safe is tensor:
            return
        if item is None:
            self.replaced[name] = safe
        else:
            listed = list(self.replaced.get(name, self._given[name]))
            listed[item] = safe
            self.replaced[name] = listed

    def _beside(self, guard: Guard, need: Deferrable) -> list[Tensor]:
        """Return the tensors whose values decide too whether an element is read."""
        names: Sequence[str] = ()
        if isinstance(need, Within) and need.mask is not None:
            names = guard.parameters
        elif isinstance(need, Within) and need.skip_if is not None:
            names = (need.argument,)
        found = (item for name in names for item in items_of(self._given[name]))
        return [item for item in found if isinstance(item, Tensor) and not item.is_floating_point()]
