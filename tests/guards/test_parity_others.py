"""The guards of the rarer ops against loops, and that every guard is held against one."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from cudalens.core.report_types import Violation
from tests.guards.test_catalogue import CATALOGUE
from tests.loop_oracle import COMPARED, agree, ask, compared, labels, loop, mixed, parity

aten = torch.ops.aten
Found = Violation | None
WITH_LOOPS = ("indexing", "lengths", "values")


def ints(values: list[int]) -> torch.Tensor:
    return tensor(values, dtype=torch.int32)


# --- statements ----------------------------------------------------------------------------------


@compared("assert_async_holds", "assert_async_message_holds")
@parity
@given(
    value=st.sampled_from([0, 0.0, -0.0, 0j, False, 1, -1, 0.5, float("nan"), 1j, True]),
    shape=st.sampled_from([(), (1,), (1, 1)]),
)
def test_statements(value: Any, shape: tuple[int, ...]) -> None:
    """A single element that Python calls false breaks a statement, with and without a message."""
    condition = tensor(value).reshape(shape)
    for found in (
        ask(aten._assert_async.default, condition),
        ask(aten._assert_async.msg, condition, "lengths must match"),
    ):
        assert (found is not None) == (not value)
        assert found is None or found.offenders.count == found.offenders.total == 1


# --- losses, backward ----------------------------------------------------------------------------


@compared("nll_loss_backward_target_in_range")
@parity
@given(
    data=st.data(),
    classes=st.integers(1, 6),
    ignored=st.sampled_from([-100, 0, 255]),
    reduction=st.integers(0, 2),
)
def test_targets_in_backward(data: Any, classes: int, ignored: int, reduction: int) -> None:
    """Targets of a loss that is differentiated against a loop, for every reduction."""
    count = data.draw(st.integers(1, 6))
    target = tensor(data.draw(labels(classes, ignored, count=count)))
    scores, total = torch.zeros(count, classes), torch.ones(())
    bad = loop(target, lambda t: t == ignored or 0 <= t < classes)
    grad = torch.ones(count) if reduction == 0 else total
    op = aten.nll_loss_backward.default
    agree(ask(op, grad, scores, target, None, reduction, ignored, total), target, bad)


@compared("nll_loss2d_backward_target_in_range")
@parity
@given(
    data=st.data(),
    classes=st.integers(1, 6),
    ignored=st.sampled_from([-100, 0, 255]),
    reduction=st.integers(0, 2),
)
def test_pixels_in_backward(data: Any, classes: int, ignored: int, reduction: int) -> None:
    """The same for the targets of images."""
    samples, height, width = (data.draw(st.integers(1, 3)) for _ in range(3))
    count = samples * height * width
    target = tensor(data.draw(labels(classes, ignored, count=count)))
    target = target.reshape(samples, height, width)
    scores, total = torch.zeros(samples, classes, height, width), torch.ones(())
    bad = loop(target, lambda t: t == ignored or 0 <= t < classes)
    grad = torch.ones(target.shape) if reduction == 0 else total
    op = aten.nll_loss2d_backward.default
    agree(ask(op, grad, scores, target, None, reduction, ignored, total), target, bad)


@compared("multi_margin_loss_backward_target_in_range")
@parity
@given(data=st.data(), classes=st.integers(1, 6), samples=st.integers(1, 6))
def test_margins_in_backward(data: Any, classes: int, samples: int) -> None:
    """Targets of a margin loss that is differentiated: no value is ignored."""
    target = tensor(data.draw(labels(classes, count=samples)))
    bad = loop(target, lambda t: 0 <= t < classes)
    op = aten.multi_margin_loss_backward.default
    found = ask(op, torch.ones(()), torch.zeros(samples, classes), target, 1, 1)
    agree(found, target, bad)


# --- tables --------------------------------------------------------------------------------------


@compared("embedding_bag_backward_maxima_in_range")
@parity
@given(data=st.data(), rows=st.integers(1, 5), padding=st.sampled_from([-1, 0, 7]))
def test_maxima_in_backward(data: Any, rows: int, padding: int) -> None:
    """Rows of the maxima against a loop: a negative one is none, the padding is passed over."""
    good = st.integers(-2, rows - 1)
    drawn = data.draw(mixed(4, good, st.sampled_from([rows, rows + 1, 7, 2**40])))
    maxima = tensor(drawn).reshape(2, 2)
    bad = loop(maxima, lambda i: i < rows or i == padding)
    none = tensor([0])
    op = aten._embedding_bag_dense_backward.default
    call = (torch.ones(2, 2), none, none, none, maxima, rows, False, 2, None, padding)
    agree(ask(op, *call), maxima, bad)


@compared("quantized_bag_indices_in_range")
@parity
@given(data=st.data(), rows=st.integers(1, 5), has_last=st.booleans(), bits=st.booleans())
def test_quantised_indices(data: Any, rows: int, has_last: bool, bits: bool) -> None:
    """Indices that some bag reads against a loop over the bags."""
    count = data.draw(st.integers(1, 8))
    indices = tensor(data.draw(labels(rows, count=count)))
    ends = data.draw(st.lists(st.integers(0, count), min_size=1, max_size=3))
    starts = sorted([0, *ends]) if has_last else sorted([min(ends), *ends])
    read = set()
    for start, end in itertools.pairwise(starts if has_last else [*starts, count]):
        read |= set(range(start, end))
    bad = [item for item in loop(indices, lambda i: 0 <= i < rows) if item[0][0] in read]
    name = "4bit" if bits else "byte"
    op = getattr(torch.ops.quantized, f"embedding_bag_{name}_rowwise_offsets").default
    table = torch.zeros(rows, 12, dtype=torch.uint8)
    found = ask(op, table, indices, tensor(starts), include_last_offset=has_last)
    agree(found, indices, bad)


# --- indexing ------------------------------------------------------------------------------------


@compared("index_backward_in_range")
@parity
@given(data=st.data(), size=st.integers(1, 5), count=st.integers(1, 6))
def test_unchecked_writes(data: Any, size: int, count: int) -> None:
    """Indices that accumulate unchecked, as in the backward of indexing: -size <= index < size."""
    wild = st.sampled_from([-size - 1, size, size + 1, 2**40])
    index = tensor(data.draw(mixed(count, st.integers(-size, size - 1), wild)))
    bad = loop(index, lambda i: -size <= i < size)
    op = aten._index_put_impl_.default
    agree(ask(op, torch.zeros(size), [index], torch.ones(count), True, True), index, bad)


@compared("take_along_dim_indices_in_range")
@parity
@given(data=st.data(), size=st.integers(1, 5), dim=st.sampled_from([0, 1, -1]))
def test_positions_along_a_dim(data: Any, size: int, dim: int) -> None:
    """take_along_dim: -size <= index < size of the dimension, whatever the other one broadcasts."""
    wild = st.sampled_from([-size - 1, size, size + 1, 2**40])
    count = data.draw(st.integers(1, 4))
    index = tensor(data.draw(mixed(count, st.integers(-size, size - 1), wild)))
    index = index.reshape((count, 1) if dim == 0 else (1, count))
    source = torch.zeros((size, 3) if dim == 0 else (3, size))
    bad = loop(index, lambda i: -size <= i < size)
    agree(ask(aten.take_along_dim.default, source, index, dim), index, bad)


# --- pivots --------------------------------------------------------------------------------------

PIVOTS = {
    "lu": (compared("lu_solve_pivots_in_range"), aten.linalg_lu_solve.default),
    "ldl": (compared("ldl_solve_pivots_in_range"), aten.linalg_ldl_solve.default),
    "unpack": (compared("lu_unpack_pivots_in_range"), aten.lu_unpack.default),
}


@pytest.mark.parametrize("kind", PIVOTS)
def test_pivots(kind: str) -> None:
    """Pivots count the rows from 1; those of LDL factors may be negative."""
    guard, op = PIVOTS[kind]

    @parity
    @given(data=st.data(), rows=st.integers(1, 5), batch=st.integers(1, 2))
    def holds(data: Any, rows: int, batch: int) -> None:
        wild = st.sampled_from([0, rows + 1, -rows - 1, 2**31 - 1, -(2**31)])
        drawn = data.draw(mixed(rows * batch, st.integers(1, rows), wild))
        signs = data.draw(st.lists(st.sampled_from([1, 1, -1]), min_size=1, max_size=1))
        if kind == "ldl" and -(2**31) not in drawn:
            drawn = [value * signs[0] for value in drawn]
        pivots = ints(drawn).reshape(batch, rows)
        bad = loop(pivots, lambda p: 1 <= (abs(p) if kind == "ldl" else p) <= rows)
        factors = torch.ones(batch, rows, rows)
        rest = () if kind == "unpack" else (torch.ones(batch, rows, 1),)
        agree(ask(op, factors, pivots, *rest), pivots, bad)

    with guard:
        holds()


# --- grouped products ----------------------------------------------------------------------------


def plain(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor) -> Found:
    return ask(aten._grouped_mm.default, left.bfloat16(), right.bfloat16(), offs)


def scaled(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor) -> Found:
    both = [item.to(torch.float8_e4m3fn) for item in (left, right.mT.contiguous().mT)]
    return ask(aten._scaled_grouped_mm.default, *both, torch.ones(4), torch.ones(4), offs)


def scaled_v2(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor) -> Found:
    both = [item.to(torch.float8_e4m3fn) for item in (left, right.mT.contiguous().mT)]
    scales = [torch.ones(4)]
    op = aten._scaled_grouped_mm_v2.default
    return ask(op, *both, scales, [1], [0], scales, [1], [0], offs)


PRODUCTS = [
    (compared("grouped_mm_offsets_in_range"), plain),
    (compared("scaled_grouped_mm_offsets_in_range"), scaled),
    (compared("scaled_grouped_mm_v2_offsets_in_range"), scaled_v2),
]


@pytest.mark.parametrize(("guard", "product"), PRODUCTS, ids=[str(item[0]) for item in PRODUCTS])
def test_groups_of_rows(guard: compared, product: Any) -> None:
    """Ends of groups of rows against a walk: the first assertion that fails names its offsets."""

    @parity
    @given(data=st.data(), rows=st.integers(1, 20))
    def holds(data: Any, rows: int) -> None:
        good = sorted(data.draw(st.lists(st.integers(0, rows), min_size=3, max_size=3)))
        ends = list(good)
        if data.draw(st.sampled_from([True, True, False])):
            ends[data.draw(st.integers(0, 2))] = data.draw(
                st.sampled_from([-1, rows + 1, rows + 9])
            )
        falling = [((i,), b) for i, (a, b) in enumerate(itertools.pairwise([0, *ends])) if b < a]
        beyond = [((i,), end) for i, end in enumerate(ends) if end > rows]
        found = product(torch.zeros(rows, 16), torch.zeros(3, 16, 16), ints(ends))
        agree(found, ints(ends), falling or beyond)

    with guard:
        holds()


# --- all of them ---------------------------------------------------------------------------------


def test_every_guard_is_held_against_a_loop() -> None:
    """No guard without a generator of calls, of which a third violate it."""
    package = __name__.rpartition(".")[0]
    for name in (*(f"test_parity_{part}" for part in WITH_LOOPS), "test_unchecked"):
        importlib.import_module(f"{package}.{name}")
    assert {entry.name for entry in CATALOGUE} == COMPARED


@pytest.mark.parametrize(("violating", "calls"), [(13, 40), (40, 40), (0, 0), (0, 40)])
def test_a_share_that_is_too_small_is_noticed(violating: int, calls: int) -> None:
    """Fewer than a third, all, or no calls at all are not a comparison."""
    table = torch.zeros(3)
    guard = compared("take_index_in_range")
    with pytest.raises(AssertionError, match=rf"take_index_in_range: {violating} of {calls}"):
        with guard:
            for number in range(calls):
                ask(aten.take.default, table, tensor([3 if number < violating else 2]))
    with guard:
        for number in range(3):
            ask(aten.take.default, table, tensor([3 - bool(number)]))
