"""The walk from a bad tensor back: each step, what it says, and where it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from cudalens.core.graph_types import DIVIDES, FIRST_BAD
from cudalens.recorder import Recorder
from cudalens.recorder.provenance import Provenance


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
