"""Guards of factors with pivots, which swap rows: no CUDA kernel looks at them."""

from __future__ import annotations

import torch
from torch import Tensor

from cudalens.core.report_types import Violation
from cudalens.guards._base import guard
from cudalens.guards._ranges import lies_within, out_of_range


@guard("aten::lu_unpack", frequency="rare", is_silent=True)
def lu_unpack_pivots_in_range(
    LU_data: Tensor,  # noqa: N803  the schema's own name
    LU_pivots: Tensor,  # noqa: N803
    unpack_pivots: bool,
) -> Violation | None:
    """Every pivot that is unpacked names a row: it lies in [1, rows].

    Source:   LinearAlgebra.cu, unpack_pivots_cuda_kernel, torch 2.13.0: no assertion; the CPU looks
    Cost:     one reduction over the pivots, one copy of two numbers
    Passes:   aten.lu_unpack(zeros(2, 2), tensor([2, 2], dtype=torch.int32))
    Violates: aten.lu_unpack(zeros(2, 2), tensor([3, 2], dtype=torch.int32))
    """
    if not unpack_pivots or LU_data.dim() < 2 or LU_pivots.dim() == 0:
        return None
    rows, read = LU_data.size(-2), min(LU_data.shape[-2:])
    if LU_pivots.dtype != torch.int32 or LU_pivots.device != LU_data.device:
        return None
    if lies_within(LU_pivots[..., :read], 1, rows):
        return None
    bad = (LU_pivots < 1) | (LU_pivots > rows)
    bad[..., read:] = False
    return out_of_range(
        LU_pivots,
        argument="LU_pivots",
        low=1,
        high=rows,
        place=f"the {rows} rows of {{related}}, counted from 1",
        why="Each pivot swaps two rows; the CUDA kernel writes outside them.",
        device_text=None,
        bad=bad,
        related="LU_data",
        size=rows,
        dim=LU_data.dim() - 2,
        is_silent=True,
    )


@guard("aten::linalg_lu_solve", frequency="rare", is_silent=True)
def lu_solve_pivots_in_range(
    LU: Tensor,  # noqa: N803  the schema's own name
    pivots: Tensor,
    B: Tensor,  # noqa: N803
) -> Violation | None:
    """Every pivot names a row: it lies in [1, rows].

    Source:   linalg_lu_solve in BatchLinearAlgebra.cpp, torch 2.13.0: no assertion, none on the
              CPU; cuBLAS and cuSOLVER swap the rows that they are told
    Cost:     one reduction over the pivots, one copy of two numbers
    Passes:   aten.linalg_lu_solve(ones(1, 1), tensor([1], dtype=torch.int32), ones(1, 1))
    Violates: aten.linalg_lu_solve(ones(1, 1), tensor([2], dtype=torch.int32), ones(1, 1))
    """
    if not _is_solve(LU, pivots, B) or lies_within(pivots, 1, LU.size(-1)):
        return None
    return _no_row(pivots, LU.size(-1), "LU")


@guard("aten::linalg_ldl_solve", frequency="rare", is_silent=True)
def ldl_solve_pivots_in_range(
    LD: Tensor,  # noqa: N803  the schema's own name
    pivots: Tensor,
    B: Tensor,  # noqa: N803
) -> Violation | None:
    """Every pivot names a row, negative in a block of two: its magnitude lies in [1, rows].

    Source:   linalg_ldl_solve in BatchLinearAlgebra.cpp, torch 2.13.0: no assertion, none on the
              CPU; cuSOLVER swaps the rows that it is told
    Cost:     one reduction over the pivots, one copy of two numbers
    Passes:   aten.linalg_ldl_solve(ones(1, 1), tensor([1], dtype=torch.int32), ones(1, 1))
    Violates: aten.linalg_ldl_solve(ones(1, 1), tensor([2], dtype=torch.int32), ones(1, 1))
    """
    # The magnitude of the smallest int32 is no int32.
    if not _is_solve(LD, pivots, B) or lies_within(pivots.to(torch.int64).abs(), 1, LD.size(-1)):
        return None
    rows = LD.size(-1)
    bad = (pivots == 0) | (pivots > rows) | (pivots < -rows)
    return _no_row(pivots, rows, "LD", bad=bad)


def _is_solve(factors: Tensor, pivots: Tensor, right: Tensor) -> bool:
    """Return whether torch takes these factors and there is anything to solve."""
    if pivots.dtype != torch.int32 or pivots.device != factors.device or right.numel() == 0:
        return False
    is_square = factors.dim() >= 2 and factors.size(-1) == factors.size(-2)
    return is_square and pivots.shape == factors.shape[:-1]


def _no_row(pivots: Tensor, rows: int, related: str, *, bad: Tensor | None = None) -> Violation:
    return out_of_range(
        pivots,
        argument="pivots",
        low=1,
        high=rows,
        place=f"the {rows} rows of {{related}}, counted from 1",
        why="Each pivot swaps two rows; neither CUDA's solver nor the CPU's looks at it.",
        device_text=None,
        bad=bad,
        related=related,
        size=rows,
        is_silent=True,
        is_replay_safe=False,
    )
