"""The one seam to private and version-dependent torch names.

Every name was checked on the releases that the README lists.  Features are detected by use.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from cudalens.core._python import Uninterrupted, live_instances
from cudalens.core.report_types import TensorMeta

ACCELERATORS = frozenset({"cuda", "xpu", "mps", "hpu", "npu", "mtia", "maia", "privateuseone"})
"""Device types on which guards act: there a bad value asserts, faults or is read silently.

On ``cpu`` the op's own error is exact, and ``meta`` tensors have no values.
"""

BACKEND_SELECT = "BackendSelect"

pytree: Any = _pytree
"""Torch's functions for nested lists, tuples and dicts."""


def is_accelerator(device: torch.device) -> bool:
    """Return whether guards act on tensors of this device."""
    return device.type in ACCELERATORS


_AUTOGRAD_KEYS = {name: f"Autograd{name.upper()}" for name in ("cpu", "cuda", "xpu", "mps", "hpu")}
_AUTOGRAD_KEYS["privateuseone"] = "AutogradPrivateUse1"


def autograd_keys(devices: Iterable[str]) -> list[str]:
    """Return the autograd keys of device types, at which composite ops can be intercepted."""
    return [_AUTOGRAD_KEYS[name] for name in sorted(devices) if name in _AUTOGRAD_KEYS]


