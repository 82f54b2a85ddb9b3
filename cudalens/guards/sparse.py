"""Guards of compressed sparse layouts: their invariants, where asked for, and conversions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Bounds, Violation
from cudalens.core.tensor_values import find_offenders
from cudalens.guards._base import guard
from cudalens.guards._dims import INDEX_DTYPES, format_count, spans_lie_inside
from cudalens.guards._ranges import format_interval, format_offender, lies_within, out_of_range

_WHY = (
    "Compressed sparse tensors rely on this, and CUDA's check stops at the first breach without "
    "saying which it was."
)


@dataclass(frozen=True, kw_only=True)
class _Breach:
    """One invariant: where it is broken, and how to say so."""

    argument: str
    values: Tensor
    bad: Tensor
    says: str
    allowed: str


def _falls(compressed: Tensor, plain: Tensor, nnz: int) -> Tensor:
    """Mark the plain indices that are not larger than the one before in the same line."""
    starts = torch.zeros(*plain.shape[:-1], nnz + 1, dtype=torch.bool, device=plain.device)
    starts.scatter_(-1, compressed[..., :-1].clamp(0, nnz), True)
    falls = torch.zeros_like(plain, dtype=torch.bool)
    if nnz > 1:
        is_no_rise = plain[..., 1:] <= plain[..., :-1]
        torch.logical_and(is_no_rise, ~starts[..., 1:nnz], out=falls[..., 1:])
    return falls


def _breaches(
    compressed: Tensor, plain: Tensor, lines: tuple[str, str], dim: int, nnz: int
) -> list[_Breach]:
    """Mark the elements that break each invariant, in the order in which they are told."""
    major, minor = lines
    first, last, steps = (torch.zeros_like(compressed, dtype=torch.bool) for _ in range(3))
    torch.ne(compressed[..., :1], 0, out=first[..., :1])
    torch.ne(compressed[..., -1:], nnz, out=last[..., -1:])
    widths = compressed.diff(dim=-1)
    torch.logical_or(widths < 0, widths > dim, out=steps[..., 1:])
    outside = (plain < 0) | (plain >= dim)
    falls = _falls(compressed, plain, nnz)
    c, p = "compressed_idx", "plain_idx"
    return [
        _Breach(argument=c, values=compressed, bad=first, says="must be 0", allowed="0"),
        _Breach(
            argument=c,
            values=compressed,
            bad=last,
            says=f"must be {nnz}: the number of stored values",
            allowed=str(nnz),
        ),
        _Breach(
            argument=c,
            values=compressed,
            bad=steps,
            says=f"must lie 0 … {dim} above the one before it: a {major} has {dim} places",
            allowed=f"0 … {dim} more than the one before",
        ),
        _Breach(
            argument=p,
            values=plain,
            bad=outside,
            says=f"is outside the {format_count(dim, minor)} of the tensor",
            allowed=format_interval(0, dim - 1),
        ),
        _Breach(
            argument=p,
            values=plain,
            bad=falls,
            says=f"must be larger than the one before it in the same {major}",
            allowed=f"rising within a {major}",
        ),
    ]


@guard("aten::_validate_compressed_sparse_indices", records=("sparse_compressed_invariants",))
def compressed_sparse_indices_hold(
    is_crow: bool, compressed_idx: Tensor, plain_idx: Tensor, dim: int, nnz: int
) -> Violation | None:
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
    breaches = _breaches(compressed_idx, plain_idx, lines, dim, nnz)
    if not bool(torch.cat([item.bad.reshape(-1) for item in breaches]).any()):
        return None
    item = next(one for one in breaches if bool(one.bad.any()))
    offenders = find_offenders(item.values, item.bad)
    return Violation(
        argument=item.argument,
        headline=f"{format_offender(item.argument, offenders)} {item.says}",
        explanation=_WHY,
        offenders=offenders,
        bounds=Bounds(text=item.allowed),
        is_index=False,
        size=dim,
        device_text=assert_text("sparse_compressed_invariants"),
    )


# --- conversions between layouts ------------------------------------------------------------------


@guard("aten::_convert_indices_from_coo_to_csr", is_silent=True)
def coordinates_lie_in_rows(self: Tensor, size: int) -> Violation | None:
    """Every coordinate names a row: it lies in [0, size - 1].

    Source:   SparseCsrTensorMath.cu, convert_indices_from_coo_to_csr_cuda_kernel, torch 2.13.0: no
              assertion, none on the CPU, which writes out of bounds as well
    Cost:     one reduction over the coordinates, one copy of two numbers
    Passes:   aten._convert_indices_from_coo_to_csr(tensor([0, 2]), 3)
    Violates: aten._convert_indices_from_coo_to_csr(tensor([0, 3]), 3)
    """
    if self.dim() != 1 or self.dtype not in INDEX_DTYPES or lies_within(self, 0, size - 1):
        return None
    return out_of_range(
        self,
        argument="self",
        low=0,
        high=size - 1,
        place=f"the {format_count(size, 'row')} of the compressed tensor",
        why="Rows are counted by writing where a coordinate points, outside the memory here.",
        device_text=None,
        size=size,
        is_silent=True,
        is_replay_safe=False,
    )


@guard("aten::_convert_indices_from_csr_to_coo", is_silent=True)
def row_starts_lie_in_columns(crow_indices: Tensor, col_indices: Tensor) -> Violation | None:
    """Every row with elements lies in [0, nnz] of the stored ones.

    Source:   SparseCsrTensorMath.cu, convert_indices_from_csr_to_coo_cuda_kernel, torch 2.13.0: no
              assertion, none on the CPU, which writes out of bounds as well
    Cost:     one reduction over the row starts, one copy of two numbers
    Passes:   aten._convert_indices_from_csr_to_coo(tensor([0, 2, 3]), tensor([0, 1, 0]))
    Violates: aten._convert_indices_from_csr_to_coo(tensor([0, 2, 4]), tensor([0, 1, 0]))
    """
    if crow_indices.dim() == 0 or crow_indices.shape[:-1] != col_indices.shape[:-1]:
        return None
    if col_indices.dtype != crow_indices.dtype:
        return None
    stored = col_indices.size(-1)
    return spans_lie_inside(
        crow_indices,
        stored,
        argument="crow_indices",
        place=f"the {format_count(stored, 'element')} of {{related}}",
        why="A row is written from its start to the next one's, outside the memory here.",
        related="col_indices",
    )
