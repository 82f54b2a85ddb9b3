"""Guards of grouped matrix products: offsets, alignment, scales per row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from cudalens.simulate import Simulation
from tests.cpu_guards import Collector, assert_said, positions
from tests.releases import printed_by, release
from tests.verdicts import ask

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(release() < (2, 10), reason="has no grouped products on the CPU")
EXPONENTS = getattr(torch, "float8_e8m0fnu", torch.float8_e5m2)  # from torch 2.7 on


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
    assert_said(found, {"at": bad, "line": f"GroupMMCommon.cuh:{line}"} if bad else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grouped_products_without_a_kernel_of_their_own(
    guards: Collector, dtype: torch.dtype
) -> None:
    """Other dtypes run a loop over slices that asserts nothing: no finding."""
    left, right = (item.to(dtype) for item in MATRIX["M"]())
    offs = tensor([1, 5, 33], dtype=torch.int32)
    assert guards.look(lambda: aten._grouped_mm(left, right, offs)) is None


def of_eight_bits(*shape: int) -> Tensor:
    return torch.zeros(shape).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("op", ["_scaled_grouped_mm", "_scaled_grouped_mm_v2"])
@pytest.mark.parametrize(
    ("scale", "offs", "bad", "line"),
    [
        (torch.ones(4), [16, 48, 63], [], ""),
        (torch.ones(4), [16, 40, 64], [(1,)], "GroupMMCommon.cuh:64"),
        (torch.ones(4), [16, 48, 65], [(2,)], "GroupMMCommon.cuh:115"),
        # Another kernel, without a guard.
        (torch.ones(128, 12).to(EXPONENTS), [32, 64, 96], [], ""),
    ],
)
def test_scaled_grouped_offsets(
    guards: Collector, op: str, scale: Tensor, offs: list[int], bad: list[Any], line: str
) -> None:
    left, right = of_eight_bits(64, 64), of_eight_bits(16, 64).mT
    ends = tensor(offs, dtype=torch.int32)
    if op.endswith("v2"):
        how = ([scale], [1], [0])
        call = lambda: aten._scaled_grouped_mm_v2(left, right, *how, *how, ends)
    else:
        call = lambda: aten._scaled_grouped_mm(left, right, scale, scale, ends)
    error = guards.unguarded(call)
    assert isinstance(error, NotImplementedError)  # no kernel on the CPU
    found = [violation for _, violation in guards.found]
    # torch 2.14 serves the call through another guarded op, which says the same.
    said = [positions(violation) for violation in found]
    assert said[:1] == said[-1:] == ([bad] if bad else [])
    assert all(violation.device_text in printed_by(line) for violation in found)


@pytest.mark.parametrize(("major", "asserts"), [(8, False), (9, True), (10, True), (11, False)])
def test_the_architectures_with_a_kernel_that_asserts(
    sim: Simulation, monkeypatch: pytest.MonkeyPatch, major: int, asserts: bool
) -> None:
    """Elsewhere torch loops over the groups."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    left, right = (item.bfloat16().to("cuda") for item in MATRIX["M"]())
    offs = tensor([1, 5, 33], dtype=torch.int32, device="cuda")
    assert bool(ask(aten._grouped_mm.default, left, right, offs)) is asserts


LEFT, RIGHT = (item.bfloat16() for item in MATRIX["M"]())
ENDS = tensor([1, 5, 33], dtype=torch.int32)
WIDE = torch.zeros(8, 2048).bfloat16(), torch.zeros(2048, 16).bfloat16()


def ends(count: int) -> Tensor:
    """Return so many groups, of which the last ends one beyond."""
    return (torch.arange(1, count + 1) == count).int() * 2049


