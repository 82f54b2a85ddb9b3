"""Check the values of a call later: the second engine over what guards require.

At the call two kernels are launched, and the host does not wait.  One writes the extremes of the
index into a slot (:mod:`cudalens.guards.pending`).  The other makes the index that the op gets,
with all values clamped into the bounds, so a good call gets its own values.  Once the extremes of a
tensor are known, a call with the same, unchanged tensor launches nothing.

Only the source lines of a call are kept, so a finding names the smallest and the largest value.  A
requirement that is no interval for one tensor is checked immediately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core._python import raise_if_outside
from cudalens.core.limits import failure_line
from cudalens.core.report_types import Offenders, Violation
from cudalens.guards import engine
from cudalens.guards._base import ArgumentSlot, Guard, schema_parameters
from cudalens.guards._ranges import FEW, unexpanded
from cudalens.guards.engine import Between, Within
from cudalens.guards.host_waits import HostWaits
from cudalens.guards.max_norm import RENORM, required_by_lookup
from cudalens.guards.past_calls import IsUsers, PastCall, running_call, traced_line
from cudalens.guards.pending import PENDING, Check
from cudalens.guards.plans import Required, Requirement

ReportViolation = Callable[[Any, Guard, Violation, PastCall], "BaseException | None"]
NO_ROOM = (
    "calls in a CUDA graph are not guarded: no guarded call came before, or its room is used up"
)
_MOST_VIEWS = 256
"""How many views of one tensor are remembered: a dataset may have any number of batches."""


class CheckedTensors:
    """Cache of checks by tensor (weakly referenced), version counter and view."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[Any, int, dict[Any, Any]]] = {}

    def of(self, tensor: Tensor) -> dict[Any, Check] | None:
        """Return the checks of a tensor; ``None`` if writes to it cannot be noticed."""
        try:
            version, address = tensor._version, tensor.data_ptr()
        except RuntimeError as failure:  # no version counter (inference mode), or no storage
            raise_if_outside(failure)
            return None
        # All views of a tensor share its version counter, so one entry serves them all.
        owner, view = tensor._base, None
        if owner is None:
            owner = tensor
        else:
            view = (tensor.shape, tensor.stride(), tensor.dtype)
        number = id(owner)
        entry = self._owners.get(number)
        # The `id` may have been that of a tensor that is freed by now.
        if entry is None or entry[1] != version or entry[0]() is not owner:
            gone = partial(_drop, self._owners, number)
            entry = self._owners[number] = (ref(owner, gone), version, {})
        # With the address, because ``x.data = y`` does not bump the version counter.
        place = (address, view)
        checks: dict[Any, Check] | None = entry[2].get(place)
        if checks is None:
            if len(entry[2]) >= _MOST_VIEWS:
                entry[2].clear()
            checks = entry[2][place] = {}
            # `view(dtype)` shows the same bytes as other numbers.
            if view is not None and tensor.dtype is owner.dtype:
                whole = entry[2].get((owner.data_ptr(), None))
                if whole and _torch.shares_storage(tensor, owner):
                    checks.update(whole)  # bounds of the base hold for its views
        return checks


def _drop(owners: dict[int, Any], number: int, reference: object) -> None:
    # A new tensor may have the number by now, and its entry must stay.
    if number in owners and owners[number][0] is reference:
        del owners[number]


