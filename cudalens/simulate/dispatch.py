"""Register the kernels of the rehearsal device in the dispatcher, and take them out again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Final

import torch

from cudalens.core._torch import add_kernels, all_op_names, has_kernel, op_of
from cudalens.core.errors import DeviceOffError
from cudalens.simulate._internals import kernels_in_python
from cudalens.simulate.kernels import Runtime, SpecialKernel, call_cpu, run
from cudalens.simulate.memory import METER, out_of_memory
from cudalens.simulate.op_schema import aten_ops, schema_of
from cudalens.simulate.relabel import CPU_KEYS, NESTED_KEYS, SPARSE_KEYS
from cudalens.simulate.special import LAYOUT_KERNELS, SPECIAL_KERNELS
from cudalens.simulate.state import not_rehearsed

_COMPOSITES: Final = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
# Their composite kernel would win over the fallback and reach stubs that only a GPU build fills.
_FAMILIES: Final = ("aten::_foreach_", "aten::_fused_")
_NAMES: Final = aten_ops(
    "convolution convolution_backward _convolution _weight_norm_interface repeat_interleave.Tensor"
)
# torch.tensor() and its kin reach the device beside a dispatch mode that stays on the stack, and
# then torch calls a Python kernel only where it is registered for this very op.
_BESIDE_MODES: Final = aten_ops("empty.memory_format empty_strided copy_ clone _local_scalar_dense")
# Both devices have a kernel of their own beside the decomposition.
_BESIDE_IMPLICIT: Final = aten_ops("mish_backward silu_backward")
# Metadata of sparse tensors, and composites of ops that reach the device one by one.
_METADATA: Final = aten_ops(
    "_nnz _dimI _dimV sparse_dim dense_dim is_coalesced _coalesced_ _to_dense"
)
_REFUSED_KEYS: Final = ("SparseCsrCUDA", "QuantizedCUDA")
# Layouts that are rehearsed: the CPU's keys for each, and the key under which its kernels stand.
_LAYOUTS: Final = {
    "SparseCUDA": (SPARSE_KEYS, "SparseCPU"),
    "NestedTensorCUDA": (NESTED_KEYS, "NestedTensorCPU"),
}
# These methods of a storage never reach the dispatcher: a CPU build answers with a text of its own,
# or ends the process.
_STORAGE_METHODS: Final = ("resize_", "new", "clone")
_OFF_TEXT: Final = (
    "The rehearsal device is off, so that tensors on cuda can be neither used nor made:"
    " `%cudacheck simulate` or cudalens.simulate() turns it on again."
)


def _has_composite(name: str) -> bool:
    return any(has_kernel(name, key) for key in _COMPOSITES)


def _has_own_kernel(name: str) -> bool:
    """Return whether another kernel than the fallback would run for this op on the CUDA key."""
    if has_kernel(name, "CUDA") or name in _BESIDE_IMPLICIT or name in _BESIDE_MODES:
        return True
    if not (name.startswith(_FAMILIES) or name in _NAMES or name in SPECIAL_KERNELS):
        return has_kernel(name, "CPU") and _has_composite(name)
    return _has_composite(name)


@cache
def _aten_names() -> frozenset[str]:
    """Return torch's own ops to override; the compiled kernels of a process do not change."""
    return frozenset(n for n in all_op_names() if n.startswith("aten::") and _has_own_kernel(n))


@cache
def _compiled_under(key: str) -> frozenset[str]:
    """Return torch's own ops that have a compiled kernel under this key."""
    names = (name for name in all_op_names() if name.startswith("aten::"))
    return frozenset(name for name in names if has_kernel(name, key))


def _of_layout(key: str) -> frozenset[str]:
    """Return the ops of sparse or nested tensors that something else than the fallback serves."""
    return _compiled_under(key) | _compiled_under(_LAYOUTS[key][1])


