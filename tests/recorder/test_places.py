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
    joined_at,
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
    assert in_memory([(1, 0), (2, 0)], X, X[:2]) is None  # one behind it
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


def test_each_place_is_told_its_element_of_the_value() -> None:
    found = written_places((2, 3), [slice(None), slice(1)], (2, 1))
    assert found.tolist() == [0, -1, -1, 1, -1, -1]


def test_a_view_that_ends_behind_its_base_has_no_places_there() -> None:
    assert in_base(torch.tensor([0, -1]), (2,), (2, (1,)), 4) is not None
    assert in_base(torch.tensor([0, -1]), (2,), (3, (1,)), 4) is None
    assert in_base(torch.tensor([0]), (1,), (-1, (1,)), 4) is None
    found = in_base(torch.arange(0), (0,), (0, (1,)), 1)
    assert found is not None and found.tolist() == [-1]


@pytest.mark.parametrize(
    ("stem", "shape", "parts", "position", "dim", "wanted"),
    [
        ("cat", (5,), [(2,), (3,)], (1,), None, (0, (1,))),
        ("concat", (5,), [(2,), (3,)], (2,), None, (1, (0,))),
        ("cat", (2, 5), [(2, 2), (2, 3)], (1, 4), None, (1, (1, 2))),
        ("cat", (2, 5), [(2, 2), (2, 3)], (1,), None, None),  # a row
        ("cat", (5,), [(2,), (2,)], (4,), None, None),
        ("cat", (2, 3), [(0,), (2, 3)], (1, 2), None, None),
        ("add", (4,), [(2,), (2,)], (3,), None, None),
        ("stack", (2, 3), [(3,), (3,)], (1, 2), None, (1, (2,))),
        ("stack", (3, 2), [(3,), (3,)], (1,), None, None),  # a row
        ("stack", (2, 2), [(2,), (2,)], (1, 0), None, None),  # of either dimension
        ("stack", (2, 2), [(2,), (2,)], (1, 0), 0, (1, (0,))),
        ("stack", (2, 2), [(2,), (2,)], (1, 0), 1, (0, (1,))),
        ("stack", (2, 3), [(3,)], (1, 2), None, None),
    ],
)
def test_the_input_that_an_element_was_joined_from(
    stem: str, shape: Any, parts: Any, position: Any, dim: Any, wanted: Any
) -> None:
    assert joined_at(stem, shape, parts, [position], dim) == (wanted and [wanted])
