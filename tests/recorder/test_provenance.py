"""The walk from a bad tensor back: each step, what it says, and where it ends."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, tensor
from torch.utils.data import DataLoader

from cudalens.core.graph_types import DIVIDES, FIRST_BAD
from cudalens.recorder import Recorder
from cudalens.recorder import provenance as provenance_module
from cudalens.recorder.provenance import Provenance
from cudalens.source.stack import line_of


def is_above_9(item: Tensor) -> bool:
    return bool((item > 9).any())


def is_nan(item: Tensor) -> bool:
    return bool(item.isnan().any())


def walked(
    run: Callable[[], Any], is_bad: Callable[[Tensor], bool] = is_above_9
) -> tuple[Provenance, Tensor]:
    """Follow the bad elements of what a function gives last; all it gives stays alive."""
    with Recorder() as recorder:
        made = run()
        result = made[-1] if isinstance(made, (list, tuple)) else made
        mask = result.isnan() if is_bad is is_nan else result > 9
        places = [tuple(item) for item in mask.nonzero().tolist()]
        return recorder.provenance(result, is_bad, places, mask), result


def told(provenance: Provenance) -> list[tuple[Any, ...]]:
    return [(step.op and step.op.rpartition(".")[2], step.note) for step in provenance.steps]


def test_a_call_with_good_inputs_has_made_them() -> None:
    def run() -> Any:
        x = torch.tensor([1, 8])
        return x, x * 2

    provenance, _ = walked(run)
    assert told(provenance) == [("mul", FIRST_BAD)]
    assert provenance.steps[0].count == 1
    assert provenance.given is not None and provenance.given.tolist() == [1, 8]
    assert provenance.origin is None and not provenance.is_open


def test_a_tensor_made_of_numbers_is_where_they_entered() -> None:
    provenance, _ = walked(lambda: torch.tensor([1, 16]))
    assert told(provenance) == [("tensor", FIRST_BAD)]
    assert provenance.entry is not None


def test_an_older_tensor_is_the_origin_while_it_is_unchanged() -> None:
    old = tensor([1, 16])
    provenance, _ = walked(lambda: old.flip(0))
    assert provenance.is_open
    assert provenance.origin is old
    good = tensor([1, 2])
    assert walked(lambda: good)[0].origin is None


@pytest.mark.parametrize("is_read_again", [False, True])
def test_what_an_earlier_block_has_read_may_have_changed_since(is_read_again: bool) -> None:
    old = tensor([1, 16])
    with Recorder() as first:
        y = old + 0
    with Recorder() as recorder:
        recorder.follow(first.handed_on())
        z = (old if is_read_again else y) * 1
        found = recorder.provenance(z, is_above_9, [(1,)], z > 9)
    assert found.origin is (old if is_read_again else None)


def test_a_write_of_one_number_is_told_with_it() -> None:
    def run() -> Any:
        x = torch.zeros(4, dtype=torch.int64)
        x[1] = 20
        return x

    provenance, _ = walked(run)
    assert ("__setitem__", "it writes 20") in told(provenance)
    assert provenance.steps[0].count == 1


def test_a_write_of_a_tensor_of_one_number_is_told_while_it_lives() -> None:
    number = tensor(20)

    def run(value: Callable[[], Tensor]) -> Callable[[], Any]:
        def write() -> Any:
            x = torch.zeros(4, dtype=torch.int64)
            x[1] = value()
            return x

        return write

    provenance, _ = walked(run(lambda: number))
    assert told(provenance)[0] == ("__setitem__", "it writes 20")
    provenance, _ = walked(run(lambda: tensor(20)))
    assert told(provenance)[0] == ("__setitem__", None)
    several = tensor([20, 20])

    def wide() -> Any:
        x = torch.zeros(4, dtype=torch.int64)
        x[1:3] = several
        return x

    provenance, _ = walked(wide)
    assert told(provenance)[0] == ("__setitem__", None)
    assert provenance.steps[0].count == 2


def test_a_write_that_made_none_is_passed_by() -> None:
    def run() -> Any:
        x = torch.tensor([16, 1, 1])
        x[1] = 3
        return x

    provenance, _ = walked(run)
    assert told(provenance) == [("tensor", FIRST_BAD)]


def test_two_writes_are_told_the_newest_first() -> None:
    def run() -> Any:
        x = torch.zeros(4, dtype=torch.int64)
        x[1] = 20
        x[2] = 30
        return x

    provenance, _ = walked(run)
    assert told(provenance) == [("__setitem__", "it writes 30"), ("__setitem__", "it writes 20")]


def test_a_write_over_a_write_is_the_one() -> None:
    def run() -> Any:
        x = torch.zeros(4, dtype=torch.int64)
        x[1] = 20
        x[1] = 30
        return x

    provenance, _ = walked(run)
    assert told(provenance) == [("__setitem__", "it writes 30")]


def test_where_they_came_from_is_followed_through_a_choice() -> None:
    left, right = tensor([1, 16, 1]), tensor([2, 2, 2])
    keep = tensor([True, True, False])

    def run() -> Any:
        a, b = left + 1, right + 1
        return a, b, torch.where(keep, a, b)

    provenance, _ = walked(run)
    assert [step[0] for step in told(provenance)] == ["where", "add"]
    assert provenance.origin is left


def test_a_division_by_0_is_told_behind_the_call_that_made_nan_of_it() -> None:
    def one() -> Any:
        x = torch.ones(3) / 0
        return x, x.softmax(0)

    provenance, _ = walked(one, is_nan)
    assert told(provenance) == [("softmax", FIRST_BAD), ("div", DIVIDES)]
    large = torch.full((3,), math.inf)
    provenance, _ = walked(lambda: [x := large / 2, x.softmax(0)], is_nan)
    assert told(provenance) == [("softmax", FIRST_BAD)]


def test_views_are_looked_through() -> None:
    def run() -> Any:
        x = torch.tensor([[1, 2], [3, 8]])
        y = x * 2
        return x, y, y.t()[1]

    provenance, _ = walked(run)
    assert told(provenance) == [("mul", FIRST_BAD)]


def test_a_whole_copy_goes_on_in_the_other_tensor() -> None:
    source = tensor([1, 16])

    def run() -> Any:
        x = torch.zeros(2, dtype=torch.int64)
        x.copy_(source)
        return x

    provenance, _ = walked(run)
    assert [step[0] for step in told(provenance)] == ["copy_"]
    assert provenance.origin is source


@pytest.mark.parametrize("is_changed", [False, True])
def test_an_input_that_was_changed_since_proves_nothing(is_changed: bool) -> None:
    def run() -> Any:
        x = torch.tensor([1, 8])
        y = x * 2
        if is_changed:
            x.add_(1)
        return x, y

    provenance, _ = walked(run)
    notes = [note for op, note in told(provenance) if op == "mul"]
    assert notes == [None if is_changed else FIRST_BAD]


def test_of_two_inputs_with_bad_elements_none_is_followed() -> None:
    def run() -> Any:
        x, y = torch.tensor([16, 1]), torch.tensor([1, 16])
        return x, y, x * y

    provenance, _ = walked(run)
    assert told(provenance) == [("mul", None)]


@pytest.mark.parametrize(
    ("freed", "ops"), [(11, ["cat", "tensor", "add", "tensor"]), (3, ["cat", "tensor"])]
)
def test_a_freed_input_is_followed_where_the_living_one_lacks_a_bad_value(
    freed: int, ops: list[str]
) -> None:
    def run() -> Any:
        living = torch.tensor([1, 10])
        return living, torch.cat([living, torch.tensor([freed, 2]) + 0])

    assert [op for op, _ in told(walked(run)[0])] == ops


# --- where a walk ends ---------------------------------------------------------------------------


def chosen(other: int, where: Any = None) -> list[Tensor]:
    """Return what a choice made of a bad tensor, with a number at other places."""
    x = torch.tensor([1, 8])
    made, is_taken = x * 2, x > 0
    return [x, made, where(made, is_taken, other) if where else torch.where(is_taken, made, other)]


def written_out(x: Tensor, run: Callable[[Tensor], Any]) -> Tensor:
    """Return a tensor that a call has written to."""
    run(x)
    return x


def shown_bits() -> list[Tensor]:
    """Return a float and its bits, which in inference mode are a view of it."""
    with torch.inference_mode():
        x = torch.zeros(2)
        x[1] = 16
        return [x, x.view(torch.int32)]


def turned() -> list[Tensor]:
    x = torch.zeros(2, 2, dtype=torch.int64)
    x[0, 1] = 16
    return [x, x.t()]


def unseen(show: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return what is made of a view that no call has shown, as a scripted function makes."""
    x = torch.zeros(2, 2, dtype=torch.int64)
    x[0, 1] = 16
    base = x.clone()
    with torch._C.DisableTorchFunction():
        view = show(base)
    return [x, base, view, view.clone()]


