"""Where deferred guards are waited for: values reach the host, a parameter, a file, another rank.

In these places the host waits anyway, or a result of a bad call would leave.  What is pending is
looked at first, and a finding is raised before anything is read, written or sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cudalens.core import _torch
from cudalens.core._python import Frameless, Uninterrupted
from cudalens.guards.pending import PENDING

_READS = (
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
)
"""``item``, ``bool``, ``float`` and what is made of them; and where values become a shape."""
_COPY = "aten::_to_copy"
"""``cpu``, ``tolist``, ``to``."""
_COPIES = "aten::_foreach_copy_"

_ALWAYS = ("c10d::", "_c10d_functional::", "aten::_amp_foreach_non_finite_check_and_unscale_")
"""What is sent; and the first that a gradient scaler does in a step.  Were a finding raised behind
it, the scaler would take the gradients of the next step for unscaled ones."""
_NOTHING_SENT = ("barrier", "recv", "wait_tensor", "monitored")


def _set_item(target: Tensor, key: Any, value: Any) -> None:
    target[key] = value


_WRITING = (
    (Tensor, "copy_", torch.ops.aten.copy_.default),
    (Tensor, "__setitem__", _set_item),
    (torch.UntypedStorage, "copy_", None),
)
"""How Python copies into what is there (``torch.save`` copies storages), and what stands for it
where the compiler traces a call of it as a function.

``aten::copy_`` itself is inside too many ops for a kernel of ours.
"""

Settle = Callable[[], BaseException | None]
_Leaves = Callable[[tuple[Any, ...], dict[str, Any]], bool]


class HostWaits:
    """Kernels and a hook that settle what is pending before they go on.

    Args:
        settle: waits, and returns what is to be raised.
        devices: the device types that guards act on.
        is_ours: whether this thread is running a guard, which may read.
    """

    def __init__(
        self, settle: Settle, devices: frozenset[str], is_ours: Callable[[], bool]
    ) -> None:
        self._settle = settle
        self._devices = devices
        self._is_ours = is_ours
        self._undo: list[Callable[[], object]] = []

    def install(self) -> None:
        """Put everything in; does nothing twice."""
        if self._undo:
            return
        with Uninterrupted():
            leaving = self._leaving()
            kernels = {name: self._kernel(name, leaves) for name, leaves in leaving.items()}
            with warnings.catch_warnings():
                # Torch's own kernel only adds the key of the target, for which the op is the same.
                warnings.filterwarnings("ignore", message="Warning only once for all operators")
                self._undo.append(partial(_torch.destroy, _torch.register_kernels(kernels)))
            hook = register_optimizer_step_pre_hook(Frameless(lambda *_: self.wait()))
            self._undo.append(hook.remove)
            for method in _WRITING:
                self._watch(*method)

    def _leaving(self) -> dict[str, _Leaves]:
        """Return the ops that may send values to the host, each with what says whether it does."""
        leaving: dict[str, _Leaves] = {
            **dict.fromkeys(_READS, self._is_read),
            _COPY: self._is_copied,
            _COPIES: self._are_copied,
        }
        for name in _torch.all_op_names():
            if name.startswith(_ALWAYS) and not any(word in name for word in _NOTHING_SENT):
                leaving[name] = lambda args, kwargs: True
        return leaving

    def remove(self) -> None:
        """Take everything out; does nothing twice."""
        with Uninterrupted():
            for _ in range(len(self._undo)):
                self._undo.pop()()

    def wait(self) -> None:
        """Raise what is found among the checks that are pending."""
        if PENDING and not self._is_ours() and not _torch.is_capturing():
            error = self._settle()
            if error is not None:
                try:
                    raise error
                finally:
                    del error

    def _watch(self, kind: Any, name: str, traced: Callable[..., Any] | None) -> None:
        """Wait where a method copies from a device to the host."""
        original, devices = getattr(kind, name), self._devices

        def copying(target: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() and traced is not None:
                return traced(target, *args, **kwargs)
            given = (*args, *kwargs.values())
            if _are_read(target.device, given, devices) and not _is_late(args[1:], kwargs):
                self.wait()
            return original(target, *args, **kwargs)

        ours, before = Frameless(copying), vars(kind).get(name)

        def restore() -> None:
            if vars(kind).get(name) is not ours:
                return  # somebody wraps it
            if before is None:
                delattr(kind, name)  # the inherited one is there again
            else:
                setattr(kind, name, before)

        self._undo.append(restore)
        setattr(kind, name, ours)

    def _kernel(self, name: str, leaves: _Leaves) -> Callable[..., Any]:
        go_on, below = _torch.redispatcher(_torch.op_of(name))
        is_copy = name == _COPY

        def waiting(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if is_copy and not isinstance(args[0], Tensor):
                args = (_torch.as_tensor(args[0]),)
            if leaves(args, kwargs):
                self.wait()
            return go_on(keyset & below, *args, **kwargs)

        return Frameless(waiting)

    def _is_read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return args[0].device.type in self._devices

    def _is_copied(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        target = kwargs.get("device")
        is_read = target is not None and _are_read(target, args[:1], self._devices)
        return is_read and not _is_late((), kwargs)

    def _are_copied(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        pairs = zip(args[0], args[1], strict=False)
        is_read = any(_are_read(to.device, (source,), self._devices) for to, source in pairs)
        return is_read and not _is_late(args[2:], kwargs)


def _are_read(target: torch.device, given: Iterable[Any], devices: frozenset[str]) -> bool:
    """Return whether what is given lies on a device, and is copied to a target on the host."""
    return _torch.is_host(target) and any(
        isinstance(item, (Tensor, torch.UntypedStorage))
        and item.device.type in devices
        and not _torch.is_host(item.device)
        for item in given
    )


def _is_late(options: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a copy does not wait: its user does later, at no place that could be seen."""
    return bool(kwargs.get("non_blocking")) or any(item is True for item in options)


def refuse_in_capture() -> None:
    """Refuse to wait while a CUDA graph is captured.

    Raises:
        RuntimeError: the current stream is being captured.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        msg = "cudalens.settle() cannot wait while a CUDA graph is captured: call it after a replay"
        raise RuntimeError(msg)
