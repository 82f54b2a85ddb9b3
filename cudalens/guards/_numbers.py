"""Arithmetic that the guards of probabilities, weights and rates share."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from cudalens.core.report_types import Bounds, Number, Offender, Offenders, Violation
from cudalens.core.tensor_values import find_offenders
from cudalens.guards._ranges import extremes, spelled

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""The dtypes that the sampling and loss kernels are compiled for; others are host errors."""
_MOST_DIGITS = 17
_MOST_FLAGS = 1024


def lies_between(tensor: Tensor, low: float, high: float, dtype: torch.dtype | None = None) -> bool:
    """Tell whether every element lies in ``[low, high]``; NaN does not, empty tensors do.

    Args:
        dtype: what the kernel converts the elements to before it compares them.
    """
    if tensor.numel() == 0:
        return True
    smallest, largest = extremes(tensor)
    if dtype is not None and dtype != tensor.dtype:
        # Rounding keeps the order, so that the two ends stand for all.
        smallest, largest = torch.tensor([smallest, largest], dtype=dtype).tolist()
    return bool(low <= smallest and largest <= high)


def all_true(flags: Tensor) -> bool:
    """Tell whether every flag is true; a few are copied as they are, which saves a reduction."""
    return all(flags.reshape(-1).tolist()) if flags.numel() <= _MOST_FLAGS else bool(flags.all())


def outside_mask(tensor: Tensor, low: float, high: float) -> Tensor:
    """Give bool[shape of tensor], true where a value is not in ``[low, high]``; NaN is not."""
    return ((tensor >= low) & (tensor <= high)).logical_not_()


def exact_offenders(tensor: Tensor, bad: Tensor) -> Offenders:
    """Give the offenders with values that tell them apart from the bound: never 1.0 for 1.0000001.

    Each is the shortest decimal number that is the element again in the tensor's dtype.
    """
    found = find_offenders(tensor, bad)
    if not tensor.is_floating_point():
        return found
    first = tuple(
        replace(item, value=_shortest(item, tensor)) if isinstance(item.value, float) else item
        for item in found.first
    )
    return replace(found, first=first)


def _shortest(offender: Offender, tensor: Tensor) -> Number:
    value = float(tensor[offender.position].item())
    for digits in range(1, _MOST_DIGITS):
        rounded = float(f"{value:.{digits}g}")
        if torch.tensor(rounded, dtype=tensor.dtype).item() == value:
            return rounded
    return value


def bad_numbers(
    tensor: Tensor,
    bad: Tensor,
    *,
    guard: str,
    argument: str,
    bounds: Bounds,
    why: str,
    device_text: str | None,
) -> Violation:
    """Describe the numbers that ``bad`` marks; called only when there are some."""
    offenders = exact_offenders(tensor, bad)
    return Violation(
        guard=guard,
        op="",
        overload="",
        argument=argument,
        headline=f"{spelled(argument, offenders)} {_complaint(offenders.first[0].value, bounds)}",
        explanation=why,
        offenders=offenders,
        bounds=bounds,
        is_index=False,
        device_text=device_text,
    )


def _complaint(value: Number, bounds: Bounds) -> str:
    number = math.nan if value is None else float(value)
    if math.isnan(number):
        return "is not a number"
    if bounds.max is not None:
        return f"is outside the interval {bounds.text}"
    return "is infinite" if number > 0 else "is negative"
