"""Device asserts of unpooling, segments, sparse layouts and `_assert_async`."""

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
}
