"""Requirements of guards against values: which are fulfilled, and what makes others harmless."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cudalens.core.call import THREAD
from cudalens.core.report_types import Bounds
from cudalens.guards._ranges import FEW
from cudalens.guards.engine import (
    NARROWED,
    Between,
    Condition,
    Within,
    checker,
    fulfils,
    in_bounds,
    interval,
    violation,
)

SIZES = pytest.mark.parametrize("count", [1, 3, FEW, FEW + 1])


def within(low: int = 0, high: int = 4, **parts: Any) -> Within:
    return Within("index", low, high, **{"of": "self", "dim": 0, "why": "", **parts})


def between(**parts: Any) -> Between:
    given = {"bounds": Bounds(min=0, max=1, text="0 … 1"), "why": "", "asserts": "bernoulli_p1"}
    return Between("p", 0.0, 1.0, **{**given, **parts})


def filled(count: int, good: float, last: float, dtype: torch.dtype = torch.int64) -> Tensor:
    values = torch.full((count,), good, dtype=dtype)
    values[-1] = last
    return values


@SIZES
@pytest.mark.parametrize(("last", "is_good"), [(0, True), (4, True), (5, False), (-1, False)])
def test_integers_at_the_bounds_and_one_beyond(count: int, last: int, *, is_good: bool) -> None:
    assert fulfils(within(), filled(count, 2, last)) is is_good
    assert fulfils(within(), torch.empty(0, dtype=torch.int64))


@SIZES
@pytest.mark.parametrize(("last", "is_good"), [(-9, True), (4, True), (5, False)])
def test_only_the_upper_bound(count: int, last: int, *, is_good: bool) -> None:
    assert fulfils(within(upper_bound_only=True), filled(count, 2, last)) is is_good


@SIZES
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(
    ("last", "is_good"), [(-100, True), (-99, False), (-101, False), (5, False), (4, True)]
)
def test_a_value_that_is_allowed_besides(
    count: int, is_first: bool, last: int, *, is_good: bool
) -> None:
    """Where it is not masked first, many values need a second look: the description is none."""
    need = within(also_allowed=-100, masks_first=is_first)
    values = filled(count, 2, last)
    is_second_look = not is_first and count > FEW and last == -100
    assert fulfils(need, values) is (is_good and not is_second_look)
    assert (checker(lambda _: need, ["index"], False)(values) is None) is is_good


@SIZES
@pytest.mark.parametrize(("last", "is_good"), [(-100, True), (0, False)])
def test_nothing_but_the_allowed_value_where_the_interval_is_empty(
    count: int, last: int, *, is_good: bool
) -> None:
    need = within(0, -1, also_allowed=-100, masks_first=True)
    assert fulfils(need, filled(count, -100, last)) is is_good


@SIZES
@pytest.mark.parametrize("is_first", [False, True])
def test_only_what_the_kernel_reads_counts(count: int, is_first: bool) -> None:
    values = filled(count, 2, 9)

    def found(mask: Tensor | None) -> Any:
        need = within(mask=lambda: mask, masks_first=is_first)
        return checker(lambda _: need, ["index"], False)(values)

    assert found(values != 9) is None
    bad = found(values == 9)
    assert (bad.offenders.count, bad.offenders.first[0].value) == (1, 9)
    assert not is_first or found(None) is None


def test_an_item_of_a_list_is_told_by_its_place() -> None:
    good, bad = torch.tensor([1]), torch.tensor([1, 5])
    one = checker(lambda _: [within(item=1)], ["index"], False)
    assert one([bad, good]) is None
    assert one([good, bad]).headline.startswith("{argument}[1][1] = 5 is outside dimension 0")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("count", [1, FEW + 1])
def test_the_first_item_that_is_outside_is_told(count: int, dtype: torch.dtype) -> None:
    """Those of different types share no buffer."""
    needs = [within(item=0), within(0, 2, item=2)]
    good, bad = torch.full((count,), 3), torch.full((count,), 5)
    every = checker(lambda _: needs, ["index"], True)
    assert every([good, bad, torch.full((count,), 2, dtype=dtype)]) is None
    assert every([good, None, good]).list_position == 2
    found = every([bad, None, good])
    assert (found.list_position, found.is_silent) == (0, True)


def test_other_results_of_a_guards_function() -> None:
    assert checker(lambda _: None, ["x"], False)(1) is None
    assert checker(lambda _: "handed on", ["x"], False)(1) == "handed on"
    found: Any = object()
    assert checker(lambda _: Condition(lambda: found), ["x"], False)(1) is found


@pytest.mark.parametrize("skips", [True, False])
def test_a_call_that_torch_refuses_is_none_of_ours(skips: bool) -> None:
    need = within(skip_if=lambda index: skips and index.numel() == 1)
    found = checker(lambda _: need, ["index"], False)(torch.tensor([5]))
    assert (found is None) is skips


@pytest.mark.parametrize("narrows", [False, True, lambda *_: True, lambda *_: False])
@pytest.mark.parametrize(("value", "fits"), [((1 << 32) + 4, True), ((1 << 32) + 5, False)])
def test_an_index_that_is_another_in_its_low_bits(narrows: Any, value: int, *, fits: bool) -> None:
    need = within(narrows=narrows, why="it reads there")
    found = violation(need, torch.tensor([value]), is_silent=False)
    is_narrowed = fits and (narrows() if callable(narrows) else narrows)
    assert found.explanation == (NARROWED if is_narrowed else "it reads there")


@pytest.mark.parametrize("also", [-100, 3])
def test_an_allowed_value_inside_the_interval_is_not_told_apart(also: int) -> None:
    need = within(also_allowed=also, also_allowed_name="ignore_index")
    found = violation(need, torch.tensor([5, 2]), is_silent=True)
    text = "0 … 4 or -100 (ignore_index)" if also == -100 else "0 … 4"
    assert (found.bounds.text, found.is_silent) == (text, True)


def test_small_dtypes_are_compared_without_wrapping() -> None:
    """-100 of uint8 would be 156."""
    found = violation(
        within(also_allowed=-100), torch.tensor([156], dtype=torch.uint8), is_silent=False
    )
    assert found.offenders.count == 1


@pytest.mark.parametrize(
    ("need", "where"),
    [
        (within(), "dimension 0 (size 5) of {related}"),
        (within(-5, 4), "dimension 0 (size 5) of {related}"),
        (within(1, 4, unit="row"), "the 4 rows of {related}"),
        (within(0, 0, unit="row", whole="it"), "the 1 row of it"),
        (within(place="a place"), "a place"),
    ],
)
def test_what_bad_elements_are_outside_of(need: Within, where: str) -> None:
    assert need.where == where


# --- numbers --------------------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize(
    ("last", "is_good"),
    [(0.0, True), (1.0, True), (1.001, False), (-0.001, False), (math.nan, False)],
)
def test_numbers_at_the_bounds_and_beyond(count: int, last: float, *, is_good: bool) -> None:
    values = filled(count, 0.5, last, torch.float32)
    assert fulfils(between(), values) is is_good
    assert fulfils(between(), values[:0])


@pytest.mark.parametrize(("dtype", "is_good"), [(None, False), (torch.float32, True)])
def test_numbers_are_compared_as_the_kernel_converts_them(
    dtype: torch.dtype | None, *, is_good: bool
) -> None:
    values = torch.tensor([1 + 1e-12], dtype=torch.float64)
    assert fulfils(between(dtype=dtype), values) is is_good
    both = torch.cat([values, values + 1])
    found = violation(between(dtype=dtype), both, is_silent=False)
    assert found.offenders.count == 2 - is_good


@pytest.mark.parametrize(
    ("need", "values", "kept"),
    [
        (within(), [1, 4], [("index", 1, 4)]),
        (within(item=0), [1, 4], [("index[0]", 1, 4)]),
        (within(), [1, 5], []),
        (between(), [0.25, 0.5], [("p", 0.25, 0.5)]),
        (between(), [0.25, 1.5], []),
    ],
)
def test_an_open_recorder_keeps_the_extremes_of_good_values(
    need: Any, values: list[Any], kept: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: tuple[list[Any], ...] = ([], [])
    monkeypatch.setattr(THREAD.running, "extremes", read)
    fulfils(need, torch.tensor(values))
    assert read == (kept, kept)


@pytest.mark.parametrize(("last", "kept"), [(1, [("index", 1, 2)]), (0, []), (-100, [])])
def test_an_exception_is_not_kept_as_a_value(
    last: int, kept: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    monkeypatch.setattr(THREAD.running, "extremes", (read,))
    need = within(also_allowed=-100, masks_first=True)
    assert fulfils(need, filled(FEW + 1, 2, last))
    assert read == kept


# --- values that are in bounds --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("need", "ends"),
    [
        (within(), (0, 4, None)),
        (within(upper_bound_only=True), (-math.inf, 4, None)),
        (within(also_allowed=-1), (-1, 4, None)),
        (within(also_allowed=-2), (0, 4, -2)),
        (within(also_allowed=5), (0, 4, 5)),
        (within(also_allowed=4), (0, 4, None)),
        (within(also_allowed=0), (0, 4, None)),
        (between(dtype=torch.float16), (0.0, 1.0, torch.float16)),
    ],
)
def test_the_interval_of_a_good_tensor(need: Any, ends: tuple[Any, ...]) -> None:
    assert interval(need) == ends


@pytest.mark.parametrize(
    ("need", "values", "harmless"),
    [
        (within(), [-1, 0, 4, 5], [0, 0, 4, 4]),
        (within(also_allowed=-100), [-100, -99, 5], [-100, 0, 4]),
        (within(also_allowed=-1), [-1, -2, 5], [-1, -1, 4]),
        (within(upper_bound_only=True), [-9, 5], [-9, 4]),
        (between(), [-1.0, 0.5, 2.0, math.inf, -math.inf, math.nan], [0, 0.5, 1, 1, 0, 0]),
    ],
)
def test_what_is_out_of_bounds_is_replaced(
    need: Any, values: list[Any], harmless: list[Any]
) -> None:
    given = torch.tensor(values)
    before = given.clone()
    assert in_bounds(need, given).tolist() == harmless
    assert torch.equal(given, before) or bool(before.isnan().any())


@pytest.mark.parametrize(
    ("need", "values"), [(within(-300, 300), [-128, 127]), (within(-128, 127), [-128, 127])]
)
def test_an_interval_that_the_dtype_cannot_leave_changes_nothing(
    need: Within, values: list[int]
) -> None:
    given = torch.tensor(values, dtype=torch.int8)
    assert in_bounds(need, given).tolist() == values
