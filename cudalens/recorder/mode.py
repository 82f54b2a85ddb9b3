"""The flight recorder: a dispatch mode that notes each op in a ring and keeps no tensor alive.

Only what cannot be found out later is noted, and nothing is formatted before a failure.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from types import FrameType, MethodType
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from cudalens.core import _python
from cudalens.core._python import FailedCall, raise_if_outside
from cudalens.core._torch import is_accelerator, is_plain
from cudalens.core.limits import Limits
from cudalens.recorder import _torch, failure
from cudalens.recorder.dataloader import LOADER_RANGE, Batches
from cudalens.recorder.hostcopies import host_copies
from cudalens.recorder.ops import (
    OpFacts,
    count_writes,
    describe_results,
    version_and_view,
    versions_before,
)
from cudalens.recorder.sites import RawSite, Site, SiteReader, SiteTracker
from cudalens.recorder.tensor_refs import NO_TENSORS, Noted, Version, references, tensors_in

Watch = Callable[[OpFacts, tuple[Any, ...], dict[str, Any], Any], None]
# Globals are found faster than attributes of modules.
_getframe = sys._getframe
_next = _torch.next_sequence_nr
_TENSORS: frozenset[Any] = frozenset({Tensor, Parameter})
_FILES = (__file__, _python.__file__)
_OWN = "cudalens::"
"""Ops that guards put into compiled code: they are not the user's."""


