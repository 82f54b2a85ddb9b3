"""Marks of tensors that are not finite: whose they are, and when they are no longer true."""

from __future__ import annotations

import gc
import math
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from cudalens.recorder import nonfinite_marks
from cudalens.recorder.nonfinite_marks import (
    Arrival,
    Maker,
    NonFiniteTensors,
    Step,
    are_finite,
)

STEP = Step("torch.log", None)
MADE = Maker("made", STEP, has_nan=True)
ENTERED = Maker("entered", STEP, has_nan=True)


def marks(whole: Tensor | None = None) -> NonFiniteTensors:
    """Return marks whose recorder knows one tensor that every tensor is a view of."""
    snapshot = SimpleNamespace(whole=lambda tensor: tensor if whole is None else ref(whole))
    return NonFiniteTensors(lambda: SimpleNamespace(snapshot=lambda: snapshot))


def nan(*shape: int) -> Tensor:
    return torch.full(shape, math.nan)


def test_a_mark_is_that_of_one_version() -> None:
    known, x = marks(), nan(2)
    assert not known
    mark = known.mark(x, MADE, has_nan=True, way=(STEP,))
    assert known.of(x) is mark
    assert (mark.maker, mark.has_nan, mark.way, mark.is_of_view) == (MADE, True, (STEP,), False)
    assert known
    x.zero_()
    assert known.of(x) is None
    assert known.of(torch.zeros(1)) is None


def test_a_tensor_of_inference_mode_has_no_version() -> None:
    known = marks()
    with torch.inference_mode():
        x = nan(2)
        mark = known.mark(x, MADE, has_nan=True)
        assert mark.version is None
        assert known.of(x) is mark
        known.keep_finite(x)
        assert not known.was_finite(x)  # it has no version that says it is what it was


def test_a_view_has_the_mark_of_its_base_until_that_is_written_to() -> None:
    known, x = marks(), nan(4)
    known.mark(x, MADE, has_nan=True, way=(STEP,))
    mark = known.of(x[1:])
    assert mark is not None
    assert (mark.maker, mark.way, mark.has_nan, mark.is_of_view) == (MADE, (STEP,), True, True)
    x[0] = 1
    assert known.of(x[1:]) is None


def test_was_finite_reads_only_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known, x, reads = marks(), torch.ones(2), []

    def read(tensors: Any) -> bool:
        reads.append(tensors)
        return are_finite(tensors)

    monkeypatch.setattr(nonfinite_marks, "are_finite", read)
    assert known.was_finite(x)
    assert len(reads) == 1
    known.keep_finite(x)
    assert known.was_finite(x)
    assert len(reads) == 1
    x.add_(1)
    assert known.was_finite(x)
    assert len(reads) == 2
    known.last = ref(x)
    assert known.was_finite(x)
    assert len(reads) == 2
    y = nan(1)
    assert not known.was_finite(y)
    known.mark(y, MADE, has_nan=True)
    assert not known.was_finite(y)
    assert len(reads) == 3
    good = torch.ones(1)
    known.mark(good, MADE, has_nan=True, is_of_view=True)
    assert known.was_finite(good)  # a view of a bad tensor need not show the bad values
    assert len(reads) == 4


def test_finite_tensors_lose_their_marks() -> None:
    known, x, y = marks(), nan(1), nan(1)
    for item in (x, y):
        known.mark(item, MADE, has_nan=True)
    known.forget(x)
    known.keep_finite(y)
    assert known.of(x) is known.of(y) is None
    known.forget(x)
    known.mark(y, MADE, has_nan=True)
    assert not known.was_finite(y)
    known.last = ref(y)
    known.keep_finite(good := torch.ones(1))
    known.let_go()
    assert (known.of(y), known.last, bool(known)) == (None, None, False)
    assert not known._finite and good is not None


def test_views_of_a_marked_tensor_are_marked() -> None:
    known, x = marks(), nan(4)
    known.mark(x, MADE, has_nan=True, way=(STEP,))
    shown, same = torch.zeros(1), x
    known.mark_view((x,), [shown, same])
    mark = known.bad[id(ref(shown))]
    assert (mark.is_of_view, mark.way, mark.has_nan) == (True, (STEP,), True)
    assert not known.bad[id(ref(x))].is_of_view
    before = len(known.bad)
    for args in ((), (3,), (torch.zeros(1),)):
        known.mark_view(args, torch.zeros(1))
    assert len(known.bad) == before


