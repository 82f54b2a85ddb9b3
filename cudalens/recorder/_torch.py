"""The private and version-dependent names of torch that the recorder needs, and why."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch._C._autograd import _get_sequence_nr
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode

from cudalens.core._torch import wait_for, without_modes

# Called once or twice for each recorded call, so bound without a Python wrapper.
next_sequence_nr: Callable[[], int] = _get_sequence_nr
"""Return the sequence number of the next autograd node of this thread."""
function_modes: Callable[[], int] = _len_torch_function_stack
"""Return how many function modes are active on this thread."""
TRACERS: tuple[tuple[Any, str], ...] = (
    (torch._C, "_create_graph_by_tracing"),
    (torch._C, "_create_function_from_trace"),
    (torch._C, "_create_function_from_trace_with_dict"),
    (torch._C.ScriptModule, "_create_method_from_trace"),
    (torch._C.ScriptModule, "_create_method_from_trace_with_dict"),
)
"""The functions in which torch.jit.trace and ONNX run what they trace."""
LoaderIterator: Any = torch.utils.data.dataloader._BaseDataLoaderIter
functorch_utils: Any = torch._functorch.utils
are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active

# The attributes as the base class has them.  A subclass may override them with properties that
# raise, or that have side effects.
_BASE: Any = torch._C.TensorBase
on_host: Callable[[Tensor], bool] = _BASE.is_cpu.__get__
device_of: Callable[[Tensor], torch.device] = _BASE.device.__get__
shape_of: Callable[[Tensor], torch.Size] = _BASE.shape.__get__
dtype_of: Callable[[Tensor], torch.dtype] = _BASE.dtype.__get__
version_of: Callable[[Tensor], int] = _BASE._version.__get__
is_view: Callable[[Tensor], bool] = _BASE._is_view
is_contiguous: Callable[[Tensor], bool] = _BASE.is_contiguous
offset_of: Callable[[Tensor], int] = _BASE.storage_offset
stride_of: Callable[[Tensor], tuple[int, ...]] = _BASE.stride
is_of_inference: Callable[[Tensor], bool] = _BASE.is_inference


class RemovableMode(TorchFunctionMode):
    """A function mode that can be removed from any position in the mode stack."""

    def install(self) -> None:
        """Put this mode on top of the stack."""
        _push_on_torch_function_stack(self)

    def is_on(self) -> bool:
        """Return whether this mode is on the stack of the running thread."""
        return self in map(_get_function_stack_at, range(_len_torch_function_stack()))

    def remove(self) -> None:
        """Remove this mode from the stack, also from below modes that the user left on it.

        In a loop, because an interrupt may have left it there twice.
        """
        above: list[Any] = []
        while self.is_on():
            mode = _pop_torch_function_stack()
            if mode is not self:
                above.append(mode)
        for mode in reversed(above):
            _push_on_torch_function_stack(mode)

    def remove_soon(self) -> None:
        """Remove this mode from the stack of this thread once its handler has returned.

        While the handler runs, torch has popped the mode, and pushes it again afterwards.  So a
        profile function does it at the next call of the thread, unless the user has one.
        """

        def remove(*_: object) -> None:
            if self.is_on():
                # Only one call is needed, and a profile function slows down every call of the
                # thread.
                sys.setprofile(None)
                self.remove()

        if sys.getprofile() is None:
            sys.setprofile(remove)


class WithoutOurs:
    """Context manager that pops the recorders from the top of this thread's mode stack."""

    __slots__ = ("_ours",)

    def __enter__(self) -> None:
        """Pop them."""
        self._ours: list[Any] = []
        try:
            while (size := _len_torch_function_stack()) and isinstance(
                _get_function_stack_at(size - 1), RemovableMode
            ):
                self._ours.append(_pop_torch_function_stack())
        except BaseException:  # an interrupt: Python calls no `__exit__` of a failed `__enter__`
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """Push them again, in their order."""
        for mode in reversed(self._ours):
            _push_on_torch_function_stack(mode)


class WithoutTop:
    """Context manager that pops the top mode, as torch does while its handler runs."""

    __slots__ = ("_mode",)

    def __enter__(self) -> Any:
        """Pop it and return it."""
        self._mode = _pop_torch_function_stack()
        return self._mode

    def __exit__(self, *_: object) -> None:
        """Push it again."""
        _push_on_torch_function_stack(self._mode)


def removable_modes() -> list[Any]:
    """Return the recorders on the stack of this thread, innermost last."""
    stack = map(_get_function_stack_at, range(_len_torch_function_stack()))
    return [mode for mode in stack if isinstance(mode, RemovableMode)]


def forgotten_keywords(func: Any, frame: FrameType) -> dict[str, Any]:
    """Return the keyword arguments that a function of torch's does not pass on to function modes.

    Read from the function's own frame, because the mode receives nothing of them.

    Args:
        func: the function.
        frame: the frame that called the mode.
    """
    own = frame.f_back
    if own is None or own.f_code is not getattr(func, "__code__", None):
        return {}
    return {name: own.f_locals[name] for name in func.__kwdefaults__ or ()}


def remove_hooks(*ours: Callable[..., None]) -> None:
    """Remove global module and optimizer hooks by identity: an interrupt may lose the handles."""
    for hooks in (
        torch.nn.modules.module._global_forward_pre_hooks,
        *(_global_optimizer_pre_hooks, _global_optimizer_post_hooks),
    ):
        for key in [key for key, hook in hooks.items() if hook in ours]:
            hooks.pop(key, None)


