"""Device asserts of the rehearsal device, by the requirements of the guards.

A violation gives the line, the requirement the harmless values that the CPU kernel runs with.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from cudalens.core.report_types import Violation
from cudalens.guards import GUARDS
from cudalens.guards._base import OF_USER, Guard
from cudalens.guards.engine import Condition, in_bounds

Arguments = Mapping[str, Any]


_HOPPER = "runs on compute capability 9.0 or newer only; the rehearsal device is older"
NOT_SIMULATED: Mapping[str, str] = MappingProxyType(
    {
        "scatter_add_tma": _HOPPER,
        "scatter_add_cutedsl": "belongs to an optional package of compiled kernels",
        "ctc_loss_capture": "asserts only while a CUDA graph is captured",
        "grouped_mm_offsets": _HOPPER,
        "grouped_mm_alignment": _HOPPER,
        "scaled_grouped_mm_mx": "runs on compute capability 10.0 only and has no CPU kernel",
        "nccl_nan_check": "launched by NCCL process groups, not by an op",
        "nvshmem_splits": "needs NVSHMEM and several GPUs",
        "inductor_indirect": "part of generated Triton code, which cannot run without a GPU",
    }
)
"""Assertions of the inventory that the rehearsal device never hits, each with the reason."""


def look(op: Any, arguments: Arguments) -> tuple[str | None, dict[str, Any]]:
    """Return the line that an op's CUDA kernel prints, if any, and values in place of bad ones.

    Args:
        op: an overload of torch's own.
        arguments: on the CPU, by schema name.
    """
    text: str | None = None
    harmless: dict[str, Any] = {}
    for guard in GUARDS.get(op, ()):
        is_rehearsed = not guard.records or not NOT_SIMULATED.keys() >= {*guard.records}
        if guard.frequency == OF_USER or not is_rehearsed:
            continue
        violation = guard.check(*(arguments[name] for name in guard.parameters))
        if violation is not None:
            if text is None and violation.device_text is not None:  # CUDA asserts it
                place, _, expression = violation.device_text.partition("Assertion ")
                text = f"{place}block: [0,0,0], thread: [0,0,0] Assertion {expression}"
            harmless |= _harmless(guard, violation, {**arguments, **harmless})
    return text, harmless


def _harmless(guard: Guard, violation: Violation, arguments: Arguments) -> dict[str, Any]:
    """Return arguments with which the CPU kernel neither refuses the call nor leaves its memory."""
    need = guard.requires(*(arguments[name] for name in guard.parameters))
    if isinstance(need, Condition):
        return _without(violation, arguments)
    if not isinstance(need, list):
        return {need.argument: in_bounds(need, arguments[need.argument])}
    indices = list(arguments[need[0].argument])
    for item in need:
        indices[item.item] = in_bounds(item, indices[item.item])
    return {need[0].argument: indices}


def _without(violation: Violation, arguments: Arguments) -> dict[str, Any]:
    """Return arguments that fulfil any condition."""
    if violation.is_silent and violation.is_replay_safe:
        return {}
    if "plain_idx" in arguments:
        compressed, plain = arguments["compressed_idx"], arguments["plain_idx"]
        empty = plain.new_empty((*plain.shape[:-1], 0))
        return {"compressed_idx": torch.zeros_like(compressed), "plain_idx": empty, "nnz": 0}
    name = str(violation.argument)
    if name == "self":  # weights to draw from, or a condition that is to be true
        return {name: torch.ones_like(arguments[name])}
    replaced = torch.zeros_like(arguments[name])  # a mask, offsets, lengths, repeats
    if name == "repeats":
        replaced[0] = arguments["output_size"]
    return {name: replaced}
