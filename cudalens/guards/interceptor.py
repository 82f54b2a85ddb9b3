"""Register the guards with torch's dispatcher, and remove them.

A kernel is registered for the ``BackendSelect`` key of each guarded overload: below autograd and
autocast, above the device's kernel.  It sees forward, backward, in-place and ``out=`` calls from
every thread, looks at the values, and passes the call on unchanged.  Ops without a guard pay
nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from cudalens.core import _compiler, _torch
from cudalens.core._python import MoreStack, Uninterrupted, raise_if_outside
from cudalens.core.call import OpCall
from cudalens.core.errors import DeviceIndexError, DeviceValueError
from cudalens.core.limits import Limits
from cudalens.core.report_types import Violation
from cudalens.guards._base import OF_USER, Guard, schema_parameters
from cudalens.guards.compiled import CompiledGuards
from cudalens.guards.deferred import (
    CheckedTensors,
    DeferredOp,
    Noted,
    PastCalls,
    remembering_draws,
)
from cudalens.guards.host_waits import HostWaits
from cudalens.guards.past_calls import IsUsers, PastCall
from cudalens.guards.pending import PENDING
from cudalens.guards.plans import (
    Forms,
    GuardedOp,
    Plan,
    Required,
    guarded_ops,
    required_of,
)
from cudalens.guards.refused_calls import is_refused

OnViolation = Callable[[OpCall, Violation], BaseException | None]
OnPastViolation = Callable[[Violation, PastCall], BaseException | None]
"""Makes the report of a finding in a past call, and returns the exception to raise."""
OnInternalError = Callable[[str], None]


class _Inside(threading.local):
    """``busy`` is true while this thread is inside a guard."""

    busy = False


class Interceptor:
    """The guards' kernels in the dispatcher: :meth:`install` adds, :meth:`uninstall` removes them.

    Args:
        on_violation: called with each finding; returns the exception to raise instead of the call.
        on_internal_error: called with one line when a guard itself fails; the call goes on.
        devices: device types to act on, instead of the accelerators.
        on_past_violation: called with each finding of a deferred guard.
        is_users: returns whether a file is the user's; the lines of a finding start there.
        on_failed_call: called with what a guarded call raised, or one that settles deferred guards,
            and with its arguments.
    """

    def __init__(
        self,
        on_violation: OnViolation,
        on_internal_error: OnInternalError,
        *,
        devices: Iterable[str] | None = None,
        on_past_violation: OnPastViolation | None = None,
        is_users: IsUsers = lambda file: False,
        on_failed_call: Callable[[BaseException, Any], None] = lambda error, arguments: None,
    ) -> None:
        self._on_failed_call = on_failed_call
        self._on_violation = on_violation
        self._on_past_violation: Any = on_past_violation
        self._checked = CheckedTensors()
        self._on_internal_error = on_internal_error
        self._devices = frozenset(devices) if devices is not None else _torch.ACCELERATORS
        self._bits = _torch.backend_bits(self._devices)
        self._libraries: list[Any] = []
        self._covered: set[Any] = set()
        self._inside = _Inside()
        self._trace_again: Callable[[], None] = lambda: None
        self.checked_ops = 0
        self.is_deferred = self._in_compiled = False
        self._leave_later: list[Callable[[], None]] = []
        """Functions that remove what only deferred guards need."""
        self._waits = HostWaits(
            self._settle_here,
            self._devices,
            lambda: self.checked_ops,
            on_failed_call,
        )
        self.past = PastCalls(self._report_past, self._waits, is_users, self._complain)
        self._compiled = CompiledGuards(self.past, self._devices)
        self._acts_on = _acting(self)
        self._deferred_ops: dict[Any, DeferredOp] = {}
        """The deferred checks of each op, made at its first deferred call."""

    def install(self) -> None:
        """Register a kernel for each guarded overload that has none yet."""
        self.set_deferred(is_deferred=self.is_deferred, in_compiled=self._in_compiled)
        fresh = [item for item in guarded_ops() if item.op not in self._covered]
        if not fresh:
            return
        if not self._covered:
            self._trace_again = _compiler.leave_out_own_frames()
            # Outside the dispatch modes, where it reads host lengths.
            kernels = {"aten::ctc_loss.Tensor": _ctc_loss}
            self._libraries.extend(_torch.register_kernels(kernels, "AutogradCUDA"))
        for key in (_torch.BACKEND_SELECT, *_torch.autograd_keys(self._devices)):
            is_above = key != _torch.BACKEND_SELECT
            kernels = {
                item.name: self._kernel(item, key)
                for item in fresh
                if item.entries[0].is_composite or not is_above
            }
            self._libraries.extend(_torch.register_kernels(kernels, key))
        self._covered.update([item.op for item in fresh])

    def uninstall(self) -> None:
        """Remove every registration, if there are any."""
        self._look_later(is_wanted=False)
        while self._libraries:
            _torch.destroy([self._libraries.pop()])
        self._covered.clear()
        self._trace_again()
        PENDING.clear()

    def _kernel(self, one: GuardedOp, key: str) -> Callable[..., Any]:
        """Return the guard kernel of an op.

        Each check makes one for every op, and most are never called.  So what only bad or deferred
        calls need is made on demand.
        """
        if key not in one.routes:
            one.routes[key] = _torch.redispatcher(one.op, key)
        go_on, below = one.routes[key]
        if one.name == "aten::multinomial":
            go_on = remembering_draws(go_on, self._checked, lambda: self.is_deferred)
        inside, covers, acts_on = self._inside, one.covers, self._acts_on
        ask = partial(self._ask, one.op, one.plans)
        ask_without_modes = partial(_torch.without_modes, partial(ask, are_plain=False))
        later = partial(self._look_deferred, one)
        later_unseen = partial(_torch.unseen_without_wait, later)
        required_by, bits = Forms(one.plans).of, self._bits
        can_read, unseen = _torch.can_read_unseen, _torch.Unseen
        failed = self._on_failed_call
        of_keys: dict[int, tuple[Any, bool]] = {}

        # The hot path of every guarded call, so written for speed.
        def guarded(keyset: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: PLR0912
            __tracebackhide__ = True
            violation: BaseException | None = None
            noted: Noted | None = None
            try:
                keys = keyset.raw_repr()
                facts = of_keys.get(keys)
                if facts is None:
                    facts = of_keys[keys] = keyset & below, bool(keys & bits)
                rest, is_concerned = facts
                if not is_concerned or inside.busy:
                    return go_on(rest, *args, **kwargs)
                inside.busy = True
                try:
                    with unseen():
                        required = None
                        # The cache of forms knows only calls whose arguments are all positional.
                        if not kwargs and can_read():
                            required = required_by(keys, args)
                        acts = required is not None or acts_on(args, kwargs)
                        self.checked_ops += acts
                        if not acts:
                            pass
                        elif self.is_deferred:
                            look = later_unseen if required is None else later
                            noted = look(args, kwargs, required)
                            if noted is not None:
                                args, kwargs, violation = noted.args, noted.kwargs, noted.error
                        elif required is None or not required.are_good(args):
                            violation = (ask_without_modes if required is None else ask)(
                                args, kwargs
                            )
                        if violation is not None:
                            raise violation
                    # Ops that this one calls with the same values are not checked once more.
                    inside.busy = acts and covers
                    return go_on(rest, *args, **kwargs)
                finally:
                    inside.busy = False
            except BaseException as error:
                if violation is None and not inside.busy:  # else the outer guarded call reports it
                    failed(error, (args, kwargs))
                    if noted is not None:
                        noted.withdraw()
                # TorchScript puts the traceback's frames into the text of its own error, and ours
                # must not be among them.  A bare raise does not add this frame again.
                if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                    error.__traceback__ = None
                args, kwargs, violation, noted = (), {}, None, None  # a traceback keeps this frame
                raise

        return guarded

    # --- looking later ----------------------------------------------------------------------------

    def _look_deferred(
        self,
        one: GuardedOp,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        required: Required | None,
    ) -> Noted | None:
        """Queue the checks of a call; ``error`` of the result is the exception to raise."""
        is_captured = required is None and _torch.is_capturing()
        if required is None:
            required = required_of(one.plans, args, kwargs)
        deferred = self._deferred_ops.get(one.op)
        if deferred is None:
            deferred = self._deferred_ops[one.op] = DeferredOp(one.op, self._checked, self.past)
        noted = deferred.look(required, args, kwargs, is_captured=is_captured)
        if is_captured:
            return noted
        error = None
        at_once = () if noted is None else noted.at_once
        for guard in at_once:
            with _torch.own_wait():
                error = error or self._ask(one.op, (one.plan_of[guard],), args, kwargs)
        # ``host[key] = number`` copies the number to the host inside the call, too late to raise.
        is_there = "cpu" not in self._devices and bool(args) and isinstance(args[0], Tensor)
        is_read = bool(at_once) or one.may_read or (is_there and args[0].is_cpu)
        if (is_read and PENDING) or (PENDING.findings and PENDING.has_finding()):
            # Findings of earlier calls come before one of this call.
            error = self._raised(PENDING.settle(threading.get_ident()), error)
        if error is not None:
            noted = noted or Noted(args, kwargs, [])
            noted.error = error
        return noted

    def set_deferred(self, is_deferred: bool, in_compiled: bool = False) -> None:
        """Switch deferred checking on or off; pending checks stay.

        Args:
            in_compiled: check inside compiled code too, which is always deferred.
        """
        self.is_deferred, self._in_compiled = is_deferred, in_compiled
        self._look_later(is_wanted=is_deferred or in_compiled)

    def _look_later(self, *, is_wanted: bool) -> None:
        with Uninterrupted():
            if is_wanted and not self._leave_later:
                for part in (self._waits, self._compiled):
                    self._leave_later.append(part.install())
            if not is_wanted:
                self._stop_looking_later()

    def _stop_looking_later(self) -> None:
        # A function of its own, because where a `while` inside a `with` jumps back, Python 3.13 may
        # raise ^C without the block's end.
        while self._leave_later:
            self._leave_later.pop()()

    def settle(
        self, thread: int | None = None, others: Collection[int] = ()
    ) -> BaseException | None:
        """Wait for the pending checks; return the exception to raise.

        Args:
            thread: leave findings of other running threads to those threads.
            others: threads whose findings are raised here all the same.
        """
        if not PENDING:
            return None
        inside = self._inside
        # To read the slots is a copy to the host, which would settle once more.
        was_busy, inside.busy = inside.busy, True
        try:
            with _torch.own_wait():
                if _torch.has_modes():
                    return self._raised(_torch.unseen_without_wait(PENDING.settle, thread, others))
                return self._raised(PENDING.settle(thread, others))
        finally:
            inside.busy = was_busy

    def _settle_here(self, others: Collection[int] = ()) -> BaseException | None:
        # While a CUDA graph is captured, a read of the slots would end the capture.
        if self._inside.busy or _torch.is_capturing():
            return None
        return self.settle(threading.get_ident(), others)

    def _raised(
        self, past: Sequence[BaseException], now: BaseException | None = None
    ) -> BaseException | None:
        """Return the first finding, with the others as notes.

        Args:
            past: the findings in earlier calls.
            now: the finding in the running call.
        """
        if past:
            self._waits.note_finding(past[0])
        first, *others = [*past, now] if now is not None or not past else past
        for other in others:
            assert first is not None
            first.add_note(f"Also found: {str(other).splitlines()[0]}")
        return first

    def _report_past(
        self, op: Any, guard: Guard, violation: Violation, past: PastCall
    ) -> BaseException | None:
        def report() -> object:
            return self._on_past_violation(self._completed(op, guard, violation), past)

        return self._answer(Limits(), violation, report)

    # --- looking at once --------------------------------------------------------------------------

    def _ask(
        self,
        op: Any,
        plans: Sequence[Plan],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        are_plain: bool = True,
    ) -> BaseException | None:
        """Run the guards of a call; return the exception to raise instead of it.

        Args:
            are_plain: ``False`` if a tensor may be of a subclass.
        """
        for plan in plans:
            try:
                is_whole = plan.last < len(args) and not kwargs
                values = plan.pick(args) if is_whole else plan.find(args, kwargs)
                if not are_plain and plan.guard.frequency != OF_USER:
                    values = [*map(_without_subclass, values)]  # a subclass may override them
                try:
                    violation: object = plan.check(*values)
                except Exception as failure:
                    violation = _look_again(plan, values, failure)
                if violation is None:
                    continue
                if not isinstance(violation, Violation):
                    msg = f"it gave {type(violation).__name__}"
                    raise TypeError(msg)
            except Exception as failure:  # a guard that fails must never stop a good call
                raise_if_outside(failure)
                if isinstance(failure, RecursionError) and plan.guard.frequency != OF_USER:
                    raise  # the stack is full: nothing was checked, so nothing is launched
                kind = type(failure).__name__
                self._complain(f"guard {plan.guard.name} failed: {kind}: {failure}")
                continue
            with MoreStack():
                error = self._handle(op, plan.guard, violation, args, kwargs)
            if error is not None:
                return error
        return None

    def _handle(
        self,
        op: Any,
        guard: Guard,
        violation: Violation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> BaseException | None:
        """Report a finding; return the exception to raise instead of the call.

        The value is bad, so the op is not launched even if the report fails.
        """
        limits = Limits()
        if limits.attempt("refusal", lambda: is_refused(op, args, kwargs), bool):
            return None

        def report() -> object:
            call = OpCall(
                op=op,
                arguments={item.name: item.of(args, kwargs) for item in schema_parameters(op)},
                args=args,
                kwargs=kwargs,
            )
            return self._on_violation(call, self._completed(op, guard, violation))

        return self._answer(limits, violation, report)

    @staticmethod
    def _completed(op: Any, guard: Guard, violation: Violation) -> Violation:
        """Return a finding with the names of its guard and its op."""
        return replace(
            violation,
            guard=guard.name,
            op=str(op._schema.name),
            overload=str(op._overloadname),
        )

    def _answer(
        self, limits: Limits, violation: Violation, report: Callable[[], object]
    ) -> BaseException | None:
        """Return the exception to raise; it has no report if none could be made."""

        def reported() -> BaseException | None:
            with Uninterrupted(), _torch.plain_torch():
                error = report()
            if isinstance(error, BaseException) or (error is None and violation.is_silent):
                return error
            msg = f"it gave {type(error).__name__}"
            raise TypeError(msg)

        error = limits.attempt("report", reported)
        for line in limits.lines:
            self._complain(line)
        if error is not None or violation.is_silent:
            return error
        return (DeviceIndexError if violation.is_index else DeviceValueError)(violation.sentence())

    def _complain(self, line: str) -> None:
        with suppress(Exception):  # a failing listener must not stop the call
            self._on_internal_error(line)


def _look_again(plan: Plan, values: Sequence[Any], failure: Exception) -> object:
    """Retry a guard that failed, with a deeper stack and plain tensors.

    The stack may have been full, or a property of a user's subclass may have raised.
    """
    with MoreStack():
        raise_if_outside(failure)
        if plan.guard.frequency == OF_USER and not isinstance(failure, RecursionError):
            raise failure
        return plan.check(*map(_without_subclass, values))


def _without_subclass(value: Any) -> Any:
    """Return a tensor as a plain ``Tensor``, without overridden attributes."""
    kind = type(value)
    if kind is list or kind is tuple:
        return [_without_subclass(item) for item in value]
    is_own = kind is Tensor or kind is Parameter or not issubclass(kind, Tensor)
    return value if is_own else Tensor.as_subclass(value, Tensor)


def _acting(guards: Interceptor) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    """Return the predicate that decides from the arguments whether a call is checked."""
    devices = guards._devices
    is_plain, is_capturing = _torch.is_plain, _torch.is_capturing
    on_host = "cpu" in devices

    def acts_on(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        with _torch.Unseen():
            return concerns(args, kwargs)

    def concerns(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        acts = False
        for value in (*args, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                # `is_cpu` first: `device.type` builds a new string each time.
                acts = acts or (on_host if value.is_cpu else value.device.type in devices)
            elif kind is list or kind is tuple or isinstance(value, Tensor):
                for item in value if kind is list or kind is tuple else (value,):
                    if isinstance(item, Tensor):
                        # Its class unwraps it and calls the op once more with the tensors inside.
                        if not is_plain(item):
                            return False
                        acts = acts or _torch.device_type(item) in devices
        return acts and (
            not is_capturing()
            or (guards.is_deferred and guards.past.can_check(_torch.current_device()))
        )

    return acts_on


# --- ops that look at the dispatch modes ----------------------------------------------------------


def _ctc_loss(
    keyset: Any,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *rest: Any,
    **options: Any,
) -> Any:
    return torch.ops.aten.ctc_loss.IntList(
        log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), *rest, **options
    )
