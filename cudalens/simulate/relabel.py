"""Change the device label of a tensor without touching its memory, through a DLPack capsule."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch
from torch import Tensor

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
