"""Replacements, while a recorder is open, for torch functions that no function mode sees."""

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

Keyed by thread id instead of a ``threading.local``: a generator or a fixture may close a block on
another thread than it was opened on, and :func:`forget` must reach the first thread's list.
"""


def here() -> list[Any]:
    """Return the open recorders of this thread."""
    return _of_thread.setdefault(threading.get_ident(), [])


def forget(recorder: Any) -> None:
    """Remove a recorder from the lists of all threads."""
    # A copy, because another thread may open its first block meanwhile.
    for recorders in list(_of_thread.values()):
        recorders[:] = [item for item in recorders if item is not recorder]


def _engine(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement for the entry of autograd's engine."""

    def run_engine(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # A thread of autograd's (a backward pass in a checkpoint) has opened no recorder. There,
        # they are on its mode stack.
        inner = run
        for recorder in here() or _torch.removable_modes():
            inner = partial(BackwardPass(recorder).run_backward, inner)
        return inner(outputs, *args, **kwargs)

    return run_engine


def _unrecorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper that calls a function without recorders on the mode stack."""

    def unrecorded(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        with _torch.WithoutOurs():
            return function(*args, **kwargs)

    return unrecorded


def _popping(pop: Callable[[], Any]) -> Callable[[], Any]:
    """Return the function with which a mode leaves: torch pops the top, which may be a recorder.

    Replacing ``__exit__`` would be too late: a ``with`` statement looks it up on entry.
    """

    def pop_mode() -> Any:
        # `torch.device` as a context pops all modes and pushes them again, so it must get ours as
        # well.
        if sys._getframe(1).f_code is not TorchFunctionMode.__exit__.__code__:
            return pop()
        with _torch.WithoutOurs():
            return pop()

    return pop_mode


def _hooked(ask: Callable[[], Any]) -> Callable[[], Any]:
    """Return a check for global module hooks without ours: compiled modules warn of any."""
    module = torch.nn.modules.module

    def has_any_global_hook() -> Any:
        hooks = module._global_forward_pre_hooks
        owners = [getattr(hook, "__self__", None) for hook in hooks.values()]
        if not all(isinstance(owner, SiteTracker) for owner in owners):
            return ask()
        # The tables that torch's own check reads: they differ between releases.
        tables = (getattr(module, name, None) for name in ask.__code__.co_names)
        return any(table for table in tables if table is not hooks)

    return has_any_global_hook


def _swapping(swap: Callable[..., Any]) -> Callable[..., Any]:
    """Return a swap of two tensors that first drops our weak references: torch rejects them."""

    def swap_tensors(t1: Tensor, t2: Tensor) -> Any:
        __tracebackhide__ = True
        if getweakrefs(t1) or getweakrefs(t2):
            for recorder in here():
                recorder.let_go()
        return swap(t1, t2)

    return swap_tensors


def _applying(unwrap: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that ``Function.apply`` calls first, with a note of the call."""

    def unwrap_dead_wrappers(args: Any) -> Any:
        unwrapped = unwrap(args)
        frame = sys._getframe(1)
        if frame.f_code.co_name == "apply":
            for recorder in _torch.removable_modes():
                recorder.note_call(frame.f_locals["cls"], frame, nodes=1)
        return unwrapped

    return unwrap_dead_wrappers


def _applied(apply: Any) -> Any:
    """Return ``Function.apply`` with a note of the call, where it is C++: from torch 2.15 on."""
    if isinstance(apply, classmethod):
        return apply

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # Up to torch 2.14, `apply` calls `unwrap_dead_wrappers` under the same condition.
        is_seen = not _torch.are_transforms_active()
        for recorder in _torch.removable_modes() if is_seen else ():
            recorder.note_call(cls, sys._getframe(1), nodes=1)
        return apply.__get__(None, cls)(*args, **kwargs)

    return classmethod(applied)


def _noting(part: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Return a decorator for a method of a loader's iterator that records its results.

    Args:
        part: the kind of result: ``indices`` of a batch, or its ``data``.
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
    """Return the open recorders with a NaN watch that waits until a NaN matters."""
    return [item for item in here() if item.watch is not None and not item.watch.is_strict]


def _scaling(scale: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``GradScaler.scale`` with a note of the losses that it scaled."""

    def scale_noted(scaler: Any, outputs: Any) -> Any:
        __tracebackhide__ = True
        scaled = scale(scaler, outputs)
        for recorder in _watching():
            recorder.ask_watch(recorder.watch.steps.scaled, scaler, outputs, scaled)
        return scaled

    return scale_noted


def _updating(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``GradScaler.update`` with a count of skipped steps."""

    def update_noted(scaler: Any, new_scale: Any = None) -> None:
        __tracebackhide__ = True
        watching = _watching()
        with Unseen():
            before = scaler.get_scale() if watching else 0.0
        update(scaler, new_scale)
        with Unseen():
            # A scale that the program sets itself is no sign of a skipped step.
            is_lower = new_scale is None and bool(watching) and scaler.get_scale() < before
        for recorder in watching:
            look, site = recorder.watch.steps.updated, recorder.sites.of(sys._getframe(1))
            recorder.ask_watch(look, scaler, site, is_lower=is_lower)

    return update_noted


def _replaying(replay: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return ``CUDAGraph.replay`` with a wait around it: no mode sees its launches."""

    def replay_waited(graph: Any) -> None:
        __tracebackhide__ = True
        recorders = here().copy()
        for recorder in recorders:
            try:
                recorder.wait_for_current_device()
            except BaseException as error:  # an earlier launch has failed, not this graph
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
                # A frame in its own variable is a cycle, which would keep the tensors until a
                # collection.
                del caller, own
            raise
        for recorder in recorders:
            recorder.note_call(replay, sys._getframe(1))

    return replay_waited


REPLACED = _torch.Replaced(
    {
        (torch.autograd, "_engine_run_backward"): _engine,
        # torch's transformer layers leave their fast path if a mode is active.
        (torch.overrides, "has_torch_function"): _unrecorded,
        (torch.overrides, "_pop_mode"): _popping,
        # torch calls `_pop_mode` in it for the mode on top, which may well be a recorder.
        (torch.overrides, "_pop_mode_temporarily"): lambda _: _torch.WithoutTop,
        (torch.nn.modules.module, "_has_any_global_hook"): _hooked,
        (torch.utils, "swap_tensors"): _swapping,
        (_torch.functorch_utils, "unwrap_dead_wrappers"): _applying,
        (torch.autograd.Function, "apply"): _applied,
        # A traced graph would contain our source lines, and the ops of the NaN watch.
        **dict.fromkeys(_torch.TRACERS, _unrecorded),
        (torch.cuda.CUDAGraph, "replay"): _replaying,
        (torch.amp.GradScaler, "scale"): _scaling,
        (torch.amp.GradScaler, "update"): _updating,
        (_torch.LoaderIterator, "_next_index"): _noting("indices"),
        (_torch.LoaderIterator, "__next__"): _noting("data"),
    }
)


def _leave_worker() -> None:
    """Close the recorders in a forked ``DataLoader`` worker.

    No session reads them there.  And a worker sends its error as the text of the whole traceback,
    which would show our frames.
    """
    if is_loader_worker():
        for recorder in reversed(here().copy()):
            recorder.__exit__(None, None, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_worker)
