"""Device asserts of unpooling, segments, sparse layouts and `_assert_async`."""

from __future__ import annotations

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
    async_assertion,
    clamped,
    dim_size,
    outside,
    table,
    truncated,
)

_UNPOOL2D = Assertion(
    record="max_unpool2d",
    site="MaxUnpooling.cu:47",
    function="max_unpooling2d_forward_kernel",
    expression="maxind >= 0 && maxind < outputImageSize",
)
_UNPOOL3D = Assertion(
    record="max_unpool3d",
    site="MaxUnpooling.cu:69",
    function="max_unpooling3d_forward_kernel",
    expression="index >= 0 && index < outputImageSize",
)


def _fractional_sites(
    rank: int, kernel: str, negative_line: int, large_line: int, outermost: str
) -> tuple[Assertion, Assertion]:
    """Return the sites for a negative index and for one beyond the plane."""
    site = f"FractionalMaxPool{rank}d.cu"
    record = f"fractional_max_pool{rank}d_backward"
    return (
        Assertion(
            record=record,
            site=f"{site}:{negative_line}",
            function=kernel,
            expression="index >= 0",
        ),
        Assertion(
            record=record,
            site=f"{site}:{large_line}",
            function=kernel,
            expression=f"{outermost} < gradInput.size(2)",
        ),
    )


_FRACTIONAL = {
    2: _fractional_sites(2, "fractional_max_pool2d_backward_out_cuda_frame", 120, 123, "inputH"),
    3: _fractional_sites(3, "fractional_max_pool3d_backward_out_frame", 140, 146, "inputT"),
}
_SEGMENT_ND = Assertion(
    record="segment_reduce_nd",
    site="SegmentReduce.cu:146",
    function="segment_reduce_forward_kernel",
    expression="lengths_data[lengths_idx] >= 0",
)
_SEGMENT_MEAN = Assertion(
    record="segment_reduce_1d_mean",
    site="SegmentReduce.cu:78",
    function="post_sum_div_kernel",
    expression="lengths_data[index] >= 0",
)
_COMPRESSED = Assertion(
    record="sparse_compressed_invariants",
    site="ValidateCompressedIndicesCommon.h:44",
    function="_assert",
    expression="cond && message",
)
_NESTED_MESSAGE = "Some indices in the ragged dimension are out of bounds!"
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
    is_large = int(first_bad) >= plane
    return _FRACTIONAL[rank][is_large].hit(indices=clamped(indices, 0, plane))


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
    record = "nested_index_put" if message == _NESTED_MESSAGE else "assert_async"
    return async_assertion(record, message).hit(self=torch.ones_like(condition))


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
