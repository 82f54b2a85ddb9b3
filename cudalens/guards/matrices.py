"""Guards of grouped matrix products, whose offsets cut a dimension.

Each kernel asserts other things of its groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Bounds, Violation
from cudalens.guards._base import guard
from cudalens.guards._ranges import violation_at
from cudalens.guards.engine import Condition, Need

_MOST_GROUPS = 1023
_TMA_BYTES = 16
_HOPPER, _BLACKWELL = 9, 10
_SCALE_ROWS, _SCALE_COLUMNS = 128, 4
"""Block scales are padded to multiples of these."""


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Scales per block of elements: how many elements share one, and how they are stored."""

    block: int
    count: int
    """Scales that the left matrix comes with, padding included."""
    packed: int = 1
    """Elements of a matrix in one element of its tensor: two of four bits each in a byte."""


@dataclass(frozen=True)
class _Groups:
    """The dimension that the offsets cut, and what the kernel wants of the parts."""

    axis: str
    argument: str
    dim: int
    size: int
    steps: tuple[tuple[int, str], ...]
    """Numbers that the size of a group must be a multiple of, with the assertion for each."""
    rows: int = 0
    scales: Scales | None = None
    """Set where the kernel for scales per block runs, which asserts other things."""


class _Finding(NamedTuple):
    """Which offsets fail one assertion of the kernel, and how to say so."""

    bad: list[bool]
    text: str
    says: str
    bounds: Bounds
    is_index: bool = False
    why: str = "The kernel starts each group where the one before ends."


def check_groups(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None,
    is_row_major: tuple[bool, bool],
    *,
    scales: Scales | None = None,
) -> Need:
    """Require what the kernel of one product asserts of its offsets."""
    if offs is None or not _is_grouped(left, right, offs) or not _asserts(left, scales):
        return None
    groups = _groups(left, right, is_row_major, scales)
    return None if groups is None else Condition("offs", lambda: _first_finding(offs, groups))


def _first_finding(offs: Tensor, groups: _Groups) -> Violation | None:
    """Check the offsets in the order of the kernel's assertions."""
    for finding in _findings(groups, offs.tolist()):
        if any(finding.bad):
            return violation_at(
                offs.cpu(),
                torch.tensor(finding.bad),
                finding.says,
                argument="offs",
                explanation=finding.why,
                bounds=finding.bounds,
                is_index=finding.is_index,
                related=groups.argument,
                size=groups.size,
                dim=groups.dim,
                device_text=finding.text,
            )
    return None


def _is_grouped(left: Tensor, right: Tensor, offs: Tensor) -> bool:
    """Return whether torch takes this call, so that its kernel reads the offsets."""
    if not {left.dim(), right.dim()} <= {2, 3} or left.dim() + right.dim() == 6:
        return False
    if offs.dim() != 1 or offs.dtype != torch.int32 or offs.device != left.device:
        return False
    if left.size(-1) != right.size(-2) or not 0 < offs.numel() <= _MOST_GROUPS:
        return False
    stacked = left if left.dim() == 3 else right
    return stacked.dim() == 2 or offs.numel() == stacked.size(0)


def _asserts(tensor: Tensor, scales: Scales | None) -> bool:
    """Return whether the device runs a kernel that asserts; a test on the CPU stands for one."""
    if tensor.device.type != "cuda":
        return tensor.device.type == "cpu"
    major = torch.cuda.get_device_capability(tensor.device)[0]
    return major == _BLACKWELL or (major == _HOPPER and scales is None)


