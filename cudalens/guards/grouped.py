"""Guards of grouped matrix products, whose groups end where a tensor of offsets says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cudalens.facts import Bounds, Violation
from cudalens.guards._base import guard
from cudalens.guards._ranges import out_of_range, spelled
from cudalens.values import find_offenders

_MOST_GROUPS = 1023
_TMA_BYTES = 16
_MX_BLOCK = 32
_HOPPER, _BLACKWELL = 9, 10
_PREPARE = "prepare_grouped_gemm_data: Assertion"
_SCALED = "grouped_common.cuh:{line}: set_grouped_gemm_args_kernel: Assertion"
_DECREASING_TEXT = (
    f"GroupMMCommon.cuh:54: {_PREPARE} "
    '`delta >=0 && "expected gemm dimension to be greater or equal 0\\n"` failed.'
)
_BEYOND_TEXTS = {
    axis: f"GroupMMCommon.cuh:{line}: {_PREPARE} "
    f'`{condition} && "expected offset to be less than tensor size\\n"` failed.'
    for axis, line, condition in (
        ("M", 89, "offset <= tensor_ShapeA[0]"),
        ("N", 102, "offset <= tensor_ShapeB[1]"),
        ("K", 115, "offset <= tensor_ShapeA[1] && offset <= tensor_ShapeB[0]"),
    )
}
_ALIGNMENT_TEXTS = {
    part: f"GroupMMCommon.cuh:{line}: {_PREPARE} `delta % align == 0 && "
    f'"expected {part} tensor dynamic dimension byte size to be non-negative multiple of 16\\n"`'
    " failed."
    for part, line in (("input", 64), ("output", 80))
}
_MX_TEXTS = {
    "block": _SCALED.format(line=116) + ' `K_group_size % scale_factor_block_size == 0 && "for '
    "2d-2d grouped gemm, group sizes along K dim must be non-negative multiple of 32 (mxfp8) or "
    '16 (nvfp4)\\n"` failed.',
    "K": _SCALED.format(line=119) + ' `curr_group_end_offset <= K && "for 2d-2d grouped gemm, '
    'group end offsets must be non-negative and must be <= K\\n"` failed.',
    "M": _SCALED.format(line=233) + ' `curr_group_end_offset <= M && "for 2d-3d grouped gemm, '
    'group end offsets must be non-negative and must be <= M\\n"` failed.',
}


@dataclass(frozen=True, kw_only=True)
class _Groups:
    """The dimension that the offsets cut, and what the kernel wants of the parts."""

    axis: str
    argument: str
    dim: int
    size: int
    steps: tuple[tuple[int, str], ...] = ()
    """Numbers that the size of a group must be a multiple of, with the assertion for each."""
    beyond_text: str
    is_block_scaled: bool = False


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
    return _check(self, mat2, offs, is_row_major, guard="grouped_mm_offsets_in_range")


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
              per block of 32), torch 2.13.0, compute capability 9 and 10
    Cost:     one copy of the offsets, at most 1023 numbers
    Passes:   aten._scaled_grouped_mm(zeros(4, 16).to(torch.float8_e4m3fn),
              zeros(2, 16, 16).to(torch.float8_e4m3fn).mT, ones(4), ones(2, 16),
              tensor([1, 4], dtype=torch.int32))
    Violates: aten._scaled_grouped_mm(zeros(4, 16).to(torch.float8_e4m3fn),
              zeros(2, 16, 16).to(torch.float8_e4m3fn).mT, ones(4), ones(2, 16),
              tensor([1, 5], dtype=torch.int32))
    """
    return _scaled(self, mat2, (scale_a,), offs, guard="scaled_grouped_mm_offsets_in_range")


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
              per block of 32), torch 2.13.0, compute capability 9 and 10
    Cost:     one copy of the offsets, at most 1023 numbers
    Passes:   aten._scaled_grouped_mm_v2(zeros(4, 16).to(torch.float8_e4m3fn),
              zeros(2, 16, 16).to(torch.float8_e4m3fn).mT, [ones(4)], [1], [0], [ones(2, 16)],
              [1], [0], tensor([1, 4], dtype=torch.int32))
    Violates: aten._scaled_grouped_mm_v2(zeros(4, 16).to(torch.float8_e4m3fn),
              zeros(2, 16, 16).to(torch.float8_e4m3fn).mT, [ones(4)], [1], [0], [ones(2, 16)],
              [1], [0], tensor([1, 5], dtype=torch.int32))
    """
    return _scaled(self, mat2, scale_a, offs, guard="scaled_grouped_mm_v2_offsets_in_range")


def _scaled(
    left: Tensor, right: Tensor, scales: Sequence[Tensor], offs: Tensor | None, *, guard: str
) -> Violation | None:
    if left.dtype != torch.float8_e4m3fn or right.dtype != torch.float8_e4m3fn or not scales:
        return None
    if left.stride(-1) != 1 or right.stride(-1) == 1:
        return None
    is_block_scaled = scales[0].dtype == torch.float8_e8m0fnu
    if not is_block_scaled and scales[0].dtype != torch.float32:
        return None
    return _check(left, right, offs, (True, False), guard=guard, is_block_scaled=is_block_scaled)


def _check(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None,
    is_row_major: tuple[bool, bool],
    *,
    guard: str,
    is_block_scaled: bool = False,
) -> Violation | None:
    if offs is None or not _is_grouped(left, right, offs) or not _asserts(left, is_block_scaled):
        return None
    groups = _groups(left, right, is_row_major, is_block_scaled)
    if groups is None:
        return None
    ends = offs.tolist()
    for bad, step, text in _findings(groups, ends):
        if any(bad):
            return _finding(offs, torch.tensor(bad), groups, step=step, text=text, guard=guard)
    return None


def _is_grouped(left: Tensor, right: Tensor, offs: Tensor) -> bool:
    """Tell whether torch takes this call, so that its kernel reads the offsets."""
    if not {left.dim(), right.dim()} <= {2, 3} or left.dim() + right.dim() == 6:
        return False
    if offs.dim() != 1 or offs.dtype != torch.int32 or offs.device != left.device:
        return False
    if left.size(-1) != right.size(-2) or not 0 < offs.numel() <= _MOST_GROUPS:
        return False
    stacked = left if left.dim() == 3 else right
    return stacked.dim() == 2 or offs.numel() == stacked.size(0)


def _asserts(tensor: Tensor, is_block_scaled: bool) -> bool:
    """Tell whether the device runs a kernel that asserts; a test on the CPU stands for one."""
    if tensor.device.type != "cuda":
        return tensor.device.type == "cpu"
    major = torch.cuda.get_device_capability(tensor.device)[0]
    return major == _BLACKWELL or (major == _HOPPER and not is_block_scaled)


def _groups(
    left: Tensor, right: Tensor, is_row_major: tuple[bool, bool], is_block_scaled: bool
) -> _Groups | None:
    step = _TMA_BYTES // left.element_size()
    inputs = ((step, _ALIGNMENT_TEXTS["input"]),)
    if left.dim() == 2 and right.dim() == 2:
        axis, argument, dim, size = "K", "self", 1, left.size(1)
        steps = inputs if is_row_major[0] or not is_row_major[1] else ()
    elif left.dim() == 2:
        axis, argument, dim, size = "M", "self", 0, left.size(0)
        steps = () if is_row_major[0] else inputs
    else:
        axis, argument, dim, size = "N", "mat2", 1, right.size(1)
        # The result is bfloat16 whatever the inputs are.
        output = ((_TMA_BYTES // 2, _ALIGNMENT_TEXTS["output"]),)
        steps = (*(inputs if is_row_major[1] else ()), *output)
    if is_block_scaled:
        if axis == "N":
            return None
        steps = ((_MX_BLOCK, _MX_TEXTS["block"]),) if axis == "K" else ()
    return _Groups(
        axis=axis,
        argument=argument,
        dim=dim,
        size=size,
        steps=steps,
        beyond_text=_MX_TEXTS[axis] if is_block_scaled else _BEYOND_TEXTS[axis],
        is_block_scaled=is_block_scaled,
    )


def _findings(groups: _Groups, ends: list[int]) -> Iterator[tuple[list[bool], int, str]]:
    """Give, in the order of the kernel's assertions, which offsets fail and the text of each."""
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    if not groups.is_block_scaled:
        yield [size < 0 for size in sizes], 0, _DECREASING_TEXT
    for step, text in groups.steps:
        # A last group may end anywhere: nothing starts behind it.  Block scales know no exception.
        checked = sizes if groups.is_block_scaled else sizes[:-1]
        bad = [size % step != 0 for size in checked]
        yield bad + [False] * (len(sizes) - len(bad)), step, text
    yield [end > groups.size for end in ends], -1, groups.beyond_text


