"""Name the largest tensors and modules in the user's variables, for a full device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import FrameType

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core.report_types import format_shape
from cudalens.core.user_objects import is_module, is_tensor
from cudalens.source.stack import namespaces

MAX_LISTED = 5
_FULL = ("out of memory", "ALLOC_FAILED")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024
_HOLDERS = (Tensor, torch.nn.Module, torch.optim.Optimizer, list, tuple, dict)


def is_full(message: str) -> bool:
    """Return whether an error is an out-of-memory error of the device."""
    return any(text in message for text in _FULL)


def largest(frames: Sequence[FrameType]) -> tuple[str, ...]:
    """Describe the largest holders of device memory by the names of the user's variables.

    Reads metadata only.  Memory shared by several variables counts for the first one.

    Returns:
        Texts such as ``logits: 2.00 GiB, float32 (8, 512)``, largest first.
    """
    seen: set[int] = set()
    tensors: list[tuple[int, str]] = []
    for names in namespaces(frames):
        for name, value in list(names.items()):
            # A notebook may have 100 000 names, and few are tensors or modules.
            is_holder = issubclass(type(value), _HOLDERS) and not name.startswith("_")
            if is_holder and (entry := _holder(name, value, seen)) is not None:
                tensors.append(entry)
    tensors.sort(key=lambda item: -item[0])
    return tuple(text for _, text in tensors[:MAX_LISTED])


def _holder(name: str, value: object, seen: set[int]) -> tuple[int, str] | None:
    kind, held, what = type(value).__name__, list[object](), ""
    if is_tensor(value):
        held, what = [value], f", {_torch.dtype_name(value.dtype)} {format_shape(value.shape)}"
    elif is_module(value):
        parameters = list(value.parameters())
        grads = [item.grad for item in parameters if item.grad is not None]
        held = [*parameters, *grads, *value.buffers()]
        what = f", parameters{' and gradients' if grads else ''} of {kind}"
    elif isinstance(value, torch.optim.Optimizer):
        held = [item for state in value.state.values() for item in state.values()]
        what = f", state of {kind}"
    elif isinstance(value, (list, tuple, dict)):
        held = list(value.values() if isinstance(value, dict) else value)
        what = f" in {len(held)} item{'s' * (len(held) > 1)}"
    size = _new_bytes((item for item in held if is_tensor(item)), seen)
    return (size, f"{name}: {format_bytes(size)}{what}") if size else None


def _new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Count the bytes of storages that were not counted yet."""
    total = 0
    for tensor in tensors:
        if not _torch.is_accelerator(tensor.device) or tensor.layout != torch.strided:
            continue
        if not _torch.is_plain(tensor):  # shards and fake tensors report another size
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def format_bytes(size: float) -> str:
    """Return a number of bytes in the format of torch's messages: ``2.00 GiB``."""
    for unit in _UNITS:
        if size < _STEP or unit == _UNITS[-1]:
            break
        size /= _STEP
    return f"{int(size)} B" if unit == "B" else f"{size:.2f} {unit}"