def _groups(
    left: Tensor, right: Tensor, is_row_major: tuple[bool, bool], scales: Scales | None
) -> _Groups | None:
    if scales is not None:
        return _block_scaled(left, right, scales)
    step = _TMA_BYTES // left.element_size()
    inputs = ((step, assert_text("grouped_mm_alignment_input")),)
    if left.dim() == 2 and right.dim() == 2:
        steps = inputs if is_row_major[0] or not is_row_major[1] else ()
        return _Groups("K", "self", 1, left.size(1), steps)
    if left.dim() == 2:
        return _Groups("M", "self", 0, left.size(0), () if is_row_major[0] else inputs)
    # The result is bfloat16 whatever the inputs are.
    output = ((_TMA_BYTES // 2, assert_text("grouped_mm_alignment_output")),)
    return _Groups("N", "mat2", 1, right.size(1), (*(inputs if is_row_major[1] else ()), *output))


def _block_scaled(left: Tensor, right: Tensor, scales: Scales) -> _Groups | None:
    if left.dim() != 2:
        return None
    rows, columns = left.shape
    if right.dim() != 2:
        return _Groups("M", "self", 0, rows, (), rows, scales)
    steps = ((scales.block, assert_text("scaled_grouped_mm_block")),)
    return _Groups("K", "self", 1, columns * scales.packed, steps, rows, scales)


def _findings(groups: _Groups, ends: Sequence[int]) -> Iterator[_Finding]:
    """Yield which offsets fail, and the text, in the order of the kernel's assertions."""
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    is_plain = groups.scales is None
    if is_plain:
        yield _Finding(
            [size < 0 for size in sizes],
            assert_text("grouped_mm_decreasing"),
            "is smaller than the offset before it, or negative",
            Bounds(min=0, max=groups.size, text=f"rising within 0 … {groups.size}"),
        )
    for step, text in groups.steps:
        # A last group may end anywhere: nothing starts behind it.  Block scales know no exception.
        checked = sizes[:-1] if is_plain else sizes
        bad = [size % step != 0 for size in checked]
        allowed = f"a multiple of {step} elements"
        yield _Finding(
            bad + [False] * (len(sizes) - len(bad)),
            text,
            f"does not end a group of {allowed}",
            Bounds(text=f"groups of {allowed}"),
        )
    kernel = "grouped_mm" if is_plain else "scaled_grouped_mm"
    yield _Finding(
        [end > groups.size for end in ends],
        assert_text(f"{kernel}_beyond_{groups.axis}"),
        f"is outside dimension {groups.dim} (size {groups.size}) of {{related}}",
        Bounds(min=0, max=groups.size, text=f"0 … {groups.size}"),
        is_index=True,
        why="Each offset is the end of a group, and the kernel stops at one beyond the tensor.",
    )
    if groups.scales is not None and groups.axis == "K":
        yield _missing_scales(sizes, groups.rows, groups.scales)


def _missing_scales(sizes: Sequence[int], rows: int, scales: Scales) -> _Finding:
    needed, bad = 0, []
    for size in sizes:
        columns = -(-(size // scales.block) // _SCALE_COLUMNS) * _SCALE_COLUMNS
        needed += -(-rows // _SCALE_ROWS) * _SCALE_ROWS * columns
        bad.append(needed > scales.count)
    return _Finding(
        bad,
        assert_text("scaled_grouped_mm_scales"),
        f"ends a group that brings the scales to {needed}, padded, and there are {scales.count}",
        Bounds(text=f"groups with at most {scales.count} scales, padded"),
    )


# --- the guards of grouped products ---------------------------------------------------------------


_MX_BLOCK, _NV_BLOCK = 32, 16
_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)
"""Two numbers of four bits in a byte; not in every torch."""


@guard("aten::_grouped_mm", records=("grouped_mm_offsets", "grouped_mm_alignment"), waits=True)
def grouped_mm_offsets_in_range(
    self: Tensor, mat2: Tensor, offs: Tensor | None, out_dtype: torch.dtype | None
) -> Need:
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
    "aten::_scaled_grouped_mm_v2",
    records=("grouped_mm_offsets", "grouped_mm_alignment", "scaled_grouped_mm_mx"),
    waits=True,
)
def scaled_grouped_mm_offsets_in_range(
    self: Tensor, mat2: Tensor, scale_a: Tensor | Sequence[Tensor], offs: Tensor | None
) -> Need:
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
    if isinstance(scale_a, Tensor):
        if self.dtype == _FLOAT4:  # only the second version takes it
            return None
        scale_a = (scale_a,)
    return _scaled(self, mat2, scale_a, offs)


def _scaled(left: Tensor, right: Tensor, scales: Sequence[Tensor], offs: Tensor | None) -> Need:
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
