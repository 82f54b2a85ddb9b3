"""Guards of lookup tables: which indices have a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import ones, tensor, zeros

from cudalens.guards import GUARDS
from tests.cpu_guards import assert_said
from tests.verdicts import ask

LOOKUP = GUARDS[torch.ops.aten.embedding.default][0]


@pytest.mark.parametrize(("columns", "is_bad"), [(0, False), (1, True)])
def test_a_table_without_columns_is_left_alone(columns: int, *, is_bad: bool) -> None:
    """CUDA launches nothing for an empty result, whatever the index is."""
    found = LOOKUP.check(torch.zeros(3, columns), tensor([5]))
    assert (found is not None) is is_bad


OF_BAGS = {item.name: item for item in GUARDS[torch.ops.aten._embedding_bag.default]}
IN_BAGS = OF_BAGS["embedding_bag_indices_in_range"]
BAGS = OF_BAGS["embedding_bag_offsets_rise"]


@pytest.mark.parametrize(
    ("offsets", "has_end", "is_bad"),
    [([], False, False), ([0], False, True), ([0], True, False), ([0, 2], True, True)],
)
def test_without_a_bag_no_index_is_read(offsets: list[int], *, has_end: bool, is_bad: bool) -> None:
    """With an end the last offset begins no bag."""
    starts = tensor(offsets, dtype=torch.int64)
    found = IN_BAGS.check(torch.zeros(3, 2), tensor([0, 9]), starts, 0, has_end)
    assert (found is not None) is is_bad


@pytest.mark.parametrize(
    ("offsets", "has_end", "at", "words"),
    [
        ([0, 2, 2], False, None, ""),
        ([0, 2, 1], False, (2,), "2 … 4"),
        ([0, 4, 4], False, None, ""),
        ([0, 5, 2], False, (1,), "0 … 4"),
        ([0, 5, 6], False, (1,), "0 … 4"),
        # The first counts as 0 whatever it is.
        ([9, 1, 3], False, None, ""),
        ([9, -1, 3], False, (1,), "0 … 4"),
        # With an end the last one is not used, and one bag alone cannot fall.
        ([0, 2, 1], True, None, ""),
        ([0, 2, 1, 9], True, (2,), "2 … 4"),
        ([7], False, None, ""),
        ([0, -1], True, None, ""),
    ],
)
def test_an_offset_lies_between_the_one_before_it_and_the_number_of_indices(
    offsets: list[int], has_end: bool, at: tuple[int, ...] | None, words: str
) -> None:
    found: Any = BAGS.check(torch.zeros(3, 2), tensor([0, 1, 2, 0]), tensor(offsets), 0, has_end)
    assert (None if found is None else found.offenders.first[0].position) == at
    assert found is None or (found.size == 4 and f"is outside {words}: " in found.headline)


@pytest.mark.parametrize(
    ("weight", "offsets"),
    [
        (torch.zeros(3, 0), tensor([0, 2, 1])),
        (torch.zeros(3), tensor([0, 2, 1])),
        (torch.zeros(3, 2), tensor([[0, 2, 1]])),
        (torch.zeros(3, 2), tensor([0.0, 2.0, 1.0])),
    ],
)
def test_offsets_that_no_kernel_reads_are_left_alone(
    weight: torch.Tensor, offsets: torch.Tensor
) -> None:
    assert BAGS.check(weight, tensor([0, 1, 2, 0]), offsets, 0, False) is None


aten = torch.ops.aten
NINE = tensor([9])
"""No table here has such a row."""
BACK = (tensor([0]), tensor([0]), tensor([1]), tensor([], dtype=torch.int64), 3, False)
"""Offsets, bag of each index, size of each bag, no maxima, rows, no scale."""
REFUSED_OR_IDLE: list[tuple[Any, tuple[Any, ...], list[tuple[Any, ...]]]] = [
    # Each with calls next to it that torch refuses, or that launch nothing.
    (
        aten.embedding.default,
        (zeros(3, 2), NINE),
        [(zeros(3), NINE), (zeros(3, 2, 2), NINE), (zeros(3, 2), NINE.short())],
    ),
    (
        aten.embedding_renorm_.default,
        (ones(3, 2), NINE, 1.0, 2.0),
        [(ones(3, 2, 2), NINE, 1.0, 2.0), (ones(3, 2), NINE.short(), 1.0, 2.0)],
    ),
    (
        aten._embedding_bag.default,
        (zeros(3, 2), NINE, tensor([0])),
        [
            (zeros(3), NINE, tensor([0])),
            (zeros(3, 0), NINE, tensor([0])),
            (zeros(3, 2), NINE.short(), tensor([0])),
        ],
    ),
    (
        aten.embedding_dense_backward.default,
        (ones(1, 2), NINE, 3, -1, False),
        [
            (ones(0, 2), NINE, 3, -1, False),
            (ones(1, 2), NINE.short(), 3, -1, False),
            (ones(1, 2), NINE, 3, 9, False),
        ],
    ),
    (
        aten._embedding_bag_dense_backward.default,
        (ones(1, 2), NINE, *BACK[1:], 0, None),
        [
            (ones(0, 2), NINE, *BACK[1:], 0, None),
            (ones(1, 2), NINE, *BACK[1:], 2, None),
            (ones(1, 2), NINE, *BACK[1:], 0, None, 9),
        ],
    ),
    (
        aten._embedding_bag_backward.default,
        (ones(1, 2), NINE, *BACK, 1, False, None),
        [(ones(1, 2), NINE, *BACK, 2, False, None), (ones(0, 2), NINE, *BACK, 1, False, None)],
    ),
    (
        aten._embedding_bag_per_sample_weights_backward.default,
        (ones(1, 2), ones(3, 2), NINE, tensor([0]), tensor([0]), 0),
        [
            (ones(0, 2), ones(3, 2), NINE, tensor([0]), tensor([0]), 0),
            (ones(1, 2), ones(3), NINE, tensor([0]), tensor([0]), 0),
            (ones(1, 2), ones(3, 2), NINE, tensor([0]), tensor([0]), 0, 9),
        ],
    ),
]


@pytest.mark.parametrize(("op", "launched", "others"), REFUSED_OR_IDLE)
def test_what_reads_no_row_is_not_judged(
    op: Any, launched: tuple[Any, ...], others: list[tuple[Any, ...]]
) -> None:
    assert ask(op, *launched)
    assert [ask(op, *other) for other in others] == [[] for _ in others]


@pytest.mark.parametrize(("index", "is_bad"), [(-3, False), (2, False), (-4, True), (3, True)])
def test_rows_to_renormalise_count_from_the_end_too(index: int, *, is_bad: bool) -> None:
    found = ask(aten.embedding_renorm_.default, ones(3, 2), tensor([index]), 1.0, 2.0)
    said = {"bounds.text": "-3 … 2", "line": "Embedding.cu:252", "dim": 0, "related": "self"}
    assert_said(dict(found).get("embedding_renorm_indices_in_range"), said if is_bad else None)


@pytest.mark.parametrize(("mode", "line"), [(0, 148), (1, 148), (2, 88)])
def test_the_kernel_of_a_bag_s_mode_asserts(mode: int, line: int) -> None:
    indices, offsets = tensor([0, 9]), tensor([0, 2, 1])
    found = dict(ask(aten._embedding_bag.default, zeros(3, 2), indices, offsets, False, mode))
    assert_said(found[IN_BAGS.name], {"line": f"EmbeddingBag.cu:{line}"})
    assert_said(found[BAGS.name], {"line": f"EmbeddingBag.cu:{76 if mode == 2 else 137}"})
