"""Guards of grouped matrix products, whose offsets cut a dimension.

Each kernel asserts other things of its groups.  Those with scales per block of elements, for
compute capability 10.0 alone, have no guard.
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
_CAPABILITIES = (9, 10)
"""Elsewhere a loop over slices runs, which takes every offset."""


@dataclass(frozen=True)
class _Groups:
    """The dimension that the offsets cut, and what the kernel wants of the parts."""

    axis: str
    argument: str
    dim: int
    size: int
    steps: tuple[tuple[int, str], ...]
    """Numbers that the size of a group must be a multiple of, with the assertion for each."""


class _Finding(NamedTuple):
    """Offsets that fail one assertion of the kernel, and the words for it."""

    bad: list[bool]
    text: str
    complaint: str
    bounds: Bounds
    is_index: bool = False
    why: str = "The kernel starts each group where the one before ends."


@guard("aten::_grouped_mm", records=("grouped_mm_offsets", "grouped_mm_alignment"), waits=True)
def grouped_mm_offsets_in_range(
    self: Tensor, mat2: Tensor, offs: Tensor | None, out_dtype: torch.dtype | None
) -> Need:
    """Offsets rise within [0, size], by multiples of 16 bytes where a group starts in memory.

    Source:   GroupMMCommon.cuh:54 to :115, torch 2.13.0: bfloat16 on compute capability 9 and 10
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
    return _offsets(self, mat2, offs, is_row_major)


@guard(
    "aten::_scaled_grouped_mm",
    "aten::_scaled_grouped_mm_v2",
    records=("grouped_mm_offsets", "grouped_mm_alignment"),
    waits=True,
)
def scaled_grouped_mm_offsets_in_range(
    self: Tensor, mat2: Tensor, scale_a: Tensor | Sequence[Tensor], offs: Tensor | None
) -> Need:
    """Offsets rise within [0, size], by multiples of 16 bytes where a group starts in memory.

    Source:   GroupMMCommon.cuh:54 to :115, torch 2.13.0: scales per row, on compute capability 9
              and 10
    Cost:     one copy of the offsets, at most 1023 numbers
    Passes:   aten._scaled_grouped_mm(zeros(4, 16).to(torch.float8_e4m3fn),
              zeros(2, 16, 16).to(torch.float8_e4m3fn).mT, ones(4), ones(2, 16),
              tensor([1, 4], dtype=torch.int32))
    Violates: aten._scaled_grouped_mm(zeros(4, 16).to(torch.float8_e4m3fn),
              zeros(2, 16, 16).to(torch.float8_e4m3fn).mT, ones(4), ones(2, 16),
              tensor([1, 5], dtype=torch.int32))
    """
    scales = (scale_a,) if isinstance(scale_a, Tensor) else scale_a
    if not (self.dtype == mat2.dtype == torch.float8_e4m3fn) or not scales:
        return None
    if scales[0].dtype != torch.float32 or self.stride(-1) != 1 or mat2.stride(-1) == 1:
        return None
    return _offsets(self, mat2, offs, (True, False))


def _offsets(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None,
    is_row_major: tuple[bool, bool],
) -> Need:
    """Require what the kernel of one product asserts of its offsets."""
    if offs is None or not _is_grouped(left, right, offs):
        return None
    kind = left.device.type
    if kind == "cuda":
        if torch.cuda.get_device_capability(left.device)[0] not in _CAPABILITIES:
            return None
    elif kind != "cpu":  # tests run it on the CPU
        return None
    groups = _groups(left, right, is_row_major)
    return Condition(lambda: _first_finding(offs, groups))


def _first_finding(offs: Tensor, groups: _Groups) -> Violation | None:
    """Check the offsets in the order of the kernel's assertions."""
    for finding in _findings(groups, offs.tolist()):
        if any(finding.bad):
            return violation_at(
                offs.cpu(),
                torch.tensor(finding.bad),
                finding.complaint,
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


def _groups(left: Tensor, right: Tensor, is_row_major: tuple[bool, bool]) -> _Groups:
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


def _findings(groups: _Groups, ends: Sequence[int]) -> Iterator[_Finding]:
    """Yield which offsets fail, and the text, in the order of the kernel's assertions."""
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    yield _Finding(
        [size < 0 for size in sizes],
        assert_text("grouped_mm_decreasing"),
        "is smaller than the offset before it, or negative",
        Bounds(min=0, max=groups.size, text=f"rising within 0 … {groups.size}"),
    )
    for step, text in groups.steps:
        allowed = f"a multiple of {step} elements"
        yield _Finding(
            # A last group may end anywhere: nothing starts behind it.
            [*(size % step != 0 for size in sizes[:-1]), False],
            text,
            f"does not end a group of {allowed}",
            Bounds(text=f"groups of {allowed}"),
        )
    yield _Finding(
        [end > groups.size for end in ends],
        assert_text(f"grouped_mm_beyond_{groups.axis}"),
        f"is outside dimension {groups.dim} (size {groups.size}) of {{related}}",
        Bounds(min=0, max=groups.size, text=f"0 … {groups.size}"),
        is_index=True,
        why="Each offset is the end of a group, and the kernel stops at one beyond the tensor.",
    )