def wait_if_busy(device: torch.device) -> None:
    """Wait for the current stream of a device unless it is idle; raise its pending fault."""
    if device.type == "cuda":
        # A wait while a CUDA graph is captured is an error that ends the capture.
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(device)
        if not stream.query():
            wait_for(stream)
    else:
        module: Any = torch.get_device_module(device)
        module.synchronize()


# One for each thread: two passes that run at once must not replace each other's hook.
class _Carrier(threading.local):
    """A tensor of this thread whose hook dictionary is registered with autograd nodes."""

    def __init__(self) -> None:
        self.tensor: Any = without_modes(partial(torch.empty, 0, device="cpu"))


_carrier = _Carrier()


def before_nodes(
    hook: Callable[[Any], None],
) -> tuple[Callable[[Any], None], Callable[[], None]]:
    """Return a function that adds a pre-hook to an autograd node, and one that removes them all.

    ``_register_hook_dict`` takes a third of the time of ``register_prehook``.  It leaves a
    dictionary on the node, so use it for graphs that run once.  ``AccumulateGrad`` ignores it.
    """
    carrier = _carrier.tensor
    hooks = carrier._backward_hooks = {0: hook}

    def before_node(node: Any) -> None:
        node._register_hook_dict(carrier)

    return before_node, hooks.clear


is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Return whether a tensor is a functorch wrapper, which has no storage of its own."""


def physical(tensor: Tensor) -> Tensor:
    """Return the innermost tensor of a functorch wrapper: the one with the values."""
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


# --- gradients of our own copies ------------------------------------------------------------------


@contextmanager
def autograd_of_copies() -> Iterator[None]:
    """Enable autograd for our own copies, also inside ``no_grad`` or below the autograd keys.

    Identity hooks shadow the user's saved-tensor hooks, which must not see our copies.
    """
    keys = torch._C.DispatchKey
    hidden = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor):
        hidden = hidden.remove(key)
    shown = torch._C._dispatch_tls_local_include_set()
    with (
        torch._C._ForceDispatchKeyGuard(shown, hidden),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ):
        yield


def gradients(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Return gradients straight from autograd's engine, so that no recorder sees the pass."""
    run = torch.autograd.Variable._execution_engine.run_backward
    # The flags are keep_graph and create_graph, both off, and allow_unreachable, which gives None
    # for an input that the outputs do not depend on.
    return run(
        tuple(outputs), tuple(grads), False, False, tuple(inputs), True, accumulate_grad=False
    )


# --- functions of torch that are replaced while a recorder is open --------------------------------


class Replaced:
    """Replacements for functions of torch whose calls reach no function mode.

    Args:
        functions: by owner and name, a function that makes the replacement from the original.
    """

    def __init__(
        self, functions: dict[tuple[Any, str], Callable[[Callable[..., Any]], Callable[..., Any]]]
    ) -> None:
        # A release of torch may lack one of these private functions.
        self._functions = {key: make for key, make in functions.items() if hasattr(*key)}
        self._ours: dict[tuple[Any, str], Callable[..., Any]] = {}
        self._before: dict[tuple[Any, str], Callable[..., Any]] = {}
        self._users: dict[int, object] = {}

    # No lock: an interrupt could leave it locked.  Each step is one atomic operation on a dict.

    def install(self, user: object) -> None:
        """Replace the functions until each user has called :meth:`remove`."""
        self._users[id(user)] = user
        self._put_in()

    def remove(self, user: object) -> None:
        """Restore the originals after the last user, except those that others have replaced."""
        self._users.pop(id(user), None)
        if not self._users:
            self._put_back()
            if self._users:  # another thread has installed them meanwhile
                self._put_in()

    def _put_in(self) -> None:
        # vars() gives the plain function of a method, where getattr() would bind it.
        for key, make in self._functions.items():
            owner, name = key
            if key not in self._ours:
                before = self._before.setdefault(key, vars(owner)[name])
                self._ours.setdefault(key, make(before))
            if vars(owner)[name] is self._before[key]:
                setattr(*key, self._ours[key])

    def _put_back(self) -> None:
        for key in list(self._ours):
            owner, name = key
            ours = self._ours[key]
            if vars(owner)[name] is ours:
                setattr(*key, self._before[key])
            self._ours.pop(key)
            # More references than this variable and the argument of getrefcount: a module has run
            # `from torch import …` during the block, and keeps the replacement under its name.
            if isinstance(ours, FunctionType) and sys.getrefcount(ours) > _OWN_REFERENCES:
                for names in gc.get_referrers(ours):
                    if type(names) is dict:
                        for it in [it for it, value in list(names.items()) if value is ours]:
                            names[it] = self._before[key]


_OWN_REFERENCES = 2


def remove_stance(ours: Any) -> None:
    """Undo a compiler stance of ours, unless another one was set since.

    Args:
        ours: the return value of ``torch.compiler.set_stance``.
    """
    if torch._dynamo.eval_frame._stance is ours.stance:
        ours.__exit__(None, None, None)
    # A stance that the program set inside restores ours when it ends: make ours the earlier one.
    vars(ours.stance).update(vars(ours.prev))
