"""Calls that settle deferred guards: values reach the host, a parameter, a file, another rank.

There the host waits anyway, or the result of a bad call would escape.  Pending checks are settled
first, and a finding is raised before anything is read, written or sent.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from cudalens.core import _torch
from cudalens.core._python import live_instances
from cudalens.guards import GUARDS
from cudalens.guards.pending import PENDING

_COPY = "aten::copy_"
"""Called by ``cpu``, ``tolist``, ``to``, ``host[...] = x`` and ``torch.save``."""
_ALWAYS = ("c10d::", "_c10d_functional::", "aten::_amp_foreach_non_finite_check_and_unscale_")
"""Collectives, and the first call of a gradient scaler in a step.  If a finding were raised after
it, the scaler would treat the next step's gradients as already unscaled."""
_NOTHING_SENT = ("barrier", "recv", "wait_tensor", "monitored")
_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update")
"""Write to the running statistics, arguments 3 and 4, unless argument 5 (training) is false."""
_MOST_WRITTEN = 256


class HostWaits:
    """Kernels and an optimizer hook that settle pending checks first.

    Args:
        settle: waits if it may, and returns what is to be raised; by this thread, and in place of
            other threads that it is given.
        devices: the device types that guards act on.
        count: returns how many guarded calls there were.
        on_failed_call: told what a call raised, and its arguments.
    """

    def __init__(
        self,
        settle: Callable[[Collection[int]], BaseException | None],
        devices: frozenset[str],
        count: Callable[[], int],
        on_failed_call: Callable[[BaseException, Any], None],
    ) -> None:
        self._on_failed_call = on_failed_call
        self._settle, self._bits = settle, _torch.backend_bits(devices)
        self._has_host = "cpu" in devices
        self.count = count
        self._left: WeakKeyDictionary[Optimizer, _LeftGradients] = WeakKeyDictionary()
        self._steppers: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()
        """By optimizer, the threads that have called its step."""
        self._buffers: deque[tuple[int, ref[Tensor]]] = deque(maxlen=_MOST_WRITTEN)

    def install(self) -> Callable[[], None]:
        """Install all of them; return the function that removes them."""
        # Guarded ops that read values are settled by their guard's kernel.
        reads = _torch.ops_that_read() - {op.name() for op in GUARDS}
        kernels = {name: self._kernel(name, self._wait) for name in reads}
        # If guards act on the CPU (tests), no copy is one to the host, and copies are frequent.
        if not self._has_host:
            kernels[_COPY] = self._kernel(_COPY, self._before_copy)
        for name in _torch.all_op_names():
            if name.startswith(_ALWAYS) and not any(word in name for word in _NOTHING_SENT):
                kernels[name] = self._kernel(name, self._wait)
            elif name.removeprefix("aten::") in _NORMS:
                kernels[name] = self._kernel(name, self._before_norm)
        libraries = _torch.register_kernels(kernels)
        hook = register_optimizer_step_pre_hook(self._before_step)

        def remove() -> None:
            _torch.destroy(libraries)
            hook.remove()

        return remove

    def _wait(self, *_: Any, **__: Any) -> None:
        """Settle pending checks; raise a finding."""
        __tracebackhide__ = True
        self._raise_if_found(())

    def _raise_if_found(self, others: Collection[int]) -> None:
        __tracebackhide__ = True
        error = self._settle(others)
        if error is not None:
            try:
                raise error
            finally:
                # The exception's traceback holds this frame, and the frame must not hold the
                # exception.
                del error

    def _forward_threads(self, optimizer: Optimizer) -> list[int]:
        """Return the threads with a finding that may have computed the gradients of an optimizer.

        Not a thread that may step an optimizer of its own: it has stepped another one, or another
        one was never stepped.  Its finding is raised before its own step.
        """
        others = [item for item in live_instances(Optimizer) if item is not optimizer]
        steppers = [self._steppers.get(item, set()) for item in others]
        threads = {check.thread for check in list(PENDING.findings)}
        return [thread for thread in threads if not any(not it or thread in it for it in steppers)]

    def written_since(self, count: int) -> tuple[Tensor, ...]:
        """Return the running statistics that were written since a guarded call, by its number."""
        # A copy, because other threads may add buffers meanwhile.
        written = [item() for number, item in list(self._buffers) if number >= count]
        return tuple({id(item): item for item in written if item is not None}.values())

    def note_finding(self, error: BaseException) -> None:
        """Note that a finding is raised: gradients that exist now may come from the bad call."""
        for optimizer in live_instances(Optimizer):
            # An optimizer whose constructor is still running has no groups yet.
            groups = vars(optimizer).get("param_groups", ())
            owners = (item for group in groups for item in group["params"])
            with _torch.no_torch_function():
                owner = next((p for p in owners if p.requires_grad and p.grad is not None), None)
                if owner is not None:
                    self._left[optimizer] = _LeftGradients(owner, error)

    def _kernel(self, name: str, before: Callable[..., None]) -> Callable[..., Any]:
        op = _torch.op_of(name)
        go_on, below = _torch.redispatcher(op)
        required = [item for item in op._schema.arguments if not item.has_default_value()]
        positional = [str(item.type) for item in required if not item.kwarg_only]
        places = [at for at, kind in enumerate(positional) if kind == "Tensor"]
        numbers, bits = _torch.NUMBERS, self._bits

        # The hot path of every read and copy, so written for speed.
        def waiting(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            try:
                for at in places:
                    if type(args[at]) in numbers:
                        args = (*args[:at], _torch.as_tensor(args[at]), *args[at + 1 :])
                if PENDING and keyset.raw_repr() & bits:
                    before(*args, **kwargs)
                return go_on(keyset & below, *args, **kwargs)
            except BaseException as error:
                self._on_failed_call(error, (args, kwargs))
                args, kwargs = (), {}  # a kept traceback keeps this frame
                raise

        return waiting

    def _before_copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> None:
        # A non-blocking copy returns before its data arrives, so there is nothing to stop yet.
        if target.is_cpu and not (non_blocking or source.is_cpu):
            self._wait()

    def _before_norm(self, *args: Any, **kwargs: Any) -> None:
        if args[5] is not False:
            written = (item for item in args[3:5] if isinstance(item, Tensor))
            self._buffers.extend((self.count(), ref(item)) for item in written)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        __tracebackhide__ = True
        closure: Any = args[1] if len(args) > 1 else kwargs.get("closure")

        def wait() -> None:
            __tracebackhide__ = True
            self._steppers.setdefault(optimizer, set()).add(threading.get_ident())
            self._wait()
            if PENDING.findings:  # of other running threads
                self._raise_if_found(self._forward_threads(optimizer))
            left = self._left.get(optimizer)
            if left is not None and left.is_there():
                raise left.error()

        def closed(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            loss = closure(*args, **kwargs)
            wait()
            return loss

        if closure is None:
            wait()
            return None
        if len(args) > 1:
            return (args[0], closed, *args[2:]), kwargs
        return args, {**kwargs, "closure": closed}


class _LeftGradients:
    """Gradients left over from a step in which a finding was raised, known by the first of them."""

    def __init__(self, owner: Tensor, error: BaseException) -> None:
        message = (
            f"{str(error).partition(chr(10))[0]}: the gradients of that step are still there. Call "
            "zero_grad() where the error is caught."
        )
        # Made anew each time: an exception that was raised keeps its frames, and their tensors.
        self.error: Any = partial(type(error), message, getattr(error, "report", None))
        self._watch(owner)

    def _watch(self, owner: Tensor) -> None:
        gradient: Any = owner.grad
        self._owner, self._gradient, self._version = ref(owner), ref(gradient), gradient._version
        self._was_cleared: bool | None = None
        # A hook, to look before the next backward pass accumulates: that bumps the version, too, as
        # `zero_grad(set_to_none=False)` does.
        self._hook = owner.register_hook(self._look)

    def _look(self, _: object = None) -> None:
        self._hook.remove()
        if self._was_cleared is None:
            gradient = self._gradient()
            with _torch.no_torch_function():
                self._was_cleared = gradient is None or gradient._version != self._version

    def is_there(self) -> bool:
        """Return whether they still exist, alone or accumulated with those of later steps."""
        self._look()
        owner, gradient = self._owner(), self._gradient()
        with _torch.no_torch_function():
            if owner is None or gradient is None or owner.grad is not gradient or self._was_cleared:
                return False
            if owner.requires_grad:
                self._watch(owner)  # they may still be cleared
        return True
