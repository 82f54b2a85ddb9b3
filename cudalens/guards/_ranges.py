"""Arithmetic that the guards share: one reduction to decide, everything else after the fact."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cudalens.core.report_types import (
    Bounds,
    Number,
    Offender,
    Offenders,
    Violation,
)
from cudalens.core.tensor_values import find_offenders, outside

FEW = 256
"""Elements up to this number are copied to the host and reduced there, without a launch."""
HANDFUL = 64
"""Elements up to this number are compared by Python, which is faster than any op of torch's."""
# `aminmax` has no kernel for these dtypes.
_UNREDUCED = frozenset({torch.uint16, torch.uint32, torch.uint64})


def extremes(tensor: Tensor) -> tuple[Any, Any]:
    """Return the smallest and the largest element with one fused reduction and one copy.

    Both land in one buffer, so that the host waits once; a few elements are copied as they are.
    NaN wins over every number.

    Args:
        tensor: at least one element, any strides.
    """
    if 0 in tensor.stride():
        tensor = unexpanded(tensor)
    if tensor.dtype in _UNREDUCED:
        tensor = tensor.to(torch.int64)
    count = tensor.numel()
    if count <= FEW:
        return extremes_on_host(tensor if tensor.is_cpu else tensor.cpu(), count)
    buffer = tensor.new_empty(2)
    torch.aminmax(tensor, out=buffer.unbind())
    low, high = buffer.tolist()
    return low, high


def extremes_on_host(tensor: Tensor, count: int) -> tuple[Any, Any]:
    """Return the smallest and the largest of the ``count`` elements of a CPU tensor."""
    if count == 1:
        value = tensor.item()
        return value, value
    # Not for floats: `min` of Python returns a NaN only if it comes first.
    if count <= HANDFUL and tensor.dim() == 1 and not tensor.is_floating_point():
        values = tensor.tolist()
        return min(values), max(values)
    smallest, largest = torch.aminmax(tensor)
    return smallest.item(), largest.item()


def unexpanded(tensor: Tensor) -> Tensor:
    """Return a view that holds each element of memory once, without the repeats of ``expand``."""
    if 0 not in tensor.stride():
        return tensor
    strides = tensor.stride()
    sizes = [size if step else 1 for size, step in zip(tensor.shape, strides, strict=True)]
    return tensor.as_strided(sizes, strides)


def lies_within(tensor: Tensor, low: int, high: int) -> bool:
    """Return whether every element is in the closed interval ``[low, high]``; empty ones do."""
    if tensor.numel() == 0:
        return True
    smallest, largest = extremes(tensor)
    return bool(low <= smallest and largest <= high)


def format_interval(low: object, high: object, also: tuple[tuple[int, str], ...] = ()) -> str:
    """Return an interval for reading: ``0 … 9 or -100 (ignore_index)``; none is ``nothing``."""
    empty = isinstance(low, int) and isinstance(high, int) and high < low
    text = "nothing" if empty else f"{low} … {high}"
    return " or ".join([text, *(f"{value} ({name})" for value, name in also)])


def format_position(offenders: Offenders, list_position: int | None = None) -> str:
    """Return the place of the first offender as ``{argument}[17]``, with the name left open."""
    position = offenders.first[0].position
    at = f"[{', '.join(map(str, position))}]" if position else ""
    part = "" if list_position is None else f"[{list_position}]"
    return f"{{argument}}{part}{at}"


def format_offender(offenders: Offenders, list_position: int | None = None) -> str:
    """Return the first offender as ``{argument}[17] = 10``, with the name left open."""
    return f"{format_position(offenders, list_position)} = {offenders.first[0].value}"


def violation_at(
    tensor: Tensor, bad: Tensor, says: str, *, argument: str, **fields: Any
) -> Violation:
    """Describe the elements that ``bad`` marks; called only when there are some.

    Args:
        says: what follows the first of them in the headline.
        fields: the other fields of the violation.
    """
    bounds = fields.get("bounds", Bounds())
    offenders = find_offenders(tensor, bad, marked=bounds.also_allowed)
    first = format_offender(offenders, fields.get("list_position"))
    return Violation(
        argument=argument,
        headline=f"{first} {says}",
        element=first,
        offenders=offenders,
        **fields,
    )


