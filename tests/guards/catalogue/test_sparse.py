"""The guard of compressed sparse layouts: each invariant at its bound and one beyond."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from tests.cpu_guards import assert_said, said_id
from tests.verdicts import ask

VALIDATE = torch.ops.aten._validate_compressed_sparse_indices.default
STARTS, PLACES = "compressed_idx", "plain_idx"


def said_of(starts: Tensor, places: Tensor, columns: int = 3, *, is_crow: bool = True) -> Any:
    """Ask about a matrix whose number of values is that of the places."""
    nnz = places.size(-1) if places.dim() else 1
    return next(iter(dict(ask(VALIDATE, is_crow, starts, places, 4, columns, nnz)).values()), None)


@pytest.mark.parametrize(
    ("starts", "places", "said"),
    [
        ([0, 2, 3], [0, 2, 1], None),
        ([0, 3, 3], [0, 1, 2], None),
        ([0, 0, 3], [0, 1, 2], None),
        (
            [1, 2, 3],
            [0, 2, 1],
            {"headline": "{argument}[0] = 1 must be 0", "argument": STARTS, "bounds.text": "0"},
        ),
        (
            [0, 2, 4],
            [0, 2, 1],
            {
                "headline": "{argument}[2] = 4 must be 3: the number of stored values",
                "bounds.text": "3",
            },
        ),
        (
            [0, 4, 4],
            [0, 1, 2, 2],
            {
                "headline": "{argument}[1] = 4 must be 0 … 3 above the one before it: a row has 3 "
                "places",
                "bounds.text": "0 … 3 more than the one before",
            },
        ),
        ([0, 2, 1, 3], [0, 1, 2], {"at": [(2,)], "argument": STARTS}),
        (
            [0, 2, 3],
            [0, 3, 1],
            {
                "headline": "{argument}[1] = 3 is outside the 3 columns of the tensor",
                "argument": PLACES,
                "bounds.text": "0 … 2",
                "size": 3,
            },
        ),
        ([0, 2, 3], [-1, 2, 1], {"at": [(0,)], "argument": PLACES}),
        (
            [0, 2, 3],
            [1, 1, 1],
            {
                "headline": "{argument}[1] = 1 must be larger than the one before it in the same "
                "row",
                "bounds.text": "rising within a row",
                "is_index": False,
            },
        ),
        ([0, 2], [1, 1], {"at": [(1,)]}),
        ([0, 1, 3], [1, 1, 2], None),
        ([0, 1, 3], [1, 2, 1], {"at": [(2,)]}),
    ],
    ids=said_id,
)
def test_each_invariant(starts: list[int], places: list[int], said: dict[str, Any] | None) -> None:
    for dtype in (torch.int64, torch.int32):
        call = tensor(starts, dtype=dtype), tensor(places, dtype=dtype)
        assert_said(said_of(*call), said)


def test_columns_have_places_in_rows() -> None:
    starts = tensor([0, 2, 3])
    found = said_of(starts, tensor([0, 3, 1]), is_crow=False)
    assert_said(found, {"headline": "{argument}[1] = 3 is outside the 3 rows of the tensor"})
    found = said_of(starts, tensor([1, 1, 1]), is_crow=False)
    assert_said(found, {"bounds.text": "rising within a column"})


def test_the_first_invariant_that_is_broken_is_told() -> None:
    for starts, places, words in (
        ([1, 2, 9], [0, 9, 9], "[0] = 1 must be 0"),
        ([0, 2, 9], [0, 9, 9], "[2] = 9 must be 3: "),
        ([0, -1, 3], [0, 9, 9], "[1] = -1 must be 0 … 3 above"),
        ([0, 2, 3], [9, 9, 9], "[0] = 9 is outside the 3 columns"),
    ):
        assert said_of(tensor(starts), tensor(places)).headline.startswith(f"{{argument}}{words}")


@pytest.mark.parametrize(
    ("starts", "places", "is_judged"),
    [
        (tensor([1, 1]), tensor([0]), True),
        (tensor([1, 1]).short(), tensor([0]).short(), False),
        (tensor([1, 1]), tensor([[0]]), False),
        (tensor([[1, 1]]), tensor([[0]]), True),
        (tensor([], dtype=torch.int64), tensor([9]), False),
        (tensor(1), tensor([0]), False),
        (tensor([1, 1]), tensor(0), False),
    ],
)
def test_only_shapes_that_torch_takes_are_judged(
    starts: Tensor, places: Tensor, is_judged: bool
) -> None:
    assert (said_of(starts, places) is not None) is is_judged


def test_a_number_of_values_that_differs_is_refused_on_the_host() -> None:
    call = tensor([1, 1]), tensor([0])
    assert dict(ask(VALIDATE, True, *call, 4, 3, 1))
    assert not dict(ask(VALIDATE, True, *call, 4, 3, 2))
