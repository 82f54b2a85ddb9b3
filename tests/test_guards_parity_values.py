"""Each predicate against a loop over the elements, and against the CPU kernel where it raises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cudalens.facts import Violation
from tests.cpu_guards import Collector, guarded, strided, transposed

aten = torch.ops.aten
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Position = tuple[int, ...]
parity = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module")
def guards() -> Iterator[Collector]:
    with guarded() as collector:
        yield collector


def elements(tensor: torch.Tensor) -> Iterator[tuple[Position, Any]]:
    """Give every element with its position, in row-major order, one by one."""

    def walk(value: Any, position: Position) -> Iterator[tuple[Position, Any]]:
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield from walk(item, (*position, index))
        else:
            yield position, value

    yield from walk(tensor.tolist(), ())


def loop(tensor: torch.Tensor, is_good: Callable[[Any], bool]) -> list[tuple[Position, Any]]:
    """Give the bad elements as a plain loop finds them."""
    return [(position, value) for position, value in elements(tensor) if not is_good(value)]


def same_number(shown: Any, value: Any, dtype: torch.dtype) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return isinstance(shown, str) and shown == str(value)
    return bool(torch.tensor(shown, dtype=dtype).item() == value)


def agree(found: Violation | None, tensor: torch.Tensor, bad: list[tuple[Position, Any]]) -> None:
    """Assert that a finding lists exactly the elements that the loop found, or that none did."""
    assert (found is not None) == bool(bad)
    if found is None:
        return
    assert found.offenders.count == len(bad)
    assert found.offenders.total == tensor.numel()
    assert [item.position for item in found.offenders.first] == [place for place, _ in bad[:20]]
    for item, (_, value) in zip(found.offenders.first, bad, strict=False):
        assert same_number(item.value, value, tensor.dtype)


ARRANGEMENTS = st.sampled_from([lambda x: x, transposed, strided])
FEW = st.integers(1, 4)


def labels(classes: int, *others: int) -> st.SearchStrategy[int]:
    """Mostly classes, at times one beyond, and numbers of 32 bits and more."""
    wild = (classes, classes + 1, -1, -100, 255, 2**31, 2**32 + 1, -(2**33), *others)
    return st.one_of(*[st.integers(0, max(classes - 1, 0))] * 6, st.sampled_from(wild))


@st.composite
def class_targets(draw: Any, *, pixels: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    classes = draw(st.integers(1, 12))
    shape = (draw(FEW), draw(FEW), draw(FEW)) if pixels else (draw(st.integers(1, 30)),)
    ignored = draw(st.sampled_from([-100, -100, 255, 0, classes, 2**40]))
    count = math.prod(shape)
    values = draw(st.lists(labels(classes, ignored, ignored), min_size=count, max_size=count))
    target = draw(ARRANGEMENTS)(torch.tensor(values).reshape(shape))
    return torch.rand(shape[0], classes, *shape[1:]), target, ignored


REDUCTIONS = st.sampled_from(["mean", "sum", "none"])


@parity
@given(case=st.one_of(class_targets(pixels=False), class_targets(pixels=True)), how=REDUCTIONS)
def test_class_targets(guards: Collector, case: Any, how: str) -> None:
    """Targets of cross entropy, flat and of images, for every reduction and ignore_index."""
    scores, target, ignored = case
    call = lambda: F.nll_loss(scores, target, ignore_index=ignored, reduction=how)
    bad = loop(target, lambda t: t == ignored or 0 <= t < scores.size(1))
    agree(guards.look(call), target, bad)
    error = guards.unguarded(call)
    assert isinstance(error, IndexError) == bool(bad)
    if bad and target.dim() == 1:
        assert any(f"Target {value} is out of bounds" in str(error) for _, value in bad)


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


@parity
@given(case=class_targets(pixels=False))
def test_margin_targets(guards: Collector, case: Any) -> None:
    """Targets of the multi-margin loss; silent exactly where 32 bits of each are a class."""
    scores, target, _ = case
    classes = scores.size(1)
    call = lambda: F.multi_margin_loss(scores, target)
    bad = loop(target, lambda t: 0 <= t < classes)
    found = guards.look(call)
    agree(found, target, bad)
    assert (guards.unguarded(call) is not None) == bool(bad)
    if found:
        cut = [(value + 2**31) % 2**32 - 2**31 for _, value in elements(target)]
        assert found.is_silent == all(0 <= value < classes for value in cut)


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
    outside = st.sampled_from([low, high, -0.0, *beyond, math.nan, math.inf, -math.inf, -1e-30])
    count = math.prod(shape)
    values = draw(st.lists(st.one_of(*[inside] * 8, outside), min_size=count, max_size=count))
    return draw(ARRANGEMENTS)(torch.tensor(values, dtype=dtype).reshape(shape))


@parity
@given(values=numbers((0, 1)), argument=st.sampled_from(["self", "target"]))
def test_binary_cross_entropy_values(
    guards: Collector, values: torch.Tensor, argument: str
) -> None:
    """Input and target of binary cross entropy against the loop and the CPU kernel."""
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


@parity
@given(p=numbers((0, 1)), how=st.sampled_from(["bernoulli", "bernoulli_"]))
def test_bernoulli_probabilities(guards: Collector, p: torch.Tensor, how: str) -> None:
    """Probabilities against the loop, and against the CPU kernel, which compares unrounded."""
    call = (
        (lambda: torch.bernoulli(p))
        if how == "bernoulli"
        else (lambda: torch.zeros_like(p).bernoulli_(p))
    )
    bad = loop(p, lambda x: 0 <= x <= 1)
    agree(guards.look(call), p, bad)
    assert (guards.unguarded(call) is not None) == bool(bad)


@parity
@given(p=numbers((0, 1)))
def test_bernoulli_rounds_before_it_compares(guards: Collector, p: torch.Tensor) -> None:
    """Drawing float32 compares probabilities of every dtype as float32."""
    wide = p.double()
    bad = loop(wide, lambda x: 0 <= torch.tensor(x, dtype=torch.float32).item() <= 1)
    guards.unguarded(lambda: torch.zeros(p.shape).bernoulli_(wide))
    agree(guards.found[0][1] if guards.found else None, wide, bad)


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


@parity
@given(
    repeats=st.lists(st.one_of(*[st.integers(0, 4)] * 9, st.integers(-3, -1)), max_size=8),
    extra=st.sampled_from([0, 0, 0, 1, -1]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    arrange=ARRANGEMENTS,
)
def test_repeats(
    guards: Collector, repeats: list[int], extra: int, dtype: torch.dtype, arrange: Any
) -> None:
    """Repeats with a promised size against the loop and the CPU kernel."""
    counts = arrange(torch.tensor(repeats, dtype=dtype))
    size = max(sum(repeats) + extra, 0)
    call = lambda: torch.repeat_interleave(counts, output_size=size)
    found = guards.look(call)
    bad = loop(counts, lambda n: n >= 0)
    if bad:
        agree(found, counts, bad)
    else:
        assert (found is not None) == (bool(repeats) and sum(repeats) != size)
    # A negative repeat is not for the CPU kernel: it writes beyond the result before it looks.
    if not bad:
        assert (guards.unguarded(call) is not None) == (found is not None)


@parity
@given(data=st.data(), reduce=st.sampled_from(["sum", "mean", "max"]), is_flat=st.booleans())
def test_segment_offsets(guards: Collector, data: Any, reduce: str, is_flat: bool) -> None:
    """Offsets against a loop over the segments that the kernel walks."""
    size = data.draw(st.integers(1, 6))
    steps = data.draw(
        st.lists(st.one_of(*[st.integers(0, 3)] * 8, st.just(-1)), min_size=1, max_size=4)
    )
    start = data.draw(st.sampled_from([0, 0, 0, -1, size]))
    ends = [start]
    for step in steps:
        ends.append(ends[-1] + step)
    values = torch.rand(size) if is_flat else torch.rand(size, 2)
    offsets = torch.tensor(ends)
    falling = [((i + 1,), ends[i + 1]) for i, step in enumerate(steps) if step < 0]
    reads = {i for i, step in enumerate(steps) if step > 0 and ends[i] < 0}
    reads |= {i + 1 for i, step in enumerate(steps) if step > 0 and ends[i + 1] > size}
    outside = [((i,), ends[i]) for i in sorted(reads)]
    found = guards.look(lambda: torch.segment_reduce(values, reduce, offsets=offsets))
    agree(found, offsets, falling or outside)
    if found:
        is_asserted = bool(falling) and not (is_flat and reduce != "mean")
        assert found.is_silent == (not is_asserted)


@parity
@given(data=st.data(), steps=st.integers(1, 4))
def test_ctc_labels(guards: Collector, data: Any, steps: int) -> None:
    """Labels of padded targets against a loop over the samples and their lengths."""
    classes, samples, width = data.draw(st.integers(1, 5)), data.draw(FEW), data.draw(FEW)
    count = samples * width
    drawn = data.draw(st.lists(labels(classes), min_size=count, max_size=count))
    targets = torch.tensor(drawn).reshape(samples, width)
    lengths = data.draw(st.lists(st.integers(0, width), min_size=samples, max_size=samples))
    read = data.draw(st.lists(st.integers(0, steps), min_size=samples, max_size=samples))
    bad = [
        (place, value)
        for place, value in elements(targets)
        if read[place[0]] and place[1] < lengths[place[0]] and not 0 <= value < classes
    ]
    scores = torch.zeros(steps, samples, classes)
    # On to the kernel only where nothing is wrong: the CPU one reads out of bounds as well.
    agree(guards.look(lambda: aten._ctc_loss(scores, targets, read, lengths)), targets, bad)


@parity
@given(rows=st.lists(st.lists(st.integers(-2, 6), min_size=4, max_size=4), max_size=4))
def test_multilabel_targets(guards: Collector, rows: list[list[int]]) -> None:
    """Labels against a loop that stops at the first negative one of a row, as the kernel does."""
    target = torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)
    bad = []
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if value < 0:
                break
            if value >= 4:
                bad.append(((i, j), value))
    guards.unguarded(
        lambda: aten.multilabel_margin_loss_forward(torch.zeros(len(rows), 4), target, 1)
    )
    agree(guards.found[0][1] if guards.found else None, target, bad)
