"""Functions of torch that no function mode sees, replaced while a recorder is open."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import getweakrefs

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cudalens.core._torch import Unseen
from cudalens.recorder import _torch
from cudalens.recorder.backward import BackwardPass
from cudalens.recorder.sites import SiteTracker
from cudalens.source.stack import is_loader_worker

_of_thread: dict[int, list[Any]] = {}
"""The open recorders of each thread, innermost last.

By the thread's number, and no ``threading.local``: a generator or a fixture may close a block on
another thread than the one that opened it, and :func:`forget` has to reach that one's list.
"""


def here() -> list[Any]:
    """Return the open recorders of this thread."""
    return _of_thread.setdefault(threading.get_ident(), [])


def forget(recorder: Any) -> None:
    """Take a recorder out of the open ones."""
    for recorders in list(_of_thread.values()):
        recorders[:] = [item for item in recorders if item is not recorder]


def _engine(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is called in place of autograd's engine."""

    def run_engine(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # A thread of autograd's, as in a checkpoint, has opened none: they are its modes.
        inner = run
        for recorder in here() or _torch.removable_modes():
            inner = partial(BackwardPass(recorder).run_backward, inner)
        return inner(outputs, *args, **kwargs)

    return run_engine


def _unrecorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a function of torch's without a recorder on the stack of modes."""

    def unrecorded(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        with _torch.WithoutOurs():
            return function(*args, **kwargs)

    return unrecorded


def _popping(pop: Callable[[], Any]) -> Callable[[], Any]:
    """Return what a mode calls that is left: torch pops the top, which may be a recorder.

    Not in place of the mode's ``__exit__``, which a ``with`` statement looks up where it begins.
    """

    def pop_mode() -> Any:
        if sys._getframe(1).f_code is not TorchFunctionMode.__exit__.__code__:
            return pop()
        with _torch.WithoutOurs():
            return pop()

    return pop_mode


def _hooked(ask: Callable[[], Any]) -> Callable[[], Any]:
    """Return what a compiled module asks, which warns of hooks of all modules."""
    module = torch.nn.modules.module

    def has_any_global_hook() -> Any:
        hooks = module._global_forward_pre_hooks
        owners = [getattr(hook, "__self__", None) for hook in hooks.values()]
        if not all(isinstance(owner, SiteTracker) for owner in owners):
            return ask()
        tables = (getattr(module, name, None) for name in ask.__code__.co_names)
        return any(table for table in tables if table is not hooks)

    return has_any_global_hook


def _swapping(swap: Callable[..., Any]) -> Callable[..., Any]:
    """Return what swaps two tensors, which must have no weak references."""

    def swap_tensors(t1: Tensor, t2: Tensor) -> Any:
        __tracebackhide__ = True
        if getweakrefs(t1) or getweakrefs(t2):
            for recorder in here():
                recorder.let_go()
        return swap(t1, t2)

    return swap_tensors


def _applying(unwrap: Callable[..., Any]) -> Callable[..., Any]:
    """Return what ``apply`` of a custom Function calls before it makes its node."""

    def unwrap_dead_wrappers(args: Any) -> Any:
        unwrapped = unwrap(args)
        frame = sys._getframe(1)
        if frame.f_code.co_name == "apply":
            for recorder in _torch.removable_modes():
                recorder.note_call(frame.f_locals["cls"], frame, nodes=1)
        return unwrapped

    return unwrap_dead_wrappers


def _applied(apply: Any) -> Any:
    """Return the same ``apply`` where it is written in C, as from torch 2.15 on."""
    if isinstance(apply, classmethod):
        return apply

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        is_seen = not _torch.are_transforms_active()
        for recorder in _torch.removable_modes() if is_seen else ():
            recorder.note_call(cls, sys._getframe(1), nodes=1)
        return apply.__get__(None, cls)(*args, **kwargs)

    return classmethod(applied)


def _noting(part: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Return what replaces a method of a loader's iterator so that its results are noted.

    Args:
        part: what they are: ``indices`` of a batch, or its ``data``.
    """

    def replace(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noted(iterator: Any) -> Any:
            __tracebackhide__ = True
            value = method(iterator)
            for recorder in here():
                recorder.note_batch(iterator, **{part: value})
            return value

        return noted

    return replace


def _watching() -> list[Any]:
    """Return the open recorders that follow a NaN to where it matters."""
    return [item for item in here() if item.watch is not None and not item.watch.is_strict]


def _scaling(scale: Callable[..., Any]) -> Callable[..., Any]:
    """Return what replaces ``GradScaler.scale`` so that what it scaled is known."""

    def scale_noted(scaler: Any, outputs: Any) -> Any:
        __tracebackhide__ = True
        scaled = scale(scaler, outputs)
        for recorder in _watching():
            recorder.ask_watch(recorder.watch.steps.scaled, scaler, outputs, scaled)
        return scaled

    return scale_noted


def _updating(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return what replaces ``GradScaler.update`` so that skipped steps are counted."""

    def update_noted(scaler: Any, new_scale: Any = None) -> None:
        __tracebackhide__ = True
        watching = _watching()
        with Unseen():
            before = scaler.get_scale() if watching else 0.0
        update(scaler, new_scale)
        with Unseen():
            is_lower = new_scale is None and bool(watching) and scaler.get_scale() < before
        for recorder in watching:
            look, site = recorder.watch.steps.updated, recorder.sites.of(sys._getframe(1))
            recorder.ask_watch(look, scaler, site, is_lower=is_lower)

    return update_noted


def _replaying(replay: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return what replays a CUDA graph and waits for it: no mode sees its launches."""

    def replay_waited(graph: Any) -> None:
        __tracebackhide__ = True
        recorders = here().copy()
        for recorder in recorders:
            try:
                recorder.wait_for_current_device()
            except BaseException as error:  # what was launched before has failed
                recorder.note_end(error, None)
                raise
        try:
            replay(graph)
            for recorder in recorders:
                recorder.wait_for_current_device()
        except BaseException as error:
            _held = []  # this frame keeps the calls alive
            for recorder in recorders:  # no comprehension: before Python 3.12 that is a frame
                caller, own = sys._getframe(1), sys._getframe()
                _held.append(recorder.failed(replay, (graph,), None, error, caller, own))
                del caller, own
            raise
        for recorder in recorders:
            recorder.note_call(replay, sys._getframe(1))

    return replay_waited


REPLACED = _torch.Replaced(
    {
        (torch.autograd, "_engine_run_backward"): _engine,
        # Torch's transformer layers ask it: with a mode they leave their fast path.
        (torch.overrides, "has_torch_function"): _unrecorded,
        (torch.overrides, "_pop_mode"): _popping,
        # torch's own block calls the one above, and it must pop a recorder.
        (torch.overrides, "_pop_mode_temporarily"): lambda _: _torch.WithoutTop,
        (torch.nn.modules.module, "_has_any_global_hook"): _hooked,
        (torch.utils, "swap_tensors"): _swapping,
        (_torch.functorch_utils, "unwrap_dead_wrappers"): _applying,
        (torch.autograd.Function, "apply"): _applied,
        # The graph would have the lines of our frames, and what the watch for NaN computes.
        **dict.fromkeys(_torch.TRACERS, _unrecorded),
        (torch.cuda.CUDAGraph, "replay"): _replaying,
        (torch.amp.GradScaler, "scale"): _scaling,
        (torch.amp.GradScaler, "update"): _updating,
        (_torch.LoaderIterator, "_next_index"): _noting("indices"),
        (_torch.LoaderIterator, "__next__"): _noting("data"),
    }
)


def _leave_worker() -> None:
    """Close the recorders in a process that a DataLoader has forked.

    Nobody asks them there, and a worker's error is the text of its traceback, with all frames.
    """
    if is_loader_worker():
        for recorder in reversed(here().copy()):
            recorder.__exit__(None, None, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_worker)
