"""Count the bytes of live simulated device storages, as torch.cuda.memory_allocated does."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_BYTES: Final = 512  # CUDA's caching allocator rounds every request up to this
TOTAL_BYTES: Final = 16 * 2**30  # what the pretended device has; nothing is refused above it


class MemoryMeter:
    """Count device storages from their labelling until they are freed."""

    def __init__(self) -> None:
        # A weakref callback can run inside `track` of the same thread.
        self._lock = threading.RLock()
        self._sizes: dict[weakref.ref[Any], int] = {}
        self.allocated_bytes = 0
        self.peak_bytes = 0

    def track(self, tensor: Tensor) -> None:
        """Count the storage of this newly labelled tensor until it is freed."""
        storage = tensor.untyped_storage()
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        if not size:
            return
        reference = weakref.ref(storage, self._forget)
        with self._lock:
            self._sizes[reference] = size
            self.allocated_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def reset_peak(self) -> None:
        """Start `peak_bytes` again from what is allocated now."""
        with self._lock:
            self.peak_bytes = self.allocated_bytes

    def _forget(self, reference: weakref.ref[Any]) -> None:
        with self._lock:
            self.allocated_bytes -= self._sizes.pop(reference, 0)


METER: Final = MemoryMeter()
"""The meter of the process: tensors outlive the simulation that made them."""
