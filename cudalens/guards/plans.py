"""Where guards find their arguments in a call, and their requirements, cached by call form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from cudalens.core._python import MoreStack, raise_if_outside
from cudalens.core._torch import is_deterministic
from cudalens.guards import GUARDS
from cudalens.guards._base import (
    OF_USER,
    ArgumentSlot,
    Check,
    Guard,
    full_name,
    schema_parameters,
)
from cudalens.guards._ranges import FLOATS
from cudalens.guards.engine import (
    INDEX_DTYPES,
    MASK_DTYPES,
    Between,
    Within,
    fulfils,
    interval,
    replacer,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A guard of one overload, and the positions of its arguments in a call."""

    guard: Guard
    check: Check
    parameters: tuple[ArgumentSlot, ...]
    pick: Callable[[tuple[Any, ...]], Sequence[Any]]
    """Returns the arguments if all of them are positional."""
    last: int
    """The position of the last argument."""
    places: dict[str, int]
    """The index of each argument in ``parameters``, by name."""

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return the arguments of any call."""
        return [item.of(args, kwargs) for item in self.parameters]


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardedOp:
    """The guards of one overload as its kernel needs them, cached for the process."""

    op: Any
    name: str
    """The dispatcher's name."""
    entries: tuple[Guard, ...]
    plans: tuple[Plan, ...]
    plan_of: dict[Guard, Plan]
    covers: bool
    """True if the ops that it calls need no guards of their own."""
    may_read: bool
    """True if it may sync with the device itself, below our kernels."""
    routes: dict[str, tuple[Callable[..., Any], Any]]
    """By dispatch key: the function that redispatches below it, and the remaining key set."""


_made: dict[Any, GuardedOp] = {}


def guarded_op(op: Any) -> GuardedOp:
    """Return the guards of an overload with their plans."""
    entries = GUARDS[op]
    known = _made.get(op)
    # Each change of an op's guards makes a new tuple.
    if known is None or known.entries is not entries:
        for gone in _made.keys() - GUARDS.keys():  # ops of a library that was removed
            del _made[gone]
        known = _made[op] = _guarded_op(op, entries)
    return known


def guarded_ops() -> list[GuardedOp]:
    """Return every overload that has guards.

    Runs when a cell is opened, so it calls functions only for new entries.
    """
    found = []
    for op, entries in GUARDS.items():
        known = _made.get(op)
        is_known = known is not None and known.entries is entries
        found.append(known if known is not None and is_known else guarded_op(op))
    return found


def _guarded_op(op: Any, entries: tuple[Guard, ...]) -> GuardedOp:
    parameters = {item.name: item for item in schema_parameters(op)}
    plans = []
    for entry in entries:
        slots = tuple(parameters[name] for name in entry.parameters)
        places = [item.position for item in slots]
        # itemgetter returns a tuple for several positions, but the bare value for one.
        alone = slice(places[0], places[0] + 1) if places else slice(0, 0)
        plans.append(
            Plan(
                guard=entry,
                check=entry.check,
                parameters=slots,
                pick=itemgetter(*places) if len(places) > 1 else itemgetter(alone),
                last=max(places, default=0),
                places={item.name: place for place, item in enumerate(slots)},
            )
        )
    return GuardedOp(
        op=op,
        name=full_name(op),
        entries=entries,
        plans=tuple(plans),
        plan_of={plan.guard: plan for plan in plans},
        covers=any(entry.covers_inner for entry in entries),
        may_read=any(entry.waits for entry in entries),
        routes={},
    )


# --- what calls must fulfil -----------------------------------------------------------------------


PLAIN: Final = frozenset({int, float, bool, str, type(None)})
"""Types of arguments that are their own cache key."""
_DTYPES: dict[type, Any] = {Within: frozenset({*INDEX_DTYPES, torch.uint8}), Between: FLOATS}
"""The dtypes that deferred guards check without a wait; for others they check immediately."""
_MOST_FORMS = 256
"""How many call forms are cached for each op: batches may have any number of shapes."""


@dataclass(slots=True)
class Requirement:
    """The interval that a guard requires of one tensor, in calls of one form."""

    guard: Guard
    need: Within | Between
    slot: ArgumentSlot
    item: int | None
    """The tensor's position, if the argument is a list."""
    low: float
    high: float
    exception: Any
    """A good value that counts as in bounds, or a dtype that the values are converted to."""
    in_bounds: Callable[[Tensor], Tensor] | None
    """Returns the tensor with what is out of bounds replaced; ``None`` if a look cannot wait."""

    def tensor_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the tensor in a call."""
        argument: Any = self.slot.of(args, kwargs)
        tensor: Tensor = argument if self.item is None else argument[self.item]
        return tensor


@dataclass(slots=True)
class Required:
    """Requirements of an op's guards on calls of one form."""

    intervals: list[tuple[int, int | None, Within | Between]] | None
    """Places and intervals of tensors; ``None`` where the guards have to be asked at each call."""
    deferred: list[Requirement]
    """Requirements that deferred guards check without a wait."""
    at_once: list[Guard]
    """The guards that always check immediately: their condition is not an interval."""

    # The hot path of every guarded call, so written for speed.
    def are_good(self, args: tuple[Any, ...]) -> bool:
        """Read the values of a call; return whether all are good and no guard must be asked."""
        if self.intervals is None:
            return False
        try:
            for place, item, need in self.intervals:
                tensor = args[place]
                if not fulfils(need, tensor if item is None else tensor[item]):
                    return False
            return True
        except Exception as failure:  # the guards look again, with more room
            with MoreStack():
                raise_if_outside(failure)
            return False


