"""Guards of random sampling: which weights, probabilities and rates can be drawn from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import tensor

from tests.cpu_guards import Collector, positions

aten = torch.ops.aten
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


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
