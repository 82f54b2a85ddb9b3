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
from torch.nn import Parameter

from cudalens.core import _torch
from cudalens.core._python import raise_if_outside
from cudalens.core.limits import failure_line
from cudalens.core.report_types import Offenders, Violation
from cudalens.guards import engine
from cudalens.guards._base import ArgumentSlot, Guard, schema_parameters
from cudalens.guards._ranges import FEW, FLOATS, unexpanded
from cudalens.guards.engine import INDEX_DTYPES, Between, Within
from cudalens.guards.host_waits import HostWaits
from cudalens.guards.past_calls import IsUsers, PastCall, StackLine, running_call
from cudalens.guards.pending import PENDING, Claim, Slot
from cudalens.guards.plans import PLAIN, Plan, plans_of

Deferrable = Within | Between
Tell = Callable[[Any, Guard, Violation, PastCall], "BaseException | None"]
_DTYPES: dict[type, Any] = {
    Within: frozenset({*INDEX_DTYPES, torch.uint8}),
    Between: FLOATS,
}
"""What is looked at without a wait: intervals, of these dtypes; an odd dtype waits."""
_MASKS = (torch.bool, torch.uint8)
_MOST_REMEMBERED = 256
"""Views of one tensor, or forms of a call: a dataset may be cut into any number of batches."""


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
        try:
            version = tensor._version
        except RuntimeError:  # an inference tensor has none
            return None
        owner, view = tensor._base, None
        if owner is None:
            owner = tensor
        else:
            view = (tensor.shape, tensor.stride(), tensor.dtype)
        number = id(owner)
        entry = self._owners.get(number)
        if entry is None or entry[1] != version or entry[0]() is not owner:
            gone = partial(_drop, self._owners, number)
            entry = self._owners[number] = (ref(owner, gone), version, {})
        # Where it lies: ``x.data = y`` counts no version.
        place = (tensor.data_ptr(), view)
        slots: dict[Any, Slot] | None = entry[2].get(place)
        if slots is None:
            if len(entry[2]) >= _MOST_REMEMBERED:
                entry[2].clear()
            slots = entry[2][place] = {}
        return slots


def _drop(owners: dict[int, Any], number: int, reference: object) -> None:
    if number in owners and owners[number][0] is reference:
        del owners[number]


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


_Bounds = tuple[int, "int | None", float, float, Any]
"""Where a call has a tensor, its place in a list, its bounds, and the form that they are of."""