class Forms:
    """Cache of an op's requirements by call form.

    A requirement depends on shapes, dtypes, Python numbers and the dispatch keys.  They make up the
    form, so calls of one form differ only in tensor values.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._plans = plans
        self._by_form: dict[Any, Required] = {}

    # The hot path of every guarded call, so written for speed.
    def of(self, keys: int, args: tuple[Any, ...]) -> Required | None:
        """Return the requirements of a call; ``None`` for one that has no form.

        Args:
            keys: the dispatch keys of the call, which identify layouts and device types.
        """
        try:
            # Deterministic algorithms write by other kernels, which assert other conditions.
            parts: list[Any] = [keys, is_deterministic()]
            for value in args:
                kind = type(value)
                if kind is Tensor or kind is Parameter:
                    parts += value.shape, value.dtype
                elif kind in PLAIN:
                    parts.append(value)
                elif kind is list:
                    for item in value:
                        kind = type(item)
                        if kind is Tensor or kind is Parameter:
                            parts += item.shape, item.dtype
                        elif kind in PLAIN:
                            parts.append(item)
                        else:
                            return None
                    # The length tells the last item from the argument behind the list.
                    parts.append(len(value))
                else:
                    return None
            form = tuple(parts)
            required = self._by_form.get(form)
            if required is None:
                required = required_of(self._plans, args, {})
                if len(self._by_form) >= _MOST_FORMS:
                    self._by_form.clear()
                self._by_form[form] = required
            return required
        except Exception as failure:  # the guards look again, with more room
            with MoreStack():
                raise_if_outside(failure)
            return None


def required_of(plans: Sequence[Plan], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Required:
    """Return what the guards require of a call; the result keeps no tensor alive."""
    intervals: list[tuple[int, int | None, Within | Between]] | None = []
    deferred: list[Requirement] = []
    at_once: list[Guard] = []
    for plan in plans:
        try:
            items = _requirements(plan, plan.find(args, kwargs))
        except RecursionError:  # do not cache: the next call may have more stack
            raise
        except Exception as failure:  # reported when the guard itself runs
            with MoreStack():
                raise_if_outside(failure)
            items = None
        if items is None:
            intervals = None
            at_once.append(plan.guard)
            continue
        tensors = [item.tensor_of(args, kwargs) for item in items]
        if len(items) > 1 and not all(tensor.is_cpu for tensor in tensors):
            intervals = None  # on a device, several tensors share one copy
        if intervals is not None:
            intervals += [(item.slot.position, item.item, item.need) for item in items]
        if all(item.in_bounds is not None for item in items):
            deferred += items
        else:
            at_once.append(plan.guard)
    # No requirement may also mean that torch rejects the call: ask the guards then.
    return Required(intervals or None, deferred, at_once)


def _requirements(plan: Plan, values: Sequence[Any]) -> list[Requirement] | None:
    """Return the intervals that a guard requires, ``None`` if it requires anything else."""
    if plan.guard.frequency == OF_USER:
        return None
    needs: Any = plan.guard.requires(*values)
    items = []
    for need in needs if type(needs) is list else () if needs is None else (needs,):
        if type(need) not in _DTYPES or getattr(need, "mask", None) is not None:
            return None
        at, item = plan.places[need.argument], getattr(need, "item", None)
        value = values[at]
        tensor = value if item is None else value[item]
        can_wait = is_deferred(need, tensor)
        if isinstance(need, Within):
            # A boolean mask among the indices makes the size of the result depend on values.
            if need.skip_if is not None:
                can_wait &= not any(i is not None and i.dtype in MASK_DTYPES for i in value)
            # Resolve the late functions now: cached, they would keep tensors alive.
            need.skip_if = None
            need.asserts = need.asserts(*values) if callable(need.asserts) else need.asserts
            need.narrows = need.narrows(*values) if callable(need.narrows) else need.narrows
        in_bounds = replacer(need, tensor.dtype) if can_wait else None
        items.append(
            Requirement(plan.guard, need, plan.parameters[at], item, *interval(need), in_bounds)
        )
    return items


def is_deferred(need: object, tensor: Tensor | None = None) -> bool:
    """Return whether a requirement can be checked without a wait: an interval, not a condition.

    Args:
        tensor: the tensor, if known.
    """
    if isinstance(need, Within) and (need.mask is not None or need.high < need.low):
        return False
    if tensor is None:
        return type(need) in _DTYPES
    return tensor.layout is torch.strided and tensor.dtype in _DTYPES.get(type(need), ())
