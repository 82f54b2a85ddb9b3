"""What the guards of indexed dimensions share: the size of a dimension, the check, the wording."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Bounds, Violation
from cudalens.core.tensor_values import find_offenders
from cudalens.guards._ranges import format_offender, lies_within, out_of_range

INDEX_DTYPES = (torch.int64, torch.int32)
Text = str | Callable[[], str]
"""A line of an assert, or what gives it once it is needed."""
STOPS = "The kernel stops at an index outside its dimension"
NEGATIVES_WRAP = f"{STOPS}; a negative one counts from the end."
NEGATIVES_STOP = f"{STOPS}; negative ones do not count from the end here."
NARROWED = "The kernel compares the low 32 bits alone: they are another index, and nothing asserts."
_MOST_32_BITS = (1 << 31) - 1


def dim_size(tensor: Tensor, dim: int) -> tuple[int, int] | None:
    """Return a dimension counted from 0 and its size; a 0-dim tensor has one of size 1.

    ``None`` where there is no such dimension: torch refuses that on the host.
    """
    rank = max(tensor.dim(), 1)
    if not -rank <= dim < rank:
        return None
    return (dim % rank, tensor.size(dim) if tensor.dim() else 1)


def fits(inner: Sequence[int], outer: Sequence[int], *, but: int = -1) -> bool:
    """Return whether ``inner`` is no larger than ``outer`` in every dimension but one."""
    if max(len(inner), 1) != max(len(outer), 1):
        return False
    return all(
        mine <= theirs or dim == but
        for dim, (mine, theirs) in enumerate(zip(inner, outer, strict=False))
    )


def broadcast(shapes: Iterable[Sequence[int]]) -> tuple[int, ...] | None:
    """Return the common shape without making a tensor; ``None`` where the shapes do not fit."""
    common: list[int] = []
    for shape in shapes:
        common[:0] = [1] * (len(shape) - len(common))
        for back in range(1, len(shape) + 1):
            if common[-back] == 1:
                common[-back] = shape[-back]
            elif shape[-back] not in (1, common[-back]):
                return None
    return tuple(common)


def counts_in_32_bits(*tensors: Tensor) -> bool:
    """Return whether a kernel counts the elements of all these tensors in 32 bits."""
    return all(
        tensor.numel() < _MOST_32_BITS
        and sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        < _MOST_32_BITS
        for tensor in tensors
    )


def passes_narrowed(index: Tensor, high: int, *, is_signed: bool = False) -> bool:
    """Return whether 32 bits of every element lie in [0, high]: a kernel that cuts them asserts
    none.

    Called only when something is wrong.
    """
    low_bits = index.to(torch.int32).to(torch.int64) if is_signed else index.long() & 0xFFFFFFFF
    return lies_within(low_bits, 0, high)


def format_count(number: int, noun: str) -> str:
    """Return ``1 row`` or ``3 rows``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def assert_line(text: Text) -> str:
    """Return the line of an assert."""
    return text if isinstance(text, str) else text()


def index_of_dim(
    index: Tensor,
    target: Tensor,
    dim: int,
    *,
    device_text: Text,
    wraps: bool = False,
    narrows: Callable[[], bool] | None = None,
    argument: str = "index",
) -> Violation | None:
    """Check an index into one dimension of ``self``; an index that is no index is torch's matter.

    Args:
        wraps: whether the kernel counts negative values from the end.
        narrows: tells, once something is wrong, whether the kernel compares 32 bits alone.
    """
    place = dim_size(target, dim)
    if place is None or index.dtype not in INDEX_DTYPES:
        return None
    dim, size = place
    # Kernels that count from the end run after a host check for a dimension without elements.
    if wraps and size == 0:
        return None
    low = -size if wraps else 0
    if lies_within(index, low, size - 1):
        return None
    is_narrowed = narrows is not None and narrows() and passes_narrowed(index, size - 1)
    why = NEGATIVES_WRAP if wraps else NEGATIVES_STOP
    return out_of_range(
        index,
        argument=argument,
        low=low,
        high=size - 1,
        place=f"dimension {dim} (size {size}) of {{related}}",
        why=NARROWED if is_narrowed else why,
        device_text=None if is_narrowed else assert_line(device_text),
        related="self",
        size=size,
        dim=dim,
    )


# --- offsets: spans from one to the next ----------------------------------------------------------


def spans_lie_inside(
    offsets: Tensor,
    size: int,
    *,
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
        argument=argument,
        headline=f"{format_offender(argument, offenders, list_position)} is outside {place}",
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


# --- which kernel is picked, and so which line is printed -----------------------------------------


_SMALL_INDEX_COUNT = 16
_VECTOR_BYTES = 16


def index_add_text(index: Tensor) -> str:
    """Return the line of the kernel that ``index_add`` picks by the number of indices."""
    return (
        assert_text("index_add_small")
        if index.numel() <= _SMALL_INDEX_COUNT
        else assert_text("index_add_large")
    )


def compares_32_bits(source: Tensor, index: Tensor) -> bool:
    """Return whether ``index_select`` and ``embedding`` cut their indices to 32 bits."""
    return index.numel() <= _SMALL_INDEX_COUNT and counts_in_32_bits(source, index)


def lookup_text(source: Tensor, dim: int, index: Tensor) -> str:
    """Return the line of the kernel that ``index_select`` and ``embedding`` pick."""
    if index.numel() <= _SMALL_INDEX_COUNT:
        return assert_text("index_select_small")
    return (
        assert_text("gather_rows_fast")
        if copies_whole_rows(source, dim)
        else assert_text("gather_scatter")
    )


def gather_text(source: Tensor, dim: int, index: Tensor) -> str:
    """Return the line of the kernel that ``gather`` picks: an expanded index copies whole rows."""
    is_expanded = index.dim() > 1 and not any(index.stride()[1:])
    return (
        assert_text("gather_rows_fast")
        if is_expanded and copies_whole_rows(source, dim)
        else assert_text("gather_scatter")
    )


def scatter_add_text(target: Tensor, dim: int, index: Tensor) -> str:
    """Return the line of the kernel that ``scatter_add`` picks: an expanded index adds whole
    rows.
    """
    is_expanded = index.dim() > 1 and not any(index.stride()[1:])
    return (
        assert_text("scatter_add_rows_fast")
        if is_expanded and copies_whole_rows(target, dim)
        else assert_text("gather_scatter")
    )


def copies_whole_rows(source: Tensor, dim: int) -> bool:
    """Return whether the row kernels apply: contiguous rows in multiples of 16 bytes."""
    if source.dim() < 2 or dim % source.dim() != 0 or not source.is_contiguous():
        return False
    row_bytes = source.stride(0) * source.element_size()
    return row_bytes % _VECTOR_BYTES == 0 and source.data_ptr() % _VECTOR_BYTES == 0
