"""Predicates about lengths, sums and rows that end early against a loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
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

aten = torch.ops.aten


@pytest.fixture(scope="module")
def guards() -> Iterator[Collector]:
    with guarded() as collector:
        yield collector


def often(most: int) -> st.SearchStrategy[int]:
    """Draw a length, which is most often the largest."""
    return st.one_of(*[st.just(most)] * 3, st.integers(0, most))


@compared("repeats_fill_output")
@parity
@given(
    repeats=st.integers(0, 8).flatmap(
        lambda count: mixed(count, st.integers(0, 4), st.integers(-3, 0))
    ),
    extra=st.sampled_from([0, 1, -1]),
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


SEGMENTS = {
    True: compared("segment_lengths_not_negative"),
    False: compared("segments_lie_in_data"),
}


@pytest.mark.parametrize("is_asserted", SEGMENTS)
def test_segment_offsets(guards: Collector, is_asserted: bool) -> None:
    """Offsets against a loop over the segments that the kernel walks.

    Segments of several dimensions and of a mean are asserted not to have a length below 0.
    """

    @parity
    @given(data=st.data(), is_flat=st.booleans())
    def holds(data: Any, is_flat: bool) -> None:
        ways = ["mean"] if is_flat and is_asserted else ["sum", "max"]
        reduce = data.draw(st.sampled_from(ways))
        size = data.draw(st.integers(1, 6))
        steps = data.draw(
            st.integers(1, 4).flatmap(lambda n: mixed(n, st.integers(0, 3), st.integers(-2, -1)))
        )
        start = data.draw(st.sampled_from([0, 0, 0, -1, size]))
        ends = [start]
        for step in steps:
            ends.append(ends[-1] + step)
        values = torch.rand(size) if is_flat or not is_asserted else torch.rand(size, 2)
        offsets = torch.tensor(ends)
        falling = [((i + 1,), ends[i + 1]) for i, step in enumerate(steps) if step < 0]
        reads = {i for i, step in enumerate(steps) if step > 0 and ends[i] < 0}
        reads |= {i + 1 for i, step in enumerate(steps) if step > 0 and ends[i + 1] > size}
        beyond = [((i,), ends[i]) for i in sorted(reads)]
        found = guards.look(lambda: torch.segment_reduce(values, reduce, offsets=offsets))
        agree(found, offsets, falling or beyond)
        assert found is None or found.is_silent != (bool(falling) and is_asserted)

    with SEGMENTS[is_asserted]:
        holds()


@compared("ctc_loss_labels_in_alphabet")
@parity
@given(data=st.data(), steps=st.integers(1, 4))
def test_ctc_labels(guards: Collector, data: Any, steps: int) -> None:
    """Labels of padded targets against a loop over the samples and their lengths."""
    classes, samples, width = data.draw(st.integers(1, 5)), data.draw(FEW), data.draw(FEW)
    count = samples * width
    drawn = data.draw(labels(classes, count=count))
    targets = torch.tensor(drawn).reshape(samples, width)
    lengths = data.draw(st.lists(often(width), min_size=samples, max_size=samples))
    read = data.draw(st.lists(often(steps), min_size=samples, max_size=samples))
    bad = [
        (place, value)
        for place, value in elements(targets)
        if read[place[0]] and place[1] < lengths[place[0]] and not 0 <= value < classes
    ]
    scores = torch.zeros(steps, samples, classes)
    # On to the kernel only where nothing is wrong: the CPU one reads out of bounds as well.
    agree(guards.look(lambda: aten._ctc_loss(scores, targets, read, lengths)), targets, bad)


@compared("multilabel_margin_loss_target_in_range")
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
