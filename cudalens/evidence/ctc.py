"""Which items of a batch have more labels than ``ctc_loss`` can place in their input.

Each label takes one time step, and two equal labels in a row need a blank between them.  With fewer
steps no alignment exists, and the loss is infinite for any scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core.evidence_types import ShortInput


def short_input(arguments: Mapping[str, Any]) -> ShortInput | None:
    """Return the first item with too few steps, and how many such items there are.

    Args:
        arguments: the arguments of ``ctc_loss``; ``targets`` padded or concatenated.
    """
    targets = arguments.get("targets")
    with _torch.plain_torch(), _torch.no_dispatch_modes():
        steps, lengths = (_numbers(arguments.get(f"{it}_lengths")) for it in ("input", "target"))
        if not isinstance(targets, Tensor) or len(steps) != len(lengths) or not steps:
            return None
        rows = _rows(targets.detach().cpu(), lengths)
    found = []
    for item, (row, given) in enumerate(zip(rows, steps, strict=False)):
        repeats = int((row[1:] == row[:-1]).sum())
        if given < len(row) + repeats:
            found.append((item, given, len(row), repeats))
    return ShortInput(*found[0], len(found), len(steps)) if found else None


def _numbers(lengths: Any) -> list[int]:
    """Return lengths from a tensor, or from a list or tuple of integers."""
    if isinstance(lengths, Tensor):
        return [*map(int, lengths.detach().flatten().tolist())]
    listed = lengths if isinstance(lengths, list | tuple) else ()
    return [*listed] if all(type(it) is int for it in listed) else []


def _rows(targets: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    """Return the labels of each item, empty if the lengths do not fit."""
    if targets.dim() == 1 and min(lengths) >= 0 and sum(lengths) <= len(targets):
        return torch.split(targets[: sum(lengths)], lengths)
    if targets.dim() == 2 and len(targets) == len(lengths):
        return tuple(row[:length] for row, length in zip(targets, lengths, strict=True))
    return ()
