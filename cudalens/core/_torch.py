"""The one seam to private and version-dependent torch names.

Every name here was checked on the releases that the README lists.  Features are detected, never
inferred from a version number.
"""

from __future__ import annotations

import inspect
import keyword
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from cudalens.core.report_types import TensorMeta

ACCELERATORS = frozenset({"cuda", "xpu", "mps", "hpu", "npu", "mtia", "maia", "privateuseone"})
"""Device types on which a bad value asserts, faults or is read silently.

The one place that says where guards act; on ``cpu`` the op's own error is exact, and ``meta``
tensors have no values.
"""

BACKEND_SELECT = "BackendSelect"


def _below(key: str) -> Any:
    return torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))


def is_accelerator(device: torch.device) -> bool:
    """Return whether guards act on tensors of this device."""
    return device.type in ACCELERATORS


_AUTOGRAD_KEYS = {name: f"Autograd{name.upper()}" for name in ("cpu", "cuda", "xpu", "mps", "hpu")}
_AUTOGRAD_KEYS["privateuseone"] = "AutogradPrivateUse1"


def autograd_keys(devices: Iterable[str]) -> list[str]:
    """Return the autograd keys of some device types: where composite ops can be met."""
    return [_AUTOGRAD_KEYS[name] for name in sorted(devices) if name in _AUTOGRAD_KEYS]


def redispatcher(op: Any, key: str = BACKEND_SELECT) -> tuple[Callable[..., Any], Any]:
    """Return what goes on to the kernel below a key, as if no kernel had been there.

    Returns:
        a function of a key set and the arguments of the call, and the keys that the set of the
        call is to be cut down to.
    """
    if key != BACKEND_SELECT:
        return _decomposition(op), _below(key)
    # The overload's own method only forwards, and every guarded call would pay for it.
    handle = getattr(op, "_handle", None)
    return getattr(handle, "redispatch_boxed", op.redispatch), _below(key)


def _decomposition(op: Any) -> Callable[..., Any]:
    """Return what runs an op's composite kernel where it stands.

    A redispatch would first offer the op to the dispatch modes, which stand below autograd: the
    ops that it decomposes into would then be lost to autograd.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd

    def decompose(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return op._op_dk(key, *args, **kwargs)

    return decompose


def register_kernels(
    kernels: dict[str, Callable[..., Any]], key: str = BACKEND_SELECT
) -> list[Any]:
    """Register one kernel per full overload name; :func:`destroy` the libraries to remove them.

    A kernel is given the key set of the call first.

    Raises:
        RuntimeError: torch refused a registration; nothing stays registered.
    """
    libraries: dict[str, Any] = {}
    try:
        for name, kernel in kernels.items():
            namespace = name.partition("::")[0]
            if namespace not in libraries:
                libraries[namespace] = torch.library.Library(namespace, "IMPL")
            libraries[namespace].impl(name, kernel, key, with_keyset=True)
    except BaseException:
        destroy(libraries.values())
        raise
    return list(libraries.values())


def destroy(libraries: Iterable[Any]) -> None:
    """Remove everything that the libraries registered."""
    for library in libraries:
        library._destroy()


def has_kernel(name: str, key: str) -> bool:
    """Return whether an op has a kernel of its own for a dispatch key or alias key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def all_op_names() -> list[str]:
    """Return the full names of all ops that the dispatcher knows."""
    return list(torch._C._dispatch_get_all_op_names())


def signature_of(name: str, overload: str | None) -> inspect.Signature:
    """Return what an op takes, by its name and overload.

    Raises:
        RuntimeError: there is no such op.
    """
    called = "" if overload in (None, "default") else overload
    return signature_of_schema(torch._C._get_schema(name, called))


def signature_of_schema(schema: Any) -> inspect.Signature:
    """Return a schema in the form in which Python binds arguments to parameters."""
    made: list[inspect.Parameter] = []
    for item in reversed(schema.arguments):
        # Python wants no parameter without a default behind one that has it.
        is_last = not made or made[-1].kind is inspect.Parameter.KEYWORD_ONLY
        has_default = item.has_default_value() and (
            item.kwarg_only or is_last or made[-1].default is None
        )
        made.append(
            inspect.Parameter(
                f"{item.name}_" if keyword.iskeyword(item.name) else item.name,
                inspect.Parameter.KEYWORD_ONLY
                if item.kwarg_only
                else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=None if has_default else inspect.Parameter.empty,
            )
        )
    return inspect.Signature(made[::-1])


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has values of its own: no subclass that dispatches, no functorch."""
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter:
        return True
    return getattr(kind, "__torch_dispatch__", None) in (None, Tensor.__torch_dispatch__)


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured on the current stream: no reading then."""
    # Asking whether there is a device costs more than the rest of a guard.
    try:
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # the context is lost: nothing can be read either
        return True