def in_place(x: Tensor, *, keeps: bool) -> list[Tensor]:
    """Return a tensor that another one was added to."""
    x.add_(y := torch.tensor([1, 8]))
    return [y, x] if keeps else [x]


def taken() -> list[Tensor]:
    table, index = torch.arange(13), torch.tensor([1, 12])
    return [table, index, torch.take(table, index)]


def copied(dtype: torch.dtype) -> list[Tensor]:
    """Return a source, and what it was written into."""
    source, x = torch.tensor([1, 16], dtype=dtype), torch.zeros(4, dtype=torch.int64)
    x[1:3] = source
    return [source, x]


FROM_OUTSIDE = numpy.array([1, 16])
ZEROS = tensor([0, 0])
MASK = tensor([True, False, False])
MUL, TENSOR = ("mul", FIRST_BAD), ("tensor", FIRST_BAD)
CLONE, WRITE = ("clone", None), ("__setitem__", "it writes 16")


@pytest.mark.parametrize(
    ("run", "steps"),
    {
        "choice": (lambda: chosen(3), [MUL]),
        "choice by a method": (lambda: chosen(3, Tensor.where), [MUL]),
        "choice of a bad number": (lambda: chosen(16), [("where", None), MUL]),
        "filled": (
            lambda: written_out(torch.tensor([1]), lambda x: x.fill_(16)),
            [("fill_", FIRST_BAD)],
        ),
        "drawn anew": (
            lambda: written_out(torch.tensor([1]), lambda x: x.random_(16, 17)),
            [("random_", FIRST_BAD)],
        ),
        "out=": (
            lambda: written_out(
                torch.tensor([1]), lambda x: torch.mul(torch.tensor([8]), 2, out=x)
            ),
            [],
        ),
        "other bits": (
            lambda: [x := torch.tensor([1.0, 16.0]), (x + 0).view(torch.int32)],
            [("view", FIRST_BAD)],
        ),
        "view of other bits": (shown_bits, [WRITE]),
        "turned": (turned, [WRITE]),
        "unseen view": (lambda: unseen(lambda x: x.view(4)), [CLONE, CLONE, WRITE]),
        "unseen and turned": (lambda: unseen(Tensor.t), [CLONE, CLONE, WRITE]),
        "taken": (taken, [("take", None), ("arange", FIRST_BAD)]),
        "whole copy": (
            lambda: written_out(torch.zeros(2), lambda x: x.copy_(torch.tensor([1.0, 16.0]))),
            [("copy_", None), ("tensor", FIRST_BAD)],
        ),
        "added to": (lambda: in_place(torch.tensor([1, 8]), keeps=True), [("add_", None)]),
        "added to, gone": (lambda: in_place(torch.tensor([1, 8]), keeps=False), [("add_", None)]),
        "of another precision": (
            lambda: [x := torch.tensor([1, 16.1], dtype=torch.float64), x.float()],
            [("float", None), TENSOR],
        ),
        "of floats": (
            lambda: [x := torch.tensor([1.0, 16.0]), x.long()],
            [("long", None), ("tensor", None)],
        ),
        "copy": (lambda: copied(torch.int64), [("__setitem__", None), TENSOR]),
        "copy of another type": (lambda: copied(torch.float64), [("__setitem__", None)]),
    }.values(),
)
def test_how_far_a_walk_goes(run: Callable[[], Any], steps: list[Any]) -> None:
    provenance, _ = walked(run)
    assert told(provenance) == steps


