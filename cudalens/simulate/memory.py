"""Memory of the simulated device: bytes of live storages, and what torch.cuda says of them."""

from __future__ import annotations

import re
import threading
import weakref
from collections import deque
from typing import Any, Final

import torch
from torch import Tensor

BLOCK_BYTES: Final = 512  # CUDA's caching allocator rounds every request up to this
TOTAL_BYTES: Final = 16 * 2**30  # what the pretended device has; only the host refuses more
_REFUSED: Final = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")


class MemoryMeter:
    """Count device storages from their labelling until they are freed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sizes: dict[weakref.ref[Any], int] = {}
        # Filled by C alone: what a signal handler raises in a weakref callback is lost.
        self._freed: deque[weakref.ref[Any]] = deque()
        self._allocated = 0
        self.peak_bytes = 0

    @property
    def allocated_bytes(self) -> int:
        """The bytes of the device storages that live now."""
        with self._lock:
            while self._freed:
                size = self._sizes.get(self._freed[0], 0)
                # No call in between, so no interrupt: the size is counted once.
                self._allocated -= size
                if size:
                    del self._sizes[self._freed[0]]
                self._freed.popleft()
            return self._allocated

    def track(self, tensor: Tensor) -> None:
        """Count the storage of this newly labelled tensor until it is freed."""
        storage = tensor.untyped_storage()
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        if not size:
            return
        reference = weakref.ref(storage, self._freed.append)
        with self._lock:
            self._sizes[reference] = size
            self._allocated += size
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def reset_peak(self) -> None:
        """Start `peak_bytes` again from what is allocated now."""
        with self._lock:
            self.peak_bytes = self.allocated_bytes


METER: Final = MemoryMeter()
"""The meter of the process: tensors outlive the simulation that made them."""


def out_of_memory(error: RuntimeError) -> RuntimeError | None:
    """Return the error with which CUDA refuses a tensor, when the host had no room for it."""
    match = _REFUSED.search(str(error))
    if match is None:
        return None
    free = max(TOTAL_BYTES - METER.allocated_bytes, 0)
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {_size(int(match[1]))}. GPU 0 has a total capacity "
        f"of {_size(TOTAL_BYTES)} of which {_size(free)} is free."
    )


def _size(count: int) -> str:
    """Write a number of bytes as CUDA's allocator does."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count > 1 << shift:
            return f"{count / (1 << shift):.2f} {unit}"
    return f"{count} bytes"


# --- torch.cuda's functions -----------------------------------------------------------------------


def _allocated(device: Any = None) -> int:
    return METER.allocated_bytes


def _peak(device: Any = None) -> int:
    return METER.peak_bytes


def _statistics(device: Any = None) -> dict[str, int]:
    current, peak = METER.allocated_bytes, METER.peak_bytes
    return {
        f"{kind}_bytes.{pool}.{field}": value
        for kind in ("allocated", "active", "reserved", "requested")
        for pool in ("all", "large_pool", "small_pool")
        for field, value in (("current", current), ("peak", peak))
    }


def _summary(device: Any = None, abbreviated: bool = False) -> str:
    return f"{METER.allocated_bytes} bytes in live tensors, peak {METER.peak_bytes}"


def _snapshot(*args: Any, **kwargs: Any) -> list[Any]:
    return []


def _free_and_total(device: Any = None) -> tuple[int, int]:
    return max(TOTAL_BYTES - METER.allocated_bytes, 0), TOTAL_BYTES


def _reset_peak(device: Any = None) -> None:
    METER.reset_peak()


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


MEMORY_FUNCTIONS = {
    "memory_allocated": _allocated,
    "memory_reserved": _allocated,
    "memory_cached": _allocated,
    "device_memory_used": _allocated,
    "max_memory_allocated": _peak,
    "max_memory_reserved": _peak,
    "max_memory_cached": _peak,
    "memory_stats": _statistics,
    "memory_summary": _summary,
    "memory_snapshot": _snapshot,
    "mem_get_info": _free_and_total,
    "get_memory_info": _free_and_total,
    "reset_peak_memory_stats": _reset_peak,
    "reset_max_memory_allocated": _reset_peak,
    "reset_max_memory_cached": _reset_peak,
    "reset_accumulated_memory_stats": _do_nothing,
    "empty_cache": _do_nothing,
    "empty_host_cache": _do_nothing,
    "set_per_process_memory_fraction": _do_nothing,
}
"""Answers by the name that torch.cuda and torch.accelerator give them."""
