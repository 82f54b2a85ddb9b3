"""What the guards of grouped matrix products share: the groups, and what each kernel asserts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Bounds, Violation
from cudalens.core.tensor_values import find_offenders
from cudalens.guards._ranges import out_of_range, spelled

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
    rows: int = 0
    scales: Scales | None = None
    """Set where the kernel for scales per block runs, which asserts other things."""


@dataclass(frozen=True, kw_only=True)
class _Finding:
    """Which offsets fail one assertion of the kernel, and how to say so."""

    bad: list[bool]
    text: str
    says: str = ""
    bounds: Bounds | None = None
    """Nothing, as in ``says``, where offsets lie beyond the tensor."""


def check_groups(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None,
    is_row_major: tuple[bool, bool],
    *,
    scales: Scales | None = None,
) -> Violation | None:
    """Check the offsets of one product in the order of its kernel's assertions."""
    if offs is None or not _is_grouped(left, right, offs) or not _asserts(left, scales):
        return None
    groups = _groups(left, right, is_row_major, scales)
    if groups is None:
        return None
    for finding in _findings(groups, offs.tolist()):
        if any(finding.bad):
            return _violation(offs.cpu(), finding, groups)
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
        axis, argument, dim, size = "K", "self", 1, left.size(1)
        steps = inputs if is_row_major[0] or not is_row_major[1] else ()
    elif left.dim() == 2:
        axis, argument, dim, size = "M", "self", 0, left.size(0)
        steps = () if is_row_major[0] else inputs
    else:
        axis, argument, dim, size = "N", "mat2", 1, right.size(1)
        # The result is bfloat16 whatever the inputs are.
        output = ((_TMA_BYTES // 2, assert_text("grouped_mm_alignment_output")),)
        steps = (*(inputs if is_row_major[1] else ()), *output)
    return _Groups(
        axis=axis,
        argument=argument,
        dim=dim,
        size=size,
        steps=steps,
        beyond_text=assert_text(f"grouped_mm_beyond_{axis}"),
    )


def _block_scaled(left: Tensor, right: Tensor, scales: Scales) -> _Groups | None:
    if left.dim() != 2:
        return None
    cuts_sums = right.dim() == 2
    axis = "K" if cuts_sums else "M"
    return _Groups(
        axis=axis,
        argument="self",
        dim=int(cuts_sums),
        size=left.size(1) * scales.packed if cuts_sums else left.size(0),
        steps=((scales.block, assert_text("scaled_grouped_mm_block")),) if cuts_sums else (),
        beyond_text=assert_text(f"scaled_grouped_mm_beyond_{axis}"),
        rows=left.size(0),
        scales=scales,
    )


def _findings(groups: _Groups, ends: Sequence[int]) -> Iterator[_Finding]:
    """Give, in the order of the kernel's assertions, which offsets fail and the text of each."""
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    is_plain = groups.scales is None
    if is_plain:
        yield _Finding(
            bad=[size < 0 for size in sizes],
            text=assert_text("grouped_mm_decreasing"),
            says="is smaller than the offset before it, or negative",
            bounds=Bounds(min=0, max=groups.size, text=f"rising within 0 … {groups.size}"),
        )
    for step, text in groups.steps:
        # A last group may end anywhere: nothing starts behind it.  Block scales know no exception.
        checked = sizes[:-1] if is_plain else sizes
        bad = [size % step != 0 for size in checked]
        yield _Finding(
            bad=bad + [False] * (len(sizes) - len(bad)),
            text=text,
            says=f"does not end a group of a multiple of {step} elements",
            bounds=Bounds(text=f"groups of a multiple of {step} elements"),
        )
    yield _Finding(bad=[end > groups.size for end in ends], text=groups.beyond_text)
    if groups.scales is not None and groups.axis == "K":
        yield _missing_scales(sizes, groups.rows, groups.scales)


def _missing_scales(sizes: Sequence[int], rows: int, scales: Scales) -> _Finding:
    needed, bad = 0, []
    for size in sizes:
        columns = -(-(size // scales.block) // _SCALE_COLUMNS) * _SCALE_COLUMNS
        needed += -(-rows // _SCALE_ROWS) * _SCALE_ROWS * columns
        bad.append(needed > scales.count)
    return _Finding(
        bad=bad,
        text=assert_text("scaled_grouped_mm_scales"),
        says=f"ends a group that brings the scales to {needed}, padded, and there are "
        f"{scales.count}",
        bounds=Bounds(text=f"groups with at most {scales.count} scales, padded"),
    )


def _violation(offs: Tensor, finding: _Finding, groups: _Groups) -> Violation:
    bad = torch.tensor(finding.bad)
    if finding.bounds is None:
        return out_of_range(
            offs,
            argument="offs",
            low=0,
            high=groups.size,
            place=f"dimension {groups.dim} (size {groups.size}) of {{related}}",
            why="Each offset is the end of a group, and the kernel stops at one beyond the tensor.",
            device_text=finding.text,
            bad=bad,
            related=groups.argument,
            size=groups.size,
            dim=groups.dim,
        )
    offenders = find_offenders(offs, bad)
    return Violation(
        argument="offs",
        headline=f"{spelled('offs', offenders)} {finding.says}",
        explanation="The kernel starts each group where the one before ends.",
        offenders=offenders,
        bounds=finding.bounds,
        is_index=False,
        related=groups.argument,
        size=groups.size,
        dim=groups.dim,
        device_text=finding.text,
    )
