"""Look at the values of a call later: the second engine over what guards require.

At the call two kernels are launched and the host does not wait: one writes the extremes of the
index into a slot (:mod:`cudalens.guards.pending`), one makes the index that the op is given, with
values that are in bounds.  A good call gets the values that it had.  Once the extremes of a tensor
are known, a call with the same tensor, unchanged, launches nothing.

Nothing of a call is kept but its lines: a finding gives the smallest and the largest value.  What
is no interval of one tensor's values is looked at at once, see :func:`is_deferred`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Bounds, Offenders, Violation
from cudalens.guards import engine
from cudalens.guards._base import ArgumentSlot, Guard, schema_parameters
from cudalens.guards._ranges import FLOATS, format_interval, unexpanded
from cudalens.guards.engine import INDEX_DTYPES, Between, Within
from cudalens.guards.host_waits import HostWaits
from cudalens.guards.past_calls import IsUsers, PastCall, running_call
from cudalens.guards.pending import PENDING, Claim, Slot
from cudalens.guards.plans import Plan

Deferrable = Within | Between
Tell = Callable[[Any, Guard, Violation, PastCall], "BaseException | None"]
_DTYPES: dict[type, Any] = {
    Within: frozenset({*INDEX_DTYPES, torch.uint8}),
    Between: FLOATS,
}
"""What is looked at without a wait: intervals, of these dtypes; an odd dtype waits."""
_MASKS = (torch.bool, torch.uint8)


def is_deferred(need: object, tensor: Tensor | None = None) -> bool:
    """Return whether a requirement is looked at without a wait: an interval, not a condition.

    Args:
        tensor: what it is about, where that is known.
    """
    if isinstance(need, Within) and (need.mask is not None or need.high < need.low):
        return False
    if tensor is None:
        return type(need) in _DTYPES
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized
    return is_strided and tensor.dtype in _DTYPES.get(type(need), ())


class KnownExtremes:
    """The slots of tensors that were looked at, by the tensor (weak), its version and its view."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[Any, int, dict[Any, Any]]] = {}

    def of(self, tensor: Tensor) -> dict[Any, Slot] | None:
        """Return the slots of a tensor; ``None`` where nothing tells that it was written to."""
        if tensor.is_inference():
            return None
        owner, view = tensor._base, None
        if owner is None:
            owner = tensor
        else:
            view = (tensor.shape, tensor.stride(), tensor.dtype)
        number, version = id(owner), tensor._version
        entry = self._owners.get(number)
        if entry is None or entry[1] != version or entry[0]() is not owner:
            gone = partial(_drop, self._owners, number)
            entry = self._owners[number] = (ref(owner, gone), version, {})
        # Where it lies: ``x.data = y`` counts no version.
        slots: dict[Any, Slot] = entry[2].setdefault((tensor.data_ptr(), view), {})
        return slots


def _drop(owners: dict[int, Any], number: int, reference: object) -> None:
    if number in owners and owners[number][0] is reference:
        del owners[number]


class LooksAtOnce(Exception):  # noqa: N818  not an error
    """The guard has to look at the call at once."""


