"""Name what fills the device: the largest tensors and modules that the user's variables hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import FrameType

import torch
from torch import Tensor, nn

from cudalens.core import _torch
from cudalens.source.files import is_user_file

MAX_LISTED = 5
_FULL = ("out of memory", "ALLOC_FAILED")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024


def is_full(message: str) -> bool:
    """Return whether an error says that the device has no memory left."""
    return any(text in message for text in _FULL)


def largest(frames: Sequence[FrameType]) -> tuple[str, ...]:
    """Describe the largest holders of device memory by the names of the user's variables.

    Only metadata is looked at.  Memory that several variables share counts for the first of them.

    Returns:
        texts such as ``logits: 2.00 GiB, float32 (8, 512)``, the largest first.
    """
    seen: set[int] = set()
    found: list[tuple[int, str]] = []
    for names in _namespaces(frames):
        for name, value in list(names.items()):
            if not name.startswith("_") and (entry := _holder(name, value, seen)) is not None:
                found.append(entry)
    found.sort(key=lambda item: -item[0])
    return tuple(text for size, text in found[:MAX_LISTED] if size)


def _namespaces(frames: Sequence[FrameType]) -> Iterable[Mapping[str, object]]:
    """Return the variables of the user's frames, innermost first, then those of their modules."""
    users = [item for item in reversed(frames) if is_user_file(item.f_code.co_filename)]
    yield from (frame.f_locals for frame in users)
    yield from ({id(frame.f_globals): frame.f_globals for frame in users}).values()


def _holder(name: str, value: object, seen: set[int]) -> tuple[int, str] | None:
    if isinstance(value, Tensor):
        if not (size := _new_bytes([value], seen)):
            return None
        shape = str(tuple(value.shape))
        return size, f"{name}: {format_bytes(size)}, {_torch.dtype_name(value.dtype)} {shape}"
    if isinstance(value, nn.Module):
        parameters = list(value.parameters())
        grads = [item.grad for item in parameters if item.grad is not None]
        size = _new_bytes([*parameters, *grads, *value.buffers()], seen)
        what = "parameters and gradients" if grads else "parameters"
        return (
            (size, f"{name}: {format_bytes(size)}, {what} of {type(value).__name__}")
            if size
            else None
        )
    if isinstance(value, torch.optim.Optimizer):
        states = [x for entry in value.state.values() for x in entry.values()]
        size = _new_bytes([x for x in states if isinstance(x, Tensor)], seen)
        return (
            (size, f"{name}: {format_bytes(size)}, state of {type(value).__name__}")
            if size
            else None
        )
    if isinstance(value, (list, tuple, dict)):
        items = list(value.values() if isinstance(value, dict) else value)
        size = _new_bytes([x for x in items if isinstance(x, Tensor)], seen)
        count = len(items)
        return (size, f"{name}: {format_bytes(size)} in {count} items") if size else None
    return None


def _new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Count the bytes of the storages that were not seen yet."""
    total = 0
    for tensor in tensors:
        if not _torch.is_accelerator(tensor.device) or tensor.layout != torch.strided:
            continue
        if not _torch.is_plain(tensor):  # what a shard or a fake says is not what it takes here
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def format_bytes(size: float) -> str:
    """Return a number of bytes as torch's own messages do: ``2.00 GiB``."""
    for unit in _UNITS:
        if size < _STEP or unit == _UNITS[-1]:
            break
        size /= _STEP
    return f"{int(size)} B" if unit == "B" else f"{size:.2f} {unit}"