@pytest.mark.parametrize(
    ("run", "steps"),
    {
        "in order": (lambda x: (x / 0).view(1, 2), [("div", DIVIDES)]),
        "softmax": (lambda x: (x / 0).softmax(0), [("softmax", None), ("div", DIVIDES)]),
        "log_softmax": (
            lambda x: (x / 0).log_softmax(0),
            [("log_softmax", None), ("div", DIVIDES)],
        ),
        "other number": (lambda x: (x / 2).log(), [("log", None), ("div", None)]),
        "replaced": (
            lambda x: (x / 0).nan_to_num(posinf=math.inf).softmax(0),
            [("softmax", None), ("nan_to_num", None), ("div", None)],
        ),
        "computed after": (
            lambda x: (x / 0).softmax(0) * 1,
            [("mul", None), ("softmax", None), ("div", None)],
        ),
        "computed": (
            lambda x: ((x / 0) * 1).view(1, 2).softmax(1),
            [("softmax", None), ("mul", None), ("div", None)],
        ),
    }.values(),
)
def test_a_division_by_0_is_told_while_its_infinities_are_handed_on(
    run: Callable[[Tensor], Tensor], steps: list[Any]
) -> None:
    provenance, _ = walked(lambda: run(tensor([1.0, -3.0])), is_nan)
    assert told(provenance)[: len(steps)] == steps


