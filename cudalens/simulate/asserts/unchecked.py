"""Values that no CUDA kernel checks, and with which that of the CPU would damage the process."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from cudalens.simulate.asserts.rule import (
    INDEX_DTYPES,
    Arguments,
    Outcome,
    Repair,
    Rule,
    clamped,
    dim_size,
    outside,
    table,
)

_MODE_MAX = 2


def _bag_backward(args: Arguments) -> Outcome:
    rows = args["num_weights"]
    name = "maximum_indices" if args["mode"] == _MODE_MAX else "indices"
    if rows <= 0 or not outside(args[name], 0, rows):
        return None
    return Repair(repaired={name: clamped(args[name], 0, rows)})


def _bag_weights_backward(args: Arguments) -> Outcome:
    indices, rows = args["indices"], dim_size(args["weight"], 0)
    if not rows or not outside(indices, 0, rows):
        return None
    return Repair(repaired={"indices": clamped(indices, 0, rows)})


def _segment_reduce_backward(args: Arguments) -> Outcome:
    size = dim_size(args["data"], args["axis"])
    name = "offsets" if args["lengths"] is None else "lengths"
    segments = args[name]
    if size is None or segments is None or segments.dtype not in INDEX_DTYPES:
        return None
    if name == "offsets":
        return _rising(name, segments, size)
    if segments.numel() == 0 or int(segments.min()) >= 0 >= int(segments.sum(-1).max()) - size:
        return None
    return Repair(repaired={name: torch.zeros_like(segments)})


def _to_rows(args: Arguments) -> Outcome:
    rows, size = args["self"], args["size"]
    if size <= 0 or not outside(rows, 0, size):
        return None
    return Repair(repaired={"self": clamped(rows, 0, size)})


def _from_rows(args: Arguments) -> Outcome:
    starts, columns = args["crow_indices"], args["col_indices"]
    if starts.dim() == 0 or columns.dim() == 0 or starts.dtype not in INDEX_DTYPES:
        return None
    return _rising("crow_indices", starts, columns.size(-1))


def _jagged_to_padded(args: Arguments) -> Outcome:
    size, offsets = dim_size(args["values"], 0), args["offsets"]
    if size is None or len(offsets) != 1 or offsets[0].dtype not in INDEX_DTYPES:
        return None
    found = _rising("offsets", offsets[0], size)
    return found and Repair(repaired={"offsets": [found.repaired["offsets"]]})


def _rising(name: str, offsets: Tensor, size: int) -> Repair | None:
    if offsets.numel() == 0:
        return None
    repaired = offsets.clamp(0, size).cummax(-1).values
    return None if torch.equal(repaired, offsets) else Repair(repaired={name: repaired})


def _pivots(factors: str, name: str, is_signed: bool, args: Arguments) -> Outcome:
    """Repair pivots; those of LDL factors are negative where two rows belong together."""
    pivots, rows = args[name], dim_size(args[factors], -2)
    if not rows or pivots.dtype != torch.int32 or pivots.numel() == 0:
        return None
    sizes = pivots.to(torch.int64).abs() if is_signed else pivots
    if not outside(sizes, 1, rows + 1):
        return None
    plain = torch.arange(1, pivots.size(-1) + 1, dtype=torch.int32) if pivots.dim() else 1
    return Repair(repaired={name: torch.zeros_like(pivots) + plain})


RULES: dict[str, Rule] = {
    **table(_bag_backward, "_embedding_bag_backward"),
    **table(_bag_backward, "_embedding_bag_dense_backward", "_embedding_bag_dense_backward.out"),
    **table(_bag_weights_backward, "_embedding_bag_per_sample_weights_backward"),
    **table(_bag_weights_backward, "_embedding_bag_per_sample_weights_backward.out"),
    **table(_segment_reduce_backward, "_segment_reduce_backward", "_segment_reduce_backward.out"),
    **table(_to_rows, "_convert_indices_from_coo_to_csr", "_convert_indices_from_coo_to_csr.out"),
    **table(_from_rows, "_convert_indices_from_csr_to_coo", "_convert_indices_from_csr_to_coo.out"),
    **table(_jagged_to_padded, "_jagged_to_padded_dense_forward"),
    **table(partial(_pivots, "LU", "pivots", False), "linalg_lu_solve", "linalg_lu_solve.out"),
    **table(partial(_pivots, "LD", "pivots", True), "linalg_ldl_solve", "linalg_ldl_solve.out"),
    **table(partial(_pivots, "LU_data", "LU_pivots", False), "lu_unpack", "lu_unpack.out"),
}