@pytest.mark.parametrize(
    ("call", "is_judged"),
    [
        ((LEFT, RIGHT, ENDS), True),
        ((LEFT, RIGHT, ENDS, None, torch.bfloat16), True),
        ((LEFT, RIGHT, ENDS, None, torch.float32), False),
        ((LEFT.float(), RIGHT, ENDS), False),
        ((LEFT, RIGHT.half(), ENDS), False),
        ((LEFT, RIGHT), False),
        ((LEFT, RIGHT, ENDS.long()), False),
        ((LEFT, RIGHT, ENDS[None]), False),
        ((LEFT, RIGHT, ENDS.to("meta")), False),
        ((LEFT, RIGHT, ENDS[1:]), False),
        ((LEFT[0], RIGHT, ENDS), False),
        ((LEFT[None], RIGHT, ENDS), False),
        ((LEFT[:, :8], RIGHT, ENDS), False),
        ((*WIDE, ENDS[:0]), False),
        ((*WIDE, ends(1)), True),
        ((*WIDE, ends(1023)), True),
        ((*WIDE, ends(1024)), False),
        ((LEFT.to("meta"), RIGHT.to("meta"), ENDS.to("meta")), False),
    ],
    ids=range(18),
)
def test_only_what_torch_multiplies_in_groups_is_judged(
    call: tuple[Any, ...], *, is_judged: bool
) -> None:
    assert bool(ask(aten._grouped_mm.default, *call)) is is_judged


@pytest.mark.parametrize(
    ("left", "right", "scale", "is_judged"),
    [
        (of_eight_bits(64, 64), of_eight_bits(16, 64).mT, torch.ones(4), True),
        (of_eight_bits(64, 64), of_eight_bits(64, 16), torch.ones(4), False),
        (of_eight_bits(64, 64).mT, of_eight_bits(16, 64).mT, torch.ones(4), False),
        (of_eight_bits(64, 64), of_eight_bits(16, 64).mT, torch.ones(4).double(), False),
        (torch.zeros(64, 64), of_eight_bits(16, 64).mT, torch.ones(4), False),
        (of_eight_bits(64, 64), torch.zeros(16, 64).mT, torch.ones(4), False),
    ],
    ids=range(6),
)
def test_scales_and_layouts_of_the_kernel_that_asserts(
    left: Tensor, right: Tensor, scale: Tensor, *, is_judged: bool
) -> None:
    offs = tensor([16, 48, 65], dtype=torch.int32)
    call = (left, right, scale, scale, offs)
    assert bool(ask(aten._scaled_grouped_mm.default, *call)) is is_judged


@pytest.mark.parametrize(
    ("offs", "said"),
    [
        (
            [5, 1, 32],
            {
                "headline": "{argument}[1] = 1 is smaller than the offset before it, or negative",
                "bounds.text": "rising within 0 … 32",
                "is_index": False,
                **{"related": "self", "size": 32, "dim": 0},
            },
        ),
        (
            [1, 5, 33],
            {
                "headline": "{argument}[2] = 33 is outside dimension 0 (size 32) of {related}",
                "bounds.text": "0 … 32",
                "is_index": True,
                "why": "the kernel stops at one beyond the tensor",
            },
        ),
    ],
)
def test_what_is_said_of_an_offset(offs: list[int], said: dict[str, Any]) -> None:
    found = ask(aten._grouped_mm.default, LEFT, RIGHT, tensor(offs, dtype=torch.int32))
    assert_said(dict(found)["grouped_mm_offsets_in_range"], said)


def test_an_offset_that_cuts_a_line_is_told_by_the_step() -> None:
    left, right = (item.bfloat16() for item in MATRIX["N"]())
    (found,) = ask(aten._grouped_mm.default, left, right, tensor([4, 24, 32], dtype=torch.int32))
    assert_said(
        found[1],
        {
            "headline": "{argument}[0] = 4 does not end a group of a multiple of 8 elements",
            "bounds.text": "groups of a multiple of 8 elements",
            **{"related": "mat2", "dim": 1, "size": 32, "is_index": False},
        },
    )


@pytest.mark.parametrize(
    ("is_left_turned", "is_right_turned", "line"),
    [(False, False, 64), (True, False, 64), (False, True, 80), (True, True, 80)],
)
def test_the_alignment_of_what_is_cut_is_asserted_first(
    is_left_turned: bool, is_right_turned: bool, line: int
) -> None:
    """That of the result where no line of the right matrix is cut."""
    left, right = (item.bfloat16() for item in MATRIX["N"]())
    left = left.mT.contiguous().mT if is_left_turned else left
    right = right.t().contiguous().t() if is_right_turned else right
    (found,) = ask(aten._grouped_mm.default, left, right, tensor([4, 24, 32], dtype=torch.int32))
    assert_said(found[1], {"line": f"GroupMMCommon.cuh:{line}"})
