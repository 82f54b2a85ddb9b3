"""Memory of the rehearsal device: bytes of live storages, and torch.cuda's functions for it."""

from __future__ import annotations

import re
import weakref
from typing import Any, Final

import torch

from cudalens.simulate.streams import check_context

BLOCK_BYTES: Final = 512  # CUDA's caching allocator rounds every request up to this
TOTAL_BYTES: Final = 16 * 2**30  # what the pretended device has; only the host refuses more
_REFUSED: Final = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")


class MemoryMeter:
    """Count device storages from their labelling until they are freed.

    A storage's size leaves by a callback in C, which no signal handler interrupts, and nothing is
    locked: what a handler raises can spoil no count.
    """

    def __init__(self) -> None:
        self._sizes: dict[weakref.ref[Any], int] = {}
        self._at_most = 0
        """Not less than what is allocated: a sum for each op would cost too much."""
        self.peak_bytes = 0
        self.fraction = 1.0

    @property
    def allocated_bytes(self) -> int:
        """The bytes of the device storages that live now."""
        self._at_most = allocated = sum(self._sizes.values())
        self.peak_bytes = max(self.peak_bytes, allocated)
        return allocated

    def track(self, storage: Any) -> None:
        """Count a newly labelled storage until it is freed, or one that has another size now."""
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        if not size and weakref.ref(storage) not in self._sizes:
            return
        # A dictionary keeps the key that it has, so that one reference calls back, once.
        self._sizes[weakref.ref(storage, self._sizes.pop)] = size
        self._at_most += size
        if self._at_most > self.peak_bytes:
            _ = self.allocated_bytes

    def storages(self) -> list[Any]:
        """Return the device storages that live now, but for those that never held a byte."""
        return [storage for item in list(self._sizes) if (storage := item()) is not None]

    def reset_peak(self) -> None:
        """Start `peak_bytes` again from what is allocated now."""
        self.peak_bytes = 0
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


def constant(value: Any) -> Any:
    """Return a function that answers this, whatever it is asked."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def _nested_statistics(device: Any = None) -> dict[str, Any]:
    counted = {"current": METER.allocated_bytes, "peak": METER.peak_bytes}
    return {
        f"{kind}_bytes": {pool: dict(counted) for pool in ("all", "large_pool", "small_pool")}
        for kind in ("allocated", "active", "reserved", "requested")
    }


def _statistics(device: Any = None) -> dict[str, int]:
    return {
        f"{kind}.{pool}.{field}": value
        for kind, pools in _nested_statistics().items()
        for pool, fields in pools.items()
        for field, value in fields.items()
    }


def _free_and_total(device: Any = None) -> tuple[int, int]:
    check_context()
    return max(TOTAL_BYTES - METER.allocated_bytes, 0), TOTAL_BYTES


def _set_fraction(fraction: float, device: Any = None) -> None:
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    METER.fraction = fraction


_ANSWERS: Final[dict[str, Any]] = {
    "memory_allocated memory_reserved memory_cached device_memory_used": lambda device=None: (
        METER.allocated_bytes
    ),
    "max_memory_allocated max_memory_reserved max_memory_cached": lambda device=None: (
        METER.peak_bytes
    ),
    "memory_stats": _statistics,
    "memory_stats_as_nested_dict": _nested_statistics,
    "host_memory_stats host_memory_stats_as_nested_dict": lambda device=None: {},
    "memory_summary": lambda device=None, abbreviated=False: (
        f"{METER.allocated_bytes} bytes in live tensors, peak {METER.peak_bytes}"
    ),
    "memory_snapshot": lambda *args, **kwargs: [],
    "mem_get_info get_memory_info": _free_and_total,
    "reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached": (
        lambda device=None: METER.reset_peak()
    ),
    "reset_accumulated_memory_stats reset_accumulated_host_memory_stats": constant(None),
    "reset_peak_host_memory_stats empty_host_cache ipc_collect": constant(None),
    "empty_cache": check_context,
    "set_per_process_memory_fraction": _set_fraction,
    "get_per_process_memory_fraction": lambda device=None: METER.fraction,
    "get_allocator_backend": constant("native"),
}
MEMORY_FUNCTIONS: Final = {
    name: answer for names, answer in _ANSWERS.items() for name in names.split()
}
"""Answers by the name that torch.cuda and torch.accelerator give them."""
