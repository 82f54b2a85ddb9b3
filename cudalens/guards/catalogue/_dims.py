"""Helpers of the guards of indexed dimensions: sizes, shapes, which kernel is picked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from cudalens.guards.engine import INDEX_DTYPES, Asserts, Late, Need, Within

_EXISTS = "Each index must exist in that dimension."
NEGATIVES_WRAP = f"{_EXISTS} Negative ones count from the end."
NEGATIVES_STOP = f"{_EXISTS} Negative ones do not count from the end here."
_MOST_32_BITS = (1 << 31) - 1


def dim_size(tensor: Tensor, dim: int) -> tuple[int, int] | None:
    """Return a dimension counted from 0 and its size; a 0-dim tensor has one of size 1.

    ``None`` where there is no such dimension: torch refuses that on the host.
    """
    shape = tensor.shape or (1,)
    rank = len(shape)
    return (dim % rank, shape[dim]) if -rank <= dim < rank else None


def fits(inner: Sequence[int], outer: Sequence[int], *, but: int = -1) -> bool:
    """Return whether ``inner`` is no larger than ``outer`` in every dimension but one."""
    if max(len(inner), 1) != max(len(outer), 1):
        return False
    for dim, (mine, theirs) in enumerate(zip(inner, outer)):  # noqa: B905  one may have no dimension
        if mine > theirs and dim != but:
            return False
    return True


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


def index_of_dim(
    index: Tensor,
    target: Tensor,
    dim: int,
    *,
    asserts: Asserts,
    wraps: bool = False,
    narrows: Late | bool = False,
) -> Need:
    """Require an index into one dimension of ``self``; one that is no index is torch's matter.

    Args:
        wraps: whether the kernel counts negative values from the end.
    """
    place = dim_size(target, dim)
    if place is None or index.dtype not in INDEX_DTYPES:
        return None
    dim, size = place
    # Kernels that count from the end run after a host check for a dimension without elements.
    if wraps and size == 0:
        return None
    low, why = (-size, NEGATIVES_WRAP) if wraps else (0, NEGATIVES_STOP)
    return Within(
        "index", low, size - 1, of="self", dim=dim, why=why, asserts=asserts, narrows=narrows
    )


# --- which kernel is picked, and so which assertion fails ----------------------------------------


_SMALL_INDEX_COUNT = 16
_VECTOR_BYTES = 16


def index_add_key(index: Tensor) -> str:
    """Return the assertion of the kernel that ``index_add`` picks by the number of indices."""
    return "index_add_small" if index.numel() <= _SMALL_INDEX_COUNT else "index_add_large"


def compares_32_bits(source: Tensor, index: Tensor) -> bool:
    """Return whether ``index_select`` and ``embedding`` cut their indices to 32 bits."""
    return index.numel() <= _SMALL_INDEX_COUNT and counts_in_32_bits(source, index)


def lookup_key(source: Tensor, dim: int, index: Tensor) -> str:
    """Return the assertion of the kernel that ``index_select`` and ``embedding`` pick."""
    if index.numel() <= _SMALL_INDEX_COUNT:
        return "index_select_small"
    return "gather_rows_fast" if copies_whole_rows(source, dim) else "gather_scatter"


def rows_key(fast: str, rows: Tensor, dim: int, index: Tensor, *_: object) -> str:
    """Return ``fast`` where an expanded index lets whole rows be copied or added."""
    is_expanded = index.dim() > 1 and not any(index.stride()[1:])
    return fast if is_expanded and copies_whole_rows(rows, dim) else "gather_scatter"


def copies_whole_rows(source: Tensor, dim: int) -> bool:
    """Return whether the row kernels apply: contiguous rows in multiples of 16 bytes."""
    if source.dim() < 2 or dim % source.dim() != 0 or not source.is_contiguous():
        return False
    row_bytes = source.stride(0) * source.element_size()
    return row_bytes % _VECTOR_BYTES == 0 and source.data_ptr() % _VECTOR_BYTES == 0
