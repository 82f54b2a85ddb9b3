"""The same elements in another tensor: by order, or by their places in memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cudalens.recorder.places import (
    address_of,
    contains,
    in_base,
    in_memory,
    reshaped,
    values_at,
    written_places,
)

X = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    ("positions", "old", "new", "wanted"),
    [
        ([(1, 2)], (3, 4), (12,), [(6,)]),
        ([(6,)], (12,), (2, 6), [(1, 0)]),
        ([(1,)], (3, 4), (3, 2, 2), [(1,)]),  # rows
        ([(1,)], (3, 4), (4, 3), None),
        ([(1, 2)], (3, 4), (3, 5), None),
        ([], (3, 4), (12,), None),
        (None, (3, 4), (12,), None),
        ([(1, 2)], None, (12,), None),
    ],
)
def test_positions_in_another_shape(positions: Any, old: Any, new: Any, wanted: Any) -> None:
    assert reshaped(positions, old, new) == wanted


def test_positions_of_a_view_in_its_base() -> None:
    assert in_memory([(0, 1)], X[1:, ::2], X) == [(1, 2)]
    assert in_memory([(2, 1)], X.T, X) == [(1, 2)]
    assert in_memory([(0, 0)], X.clone(), X) is None
    assert in_memory([(1,)], X, X) is None  # rows
    assert in_memory([(0,)], X[0], X[1:]) is None  # before it
    assert in_memory([(0, 1)], X, X.T) is None
    assert in_memory(None, X, X) is None


def test_the_address_is_that_of_the_memory() -> None:
    assert address_of(X[1:]) == address_of(X) == X.data_ptr()
    assert address_of(torch.empty(0)) is None
    assert address_of(X.to_sparse()) is None


def test_values_at_positions() -> None:
    assert values_at(X, [(0, 1), (2, 3)]).tolist() == [1.0, 11.0]


@pytest.mark.parametrize(("value", "is_there"), [(11.0, True), (12.0, False), (math.nan, False)])
def test_whether_a_value_is_among_elements(value: float, is_there: bool) -> None:
    assert contains(X, torch.tensor(value)) is is_there
    assert contains(torch.tensor([1.0, math.nan]), torch.tensor(math.nan))


@pytest.mark.parametrize(
    ("key", "value"),
    [((1,), torch.ones(2)), ((..., 0), torch.ones(2)), ((slice(1), torch.tensor([1])), 1)],
)
@pytest.mark.parametrize("view", [X[1:, 1::2], X.T[:2, 1:], X[:2, :2]])
def test_what_a_view_writes_is_written_to_its_base(view: Any, key: Any, value: Any) -> None:
    """A real write to a copy with the same layout says which places it reaches."""
    base = torch.zeros_like(X)
    base.as_strided(view.shape, view.stride(), view.storage_offset())[key] = value
    numbers = written_places(view.shape, key, getattr(value, "shape", ()))
    layout = (view.storage_offset(), view.stride())
    found = in_base(numbers, view.shape, layout, X.numel())
    assert found is not None
    assert (found >= 0).tolist() == base.flatten().bool().tolist()


def test_a_view_that_ends_behind_its_base_has_no_places_there() -> None:
    assert in_base(torch.tensor([0, -1]), (2,), (2, (1,)), 4) is not None
    assert in_base(torch.tensor([0, -1]), (2,), (3, (1,)), 4) is None
    assert in_base(torch.tensor([0]), (1,), (-1, (1,)), 4) is None
