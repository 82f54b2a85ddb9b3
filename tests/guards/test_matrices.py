"""Guards of grouped matrix products: offsets, alignment, scales per row and per block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import tensor

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


def check_found(guards: Collector, call: Any, bad: list[Any], line: str) -> None:
    error = guards.unguarded(call)
    assert isinstance(error, NotImplementedError)  # no kernel on the CPU
    found = [violation for _, violation in guards.found]
    # torch 2.14 serves the call through another guarded op, which says the same.
    said = [positions(violation) for violation in found]
    assert said[:1] == said[-1:] == ([bad] if bad else [])
    assert all((violation.device_text or "").startswith(here(line)) for violation in found)


@pytest.mark.parametrize("op", ["_scaled_grouped_mm", "_scaled_grouped_mm_v2"])
@pytest.mark.parametrize(
    ("scale", "shape", "offs", "bad", "line"),
    [
        ("row", (64, 64), [16, 48, 63], [], ""),
        ("row", (64, 64), [16, 40, 64], [(1,)], "GroupMMCommon.cuh:64"),
        ("row", (64, 64), [16, 48, 65], [(2,)], "GroupMMCommon.cuh:115"),
        ("block", (64, 64), [32, 32, 64], [], ""),
        ("block", (64, 64), [32, 48, 64], [(1,), (2,)], "grouped_common.cuh:116"),
        ("block", (64, 64), [32, 64, 96], [(2,)], "grouped_common.cuh:119"),
        ("few blocks", (64, 64), [32, 32, 32], [], ""),
        ("few blocks", (64, 64), [32, 32, 64], [(2,)], "grouped_common.cuh:165"),
        ("block", (64, 32), [7, 9, 65], [(2,)], "grouped_common.cuh:233"),
        ("block", (64, 32), [7, 9, 64], [], ""),
    ],
)
def test_scaled_grouped_offsets(
    guards: Collector,
    op: str,
    scale: str,
    shape: tuple[int, int],
    offs: list[int],
    bad: list[Any],
    line: str,
) -> None:
    """Scales per row and per block have their own alignment, on the same offsets."""
    float8 = torch.float8_e4m3fn
    left = torch.zeros(shape).to(float8)
    is_stacked = shape[1] == 32
    right = torch.zeros((3, 16, 32) if is_stacked else (16, 64)).to(float8).mT
    scales = torch.ones(4)
    if scale != "row":
        # Each group's scales are padded to 128 rows and four columns.
        scales = torch.ones(128, 4 if scale == "few blocks" else 12).to(torch.float8_e8m0fnu)
    ends = tensor(offs, dtype=torch.int32)
    call = lambda: aten._scaled_grouped_mm(left, right, scales, scales, ends)
    if op.endswith("v2"):
        call = lambda: aten._scaled_grouped_mm_v2(
            left, right, [scales], [1], [0], [scales], [1], [0], ends
        )
    check_found(guards, call, bad, line)


@pytest.mark.parametrize(
    ("dtype", "offs", "bad", "line"),
    [
        (torch.float8_e4m3fn, [16, 48, 64], [], ""),
        (torch.float8_e4m3fn, [16, 40, 64], [(1,), (2,)], "grouped_common.cuh:116"),
        (torch.float8_e4m3fn, [16, 48, 80], [(2,)], "grouped_common.cuh:119"),
        (torch.float8_e8m0fnu, [32, 32, 64], [], ""),
        (torch.float8_e8m0fnu, [16, 32, 64], [(0,), (1,)], "grouped_common.cuh:116"),
    ],
)
def test_four_bit_groups(
    guards: Collector, dtype: torch.dtype, offs: list[int], bad: list[Any], line: str
) -> None:
    """Two numbers lie in a byte: offsets count numbers, in blocks of 16 (nvfp4) or 32 (mxfp4)."""
    left = torch.zeros(64, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    right = torch.zeros(16, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).t()
    scales = [torch.ones(128, 12).to(dtype), torch.ones(1)]
    ends = tensor(offs, dtype=torch.int32)
    call = lambda: aten._scaled_grouped_mm_v2(
        left, right, scales, [1, 0], [1, 0], scales, [1, 0], [1, 0], ends
    )
    check_found(guards, call, bad, line)


def test_scales_that_are_no_recipe_are_the_host_s(guards: Collector) -> None:
    """Four-bit numbers in the first version, and scales of a wrong rank, are torch's own error."""
    left = torch.zeros(64, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    right = torch.zeros(16, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).t()
    scales = torch.ones(128, 12).to(torch.float8_e8m0fnu)
    ends = tensor([7], dtype=torch.int32)
    guards.unguarded(lambda: aten._scaled_grouped_mm(left, right, scales, scales, ends))
    assert guards.found == []
    eight = torch.zeros(64, 64).to(torch.float8_e4m3fn)
    flat = torch.ones(4).to(torch.float8_e8m0fnu)
    guards.unguarded(lambda: aten._scaled_grouped_mm(eight, eight.t(), flat, flat, ends))
    assert guards.found == []


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