def out_of_range(
    tensor: Tensor,
    *,
    argument: str,
    low: int,
    high: int,
    place: str,
    why: str = "",
    also: tuple[tuple[int, str], ...] = (),
    bad: Tensor | None = None,
    **fields: Any,
) -> Violation:
    """Describe the elements of ``tensor`` outside ``[low, high]``; called only when there are some.

    Args:
        place: what they are outside of, with ``{related}`` for the argument that sets the bound:
            ``the 10 classes of {related}``.
        why: one sentence on what the kernel does with the value.
        also: single values allowed besides the interval, with the name of each.
        bad: bool mask of the bad elements, where the interval alone does not tell.
        fields: the other fields of the violation, such as ``related`` and ``size``.
    """
    if bad is None:
        bad = outside(tensor, low, high)
        for value, _ in also:
            bad &= tensor != value
    bounds = Bounds(
        min=low,
        max=high,
        also_allowed=tuple(value for value, _ in also),
        text=format_interval(low, high, also),
    )
    fields |= {"argument": argument, "explanation": why, "bounds": bounds}
    return violation_at(tensor, bad, f"is outside {place}", **fields)


# --- probabilities, weights and rates -------------------------------------------------------------


FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""The dtypes that the sampling and loss kernels are compiled for; others are host errors."""
# This many significant digits tell any two float64 numbers apart.
_MOST_DIGITS = 17
_MOST_FLAGS = 1024


def all_true(flags: Tensor) -> bool:
    """Return whether every flag is true; a few are copied as they are, which saves a reduction."""
    return all(flags.reshape(-1).tolist()) if flags.numel() <= _MOST_FLAGS else bool(flags.all())


def outside_mask(tensor: Tensor, low: float, high: float) -> Tensor:
    """Return bool[shape of tensor], true where a value is not in ``[low, high]``; NaN is not."""
    return ((tensor >= low) & (tensor <= high)).logical_not_()


def exact_offenders(tensor: Tensor, bad: Tensor) -> Offenders:
    """Return the offenders with values that differ from the bound: never 1.0 for 1.0000001.

    Each is the shortest decimal number that is the element again in the tensor's dtype.
    """
    offenders = find_offenders(tensor, bad)
    first = tuple(
        replace(item, value=_shortest(item, tensor)) if isinstance(item.value, float) else item
        for item in offenders.first
    )
    return replace(offenders, first=first)


def _shortest(offender: Offender, tensor: Tensor) -> Number:
    value = float(tensor[offender.position].item())
    for digits in range(1, _MOST_DIGITS):
        rounded = float(f"{value:.{digits}g}")
        if torch.tensor(rounded, dtype=tensor.dtype).item() == value:
            return rounded
    return value


def bad_numbers(
    tensor: Tensor, bad: Tensor, *, argument: str, bounds: Bounds, why: str, device_text: str | None
) -> Violation:
    """Describe the numbers that ``bad`` marks; called only when there are some."""
    offenders = exact_offenders(tensor, bad)
    first = offenders.first[0].value
    number = math.nan if first is None else float(first)
    if math.isnan(number):
        says = "is not a number"
    elif bounds.max is not None:
        says = f"is outside the interval {bounds.text}"
    else:
        says = "is infinite" if number > 0 else "is negative"
    return Violation(
        argument=argument,
        headline=f"{format_offender(offenders)} {says}",
        explanation=why,
        offenders=offenders,
        bounds=bounds,
        is_index=False,
        device_text=device_text,
    )


def breaks(violation: Violation) -> Callable[[Tensor], bool]:
    """Return a test that tells whether a tensor holds a value outside the violated bound."""
    if violation.offenders.first and violation.offenders.first[0].value == "nan":
        # Numbers outside the bound are another matter: the first NaN is what is looked for.
        return lambda tensor: tensor.is_floating_point() and bool(tensor.isnan().any())
    low, high = violation.bounds.min, violation.bounds.max
    also = violation.bounds.also_allowed

    def is_bad(tensor: Tensor) -> bool:
        if low is None or high is None or tensor.numel() == 0:
            return False
        smallest, largest = extremes(tensor)
        if float(low) <= smallest and largest <= float(high):
            return False
        if not also:
            return True
        inside = tensor >= float(low)
        inside &= tensor <= float(high)
        for value in also:
            inside |= tensor == value
        return not bool(inside.all())

    return is_bad
