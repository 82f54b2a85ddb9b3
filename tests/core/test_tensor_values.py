"""What is told of a tensor's values is what the plainest loop over them finds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cudalens import simulate
from cudalens.core import tensor_values
from cudalens.core.report_types import TensorSummary
from cudalens.core.tensor_values import find_offenders, number, outside, short, summarise
from cudalens.recorder import Recorder

SHAPES = [(1,), (63,), (64,), (65,), (200,), (31, 3), (32, 64), (33, 65), (65, 131), (5, 4, 9)]
SHAPES += [(993, 1)]  # one part is longer than the others


def loop_map(tensor: Tensor, bad: Tensor) -> tuple[list[int], list[object], list[object]]:
    """Count and bound each cell of the map in a plain loop, cells as equal as they can be."""
    matrix = tensor.reshape(1, -1) if tensor.dim() == 1 else tensor.reshape(tensor.shape[0], -1)
    marks = bad.reshape(matrix.shape)
    rows, columns = (
        next(n for n in range(1, most + 1) if max(1, -(-size // most)) * n >= size)
        for size, most in zip(matrix.shape, (32, 64), strict=True)
    )
    counts: list[int] = []
    low: list[object] = []
    high: list[object] = []
    bands = zip(matrix.tensor_split(rows), marks.tensor_split(rows), strict=True)
    for band, marked in bands:
        cells = zip(band.tensor_split(columns, 1), marked.tensor_split(columns, 1), strict=True)
        for cell, mark in cells:
            counts.append(int(mark.sum()))
            low.append(number(cell.min().item()))
            high.append(number(cell.max().item()))
    return counts, low, high


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("listed", "piece"), [(0, 1), (1 << 20, 2), (1 << 20, 1 << 18)])
def test_map_is_that_of_a_plain_loop(
    shape: tuple[int, ...], listed: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a row is so long that each of its cells is read by itself."""
    monkeypatch.setattr(tensor_values, "_LISTED", listed)
    monkeypatch.setattr(tensor_values, "_HOST_PIECE", piece)
    generator = torch.Generator().manual_seed(sum(shape))
    tensor = torch.randint(-5, 40, shape, generator=generator)
    bad = tensor > 30
    bad.reshape(-1)[-1] = True
    found = find_offenders(tensor, bad)
    counts, low, high = loop_map(tensor, bad)
    assert (list(found.map.bad), list(found.map.low), list(found.map.high)) == (counts, low, high)
    assert found.count == sum(counts) == int(bad.sum())
    assert (found.min, found.max) == (tensor.min(), tensor.max())


