"""What the guards of offsets share: where a span between two offsets leaves the data."""

from __future__ import annotations

import torch
from torch import Tensor

from cudalens.core.report_types import Bounds, Violation
from cudalens.core.tensor_values import find_offenders
from cudalens.guards._dims import INDEX_DTYPES
from cudalens.guards._ranges import lies_within, spelled


def spans_lie_inside(
    offsets: Tensor,
    size: int,
    *,
    guard: str,
    argument: str,
    place: str,
    why: str,
    related: str,
    dim: int | None = 0,
    longest: int | None = None,
    list_position: int | None = None,
) -> Violation | None:
    """Check that spans from one offset to the next lie in ``[0, size]`` where they have elements.

    Args:
        offsets: of the last dimension, one more than there are spans.
        place: what they are outside of, with ``{related}`` for the argument that sets the bound.
        longest: elements of a span that are read at most.
    """
    if offsets.dtype not in INDEX_DTYPES or offsets.dim() == 0 or offsets.size(-1) < 2:
        return None
    if lies_within(offsets, 0, size):
        return None
    bad = _outside(offsets, size, longest)
    if not bool(bad.any()):
        return None
    offenders = find_offenders(offsets, bad)
    return Violation(
        guard=guard,
        op="",
        overload="",
        argument=argument,
        headline=f"{spelled(argument, offenders, list_position)} is outside {place}",
        explanation=why,
        offenders=offenders,
        bounds=Bounds(min=0, max=size, text=f"0 … {size}"),
        related=related,
        size=size,
        dim=dim,
        list_position=list_position,
        is_silent=True,
        is_replay_safe=False,
    )


def _outside(offsets: Tensor, size: int, longest: int | None) -> Tensor:
    """Mark the ends of spans behind the data, and the starts before it."""
    offsets = offsets.to(torch.int64)
    starts, lengths = offsets[..., :-1], offsets.diff(dim=-1)
    if longest is not None:
        lengths = lengths.clamp(max=longest)
    bad = torch.zeros_like(offsets, dtype=torch.bool)
    bad[..., 1:] |= (starts + lengths > size) & (lengths > 0)
    bad[..., :-1] |= (starts < 0) & (lengths > 0)
    return bad
