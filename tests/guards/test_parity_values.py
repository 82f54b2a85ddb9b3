"""Predicates about classes and numbers against a loop, and the CPU kernel where it raises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.cpu_guards import Collector, guarded
from tests.loop_oracle import (
    ARRANGEMENTS,
    FEW,
    agree,
    compared,
    elements,
    labels,
    loop,
    mixed,
    parity,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(scope="module")
def guards() -> Iterator[Collector]:
    with guarded() as collector:
        yield collector


@st.composite
def class_targets(
    draw: Any, *, pixels: bool, ignores: bool = True
) -> tuple[torch.Tensor, torch.Tensor, int]:
    classes = draw(st.integers(1, 12))
    shape = (draw(FEW), draw(FEW), draw(FEW)) if pixels else (draw(st.integers(1, 30)),)
    ignored = draw(st.sampled_from([-100, -100, 255, 0, classes, 2**40]))
    count = math.prod(shape)
    values = draw(labels(classes, *([ignored] if ignores else []), count=count))
    target = draw(ARRANGEMENTS)(torch.tensor(values).reshape(shape))
    return torch.rand(shape[0], classes, *shape[1:]), target, ignored


REDUCTIONS = st.sampled_from(["mean", "sum", "none"])


CLASSES = {
    False: compared("nll_loss_target_in_range"),
    True: compared("nll_loss2d_target_in_range"),
}


@pytest.mark.parametrize("pixels", CLASSES)
def test_class_targets(guards: Collector, pixels: bool) -> None:
    """Targets of cross entropy, flat and of images, for every reduction and ignore_index."""

    @parity
    @given(case=class_targets(pixels=pixels), how=REDUCTIONS)
    def holds(case: Any, how: str) -> None:
        scores, target, ignored = case
        call = lambda: F.nll_loss(scores, target, ignore_index=ignored, reduction=how)
        bad = loop(target, lambda t: t == ignored or 0 <= t < scores.size(1))
        agree(guards.look(call), target, bad)
        error = guards.unguarded(call)
        assert isinstance(error, IndexError) == bool(bad)
        if bad and target.dim() == 1:
            assert any(f"Target {value} is out of bounds" in str(error) for _, value in bad)

    with CLASSES[pixels]:
        holds()


@parity
@given(
    values=st.lists(st.integers(0, 255), min_size=1, max_size=30),
    classes=st.sampled_from([1, 100, 156, 157, 255, 256, 300]),
    ignored=st.sampled_from([-100, 0, 255, 156]),
)
def test_uint8_targets(guards: Collector, values: list[int], classes: int, ignored: int) -> None:
    """uint8 targets are numbers from 0 to 255, whatever ignore_index is."""
    target = torch.tensor(values, dtype=torch.uint8)
    scores = torch.zeros(len(values), classes)
    call = lambda: F.nll_loss(scores, target, ignore_index=ignored)
    bad = loop(target, lambda t: t == ignored or 0 <= t < classes)
    agree(guards.look(call), target, bad)
    assert isinstance(guards.unguarded(call), IndexError) == bool(bad)


@compared("multi_margin_loss_target_in_range")
@parity
@given(case=class_targets(pixels=False, ignores=False))
def test_margin_targets(guards: Collector, case: Any) -> None:
    """Targets of the multi-margin loss; no text where 32 bits of each are a class."""
    scores, target, _ = case
    classes = scores.size(1)
    call = lambda: F.multi_margin_loss(scores, target)
    bad = loop(target, lambda t: 0 <= t < classes)
    found = guards.look(call)
    agree(found, target, bad)
    assert (guards.unguarded(call) is not None) == bool(bad)
    if found:
        cut = [(value + 2**31) % 2**32 - 2**31 for _, value in elements(target)]
        assert (found.device_text is None) == all(0 <= value < classes for value in cut)


@st.composite
def numbers(draw: Any, bounds: tuple[float, float], rank: int = 2) -> torch.Tensor:
    """Tensors of every float dtype, mostly inside the bounds, with what surrounds them."""
    dtype = draw(st.sampled_from(FLOATS))
    shape = [draw(st.integers(1, 5)) for _ in range(rank)]
    low, high = bounds
    ends = torch.tensor([low, high], dtype=dtype)
    step = torch.tensor([-math.inf, math.inf], dtype=dtype)
    beyond = ends.nextafter(step).tolist() if dtype.itemsize > 2 else [low - 0.5, high + 0.5]
    inside = st.floats(low, min(high, 1e3), width=16)
    far = [math.nan, math.inf, -math.inf]
    outside = st.sampled_from([low, high, -0.0, -1e-30, *beyond, *far, *[beyond[0], -math.inf] * 3])
    count = math.prod(shape)
    values = draw(mixed(count, inside, outside))
    return draw(ARRANGEMENTS)(torch.tensor(values, dtype=dtype).reshape(shape))


SIDES = {
    "self": compared("binary_cross_entropy_input_in_unit_interval"),
    "target": compared("binary_cross_entropy_target_in_unit_interval"),
}


@pytest.mark.parametrize("argument", SIDES)
def test_binary_cross_entropy_values(guards: Collector, argument: str) -> None:
    """Input and target of binary cross entropy against the loop and the CPU kernel."""

    @parity
    @given(values=numbers((0, 1)))
    def holds(values: torch.Tensor) -> None:
        pair = {"self": torch.full_like(values, 0.5), "target": torch.full_like(values, 0.5)}
        pair[argument] = values
        call = lambda: F.binary_cross_entropy(pair["self"], pair["target"])
        bad = loop(values, lambda x: 0 <= x <= 1)
        found = guards.look(call)
        agree(found, values, bad)
        assert found is None or found.argument == argument
        error = guards.unguarded(call)
        assert (error is not None) == bool(bad)
        if bad:
            name = "input" if argument == "self" else "target"
            assert f"all elements of {name} should be between 0 and 1" in str(error)

    with SIDES[argument]:
        holds()


DRAWN: list[tuple[compared, Callable[[torch.Tensor], torch.Tensor]]] = [
    (compared("bernoulli_input_in_unit_interval"), torch.bernoulli),
    (
        compared("bernoulli_out_input_in_unit_interval"),
        lambda p: torch.bernoulli(p, out=torch.zeros_like(p)),
    ),
    (compared("bernoulli_p_in_unit_interval"), lambda p: torch.zeros_like(p).bernoulli_(p)),
]


@pytest.mark.parametrize(("guard", "drawn"), DRAWN, ids=[str(item[0]) for item in DRAWN])
def test_bernoulli_probabilities(guards: Collector, guard: compared, drawn: Any) -> None:
    """Probabilities against the loop, and against the CPU kernel, which compares unrounded."""

    @parity
    @given(p=numbers((0, 1)))
    def holds(p: torch.Tensor) -> None:
        bad = loop(p, lambda x: 0 <= x <= 1)
        agree(guards.look(lambda: drawn(p)), p, bad)
        assert (guards.unguarded(lambda: drawn(p)) is not None) == bool(bad)

    with guard:
        holds()


@parity
@given(p=numbers((0, 1)))
def test_bernoulli_rounds_before_it_compares(guards: Collector, p: torch.Tensor) -> None:
    """Drawing float32 compares probabilities of every dtype as float32."""
    wide = p.double()
    bad = loop(wide, lambda x: 0 <= torch.tensor(x, dtype=torch.float32).item() <= 1)
    guards.unguarded(lambda: torch.zeros(p.shape).bernoulli_(wide))
    agree(guards.found[0][1] if guards.found else None, wide, bad)


@compared("poisson_rate_not_negative")
@parity
@given(rates=numbers((0, 100)))
def test_poisson_rates(guards: Collector, rates: torch.Tensor) -> None:
    """Rates against the loop and the CPU kernel; infinite ones are not asserted."""
    bad = loop(rates, lambda x: x >= 0)
    agree(guards.look(lambda: torch.poisson(rates)), rates, bad)
    finite = rates.nan_to_num(nan=math.nan, posinf=1.0)
    call = lambda: torch.poisson(finite)
    assert (guards.unguarded(call) is not None) == bool(bad)


DRAWS = st.sampled_from([(1, False), (1, True), (2, True)])


@compared("multinomial_weights_drawable")
@parity
@given(weights=numbers((0, 2)), how=DRAWS, empty=st.lists(st.integers(0, 4), max_size=1))
def test_multinomial_weights(
    guards: Collector, weights: torch.Tensor, how: tuple[int, bool], empty: list[int]
) -> None:
    """Weights and row sums against loops, and against the CPU kernel for the valid and the rest."""
    for row in empty:
        weights[row % weights.size(0)] = 0
    call = lambda: torch.multinomial(weights, *how)
    found = guards.look(call)
    bad = loop(weights, lambda x: 0 <= x < math.inf)
    if bad:
        agree(found, weights, bad)
    else:
        sums = weights.sum(-1)
        agree(found, sums, loop(sums, lambda x: x > 0))
        assert [sum(row) > 0 for row in weights.tolist()] == (sums > 0).tolist()
    assert (guards.unguarded(call) is not None) == (found is not None)


@compared("multinomial_enough_categories")
@parity
@given(
    rows=st.lists(st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.5]), min_size=4, max_size=4)),
    samples=st.integers(2, 4),
)
def test_multinomial_categories(guards: Collector, rows: list[list[float]], samples: int) -> None:
    """Rows with fewer weights than samples, against a count in Python."""
    drawable = [row for row in rows if any(row)]
    weights = torch.tensor(drawable).reshape(-1, 4)
    counts = torch.tensor([sum(x != 0 for x in row) for row in drawable])
    bad = [((i,), int(n)) for i, n in enumerate(counts.tolist()) if n < samples]
    agree(guards.look(lambda: torch.multinomial(weights, samples)), counts, bad)
