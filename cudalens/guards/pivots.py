"""Guards of LU factors: only the CPU looks at the pivots that swap the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from cudalens.facts import Violation
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
        guard="lu_unpack_pivots_in_range",
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
