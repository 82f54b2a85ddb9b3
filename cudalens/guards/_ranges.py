"""Arithmetic that the guards share: one reduction to decide, everything else after the fact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudalens.core.report_types import Bounds, Offenders, Violation
from cudalens.core.tensor_values import find_offenders, outside

FEW = 64
"""So many integers are looked at one by one in the time that it takes to launch a reduction."""


def few(tensor: Tensor) -> set[int] | None:
    """Give the integers of a tensor, ``None`` where they are not few or no integers."""
    if tensor.numel() > FEW or tensor.is_floating_point():
        return None
    return {*(tensor if tensor.dim() == 1 else tensor.reshape(-1)).tolist()}


def extremes(tensor: Tensor) -> tuple[Any, Any]:
    """Give the smallest and the largest element with one fused reduction and one copy.

    Both land in one buffer, so that the host waits once; a few integers are copied as they are,
    which saves the reduction.  NaN wins over every number.

    Args:
        tensor: at least one element, any strides.
    """
    tensor = unexpanded(tensor)
    if (values := few(tensor)) is not None:
        return min(values), max(values)
    buffer = tensor.new_empty(2)
    torch.aminmax(tensor, out=(buffer[0], buffer[1]))
    low, high = buffer.tolist()
    return low, high


def unexpanded(tensor: Tensor) -> Tensor:
    """Give a view that holds each element of memory once: the repeats of ``expand`` are dropped."""
    if 0 not in tensor.stride():
        return tensor
    strides = tensor.stride()
    sizes = [size if step else 1 for size, step in zip(tensor.shape, strides, strict=True)]
    return tensor.as_strided(sizes, strides)


def lies_within(tensor: Tensor, low: int, high: int) -> bool:
    """Tell whether every element lies in the closed interval ``[low, high]``; empty ones do."""
    if tensor.numel() == 0:
        return True
    smallest, largest = extremes(tensor)
    return bool(low <= smallest and largest <= high)


def interval_text(low: object, high: object, also: tuple[tuple[int, str], ...] = ()) -> str:
    """Give an interval for reading: ``0 … 9 or -100 (ignore_index)``; none is ``nothing``."""
    empty = isinstance(low, int) and isinstance(high, int) and high < low
    text = "nothing" if empty else f"{low} … {high}"
    return " or ".join([text, *(f"{value} ({name})" for value, name in also)])


def spelled(argument: str, offenders: Offenders, list_position: int | None = None) -> str:
    """Give the first offender as ``{argument}[17] = 10``, with the name left open."""
    first = offenders.first[0]
    at = f"[{', '.join(str(item) for item in first.position)}]" if first.position else ""
    part = "" if list_position is None else f"[{list_position}]"
    return f"{{argument}}{part}{at} = {first.value}"


def out_of_range(
    tensor: Tensor,
    *,
    argument: str,
    low: int,
    high: int,
    place: str,
    guard: str = "",
    op: str = "",
    why: str = "",
    device_text: str | None = None,
    also: tuple[tuple[int, str], ...] = (),
    bad: Tensor | None = None,
    related: str | None = None,
    size: int | None = None,
    dim: int | None = None,
    list_position: int | None = None,
    is_index: bool = True,
    is_silent: bool = False,
    is_replay_safe: bool = True,
) -> Violation:
    """Describe the elements of ``tensor`` outside ``[low, high]``; called only when there are some.

    Args:
        place: what they are outside of, with ``{related}`` for the argument that sets the bound:
            ``the 10 classes of {related}``.
        why: one sentence on what the kernel does with the value.
        also: single values allowed besides the interval, with the name of each.
        bad: bool mask of the bad elements, where the interval alone does not tell.
    """
    if bad is None:
        bad = outside(tensor, low, high)
        for value, _ in also:
            bad &= tensor != value
    offenders = find_offenders(tensor, bad)
    return Violation(
        guard=guard,
        op=op,
        overload="",
        argument=argument,
        headline=f"{spelled(argument, offenders, list_position)} is outside {place}",
        explanation=why,
        offenders=offenders,
        bounds=Bounds(
            min=low,
            max=high,
            also_allowed=tuple(value for value, _ in also),
            text=interval_text(low, high, also),
        ),
        is_index=is_index,
        related=related,
        size=size,
        dim=dim,
        list_position=list_position,
        device_text=device_text,
        is_silent=is_silent,
        is_replay_safe=is_replay_safe,
    )
