"""Calls that wait for deferred guards: values reach the host, a parameter, a file, another rank.

In these places the host waits anyway, or a result of a bad call would leave.  What is pending is
looked at first, and a finding is raised before anything is read, written or sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from cudalens.core import _torch
from cudalens.core._python import Uninterrupted
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
_COPY = "aten::copy_"
"""``cpu``, ``tolist``, ``to``, ``host[...] = x``, ``torch.save``: all of them copy."""
_ALWAYS = ("c10d::", "_c10d_functional::", "aten::_amp_foreach_non_finite_check_and_unscale_")
"""Sends; and the first call of a gradient scaler in a step.  Were a finding raised behind
it, the scaler would take the gradients of the next step for unscaled ones."""
_NOTHING_SENT = ("barrier", "recv", "wait_tensor", "monitored")
_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update")
"""Write to the running statistics, arguments 3 and 4, unless argument 5 (training) is false."""
_MOST_WRITTEN = 256

Settle = Callable[[], BaseException | None]
_Again = Callable[[], None]


class HostWaits:
    """Kernels and a hook that settle what is pending before they go on.

    Args:
        settle: waits if it may, and returns what is to be raised.
        devices: the device types that guards act on.
        count: returns how many guarded calls there were.
        on_failed_call: told what a call raised.
    """

    def __init__(
        self,
        settle: Settle,
        devices: frozenset[str],
        count: Callable[[], int],
        on_failed_call: Callable[[BaseException], None],
    ) -> None:
        self._on_failed_call = on_failed_call
        self._settle, self._bits = settle, _torch.backend_bits(devices)
        self._has_host = "cpu" in devices
        self.count = count
        self._undo: list[Callable[[], object]] = []
        self._again: WeakKeyDictionary[Optimizer, _Again] = WeakKeyDictionary()
        """The optimizers that were seen, each with what raises a finding that was caught again."""
        self._buffers: deque[tuple[int, ref[Tensor]]] = deque(maxlen=_MOST_WRITTEN)

    def install(self) -> None:
        """Put everything in; does nothing twice."""
        if self._undo:
            return
        kernels = {name: self._kernel(name, self._wait) for name in _READS}
        # Nothing is copied from the host to the host, and there are many such copies.
        if not self._has_host:
            kernels[_COPY] = self._kernel(_COPY, self._before_copy)
        for name in _torch.all_op_names():
            if name.startswith(_ALWAYS) and not any(word in name for word in _NOTHING_SENT):
                kernels[name] = self._kernel(name, self._wait)
            elif name.removeprefix("aten::") in _NORMS:
                kernels[name] = self._kernel(name, self._before_norm)
        with Uninterrupted():
            self._undo.append(partial(_torch.destroy, _torch.register_kernels(kernels)))
            self._undo.append(register_optimizer_step_pre_hook(self._before_step).remove)

    def remove(self) -> None:
        """Take everything out; does nothing twice."""
        with Uninterrupted():
            for _ in range(len(self._undo)):
                self._undo.pop()()

    def _wait(self, *_: Any, **__: Any) -> None:
        """Raise what is found among the checks that are pending."""
        error = self._settle()
        if error is not None:
            try:
                raise error
            finally:
                del error

    def written_since(self, count: int) -> tuple[Tensor, ...]:
        """Return the running statistics that were written since a guarded call, by its number."""
        written = [item() for number, item in list(self._buffers) if number >= count]
        return tuple({id(item): item for item in written if item is not None}.values())

    def note_finding(self, error: BaseException) -> None:
        """Take note that a finding is raised: gradients that are there now may come of it."""
        for optimizer in list(self._again):
            self._again[optimizer] = _raiser_while_left(optimizer, error)

    def _kernel(self, name: str, before: Callable[..., None]) -> Callable[..., Any]:
        op = _torch.op_of(name)
        go_on, below = _torch.redispatcher(op)
        kinds = [str(item.type) for item in op._schema.arguments if not item.has_default_value()]
        places = [at for at, kind in enumerate(kinds) if kind == "Tensor"]
        numbers, bits = _torch.NUMBERS, self._bits

        # Every read and every copy passes here, so speed comes before form.
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
                self._on_failed_call(error)
                args, kwargs = (), {}  # a traceback that stays keeps this frame
                raise

        return waiting

    def _before_copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> None:
        # A copy that does not wait is used at a later place, which nobody can see.
        if target.is_cpu and not (non_blocking or source.is_cpu):
            self._wait()

    def _before_norm(self, *args: Any, **kwargs: Any) -> None:
        if args[5] is not False:
            written = (item for item in args[3:5] if isinstance(item, Tensor))
            self._buffers.extend((self.count(), ref(item)) for item in written)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._again.setdefault(optimizer, _nothing)
        closure: Any = args[1] if len(args) > 1 else kwargs.get("closure")

        def wait() -> None:
            self._wait()
            self._again.get(optimizer, _nothing)()

        def closed(*args: Any, **kwargs: Any) -> Any:
            loss = closure(*args, **kwargs)
            wait()
            return loss

        if closure is None:
            wait()
            return None
        if len(args) > 1:
            return (args[0], closed, *args[2:]), kwargs
        return args, {**kwargs, "closure": closed}


def _nothing() -> None:
    """Raise nothing."""


def _raiser_while_left(optimizer: Optimizer, error: BaseException) -> _Again:
    """Return what raises a finding once more while the gradients that are there now are left."""
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    first = next(
        (item for item in parameters if item.requires_grad and item.grad is not None), None
    )
    if first is None:
        return _nothing
    parameter, gradient, version = ref(first), ref(first.grad), first.grad._version
    kind, report = type(error), getattr(error, "report", None)
    headline = str(error).partition("\n")[0]

    # Asked before the next backward pass adds to it, which counts a version as zeroing does.
    @cache
    def was_left() -> bool:
        hook.remove()
        values = gradient()
        return values is not None and values._version == version

    def look(_: object) -> None:
        was_left()

    def raise_while_left() -> None:
        owner = parameter()
        is_there = owner is not None and owner.grad is not None and owner.grad is gradient()
        if was_left() and is_there:
            message = (
                f"{headline}: the gradients of that step are still there; call zero_grad() where "
                "the error is caught"
            )
            raise kind(message, report)

    hook = first.register_hook(look)
    return raise_while_left
