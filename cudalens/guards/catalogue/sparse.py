"""The guard of compressed sparse layouts: their invariants, where torch is asked to check them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Bounds, Violation, format_count
from cudalens.guards._base import guard
from cudalens.guards._ranges import format_interval, violation_at
from cudalens.guards.engine import INDEX_DTYPES, Condition, Need

_WHY = (
    "Compressed sparse tensors rely on this, and CUDA's check stops at the first violation without "
    "naming it."
)


class _Breach(NamedTuple):
    """One invariant: where it is broken, and the words for it."""

    argument: str
    values: Tensor
    bad: Tensor
    complaint: str
    allowed: str


def _falls(compressed: Tensor, plain: Tensor, nnz: int) -> Tensor:
    """Mark the plain indices that are not larger than the one before in the same line."""
    starts = torch.zeros(*plain.shape[:-1], nnz + 1, dtype=torch.bool, device=plain.device)
    # As int64: scatter takes no other index before torch 2.8.
    starts.scatter_(-1, compressed[..., :-1].clamp(0, nnz).long(), True)
    falls = torch.zeros_like(plain, dtype=torch.bool)
    if nnz > 1:
        is_no_rise = plain[..., 1:] <= plain[..., :-1]
        torch.logical_and(is_no_rise, ~starts[..., 1:nnz], out=falls[..., 1:])
    return falls


@guard(
    "aten::_validate_compressed_sparse_indices",
    records=("sparse_compressed_invariants",),
    waits=True,
)
def compressed_sparse_indices_hold(
    is_crow: bool, compressed_idx: Tensor, plain_idx: Tensor, dim: int, nnz: int
) -> Need:
    """Row starts run from 0 to nnz in steps of [0, columns]; columns in [0, columns - 1] rise.

    For CSC and BSC rows and columns swap.  Torch checks this only where invariants are asked for.

    Source:   ValidateCompressedIndicesCommon.h:44, torch 2.13.0
    Cost:     comparisons over both index tensors, one reduction, one copy of one truth value
    Passes:   aten._validate_compressed_sparse_indices(True, tensor([0, 2, 3]), tensor([0, 3, 1]),
              2, 4, 3)
    Violates: aten._validate_compressed_sparse_indices(True, tensor([0, 2, 3]), tensor([0, 4, 1]),
              2, 4, 3)
    """
    shapes_fit = (
        compressed_idx.dim() > 0
        and plain_idx.dim() > 0
        and plain_idx.size(-1) == nnz
        and compressed_idx.shape[:-1] == plain_idx.shape[:-1]
    )
    if not shapes_fit or compressed_idx.numel() == 0 or compressed_idx.dtype not in INDEX_DTYPES:
        return None
    lines = ("row", "column") if is_crow else ("column", "row")
    return Condition(lambda: _breach(compressed_idx, plain_idx, lines, dim, nnz))


def _breach(
    compressed: Tensor, plain: Tensor, lines: tuple[str, str], dim: int, nnz: int
) -> Violation | None:
    major, minor = lines
    first, last, steps = (torch.zeros_like(compressed, dtype=torch.bool) for _ in range(3))
    torch.ne(compressed[..., :1], 0, out=first[..., :1])
    torch.ne(compressed[..., -1:], nnz, out=last[..., -1:])
    widths = compressed.diff(dim=-1)
    torch.logical_or(widths < 0, widths > dim, out=steps[..., 1:])
    outside = (plain < 0) | (plain >= dim)
    falls = _falls(compressed, plain, nnz)
    starts, places = ("compressed_idx", compressed), ("plain_idx", plain)
    is_last = f"must be {nnz}: the number of stored values"
    is_near = f"must be 0 … {dim} above the one before it: a {major} has {dim} places"
    is_outside = f"is outside the {format_count(dim, minor)} of the tensor"
    rises = f"must be larger than the one before it in the same {major}"
    # The first one that is broken is reported.
    breaches = (
        _Breach(*starts, first, "must be 0", "0"),
        _Breach(*starts, last, is_last, str(nnz)),
        _Breach(*starts, steps, is_near, f"0 … {dim} more than the one before"),
        _Breach(*places, outside, is_outside, format_interval(0, dim - 1)),
        _Breach(*places, falls, rises, f"rising within a {major}"),
    )
    if not bool(torch.cat([item.bad.reshape(-1) for item in breaches]).any()):
        return None
    item = next(one for one in breaches if bool(one.bad.any()))
    return violation_at(
        item.values,
        item.bad,
        item.complaint,
        argument=item.argument,
        explanation=_WHY,
        bounds=Bounds(text=item.allowed),
        is_index=False,
        size=dim,
        device_text=assert_text("sparse_compressed_invariants"),
    )
