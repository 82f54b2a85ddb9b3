"""Guards of random sampling: which weights, probabilities and rates can be drawn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import multinomial, ones, tensor, zeros

from cudalens.core.call import THREAD
from cudalens.guards.catalogue.sampling import _probabilities
from tests.cpu_guards import Collector, assert_said, said_id
from tests.verdicts import ask

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
    says = f"{{argument}}[1] sums to inf, more than {str(dtype)[6:]} can"
    assert found is None or found.headline.startswith(says)


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


DRAW = aten.multinomial.default


@pytest.mark.parametrize(
    ("weights", "how", "is_judged"),
    [
        (zeros(3), (1, False), True),
        (zeros(2, 3), (3, False), True),
        (zeros(2, 3), (4, False), False),
        (zeros(2, 3), (4, True), True),
        (zeros(2, 3), (0, True), False),
        (zeros(2, 2, 3), (1, False), False),
        (zeros(()), (1, False), False),
        (zeros(3).long(), (1, False), False),
        (zeros(0, 3), (1, False), False),
    ],
)
def test_only_what_torch_draws_from_is_judged(
    weights: torch.Tensor, how: tuple[int, bool], *, is_judged: bool
) -> None:
    assert bool(ask(DRAW, weights, *how)) is is_judged


@pytest.mark.parametrize(
    ("weights", "how", "says"),
    [
        ([1.0, 0.0, 2.0], (2, False), None),
        ([1.0, 0.0, 2.0], (3, False), "{argument} has 2 weights above 0, and 3 samples are drawn"),
        ([1.0, 0.0, 2.0], (3, True), None),
        ([0.0, 1.0, 0.0], (2, False), "{argument} has 1 weight above 0, and 2 samples are drawn"),
        ([0.0, 1.0, 0.0], (1, False), None),
        ([[1.0, 2.0], [0.0, 1.0]], (2, False), "{argument}[1] has 1 weight above 0, and 2"),
    ],
)
def test_samples_without_replacement_are_no_more_than_the_weights(
    weights: list[Any], how: tuple[int, bool], says: str | None
) -> None:
    found = dict(ask(DRAW, tensor(weights), *how)).get("multinomial_enough_categories")
    assert (found is None) is (says is None)
    if found is not None and says is not None:
        assert found.headline.startswith(says)
        assert (found.is_silent, found.bounds.min) == (True, how[0])


@pytest.mark.parametrize(
    ("weights", "how", "kept"),
    [
        (tensor([0.5, 2.0]), (1, False), (0.5, 2.0)),
        (tensor([[1.0, 3.0], [0.5, 2.0]]), (1, False), (0.5, 3.0)),
        (torch.arange(1.0, 601.0).view(2, 300), (1, False), (1.0, 600.0)),
        (tensor([0.5, -2.0]), (1, False), None),
        (-torch.arange(1.0, 601.0), (1, False), None),
        (tensor([0.5, 2.0]), (2, True), None),
    ],
    ids=["a row", "rows", "many", "bad", "many bad", "by their sum"],
)
def test_an_open_recorder_keeps_the_extremes_of_good_weights(
    weights: torch.Tensor, how: tuple[int, bool], kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the recorders that are open."""
    lists: tuple[list[Any], ...] = ([], [])
    monkeypatch.setattr(THREAD.running, "extremes", lists)
    ask(DRAW, weights, *how)
    assert lists == (([], []) if kept is None else ([("self", *kept)],) * 2)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("weights", "how", "says"),
    [
        ([1.0, -0.5], (2, True), {"line": "MultinomialKernel.cu:60"}),
        ([1.0, INF], (2, True), {"line": "MultinomialKernel.cu:112"}),
        ([INF, -0.5], (2, True), {"line": "MultinomialKernel.cu:60"}),
        ([0.0, 0.0], (2, True), {"line": "MultinomialKernel.cu:112"}),
        ([1.0, -0.5], (1, True), {"prints": "`probability tensor contains either"}),
        ([0.0, 0.0], (1, True), {"prints": "`invalid multinomial distribution"}),
        ([NAN, -0.5], (1, True), {"why": "finite and at least 0; this one is NaN."}),
        ([-0.5, NAN], (1, True), {"why": "finite and at least 0."}),
    ],
)
def test_the_kernel_that_draws_asserts(
    weights: list[float], how: tuple[int, bool], says: dict[str, Any]
) -> None:
    found = dict(ask(DRAW, tensor(weights), *how))
    assert_said(found["multinomial_weights_drawable"], says)
