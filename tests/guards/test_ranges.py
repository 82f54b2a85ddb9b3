"""A few elements are reduced on the host, many where they are: both find the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from cudalens.core.report_types import Bounds, Offender, Offenders, Violation
from cudalens.guards import GUARDS, Guard
from cudalens.guards._ranges import (
    FEW,
    FLOATS,
    all_true,
    breaks,
    exact_offenders,
    extremes,
    format_interval,
    format_offender,
    lies_within,
    out_of_range,
    outside_mask,
    unexpanded,
)
from cudalens.guards.plans import Forms
from tests.cpu_guards import Collector, positions
from tests.guards.test_catalogue import Ops, every_guard, stopped_by

aten = torch.ops.aten


@pytest.mark.parametrize("left_out", ["few", "forms"])
@every_guard
def test_every_look_finds_the_same(
    entry: Guard, left_out: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A reduction, as large tensors get it, and the look at calls with keywords, modes or lists."""
    if left_out == "forms":
        monkeypatch.setattr(Forms, "of", lambda *call: None)
    else:
        request.getfixturevalue("nothing_is_few")
    stopped_by(entry)


@pytest.mark.parametrize(("count", "more"), [(FEW, 0), (FEW + 1, 1)])
def test_so_many_elements_are_reduced_on_the_host(count: int, more: int) -> None:
    """At the limit no buffer is made on the device, and where labels are ignored none is masked.

    One beyond it there is one buffer, and one mask; one reduction each.
    """
    with Ops() as ops:
        assert extremes(torch.arange(count) - 3) == (-3, count - 4)
    assert (ops.counts["new_empty"], ops.reduced) == (more, [count])
    check = GUARDS[aten.nll_loss_forward.default][0].check
    target = torch.arange(count).where(torch.arange(count) % 2 > 0, -100)
    with Ops() as ops:
        assert check(torch.zeros(count, count), target, None, 1, -100) is None
    assert (ops.counts["masked_fill"], ops.reduced) == (more, [count])


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (1, 3, 2)])
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.uint16, torch.uint64, torch.float32]
)
def test_extremes_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """All dimensions are seen, repeated ones and transposed ones alike."""
    values = (torch.arange(6)[:1] if not shape else torch.arange(6)).to(dtype)
    turned = values.view(shape).permute(tuple(reversed(range(len(shape)))))
    assert extremes(turned) == (0, 5 if shape else 0)
    assert extremes(values[:1].expand(2, FEW)) == (0, 0)


@pytest.mark.parametrize("count", [3, FEW, FEW + 1])
def test_a_number_that_is_nan_wins(count: int) -> None:
    """NaN does not win or lose by its place."""
    low, high = extremes(torch.zeros(count).index_fill(0, tensor([1]), torch.nan))
    assert math.isnan(low) and math.isnan(high)


# --- numbers in an interval -----------------------------------------------------------------------


NAN = "is not a number"
UNIT = dict.fromkeys((1.5, -0.25, torch.inf), "is outside the interval 0 … 1") | {torch.nan: NAN}
RATE = {-1.0: "is negative", torch.nan: NAN}
WEIGHT = {-0.5: "is negative", -torch.inf: "is negative", torch.inf: "is infinite", torch.nan: NAN}
bce = torch.nn.functional.binary_cross_entropy


def spread(values: Tensor) -> Tensor:
    return torch.zeros(3, *values.shape, dtype=values.dtype)


NUMBERS: list[tuple[str, str, dict[float, str], Callable[[Tensor], Any]]] = [
    *(
        ("aten::multinomial", "self", WEIGHT, lambda v, how=how: torch.multinomial(v, *how))
        for how in ((1, False), (2, False), (1, True))
    ),
    ("aten::multinomial", "self", dict(WEIGHT), lambda v: torch.multinomial(v, 2, True)),
    ("aten::bernoulli", "self", UNIT, torch.bernoulli),
    ("aten::bernoulli.out", "self", UNIT, lambda v: torch.bernoulli(v, out=torch.zeros_like(v))),
    ("aten::bernoulli_.Tensor", "p", UNIT, lambda v: spread(v).bernoulli_(v)),
    ("aten::bernoulli.Tensor", "p", UNIT, lambda v: aten.bernoulli.Tensor(spread(v), v)),
    (
        *("aten::bernoulli.Tensor_out", "p", UNIT),
        lambda v: aten.bernoulli.Tensor_out(spread(v), v, out=spread(v)),
    ),
    ("aten::poisson", "self", RATE, torch.poisson),
    ("aten::poisson.out", "self", RATE, lambda v: aten.poisson.out(v, out=torch.zeros_like(v))),
    ("aten::binary_cross_entropy", "self", UNIT, lambda v: bce(v, torch.full_like(v, 0.5))),
    ("aten::binary_cross_entropy", "target", UNIT, lambda v: bce(torch.full_like(v, 0.5), v)),
]


@pytest.mark.parametrize("dtype", sorted(FLOATS, key=str))
@pytest.mark.parametrize(("op", "argument", "says", "call"), NUMBERS)
def test_numbers_are_told_in_words(
    guards: Collector, dtype: torch.dtype, op: str, argument: str, says: Any, call: Any
) -> None:
    """Every op that takes probabilities, weights or rates checks them, under its own name."""
    values = torch.full((2, 4), 0.5, dtype=dtype)
    for good in (0.0, -0.0, 1.0):
        values[1, 2] = good
        assert guards.look(lambda: call(values)) is None
    for value, words in says.items():
        values[1, 2] = value
        found = guards.look(lambda: call(values))
        assert found is not None and guards.found[0][0] == op
        assert found.headline == f"{{argument}}[1, 2] = {value} {words}"
        assert (found.argument, found.is_index, positions(found)) == (argument, False, [(1, 2)])
        assert (found.offenders.count, found.offenders.total) == (1, 8)
        assert says is not UNIT or (found.bounds.min, found.bounds.max) == (0, 1)
        searches = op == "aten::multinomial" and says is not WEIGHT
        assert ("MultinomialKernel" in str(found.device_text)) == searches


