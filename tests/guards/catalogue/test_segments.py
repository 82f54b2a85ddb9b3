"""Guards of repeats and segments: which calls they judge, and what leaves the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, tensor, zeros

from cudalens.core.report_types import Violation
from tests.cpu_guards import assert_said, said_id
from tests.verdicts import ask

aten = torch.ops.aten


def repeated(repeats: Tensor, size: int | None) -> dict[str, Violation]:
    return dict(ask(aten.repeat_interleave.Tensor, repeats, output_size=size))


@pytest.mark.parametrize(
    ("repeats", "size", "is_judged"),
    [
        (tensor([1]), 0, True),
        (tensor([1]), None, False),
        (tensor([1]), -1, False),
        (tensor([], dtype=torch.int64), 1, False),
        (tensor([[1]]), 0, False),
        (tensor(1), 0, False),
        (tensor([1]).short(), 0, False),
        (tensor([1]).int(), 0, True),
    ],
)
def test_repeats_are_judged_where_the_device_does(
    repeats: Tensor, size: int | None, is_judged: bool
) -> None:
    assert bool(repeated(repeats, size)) is is_judged


def test_a_sum_is_told_by_its_bounds() -> None:
    (violation,) = repeated(tensor([2, 1]), 4).values()
    assert (violation.bounds.min, violation.bounds.max) == (4, 4)
    assert [item.value for item in violation.offenders.first] == [3]
    assert not violation.is_index


NEGATIVE, INSIDE = "segment_lengths_not_negative", "segments_lie_in_data"
LINE, MATRIX = zeros(4), zeros(2, 4)
ROWS = "SegmentReduce.cu:146"
NOT_FALLING = "no smaller than the offset before it"


def reduced(data: Tensor, reduce: str = "sum", **options: Any) -> dict[str, Violation]:
    options = {"unsafe": True, **options}
    return dict(ask(aten.segment_reduce.default, data, reduce, **options))


@pytest.mark.parametrize(
    ("data", "options", "guard", "said"),
    [
        # Ends: at the bound and one beyond, of lengths and of offsets.
        (LINE, {"lengths": tensor([3, 1])}, INSIDE, None),
        (
            LINE,
            {"lengths": tensor([3, 2])},
            INSIDE,
            {"at": [(1,)], "bounds.text": "0 … 4", "size": 4, "dim": 0, "device_text": None},
        ),
        (LINE, {"offsets": tensor([0, 3, 4])}, INSIDE, None),
        (
            LINE,
            {"offsets": tensor([0, 3, 5])},
            INSIDE,
            {
                "at": [(2,)],
                "headline": "{argument}[2] = 5 is outside the 4 elements of {related}",
                "argument": "offsets",
                "is_silent": True,
                "is_replay_safe": False,
            },
        ),
        # What leaves the data with no element reads nothing, behind it and before it.
        (LINE, {"lengths": tensor([4, 0])}, INSIDE, None),
        (LINE, {"lengths": tensor([5, 0])}, INSIDE, {"at": [(0,)]}),
        (
            LINE,
            {"lengths": tensor([3, 2, 1])},
            INSIDE,
            {
                "headline": "{argument}[1] = 2 ends its segment at 5, which is outside the 4 "
                "elements of {related}"
            },
        ),
        (LINE, {"offsets": tensor([0, 4, 4])}, INSIDE, None),
        (LINE, {"offsets": tensor([5, 5])}, INSIDE, None),
        (LINE, {"offsets": tensor([-1, -1, 2])}, INSIDE, {"at": [(1,)]}),
        (LINE, {"offsets": tensor([-1, 2])}, INSIDE, {"at": [(0,)]}),
        (LINE, {"offsets": tensor([-2, -2])}, INSIDE, None),
        # Sums of a line assert nothing: what is negative is a silent finding.
        (LINE, {"lengths": tensor([2, 0])}, INSIDE, None),
        (LINE, {"lengths": tensor([2, -1])}, INSIDE, {"at": [(1,)], "is_silent": True}),
        (LINE, {"lengths": tensor([2, -1])}, NEGATIVE, None),
        (LINE, {"offsets": tensor([0, 2, 2])}, INSIDE, None),
        (
            LINE,
            {"offsets": tensor([0, 2, 1])},
            INSIDE,
            {"at": [(2,)], "bounds.text": NOT_FALLING, "device_text": None, "is_index": False},
        ),
        # Means and rows assert it: one finding, which is that of the assertion.
        (LINE, {"reduce": "mean", "lengths": tensor([2, 0])}, NEGATIVE, None),
        (
            LINE,
            {"reduce": "mean", "lengths": tensor([2, -1])},
            NEGATIVE,
            {"line": "SegmentReduce.cu:78", "is_silent": False, "bounds.text": "at least 0"},
        ),
        (LINE, {"reduce": "mean", "lengths": tensor([2, -1])}, INSIDE, None),
        (MATRIX, {"lengths": tensor([2, 0])}, NEGATIVE, None),
        (MATRIX, {"lengths": tensor([2, -1])}, NEGATIVE, {"line": ROWS}),
        (MATRIX, {"reduce": "mean", "lengths": tensor([2, -1])}, NEGATIVE, {"line": ROWS}),
        (MATRIX, {"lengths": tensor([2, -1])}, INSIDE, None),
        # The segments of rows lie in the second dimension, each row by itself.
        (MATRIX, {"axis": 1, "lengths": tensor([[4], [4]])}, INSIDE, None),
        (
            MATRIX,
            {"axis": 1, "lengths": tensor([[4], [5]])},
            INSIDE,
            {"at": [(1, 0)], "dim": 1, "size": 4},
        ),
        (MATRIX, {"axis": 0, "lengths": tensor([2])}, INSIDE, None),
        (MATRIX, {"axis": 0, "lengths": tensor([3])}, INSIDE, {"at": [(0,)], "size": 2}),
        (MATRIX, {"axis": -2, "lengths": tensor([3])}, INSIDE, {"size": 2}),
        (zeros(2, 4, 3), {"axis": -2, "lengths": tensor([[5], [4]])}, INSIDE, {"at": [(0, 0)]}),
        (
            zeros(1, 2, 4),
            {"axis": 2, "lengths": tensor([[[4], [5]]])},
            INSIDE,
            {"at": [(0, 1, 0)]},
        ),
        # The host looks at lengths, unless it is told not to.
        (LINE, {"lengths": tensor([5]), "unsafe": False}, INSIDE, None),
        (LINE, {"offsets": tensor([0, 5]), "unsafe": False}, INSIDE, {"at": [(1,)]}),
        # Calls that torch refuses.
        (LINE, {"lengths": tensor([5]).int()}, INSIDE, {"at": [(0,)]}),
        (LINE, {"lengths": tensor([5]).short()}, INSIDE, None),
        (LINE, {"lengths": tensor([5]), "offsets": tensor([0, 5])}, INSIDE, None),
        (LINE, {"lengths": tensor([], dtype=torch.int64)}, INSIDE, None),
        (LINE, {"lengths": tensor(5)}, INSIDE, None),
        (LINE, {"lengths": tensor([[5]])}, INSIDE, None),
        (MATRIX, {"axis": 1, "lengths": tensor([5])}, INSIDE, None),
        (MATRIX, {"axis": 1, "lengths": tensor([[5]] * 3)}, INSIDE, None),
        (LINE.to("meta"), {"lengths": tensor([5])}, INSIDE, None),
    ],
    ids=said_id,
)
def test_segments(
    data: Tensor, options: dict[str, Any], guard: str, said: dict[str, Any] | None
) -> None:
    assert_said(reduced(data, **options).get(guard), said)


def test_no_neighbour_hides_a_length_below_0() -> None:
    """The sum of the lengths is that of the data."""
    found = reduced(LINE, lengths=tensor([5, -1]))[INSIDE]
    assert_said(found, {"at": [(1,)], "bounds.text": "at least 0"})


def test_lengths_of_32_bits_do_not_overflow() -> None:
    found = reduced(LINE, lengths=tensor([2**31 - 1, 2**31 - 1], dtype=torch.int32))
    assert_said(found[INSIDE], {"at": [(0,), (1,)]})
