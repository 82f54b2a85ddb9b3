"""The flight recorder: a dispatch mode that notes each op in a ring and keeps no tensor alive.

Only what cannot be found out later is noted, and nothing is formatted before a failure.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from cudalens.core._python import raise_if_outside
from cudalens.core._torch import is_accelerator, is_plain
from cudalens.recorder import _seam, failure
from cudalens.recorder.dataloader import LOADER_RANGE, Batches
from cudalens.recorder.hostcopies import host_copies
from cudalens.recorder.ops import (
    OpFacts,
    count_writes,
    describe_results,
    version_and_view,
    versions_before,
)
from cudalens.recorder.reads import Version, Wrote, references, tensors_in
from cudalens.recorder.sites import Site, SiteReader, SiteTracker

Watch = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
_MAX_LIMITS = 20
# Globals are found faster than attributes of modules.
_getframe = sys._getframe
_next = _seam.next_sequence_nr


class RecordingMode(_seam.RecorderMode):
    """Record every op while open; use it in a with statement.

    Args:
        max_ops: how many of the last ops are kept.
        sync: wait for the device after each of its ops, so that the op at fault raises the fault.
        copy_budget: bytes of arguments copied to the host before each op that is not torch's own.
        watch: called after each op with the op, its arguments and its result; what it raises is
            raised by the op.
        modules: note which module each op belongs to; a compiled module runs eagerly then.
        is_fatal: tells whether the device cannot be used after an exception.
    """

    def __init__(
        self,
        max_ops: int = 4096,
        sync: bool = True,
        copy_budget: int = 1 << 20,
        watch: Watch | None = None,
        modules: bool = True,
        is_fatal: Callable[[BaseException], bool] = lambda error: False,
    ) -> None:
        super().__init__()
        self.recorded_ops = 0
        self.fatal: failure.OpRecord | None = None
        """The op that ended the device's context, if it was one."""
        self.limits: list[str] = []
        """What the recorder itself failed to do, one line each."""
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=max_ops)
        self._facts: dict[int, OpFacts] = {}
        self._sites = SiteTracker()
        self._batches = Batches()
        self._failures = failure.Failures()
        self._foreign: tuple[str, dict[str, Tensor]] | None = None
        self._devices: set[torch.device] = set()
        self._sync = sync
        self._copy_budget = copy_budget
        self.watch = watch
        self._modules = modules
        self._is_fatal = is_fatal
        self.is_over = False  # the device's context has ended

    # --- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            if self._modules:
                _seam.watch_modules(self._sites.enter_module)
            self.install()
            return self
        except BaseException:
            self._close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._close()
        except BaseException:  # an interrupt: what it cut short is done again
            self._close()
            raise

    def _close(self) -> None:
        try:
            self.remove()
        finally:
            _seam.unwatch_modules(self._sites.enter_module)

    # --- recording -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Every op pays for each line, so nothing here is done for beauty.
        facts = self._facts.get(id(func)) or self._learn(func)
        self._after_others(args)
        if facts.is_special:
            return self._special(facts, args, kwargs or {})
        try:
            result = facts.call(*args, **kwargs) if kwargs else facts.call(*args)
            kind = type(result)
            is_one = kind is Tensor or kind is Parameter
            if self._sync and not (is_one and result.is_cpu):
                self._synchronise_one(args, kwargs, result)
            if self.watch is not None:
                self.watch(func, args, kwargs or {}, result)
        except BaseException as error:
            self._failed(facts, args, kwargs, error)
            args, kwargs, result = (), None, None  # the traceback keeps this frame, no tensors
            raise
        if not is_one:
            self._note_several(facts, args, kwargs, result)
            return result
        try:
            site = self._sites.of(_getframe(1))
            if site.__class__ is Site and site.is_brief:
                reads: Any = None
            elif facts.reads_first_only and not kwargs:
                reads = ref(args[0])
            else:
                reads = references(args, kwargs, facts.noted)
            if not facts.is_in_place:
                shape, dtype = result.shape, result.dtype
            elif reads is None and kind is Tensor:
                shape = dtype = None
            else:
                shape, dtype = version_and_view(result)
            self.recorded_ops = seq = self.recorded_ops + 1
            self._ring.append((seq, facts, site, _next(), reads, ref(result), shape, dtype))
            self._foreign = None
        except Exception as trouble:  # autograd's threads: no Python frame; nested: no shape
            raise_if_outside(trouble)
            self._note_several(facts, args, kwargs, result)
        return result

    def _learn(self, func: Any) -> OpFacts:
        return self._facts.setdefault(id(func), OpFacts(func))

    def _note_several(
        self,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: Any,
        result: Any,
        written: tuple[Version, ...] = (),
    ) -> None:
        """Record a call that gave back no tensor, several, or one that is not plain.

        Also what the quick way could not record.
        """
        try:
            site = self._sites.of(_frame_outside())
            # Fused optimizers write to lists of tensors and give nothing back.
            is_brief = site.__class__ is Site and site.is_brief and not facts.writes
            reads = None if is_brief else references(args, kwargs)
            if written and reads is not None:
                reads = Wrote(reads, written)
            outputs, shapes, dtypes = describe_results(result)
            self.recorded_ops = seq = self.recorded_ops + 1
            self._ring.append((seq, facts, site, _next(), reads, outputs, shapes, dtypes))
            self._foreign = None
        except Exception as trouble:
            self._trouble("an op was not recorded", trouble)

    def _after_others(self, args: tuple[Any, ...]) -> None:
        """Wait for what Triton, CuPy or a CUDA graph launched: its fault is not the next op's."""
        if self._sync and args and args[0].__class__ is Tensor and args[0].is_cuda:
            try:
                self._synchronise(args[0].device)
            except BaseException as error:
                self._note_end(None, error)
                raise

    def _note_end(self, record: failure.OpRecord | None, error: BaseException) -> None:
        """Keep what ended the device's context; every later op fails only because of it."""
        try:
            if not self.is_over and self._is_fatal(error):
                self.is_over, self.fatal = True, record
        except Exception as trouble:
            self._trouble("a lost device was not noted", trouble)

    def _synchronise_one(self, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        # One tensor tells the device, of the results if there are any.
        for values in ((result,), args, (kwargs or {}).values()):
            for tensor in tensors_in(values):
                if is_plain(tensor):
                    if not tensor.is_cpu:
                        self._synchronise(tensor.device)
                    return

    def _special(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that is not torch's own, of higher order, or a range of the profiler."""
        if facts.is_range:
            return self._range(facts, args, kwargs)
        copies, written = self._before(facts, args, kwargs)
        try:
            result = facts.call(*args, **kwargs)
            count_writes(facts, written)
            if self._sync:
                self._synchronise_one(args, kwargs, result)
            if self.watch is not None:
                self.watch(facts.op, args, kwargs, result)
        except BaseException as error:
            self._failed(facts, args, kwargs, error, copies)
            args, kwargs, result = (), {}, None
            raise
        self._note_several(facts, args, kwargs, result, written)
        # Without synchronising, its fault may surface in the next op.
        self._foreign = (facts.name, copies) if copies else None
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
            self._trouble("arguments were not copied to the host", trouble)
        return copies, written

    def _range(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = facts.call(*args, **kwargs)
        try:
            if facts.is_range_start:
                self._sites.enter_range(args[0], _getframe(3))
            elif self._sites.leave_range().startswith(LOADER_RANGE):
                self._batches.note(_getframe(3), self.recorded_ops)
        except Exception as trouble:
            self._trouble("a range was not noted", trouble)
        return result

    def _synchronise(self, device: torch.device) -> None:
        if is_accelerator(device):
            self._devices.add(device)
            _seam.synchronise(device)

    def _failed(
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
                seq=self.recorded_ops,
                module_path=SiteReader().module_path(site),
                host_copies=copies or {},
                is_from_sync=failure.is_raised_in(error, RecordingMode._synchronise.__code__),
                previous=self._foreign,
            )
            self._failures.note(record, error)
            self._note_end(record, error)
        except Exception as trouble:
            self._trouble("the failing op was not recorded", trouble)
        finally:
            self._foreign = None

    def _trouble(self, what: str, error: Exception) -> None:
        """Note what the recorder failed to do; what only came out of it is raised on."""
        raise_if_outside(error)
        line = f"{what}: {type(error).__name__}: {error}"
        if line not in self.limits and len(self.limits) < _MAX_LIMITS:
            self.limits.append(line)


def _frame_outside() -> FrameType | None:
    """Return the frame that made the call: the innermost outside this module."""
    frame: FrameType | None = _getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame
