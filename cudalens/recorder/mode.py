"""The flight recorder: a function mode that records each API call and keeps no tensor alive.

It records only what cannot be looked up later, and formats nothing before a failure.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from cudalens.core._python import raise_if_outside
from cudalens.core._torch import Unseen, current_node, is_accelerator, is_plain
from cudalens.core.call import THREAD, ApiCall, Extreme, NodeMark
from cudalens.core.errors import DeviceAssertError
from cudalens.core.limits import Limits
from cudalens.recorder import _torch
from cudalens.recorder._torch import device_of, on_host, version_of
from cudalens.recorder.backward import BackwardPass
from cudalens.recorder.calls import Api, Apis, Write, describe_results, writes_of
from cudalens.recorder.dataloader import Batches
from cudalens.recorder.earlier_values import EarlierValues, caller_of
from cudalens.recorder.replaced import REPLACED, forget, here
from cudalens.recorder.sites import RawSite, Site, SiteTracker
from cudalens.recorder.tensor_refs import NO_TENSORS, Ref, tensors_in

# A global is one dictionary lookup; an attribute of a module is two.
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
        watch: checks the result of each call, and the gradients of each node of a backward pass.
            The call raises what it returns.
        is_fatal: returns whether the device cannot be used after an exception.
        on_device_end: called with each exception after which the device is lost. The first may
            come on a thread of autograd's, and again where ``backward`` was called.
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
        """Internal failures of the recorder, one line each."""
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=max_ops)
        self._apis = Apis()
        self.sites = SiteTracker()
        self.passes: list[BackwardPass] = []
        """The running backward passes, innermost last."""
        self._batches = Batches()
        self._frozen: deque[tuple[Ref, RawSite]] = deque(maxlen=max_ops)
        self._failed_calls: WeakValueDictionary[int, ApiCall] = WeakValueDictionary()
        """Calls that raised, by the ``id`` of a frame of ours in the traceback.

        Only that frame keeps the call alive, so the call is freed with the exception, and the
        exception itself needs no attribute of ours.
        """
        self.devices: set[torch.device] = set()
        """The devices that recorded calls ran on."""
        self.is_synchronous = sync
        self._thread = threading.get_ident()
        self.watch = watch
        self._is_fatal, self._on_device_end = is_fatal, on_device_end
        self._seen = EarlierValues()
        self._read: list[Extreme] = []
        """Extremes that guards have read for the running call."""
        self._opened_on = THREAD.running

    def last_call(self) -> tuple[str, RawSite]:
        """Return name and place of the call recorded last."""
        _, api, site, *_ = self._ring[-1]
        return api.name, site

    # --- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            register_module_forward_pre_hook(self.sites.enter_module)
            register_optimizer_step_pre_hook(self.sites.enter_step)
            if self.watch is not None and not self.watch.is_strict:
                register_optimizer_step_pre_hook(self._before_step)
                register_optimizer_step_post_hook(self._after_step)
            REPLACED.install(self)
            here().append(self)
            self._thread, self._opened_on = threading.get_ident(), THREAD.running
            self._opened_on.extremes += (self._read,)
            self.install()
            return self
        except BaseException:
            self._close()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._close()
        except BaseException:  # an interrupt cut the cleanup short, and each step is idempotent
            self._close()
            raise

    def _close(self) -> None:
        try:
            self.remove()
            if threading.get_ident() != self._thread:
                self._apis = _Closed(self)  # a mode stack can be changed by its own thread alone
        finally:
            _torch.remove_hooks(
                *(self.sites.enter_module, self.sites.enter_step),
                *(self._before_step, self._after_step),
            )
            REPLACED.remove(self)
            forget(self)
            others = (item for item in self._opened_on.extremes if item is not self._read)
            self._opened_on.extremes = tuple(others)
            for call in (*self._failed_calls.values(), self.fatal):
                if call is not None:
                    call.release()

    # --- recording -------------------------------------------------------------------------------

    def __torch_function__(  # noqa: PLR0912  the hot path: a helper costs a call for each op
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        __tracebackhide__ = True
        # Bound first, so that the handler below can clear them: a traceback that the user keeps
        # holds this frame, and with it every tensor of these variables.
        tensors: Any = None
        versions: list[int] | None = _UNWRITTEN
        hides: object = False
        api = device = result = value = listed = running = outer = None
        is_called = False
        try:
            frame = _getframe(1)
        except ValueError:  # torch itself calls, on a thread of autograd's: no caller to record
            return func(*args, **(kwargs or {}))
        try:
            try:  # a failure in here is ours, so the call runs unrecorded
                api = self._apis[func]
                if not api.is_quiet:
                    if api.forgets:
                        kwargs = _torch.forgotten_keywords(func, frame) | (kwargs or {})
                    # Other modes and subclasses must not see the calls of the recorder itself.
                    hides = api.is_special or (types and types != _PLAIN) or _has_modes_below()
                    tensors = []
                    for value in (*args, *kwargs.values()) if kwargs else args:
                        kind = type(value)
                        if kind is Tensor or kind is Parameter:
                            tensors.append(value)
                        elif kind not in NO_TENSORS:
                            listed = tensors_in((value,))
                            tensors += listed
                            hides = hides or not _TENSORS.issuperset(map(type, listed))
                    may_write = api.may_write or (kwargs and "out" in kwargs)
                    if hides:
                        with Unseen():
                            device = _device_of(tensors)
                            if may_write:
                                versions = self._versions(api, args, tensors)
                    else:
                        if tensors and not tensors[0].is_cpu:
                            device = tensors[0].device
                        if may_write:
                            versions = self._versions(api, args, tensors)
            except Exception as trouble:
                self.internal_error("a call was not recorded", trouble)
                api = None
            if api is None or api.is_quiet:
                is_called = True
                result = func(*args, **kwargs) if kwargs else func(*args)
                if api is not None and api.is_shown:
                    self._look_at_shown(api, args, result, frame)
                return result
            if device is not None:
                self._wait(device)  # for what Triton, CuPy or a graph launched
            # Only a backward pass brings the mode to another thread.
            running = THREAD.running if self.passes else self._opened_on
            outer, running.call = running.call, (func, args, kwargs, frame)
            is_called, number = True, _next()
            result = func(*args, **kwargs) if kwargs else func(*args)
            if hides or type(result) is not Tensor or not result.is_cpu:
                with Unseen():
                    self._wait_after(tensors, result)
                    self._note(api, args, kwargs, tensors, versions, number, result, frame)
            else:
                self._note(api, args, kwargs, tensors, versions, number, result, frame)
            running.call = outer
            return result
        except BaseException as error:
            if running is not None:
                running.call = outer
            if is_called:
                # A local variable, because `_failed_calls` holds the call weakly.
                _held = self.failed(func, args, kwargs, error, frame)
            else:  # the wait before the call raised a fault that an earlier launch left
                self.note_end(error, None)
            args, kwargs, tensors, result, value, listed = (), None, None, None, None, None
            running = outer = frame = None  # type: ignore[assignment]
            raise

    def _versions(self, api: Api, args: tuple[Any, ...], tensors: list[Tensor]) -> list[int] | None:
        """Return the version counters of a call's tensors, and show the watch what it overwrites.

        ``None`` where a tensor was made in inference mode, which keeps no version counter.
        """
        __tracebackhide__ = True
        if api.is_in_place and self.watch is not None:
            self.ask_watch(self.watch.before, api, args)
        try:
            return [*map(version_of, tensors)]
        except RuntimeError as error:
            raise_if_outside(error)
            return None

    def _look_at_shown(
        self, api: Api, args: tuple[Any, ...], result: Any, frame: FrameType
    ) -> None:
        """Show the watch what reaches the host through a call that is not recorded."""
        __tracebackhide__ = True
        if not api.freezes:
            if self.watch is not None:
                self.ask_watch(self.watch.read, api, args, result, self.sites.of(frame))
            return
        try:
            with Unseen():
                # `requires_grad_(False)`: a later report can name this line for a missing gradient.
                if args and type(args[0]) in _TENSORS and not args[0].requires_grad:
                    self._frozen.append((ref(args[0]), self.sites.of(frame)))
        except Exception as trouble:
            self.internal_error("a frozen tensor was not noted", trouble)

    def frozen_at(self, tensors: Sequence[Tensor]) -> list[RawSite]:
        """Return where each tensor was last frozen; empty unless all of them were."""
        last = {id(item()): site for item, site in self._frozen}
        sites = [last.get(id(it)) for it in tensors]
        return [] if None in sites else [it for it in sites if it is not None]

    def _wait_after(self, tensors: list[Tensor], result: Any) -> None:
        """Wait for the device of a finished call, if the call may have launched a kernel."""
        if type(result) in _ANSWERS:
            return  # a Python number: reading it has waited for the device
        try:
            device = _device_of((*tensors_in((result,)), *tensors))
        except Exception as trouble:
            self.internal_error("a call was not waited for", trouble)
        else:
            if device is not None:
                self._wait(device)

    def _wait(self, device: torch.device) -> None:
        if is_accelerator(device):
            self.devices.add(device)
            if self.is_synchronous:
                _torch.wait_if_busy(device)

    def wait_for_current_device(self) -> None:
        """Wait for the current CUDA device, around launches that no function mode sees."""
        if torch.cuda.is_initialized():
            self._wait(torch.device("cuda", torch.cuda.current_device()))

    def wait_for_all(self) -> None:
        """Wait for every device that calls ran on, if the recorder is synchronous."""
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
        """Record a finished call, and show its result to the watch.

        Args:
            number: autograd's next sequence number before the call.
        """
        __tracebackhide__ = True
        written: tuple[Write, ...] = ()
        is_brief = False
        try:
            last, site = _next(), self.sites.of(frame)
            if self.passes:
                site, number, last = self._of_worker(site, number, last)
            if versions is not _UNWRITTEN:
                written = writes_of(api, tensors, versions, args, kwargs)
            output: Any
            shape: Any
            kind = type(result)
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
                if not api.is_backward:  # there, guards have read for many calls, not for one
                    self._seen.note(frame, site, self._read, seq)
                self._read.clear()
        except Exception as trouble:
            self.internal_error("a call was not recorded", trouble)
        watch = self.watch
        # The intermediate results of an optimizer are its own. Its parameters are checked after
        # the step.
        if watch is None or (is_brief and not watch.is_strict):
            return
        try:
            is_asked = api.makes_values or watch.marked
            finding = watch(api, args, kwargs, result, written) if is_asked else None
        except Exception as trouble:
            self.internal_error("a result was not looked at", trouble)
        else:
            if finding is not None:
                raise finding

    def ask_watch(
        self, look: Callable[..., BaseException | None], *args: Any, **options: Any
    ) -> None:
        """Run a check of the watch, and raise its finding."""
        __tracebackhide__ = True
        try:
            finding = look(*args, **options)
        except Exception as trouble:
            self.internal_error("a result was not looked at", trouble)
        else:
            if finding is not None:
                raise finding

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.ask_watch(self.watch.steps.before, optimizer, self.sites.of(_getframe(1)))

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.ask_watch(self.watch.steps.after, optimizer, self.sites.of(_getframe(1)))

    def _of_worker(self, site: RawSite, number: int, last: int) -> tuple[RawSite, int, int]:
        """Return place and sequence numbers of a call in backward, maybe on an autograd thread.

        Such a thread has a sequence counter of its own, and its stack does not reach the line that
        called ``backward``.
        """
        if threading.get_ident() == self._thread:
            return site, number, last
        here = threading.get_ident()
        passes = [item for item in self.passes if here in item.marks]
        # The innermost pass with a node on this thread knows the user's line that started it.
        outer = passes[-1].site if passes else None
        if outer is not None:
            if site is None:
                site = outer
            elif isinstance(site, tuple) and site[2] is None:
                site = (*site[:2], outer)
        return site, 0, 0

    def note_batch(self, iterator: Any, *, indices: Any = None, data: Any = None) -> None:
        """Record the indices or the tensors of a data loader's batch."""
        try:
            if indices is not None:
                self._batches.note_indices(iterator, indices)
            else:
                self._batches.note(iterator, data, self.recorded_ops)
        except Exception as trouble:
            self.internal_error("a batch was not noted", trouble)

    def note_call(self, func: Any, frame: FrameType | None, nodes: int = 0) -> None:
        """Record a call that no function mode sees, and how many autograd nodes it will make."""
        try:
            api, number = self._apis[func], _next()
            site = self.sites.of(frame)
            self.recorded_ops = seq = self.recorded_ops + 1
            self._ring.append((seq, api, site, number, number + nodes, (), (), (), (), (), None))
        except Exception as trouble:
            self.internal_error("a call was not recorded", trouble)

    def seen_before(self, argument: str) -> dict[str, float] | None:
        """Return the range that earlier calls of the running line passed for an argument of the op.

        For use during the call: ``{"calls": 41, "min": 0, "max": 9}``, or ``None`` in the first
        call.
        """
        call = THREAD.running.call
        if call is None:
            return None
        caller = caller_of(call[3])
        return self._seen.find(caller, self.sites.of(call[3]), argument)

    # --- failures --------------------------------------------------------------------------------

    def call_of(self, error: BaseException | None) -> ApiCall | None:
        """Return the innermost recorded API call that raised an exception, ``None`` without one."""
        return None if error is None else self._call_in(error.__traceback__)

    def _call_in(self, traceback: TracebackType | None) -> ApiCall | None:
        innermost = None
        while traceback is not None:
            innermost = self._failed_calls.get(id(traceback.tb_frame), innermost)
            traceback = traceback.tb_next
        return innermost

    def failed(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Any,
        error: BaseException,
        frame: FrameType,
        own: FrameType | None = None,
    ) -> ApiCall | None:
        """Return the innermost call that raised an exception, for its frame to keep alive.

        Args:
            frame: the frame that made the call.
            own: the frame that keeps it alive, if not the caller's.
        """
        call = None
        try:
            if not isinstance(error, Exception):
                return None
            traceback = error.__traceback__
            # A recorded call inside this one may have raised it, and has registered itself.
            call = None if traceback is None else self._call_in(traceback.tb_next)
            if call is None:
                call = ApiCall(func=None)
                self.attach(call, own or _getframe(1))
            if call.func is None:
                caller = caller_of(frame)
                call.func, call.args, call.kwargs = func, args, kwargs or {}
                call.code, call.lasti = (caller.f_code, caller.f_lasti) if caller else (None, 0)
                self.recorded_ops += 1
                site = self.sites.of(caller)
                if self.passes:
                    site = self._of_worker(site, 0, 0)[0]
                if call.node is None:
                    call.node = NodeMark.of(current_node())
                call.site = site
            self.note_end(error, call)
        except Exception as trouble:
            self.internal_error("the failing call was not recorded", trouble)
        finally:
            self._read.clear()
        return call

    def attach(self, call: ApiCall, frame: FrameType) -> None:
        """Register a call, so that :meth:`call_of` finds it from the traceback.

        Args:
            frame: a frame in that traceback, which keeps the call in a local variable.
        """
        self._failed_calls[id(frame)] = call

    def note_end(self, error: BaseException, call: ApiCall | None) -> None:
        """Remember the first call that ended the device's context: all later ones fail of it."""
        try:
            if isinstance(error, DeviceAssertError) or not self._is_fatal(error):
                return
            if not self.is_over:
                self.is_over, self.fatal = True, call
            if self._on_device_end is not None:
                self._on_device_end(error)
        except Exception as trouble:
            self.internal_error("a lost device was not noted", trouble)

    def internal_error(self, what: str, error: Exception) -> None:
        """Log an internal failure; raise what came from outside, such as an interrupt."""
        raise_if_outside(error)
        self._noted.add(f"{what}: {type(error).__name__}: {error}")

    def let_go(self) -> None:
        """Drop all references: ``torch.utils.swap_tensors`` rejects tensors with weak ones."""
        self._ring.clear()
        if self.watch is not None:
            self.watch.let_go()
        self._batches.clear()


class _Closed(Apis):
    """Function table of a recorder that another thread has closed; every function is quiet.

    The first call that still reaches the recorder removes it from that thread's mode stack.
    """

    def __init__(self, recorder: RecordingMode) -> None:
        super().__init__()
        self._recorder = recorder

    def __getitem__(self, func: Any) -> Api:
        """Return a quiet entry, whatever the function."""
        self._recorder.remove_soon()
        return _UNKNOWN


_UNKNOWN = Api(Tensor.size)
_UNKNOWN.is_quiet = True


def _device_of(tensors: Sequence[Tensor]) -> torch.device | None:
    """Return the device of the first accelerator tensor, ``None`` without one."""
    for item in tensors:
        if not on_host(item) and is_plain(item):
            return device_of(item)
    return None