@pytest.mark.parametrize("listed", [0, 1 << 20])
def test_first_positions_are_in_row_major_order(
    listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_values, "_LISTED", listed)
    monkeypatch.setattr(tensor_values, "_HOST_PIECE", 7)
    tensor = torch.arange(60).reshape(6, 10)
    found = find_offenders(tensor, tensor % 2 == 1)
    assert [item.position for item in found.first] == [(i // 10, i % 10) for i in range(1, 41, 2)]
    assert [item.value for item in found.first] == list(range(1, 41, 2))
    assert found.count == 30


def test_a_value_without_dimensions_is_its_own_position() -> None:
    """A scalar has one position and no map."""
    found = find_offenders(torch.tensor(7), torch.tensor(True))
    assert [item.position for item in found.first] == [()]
    assert found.map is None


@pytest.mark.parametrize("piece", [3, 1 << 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_floats_are_summarised_in_pieces_as_in_one(
    piece: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Range, mean, NaN and infinity counts and histogram are those of all finite values."""
    monkeypatch.setattr(tensor_values, "_HOST_PIECE", piece)
    inf, nan = math.inf, math.nan
    tensor = torch.tensor([1.0, -2.0, inf, nan, 4.0, -inf, nan, 0.5, 3.0], dtype=dtype)
    found = summarise(tensor)
    assert (found.min, found.max, found.mean, found.nan, found.inf) == (-2, 4, 1.3, 2, 2)
    assert sum(found.histogram.counts) == 5


def test_all_finite_floats_have_no_count() -> None:
    """Without NaN and infinities both counts are zero; with nothing else there is no range."""
    found = summarise(torch.tensor([0.25, 0.75]))
    assert (found.min, found.max, found.mean, found.nan, found.inf) == (0.25, 0.75, 0.5, 0, 0)
    for end in (math.inf, -math.inf):
        found = summarise(torch.tensor([1.0, end]))
        assert (found.min, found.max, found.inf) == (1.0, 1.0, 1)
    empty = summarise(torch.tensor([math.nan, math.inf]))
    assert (empty.min, empty.nan, empty.inf) == (None, 1, 1)


def test_values_of_uint64_are_not_summarised() -> None:
    """Torch has no reductions of them."""
    assert summarise(torch.tensor([1, 2], dtype=torch.uint64)) == TensorSummary()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool])
def test_integers_are_summarised(dtype: torch.dtype) -> None:
    """Range, exact mean and the distinct values, in order."""
    found = summarise(torch.tensor([[1, 0], [1, 1]], dtype=dtype))
    assert (found.min, found.max, found.mean, found.unique) == (0, 1, 0.75, (0, 1))


@pytest.mark.parametrize("span", [(1 << 16) - 1, 1 << 16, 1 << 40])
def test_distinct_values_are_found_by_counting_and_by_sorting(span: int) -> None:
    found = summarise(torch.tensor([-3, span - 3, -3, 0]))
    assert found.unique == (-3, 0, span - 3)


@pytest.mark.parametrize("count", [32, 33])
def test_many_distinct_values_are_not_listed(count: int) -> None:
    found = summarise(torch.arange(count))
    assert found.unique == (tuple(range(32)) if count == 32 else None)


def test_mean_of_huge_integers_does_not_overflow() -> None:
    huge = 1 << 62
    found = summarise(torch.tensor([huge, huge, huge, huge]))
    assert found.mean == number(float(huge))


@pytest.mark.parametrize(
    ("top", "mean"),
    [(1e38, 7.75e37), (1e39, 7.75e38), (1e300, 7.75e299)],
    ids=["within float32", "beyond it", "far beyond it"],
)
def test_mean_of_float64_may_be_beyond_float32(top: float, mean: float) -> None:
    found = summarise(torch.tensor([top / 10, top, top, top], dtype=torch.float64))
    assert found.mean == mean


@pytest.mark.parametrize("top", [tensor_values.HISTOGRAM_BINS - 1, tensor_values.HISTOGRAM_BINS])
@pytest.mark.parametrize("piece", [3, 1 << 18])
def test_few_integers_have_a_bin_each(
    top: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 24 values each has its own bin; one more and they share."""
    monkeypatch.setattr(tensor_values, "_HOST_PIECE", piece)
    found = summarise(torch.tensor([0, 2, 2, top, 1, top, top])).histogram
    counts = found.counts
    assert sum(counts) == 7
    assert len(counts) == tensor_values.HISTOGRAM_BINS
    assert len(found.edges) == len(counts) + 1
    assert (list(counts[:3]), counts[-1]) == ([1, 1, 2], 3)


@pytest.mark.parametrize("piece", [2, 1 << 18])
def test_the_bounds_themselves_are_inside(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both bounds pass, one step beyond them does not; the shape is kept."""
    monkeypatch.setattr(tensor_values, "_HOST_PIECE", piece)
    marks = outside(torch.tensor([[0, 9, -1], [10, 5, 0]]).T, 0, 9)
    assert marks.tolist() == [[False, True], [False, False], [True, False]]
    assert outside(torch.tensor(10), 0, 9).tolist() is True
    assert outside(torch.empty(0, 3), 0, 9).shape == (0, 3)
    assert outside(torch.tensor([math.nan, math.inf]), 0, 1).tolist() == [False, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the ops of the simulated device")
def test_a_device_s_histogram_is_the_host_s(sim: simulate.Simulation) -> None:
    """Counted without ``histc``, which a GPU refuses under deterministic algorithms."""
    spread = torch.linspace(-3.0, 5.0, 997).square()
    low, high = float(spread.min()), float(spread.max())
    with Recorder() as recorder:
        counted = tensor_values._binned(spread.to("cuda"), low, high, 24)
    assert counted.tolist() == tensor_values._binned(spread, low, high, 24).int().tolist()
    assert "aten::histc" not in {entry.op for entry in recorder.history()}


@pytest.mark.parametrize("marked", [[], [0], [7, 8, 15], [63, 64, 66], list(range(67))])
def test_marks_are_listed_by_words_as_one_by_one(
    marked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions are the same in order, also behind the last whole word and in a view."""
    monkeypatch.setattr(tensor_values, "HOST_NUMEL", 8)
    marks = torch.zeros(75, dtype=torch.bool)
    marks[torch.tensor(marked, dtype=torch.int64) + 8] = True
    for view in (marks[8:], marks[8:].clone(), torch.stack((marks, marks), 1)[8:, 0]):
        assert tensor_values._listed(view).tolist() == marked


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0010000000000000009, "0.001"),
        (-3.094916e38, "-3.095e+38"),
        (1.0000001, "1.0000001"),
        (60000.0, "60000.0"),
        (12345678901, "12345678901"),
        (-12345678901, "-12345678901"),
        (0.123456, "0.123456"),
        (0.1234567, "0.1235"),
        ("nan", "nan"),
        ("(1+2j)", "(1+2j)"),
    ],
)
def test_a_number_has_four_digits_unless_they_make_another_one_of_it(
    value: object, text: str
) -> None:
    assert short(value) == text


NAN = math.nan


@pytest.mark.parametrize(
    ("values", "bad", "marked", "others", "allowed"),
    [
        ([0, 2, 9], [9], (), "0 … 2", 0),
        ([2, 2, 9], [9], (), "2", 0),
        ([9, 9], [9], (), None, 0),
        # Values with a meaning of their own are counted apart, and a bad one is none of them.
        ([0, 2, -100, -100, 9], [9], (-100,), "0 … 2", 2),
        ([-100, 9], [9], (-100,), None, 1),
        ([-100, 9, 1], [-100, 9], (-100,), "1", 0),
        ([-1, 0, -1, 7, 9], [9], (-1, 7), "0", 3),
        ([0.5, NAN, 2.0, 9.0], [9.0], (), "0.5 … 2.0", 0),
        ([NAN, 9.0], [9.0], (), None, 0),
    ],
)
def test_what_is_told_of_the_good_values(
    values: list[float], bad: list[float], marked: tuple[int, ...], others: str, allowed: int
) -> None:
    tensor = torch.tensor(values)
    found = find_offenders(tensor, torch.isin(tensor, torch.tensor(bad)), marked)
    assert (found.others, found.allowed) == (others, allowed)
    assert (found.count, found.total) == (sum(it in bad for it in values), len(values))


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ([[3, 1], [2, 9]], (1, 9)),
        ([[0.5, -2.0]], (-2.0, 0.5)),
        ([[0.5, NAN]], ("nan", "nan")),
        ([[math.inf, 10.0, -math.inf, 9.0]], ("-inf", "inf")),
        (7, (7, 7)),
    ],
)
def test_the_ends_are_those_of_the_whole_tensor(values: Any, ends: tuple[object, object]) -> None:
    tensor = torch.tensor(values)
    found = find_offenders(tensor, torch.ones(tensor.shape, dtype=torch.bool))
    assert (found.min, found.max) == ends


def test_only_planes_that_hold_a_bad_value_are_drawn() -> None:
    tensor = torch.zeros(2, 3, 1, 2, 2)
    tensor[0, 1, 0, 1, 0] = tensor[1, 2, 0, 0, 1] = 9
    found = find_offenders(tensor, tensor == 9)
    assert [plane.index for plane in found.planes] == [(0, 1), (1, 2)]
    assert {plane.size for plane in found.planes} == {(2, 2)}
    alone = find_offenders(tensor[0, 1], tensor[0, 1] == 9)
    assert [plane.index for plane in alone.planes] == [()]
    row = tensor[0, 1, 0, 1]
    assert find_offenders(row, row == 9).planes == ()


def test_no_more_than_so_many_planes_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones, of planes that are not too large."""
    tensor = torch.zeros(12, 2, 3)
    tensor[1:, 1, 2] = 9
    bad = tensor == 9
    assert [item.index for item in find_offenders(tensor, bad).planes] == [
        (n,) for n in range(1, 9)
    ]
    monkeypatch.setattr(tensor_values, "_PLANE_NUMEL", 6)
    assert len(find_offenders(tensor, bad).planes) == 8
    monkeypatch.setattr(tensor_values, "_PLANE_NUMEL", 5)
    assert find_offenders(tensor, bad).planes == ()


@pytest.mark.parametrize(
    ("values", "bad", "marked", "rows"),
    [
        ([[0, 9], [3, 99]], 99, (), ("09", "3x")),
        ([[0, 1], [4, 99]], 99, (), ("02", "9x")),
        ([[5, 5], [5, 99]], 99, (), ("00", "0x")),
        ([[-1, 9], [0, 99]], 99, (-1,), ("-9", "0x")),
        ([[-1.0, NAN], [2.0, 99.0]], 99, (-1,), ("--", "0x")),
        ([[99, 99], [99, 99]], 99, (), ("xx", "xx")),
    ],
)
def test_a_plane_in_characters(
    values: list[list[float]], bad: float, marked: tuple[int, ...], rows: tuple[str, ...]
) -> None:
    tensor = torch.tensor(values)
    (plane,) = find_offenders(tensor, tensor == bad, marked).planes
    assert (plane.rows, plane.size) == (rows, (2, 2))


def test_a_large_plane_has_a_character_for_a_rectangle() -> None:
    tensor = torch.zeros(65, 130)
    tensor[0, 0], tensor[0, 3:6], tensor[1, 3:6], tensor[64, 129] = 9, 9, 9, 9
    (plane,) = find_offenders(tensor, tensor == 9).planes
    assert (len(plane.rows), {len(row) for row in plane.rows}) == (33, {44})
    assert plane.rows[0] == "/x" + "0" * 42
    assert plane.rows[-1] == "0" * 43 + "x"  # what is beyond the edge does not count
    assert {*plane.rows[1:-1]} == {"0" * 44}


def test_without_values_there_is_no_map_and_no_end() -> None:
    good = find_offenders(torch.tensor(7), torch.tensor(False))
    assert (good.count, good.map, good.min, good.max, good.others) == (0, *[None] * 3, "7")
    empty = find_offenders(torch.empty(0, 3), torch.empty(0, 3, dtype=torch.bool))
    assert (empty.count, empty.total, empty.map, empty.min, empty.others) == (0, 0, *[None] * 3)


@pytest.mark.parametrize("listed", [0, 1 << 20])
@pytest.mark.parametrize("host", [4, 1 << 20])
def test_a_large_tensor_is_told_of_as_a_small_one(
    listed: int, host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_values, "HOST_NUMEL", host)
    monkeypatch.setattr(tensor_values, "_LISTED", listed)
    values = torch.tensor([[1, 2, 9], [9, -1, 3]])
    found = find_offenders(values, values == 9, (-1,))
    assert [item.position for item in found.first] == [(0, 2), (1, 0)]
    assert (found.min, found.max, found.others, found.allowed) == (-1, 9, "1 … 3", 1)
    assert found.map.bad == (0, 0, 1, 1, 0, 0)
    whole = summarise(values)
    assert (whole.min, whole.max, whole.unique) == (-1, 9, (-1, 1, 2, 3, 9) if host > 6 else None)
    assert summarise(values / 2).max == 4.5


@pytest.mark.parametrize("limit", [3, 4])
def test_a_histogram_of_so_many_values_at_most(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_values, "_HISTOGRAM_NUMEL", limit)
    found = summarise(torch.tensor([0.0, 1.0, 2.0, 3.0])).histogram
    assert sum(found.counts) == (4 if limit == 4 else 0)
    assert len(found.edges) == (25 if limit == 4 else 0)


@pytest.mark.parametrize(
    ("values", "edges", "counts"),
    [
        ([2.5, 2.5], (2.5, 2.5), (2,)),
        ([7, 7, 7], (7.0, 7.0), (3,)),
        ([0, 1, 1, 2], (0.0, 0.666667, 1.33333, 2.0), (1, 2, 1)),
        ([-1.5e308, 1.5e308], (), ()),
    ],
)
def test_the_bins_of_few_values(
    values: list[float], edges: tuple[float, ...], counts: tuple[int, ...]
) -> None:
    dtype = torch.float64 if isinstance(values[0], float) else torch.int64
    found = summarise(torch.tensor(values, dtype=dtype)).histogram
    assert (found.edges, found.counts) == (edges, counts)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (True, 1),
        (3, 3),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
        (0.1 + 0.2, 0.3),
        (1.00000012, 1.00000012),
        (12345.00000012, 12345.0),
        (-1234567.5, -1234568.0),
        (1 / 3, 0.3333333),
    ],
)
def test_a_number_that_json_can_hold(value: float, kept: object) -> None:
    assert number(value) == kept
    assert type(number(value)) is type(kept)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.tensor([1 + 2j]),
        torch.eye(2).to_sparse(),
    ],
    ids=["empty", "complex", "sparse"],
)
def test_values_that_are_not_summarised(tensor: Tensor) -> None:
    assert summarise(tensor) == TensorSummary()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32])
def test_unsigned_integers_are_summarised(dtype: torch.dtype) -> None:
    found = summarise(torch.tensor([3, 0, 3], dtype=dtype))
    assert (found.min, found.max, found.mean, found.unique) == (0, 3, 2.0, (0, 3))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_values_are_not_summarised() -> None:
    values = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    assert summarise(values) == TensorSummary()