@dataclass(slots=True)
class Noted:
    """The checks queued for one call, and its clamped arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """With all values in bounds."""
    at_once: list[Guard]
    """The guards that must check immediately."""
    checks: list[Check] = field(default_factory=list)
    error: BaseException | None = None
    """Error to raise."""

    def withdraw(self) -> None:
        """Cancel the checks of a call that torch rejected."""
        for check in self.checks:
            # The check cannot leave its page, where each slot on the device belongs to a position.
            check.low, check.high, check.report = -math.inf, math.inf, _nothing


def remembering_draws(
    go_on: Callable[..., Any], checked: CheckedTensors, is_deferred: Callable[[], bool]
) -> Callable[..., Any]:
    """Return a multinomial that remembers its result as in bounds.

    Sampled token ids usually go into an embedding next, which then needs no check.
    """

    def draw(keyset: Any, weights: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = go_on(keyset, weights, *args, **kwargs)
        # Each replay of a captured graph draws new values without a new version.
        is_kept = is_deferred() and type(result) is Tensor and not _torch.is_capturing()
        checks = checked.of(result) if is_kept else None
        if checks is not None:
            last = weights.size(-1) - 1
            checks[None] = Check(0, last, _nothing, is_pending=False, smallest=0, largest=last)
        return result

    return draw


def _nothing(*ends: object) -> None:
    """Report nothing."""


class PastCalls:
    """Create pending checks; report those that fail.

    Args:
        report_violation: makes the report of a finding; returns the exception to raise.
        waits: counts guarded calls, and knows which running statistics were written since.
        is_users: returns whether a file is the user's.
        complain: called with one line about what is not checked.
    """

    def __init__(
        self,
        report_violation: ReportViolation,
        waits: HostWaits,
        is_users: IsUsers,
        complain: Callable[[str], None],
    ) -> None:
        self._report_violation, self._waits, self._is_users = report_violation, waits, is_users
        self.complain = complain

    def can_check(self, device: torch.device) -> bool:
        """Return whether checks can be made: inside a graph capture, slots may have run out."""
        if not (can_note := PENDING.can_note(device)):
            self.complain(NO_ROOM)
        return can_note

    def check(
        self,
        op: Any,
        guard: Guard,
        need: Within | Between,
        *,
        in_backward: bool,
        traced: Sequence[tuple[str, int, str]] = (),
        first: Requirement | None = None,
    ) -> Check:
        """Return a check of the running call.

        Args:
            first: for a lookup with ``max_norm``, what the renormalizing op requires.  It runs
                first: it writes to the table, and its assertion fires before the lookup's.
            traced: the user's lines that led to the call when it was compiled.
        """
        thread, running = running_call(self._is_users)
        count, is_captured = self._waits.count(), _torch.is_capturing()
        # The first argument of a lookup is the table.
        written = written_by(op) if first is None else schema_parameters(op)[:1]
        names = " and ".join(slot.name for slot in written)

        def report(smallest: Any, largest: Any) -> BaseException | None:
            violation, found_by = _violation_of(need, smallest, largest, guard.is_silent), guard
            if first is not None and not first.low <= smallest <= largest <= first.high:
                found_by = first.guard
                own = _violation_of(first.need, smallest, largest, found_by.is_silent)
                violation = replace(violation, device_text=own.device_text)
            if names and not guard.is_silent:
                note = f"{names} was written to, with other values instead of the bad ones."
                violation = replace(violation, explanation=f"{need.why} {note}".strip())
            lines = tuple(traced_line(*line) for line in traced)
            call = PastCall(
                lines=running if in_backward else (*running, *lines),
                in_backward=in_backward,
                forward=lines if in_backward else (),
                calls_ago=None if is_captured else self._waits.count() - count,
                buffers=self._waits.written_since(count),
            )
            return self._report_violation(op, found_by, violation, call)

        low, high, _ = engine.interval(need)
        return Check(low, high, report, thread)


class DeferredOp:
    """Deferred checks for the calls of one op.

    Args:
        checked: the cache of checks.
        past: makes the checks, and prints a line about a guard that failed.
    """

    def __init__(self, op: Any, checked: CheckedTensors, past: PastCalls) -> None:
        self._op, self._checked, self._past = op, checked, past
        self._written = written_by(op)
        self._is_in_lookups = op._schema.name == RENORM

    # The hot path of every guarded call, so written for speed.
    def look(
        self,
        required: Required,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_captured: bool,
    ) -> Noted | None:
        """Queue the checks of a call; return ``None`` if all requirements are known to hold.

        Args:
            is_captured: whether a CUDA graph is being captured: its replays have other values.
        """
        noted = Noted(args, kwargs, required.at_once) if required.at_once else None
        for one in required.deferred:
            try:
                tensor = one.tensor_of(args, kwargs)
                checks = None if is_captured else self._checked.of(tensor)
                check = None if checks is None else checks.get(one.exception)
                if check is not None and not check.is_pending and check.implies(one.low, one.high):
                    continue
                noted = noted or Noted(args, kwargs, [])
                is_noted = self._note(one, tensor, checks, noted)
            except Exception as failure:
                raise_if_outside(failure)
                self._past.complain(failure_line(f"deferred {one.guard.name}", failure))
                noted, is_noted = noted or Noted(args, kwargs, []), False
            if not is_noted:
                noted.at_once = [*noted.at_once, one.guard]
        return noted

    def _note(
        self,
        required: Requirement,
        tensor: Tensor,
        checks: dict[Any, Check] | None,
        noted: Noted,
    ) -> bool:
        """Queue the check of a tensor, and pass the op a clamped copy.

        Args:
            checks: the cached checks of the tensor, ``None`` if it has no cache.

        Returns:
            ``False`` if the op writes to its own index.  torch rejects that, and would accept a
            clamped copy, so such a call is checked immediately.
        """
        args, kwargs = noted.args, noted.kwargs
        for slot in self._written:
            written = slot.of(args, kwargs)
            if isinstance(written, Tensor) and _torch.shares_storage(written, tensor):
                return False
        if not tensor.numel():
            return True
        # Of a large expanded index, only the distinct elements are reduced.
        distinct = tensor if tensor.numel() <= FEW else unexpanded(tensor)
        op, first = self._op, None
        lookup = required_by_lookup(required) if self._is_in_lookups else None
        if lookup is not None:
            first, (op, required) = required, lookup
        check = None if checks is None else checks.get(required.exception)
        if check is None or not check.implies(required.low, required.high):
            in_backward = _torch.current_node() is not None
            check = self._past.check(
                op, required.guard, required.need, in_backward=in_backward, first=first
            )
            reduced = distinct
            # Reduce what the kernel compares: converted values, without `ignore_index`.
            if isinstance(required.exception, torch.dtype):
                reduced = distinct.to(required.exception)
            elif required.exception is not None:
                reduced = distinct.masked_fill(distinct == required.exception, required.low)
            PENDING.note(reduced, check)
            noted.checks.append(check)
            if checks is not None:
                checks[required.exception] = check
        assert required.in_bounds is not None
        safe = required.in_bounds(distinct)
        if not required.guard.is_composite and safe is not tensor:
            safe = safe if safe.shape == tensor.shape else safe.expand(tensor.shape)
            noted.args, noted.kwargs = required.slot.put(args, kwargs, safe, required.item)
        return True


def written_by(op: Any) -> list[ArgumentSlot]:
    """Return the arguments that an op writes to."""
    slots = zip(schema_parameters(op), op._schema.arguments, strict=True)
    return [slot for slot, item in slots if item.alias_info and item.alias_info.is_write]


def _violation_of(
    need: Within | Between, smallest: Any, largest: Any, is_silent: bool
) -> Violation:
    """Describe a finding from the smallest and the largest value."""
    dtype = torch.int64 if isinstance(need, Within) else torch.float64
    # The checked tensor is gone, so its two extremes stand in for it.
    ends = torch.tensor([smallest, largest], dtype=dtype)
    violation = engine.violation(need, ends, is_silent=is_silent)
    low, high = [value if math.isfinite(value) else str(value) for value in (smallest, largest)]
    item = "" if violation.list_position is None else f"[{violation.list_position}]"
    place = need.where if isinstance(need, Within) else f"the interval {need.bounds.text}"
    value = low if largest <= need.high else high
    # A kernel that compares only 32 bits truncates a larger value, and may not assert on it.
    limit = torch.iinfo(torch.int32)
    is_wide = not limit.min <= smallest <= largest <= limit.max
    is_narrowed = is_wide and getattr(need, "narrows", False)
    return replace(
        violation,
        headline=f"{{argument}}{item} contained {value}, which is outside {place}",
        element=f"{{argument}}{item} contained {value}",
        explanation=need.why,
        offenders=Offenders(min=low, max=high),
        device_text=None if is_narrowed else violation.device_text,
        is_replay_safe=False,
    )
