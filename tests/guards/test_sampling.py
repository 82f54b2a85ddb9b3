"""Guards of random sampling: which weights, probabilities and rates can be drawn from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import inf, nan, tensor

from tests.cpu_guards import Collector, positions

aten = torch.ops.aten
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("value", "headline"),
    [
        (nan, "{argument}[1, 2] = nan is not a number"),
        (inf, "{argument}[1, 2] = inf is infinite"),
        (-inf, "{argument}[1, 2] = -inf is negative"),
        (-0.5, "{argument}[1, 2] = -0.5 is negative"),
        (0.0, None),
        (-0.0, None),
    ],
)
@pytest.mark.parametrize("options", [(1, False), (2, False), (1, True), (2, True)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_multinomial_weight(
    guards: Collector,
    dtype: torch.dtype,
    options: tuple[int, bool],
    value: float,
    headline: str | None,
) -> None:
    """A weight must be a finite number of at least 0, however samples are drawn."""
    weights = torch.ones(2, 4, dtype=dtype)
    weights[1, 2] = value
    found = guards.look(lambda: torch.multinomial(weights, *options))
    assert (found.headline if found else None) == headline
    if found:
        assert (found.offenders.count, found.offenders.total) == (1, 8)
        assert not found.is_index and found.device_text is not None
        assert ("MultinomialKernel" in found.device_text) == (options == (2, True))


@pytest.mark.parametrize("options", [(1, False), (1, True), (2, True)])
def test_multinomial_row_without_weight(guards: Collector, options: tuple[int, bool]) -> None:
    """A row of zeros is named by its row; a row with one weight is enough."""
    weights = tensor([[0.0, 1e-30, 0.0], [0.0, 0.0, 0.0], [-0.0, 0.0, 0.0]])
    found = guards.look(lambda: torch.multinomial(weights, *options))
    assert found is not None
    assert found.headline == "{argument}[1] sums to 0: nothing can be drawn from it"
    assert positions(found) == [(1,), (2,)]
    assert (found.offenders.count, found.offenders.total) == (2, 3)
    assert guards.look(lambda: torch.multinomial(weights[:1], *options)) is None


def test_multinomial_vector_without_weight(guards: Collector) -> None:
    """One row alone has no row number."""
    found = guards.look(lambda: torch.multinomial(torch.zeros(3), 1))
    assert found is not None
    assert found.headline == "{argument} sums to 0: nothing can be drawn from it"
    assert positions(found) == [()]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", [(1, True), (2, True), (1, False)])
def test_multinomial_sum_beyond_dtype(
    guards: Collector, dtype: torch.dtype, options: tuple[int, bool]
) -> None:
    """Only drawing several with replacement divides by the sum, which must fit the dtype."""
    half = torch.finfo(dtype).max / 2
    fits = torch.tensor([[1.0, 1.0], [half, half / 2]], dtype=dtype)
    assert guards.look(lambda: torch.multinomial(fits, *options)) is None
    beyond = torch.tensor([[1.0, 1.0], [1.5 * half, 1.5 * half]], dtype=dtype)
    found = guards.look(lambda: torch.multinomial(beyond, *options))
    if options != (2, True):
        assert found is None
        return
    assert found is not None and positions(found) == [(1,)]
    assert found.headline.startswith("{argument}[1] sums to inf, more than ")


def test_overflow_is_not_listed_where_it_does_no_harm(guards: Collector) -> None:
    """With one sample a row of zeros is found alone, although the sum of another overflows."""
    weights = tensor([[0.0, 0.0], [6e4, 6e4]], dtype=torch.float16)
    found = guards.look(lambda: torch.multinomial(weights, 1))
    assert found is not None and positions(found) == [(0,)]
    found = guards.look(lambda: torch.multinomial(weights, 2, True))
    assert found is not None and positions(found) == [(0,), (1,)]


def test_multinomial_many_rows(guards: Collector) -> None:
    """Above the number of rows whose flags are copied one by one the answer is the same."""
    weights = torch.ones(1500, 2)
    assert guards.look(lambda: torch.multinomial(weights, 1)) is None
    weights[1499] = 0
    found = guards.look(lambda: torch.multinomial(weights, 1))
    assert found is not None and positions(found) == [(1499,)]


@pytest.mark.parametrize(("samples", "bad"), [(1, []), (2, []), (3, [(1,)]), (4, [(0,), (1,)])])
def test_multinomial_runs_out_of_categories(
    guards: Collector, samples: int, bad: list[Any]
) -> None:
    """Drawing more than there are weights is a silent finding, by row."""
    weights = tensor([[1.0, 2.0, 3.0, 0.0], [0.0, 2.0, 0.0, 1.0]])
    found = guards.look(lambda: torch.multinomial(weights, samples))
    assert (positions(found) if found else []) == bad
    if found:
        assert found.is_silent and found.device_text is None
        assert found.offenders.first[-1].value == 2
        assert found.bounds.min == samples
    assert guards.look(lambda: torch.multinomial(weights, samples, True)) is None


@pytest.mark.parametrize(
    ("value", "headline"),
    [
        (1.5, "{argument}[1] = 1.5 is outside the interval 0 … 1"),
        (-0.5, "{argument}[1] = -0.5 is outside the interval 0 … 1"),
        (nan, "{argument}[1] = nan is not a number"),
        (1.0, None),
        (-0.0, None),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_bernoulli_overloads(
    guards: Collector, dtype: torch.dtype, value: float, headline: str | None
) -> None:
    """Every overload that takes a tensor of probabilities checks it, under its own name."""
    p = tensor([0.5, value], dtype=dtype)
    drawn = torch.zeros(3, 2, dtype=dtype)
    calls = {
        "aten::bernoulli": ("self", lambda: torch.bernoulli(p)),
        "aten::bernoulli.out": ("self", lambda: torch.bernoulli(p, out=drawn[0])),
        "aten::bernoulli_.Tensor": ("p", lambda: drawn.bernoulli_(p)),
        "aten::bernoulli.Tensor": ("p", lambda: aten.bernoulli.Tensor(drawn, p)),
        "aten::bernoulli.Tensor_out": (
            "p",
            lambda: aten.bernoulli.Tensor_out(drawn, p, out=torch.zeros_like(drawn)),
        ),
    }
    for op, (argument, call) in calls.items():
        found = guards.look(call)
        assert (found.headline if found else None) == headline
        if found:
            assert (guards.found[0][0], found.argument) == (op, argument)
            assert positions(found) == [(1,)]


def test_bernoulli_compares_as_the_kernel_does(guards: Collector) -> None:
    """float64 probabilities are rounded first unless float64 is drawn."""
    p = tensor([1 + 1e-12, 0.5], dtype=torch.float64)
    single, double = torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    guards.unguarded(lambda: single.bernoulli_(p))  # the CPU compares without rounding
    assert guards.found == []
    found = guards.look(lambda: double.bernoulli_(p))
    assert found is not None and found.offenders.first[0].value == 1 + 1e-12
    found = guards.look(lambda: torch.bernoulli(p, out=double))
    assert found is not None
    guards.unguarded(lambda: torch.bernoulli(p, out=single))
    assert guards.found == []


def test_bernoulli_takes_no_whole_numbers(guards: Collector) -> None:
    """Torch refuses integer probabilities on the host, so that 2 is its matter; 2.0 is ours."""
    for dtype in (torch.int64, torch.bool):
        p = torch.full((2,), 2).to(dtype)
        assert guards.unguarded(lambda p=p: torch.zeros(2).bernoulli_(p)) is not None
        assert guards.found == []
    assert guards.look(lambda: torch.zeros(2).bernoulli_(tensor([0.0, 2.0]))) is not None


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.bernoulli(tensor([2.0])),
        lambda: torch.bernoulli(tensor([2.0]), out=torch.zeros(1)),
        lambda: aten.bernoulli.Tensor_out(torch.zeros(1), tensor([2.0]), out=torch.zeros(1)),
        lambda: aten.poisson.out(tensor([-1.0]), out=torch.zeros(1)),
        lambda: torch.multinomial(torch.zeros(2), 1),
    ],
)
def test_one_bad_value_is_one_finding(guards: Collector, call: Any) -> None:
    """The ops that a checked op calls in turn do not report the same value again."""
    guards.unguarded(call)
    assert len(guards.found) == 1


def test_bernoulli_of_nothing(guards: Collector) -> None:
    """Nothing drawn, nothing checked."""
    assert guards.look(lambda: torch.zeros(0, 1).bernoulli_(tensor([2.0]))) is None


@pytest.mark.parametrize(
    ("value", "headline"),
    [
        (-1.0, "{argument}[0, 1] = -1.0 is negative"),
        (nan, "{argument}[0, 1] = nan is not a number"),
        (0.0, None),
        (-0.0, None),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_poisson_rates(
    guards: Collector, dtype: torch.dtype, value: float, headline: str | None
) -> None:
    """A rate must be a number of at least 0, with and without out=."""
    rates = tensor([[1.0, value]], dtype=dtype)
    found = guards.look(lambda: torch.poisson(rates))
    assert (found.headline if found else None) == headline
    found = guards.look(lambda: aten.poisson.out(rates, out=torch.zeros_like(rates)))
    assert (found.headline if found else None) == headline
