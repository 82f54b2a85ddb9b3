"""Private and version-dependent torch names of the recorder, each with the reason for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import nn
from torch._C import _current_autograd_node, _current_graph_task_id
from torch._C._autograd import _get_sequence_nr
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from cudalens.core._torch import wait_for

# Called once per recorded op: the functions themselves, without a wrapper of ours around them.
current_node: Callable[[], Any] = _current_autograd_node
current_task: Callable[[], int] = _current_graph_task_id
next_sequence_nr: Callable[[], int] = _get_sequence_nr
OpOverload: Any = torch._ops.OpOverload

ENGINE_FUNCTION = "_engine_run_backward"
"""The function of torch/autograd/graph.py that every backward pass goes through."""


_HOOK_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks on modules"
_FLAGS = {
    "old_dispatch_mode_flags": "_is_in_torch_dispatch_mode",
    "old_non_infra_dispatch_mode_flags": "_is_in_non_infra_torch_dispatch_mode",
    "old_without_ignore_compile_internals_dispatch_mode_flags": (
        "_is_in_any_mode_without_ignore_compile_internals"
    ),
}
"""What a mode saves on entering, and which variable of torch's it saves; 2.8 has two of them."""
_FLAGS = {saved: name for saved, name in _FLAGS.items() if hasattr(_python_dispatch, name)}


_open: WeakSet[RemovableMode] = WeakSet()
"""The recorders that are installed, in all threads."""
_without: dict[str, bool] = {}
"""Torch's flags as they were before the first of them."""


def _current_flags() -> dict[str, bool]:
    return {name: getattr(_python_dispatch, name) for name in _FLAGS.values()}


class RemovableMode(TorchDispatchMode):
    """A dispatch mode that costs little and is removed wherever in the stack it is.

    Compiled functions stay compiled under it, and ops of higher order pass through it.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def install(self) -> None:
        """Put this mode on top of the stack."""
        is_alone = not _get_current_dispatch_mode_stack()
        if not _open:
            _without.update(_current_flags())
        _open.add(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        if is_alone:
            # The flags belong to the process: a recorder of another thread may have set them.
            for saved, current in _FLAGS.items():
                if flags := getattr(self, saved, None):
                    flags[-1] = _without[current]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True wraps the handler in a function that costs a microsecond per op and imports the
        # compiler at the first op.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def remove(self) -> None:
        """Take this mode off the stack, also from below modes that were left on it.

        Whatever an interrupt left half done is completed; a second call does nothing.
        """
        _open.discard(self)
        if self not in _get_current_dispatch_mode_stack():
            if not self.old_dispatch_mode_flags:
                return
            # Interrupted on the way in, or popped by somebody else: torch's flags are still ours.
            _push_mode(self)
        for saved, current in _FLAGS.items():
            flags = getattr(self, saved, None)
            if flags is not None and not flags:
                flags.append(getattr(_python_dispatch, current))
        during = _current_flags()
        if _get_current_dispatch_mode_stack()[-1] is self:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        else:
            self._remove_from_below()
        if _open:  # in another thread: torch still has a mode
            for name, value in during.items():
                setattr(_python_dispatch, name, value)

    def _remove_from_below(self) -> None:
        above = []
        while _get_current_dispatch_mode_stack()[-1] is not self:
            above.append(_pop_mode())
        _pop_mode()
        for saved in _FLAGS:
            # What the next mode restores one day is what it would have found without this one.
            if getattr(self, saved, None):
                getattr(above[-1], saved)[-1] = getattr(self, saved).pop()
        for mode in reversed(above):
            _push_mode(mode)


def watch_modules(hook: Callable[[nn.Module, Any], None]) -> None:
    """Call ``hook`` before the forward of every module, until :func:`unwatch_modules`."""
    # A compiled module warns when it meets such a hook; the user has not asked for ours.
    warnings.filterwarnings("ignore", message=_HOOK_WARNING, category=UserWarning)
    register_module_forward_pre_hook(hook)


def unwatch_modules(hook: Callable[[nn.Module, Any], None]) -> None:
    """Undo :func:`watch_modules`; without the handle, which an interrupt may have lost."""
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    mine = [key for key, value in hooks.items() if value == hook]
    for key in mine:
        hooks.pop(key, None)
    for entry in list(warnings.filters):
        if getattr(entry[1], "pattern", entry[1]) == _HOOK_WARNING:
            cast("list[Any]", warnings.filters).remove(entry)


def synchronise(device: torch.device) -> None:
    """Wait for the current stream of a device, so that what failed on it is raised here."""
    if device.type == "cuda":
        if not torch.cuda.is_current_stream_capturing():
            wait_for(torch.cuda.current_stream(device))
    else:
        module: Any = torch.get_device_module(device)
        module.synchronize()