class DeferredOp:
    """The deferred look at the calls of one op.

    Args:
        known: the extremes of tensors that were looked at.
        tell: makes the report of a finding, and returns what is to be raised.
        complain: told, in one line, when a guard failed; it looks at once then.
        waits: counts guarded calls, and knows what was written since.
        is_users: whether a file is the user's.
    """

    def __init__(
        self,
        op: Any,
        known: KnownExtremes,
        tell: Tell,
        complain: Callable[[str], None],
        waits: HostWaits,
        is_users: IsUsers,
    ) -> None:
        self._op, self._known, self._tell, self._complain = op, known, tell, complain
        self._waits, self._is_users = waits, is_users
        self._plans = plans_of(op)
        self._bounds: dict[Any, list[_Bounds]] = {}
        """What calls of each form require, where all of it was known to be true."""
        self._first: tuple[int, int | None] | None = None
        """The place of the first tensor that they require something of."""
        slots = zip(schema_parameters(op), op._schema.arguments, strict=True)
        self._written = [
            slot for slot, item in slots if item.alias_info and item.alias_info.is_write
        ]

    # Every call of a guarded op passes here, so speed comes before form.
    def is_known(self, args: tuple[Any, ...]) -> bool:
        """Return whether all that is required of a call's values is known to be true."""
        if self._first is None:
            return False
        position, item = self._first
        try:
            index = args[position] if item is None else args[position][item]
            # Mostly a tensor is new, or all of it is known.
            if type(index) is not Tensor or not self._known.of(index):
                return False
            bounds = self._bounds.get(_form(args))
        except (IndexError, TypeError, RuntimeError) as failure:
            raise_if_outside(failure)
            return False  # a shorter list; an argument that is no key; a tensor without memory
        if bounds is None:
            return False
        for position, item, low, high, form in bounds:
            tensor = args[position] if item is None else args[position][item]
            slots = self._known.of(tensor)
            slot = None if slots is None else slots.get(form)
            if slot is None or slot.claims is not None:
                return False
            if not (low <= slot.smallest and slot.largest <= high):
                return False
        return True

    def look(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Made,
        *,
        is_usual: bool,
        is_captured: bool,
    ) -> list[Guard]:
        """Have the checks of a call noted; return the guards that have to look at once.

        Args:
            made: takes what is done for the call.
            is_usual: whether the call has no subclass of a tensor, and nobody watches.
            is_captured: whether a CUDA graph is being captured, which will run with other values.
        """
        soon: list[Guard] = []
        bounds: list[_Bounds] = []
        for plan in self._plans:
            try:
                is_noted = not plan.guard.waits and self._look(
                    plan, args, kwargs, bounds, made, is_captured=is_captured
                )
            except Exception as failure:
                raise_if_outside(failure)
                self._complain(failure_line(f"deferred {plan.guard.name}", failure))
                is_noted = False
            if not is_noted:
                soon.append(plan.guard)
        # A guard that requires nothing may have seen that torch will refuse the call.
        if bounds and not soon and not made.claims and is_usual and not kwargs:
            if len(self._bounds) >= _MOST_REMEMBERED:
                self._bounds.clear()
            self._bounds[_form(args)] = bounds
            self._first = bounds[0][:2]
        return soon

    def _look(
        self,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        bounds: list[_Bounds],
        made: Made,
        *,
        is_captured: bool,
    ) -> bool:
        """Have the checks of one guard noted; return ``False`` where it has to look at once.

        That is where something is known to be bad, or is no interval.
        """
        is_whole = not kwargs and plan.last < len(args)
        values = plan.pick(args) if is_whole else plan.find(args, kwargs)
        need = plan.guard.requires(*values)
        needs: Sequence[Any] = need if type(need) is list else () if need is None else (need,)
        unknown: list[tuple[Deferrable, ArgumentSlot, Tensor, dict[Any, Slot] | None]] = []
        for one in needs:
            if type(one) not in _DTYPES:
                return False
            at, item = plan.places[one.argument], getattr(one, "item", None)
            tensor = values[at] if item is None else values[at][item]
            low, high, form = _interval(one)
            slots = None if is_captured else self._known.of(tensor)
            slot = None if slots is None else slots.get(form)
            if slot is None or slot.claims is not None:
                if self._looks_at_once(one, plan.parameters[at], tensor, args, kwargs):
                    return False
                unknown.append((one, plan.parameters[at], tensor, slots))
            elif not (low <= slot.smallest and slot.largest <= high):
                return False
            bounds.append((plan.parameters[at].position, item, low, high, form))
        for one, place, tensor, slots in unknown:
            if tensor.numel():
                safe = self._note(plan.guard, one, tensor, slots, values, made)
                if not plan.guard.is_composite and safe is not tensor:
                    made.replaced.append((place, getattr(one, "item", None), safe))
        return True

    def _looks_at_once(
        self,
        need: Deferrable,
        place: ArgumentSlot,
        tensor: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> bool:
        """Return whether a call cannot wait: its kind, or torch may refuse it.

        Masks select how many elements there are; and an op that writes to its own index is refused,
        where it would not be with a copy.
        """
        if not is_deferred(need, tensor):
            return True
        if getattr(need, "skip_if", None) is not None:
            indices = place.of(args, kwargs)
            if any(item is not None and item.dtype in _MASKS for item in indices):
                return True
        for slot in self._written:
            written = slot.of(args, kwargs)
            if isinstance(written, Tensor) and _torch.shares_storage(written, tensor):
                return True
        return False

    def _note(
        self,
        guard: Guard,
        need: Deferrable,
        tensor: Tensor,
        slots: dict[Any, Slot] | None,
        values: Sequence[Any],
        made: Made,
    ) -> Tensor:
        """Have the extremes of a tensor noted, and return one in bounds."""
        low, high, form = _interval(need)
        slot = None if slots is None else slots.get(form)
        distinct = tensor if tensor.numel() <= FEW else unexpanded(tensor)
        claims = () if slot is None else slot.claims or ()
        if not any(item.low >= low and item.high <= high for item in claims):
            if isinstance(need, Within):
                need.skip_if = None  # nothing that is kept may refer to a tensor
                need.asserts = need.asserts(*values) if callable(need.asserts) else need.asserts
                need.narrows = need.narrows(*values) if callable(need.narrows) else need.narrows
            thread, lines = running_call(self._is_users)
            in_backward = _torch.current_node() is not None
            report = partial(self._report, guard, need, lines, in_backward, self._waits.count())
            claim = Claim(low, high, report, thread)
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

    def _report(
        self,
        guard: Guard,
        need: Deferrable,
        lines: tuple[StackLine, ...],
        in_backward: bool,
        count: int,
        smallest: Any,
        largest: Any,
    ) -> BaseException | None:
        found = violation_of(need, smallest, largest, is_silent=guard.is_silent)
        if self._written and not found.is_silent and not guard.is_composite:
            names = " and ".join(slot.name for slot in self._written)
            note = f"{names} was written to, with other values instead of the bad ones."
            found = replace(found, explanation=f"{found.explanation} {note}".strip())
        past = PastCall(
            lines=lines,
            in_backward=in_backward,
            calls_ago=self._waits.count() - count,
            buffers=self._waits.written_since(count),
        )
        return self._tell(self._op, guard, found, past)


def _form(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return all that guards require something by: shapes, kinds and numbers, and no value."""
    return (torch.are_deterministic_algorithms_enabled(), *map(_form_of, args))


def _form_of(value: Any) -> Any:
    kind = type(value)
    if kind is Tensor or kind is Parameter:
        return value.shape, value.dtype, value.layout, value.device
    if kind is list:
        return tuple(map(_form_of, value))
    if kind not in PLAIN:
        raise TypeError(kind)
    return value


def _interval(need: Deferrable) -> tuple[float, float, Any]:
    """Return between what extremes lie, and which form of the tensor they are the extremes of."""
    if isinstance(need, Within):
        is_plain = need.also_allowed is None and not need.upper_bound_only
        return (need.low, need.high, None) if is_plain else engine.interval(need)
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
    dtype = torch.int64 if isinstance(need, Within) else torch.float64
    ends = torch.tensor([smallest, largest], dtype=dtype)
    found = engine.violation(need, ends, is_silent=is_silent)
    low, high = [value if math.isfinite(value) else str(value) for value in (smallest, largest)]
    item = "" if found.list_position is None else f"[{found.list_position}]"
    place = need.where if isinstance(need, Within) else f"the interval {need.bounds.text}"
    value = low if largest <= _interval(need)[1] else high
    # A kernel that compares 32 bits alone takes a larger value for another one.
    is_wide = not _INT32.min <= smallest <= largest <= _INT32.max
    is_narrowed = is_wide and getattr(need, "narrows", False)
    return replace(
        found,
        headline=f"{{argument}}{item} contained {value}, which is outside {place}",
        element="",
        explanation=need.why,
        offenders=Offenders(min=low, max=high),
        device_text=None if is_narrowed else found.device_text,
        is_replay_safe=False,
    )


_INT32 = torch.iinfo(torch.int32)