def test_what_was_written_to_a_view_is_in_the_whole() -> None:
    known, x = marks(), nan(4)
    view = x[1:]
    known.mark_whole(view)
    assert not known
    known.mark(view, MADE, has_nan=False, way=(STEP,))
    known.mark_whole(view)
    mark = known.bad[id(ref(x))]
    assert (mark.maker, mark.way, mark.has_nan, mark.is_of_view) == (MADE, (STEP,), False, False)


def test_of_a_view_that_nobody_read_the_whole_is_not_marked() -> None:
    known, x = marks(), nan(4)
    view = x[1:]
    known.mark(view, MADE, has_nan=True, is_of_view=True)
    known.mark_whole(view)
    assert id(ref(x)) not in known.bad


@pytest.mark.parametrize(("maker", "marked"), [(MADE, True), (ENTERED, False)])
def test_the_recorder_knows_what_data_is_part_of(maker: Maker, marked: bool) -> None:
    whole, data = torch.zeros(2), nan(2)
    known = marks(whole)
    known.mark(data, maker, has_nan=True)
    known.mark_whole(data)
    assert (id(ref(whole)) in known.bad) is marked


def test_the_way_ends_after_16_calls() -> None:
    known, tensors = marks(), [nan(1) for _ in range(19)]
    known.mark(tensors[0], MADE, has_nan=True)
    steps = [Step(f"call {number}", None) for number in range(18)]
    for old, new, step in zip(tensors, tensors[1:], steps, strict=False):
        source = known.of(old)
        assert source is not None
        known.pass_on(new, source, step, has_nan=False)
    last = known.of(tensors[-1])
    assert last is not None
    assert (last.way, last.maker, last.has_nan) == (tuple(steps[:16]), MADE, False)


def test_the_oldest_marks_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite_marks, "_MAX_MARKS", 2)
    known, tensors = marks(), [nan(1) for _ in range(3)]
    for item in tensors:
        known.mark(item, MADE, has_nan=True)
    assert [known.of(item) is not None for item in tensors] == [False, True, True]
    for item in tensors:
        known.keep_finite(item)
    assert not known.bad
    assert len(known._finite) == 2


def test_no_tensor_is_kept_alive() -> None:
    known, x, y = marks(), nan(1), torch.ones(1)
    seen = [ref(x), ref(y)]
    known.mark(x, MADE, has_nan=True)
    known.keep_finite(y)
    del x, y
    gc.collect()
    assert [item() for item in seen] == [None, None]


def test_an_arrival_has_what_the_mark_knows() -> None:
    x, at = nan(1), Step("loss.backward", None)
    mark = marks().mark(x, MADE, has_nan=False, way=(STEP,))
    found = Arrival.of("loss", mark, at, x, text="more")
    assert found == Arrival("loss", MADE, (STEP,), at, False, x, "more")
    unknown = Arrival.of("gradient", None, at, x, text="more")
    assert unknown == Arrival("gradient", None, (), at, False, x, "more")


@pytest.mark.parametrize(
    ("values", "finite"),
    [([1.0], True), ([math.inf], False), ([3e38] * 20, True), ([3e38] * 20 + [math.nan], False)],
)
def test_whether_all_tensors_are_finite(values: Any, finite: bool) -> None:
    assert are_finite([torch.zeros(1), torch.tensor(values)]) is finite


@pytest.mark.parametrize(
    ("kind", "has_nan", "is_it"),
    [
        ("asked", False, True),
        ("entered", False, True),
        ("made", False, False),
        ("asked", True, False),
    ],
)
def test_infinities_that_no_call_has_made_may_be_a_mask(
    kind: Any, has_nan: bool, is_it: bool
) -> None:
    mark = marks().mark(torch.ones(1), Maker(kind, STEP, has_nan), has_nan=has_nan)
    assert mark.may_be_mask is is_it