class _Dispatch(FailedCall):
    """Runs and records one op, in a frame that does not stand in the traceback of its error."""

    def __new__(  # every op pays for each call
        cls,
        known: Callable[[int], OpFacts | None],
        site_of: Callable[[FrameType | None], RawSite],
        append: Callable[[tuple[Any, ...]], None],
        mode: RecordingMode,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        try:
            facts = known(id(func)) or mode.learn(func)
            if mode.is_synchronous and args and args[0].__class__ is Tensor and args[0].is_cuda:
                mode.after_others(args[0].device)
            if facts.is_special:
                return mode.special(facts, args, kwargs or {})
            try:
                result = facts.call(*args, **kwargs) if kwargs else facts.call(*args)
                is_one = (kind := result.__class__) is Tensor or kind is Parameter
                if mode.watch or (mode.is_synchronous and not (is_one and result.is_cpu)):
                    mode.inspect(facts, args, kwargs or {}, result)
            except BaseException as error:
                mode.failed(facts, args, kwargs, error)
                raise
            if not is_one:
                return mode.note_several(facts, args, kwargs, result, frame=_getframe().f_back)
            try:
                if (site := site_of(_getframe().f_back)).__class__ is Site and site.is_brief:
                    reads: Any = None
                elif (count := facts.tensors_first) == 1:
                    reads = ref(args[0])
                elif count == 2 and args[1].__class__ in _TENSORS:
                    reads = (ref(args[0]), ref(args[1]))
                else:
                    reads = references(args, kwargs, facts.noted) if count >= 0 else ()
                number = 0 if reads is None else _next()
                shape, dtype = result.shape, result.dtype
                if facts.is_in_place:  # of an optimizer's own state nothing more will be asked
                    is_state = reads is None and kind is Tensor
                    shape, dtype = (None, None) if is_state else version_and_view(result)
                mode.recorded_ops = seq = mode.recorded_ops + 1
                append((seq, facts, site, number, reads, ref(result), shape, dtype))
                mode.foreign = None
                return result
            except Exception as trouble:  # nested tensors have no shape
                raise_if_outside(trouble)
                return mode.note_several(facts, args, kwargs, result)
        except BaseException as error:
            args, kwargs, result = (), None, None  # a traceback that stays keeps this frame
            return cls.of(error)


class RecordingMode(_torch.RemovableMode):
    """Record every op while open; use it in a with statement.

    Args:
        max_ops: how many of the last ops are kept.
        sync: wait for the device after each of its ops, so that the op at fault raises the fault.
        copy_budget: bytes of arguments copied to the host before each op that is not torch's own.
        watch: called after each op with the op, its arguments and its result; what it raises is
            raised by the op.
        modules: note which module each op belongs to; a compiled module runs eagerly then.
        is_fatal: tells whether the device cannot be used after an exception.
        on_device_end: called once, with the exception after which it cannot.
    """

    def __init__(
        self,
        max_ops: int = 4096,
        sync: bool = True,
        copy_budget: int = 1 << 20,
        watch: Watch | None = None,
        modules: bool = True,
        is_fatal: Callable[[BaseException], bool] = lambda error: False,
        on_device_end: Callable[[BaseException], None] | None = None,
    ) -> None:
        super().__init__()
        self.recorded_ops = 0
        self.fatal: failure.OpRecord | None = None
        """The op that ended the device's context, if it was one."""
        self._noted = Limits()
        self.limits = self._noted.lines
        """What the recorder itself failed to do, one line each."""
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=max_ops)
        self._facts: dict[int, OpFacts] = {}
        self._sites = SiteTracker()
        self._batches = Batches()
        self._failures = failure.Failures()
        self.foreign: str | None = None
        """The op of an extension that came back last: without waiting its fault comes later."""
        self._devices: set[torch.device] = set()
        self.is_synchronous = sync
        self._copy_budget = copy_budget
        self.watch = watch
        self._modules = modules
        self._is_fatal, self._on_device_end = is_fatal, on_device_end
        self.is_over = False  # the device's context has ended

    # --- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            if self._modules:
                _torch.watch_modules(self._sites.enter_module)
            # Bound once, with all that each op needs: torch asks for it twice for each of them.
            dispatch = partial(_Dispatch, self._facts.get, self._sites.of, self._ring.append)
            vars(self)["__torch_dispatch__"] = MethodType(dispatch, self)
            self.install()
            return self
        except BaseException:
            self._close()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._close()
        except BaseException:  # an interrupt: what it cut short is done again
            self._close()
            raise

    def _close(self) -> None:
        try:
            self.remove()
            vars(self).pop("__torch_dispatch__", None)
        finally:
            _torch.unwatch_modules(self._sites.enter_module)

    # --- recording -------------------------------------------------------------------------------

    def learn(self, func: Any) -> OpFacts:
        """Read the schema of an op that comes for the first time."""
        return self._facts.setdefault(id(func), OpFacts(func))

    def note_several(
        self,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: Any,
        result: Any,
        written: tuple[Version, ...] = (),
        frame: FrameType | None = None,
    ) -> Any:
        """Record a call that gave back no tensor, several, or one that is not plain.

        Also what the quick way could not record.  Return the result.
        """
        if facts.is_foreign and facts.name.startswith(_OWN):
            return result
        try:
            site = self._sites.of(frame or _frame_outside())
            # Fused optimizers write to lists of tensors and give nothing back.
            is_brief = site.__class__ is Site and site.is_brief and not facts.writes
            reads = None if is_brief else references(args, kwargs)
            if written and reads is not None:
                reads = Noted(reads, versions=written)
            outputs, shapes, dtypes = describe_results(result)
            self.recorded_ops = seq = self.recorded_ops + 1
            self._ring.append((seq, facts, site, _next(), reads, outputs, shapes, dtypes))
            self.foreign = None
        except Exception as trouble:
            self._internal_error("an op was not recorded", trouble)
        return result

    def after_others(self, device: torch.device) -> None:
        """Wait for what Triton, CuPy or a CUDA graph launched: its fault is not the next op's."""
        try:
            self._synchronise(device)
        except BaseException as error:
            self._note_end(None, error)
            raise

    def _note_end(self, record: failure.OpRecord | None, error: BaseException) -> None:
        """Keep what ended the device's context; every later op fails only because of it."""
        try:
            if not self.is_over and self._is_fatal(error):
                self.is_over, self.fatal = True, record
                if self._on_device_end is not None:
                    self._on_device_end(error)
        except Exception as trouble:
            self._internal_error("a lost device was not noted", trouble)

    def inspect(
        self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Wait for the device of a call that came back, and have its result looked at."""
        if self.is_synchronous:
            found = result[0] if result.__class__ is tuple and result else result
            if found.__class__ in NO_TENSORS and args:
                found = args[0]
            # The usual calls first, since a program without a device pays for each of them.
            is_on_host = found.__class__ is Tensor and found.is_cpu
            for tensor in () if is_on_host else tensors_in((result, *args, *kwargs.values())):
                if is_plain(tensor):  # one tells the device
                    if not tensor.is_cpu:
                        self._synchronise(tensor.device)
                    break
        if self.watch is not None:
            self.watch(facts, args, kwargs, result)

    def special(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that is not torch's own, of higher order, or a range of the profiler."""
        if facts.is_range:
            return self._range(facts, args, kwargs)
        copies, written = self._before(facts, args, kwargs)
        try:
            result = facts.call(*args, **kwargs)
            count_writes(facts, written)
            self.inspect(facts, args, kwargs, result)
        except BaseException as error:
            self.failed(facts, args, kwargs, error, copies)
            args, kwargs, result = (), {}, None
            raise
        self.note_several(facts, args, kwargs, result, written)
        self.foreign = facts.name if copies else None
        return result

    def _before(
        self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Tensor], tuple[Version, ...]]:
        """Take what the call may destroy: its arguments' values, versions of what it writes."""
        copies: dict[str, Tensor] = {}
        written: tuple[Version, ...] = ()
        try:
            if facts.writes_several:
                written = versions_before(facts, facts.named(args, kwargs))
            if facts.is_foreign:
                copies = host_copies(facts.named(args, kwargs), self._copy_budget)
        except Exception as trouble:
            self._internal_error("arguments were not copied to the host", trouble)
        return copies, written

    def _range(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = facts.call(*args, **kwargs)
        try:
            if facts.is_range_start:
                self._sites.enter_range(args[0], _getframe(3))
            elif self._sites.leave_range().startswith(LOADER_RANGE):
                self._batches.note(_getframe(3), self.recorded_ops)
        except Exception as trouble:
            self._internal_error("a range was not noted", trouble)
        return result

    def _synchronise(self, device: torch.device) -> None:
        if is_accelerator(device):
            self._devices.add(device)
            _torch.synchronise(device)

    def failed(
        self,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: Any,
        error: BaseException,
        copies: dict[str, Tensor] | None = None,
    ) -> None:
        """Keep what can be told of an op that raised."""
        try:
            site = self._sites.of(_frame_outside())
            self.recorded_ops += 1
            record = failure.describe_failure(
                facts,
                facts.named(args, kwargs or {}),
                site,
                module_path=SiteReader().module(site).path,
                host_copies=copies or {},
                previous_op=self.foreign,
            )
            self._failures.note(record, error)
            self._note_end(record, error)
        except Exception as trouble:
            self._internal_error("the failing op was not recorded", trouble)
        finally:
            self.foreign = None

    def _internal_error(self, what: str, error: Exception) -> None:
        """Note what the recorder failed to do; what only came out of it is raised on."""
        raise_if_outside(error)
        self._noted.add(f"{what}: {type(error).__name__}: {error}")


def _frame_outside() -> FrameType | None:
    """Return the frame that made the call: the innermost outside this module."""
    frame: FrameType | None = _getframe(1)
    while frame is not None and frame.f_code.co_filename in _FILES:
        frame = frame.f_back
    return frame
