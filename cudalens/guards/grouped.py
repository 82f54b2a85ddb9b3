"""Guards of grouped matrix products, whose groups end where a tensor of offsets says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cudalens.core.report_types import Violation
from cudalens.guards._base import guard
from cudalens.guards._groups import Scales, check_groups

_MX_BLOCK, _NV_BLOCK = 32, 16
_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)
"""Two numbers of four bits in a byte; not in every torch."""


@guard(
    "aten::_grouped_mm", records=("grouped_mm_offsets", "grouped_mm_alignment"), frequency="rare"
)
def grouped_mm_offsets_in_range(
    self: Tensor, mat2: Tensor, offs: Tensor | None, out_dtype: torch.dtype | None
) -> Violation | None:
    """Offsets rise within [0, size], by multiples of 16 bytes where a group starts in memory.

    Source:   GroupMMCommon.cuh:54 to :115, torch 2.13.0: bfloat16 on compute capability 9 and 10;
              elsewhere a loop over slices runs, which takes every offset
    Cost:     one copy of the offsets, at most 1023 numbers
    Passes:   aten._grouped_mm(zeros(4, 8).bfloat16(), zeros(2, 8, 8).bfloat16(),
              tensor([1, 4], dtype=torch.int32))
    Violates: aten._grouped_mm(zeros(4, 8).bfloat16(), zeros(2, 8, 8).bfloat16(),
              tensor([1, 5], dtype=torch.int32))
    """
    is_bfloat16 = self.dtype == mat2.dtype == torch.bfloat16
    if not is_bfloat16 or out_dtype not in (None, torch.bfloat16):
        return None
    is_row_major = (self.stride(-1) == 1, mat2.stride(-1) == 1)
    return check_groups(self, mat2, offs, is_row_major)


@guard(
    "aten::_scaled_grouped_mm",
    records=("grouped_mm_offsets", "grouped_mm_alignment", "scaled_grouped_mm_mx"),
    frequency="rare",
)
def scaled_grouped_mm_offsets_in_range(
    self: Tensor, mat2: Tensor, scale_a: Tensor, offs: Tensor | None
) -> Violation | None:
    """Offsets rise within [0, size], by multiples of 16 bytes where a group starts in memory.

    Source:   GroupMMCommon.cuh:54 to :115 (scales per row), grouped_common.cuh:116 to :233 (scales
              per block), torch 2.13.0, compute capability 9 and 10
    Cost:     one copy of the offsets, at most 1023 numbers
    Passes:   aten._scaled_grouped_mm(zeros(4, 16).to(torch.float8_e4m3fn),
              zeros(2, 16, 16).to(torch.float8_e4m3fn).mT, ones(4), ones(2, 16),
              tensor([1, 4], dtype=torch.int32))
    Violates: aten._scaled_grouped_mm(zeros(4, 16).to(torch.float8_e4m3fn),
              zeros(2, 16, 16).to(torch.float8_e4m3fn).mT, ones(4), ones(2, 16),
              tensor([1, 5], dtype=torch.int32))
    """
    if self.dtype == _FLOAT4:  # only the second version takes it
        return None
    return _scaled(self, mat2, (scale_a,), offs)


@guard(
    "aten::_scaled_grouped_mm_v2",
    records=("grouped_mm_offsets", "grouped_mm_alignment", "scaled_grouped_mm_mx"),
    frequency="rare",
)
def scaled_grouped_mm_v2_offsets_in_range(
    self: Tensor, mat2: Tensor, scale_a: Sequence[Tensor], offs: Tensor | None
) -> Violation | None:
    """Offsets rise within [0, size], by multiples of 16 bytes where a group starts in memory.

    Source:   GroupMMCommon.cuh:54 to :115 (scales per row), grouped_common.cuh:116 to :233 (scales
              per block), torch 2.13.0, compute capability 9 and 10
    Cost:     one copy of the offsets, at most 1023 numbers
    Passes:   aten._scaled_grouped_mm_v2(zeros(4, 16).to(torch.float8_e4m3fn),
              zeros(2, 16, 16).to(torch.float8_e4m3fn).mT, [ones(4)], [1], [0], [ones(2, 16)],
              [1], [0], tensor([1, 4], dtype=torch.int32))
    Violates: aten._scaled_grouped_mm_v2(zeros(4, 16).to(torch.float8_e4m3fn),
              zeros(2, 16, 16).to(torch.float8_e4m3fn).mT, [ones(4)], [1], [0], [ones(2, 16)],
              [1], [0], tensor([1, 5], dtype=torch.int32))
    """
    return _scaled(self, mat2, scale_a, offs)


def _scaled(
    left: Tensor, right: Tensor, scales: Sequence[Tensor], offs: Tensor | None
) -> Violation | None:
    if left.dtype != right.dtype or not scales or left.stride(-1) != 1 or right.stride(-1) == 1:
        return None
    layout = (True, False)
    if left.dtype == torch.float8_e4m3fn and scales[0].dtype == torch.float32:
        return check_groups(left, right, offs, layout)
    by_block = _by_block(left, scales)
    if by_block is None:
        return None
    return check_groups(left, right, offs, layout, scales=by_block)


def _by_block(left: Tensor, scales: Sequence[Tensor]) -> Scales | None:
    """Return the scales of a call that torch takes as one with scales per block."""
    own = scales[0]
    if left.dim() != 2 or own.dim() != 2 or own.size(0) < left.size(0):
        return None
    is_float4 = left.dtype == _FLOAT4
    if not is_float4 and left.dtype != torch.float8_e4m3fn:
        return None
    packed = 2 if is_float4 else 1
    if own.dtype == torch.float8_e8m0fnu:
        return Scales(block=_MX_BLOCK, count=own.numel(), packed=packed)
    # NVFP4 has a scale for all besides: one scale tensor alone is no recipe of torch's.
    if is_float4 and own.dtype == torch.float8_e4m3fn and len(scales) > 1:
        return Scales(block=_NV_BLOCK, count=own.numel(), packed=packed)
    return None
