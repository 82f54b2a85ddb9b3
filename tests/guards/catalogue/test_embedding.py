"""Guards of lookup tables: which indices have a row."""

from __future__ import annotations

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