def test_what_came_from_outside_is_entered_where_it_was_first_read() -> None:
    """No recorder sees ``from_numpy``."""
    provenance, _ = walked(lambda: torch.from_numpy(FROM_OUTSIDE) + 0)
    assert provenance.is_open and provenance.entry is not None and provenance.origin is None
    assert provenance.given is None  # it is not proven what it was
    provenance, _ = walked(lambda: [x := torch.from_numpy(FROM_OUTSIDE), x + 0])
    assert provenance.is_open and provenance.entry is None
    assert provenance.origin is not None and provenance.origin.tolist() == [1, 16]
    provenance, _ = walked(lambda: torch.from_numpy(FROM_OUTSIDE) + torch.from_numpy(FROM_OUTSIDE))
    assert not provenance.is_open and provenance.entry is None
    provenance, _ = walked(lambda: torch.from_numpy(FROM_OUTSIDE) + ZEROS)
    assert provenance.is_open and provenance.entry is None  # which of the two was read


def test_what_is_dead_is_entered_where_it_was_read_first() -> None:
    def run() -> Any:
        x = torch.from_numpy(FROM_OUTSIDE) + 0
        return x, x * 1

    provenance, _ = walked(run)
    entry: Any = provenance.entry
    assert told(provenance) == [("mul", None), ("add", None)]
    assert provenance.steps[-1].source is not None
    assert line_of(*entry[:2]) == provenance.steps[-1].source.line


@pytest.mark.parametrize("is_given", [False, True])
def test_what_numpy_was_given_is_not_the_loaders_batch_any_more(is_given: bool) -> None:
    def run() -> Any:
        (batch,) = DataLoader([1, 16], batch_size=2)  # type: ignore[arg-type]
        if is_given:
            batch.numpy()
        return batch, batch + 0

    provenance, _ = walked(run)
    assert (provenance.batch is None) is is_given


@pytest.mark.parametrize("is_part", [False, True])
def test_of_a_view_of_all_elements_the_base_is_the_origin(is_part: bool) -> None:
    base = tensor([1, 16, 3, 4])
    view = base[:2] if is_part else base.view(2, 2)
    provenance, _ = walked(lambda: view + 0)
    assert provenance.origin is (view if is_part else base)


def test_a_view_that_torch_alone_knows_leads_to_its_base() -> None:
    base = tensor([1, 2, 3, 4])
    view = base.view(2, 2)

    def run() -> Any:
        base[1] = 16
        return view + 0

    provenance, _ = walked(run)
    assert told(provenance) == [("add", None), ("__setitem__", "it writes 16")]


