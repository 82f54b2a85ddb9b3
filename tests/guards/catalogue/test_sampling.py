"""Guards of random sampling: which weights, probabilities and rates can be drawn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import multinomial, ones, tensor, zeros

from cudalens.guards.catalogue.sampling import _probabilities
from tests.cpu_guards import Collector, assert_said, said_id

aten = torch.ops.aten
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ROWS = tensor([[0.0, 1e-30, 0.0], [0.0, 0.0, 0.0], [-0.0, 0.0, 0.0]])
HUGE = tensor([[0.0, 0.0], [6e4, 6e4]], dtype=torch.float16)
"""The sum of the second row overflows."""
JUST_ABOVE = tensor([1 + 1e-12], dtype=torch.float64)
MANY = ones(1500, 2)
"""More rows than those whose flags are copied one by one."""
NOTHING = "sums to 0: nothing can be drawn from it"
SAID: list[tuple[Callable[[], Any], dict[str, Any] | None]] = [
    # A row of zeros is named by its row; a row with one weight is enough.
    *(
        (
            lambda how=how: multinomial(ROWS, *how),
            {
                "headline": f"{{argument}}[1] {NOTHING}",
                **{"at": [(1,), (2,)], "offenders.count": 2, "offenders.total": 3},
            },
        )
        for how in ((1, False), (1, True), (2, True))
    ),
    *(
        (lambda how=how: multinomial(ROWS[:1], *how), None)
        for how in ((1, False), (1, True), (2, True))
    ),
    # One row alone has no row number.
    (lambda: multinomial(zeros(3), 1), {"headline": f"{{argument}} {NOTHING}", "at": [()]}),
    # With one sample a row of zeros is found alone, although the sum of another overflows.
    (lambda: multinomial(HUGE, 1), {"at": [(0,)]}),
    (lambda: multinomial(HUGE, 2, True), {"at": [(0,), (1,)]}),
    (lambda: multinomial(MANY, 1), None),
    (lambda: multinomial(torch.cat((MANY, zeros(1, 2))), 1), {"at": [(1500,)]}),
    # The kernel converts the probabilities to float64 only where it draws such numbers.
    (lambda: zeros(1, dtype=torch.float64).bernoulli_(JUST_ABOVE), {"at": [(0,)]}),
    # Nothing drawn, nothing checked.
    (lambda: zeros(0, 1).bernoulli_(tensor([2.0])), None),
    (lambda: zeros(2, 2).bernoulli_(tensor([0.5, 2.0])), {"at": [(1,)]}),
]


@pytest.mark.parametrize(("call", "said"), SAID, ids=said_id)
def test_what_is_said(guards: Collector, call: Any, said: dict[str, Any] | None) -> None:
    assert_said(guards.look(call), said)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", [(1, True), (2, True), (1, False)])
def test_multinomial_sum_beyond_dtype(
    guards: Collector, dtype: torch.dtype, options: tuple[int, bool]
) -> None:
    """Only drawing several with replacement divides by the sum, which must fit the dtype."""
    half = torch.finfo(dtype).max / 2
    fits = tensor([[1.0, 1.0], [half, half / 2]], dtype=dtype)
    assert guards.look(lambda: multinomial(fits, *options)) is None
    beyond = tensor([[1.0, 1.0], [1.5 * half, 1.5 * half]], dtype=dtype)
    found = guards.look(lambda: multinomial(beyond, *options))
    assert_said(found, {"at": [(1,)]} if options == (2, True) else None)
    assert found is None or found.headline.startswith("{argument}[1] sums to inf, more than ")


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.bernoulli(tensor([2.0])),
        lambda: torch.bernoulli(tensor([2.0]), out=zeros(1)),
        lambda: aten.bernoulli.Tensor_out(zeros(1), tensor([2.0]), out=zeros(1)),
        lambda: aten.poisson.out(tensor([-1.0]), out=zeros(1)),
        lambda: multinomial(zeros(2), 1),
    ],
)
def test_one_bad_value_is_one_finding(guards: Collector, call: Any) -> None:
    """The ops that a checked op calls in turn do not report the same value again."""
    guards.unguarded(call)
    assert len(guards.found) == 1


@pytest.mark.parametrize(
    ("p", "shape", "drawn", "read_as"),
    [
        (zeros(2), (3, 2), torch.float32, torch.float32),
        (zeros(2, dtype=torch.float64), (2,), torch.float32, torch.float32),
        (zeros(2), (2,), torch.float64, torch.float64),
        (zeros(2), (2,), torch.int64, torch.float32),
        # Torch refuses the first four; of the others nothing is drawn.
        (zeros(2).long(), (2,), torch.float32, None),
        (zeros(2), (2,), torch.complex64, None),
        (zeros(2), (3,), torch.float32, None),
        (zeros(3, 2), (2,), torch.float32, None),
        (zeros(1), (0,), torch.float32, None),
        (zeros(2), (0, 2), torch.float32, None),
    ],
)
def test_which_probabilities_bernoulli_draws_with(
    p: torch.Tensor, shape: tuple[int, ...], drawn: torch.dtype, read_as: torch.dtype | None
) -> None:
    need: Any = _probabilities(p, torch.Size(shape), drawn, argument="p")
    assert (None if need is None else need.dtype) == read_as