def redispatcher(op: Any, key: str = BACKEND_SELECT) -> tuple[Callable[..., Any], Any]:
    """Return a function that redispatches below a key.

    Returns:
        a function that takes a key set and the arguments of the call, and the key set that the
        keys of the call must be intersected with.
    """
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))
    if key == BACKEND_SELECT:
        # Skip the overload's own method: it only forwards, and every guarded call would pay.
        handle = getattr(op, "_handle", None)
        return getattr(handle, "redispatch_boxed", op.redispatch), below
    # Above autograd, run the composite kernel itself.  A redispatch would offer the op to the
    # dispatch modes first.  They are below autograd, which would then miss the ops that the kernel
    # decomposes into.
    composite = torch._C.DispatchKey.CompositeImplicitAutograd

    def decompose(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return op._op_dk(composite, *args, **kwargs)

    return decompose, below


_DISPATCH_KEYS = torch._C.DispatchKey.__members__


@cache  # each check calls it
def backend_bits(devices: frozenset[str]) -> int:
    """Return the bits that only the dispatch keys of tensors on these devices have."""
    bits = 0
    for name in devices:
        named = {"privateuseone": "PrivateUse1", "npu": "PrivateUse1"}.get(name, name.upper())
        if named in _DISPATCH_KEYS:  # else this torch has no such device type
            keys = (_DISPATCH_KEYS[item] for item in (named, "CUDA" if name == "cpu" else "CPU"))
            own, other = (torch._C.DispatchKeySet(key).raw_repr() for key in keys)
            bits |= own & ~other
    return bits


def register_kernels(
    kernels: dict[str, Callable[..., Any]], key: str = BACKEND_SELECT
) -> list[Any]:
    """Register one kernel per full overload name; :func:`destroy` the libraries to remove them.

    A kernel takes the key set of the call as its first argument.

    Raises:
        RuntimeError: torch refused a registration; nothing stays registered.
    """
    libraries: dict[str, Any] = {}
    try:
        add_kernels(libraries, kernels, key, with_keyset=True)
    except BaseException:
        destroy(libraries.values())
        raise
    return list(libraries.values())


def add_kernels(
    libraries: dict[str, Any], kernels: Mapping[str, Callable[..., Any]], key: str, **options: Any
) -> None:
    """Register kernels, and keep them out of torch's set of registrations."""
    # A library that is destroyed removes its entries there, and so a user's for the same kernel.
    listed, ours = torch.library._impls, {f"{name.replace('::', '/')}/{key}" for name in kernels}
    of_others = listed & ours
    listed -= of_others
    try:
        for name, kernel in kernels.items():
            namespace = name.partition("::")[0]
            if namespace not in libraries:
                libraries[namespace] = torch.library.Library(namespace, "IMPL")
            libraries[namespace].impl(name, kernel, key, **options)
    finally:
        for library in libraries.values():
            library._op_impls -= ours
        listed -= ours
        listed |= of_others


def destroy(libraries: Iterable[Any]) -> None:
    """Remove everything that the libraries registered."""
    for library in libraries:
        library._destroy()


NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def as_tensor(value: Any) -> Any:
    """Return a number as the tensor that torch had made of it, anything else unchanged.

    Where a call passes a number for a tensor, a kernel in Python receives the number.
    """
    dtype = NUMBERS.get(type(value))
    if dtype is None:
        return value
    if has_modes():
        return unseen_without_wait(partial(torch.scalar_tensor, value, dtype=dtype))
    return torch.scalar_tensor(value, dtype=dtype)


def has_kernel(name: str, key: str) -> bool:
    """Return whether an op has a kernel of its own for a dispatch key or alias key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def op_of(name: str) -> Any:
    """Return the overload of a full name such as ``aten::copy_`` or ``aten::index.Tensor``."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def all_op_names() -> list[str]:
    """Return the full names of all ops in the dispatcher."""
    return list(torch._C._dispatch_get_all_op_names())


@cache
def ops_that_read() -> frozenset[str]:
    """Return the full names of ops that bring values to the host, as a number or as a shape."""
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

    def reads(name: str) -> bool:
        op_name, _, overload = name.partition(".")
        return not tags.isdisjoint(torch._C._get_operation_overload(op_name, overload)[2])

    own = [name for name in all_op_names() if name.startswith("aten::")]
    return frozenset(
        name for name in own if reads(name) and not has_kernel(name, "CompositeImplicitAutograd")
    )


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has values of its own: no subclass that dispatches, no functorch."""
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter:
        return True
    return getattr(kind, "__torch_dispatch__", None) in (None, Tensor.__torch_dispatch__)


def is_capturing() -> bool:
    """Return whether the current stream captures a CUDA graph, so that no value can be read."""
    # No check that a device exists: it costs more than the rest of a guard.
    try:
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    except RecursionError:  # a guard tries again with a higher recursion limit
        raise
    except RuntimeError:  # the context is lost: nothing can be read either
        return True


def current_device() -> torch.device:
    """Return the current CUDA device."""
    return torch.device("cuda", torch.cuda.current_device())


def is_host(device: torch.device) -> bool:
    """Return whether the host reads tensors of this device without a copy."""
    return device.type == "cpu"


def stream_id(device: torch.device) -> int:
    """Return a number for the current stream of a device, 0 where it has no streams."""
    # Test the index first: ``type`` builds a string each time, and the CPU has no index.
    if device.index is None or device.type != "cuda":
        return 0
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def zeros(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros[rows, columns] that may live as long as the process.

    While inductor prepares a CUDA graph, the memory that a thread allocates is in the graph's pool
    and must be freed before the end.  So another thread allocates, in which no mode is active.
    """
    make = partial(torch.zeros, rows, columns, dtype=dtype, device=device)
    with ThreadPoolExecutor(1) as thread:
        try:
            made = thread.submit(make).result()
        except RuntimeError:  # a shutting down interpreter starts no thread
            with torch.inference_mode(False):
                made = make()
    if device.type == "cuda":
        # The other thread has filled it on its own current stream, the default one.
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
    return made


def raise_pending_cuda_error(*, wait: bool) -> None:
    """Raise the pending error, if any, of each CUDA device that this process has used.

    The current stream of the device raises it.  Does nothing in a process that has not used CUDA,
    and while a graph is captured.

    Args:
        wait: wait for the pending work, instead of a query that returns at once.
    """
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return
    current = torch.cuda.current_device()
    is_used = getattr(torch._C, "_cuda_hasPrimaryContext", lambda number: number == current)
    for number in range(torch.cuda.device_count()):
        if number == current or is_used(number):
            stream = torch.cuda.current_stream(number)
            if wait:
                wait_for(stream)
            else:
                stream.query()


def is_device_usable() -> bool:
    """Wait for each CUDA device that this process has used; return whether none of them is lost."""
    try:
        raise_pending_cuda_error(wait=True)
    except RuntimeError:
        return False
    return True


_KEPT: list[Any] = []
"""The tensors that were alive when the device was lost, kept until the process ends."""


def outlive_lost_device(*held: Any) -> None:
    """Keep torch from aborting the process when it frees memory of a lost device.

    Torch aborts when it frees a pinned tensor that was copied from, a tensor that another stream
    has used, or, with the allocator ``cudaMallocAsync``, any tensor.  So all live tensors are kept.
    This costs no device memory, which is lost until the process restarts.  The user's allocator
    settings are reset.
    """
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is not None:
        with suppress(RuntimeError, ValueError):  # torch 2.11 and older have no such setting
            change("pinned_free_catch_all:True")
    if not _KEPT:
        # In torch 2.6 and 2.8 the collector does not see a tensor that C++ refers to as well.  The
        # graph is kept with its results, and ``held`` has the arguments of a failing call.
        _KEPT.extend((*live_instances(Tensor), *held))
        # Never released: else the tensors are freed, and torch aborts, as the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_KEPT))


# What torch.cuda.set_sync_debug_mode sets; builds without CUDA have no such mode.
def _sync_debug_mode() -> int:
    # Looked up each time: the rehearsal device installs a mode of its own.
    mode = getattr(torch._C, "_cuda_get_sync_debug_mode", None)
    return 0 if mode is None else int(mode())


class _OwnWaits:
    """Blocks in which we wait for the device ourselves, with the user's sync debug mode off.

    The mode is process-wide: the first block turns it off, the last one restores it.
    """

    lock = threading.Lock()
    count = mode = 0

    @contextmanager
    def block(self) -> Iterator[None]:
        with self.lock:
            if not self.count:
                self.mode = _sync_debug_mode()
                torch._C._cuda_set_sync_debug_mode(0)
            self.count += 1
        try:
            yield
        finally:
            with self.lock:
                self.count -= 1
                if not self.count:
                    torch._C._cuda_set_sync_debug_mode(self.mode)


_own_waits = _OwnWaits()
_NO_BLOCK = nullcontext()


def wait_for(stream: Any) -> None:
    """Wait for a CUDA stream, with the user's sync debug mode off."""
    with own_wait():
        stream.synchronize()


def no_torch_function() -> Any:
    """Return a context whose calls no function mode or subclass sees; the device may be read in it.

    An interrupt cannot leave it half entered, unless a sync debug mode is on.
    """
    # Torch's own context manager where it is enough: every guarded call enters one.
    if not _sync_debug_mode() and not _own_waits.count:
        return torch._C.DisableTorchFunction()
    both = ExitStack()
    both.enter_context(_own_waits.block())
    both.enter_context(torch._C.DisableTorchFunction())
    return both


BelowAutograd: Any = torch._C._AutoDispatchBelowAutograd
"""Context whose calls autograd does not see."""
has_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of Python dispatch modes of this thread, which would see our torch calls."""
has_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""Return the number of function modes of this thread, which would see our torch calls."""
is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
"""Return whether deterministic algorithms are in use, without torch's Python wrapper."""
ExceptionWrapper: Any = torch._utils.ExceptionWrapper  # how a loader's worker sends errors
Unseen: Any = torch._C.DisableTorchFunction
"""Context whose calls no function mode or subclass sees."""
_is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


def has_modes() -> bool:
    """Return whether a mode of this thread would see our own torch calls."""
    return bool(has_dispatch_modes() or has_function_modes())


def without_modes(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function whose torch calls modes, subclasses and autograd do not see."""
    with no_torch_function(), BelowAutograd():
        # The common case: an ordinary call has left all modes before it reaches a guard.
        if not has_dispatch_modes():
            return function(*args)
        with Uninterrupted(), no_dispatch_modes():
            return function(*args)


def can_read_unseen() -> bool:
    """Return whether no dispatch mode or autograd sees our torch calls, and values can be read."""
    # One function with early returns, as every guarded call runs it.
    if has_dispatch_modes() or _own_waits.count:
        return False
    if not _is_excluded(_AUTOGRAD):
        return False
    if not getattr(torch.cuda, "_initialized", True):
        return True  # nothing on the device can be captured or debugged
    return not _sync_debug_mode() and not is_capturing()


def own_wait() -> AbstractContextManager[Any]:
    """Return a context in which we may wait for the device in any sync debug mode."""
    return _own_waits.block() if _sync_debug_mode() or _own_waits.count else _NO_BLOCK


def unseen_without_wait(function: Callable[..., Any], *args: Any) -> Any:
    """Do the same as :func:`without_modes` for a function that never waits for the device."""
    with torch._C.DisableTorchFunction(), BelowAutograd():
        if not has_dispatch_modes():
            return function(*args)
        with no_dispatch_modes():
            return function(*args)


def device_type(tensor: Tensor) -> str:
    """Return the type of a tensor's device; a subclass does not see the access."""
    with torch._C.DisableTorchFunction():
        return str(Tensor.device.__get__(tensor).type)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run our torch calls without autograd, function modes and subclasses."""
    with no_torch_function(), BelowAutograd(), torch.no_grad():
        yield


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context in which all Python dispatch modes of this thread are off."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def before_each_op(look: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> Any:
    """Return a context that calls ``look`` with each op and its arguments before it runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # torch's wrapper that skips dynamo imports it, which takes seconds

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            look(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    return Mode()  # type: ignore[no-untyped-call]


current_node: Callable[[], Any | None] = torch._C._current_autograd_node
"""Return the autograd node that this thread is running, ``None`` outside a backward pass."""


def node_sequence_nr(node: Any) -> int | None:
    """Return the sequence number that autograd assigned when the forward op made ``node``."""
    number = getattr(node, "_sequence_nr", None)
    return None if number is None else int(number())


_BASE: Any = torch._C.TensorBase
base_of: Callable[[Tensor], Tensor | None] = _BASE._base.__get__
"""Return the base of a view, read from C++, so that no subclass can override it."""


def same_tensor(left: object, right: object) -> bool:
    """Return whether two objects are one tensor object, or show the same elements in memory."""
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


def row_of(part: object, whole: object) -> int | None:
    """Return ``i`` where ``part`` is ``whole[i]``, the same elements in memory, else ``None``."""
    if not (isinstance(part, Tensor) and isinstance(whole, Tensor)):
        return None
    if part.dtype != whole.dtype or part.shape != whole.shape[1:] or part.numel() == 0:
        return None
    try:
        offset = int(part.storage_offset()) - int(whole.storage_offset())
        step = whole.stride()[:1]
        is_inside = part.stride() == whole.stride()[1:] and shares_storage(part, whole)
    except (RuntimeError, NotImplementedError):  # sparse and functional tensors have no storage
        return None
    if not is_inside or step in ((), (0,)):
        return None
    row, rest = divmod(offset, step[0])
    return row if rest == 0 and 0 <= row < len(whole) else None


def shares_storage(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have one storage."""
    try:
        return bool(left.untyped_storage()._cdata == right.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse and functional tensors have no storage
        return False


def restore_functorch(error: BaseException | None) -> None:
    """Turn functorch on again after an exception that was raised while a tensor was printed.

    The function that prints turns it off by a guard in a local variable.  The traceback keeps the
    variable, a shell keeps the traceback, and until the next error ``vmap`` and ``grad`` compute
    wrong results.
    """
    entry = error.__traceback__ if error is not None else None
    while entry is not None:
        if entry.tb_frame.f_code is torch._tensor_str._str.__code__:
            with suppress(RuntimeError):  # the frame is still running
                entry.tb_frame.clear()
        entry = entry.tb_next


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``torch.float32`` as ``float32``."""
    return str(dtype).removeprefix("torch.")


def grad_fn_name(tensor: Tensor) -> str | None:
    """Return the class name of the autograd node of a tensor, ``None`` for a leaf."""
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
