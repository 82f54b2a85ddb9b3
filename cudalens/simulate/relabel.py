"""Tensors and generators that answer to the name cuda.

A tensor's device label is changed through a DLPack capsule, without touching its memory.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from cudalens.core._python import raise_if_outside
from cudalens.simulate._internals import swap_memory
from cudalens.simulate.memory import METER
from cudalens.simulate.state import not_rehearsed, refusal

_HOST_LABEL: Final = 1  # DLDevice is two int32: (device type, index), read here as one int64
_DEVICE_LABEL: Final = 2
_DEVICE_FIELD: Final = 8  # DLTensor starts with the data pointer

_aten: Final = torch.ops.aten
CPU_KEYS: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
SPARSE_KEYS: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCPU)
NESTED_KEYS: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.NestedTensorCPU)

_to_capsule: Any = torch._C._to_dlpack
_from_capsule: Any = torch._C._from_dlpack
# `PYFUNCTYPE` keeps the interpreter's lock during the call, which Python's own C functions need.
_pointer_of: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

# Up to torch 2.9 a capsule has stride 1 where a dimension has one element or none.
_loses_strides: Final = _from_capsule(_to_capsule(torch.empty_strided((1,), (7,)))).stride() != (7,)


def _relabelled(tensor: Tensor, label: int) -> Tensor:
    try:
        capsule = _to_capsule(tensor)
    except (BufferError, RuntimeError, NotImplementedError) as error:
        raise_if_outside(error)
        if tensor.element_size() == 1 and tensor.dtype.is_floating_point:
            # Up to torch 2.9 a capsule has no float of eight bits.
            view = _aten.view.dtype.redispatch
            made = _relabelled(view(CPU_KEYS, tensor, torch.uint8), label)
            return view(CPU_KEYS, made, tensor.dtype)  # type: ignore[no-any-return]
        raise not_rehearsed(f"a {tensor.layout} tensor of {tensor.dtype}") from error
    try:
        address = _pointer_of(capsule, b"dltensor")
    except ctypes.ArgumentError as error:  # near the recursion limit, where the CPU raises this
        raise RecursionError(str(error)) from None
    ctypes.c_int64.from_address(address + _DEVICE_FIELD).value = label
    result: Tensor = _from_capsule(capsule)
    if _loses_strides and result.stride() != tensor.stride():
        set_memory(result, result.untyped_storage(), result.storage_offset(), tensor)
    return result


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is one block of memory; a sparse or nested one consists of others."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _rebuilt(tensor: Tensor, relabel: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    """Return a sparse or nested tensor over the relabelled memory of the tensors in it."""
    if tensor.is_nested:
        buffer, *parts = (
            getattr(_aten, name).default.redispatch(NESTED_KEYS, tensor)
            for name in (
                "values",
                # The sizes of a nested tensor are a CPU tensor on every device.
                "_nested_tensor_size",
                "_nested_tensor_strides",
                "_nested_tensor_storage_offsets",
            )
        )
        view: Tensor = _aten._nested_view_from_buffer.default.redispatch(
            CPU_KEYS, relabel(buffer), *parts
        )
        return view
    if tensor.layout is not torch.sparse_coo:
        raise not_rehearsed(f"a {tensor.layout} tensor of {tensor.dtype}")
    sparse_dim, dense_dim, indices, values, is_coalesced = (
        getattr(_aten, name).default.redispatch(SPARSE_KEYS, tensor)
        for name in ("sparse_dim", "dense_dim", "_indices", "_values", "is_coalesced")
    )
    made: Tensor = _aten._sparse_coo_tensor_with_dims_and_tensors.default.redispatch(
        SPARSE_KEYS,
        sparse_dim,
        dense_dim,
        tensor.shape,
        relabel(indices),
        relabel(values),
        dtype=tensor.dtype,
        layout=torch.sparse_coo,
        device=device,
        pin_memory=False,
        is_coalesced=is_coalesced,
    )
    return made


def to_device(tensor: Tensor) -> Tensor:
    """Return a CUDA-labelled tensor over the memory of this CPU tensor."""
    if not is_plain(tensor):
        return _rebuilt(tensor, to_device, torch.device("cuda", 0))
    result = _relabelled(tensor.resolve_conj().resolve_neg(), _DEVICE_LABEL)
    METER.track(result.untyped_storage())
    return result


def to_host(tensor: Tensor) -> Tensor:
    """Return a CPU-labelled alias of this CUDA-labelled tensor, with its conj and neg bits."""
    if not is_plain(tensor):
        return _rebuilt(tensor, to_host, torch.device("cpu"))
    return _with_bits(_relabelled(tensor, _HOST_LABEL), tensor)


def _with_bits(result: Tensor, tensor: Tensor) -> Tensor:
    if tensor.is_conj():
        result = torch._conj(result)
    if tensor.is_neg():
        result = torch._neg_view(result)
    return result


def set_memory(tensor: Tensor, storage: Any, offset: Any, shaped: Tensor) -> Tensor:
    """Let a tensor be a view of this storage, with the shape and strides of another."""
    _aten.set_.source_Storage_storage_offset.redispatch(
        CPU_KEYS, tensor, storage, offset, shaped.shape, shaped.stride()
    )
    return tensor


def to_host_sharing(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return CPU-labelled aliases of tensors of one device storage, over one host storage.

    The CPU kernels find overlapping memory by comparing storages.
    """
    shared = _host_bytes(tensors[0].untyped_storage()).untyped_storage()
    return [
        _with_bits(set_memory(torch.empty(0, dtype=t.dtype), shared, t.storage_offset(), t), t)
        for t in tensors
    ]


