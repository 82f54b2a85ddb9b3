"""The memory figures of torch.cuda and torch.accelerator: what live tensors take, nothing more."""

from __future__ import annotations

from typing import Any

from cudalens.simulate.memory import METER, TOTAL_BYTES


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
