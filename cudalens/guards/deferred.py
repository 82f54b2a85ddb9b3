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
from dataclasses import dataclass, replace
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
from cudalens.guards._base import OF_USER, ArgumentSlot, Guard, schema_parameters
from cudalens.guards._ranges import FEW, FLOATS, unexpanded
from cudalens.guards.engine import INDEX_DTYPES, Between, Within
from cudalens.guards.host_waits import HostWaits
from cudalens.guards.past_calls import IsUsers, PastCall, StackLine, running_call
from cudalens.guards.pending import PENDING, Check
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
    """Checks of tensors that were looked at, by the tensor (weak), its version and its view."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[Any, int, dict[Any, Any]]] = {}

    def of(self, tensor: Tensor) -> dict[Any, Check] | None:
        """Return the checks of a tensor; ``None`` where nothing tells that it was written to."""
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
        checks: dict[Any, Check] | None = entry[2].get(place)
        if checks is None:
            if len(entry[2]) >= _MOST_REMEMBERED:
                entry[2].clear()
            checks = entry[2][place] = {}
        return checks


def _drop(owners: dict[int, Any], number: int, reference: object) -> None:
    if number in owners and owners[number][0] is reference:
        del owners[number]


@dataclass(slots=True)
class Requirement:
    """Interval that a guard requires of one tensor, in calls of one form."""

    guard: Guard
    need: Deferrable
    slot: ArgumentSlot
    item: int | None
    """Place in the list that the argument is."""
    low: float
    high: float
    exception: Any
    """What the values are changed by before they are reduced: a good value, a dtype, or nothing."""

    def tensor_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the tensor in a call."""
        argument: Any = self.slot.of(args, kwargs)
        tensor: Tensor = argument if self.item is None else argument[self.item]
        return tensor


