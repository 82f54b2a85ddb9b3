"""Guards of grouped matrix products: offsets, alignment, scales per row and per block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from cudalens.guards import matrices
from cudalens.simulate import Simulation
from tests.cpu_guards import Collector, assert_said, positions
from tests.releases import here

aten = torch.ops.aten


MATRIX = {
    "M": lambda: (torch.zeros(32, 16), torch.zeros(3, 16, 8)),
    "N": lambda: (torch.zeros(3, 8, 16), torch.zeros(16, 32)),
    "K": lambda: (torch.zeros(8, 32), torch.zeros(32, 16)),
    "M transposed": lambda: (torch.zeros(16, 32).t(), torch.zeros(3, 16, 8)),
    "K transposed": lambda: (torch.zeros(32, 8).t(), torch.zeros(32, 16)),
}


@pytest.mark.parametrize(
    ("kind", "offs", "bad", "line"),
    [
        ("M", [1, 5, 32], [], None),
        ("M", [0, 0, 0], [], None),
        ("M", [1, 5, 33], [(2,)], 89),
        ("M", [5, 1, 32], [(1,)], 54),
        ("M", [-1, 5, 32], [(0,)], 54),
        ("M transposed", [8, 24, 31], [], None),
        ("M transposed", [8, 20, 32], [(1,)], 64),
        ("N", [8, 24, 31], [], None),
        ("N", [4, 24, 32], [(0,), (1,)], 64),
        ("N", [8, 24, 33], [(2,)], 102),
        ("K", [8, 24, 31], [], None),
        ("K", [8, 20, 32], [(1,)], 64),
        ("K", [8, 24, 33], [(2,)], 115),
        ("K transposed", [3, 20, 32], [], None),
        ("K transposed", [3, 2, 32], [(1,)], 54),
    ],
)
def test_grouped_offsets(
    guards: Collector, kind: str, offs: list[int], bad: list[Any], line: int | None
) -> None:
    """Offsets rise, stay inside, and keep 16 bytes where a group starts in the middle of a row."""
    left, right = (item.bfloat16() for item in MATRIX[kind]())
    if kind.endswith("transposed"):
        left = left.t().contiguous().t()
    found = guards.look(lambda: aten._grouped_mm(left, right, tensor(offs, dtype=torch.int32)))
    assert_said(found, {"at": bad, "line": f"GroupMMCommon.cuh:{line}: "} if bad else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grouped_products_without_a_kernel_of_their_own(
    guards: Collector, dtype: torch.dtype
) -> None:
    """Other dtypes run a loop over slices that asserts nothing: no finding."""
    left, right = (item.to(dtype) for item in MATRIX["M"]())
    offs = tensor([1, 5, 33], dtype=torch.int32)
    assert guards.look(lambda: aten._grouped_mm(left, right, offs)) is None


def of_eight_bits(*shape: int) -> Tensor:
    return torch.zeros(shape).to(FLOAT8)


def of_four_bits(rows: int) -> Tensor:
    """Return rows of 64 numbers, two in a byte."""
    return torch.zeros(rows, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


FLOAT8, EXPONENTS = torch.float8_e4m3fn, torch.float8_e8m0fnu
PLAIN = of_eight_bits(64, 64), of_eight_bits(16, 64).mT
STACKED = of_eight_bits(64, 32), of_eight_bits(3, 16, 32).mT
PACKED = of_four_bits(64), of_four_bits(16).t()
# Each group's scales are padded to 128 rows and four columns.
BLOCKS = torch.ones(128, 12).to(EXPONENTS)
SCALED = {
    "row": (*PLAIN, torch.ones(4)),
    "block": (*PLAIN, BLOCKS),
    "few blocks": (*PLAIN, BLOCKS[:, :4].contiguous()),
    "stacked": (*STACKED, BLOCKS),
    "nvfp4": (*PACKED, BLOCKS.to(FLOAT8), torch.ones(1)),
    "mxfp4": (*PACKED, BLOCKS, torch.ones(1)),
    "flat": (*PLAIN, torch.ones(128).to(EXPONENTS)),
}


@pytest.mark.parametrize("op", ["_scaled_grouped_mm", "_scaled_grouped_mm_v2"])
@pytest.mark.parametrize(
    ("kind", "offs", "bad", "line"),
    [
        ("row", [16, 48, 63], [], ""),
        ("row", [16, 40, 64], [(1,)], "GroupMMCommon.cuh:64"),
        ("row", [16, 48, 65], [(2,)], "GroupMMCommon.cuh:115"),
        ("block", [32, 32, 64], [], ""),
        ("block", [32, 48, 64], [(1,), (2,)], "grouped_common.cuh:116"),
        ("block", [32, 64, 96], [(2,)], "grouped_common.cuh:119"),
        ("few blocks", [32, 32, 32], [], ""),
        ("few blocks", [32, 32, 64], [(2,)], "grouped_common.cuh:165"),
        ("stacked", [7, 9, 65], [(2,)], "grouped_common.cuh:233"),
        ("stacked", [7, 9, 64], [], ""),
        # Offsets count numbers, in blocks of 16 (nvfp4) or 32 (mxfp4).
        ("nvfp4", [16, 48, 64], [], ""),
        ("nvfp4", [16, 40, 64], [(1,), (2,)], "grouped_common.cuh:116"),
        ("nvfp4", [16, 48, 80], [(2,)], "grouped_common.cuh:119"),
        ("mxfp4", [32, 32, 64], [], ""),
        ("mxfp4", [16, 32, 64], [(0,), (1,)], "grouped_common.cuh:116"),
        ("flat", [7], [], ""),  # a wrong rank is no recipe, but torch's own error
    ],
)
def test_scaled_grouped_offsets(
    guards: Collector, op: str, kind: str, offs: list[int], bad: list[Any], line: str
) -> None:
    """Scales per row and per block have their own alignment, on the same offsets."""
    (left, right, *scales), ends = SCALED[kind], tensor(offs, dtype=torch.int32)
    is_first = not op.endswith("v2")
    if is_first:
        call = lambda: aten._scaled_grouped_mm(left, right, scales[0], scales[0], ends)
    else:
        how = ([1, 0][: len(scales)],) * 2
        call = lambda: aten._scaled_grouped_mm_v2(left, right, scales, *how, scales, *how, ends)
    error = guards.unguarded(call)
    assert isinstance(error, NotImplementedError)  # no kernel on the CPU
    found = [violation for _, violation in guards.found]
    # torch 2.14 serves the call through another guarded op, which says the same.
    said = [positions(violation) for violation in found]
    is_known = bad and not (is_first and "fp4" in kind)  # the first version refuses four bits
    assert said[:1] == said[-1:] == ([bad] if is_known else [])
    assert all((violation.device_text or "").startswith(here(line)) for violation in found)


@pytest.mark.parametrize(
    ("major", "plain", "scaled"),
    [(8, False, False), (9, True, False), (10, True, True), (11, False, False)],
)
def test_the_architectures_with_a_kernel_that_asserts(
    sim: Simulation, monkeypatch: pytest.MonkeyPatch, major: int, plain: bool, scaled: bool
) -> None:
    """Hopper's scaled products are another kernel; elsewhere torch loops over the groups."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    tensor_there, scales = torch.zeros(1, device="cuda"), (torch.zeros(1), torch.zeros(1))
    assert matrices._asserts(tensor_there, None) is plain
    assert matrices._asserts(tensor_there, scales) is scaled
