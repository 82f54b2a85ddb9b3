"""Guards of lookup tables: which indices have a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import tensor

from cudalens.guards import GUARDS

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
    assert found is None or f"is outside {words}: " in found.headline


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
