"""Device asserts of unpooling, segments, sparse layouts and `_assert_async`; unchecked values.

With some values that no CUDA kernel checks the CPU's would damage the process: they are repaired.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cudalens.simulate.asserts.rule import (
    INDEX_DTYPES,
    Arguments,
    Assertion,
    Outcome,
    Repair,
    Rule,
    assertion,
    clamped,
    dim_size,
    outside,
    table,
    truncated,
)

_UNPOOL2D = assertion("max_unpool2d")
_UNPOOL3D = assertion("max_unpool3d")
_SEGMENT_ND = assertion("segment_reduce_nd")
_SEGMENT_MEAN = assertion("segment_reduce_1d_mean")
_COMPRESSED = assertion("sparse_compressed_invariants")
_ASSERT_ASYNC = assertion("assert_async")
_NESTED = assertion("nested_index_put")
_MESSAGE_LIMIT = 255


def _max_unpool(site: Assertion, is_32_bit: bool, args: Arguments) -> Outcome:
    indices = args["indices"]
    plane = torch.Size(args["output_size"]).numel()
    if plane <= 0 or indices.dtype != torch.int64 or not outside(indices, 0, plane):
        return None
    compared = truncated(indices, is_signed=True) if is_32_bit else indices
    if not outside(compared, 0, plane):
        return Repair(repaired={"indices": compared.to(indices.dtype)})
    return site.hit(indices=clamped(indices, 0, plane))


def _fractional_max_pool_backward(rank: int, args: Arguments) -> Outcome:
    indices = args["indices"]
    plane = args["self"].shape[-rank:].numel()
    if plane == 0 or indices.dtype != torch.int64 or not outside(indices, 0, plane):
        return None
    compared = truncated(indices, is_signed=True) if rank == 2 else indices
    if not outside(compared, 0, plane):
        return Repair(repaired={"indices": compared.to(indices.dtype)})
    flat = compared.reshape(-1)
    first_bad = flat[(flat < 0) | (flat >= plane)][0]
    which = "too_large" if int(first_bad) >= plane else "negative"
    site = assertion(f"fractional_max_pool{rank}d_backward", f"fractional_max_pool{rank}d_{which}")
    return site.hit(indices=clamped(indices, 0, plane))


def _max_pool_backward(rank: int, lowest: int, args: Arguments) -> Outcome:
    """Repair indices that the CUDA kernels write to unchecked.

    lowest: -1 where it marks a window of padding, which the CPU kernel drops; else 0.
    """
    indices = args["indices"]
    plane = args["self"].shape[-rank:].numel()
    if plane == 0 or not outside(indices, lowest, plane):
        return None
    return Repair(repaired={"indices": clamped(indices, lowest, plane)})


def _embedding_dense_backward(args: Arguments) -> Outcome:
    """Repair indices that no kernel of this op checks."""
    indices, rows = args["indices"], args["num_weights"]
    if rows <= 0 or not outside(indices, 0, rows):
        return None
    return Repair(repaired={"indices": clamped(indices, 0, rows)})


def _assert_async(args: Arguments) -> Outcome:
    condition, message = args["self"], args.get("assert_msg", "")
    if condition.numel() != 1 or len(message) >= _MESSAGE_LIMIT or bool(condition != 0):
        return None
    stated = _NESTED if message == _NESTED.site.expression else _ASSERT_ASYNC
    stated = replace(stated, site=replace(stated.site, expression=message))
    return stated.hit(self=torch.ones_like(condition))


def _segment_reduce(args: Arguments) -> Outcome:
    data, lengths, offsets = args["data"], args["lengths"], args["offsets"]
    segments = offsets if lengths is None else lengths
    if segments is None or segments.numel() == 0 or segments.dtype not in INDEX_DTYPES:
        return None
    size = dim_size(data, args["axis"])
    # Lengths are checked on the host unless the caller says that they are safe to skip.
    if size is None or (lengths is not None and not args["unsafe"]):
        return None
    if lengths is None:
        name, repaired = "offsets", offsets.clamp(0, size).cummax(-1).values
        is_negative = bool((offsets.diff(dim=-1) < 0).any())
        is_bad = not torch.equal(repaired, offsets)
    else:
        name, repaired = "lengths", torch.zeros_like(lengths)
        is_negative = int(lengths.min()) < 0
        is_bad = is_negative or int(lengths.sum(-1).max()) > size
    if is_negative and (data.dim() > 1 or args["reduce"] == "mean"):
        return (_SEGMENT_ND if data.dim() > 1 else _SEGMENT_MEAN).hit(**{name: repaired})
    return Repair(repaired={name: repaired}) if is_bad else None


def _validate_compressed(args: Arguments) -> Outcome:
    compressed, plain = args["compressed_idx"], args["plain_idx"]
    has_shapes = (
        compressed.dim() == plain.dim() > 0
        and compressed.shape[:-1] == plain.shape[:-1]
        and compressed.size(-1) == args["cdim"] + 1
        and plain.size(-1) == args["nnz"]
        and compressed.dtype == plain.dtype
        and compressed.dtype in INDEX_DTYPES
    )
    if not has_shapes or _is_compressed_layout(compressed, plain, args["dim"]):
        return None
    return _COMPRESSED.hit(
        compressed_idx=torch.zeros_like(compressed),
        plain_idx=plain.new_empty((*plain.shape[:-1], 0)),
        nnz=0,
    )


def _is_compressed_layout(compressed: Tensor, plain: Tensor, size: int) -> bool:
    """Return whether index tensors keep the invariants of the compressed sparse layouts."""
    count = plain.size(-1)
    steps = compressed.diff(dim=-1)
    if bool((compressed[..., 0] != 0).any()) or bool((compressed[..., -1] != count).any()):
        return False
    if outside(steps, 0, size + 1) or outside(plain, 0, size):
        return False
    is_start = torch.zeros((*plain.shape[:-1], count + 1), dtype=torch.bool, device=plain.device)
    is_start.scatter_(-1, compressed.to(torch.int64), True)
    is_rising = plain.diff(dim=-1) > 0
    return bool((is_rising | is_start[..., 1:count]).all())


# --- values that no CUDA kernel checks ------------------------------------------------------------


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
    **table(partial(_max_unpool, _UNPOOL2D, True), "max_unpool2d", "max_unpool2d.out"),
    **table(partial(_max_unpool, _UNPOOL3D, False), "max_unpool3d", "max_unpool3d.out"),
    **{
        f"aten::fractional_max_pool{rank}d_backward{overload}": partial(
            _fractional_max_pool_backward, rank
        )
        for rank in (2, 3)
        for overload in ("", ".grad_input")
    },
    **{
        f"aten::{kind}{rank}d{name}_backward{overload}": partial(_max_pool_backward, rank, lowest)
        for kind, name, lowest in (
            ("max_pool", "_with_indices", -1),
            ("adaptive_max_pool", "", 0),
        )
        for rank in (2, 3)
        for overload in ("", ".grad_input")
    },
    **table(_embedding_dense_backward, "embedding_dense_backward", "embedding_dense_backward.out"),
    **table(_assert_async, "_assert_async", "_assert_async.msg"),
    **table(_segment_reduce, "segment_reduce", "segment_reduce.out"),
    **table(_validate_compressed, "_validate_compressed_sparse_indices"),
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