def _host_bytes(storage: Any) -> Tensor:
    """Return the bytes of a device storage as a CPU-labelled alias."""
    owner = to_device(torch.empty(0, dtype=torch.uint8))
    _aten.set_.source_Storage_storage_offset.redispatch(
        CPU_KEYS, owner, storage, 0, (storage.nbytes(),), (1,)
    )
    return to_host(owner)


def resize_storage(storage: Any, count: int) -> None:
    """Give a device storage memory of this many bytes; all tensors that share it go on doing so."""
    old = _host_bytes(storage)
    memory = torch.empty(count, dtype=torch.uint8)
    common = min(count, storage.nbytes())
    memory[:common].copy_(old[:common])
    # After the exchange this alias would point to freed memory.
    del old
    swap_memory(storage, to_device(memory).untyped_storage())
    METER.track(storage)


# --- generators -----------------------------------------------------------------------------------


# The dispatcher hands a generator over as its C++ object; this address tells whose it is.
# No callback: what a signal handler raises in one is lost.
_device_generators: dict[int, weakref.ref[Any]] = {}


class DeviceGenerator(torch._C.Generator):
    """A CPU generator that reports ``cuda`` as its device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The rehearsal device."""
        return torch.device("cuda", 0)

    def clone_state(self) -> DeviceGenerator:
        """Return a generator with the same state."""
        return _restore_generator(self.get_state())  # type: ignore[no-any-return]

    # The CPU's random stream has no offset, and there is no device that could capture a graph.
    set_offset = get_offset = refusal("the offset of a random generator")
    graphsafe_set_state = graphsafe_get_state = refusal("a CUDA graph")

    def __reduce__(self) -> Any:
        return _restore_generator, (self.get_state(),)


def _restore_generator(state: torch.Tensor) -> Any:
    generator = new_device_generator()
    generator.set_state(state)
    return generator


def new_device_generator() -> Any:
    """Return a new generator of the rehearsal device with the default seed."""
    generator: Any = DeviceGenerator("cpu")
    for address, reference in list(_device_generators.items()):
        if reference() is None:
            _device_generators.pop(address, None)
    _device_generators[generator._cdata] = weakref.ref(generator)
    return generator


def is_device_generator(generator: Any) -> bool:
    """Return whether this generator belongs to the rehearsal device."""
    reference = _device_generators.get(generator._cdata)
    return reference is not None and reference() is not None