def test_a_parameter_is_followed_no_further_than_its_optimizer() -> None:
    weight = torch.nn.Parameter(torch.ones(2) * 8)
    weight.grad = -torch.ones(2) * 2

    def run() -> Any:
        torch.optim.SGD([weight], lr=1, foreach=False).step()
        return weight

    provenance, _ = walked(run)
    assert told(provenance) == [] and not provenance.is_open


@pytest.mark.parametrize(("last", "is_followed"), [((1,), True), ((1, 0), False), ((), False)])
def test_positions_of_another_rank_are_no_positions(last: Any, is_followed: bool) -> None:
    with Recorder() as recorder:
        x = torch.zeros(2, dtype=torch.int64)
        x[1] = 16
        x[0] = 20
        found = recorder.provenance(x, is_above_9, [(1,), last], x > 9)
    assert (len(found.steps) == 2) is is_followed


def test_no_values_of_a_tensor_without_any_are_asked_for() -> None:
    asked = list[Tensor]()
    with Recorder() as recorder:
        x = torch.empty(0, dtype=torch.int64)
        meta = torch.empty(2, device="meta")
        y = torch.ones(2)
        for item in (x, meta, y):
            recorder.provenance(item, lambda it: bool(asked.append(it)))
    assert asked == [y]


def test_complex_numbers_of_bad_floats_are_not_the_first() -> None:
    def run() -> Any:
        x = tensor([0.0, 1.0])
        left = x / 0
        both = torch.complex(left, x)
        return x, left, both, both.abs()

    provenance, _ = walked(lambda: run()[:3], is_nan)
    assert told(provenance) == [("complex", None), ("div", None)]
    provenance, _ = walked(run, is_nan)
    assert FIRST_BAD not in [note for _, note in told(provenance)]


def two_sources() -> list[Tensor]:
    y = torch.tensor([8, 1])
    left, right = (y + 1) * 2, y + 10
    x = torch.zeros(6, dtype=torch.int64)
    x[0:2] = left
    x[3:5] = right
    return [y, left, right, x]


def test_each_source_of_a_tensor_is_followed_the_newest_write_first() -> None:
    provenance, _ = walked(two_sources)
    assert [
        (name, step.count)
        for (name, _), step in zip(told(provenance), provenance.steps, strict=True)
    ] == [
        ("__setitem__", 2),
        ("__setitem__", 1),
        ("add", 2),
        ("mul", None),
        ("add", None),
    ]


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (2, None)])
def test_a_row_that_a_choice_has_repeated_is_not_counted(rows: int, count: int | None) -> None:
    def run() -> Any:
        y = torch.tensor([1, 8])
        x = y * 2
        return y, x, torch.where(torch.ones(rows, 2, dtype=torch.bool), x, 3)

    provenance, _ = walked(run)
    assert told(provenance) == [MUL] and provenance.steps[0].count == count


@pytest.mark.parametrize(
    ("number", "part", "steps"),
    [
        (None, 0, [("mul", FIRST_BAD, 2)]),
        (3, 0, [("mul", FIRST_BAD, 1)]),
        (True, 0, [("mul", FIRST_BAD, 1)]),
        (20, 0, [("masked_fill_", "it writes 20", None), ("mul", FIRST_BAD, None)]),
        (20, 2, [("__setitem__", "it writes 20", None), ("mul", FIRST_BAD, None)]),
        (16, 0, [("masked_fill_", "it writes 16", None)]),
    ],
)
def test_what_a_write_of_unknown_places_hides_is_not_counted(
    number: int | None, part: int, steps: list[Any]
) -> None:
    def run() -> Any:
        y = torch.tensor([8, 8, 1])
        x = y * 2
        if number is not None:
            if part:
                x[:part][MASK[:part].clone()] = number
            else:
                x.masked_fill_(MASK, number)
        return y, x

    provenance, _ = walked(run)
    assert [
        (*it, step.count) for it, step in zip(told(provenance), provenance.steps, strict=True)
    ] == steps