class Made:
    """What was done for one call."""

    def __init__(self) -> None:
        self.claims: list[tuple[Slot, Claim]] = []
        self.replaced: list[tuple[ArgumentSlot, int | None, Tensor]] = []

    def withdraw(self) -> None:
        """Require nothing for a call that torch refused."""
        for slot, claim in self.claims:
            PENDING.withdraw(slot, claim)

    def put_into(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call with those that are in bounds."""
        for slot, item, value in self.replaced:
            new: Any = value
            if item is not None:
                new = [*slot.of(args, kwargs)]
                new[item] = value
            if slot.position < len(args):
                args = (*args[: slot.position], new, *args[slot.position + 1 :])
            else:
                kwargs = {**kwargs, slot.name: new}
        return args, kwargs


class DeferredOp:
    """The deferred look at the calls of one op.

    Args:
        known: the extremes of tensors that were looked at.
        tell: makes the report of a finding, and returns what is to be raised.
        waits: counts guarded calls, and knows what was written since.
        is_users: whether a file is the user's.
    """

    def __init__(
        self, op: Any, known: KnownExtremes, tell: Tell, waits: HostWaits, is_users: IsUsers
    ) -> None:
        self._op, self._known, self._tell = op, known, tell
        self._waits, self._is_users = waits, is_users
        slots = zip(schema_parameters(op), op._schema.arguments, strict=True)
        self._written = [
            slot for slot, item in slots if item.alias_info and item.alias_info.is_write
        ]

    def look(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], made: Made) -> None:
        """Have the checks of one guard noted.

        Args:
            made: takes what was noted, and what the op is to be given.

        Raises:
            LooksAtOnce: the guard has to look at once.
        """
        guard, values = plan.guard, plan.find(args, kwargs)
        need = guard.requires(*values)
        found = []
        for one in need if type(need) is list else () if need is None else (need,):
            if type(one) not in _DTYPES:
                raise LooksAtOnce
            at, item = guard.parameters.index(one.argument), getattr(one, "item", None)
            tensor = values[at] if item is None else values[at][item]
            if not is_deferred(one, tensor) or self._may_refuse(
                one, values[at], tensor, args, kwargs
            ):
                raise LooksAtOnce
            found.append((one, plan.parameters[at], item, tensor))
        for one, slot, item, tensor in found:
            safe = self._in_bounds(guard, one, tensor, values, made)
            if safe is not tensor and not guard.is_composite:
                made.replaced.append((slot, item, safe))

    def _may_refuse(
        self,
        need: Deferrable,
        argument: Any,
        tensor: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> bool:
        """Return whether torch may refuse the call for this very index, and not for a copy.

        Masks select how many elements there are; and an op that writes to its own index is refused.
        """
        has_masks = (
            isinstance(need, Within)
            and need.skip_if is not None
            and any(item is not None and item.dtype in _MASKS for item in argument)
        )
        written = [slot.of(args, kwargs) for slot in self._written]
        return has_masks or any(
            isinstance(item, Tensor) and _torch.shares_storage(item, tensor) for item in written
        )

    def _in_bounds(
        self,
        guard: Guard,
        need: Deferrable,
        tensor: Tensor,
        values: Sequence[Any],
        made: Made,
    ) -> Tensor:
        """Return a tensor in bounds: the given one where it is known to be."""
        if tensor.numel() == 0:
            return tensor
        low, high, form = _interval(need)
        slots = None if _torch.is_capturing() else self._known.of(tensor)
        slot = None if slots is None else slots.get(form)
        if slot is not None and slot.claims is None:
            if low <= slot.smallest and slot.largest <= high:
                return tensor
            raise LooksAtOnce
        distinct = unexpanded(tensor)
        claims = () if slot is None else tuple(slot.claims or ())
        if not any(item.low >= low and item.high <= high for item in claims):
            claim = self._claim(guard, need, values, low, high)
            if slot is None or not PENDING.claim(slot, claim):
                seen = _seen(need, distinct, form)
                slot = PENDING.note(
                    seen.device, seen.dtype, lambda *pair: torch.aminmax(seen, out=pair), claim
                )
            if slot is not None:
                if slots is not None:
                    slots[form] = slot
                made.claims.append((slot, claim))
        safe = engine.in_bounds(need, distinct)
        return safe if safe.shape == tensor.shape else safe.expand(tensor.shape)

    def _claim(
        self, guard: Guard, need: Deferrable, values: Sequence[Any], low: float, high: float
    ) -> Claim:
        if isinstance(need, Within):
            need.skip_if = None  # nothing that is kept may refer to a tensor
            need.asserts = need.asserts(*values) if callable(need.asserts) else need.asserts
            need.narrows = need.narrows(*values) if callable(need.narrows) else need.narrows
        thread, lines = running_call(self._is_users)
        past = partial(PastCall, lines=lines, in_backward=_torch.current_node() is not None)
        return Claim(
            low, high, partial(self._report, guard, need, past, self._waits.count()), thread
        )

    def _report(
        self,
        guard: Guard,
        need: Deferrable,
        past: Callable[..., PastCall],
        count: int,
        smallest: Any,
        largest: Any,
    ) -> BaseException | None:
        found = violation_of(need, smallest, largest, is_silent=guard.is_silent)
        if self._written and not found.is_silent and not guard.is_composite:
            names = " and ".join(slot.name for slot in self._written)
            note = f"{names} was written to with other values in place of the bad ones."
            found = replace(found, explanation=f"{found.explanation} {note}".strip())
        buffers = self._waits.written_since(count)
        ago = self._waits.count() - count
        return self._tell(self._op, guard, found, past(calls_ago=ago, buffers=buffers))


def _interval(need: Deferrable) -> tuple[float, float, Any]:
    """Return between what extremes lie, and which form of the tensor they are the extremes of."""
    if isinstance(need, Within):
        return engine.interval(need)
    return need.low, need.high, need.dtype


def _seen(need: Deferrable, tensor: Tensor, form: Any) -> Tensor:
    """Return the tensor whose extremes lie in the interval exactly where nothing is wrong."""
    if form is None:
        return tensor
    if isinstance(need, Between):
        return tensor.to(form)
    return tensor.masked_fill(tensor == form, need.low)


def violation_of(
    need: Deferrable, smallest: Any, largest: Any, *, is_silent: bool = False
) -> Violation:
    """Describe a finding of which the smallest and the largest value alone are known."""
    item = getattr(need, "item", None)
    part = "" if item is None else f"[{item}]"
    is_above = not largest <= _interval(need)[1]
    ends = [value if math.isfinite(value) else str(value) for value in (smallest, largest)]

    def found(place: str, bounds: Bounds, key: object, **fields: Any) -> Violation:
        return Violation(
            argument=need.argument,
            headline=f"{{argument}}{part} contained {ends[is_above]}, which is outside {place}",
            explanation=need.why,
            offenders=Offenders(min=ends[0], max=ends[1]),
            bounds=bounds,
            list_position=item,
            device_text=assert_text(key) if isinstance(key, str) else None,
            is_silent=is_silent,
            is_replay_safe=False,
            **fields,
        )

    if isinstance(need, Between):
        place = f"the interval {need.bounds.text}"
        return found(place, need.bounds, need.asserts, is_index=False)
    also: tuple[tuple[int, str], ...] = ()
    if need.also_allowed is not None and not need.low <= need.also_allowed <= need.high:
        also = ((need.also_allowed, need.also_allowed_name),)
    bounds = Bounds(
        min=need.low,
        max=need.high,
        also_allowed=tuple(value for value, _ in also),
        text=format_interval(need.low, need.high, also),
    )
    # A kernel that compares 32 bits alone takes a larger value for another one.
    is_known = not need.narrows or _INT32.min <= smallest <= largest <= _INT32.max
    key = need.asserts if is_known else None
    return found(need.where, bounds, key, related=need.of, size=need.size, dim=need.dim)


_INT32 = torch.iinfo(torch.int32)
