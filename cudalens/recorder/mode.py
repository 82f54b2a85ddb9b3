"""The flight recorder: a dispatch mode that notes each op in a ring and keeps no tensor alive.

Only what cannot be found out later is noted, and nothing is formatted before a failure.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from cudalens._torch import is_accelerator, is_plain
from cudalens.facts import HistoryEntry, ProvenanceStep
from cudalens.recorder import _seam, failure
from cudalens.recorder.dataloader import Batches
from cudalens.recorder.failure import OpRecord
from cudalens.recorder.hostcopies import host_copies
from cudalens.recorder.lineage import IsBad, Lineage, ModifiedTensor
from cudalens.recorder.ops import (
    NO_TENSORS,
    Call,
    OpFacts,
    metas_of,
    tensors_in,
    version_and_base,
)
from cudalens.recorder.sites import Site, SiteTracker
from cudalens.source import StackEntry

Watch = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
_MAX_LIMITS = 20
# Globals are found faster than attributes of modules.
_getframe = sys._getframe
_next = _seam.next_sequence_nr


class Recorder(_seam.RecorderMode):
    """Record every op while open; use it in a with statement.

    Args:
        max_ops: how many of the last ops are kept.
        sync: wait for the device after each op on an accelerator, so that a fault is raised by
            the op that caused it.
        copy_budget: bytes of arguments copied to the host before each op that is not torch's own.
        watch: called after each op with the op, its arguments and its result; what it raises is
            raised by the op.
    """

    def __init__(
        self,
        max_ops: int = 4096,
        sync: bool = True,
        copy_budget: int = 1 << 20,
        watch: Watch | None = None,
    ) -> None:
        super().__init__()
        self.recorded_ops = 0
        self.limits: list[str] = []
        """What the recorder itself failed to do, one line each."""
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=max_ops)
        self._facts: dict[int, OpFacts] = {}
        self._sites = SiteTracker()
        self._batches = Batches()
        self._failures = failure.Failures()
        self._copies: dict[str, Tensor] | None = None
        self._sync = sync
        self._copy_budget = copy_budget
        self._watch = watch
        self._hook: Any = None

    # --- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        try:
            self._hook = _seam.register_module_forward_pre_hook(self._sites.enter_module)
            super().__enter__()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        try:
            self.remove()
        finally:
            hook, self._hook = self._hook, None
            if hook is not None:
                hook.remove()

    # --- recording -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # The hot path: every op pays for each line, so nothing here is done for beauty.
        try:
            facts = self._facts[id(func)]
        except KeyError:
            facts = self._facts[id(func)] = OpFacts(func)
        if facts.is_special:
            return self._special(facts, args, kwargs or {})
        try:
            result = facts.call(*args, **kwargs) if kwargs else facts.call(*args)
            kind = type(result)
            if kind is not Tensor and kind is not Parameter:
                self._note_several(facts, args, kwargs, result)
                return result
            if self._sync and not result.is_cpu:
                self._synchronise(result.device)
        except BaseException as error:
            self._failed(facts, args, kwargs, error)
            raise
        try:
            try:
                site = self._sites.of(_getframe(1))
            except ValueError:  # a thread of autograd's has no Python frames
                site = self._sites.of(None)
            is_step = site.__class__ is Site and site.is_step
            output = ref(result)
            if not facts.is_in_place:
                shape, dtype = result.shape, result.dtype
            else:
                shape, dtype = (None, None) if is_step else version_and_base(result)
            inputs: list[Any] | None = None
            if not is_step:
                inputs = []
                for value in args:
                    kind = type(value)
                    if kind is Tensor or kind is Parameter:
                        inputs.append(ref(value))
                    elif kind not in NO_TENSORS:
                        inputs += map(ref, tensors_in((value,)))
                if kwargs:
                    inputs += map(ref, tensors_in(kwargs.values()))
            self.recorded_ops = seq = self.recorded_ops + 1
            self._ring.append((seq, facts, site, _next(), inputs, output, shape, dtype))
            if self._copies is not None:
                self._copies = None
        except Exception as trouble:
            self._trouble("an op was not recorded", trouble)
        return result

    def _note_several(
        self, facts: OpFacts, args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> None:
        """Record a call that gave back no tensor, several, or one of a subclass."""
        tensors = tensors_in(args)
        if kwargs:
            tensors += tensors_in(kwargs.values())
        results = tensors_in((result,))
        if self._sync:
            for device in {item.device for item in (*results, *tensors) if is_plain(item)}:
                self._synchronise(device)
        try:
            frame = _getframe(2)
        except ValueError:
            frame = None
        try:
            self.recorded_ops = seq = self.recorded_ops + 1
            inputs, outputs = [ref(item) for item in tensors], tuple(map(ref, results))
            site = self._sites.of(frame)
            self._ring.append((seq, facts, site, _next(), inputs, outputs, *metas_of(results)))
            self._copies = None
        except Exception as trouble:
            self._trouble("an op was not recorded", trouble)

    def _special(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that is not torch's own, of higher order, or a range of the profiler."""
        if facts.is_range:
            return self._range(facts, args, kwargs)
        copies: dict[str, Tensor] = {}
        if facts.is_foreign:
            try:
                copies = host_copies(facts.named(args, kwargs), self._copy_budget)
            except Exception as trouble:
                self._trouble("arguments were not copied to the host", trouble)
        try:
            self._copies = copies
            result = facts.call(*args, **kwargs)
            self._note_several(facts, args, kwargs, result)
            self._copies = copies
        except BaseException as error:
            self._failed(facts, args, kwargs, error)
            raise
        return result

    def _range(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = facts.call(*args, **kwargs)
        try:
            frame = _getframe(2)
            if facts.is_range_start:
                self._sites.enter_range(args[0], frame)
            else:
                self._sites.leave_range()
                self._batches.note(frame)
        except Exception as trouble:
            self._trouble("a range was not noted", trouble)
        return result

    def _synchronise(self, device: torch.device) -> None:
        if is_accelerator(device):
            _seam.synchronise(device)

    def synchronize(self) -> None:
        """Wait for every device that the recorder has seen, so that a late fault is raised here."""

    def _failed(
        self, facts: OpFacts, args: tuple[Any, ...], kwargs: Any, error: BaseException
    ) -> None:
        pass

    def _trouble(self, what: str, error: Exception) -> None:
        line = f"{what}: {type(error).__name__}: {error}"
        if line not in self.limits and len(self.limits) < _MAX_LIMITS:
            self.limits.append(line)