class Made:
    """What was done for one call."""

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.replaced: list[tuple[Requirement, Tensor]] = []

    def withdraw(self) -> None:
        """Require nothing for a call that torch refused."""
        for check in self.checks:
            check.withdraw()

    def put_into(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call with those that are in bounds."""
        for required, value in self.replaced:
            args, kwargs = required.slot.put(args, kwargs, value, required.item)
        return args, kwargs


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
        self._by_form: dict[Any, tuple[list[Requirement], list[Guard]]] = {}
        self._first: tuple[int, int | None] | None = None
        """Place of the first tensor of which something is required."""
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
        except (IndexError, TypeError, RuntimeError) as failure:
            raise_if_outside(failure)
            return False  # a shorter list; no list; a tensor without memory
        required, at_once = self._by_form.get(_form(args), ((), ()))
        if at_once or not required:
            return False
        for one in required:
            tensor = args[one.slot.position]
            checks = self._known.of(tensor if one.item is None else tensor[one.item])
            check = None if checks is None else checks.get(one.exception)
            if check is None or check.is_pending or not check.implies(one.low, one.high):
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
        form = _form(args) if is_usual and not kwargs else None
        remembered = None if form is None else self._by_form.get(form)
        if remembered is None:
            remembered = self._requirements(args, kwargs)
            if form is not None:
                if len(self._by_form) >= _MOST_REMEMBERED:
                    self._by_form.clear()
                self._by_form[form] = remembered
                for one in remembered[0][:1]:
                    self._first = one.slot.position, one.item
        required, at_once = remembered
        for one in required:
            try:
                is_noted = self._note(one, args, kwargs, made, is_captured=is_captured)
            except Exception as failure:
                raise_if_outside(failure)
                self._complain(failure_line(f"deferred {one.guard.name}", failure))
                is_noted = False
            if not is_noted:
                at_once = [*at_once, one.guard]
        return at_once

    def _requirements(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Requirement], list[Guard]]:
        """Return what the guards require of a call, and those that look at it at once."""
        required: list[Requirement] = []
        at_once: list[Guard] = []
        for plan in self._plans:
            try:
                if plan.guard.frequency == OF_USER:
                    raise _NoInterval
                required += self._intervals(plan, plan.find(args, kwargs))
            except _NoInterval:
                at_once.append(plan.guard)
            except Exception as failure:
                raise_if_outside(failure)
                self._complain(failure_line(f"deferred {plan.guard.name}", failure))
                at_once.append(plan.guard)
        return required, at_once

    @staticmethod
    def _intervals(plan: Plan, values: Sequence[Any]) -> list[Requirement]:
        """Return what one guard requires.

        Raises:
            _NoInterval: that is not known without a wait, or torch may refuse the call.
        """
        need = plan.guard.requires(*values)
        required = []
        for one in need if type(need) is list else () if need is None else (need,):
            if type(one) not in _DTYPES:
                raise _NoInterval
            at, item = plan.places[one.argument], getattr(one, "item", None)
            indices = values[at]
            if not is_deferred(one, indices if item is None else indices[item]):
                raise _NoInterval
            if isinstance(one, Within):
                # Masks select how many elements there are.
                if one.skip_if is not None and any(
                    index is not None and index.dtype in _MASKS for index in indices
                ):
                    raise _NoInterval
                one.skip_if = None  # nothing that is remembered may refer to a tensor
                one.asserts = one.asserts(*values) if callable(one.asserts) else one.asserts
                one.narrows = one.narrows(*values) if callable(one.narrows) else one.narrows
            required.append(
                Requirement(plan.guard, one, plan.parameters[at], item, *_interval(one))
            )
        return required

    def _note(
        self,
        required: Requirement,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Made,
        *,
        is_captured: bool,
    ) -> bool:
        """Have the extremes of a tensor noted, and replaced what is out of bounds.

        Returns:
            ``False`` where its guard has to look at once: a value is known to be bad, or the op
            writes to its own index, which torch refuses, as it would not with a copy.
        """
        tensor, need = required.tensor_of(args, kwargs), required.need
        low, high, exception = required.low, required.high, required.exception
        checks = None if is_captured else self._known.of(tensor)
        check = None if checks is None else checks.get(exception)
        if check is not None and not check.is_pending:
            return check.implies(low, high)
        for slot in self._written:
            written = slot.of(args, kwargs)
            if isinstance(written, Tensor) and _torch.shares_storage(written, tensor):
                return False
        if not tensor.numel():
            return True
        distinct = tensor if tensor.numel() <= FEW else unexpanded(tensor)
        if check is None or not check.implies(low, high):
            thread, lines = running_call(self._is_users)
            in_backward = _torch.current_node() is not None
            report = partial(self._report, required, lines, in_backward, self._waits.count())
            check = Check(low, high, report, thread)
            PENDING.note(_seen(need, distinct, exception), check)
            made.checks.append(check)
            if checks is not None:
                checks[exception] = check
        safe = engine.in_bounds(need, distinct)
        if not required.guard.is_composite and safe is not tensor:
            safe = safe if safe.shape == tensor.shape else safe.expand(tensor.shape)
            made.replaced.append((required, safe))
        return True

    def _report(
        self,
        required: Requirement,
        lines: tuple[StackLine, ...],
        in_backward: bool,
        count: int,
        smallest: Any,
        largest: Any,
        replay: int | None = None,
    ) -> BaseException | None:
        guard = required.guard
        violation = violation_of(
            required.need, smallest, largest, replay=replay, is_silent=guard.is_silent
        )
        if self._written and not violation.is_silent and not guard.is_composite:
            names = " and ".join(slot.name for slot in self._written)
            note = f"{names} was written to, with other values instead of the bad ones."
            violation = replace(violation, explanation=f"{violation.explanation} {note}".strip())
        past = PastCall(
            lines=lines,
            in_backward=in_backward,
            calls_ago=self._waits.count() - count,
            buffers=self._waits.written_since(count),
        )
        return self._tell(self._op, guard, violation, past)


class _NoInterval(Exception):  # noqa: N818  no error
    """Raised where a guard has to look at once."""


def _form(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return all that guards require something by: shapes, kinds and numbers, and no value.

    ``None`` where that cannot be remembered.
    """
    try:
        return (torch.are_deterministic_algorithms_enabled(), *map(_form_of, args))
    except (TypeError, RuntimeError) as failure:
        raise_if_outside(failure)
        return None  # an argument that is no key; a nested tensor


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
    need: Deferrable,
    smallest: Any,
    largest: Any,
    *,
    replay: int | None = None,
    is_silent: bool = False,
) -> Violation:
    """Describe a finding of which the smallest and the largest value alone are known.

    Args:
        replay: of the CUDA graph whose check failed.
    """
    dtype = torch.int64 if isinstance(need, Within) else torch.float64
    ends = torch.tensor([smallest, largest], dtype=dtype)
    violation = engine.violation(need, ends, is_silent=is_silent)
    low, high = [value if math.isfinite(value) else str(value) for value in (smallest, largest)]
    item = "" if violation.list_position is None else f"[{violation.list_position}]"
    place = need.where if isinstance(need, Within) else f"the interval {need.bounds.text}"
    value = low if largest <= _interval(need)[1] else high
    # A kernel that compares 32 bits alone takes a larger value for another one.
    is_wide = not _INT32.min <= smallest <= largest <= _INT32.max
    is_narrowed = is_wide and getattr(need, "narrows", False)
    captured = "" if replay is None else f"It was in replay {replay} of a CUDA graph."
    return replace(
        violation,
        headline=f"{{argument}}{item} contained {value}, which is outside {place}",
        element="",
        explanation=f"{need.why} {captured}".strip(),
        offenders=Offenders(min=low, max=high),
        device_text=None if is_narrowed else violation.device_text,
        is_replay_safe=False,
    )


_INT32 = torch.iinfo(torch.int32)