# --- the arithmetic itself ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "is_it"),
    [([0, 4], True), ([0, 5], False), ([-1, 4], False), ([], True), ([-1], False)],
)
def test_integers_lie_within_closed_bounds(values: list[int], *, is_it: bool) -> None:
    assert lies_within(torch.tensor(values, dtype=torch.int64), 0, 4) is is_it


@pytest.mark.parametrize(
    ("ends", "also", "text"),
    [
        ((0, 9), (), "0 … 9"),
        ((0, 0), (), "0 … 0"),
        ((0, -1), (), "nothing"),
        ((0.0, -1.0), (), "0.0 … -1.0"),
        ((0, -1), ((-100, "ignore_index"),), "nothing or -100 (ignore_index)"),
    ],
)
def test_an_interval_for_reading(ends: Any, also: Any, text: str) -> None:
    assert format_interval(*ends, also) == text


@pytest.mark.parametrize(
    ("position", "item", "text"),
    [
        ((17,), None, "{argument}[17] = 10"),
        ((1, 2), 0, "{argument}[0][1, 2] = 10"),
        ((0,), None, "{argument}[0] = 10"),
        ((), None, "{argument} = 10"),
    ],
)
def test_the_first_offender_in_words(
    position: tuple[int, ...], item: int | None, text: str
) -> None:
    found = Offenders(count=1, total=1, first=(Offender(position=position, value=10),))
    assert format_offender(found, item) == text


@pytest.mark.parametrize("count", [1024, 1025])
def test_whether_every_flag_is_true(count: int) -> None:
    flags = torch.ones(count, dtype=torch.bool)
    assert all_true(flags)
    flags[-1] = False
    assert not all_true(flags)


def test_which_numbers_are_outside() -> None:
    values = tensor([-0.5, 0.0, 1.0, 1.5, math.nan])
    assert outside_mask(values, 0, 1).tolist() == [True, False, False, True, True]


def test_memory_is_seen_once() -> None:
    whole = torch.arange(6).view(2, 3)
    assert unexpanded(whole) is whole
    assert unexpanded(whole[:, :1].expand(2, 9)).tolist() == [[0], [3]]
    with Ops() as ops:
        assert extremes(whole[:, :1].expand(2, FEW)) == (0, 3)
    assert ops.reduced == [2]


@pytest.mark.parametrize(
    ("dtype", "value", "told"),
    [
        (torch.float64, 1.0000001, 1.0000001),
        (torch.float64, 1 + 2**-52, 1 + 2**-52),
        (torch.float32, 0.1, 0.1),
        (torch.float32, 1.0000001, 1.0000001),
        (torch.float16, 1.001, 1.001),
        (torch.float32, 1e-30, 1e-30),
        (torch.int64, 3, 3),
    ],
)
def test_a_value_is_told_in_as_many_digits_as_it_needs(
    dtype: torch.dtype, value: float, told: float
) -> None:
    given = tensor([value, value], dtype=dtype)
    found = exact_offenders(given, tensor([True, True]))
    assert [item.value for item in found.first] == [told, told]


@pytest.mark.parametrize(
    ("also", "allowed", "text", "count"),
    [
        ((), (), "0 … 9", 2),
        (((-100, "ignore_index"),), (-100,), "0 … 9 or -100 (ignore_index)", 1),
    ],
)
def test_a_value_outside_is_told_with_all_that_is_allowed(
    also: Any, allowed: tuple[int, ...], text: str, count: int
) -> None:
    values = tensor([10, 3, -100])
    given = {"argument": "target", "place": "it", "list_position": 1}
    found = out_of_range(values, low=0, high=9, also=also, **given)
    assert found.headline == "{argument}[1][0] = 10 is outside it"
    assert found.element == "{argument}[1][0] = 10"
    assert found.bounds == Bounds(min=0, max=9, also_allowed=allowed, text=text)
    assert (found.offenders.count, found.offenders.allowed) == (count, len(also))


def broken(value: Any, **bounds: Any) -> Violation:
    first = (Offender(position=(0,), value=value),)
    return Violation(
        headline="", bounds=Bounds(**bounds), offenders=Offenders(count=1, total=1, first=first)
    )


AFTERWARDS = Violation(headline="", bounds=Bounds(min=0, max=4), offenders=Offenders(max=5))
"""Of a deferred finding no place is known."""


@pytest.mark.parametrize(
    ("given", "values", "is_bad"),
    [
        (broken(5, min=0, max=4), [0, 4], False),
        (broken(5, min=0, max=4), [0, 5], True),
        (broken(5, min=0, max=4), [-1, 4], True),
        (broken(5, min=0, max=4, also_allowed=(-100,)), [-100, 4], False),
        (broken(5, min=0, max=4, also_allowed=(-100,)), [-100, 5], True),
        (broken(5, min=0, max=4), [], False),
        (broken(5, min=0), [-1], False),
        (broken(5, max=4), [5], False),
        (AFTERWARDS, [0, 4], False),
        (AFTERWARDS, [0, 5], True),
        (broken("nan", min=0, max=4), [9.0], False),
        (broken("nan", min=0, max=4), [1.0, math.nan], True),
        (broken("nan", min=0, max=4), [9], False),
    ],
)
def test_whether_a_tensor_breaks_the_same_bound(
    given: Violation, values: list[Any], *, is_bad: bool
) -> None:
    assert breaks(given)(tensor(values)) is is_bad
