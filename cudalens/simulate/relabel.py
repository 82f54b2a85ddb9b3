"""Tensors and generators that answer to the name cuda.

A tensor's device label is changed through a DLPack capsule, without touching its memory.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, Final

import torch
from torch import Tensor

from cudalens.core._python import raise_if_outside
from cudalens.simulate.memory import METER
from cudalens.simulate.state import not_rehearsed

_HOST_LABEL: Final = 1  # DLDevice is two int32: (device type, index), read here as one int64
_DEVICE_LABEL: Final = 2
_DEVICE_FIELD: Final = 8  # DLTensor starts with the data pointer

_to_capsule: Any = torch._C._to_dlpack
_from_capsule: Any = torch._C._from_dlpack
_pointer_of: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _relabelled(tensor: Tensor, label: int) -> Tensor:
    try:
        capsule = _to_capsule(tensor)
    except (BufferError, RuntimeError, NotImplementedError) as error:
        raise_if_outside(error)
        raise not_rehearsed(f"a {tensor.layout} tensor of {tensor.dtype}") from error
    ctypes.c_int64.from_address(_pointer_of(capsule, b"dltensor") + _DEVICE_FIELD).value = label
    result: Tensor = _from_capsule(capsule)
    return result


def to_device(tensor: Tensor) -> Tensor:
    """Return a CUDA-labelled tensor over the memory of this CPU tensor."""
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    result = _relabelled(tensor, _DEVICE_LABEL)
    METER.track(result)
    return result


def to_host(tensor: Tensor) -> Tensor:
    """Return a CPU-labelled alias of this CUDA-labelled tensor, with its conj and neg bits."""
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    result = _relabelled(tensor, _HOST_LABEL)
    if tensor.is_conj():
        result = torch._conj(result)
    if tensor.is_neg():
        result = torch._neg_view(result)
    return result


# --- generators -----------------------------------------------------------------------------------


# The dispatcher hands a generator over as its C++ object; this address tells whose it is.
# No callback: what a signal handler raises in one is lost.
_device_generators: dict[int, weakref.ref[Any]] = {}


class DeviceGenerator(torch._C.Generator):
    """A CPU generator that reports ``cuda`` as its device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The simulated device."""
        return torch.device("cuda", 0)

    def clone_state(self) -> DeviceGenerator:
        """Return a generator with the same state."""
        copy = new_device_generator()
        copy.set_state(self.get_state())
        return copy  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return _restore_generator, (self.get_state(),)


def _restore_generator(state: torch.Tensor) -> Any:
    generator = new_device_generator()
    generator.set_state(state)
    return generator


def new_device_generator() -> Any:
    """Return a new generator of the simulated device with the default seed."""
    generator: Any = DeviceGenerator("cpu")
    for address, reference in list(_device_generators.items()):
        if reference() is None:
            _device_generators.pop(address, None)
    _device_generators[generator._cdata] = weakref.ref(generator)
    return generator


def is_device_generator(generator: Any) -> bool:
    """Return whether this generator belongs to the simulated device."""
    reference = _device_generators.get(generator._cdata)
    return reference is not None and reference() is not None
