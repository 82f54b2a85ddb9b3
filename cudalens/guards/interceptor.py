"""Put the guards into the dispatcher, and take them out again.

A kernel is registered for the ``BackendSelect`` key of each guarded overload: below autograd and
autocast, above the device's kernel.  It sees forward, backward, in-place and ``out=`` calls from
every thread, looks at the values, and passes the call on unchanged.  Ops without a guard pay
nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from cudalens.core import _torch
from cudalens.core._python import Uninterrupted, raise_if_outside
from cudalens.core.deterministic_ops import kernel_without_determinism
from cudalens.core.device_asserts import as_printed_by
from cudalens.core.errors import DeviceIndexError, DeviceValueError
from cudalens.core.limits import Limits
from cudalens.core.report_types import Violation
from cudalens.guards import GUARDS
from cudalens.guards._base import (
    ArgumentSlot,
    Check,
    Guard,
    full_name,
    schema_parameters,
)


@dataclass(frozen=True, kw_only=True)
class GuardedCall:
    """A call that a guard looked at, while it is being made; it must not be kept."""

    op: Any
    guard: Guard
    arguments: Mapping[str, Any]
    """Every schema argument by name, live tensors included."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


OnViolation = Callable[[GuardedCall, Violation], BaseException | None]
OnInternalError = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """A guard of one overload, and where in a call its arguments are."""

    guard: Guard
    check: Check
    parameters: tuple[ArgumentSlot, ...]
    positions: tuple[int, ...]
    last: int

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments that the guard looks at."""
        if not kwargs and self.last < len(args):
            return [args[position] for position in self.positions]
        return [item.of(args, kwargs) for item in self.parameters]


class _Inside(threading.local):
    """Whether this thread is already inside a guard."""

    busy = False


class Interceptor:
    """Guards in the dispatcher: :meth:`install` puts them in, :meth:`uninstall` takes them out.

    Args:
        on_violation: told of each finding; what it returns is raised in place of the call.
        on_internal_error: told, in one line, when a guard itself failed; the call goes on.
        devices: device types to act on, instead of the accelerators.
    """

    def __init__(
        self,
        on_violation: OnViolation,
        on_internal_error: OnInternalError,
        *,
        devices: Iterable[str] | None = None,
    ) -> None:
        self._on_violation = on_violation
        self._on_internal_error = on_internal_error
        self._devices = frozenset(devices) if devices is not None else _torch.ACCELERATORS
        self._libraries: list[Any] = []
        self._covered: set[Any] = set()
        self._inside = _Inside()
        self.checked_ops = 0

    @property
    def is_installed(self) -> bool:
        """Return whether anything is registered in the dispatcher."""
        return bool(self._libraries)

    def install(self) -> None:
        """Register a kernel for each guarded overload that has none yet; does nothing twice."""
        fresh = {op: entries for op, entries in GUARDS.items() if op not in self._covered}
        if not fresh:
            return
        if not self._covered:
            self._libraries.extend(install_ctc_loss())
        for key in (_torch.BACKEND_SELECT, *_torch.autograd_keys(self._devices)):
            is_above = key != _torch.BACKEND_SELECT
            kernels = {
                full_name(op): self._kernel(op, key)
                for op, entries in fresh.items()
                if entries[0].is_composite or not is_above
            }
            self._libraries.extend(_torch.register_kernels(kernels, key))
        self._covered.update(fresh)

    def uninstall(self) -> None:
        """Remove every registration; does nothing when there is none."""
        while self._libraries:
            _torch.destroy([self._libraries.pop()])
        self._covered.clear()

    def _kernel(self, op: Any, key: str) -> Callable[..., Any]:
        covers_inner = any(entry.covers_inner for entry in GUARDS[op])
        go_on, below = _torch.redispatcher(op, key)
        look = self._looker(op)
        inside = self._inside
        acts_on = _acting(self._devices)

        # Every call of a guarded op passes here, so speed comes before form.
        def guarded(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if inside.busy or not acts_on(args, kwargs):
                return go_on(keyset & below, *args, **kwargs)
            error = look(args, kwargs)
            if error is not None:
                try:
                    raise error
                finally:
                    # The traceback keeps this frame: it must keep neither itself nor tensors.
                    del error, args, kwargs
            if not covers_inner:
                return go_on(keyset & below, *args, **kwargs)
            inside.busy = True
            try:
                return go_on(keyset & below, *args, **kwargs)
            finally:
                inside.busy = False

        return guarded

    def _looker(self, op: Any) -> Callable[..., BaseException | None]:
        plans = _plans(op)
        inside = self._inside
        ask = self._ask_all
        # Looked up once: between two calls the step throws everything out of the caches.
        unseen, below_autograd = _torch.NoTorchFunction, _torch.BelowAutograd
        is_unseen, has_modes = _torch.is_unseen, _torch.has_dispatch_modes

        def look(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BaseException | None:
            inside.busy = True
            try:
                self.checked_ops += 1
                if is_unseen():
                    return ask(op, plans, args, kwargs)
                with unseen(), below_autograd():
                    # The modes of an ordinary call have all had their turn before it came here.
                    if not has_modes():
                        return ask(op, plans, args, kwargs)
                    with Uninterrupted(), _torch.no_dispatch_modes():
                        return ask(op, plans, args, kwargs)
            finally:
                inside.busy = False

        return look

    def _ask_all(
        self, op: Any, plans: tuple[_Plan, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BaseException | None:
        for plan in plans:
            try:
                found: object = plan.check(*plan.values(args, kwargs))
                if found is None:
                    continue
                if not isinstance(found, Violation):
                    msg = f"it gave {type(found).__name__}"
                    raise TypeError(msg)
            except Exception as failure:  # a guard that fails must never stop a good call
                raise_if_outside(failure)
                kind = type(failure).__name__
                self._complain(f"guard {plan.guard.name} failed: {kind}: {failure}")
                continue
            error = self._handle(op, plan.guard, found, args, kwargs)
            if error is not None:
                return error
        return None

    def _handle(
        self, op: Any, guard: Guard, found: Violation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BaseException | None:
        """Have a finding reported, and return what is to be raised in place of the call.

        The value is known to be bad: whatever fails from here on, the op is not launched.
        """
        limits = Limits()
        if limits.attempt("refusal", lambda: is_refused(op, args, kwargs), bool):
            return None
        error = limits.attempt("report", lambda: self._report(op, guard, found, args, kwargs))
        for line in limits.lines:
            self._complain(line)
        if error is not None or found.is_silent:
            return error
        return (DeviceIndexError if found.is_index else DeviceValueError)(found.sentence())

    def _report(
        self, op: Any, guard: Guard, found: Violation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BaseException | None:
        text = found.device_text
        found = replace(
            found,
            guard=guard.name,
            op=str(op._schema.name),
            overload=str(op._overloadname),
            device_text=text if text is None else as_printed_by(torch.__version__, text),
        )
        call = GuardedCall(
            op=op,
            guard=guard,
            arguments={item.name: item.of(args, kwargs) for item in schema_parameters(op)},
            args=args,
            kwargs=kwargs,
        )
        with Uninterrupted(), _torch.plain_torch():
            error: object = self._on_violation(call, found)
        if isinstance(error, BaseException) or (error is None and found.is_silent):
            return error
        msg = f"it gave {type(error).__name__}"
        raise TypeError(msg)

    def _complain(self, line: str) -> None:
        with suppress(Exception):  # who listens must not stop a call either
            self._on_internal_error(line)


def _acting(devices: frozenset[str]) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    """Return the predicate that decides from a call's arguments whether the guards look at it."""
    is_plain, is_capturing = _torch.is_plain, _torch.is_capturing

    def acts_on(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        acts = False
        for value in (*args, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                acts = acts or value.device.type in devices
            elif kind is list or kind is tuple or isinstance(value, Tensor):
                for item in value if kind is list or kind is tuple else (value,):
                    if isinstance(item, Tensor):
                        if not is_plain(item):
                            return False
                        acts = acts or item.device.type in devices
        return acts and not is_capturing()

    return acts_on


def _plans(op: Any) -> tuple[_Plan, ...]:
    parameters = {item.name: item for item in schema_parameters(op)}
    plans = []
    for entry in GUARDS[op]:
        asked = tuple(parameters[name] for name in entry.parameters)
        positions = tuple(item.position for item in asked)
        plans.append(
            _Plan(
                guard=entry,
                check=entry.check,
                parameters=asked,
                positions=positions,
                last=max(positions, default=0),
            )
        )
    return tuple(plans)


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


def install_ctc_loss() -> list[Any]:
    """Run ctc_loss outside dispatch modes, where it reads host lengths.

    Returns:
        the libraries to destroy.
    """
    return _torch.register_kernels({"aten::ctc_loss.Tensor": _ctc_loss}, "AutogradCUDA")


# --- calls that torch refuses before any launch ---------------------------------------------------


def is_refused(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether torch refuses a call on the host, whatever its values are.

    Asked only of a call in which a guard has found something.
    """
    given = {item.name: item.of(args, kwargs) for item in schema_parameters(op)}
    devices = _devices(op, given)
    return (
        len(devices) > 1
        or (_forbids_nondeterminism(devices) and _has_no_deterministic_kernel(op, given))
        or (op._schema.name == "aten::masked_scatter_" and _outgrows_self(given))
    )


def _devices(op: Any, given: dict[str, Any]) -> set[torch.device]:
    """Return the devices of the tensors that must be together.

    A number in a tensor without dimensions may stay on the CPU, and so may the indices of
    ``x[index]`` and the targets and lengths of a CTC loss.
    """
    found: set[torch.device] = set()
    for value in given.values():
        is_list = isinstance(value, (list, tuple))
        for tensor in value if is_list else (value,):
            if isinstance(tensor, Tensor):
                is_host = tensor.device.type == "cpu"
                if not (is_host and (is_list or not tensor.dim() or "ctc" in op._schema.name)):
                    found.add(tensor.device)
    return found


def _forbids_nondeterminism(devices: set[torch.device]) -> bool:
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
        and {device.type for device in devices} == {"cuda"}
    )


def _has_no_deterministic_kernel(op: Any, given: dict[str, Any]) -> bool:
    return kernel_without_determinism(full_name(op), given) is not None


def _outgrows_self(given: dict[str, Any]) -> bool:
    """Return whether a mask would need a larger tensor than the one that is written in place."""
    self, mask = given["self"], given["mask"]
    return bool(torch.broadcast_shapes(self.shape, mask.shape) != self.shape)
