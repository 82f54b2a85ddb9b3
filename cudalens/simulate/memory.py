"""Count the bytes of live simulated device storages, as torch.cuda.memory_allocated does."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_BYTES: Final = 512  # CUDA's caching allocator rounds every request up to this
TOTAL_BYTES: Final = 16 * 2**30  # what the pretended device has; nothing is refused above it

_lock = threading.RLock()  # a weakref callback can run inside `track` of the same thread
_sizes: dict[weakref.ref[Any], int] = {}
_allocated = 0
_peak = 0


def _forget(reference: weakref.ref[Any]) -> None:
    global _allocated
    with _lock:
        _allocated -= _sizes.pop(reference, 0)


def track(tensor: Tensor) -> None:
    """Count the storage of this newly labelled tensor until it is freed."""
    global _allocated, _peak
    storage = tensor.untyped_storage()
    size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
    if not size:
        return
    reference = weakref.ref(storage, _forget)
    with _lock:
        _sizes[reference] = size
        _allocated += size
        if _allocated > _peak:
            _peak = _allocated


def allocated_bytes() -> int:
    """Return the bytes of all live device storages, each rounded up to 512."""
    return _allocated


def peak_bytes() -> int:
    """Return the highest value of `allocated_bytes` since the last reset."""
    return _peak


def reset_peak() -> None:
    """Start `peak_bytes` again from what is allocated now."""
    global _peak
    with _lock:
        _peak = _allocated
