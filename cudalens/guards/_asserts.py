"""The lines that CUDA prints for the asserts of the lookup and indexing kernels, torch 2.13.0.

Block and thread are left out: which thread prints first is not known before the launch.
"""

from __future__ import annotations

from torch import Tensor

from cudalens.guards._dims import counts_in_32_bits

_SMALL_INDEX_COUNT = 16
_VECTOR_BYTES = 16

INDEX = (
    "IndexKernel.cu:111: operator(): "
    'Assertion `-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed.'
)
ASSERT_ASYNC = "TensorCompare.cu:109: _assert_async_cuda_kernel: Assertion `` failed."
INDEX_FILL = (
    "IndexKernel.cu:154: operator(): "
    'Assertion `idx >= -self_dim_size && idx < self_dim_size && "index out of bounds"` failed.'
)
INDEX_COPY = (
    "IndexKernel.cu:193: operator(): "
    'Assertion `idx >= 0 && idx < self_dim_size && "index_copy_(): index out of bounds"` failed.'
)
TAKE_PUT = (
    "IndexKernel.cu:339: operator(): Assertion "
    '`idx < numel && idx >= -numel && "cuda_take_put_kernel() index out of bounds"` failed.'
)
MASKED_SCATTER = (
    "IndexKernel.cu:400: masked_scatter_size_check: Assertion `totalElements <= srcSize` failed."
)
GATHER_ROWS = (
    "IndexKernelUtils.cu:19: vectorized_gather_kernel: Assertion `ind >=0 && ind < ind_dim_size && "
    '"vectorized gather kernel index out of bounds"` failed.'
)
GATHER_SCATTER = (
    "ScatterGatherKernel.cu:203: operator(): Assertion `idx_dim >= 0 && idx_dim < index_size && "
    '"scatter gather kernel index out of bounds"` failed.'
)
SCATTER_VALUE = (
    "ScatterGatherKernel.cu:449: operator(): "
    'Assertion `idx_dim >= 0 && idx_dim < index_size && "index out of bounds"` failed.'
)
SCATTER_ADD_ROWS = (
    "IndexKernelUtils.cu:122: vectorized_scatter_add_kernel: Assertion `ind >= 0 && "
    'ind < self_dim_size && "vectorized scatter add kernel index out of bounds"` failed.'
)
INDEX_SELECT_SMALL = (
    "Indexing.cu:1524: indexSelectSmallIndex: Assertion `srcIndex < srcSelectDimSize` failed."
)
INDEX_SELECT_SPARSE = (
    "Indexing.cu:1854: operator(): "
    'Assertion `idx >= -size && idx < size && "index_select(): index out of bounds"` failed.'
)
_INDEX_ADD_SMALL = (
    "Indexing.cu:1030: indexFuncSmallIndex: Assertion `dstIndex < dstAddDimSize` failed."
)
_INDEX_ADD_LARGE = (
    "Indexing.cu:1089: indexFuncLargeIndex: Assertion `dstIndex < dstAddDimSize` failed."
)


def index_add_text(index: Tensor) -> str:
    """Return the line of the kernel that ``index_add`` picks by the number of indices."""
    return _INDEX_ADD_SMALL if index.numel() <= _SMALL_INDEX_COUNT else _INDEX_ADD_LARGE


def compares_32_bits(source: Tensor, index: Tensor) -> bool:
    """Return whether ``index_select`` and ``embedding`` cut their indices to 32 bits."""
    return index.numel() <= _SMALL_INDEX_COUNT and counts_in_32_bits(source, index)


def lookup_text(source: Tensor, dim: int, index: Tensor) -> str:
    """Return the line of the kernel that ``index_select`` and ``embedding`` pick."""
    if index.numel() <= _SMALL_INDEX_COUNT:
        return INDEX_SELECT_SMALL
    return GATHER_ROWS if copies_whole_rows(source, dim) else GATHER_SCATTER


def gather_text(source: Tensor, dim: int, index: Tensor) -> str:
    """Return the line of the kernel that ``gather`` picks: an expanded index copies whole rows."""
    is_expanded = index.dim() > 1 and not any(index.stride()[1:])
    return GATHER_ROWS if is_expanded and copies_whole_rows(source, dim) else GATHER_SCATTER


def scatter_add_text(target: Tensor, dim: int, index: Tensor) -> str:
    """Return the line of the kernel that ``scatter_add`` picks: an expanded index adds whole
    rows.
    """
    is_expanded = index.dim() > 1 and not any(index.stride()[1:])
    return SCATTER_ADD_ROWS if is_expanded and copies_whole_rows(target, dim) else GATHER_SCATTER


def copies_whole_rows(source: Tensor, dim: int) -> bool:
    """Return whether the row kernels apply: contiguous rows in multiples of 16 bytes."""
    if source.dim() < 2 or dim % source.dim() != 0 or not source.is_contiguous():
        return False
    row_bytes = source.stride(0) * source.element_size()
    return row_bytes % _VECTOR_BYTES == 0 and source.data_ptr() % _VECTOR_BYTES == 0