def _finding(
    offs: Tensor, bad: Tensor, groups: _Groups, *, step: int, text: str, guard: str
) -> Violation:
    if step < 0:
        return out_of_range(
            offs.cpu(),
            guard=guard,
            argument="offs",
            low=0,
            high=groups.size,
            place=f"dimension {groups.dim} (size {groups.size}) of {{related}}",
            why="Each offset is the end of a group, and the kernel stops at one beyond the tensor.",
            device_text=text,
            bad=bad,
            related=groups.argument,
            size=groups.size,
            dim=groups.dim,
        )
    offenders = find_offenders(offs.cpu(), bad)
    says = "is smaller than the offset before it, or negative"
    bounds = Bounds(min=0, max=groups.size, text=f"rising within 0 … {groups.size}")
    if step:
        says = f"does not end a group of a multiple of {step} elements"
        bounds = Bounds(text=f"groups of a multiple of {step} elements")
    return Violation(
        guard=guard,
        op="",
        overload="",
        argument="offs",
        headline=f"{spelled('offs', offenders)} {says}",
        explanation="The kernel starts each group where the one before ends.",
        offenders=offenders,
        bounds=bounds,
        is_index=False,
        related=groups.argument,
        size=groups.size,
        dim=groups.dim,
        device_text=text,
    )
