"""The flight recorder: a function mode that notes each API call and keeps no tensor alive.

Only what cannot be found out later is noted, and nothing is formatted before a failure.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, Self
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from cudalens.core._python import raise_if_outside
from cudalens.core._torch import Unseen, is_accelerator, is_plain
from cudalens.core.call import ATTRIBUTE, EXTREMES, ApiCall, NodeMark, api_call_of
from cudalens.core.errors import DeviceAssertError
from cudalens.core.limits import Limits
from cudalens.recorder import _torch
from cudalens.recorder.backward import BackwardPass
from cudalens.recorder.calls import (
    Api,
    Apis,
    Write,
    describe_results,
    writes_of,
)
from cudalens.recorder.dataloader import Batches
from cudalens.recorder.earlier_values import EarlierValues, caller_of
from cudalens.recorder.replaced import REPLACED, forget, here
from cudalens.recorder.sites import RawSite, Site, SiteTracker
from cudalens.recorder.tensor_refs import NO_TENSORS, tensors_in

# Globals are found faster than attributes of modules.
_getframe = sys._getframe
_next = _torch.next_sequence_nr
_has_modes_below = _torch.function_modes
_PLAIN = (Tensor,)
_TENSORS: frozenset[Any] = frozenset({Tensor, Parameter})
_UNWRITTEN: list[int] = []
_ANSWERS = NO_TENSORS - {type(None)}


class RecordingMode(_torch.RemovableMode):
    """Record every API call while open; use it in a with statement.

    Args:
        max_ops: size of the ring of recorded calls.
        sync: wait for the device after each call, so that the call at fault raises the fault.
        watch: looks at the result of each call, and at the gradients of each node of a backward
            pass; what it returns is raised by the call.
        is_fatal: returns whether the device cannot be used after an exception.
        on_device_end: called with each exception that says so; the first may come in a thread of
            autograd's, and again where ``backward`` was called.
    """

    def __init__(
        self,
        max_ops: int = 4096,
        sync: bool = True,
        watch: Any = None,
        is_fatal: Callable[[BaseException], bool] = lambda error: False,
        on_device_end: Callable[[BaseException], None] | None = None,
    ) -> None:
        super().__init__()
        self.recorded_ops = 0
        self.fatal: ApiCall | None = None
        """The call that ended the device's context, if it was one."""
        self.is_over = False  # the device's context has ended
        self._noted = Limits()
        self.limits = self._noted.lines
        """Failures of the recorder itself, one line each."""
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=max_ops)
        self._apis = Apis()
        self.sites = SiteTracker()
        self.passes: list[BackwardPass] = []
        """The backward passes that run, the innermost last."""
        self._batches = Batches()
        self._live: WeakSet[ApiCall] = WeakSet()
        self.devices: set[torch.device] = set()
        """The devices that calls were seen on."""
        self.is_synchronous = sync
        self._thread = threading.get_ident()
        self.watch = watch
        self._is_fatal, self._on_device_end = is_fatal, on_device_end
        self._seen = EarlierValues()
        self._read: list[tuple[str, float, float]] = []
        """Values that guards read in the running call."""

    @property
    def watch_node(self) -> Callable[..., BaseException | None] | None:
        """The part of the watch that looks at the gradients of each node."""
        return getattr(self.watch, "of_node", None)

    # --- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            _torch.add_hooks(self.sites.enter_module, self.sites.enter_step)
            REPLACED.install(self)
            here().append(self)
            if EXTREMES.values is None:
                EXTREMES.values = []
            self._read = EXTREMES.values
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
        finally:
            _torch.remove_hooks(self.sites.enter_module, self.sites.enter_step)
            REPLACED.remove(self)
            forget(self)
            if not here():
                EXTREMES.values = None
            for call in list(self._live):
                call.release()

    # --- recording -------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        __tracebackhide__ = True
        # Bound before anything can raise: a traceback that stays keeps this frame.
        tensors: Any = None
        versions = result = value = None
        is_called = False
        try:
            api = self._apis[func]
            if api.is_quiet:
                is_called = True
                return func(*args, **kwargs) if kwargs else func(*args)
            if api.forgets:
                kwargs = _torch.forgotten_keywords(func, _getframe(1)) | (kwargs or {})
            tensors = []
            for value in (*args, *kwargs.values()) if kwargs else args:
                kind = value.__class__
                if kind is Tensor or kind is Parameter:
                    tensors.append(value)
                elif kind not in NO_TENSORS:
                    tensors += tensors_in((value,))
            may_write = api.may_write or (kwargs and "out" in kwargs)
            # Other modes and subclasses must not see the calls of the recorder itself.
            if api.is_special or (types and types != _PLAIN) or _has_modes_below():
                with Unseen():
                    versions = _versions_of(tensors) if may_write else _UNWRITTEN
                    self._wait_for_one(tensors)
                is_called, number = True, _next()
                result = func(*args, **kwargs) if kwargs else func(*args)
                with Unseen():
                    self._wait_after(tensors, result)
                    self._note(api, args, kwargs, tensors, versions, number, result, _getframe(1))
                return result
            versions = _versions_of(tensors) if may_write else _UNWRITTEN
            if tensors and not tensors[0].is_cpu:
                self._wait(tensors[0])  # for what Triton, CuPy or a graph launched
            is_called, number = True, _next()
            result = func(*args, **kwargs) if kwargs else func(*args)
            if result.__class__ not in _TENSORS or not result.is_cpu:
                self._wait_after(tensors, result)
            self._note(api, args, kwargs, tensors, versions, number, result, _getframe(1))
            return result
        except BaseException as error:
            if is_called:
                self._failed(func, args, kwargs, error)
            else:  # what Triton, CuPy or a CUDA graph launched before has failed
                self.note_end(error, None)
            args, kwargs, tensors, result, value = (), None, None, None, None
            raise

    def _wait_after(self, tensors: list[Tensor], result: Any) -> None:
        """Wait for the device of a call that came back, if it launched something."""
        if result.__class__ in _ANSWERS:
            return  # a number: the host has waited
        self._wait_for_one((*tensors_in((result,)), *tensors))

    def _wait_for_one(self, tensors: Sequence[Tensor]) -> None:
        """Wait for the device of the first tensor that is on one."""
        for item in tensors:
            if not item.is_cpu and is_plain(item):
                self._wait(item)
                return

    def _wait(self, tensor: Tensor) -> None:
        device = tensor.device
        if is_accelerator(device):
            self.devices.add(device)
            if self.is_synchronous:
                _torch.wait_if_busy(device)

    def wait_for_all(self) -> None:
        """Wait for all devices that calls were seen on, unless nothing is to wait."""
        for device in tuple(self.devices) if self.is_synchronous else ():
            _torch.wait_if_busy(device)

    def _note(
        self,
        api: Api,
        args: tuple[Any, ...],
        kwargs: Any,
        tensors: list[Tensor],
        versions: list[int] | None,
        number: int,
        result: Any,
        frame: FrameType,
    ) -> None:
        """Note a call that came back, and have its result looked at.

        Args:
            number: the sequence number that autograd would have given to a node before the call.
        """
        __tracebackhide__ = True
        written: tuple[Write, ...] = ()
        try:
            last, site = _next(), self.sites.of(frame)
            if self.passes:
                site, number, last = self._of_worker(site, number, last)
            if versions is not _UNWRITTEN:
                written = writes_of(api, tensors, versions)
            output: Any
            shape: Any
            kind = result.__class__
            if kind is Tensor or kind is Parameter:
                output, dtype = ref(result), result.dtype
                try:
                    shape = result.shape
                except RuntimeError:  # of a nested tensor
                    shape = None
            else:
                output, shape, dtype = describe_results(result)
            extra = api.extra_of and api.extra_of(api, args, kwargs, result, tensors)
            is_brief = site.__class__ is Site and site.is_brief
            reads = None if is_brief else [*map(ref, tensors)]
            self.recorded_ops = seq = self.recorded_ops + 1
            self._ring.append(
                (seq, api, site, number, last, reads, output, shape, dtype, written, extra)
            )
            if self._read:
                if not api.is_backward:  # that is of many calls
                    self._seen.note(frame, site, self._read, seq)
                self._read.clear()
        except Exception as trouble:
            self.internal_error("a call was not recorded", trouble)
        if self.watch is not None and api.makes_values:
            try:
                finding = self.watch(api, args, kwargs, result, written)
            except Exception as trouble:
                self.internal_error("a result was not looked at", trouble)
            else:
                if finding is not None:
                    raise finding

    def _of_worker(self, site: RawSite, number: int, last: int) -> tuple[RawSite, int, int]:
        """Return place and numbers of a call in backward, which may run on a thread of autograd's.

        Such a thread counts for itself, and its stack ends before the line that waits for it.
        """
        if threading.get_ident() == self._thread:
            return site, number, last
        outer = self._pass_here()
        if outer is not None and outer.site is not None:
            if site is None:
                site = outer.site
            elif isinstance(site, tuple) and site[2] is None:
                site = (*site[:2], outer.site)
        return site, 0, 0

    def _pass_here(self) -> BackwardPass | None:
        """Return the innermost backward pass of which this thread runs a node."""
        here = threading.get_ident()
        passes = [item for item in self.passes if here in item.marks]
        return passes[-1] if passes else None

    def note_batch(self, iterator: Any, *, indices: Any = None, data: Any = None) -> None:
        """Note the indices or the tensors of a loader's batch."""
        try:
            if indices is not None:
                self._batches.note_indices(iterator, indices)
            else:
                self._batches.note(iterator, data, self.recorded_ops)
        except Exception as trouble:
            self.internal_error("a batch was not noted", trouble)

    def note_call(self, func: Any, frame: FrameType | None, nodes: int = 0) -> None:
        """Note a call that no mode sees, and how many autograd nodes it is about to make."""
        try:
            api, number = self._apis[func], _next()
            site = self.sites.of(frame)
            self.recorded_ops = seq = self.recorded_ops + 1
            self._ring.append((seq, api, site, number, number + nodes, (), (), (), (), (), None))
        except Exception as trouble:
            self.internal_error("a call was not recorded", trouble)

    def seen_before(self, argument: str) -> dict[str, float] | None:
        """Return what earlier calls of the running line gave to an argument of the op.

        Asked while the call is being made, as ``{"calls": 41, "min": 0, "max": 9}``; ``None``
        where it is the first.
        """
        frame: FrameType | None = _getframe(1)
        while frame is not None and frame.f_code is not _HANDLER:
            frame = frame.f_back
        if frame is None or frame.f_back is None:
            return None
        caller = caller_of(frame.f_back)
        return self._seen.find(caller, self.sites.of(frame), argument)

    # --- failures --------------------------------------------------------------------------------

    def _failed(self, func: Any, args: tuple[Any, ...], kwargs: Any, error: BaseException) -> None:
        """Hang the call on the exception that it raised, unless an inner call is there."""
        try:
            if not isinstance(error, Exception):
                return
            call = api_call_of(error)
            if call is None:
                call = ApiCall(func=None)
                self.attach(call, error)
            if call.func is None:
                frame = caller_of(_getframe(2))
                call.func, call.args, call.kwargs = func, args, kwargs or {}
                call.code, call.lasti = (frame.f_code, frame.f_lasti) if frame else (None, 0)
                self.recorded_ops += 1
                site = self.sites.of(frame)
                if self.passes:
                    site = self._of_worker(site, 0, 0)[0]
                if call.node is None and (node := _torch.current_node()) is not None:
                    call.node = NodeMark(node.name(), node._sequence_nr())
                call.site = site
            self.note_end(error, call)
        except Exception as trouble:
            self.internal_error("the failing call was not recorded", trouble)
        finally:
            self._read.clear()

    def attach(self, call: ApiCall, error: BaseException) -> None:
        """Let an exception carry a call, until the recorder is closed."""
        error.__dict__[ATTRIBUTE] = call  # a class may forbid attributes
        self._live.add(call)

    def note_end(self, error: BaseException, call: ApiCall | None) -> None:
        """Keep what ended the device's context; every later call fails only because of it."""
        try:
            if isinstance(error, DeviceAssertError) or not self._is_fatal(error):
                return
            if not self.is_over:
                self.is_over, self.fatal = True, call
                if call is not None:
                    self._live.add(call)
            if self._on_device_end is not None:
                self._on_device_end(error)
        except Exception as trouble:
            self.internal_error("a lost device was not noted", trouble)

    def internal_error(self, what: str, error: Exception) -> None:
        """Note what the recorder failed to do; what only came out of it is raised on."""
        raise_if_outside(error)
        self._noted.add(f"{what}: {type(error).__name__}: {error}")

    def let_go(self) -> None:
        """Forget all tensors: torch is about to swap some, and refuses those with references."""
        self._ring.clear()
        self._batches.clear()


def _versions_of(tensors: list[Tensor]) -> list[int] | None:
    """Return the versions of tensors; ``None`` where one is of inference mode and has none."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError as error:
        raise_if_outside(error)
        return None


_HANDLER: CodeType = RecordingMode.__torch_function__.__code__