def ask_device(*, wait: bool) -> None:
    """Let the current CUDA stream raise what is wrong with the device, if anything is.

    Does nothing in a process that has not used CUDA, and while a graph is captured.

    Args:
        wait: wait for the work that is under way, instead of asking without waiting.
    """
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return
    stream = torch.cuda.current_stream()
    if wait:
        wait_for(stream)
    else:
        stream.query()


# What torch.cuda.set_sync_debug_mode sets; builds without CUDA have no such mode.
_sync_debug_mode: Callable[[], int] = getattr(torch._C, "_cuda_get_sync_debug_mode", lambda: 0)
_set_sync_debug_mode: Any = getattr(torch._C, "_cuda_set_sync_debug_mode", None)


class _OwnWaits:
    """Blocks in which we wait for the device ourselves: the user's debugging mode says nothing.

    The mode belongs to the process: the first block switches it off, the last one on again.
    """

    lock = threading.Lock()
    count = mode = 0

    @contextmanager
    def block(self) -> Iterator[None]:
        with self.lock:
            if not self.count:
                self.mode = _sync_debug_mode()
                _set_sync_debug_mode(0)
            self.count += 1
        try:
            yield
        finally:
            with self.lock:
                self.count -= 1
                if not self.count:
                    _set_sync_debug_mode(self.mode)


_own_waits = _OwnWaits()


def wait_for(stream: Any) -> None:
    """Wait for a CUDA stream, whatever the user thinks of synchronising."""
    with _own_waits.block() if _sync_debug_mode() or _own_waits.count else nullcontext():
        stream.synchronize()


def _unseen() -> Any:
    # Torch's own block where it is enough: every guarded call pays for it.
    if not _sync_debug_mode() and not _own_waits.count:
        return torch._C.DisableTorchFunction()
    both = ExitStack()
    both.enter_context(_own_waits.block())
    both.enter_context(torch._C.DisableTorchFunction())
    return both


NoTorchFunction: Any = _unseen
"""Block that function modes and subclasses do not see, and in which the device may be read.

An interrupt finds it done or not begun, unless the user is debugging what synchronises.
"""
BelowAutograd: Any = torch._C._AutoDispatchBelowAutograd
"""Block that autograd does not see, like :data:`NoTorchFunction`."""
has_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return whether a Python dispatch mode of this thread would see our own torch calls."""
_has_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


def is_unseen() -> bool:
    """Return whether nobody sees our own torch calls without any block, as below most calls."""
    is_watched = has_dispatch_modes() or _has_function_modes() or _sync_debug_mode()
    return not is_watched and not _own_waits.count and _is_excluded(_AUTOGRAD)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run our own torch calls unseen: no autograd, no function modes, no subclasses."""
    with NoTorchFunction(), BelowAutograd(), torch.no_grad():
        yield


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """Switch every Python dispatch mode of this thread off for our own torch calls."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def current_node() -> Any | None:
    """Return the autograd node that this thread is running, ``None`` outside a backward pass."""
    return torch._C._current_autograd_node()


def node_sequence_nr(node: Any) -> int | None:
    """Return the number that autograd drew when the forward op created ``node``."""
    number = getattr(node, "_sequence_nr", None)
    return None if number is None else int(number())


def next_sequence_nr() -> int:
    """Return the sequence number that the next autograd node of this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that ``tensor`` is a view of."""
    return tensor._base


def same_tensor(left: object, right: object) -> bool:
    """Return whether two objects are the same tensor: the object, or the same elements in
    memory.
    """
    if left is right:
        return True
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return False
    if left.device != right.device or left.shape != right.shape or left.dtype != right.dtype:
        return False
    try:
        return (
            left.numel() > 0
            and left.stride() == right.stride()
            and left.storage_offset() == right.storage_offset()
            and left.untyped_storage()._cdata == right.untyped_storage()._cdata
        )
    except (RuntimeError, NotImplementedError):  # sparse and functional tensors have no storage
        return False


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``torch.float32`` as ``float32``."""
    return str(dtype).removeprefix("torch.")


def grad_fn_name(tensor: Tensor) -> str | None:
    """Return the class name of the autograd node that made ``tensor``."""
    if not tensor.requires_grad or tensor.is_leaf:
        return None
    node = tensor.grad_fn
    return None if node is None else str(node.name()).rpartition("::")[2]


def meta_of(tensor: Tensor) -> TensorMeta:
    """Describe a tensor from host memory alone; no value is read, no kernel runs."""
    strided = tensor.layout == torch.strided
    return TensorMeta(
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        device=str(tensor.device),
        stride=tuple(tensor.stride()) if strided else None,
        storage_offset=int(tensor.storage_offset()) if strided else 0,
        requires_grad=tensor.requires_grad,
        is_leaf=tensor.is_leaf,
        grad_fn=grad_fn_name(tensor),
    )