def _serve(runtime: Runtime, keys: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Serve one call of an op that reaches the CUDA dispatch key, or another layout's there.

    keys: of the CPU kernels that do the work.
    """
    __tracebackhide__ = True
    # Our own calls must stay invisible to the user's TorchFunctionMode and torch.device().
    unseen = torch._C.DisableTorchFunction()
    try:  # after an interrupt Python 3.14 may leave out the end of a `with` (cpython#148874)
        unseen.__enter__()
        facts, is_plain = schema_of(op), keys is CPU_KEYS
        # A view touches no memory, so the CPU kernel may get the tensor with its label.
        if facts.is_view and is_plain:
            return op.redispatch(CPU_KEYS, *args, **kwargs)
        rest = facts.defaults[len(args) :]
        values = [*args, *(kwargs.get(name, value) for name, value in rest)]
        if facts.is_view or facts.name in _METADATA:
            return call_cpu(facts, values, keys)
        special = SPECIAL_KERNELS if is_plain else LAYOUT_KERNELS
        serve: SpecialKernel = special.get(facts.name, run)
        try:
            return serve(runtime, facts, values, keys)
        except RuntimeError as error:
            if (refused := out_of_memory(error)) is not None:
                raise refused from None
            raise
    finally:
        unseen.__exit__(None, None, None)


def _serve_named(runtime: Runtime, keys: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    return _serve(runtime, keys, op_of(name), *args, **kwargs)


def _refuse(key: str, op: Any, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    raise not_rehearsed(f"{op.name()} on a {key.removesuffix('CUDA')} tensor")


def _refuse_off(*args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    raise DeviceOffError(_OFF_TEXT)


@contextmanager
def _overriding() -> Iterator[None]:
    """Override compiled kernels, of which torch warns once per process: that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        yield


class Registrations:
    """Hold the dispatcher registrations of one activation."""

    def __init__(self) -> None:
        self._libraries: dict[str, Any] = {}
        """By namespace; that of fallbacks is ``_``."""

    def install(self, runtime: Runtime) -> None:
        """Register the fallback, and the ops whose own kernel would run instead of it."""
        names = []
        registered_in_python = torch.library._impls  # a user's own CUDA kernel stays his
        torchs_own = kernels_in_python()
        for name in all_op_names():
            namespace, _, short = name.partition("::")
            is_python = f"{namespace}/{short}/CUDA" in registered_in_python
            is_users = is_python and name not in torchs_own
            is_needed = name in _aten_names() if namespace == "aten" else _has_own_kernel(name)
            if is_needed and not is_users:
                names.append(name)
        with _overriding():
            self._fall_back(partial(_serve, runtime, CPU_KEYS), "CUDA")
            own = {name: partial(_serve_named, runtime, CPU_KEYS, name) for name in names}
            add_kernels(self._libraries, own, "CUDA")
            for key, (keys, _) in _LAYOUTS.items():
                self._fall_back(partial(_serve, runtime, keys), key)
                own = {it: partial(_serve_named, runtime, keys, it) for it in _of_layout(key)}
                add_kernels(self._libraries, own, key)
            for key in _REFUSED_KEYS:
                self._fall_back(partial(_refuse, key), key)
                refused = {it: partial(_refuse, key, op_of(it)) for it in _compiled_under(key)}
                add_kernels(self._libraries, refused, key)

    def turn_off(self) -> None:
        """Take the kernels out; later calls on the device say that it is off."""
        self.remove()
        with _overriding():
            for key in ("CUDA", *_LAYOUTS):
                self._fall_back(_refuse_off, key)
            add_kernels(self._libraries, dict.fromkeys(_aten_names(), _refuse_off), "CUDA")
            for key in _LAYOUTS:
                add_kernels(self._libraries, dict.fromkeys(_of_layout(key), _refuse_off), key)
        # Attributes of the storages themselves hide the methods; of torch nothing is replaced.
        for storage in METER.storages():
            vars(storage).update(dict.fromkeys(_STORAGE_METHODS, _refuse_off))

    def _fall_back(self, kernel: Callable[..., Any], key: str) -> None:
        if "_" not in self._libraries:
            self._libraries["_"] = torch.library.Library("_", "IMPL")
        self._libraries["_"].fallback(kernel, key)

    def remove(self) -> None:
        """Take every registration out of the dispatcher, and every refusal off a storage."""
        for storage in METER.storages():
            for name in _STORAGE_METHODS:
                vars(storage).pop(name, None)
        while self._libraries:
            self._libraries.popitem()[1]._destroy()
