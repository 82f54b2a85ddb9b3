"""Guards of the lookup tables: embedding and its backward."""

from __future__ import annotations

from torch import Tensor

from cudalens.facts import Violation
from cudalens.guards._base import guard
from cudalens.guards._ranges import lies_within, out_of_range

_LOOKUP_TEXT = (
    'IndexKernelUtils.cu:19: vectorized_gather_kernel: Assertion `ind >=0 && ind < ind_dim_size && '
    '"vectorized gather kernel index out of bounds"` failed.'
)


@guard(
    "aten::embedding",
    records=("index_select_small", "gather_rows_fast", "gather_scatter"),
    frequency="very common",
)
def embedding_indices_in_range(weight: Tensor, indices: Tensor) -> Violation | None:
    """Every index selects a row of the table: it lies in [0, rows - 1].

    Source:   IndexKernelUtils.cu:19 and Indexing.cu:1524 (at most 16 indices), torch 2.13.0
    Cost:     one reduction over the indices, one copy of two numbers
    Passes:   aten.embedding(zeros(3, 2), tensor([0, 2]))
    Violates: aten.embedding(zeros(3, 2), tensor([0, 3]))
    """
    rows = weight.size(0)
    if lies_within(indices, 0, rows - 1):
        return None
    return out_of_range(
        indices,
        guard="embedding_indices_in_range",
        argument="indices",
        low=0,
        high=rows - 1,
        place=f"the {rows} rows of {{related}}",
        why="Each index reads one row of the table, and the kernel stops at a row that is not there.",
        device_text=_LOOKUP_TEXT,
        related="weight",
        size=rows,
    )
