"""Guards of the conversions between compressed and coordinate sparse indices."""

from __future__ import annotations

from torch import Tensor

from cudalens.core.report_types import Violation
from cudalens.guards._base import guard
from cudalens.guards._dims import INDEX_DTYPES, counted, spans_lie_inside
from cudalens.guards._ranges import lies_within, out_of_range


@guard("aten::_convert_indices_from_coo_to_csr", is_silent=True)
def coordinates_lie_in_rows(self: Tensor, size: int) -> Violation | None:
    """Every coordinate names a row: it lies in [0, size - 1].

    Source:   SparseCsrTensorMath.cu, convert_indices_from_coo_to_csr_cuda_kernel, torch 2.13.0: no
              assertion, none on the CPU, which writes out of bounds as well
    Cost:     one reduction over the coordinates, one copy of two numbers
    Passes:   aten._convert_indices_from_coo_to_csr(tensor([0, 2]), 3)
    Violates: aten._convert_indices_from_coo_to_csr(tensor([0, 3]), 3)
    """
    if self.dim() != 1 or self.dtype not in INDEX_DTYPES or lies_within(self, 0, size - 1):
        return None
    return out_of_range(
        self,
        argument="self",
        low=0,
        high=size - 1,
        place=f"the {counted(size, 'row')} of the compressed tensor",
        why="Rows are counted by writing where a coordinate points, outside the memory here.",
        device_text=None,
        size=size,
        is_silent=True,
        is_replay_safe=False,
    )


@guard("aten::_convert_indices_from_csr_to_coo", is_silent=True)
def row_starts_lie_in_columns(crow_indices: Tensor, col_indices: Tensor) -> Violation | None:
    """Every row with elements lies in [0, nnz] of the stored ones.

    Source:   SparseCsrTensorMath.cu, convert_indices_from_csr_to_coo_cuda_kernel, torch 2.13.0: no
              assertion, none on the CPU, which writes out of bounds as well
    Cost:     one reduction over the row starts, one copy of two numbers
    Passes:   aten._convert_indices_from_csr_to_coo(tensor([0, 2, 3]), tensor([0, 1, 0]))
    Violates: aten._convert_indices_from_csr_to_coo(tensor([0, 2, 4]), tensor([0, 1, 0]))
    """
    if crow_indices.dim() == 0 or crow_indices.shape[:-1] != col_indices.shape[:-1]:
        return None
    if col_indices.dtype != crow_indices.dtype:
        return None
    stored = col_indices.size(-1)
    return spans_lie_inside(
        crow_indices,
        stored,
        argument="crow_indices",
        place=f"the {counted(stored, 'element')} of {{related}}",
        why="A row is written from its start to the next one's, outside the memory here.",
        related="col_indices",
    )