def test_a_good_value_is_passed_by_where_no_places_are_listed() -> None:
    with Recorder() as recorder:
        y = torch.tensor([8, 8, 1])
        x = y * 2
        x.masked_fill_(MASK, 3)
        found = recorder.provenance(x, is_above_9)
    assert told(found) == [MUL]


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_way_ends_where_what_was_written_has_changed_since(is_changed: bool) -> None:
    def run() -> Any:
        number, x = torch.tensor(20), torch.ones(3, dtype=torch.int64)
        x.masked_fill_(MASK, number)
        if is_changed:
            number.fill_(30)
        return number, x

    provenance, _ = walked(run)
    assert told(provenance) == ([] if is_changed else [("masked_fill_", "it writes 20")])


def test_what_was_written_before_beside_a_write_is_told() -> None:
    def run() -> Any:
        x = torch.zeros(3, dtype=torch.int64)
        x[1] = 16
        x[:2][MASK[:2].clone()] = 20
        return x

    provenance, _ = walked(run)
    assert told(provenance) == [("__setitem__", "it writes 20"), WRITE]


def test_each_part_of_a_part_is_followed() -> None:
    def run() -> Any:
        parts = [
            torch.tensor([16]),
            torch.tensor([17]),
            torch.tensor([18]),
        ]
        both = torch.cat(parts[:2])
        return parts, both, torch.cat([both, parts[2]])

    provenance, _ = walked(run)
    entry, first = provenance.entry, provenance.steps[2].source
    assert told(provenance) == [("cat", None)] * 2 + [TENSOR] * 3
    assert isinstance(entry, tuple) and first is not None
    assert line_of(*entry[:2]) == first.line


def put_behind(batch: Tensor) -> Tensor:
    x = torch.zeros(4, dtype=torch.int64)
    x[0] = 20
    x[2:4] = batch
    return x


@pytest.mark.parametrize(
    ("run", "samples"), [(put_behind, {(3,): 1}), (lambda it: it * tensor([2, 1]), {(1,): 1})]
)
def test_a_sample_is_that_of_the_element_that_came_from_the_batch(
    run: Callable[[Tensor], Tensor], samples: Any
) -> None:
    def step() -> Any:
        (batch,) = DataLoader([8, 16], batch_size=2)  # type: ignore[arg-type]
        return batch, run(batch)

    assert walked(step)[0].samples == samples


def test_of_a_long_way_the_newest_steps_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = walked(two_sources)
    monkeypatch.setattr(provenance_module, "_MAX_STEPS", 3)
    assert told(walked(two_sources)[0]) == told(whole)[:3]


def test_a_mask_of_another_shape_counts_nothing() -> None:
    with Recorder() as recorder:
        y = torch.tensor([8, 1])
        x = y * 2
        found = recorder.provenance(x, is_above_9, [(0,)], tensor([True]))
        assert [step.count for step in found.steps] == [None]
        found = recorder.provenance(x, is_above_9, [(0,)], tensor([True, False]))
        assert [step.count for step in found.steps] == [1]


def test_a_tensor_that_somebody_else_wrote_to_has_no_provenance() -> None:
    old = torch.zeros(2, dtype=torch.int64)
    old[1] = 16
    with Recorder() as recorder:
        x = torch.zeros(2, dtype=torch.int64)
        x[0] = 0
        thread = threading.Thread(target=lambda: x.add_(20))
        thread.start()
        thread.join()
        found = recorder.provenance(x, is_above_9, [(0,)], x > 9)
        assert (found.steps, found.is_open) == ([], False)
        x.mul_(1)
        assert recorder.provenance(x, is_above_9, [(0,)], x > 9).steps
        # One that no call has made or written to is the origin, whatever its version.
        assert recorder.provenance(old, is_above_9, [(1,)], old > 9).origin is old
        with torch.inference_mode():
            y = torch.ones(2) * 16
        found = recorder.provenance(y, is_above_9, [(0,)], y > 9)
    assert found.steps[0].op == "torch.Tensor.mul"
