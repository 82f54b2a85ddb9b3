"""Device asserts of losses, sampling, lengths and layouts; values that no CUDA kernel checks.

With some of the latter the CPU's kernels would damage the process: they are repaired.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from cudalens.core.device_asserts import assert_site
from cudalens.simulate.asserts.rule import (
    INDEX_DTYPES,
    Arguments,
    Outcome,
    Repair,
    clamped,
    cut_to_32_bits,
    dim_size,
    hit,
    narrowed,
    outside,
    rule,
)

_NO_REDUCTION = 0
_BAG_MODE_MAX = 2


# --- losses ---------------------------------------------------------------------------------------


@rule("nll_loss_forward", record="nll_loss_forward")
@rule("nll_loss_backward", record="nll_loss_backward")
def _nll_loss(args: Arguments, record: str) -> Outcome:
    scores, target = args["self"], args["target"]
    is_single = scores.dim() == 1 and target.dim() == 0
    is_batch = scores.dim() in (1, 2) and target.shape == scores.shape[:1]
    if target.dtype not in (torch.int64, torch.uint8) or not (is_single or is_batch):
        return None
    if scores.dim() == 2 and args["reduction"] == _NO_REDUCTION:
        return _bad_target(args, scores.size(-1), f"{record}_none", f"{record}_none")
    key = f"{record}_{scores.dim()}d"
    return _bad_target(args, scores.size(-1), f"{record}_reduced", key)


@rule("nll_loss2d_forward", record="nll_loss2d_forward")
@rule("nll_loss2d_backward", record="nll_loss2d_backward")
def _nll_loss2d(args: Arguments, record: str) -> Outcome:
    scores, target = args["self"], args["target"]
    if scores.dim() != 4 or target.dtype != torch.int64:
        return None
    if target.shape != (scores.size(0), *scores.shape[2:]):
        return None
    is_none = args["reduction"] == _NO_REDUCTION
    key = f"{record}_none" if is_none else record
    if record == "nll_loss2d_backward":
        record = key if is_none else f"{record}_reduced"
    return _bad_target(args, scores.size(1), record, key)


def _bad_target(args: Arguments, classes: int, record: str, key: str) -> Outcome:
    target, ignored = args["target"], int(args["ignore_index"])
    # Compared as int64: -100 would turn into 156 in a comparison with uint8.
    wide = target.to(torch.int64)
    bad = (wide != ignored) & ((wide < 0) | (wide >= classes))
    if not bool(bad.any()):
        return None
    # Compiled for uint8 the kernels test the upper bound alone.
    key = f"{key}_uint8" if target.dtype == torch.uint8 else key
    if not classes:
        # There is no valid class, and 8 bits may not hold what is ignored.
        return hit(record, key, target=torch.zeros_like(target), ignore_index=0)
    return hit(record, key, target=torch.where(bad, torch.zeros_like(target), target))


@rule("multi_margin_loss")
def _multi_margin_loss(args: Arguments) -> Outcome:
    target, classes = args["target"], dim_size(args["self"], -1)
    if not classes or target.dtype != torch.int64 or not outside(target, 0, classes):
        return None
    repair = narrowed("target", target, classes, is_signed=True)
    return repair or hit("multi_margin_loss", target=clamped(target, 0, classes))


@rule("binary_cross_entropy")
def _binary_cross_entropy(args: Arguments) -> Outcome:
    """Check the input first: one thread meets its assertion before that of the target."""
    probabilities, target = args["self"], args["target"]
    if not (probabilities.is_floating_point() and target.is_floating_point()):
        return None
    is_input_bad = not bool(_are_probabilities(probabilities).all())
    if not is_input_bad and bool(_are_probabilities(target).all()):
        return None
    record = "bce_input" if is_input_bad else "bce_target"
    return hit(record, self=_probabilities(probabilities), target=_probabilities(target))


def _are_probabilities(values: Tensor) -> Tensor:
    """Mark what lies in 0 ... 1, both included; NaN does not."""
    return (values >= 0) & (values <= 1)


def _probabilities(values: Tensor) -> Tensor:
    return values.detach().nan_to_num(nan=0.0).clamp(0, 1)


# --- sampling and repeats -------------------------------------------------------------------------


@rule("multinomial")
def _multinomial(args: Arguments) -> Outcome:
    weights, count = args["self"], args["num_samples"]
    if weights.dim() not in (1, 2) or not weights.is_floating_point() or weights.numel() == 0:
        return None
    if count <= 0 or (not args["replacement"] and count > weights.size(-1)):
        return None
    total = weights.sum(-1)
    if args["replacement"] and count > 1:
        # The binary search kernel; sums are taken in the dtype of the weights.
        broken = (weights < 0).any(-1)
        bad = broken | ~(total > 0) | ~total.isfinite() | ~weights.isfinite().all(-1)
        record, key = ("multinomial_renorm" if bool(broken.any()) else "multinomial_sum"), None
    else:
        # For one sample, or without replacement, torch checks before it launches.
        broken = ~((weights >= 0) & (weights < torch.inf)).all(-1)
        bad = broken | (total == 0)
        record = "multinomial_fast"
        key = "multinomial_fast_weight" if bool(broken.any()) else "multinomial_fast_sum"
    if not bool(bad.any()):
        return None
    return hit(record, key, self=weights.masked_fill(bad.unsqueeze(-1), 1))


@rule("bernoulli", name="self")
@rule("bernoulli.Tensor", name="p")
def _bernoulli(args: Arguments, name: str) -> Outcome:
    p = args[name]
    if not p.is_floating_point() or bool((valid := _are_probabilities(p).reshape(-1)).all()):
        return None
    # The kernel is unrolled four times; each copy has its own line and variable.
    copy = int(valid.to(torch.int8).argmin()) % 4 + 1
    return hit("bernoulli_tensor", f"bernoulli_p{copy}", **{name: _probabilities(p)})


@rule("poisson")
def _poisson(args: Arguments) -> Outcome:
    rate = args["self"]
    if not rate.is_floating_point() or bool((rate >= 0).all()):
        return None
    return hit("poisson", self=rate.detach().nan_to_num(nan=0.0).clamp(min=0))


@rule("repeat_interleave.Tensor")
def _repeat_interleave(args: Arguments) -> Outcome:
    repeats, output_size = args["repeats"], args["output_size"]
    # Without an output size the host computes and checks the total.
    if output_size is None or output_size < 0:
        return None
    if repeats.dim() != 1 or repeats.numel() == 0 or repeats.dtype not in INDEX_DTYPES:
        return None
    is_size_wrong = int(repeats.sum()) != output_size
    if not is_size_wrong and int(repeats.min()) >= 0:
        return None
    replaced = torch.zeros_like(repeats)
    replaced[0] = output_size
    which = "size" if is_size_wrong else "negative"
    return hit(f"repeat_interleave_{which}", repeats=replaced)


# --- pooling --------------------------------------------------------------------------------------


@rule("max_unpool2d", record="max_unpool2d", is_32_bit=True)
@rule("max_unpool3d", record="max_unpool3d", is_32_bit=False)
def _max_unpool(args: Arguments, record: str, is_32_bit: bool) -> Outcome:
    indices, plane = args["indices"], torch.Size(args["output_size"]).numel()
    if plane <= 0 or indices.dtype != torch.int64 or not outside(indices, 0, plane):
        return None
    repair = narrowed("indices", indices, plane, is_signed=True) if is_32_bit else None
    return repair or hit(record, indices=clamped(indices, 0, plane))


@rule("fractional_max_pool2d_backward", rank=2)
@rule("fractional_max_pool3d_backward", rank=3)
def _fractional_max_pool_backward(args: Arguments, rank: int) -> Outcome:
    indices, plane = args["indices"], args["self"].shape[-rank:].numel()
    if plane == 0 or indices.dtype != torch.int64 or not outside(indices, 0, plane):
        return None
    compared = cut_to_32_bits(indices, is_signed=True) if rank == 2 else indices
    bad = compared[(compared < 0) | (compared >= plane)]
    if bad.numel() == 0:
        return Repair(repaired={"indices": compared.to(indices.dtype)})
    which = "too_large" if int(bad[0]) >= plane else "negative"
    record, key = f"fractional_max_pool{rank}d_backward", f"fractional_max_pool{rank}d_{which}"
    return hit(record, key, indices=clamped(indices, 0, plane))


# --- statements, segments and layouts -------------------------------------------------------------


_MESSAGE_LIMIT = 255


@rule("_assert_async _assert_async.msg")
def _assert_async(args: Arguments) -> Outcome:
    condition, message = args["self"], args.get("assert_msg", "")
    if condition.numel() != 1 or len(message) >= _MESSAGE_LIMIT or bool(condition != 0):
        return None
    is_nested = message == assert_site("nested_index_put").expression
    record = "nested_index_put" if is_nested else "assert_async"
    site = replace(assert_site(record), expression=message)
    return hit(record, site, self=torch.ones_like(condition))


@rule("segment_reduce")
def _segment_reduce(args: Arguments) -> Outcome:
    data, lengths, offsets = args["data"], args["lengths"], args["offsets"]
    segments = offsets if lengths is None else lengths
    if segments is None or segments.numel() == 0 or segments.dtype not in INDEX_DTYPES:
        return None
    size = dim_size(data, args["axis"])
    # Lengths are checked on the host unless the caller says that they are safe to skip.
    if size is None or (lengths is not None and not args["unsafe"]):
        return None
    repair = _segments_in_data(args, size)
    widths = offsets.diff(dim=-1) if lengths is None else lengths
    is_asserted = data.dim() > 1 or args["reduce"] == "mean"
    if repair is None or not is_asserted or not bool((widths < 0).any()):
        return repair
    record = "segment_reduce_nd" if data.dim() > 1 else "segment_reduce_1d_mean"
    return hit(record, **repair.repaired)


@rule("_segment_reduce_backward")
def _segment_reduce_backward(args: Arguments) -> Outcome:
    size = dim_size(args["data"], args["axis"])
    segments = args["offsets"] if args["lengths"] is None else args["lengths"]
    if size is None or segments is None or segments.dtype not in INDEX_DTYPES:
        return None
    return _segments_in_data(args, size)


def _segments_in_data(args: Arguments, size: int) -> Repair | None:
    """Return the repair of lengths or offsets that are negative, or leave the data."""
    lengths = args["lengths"]
    if lengths is None:
        return _rising("offsets", args["offsets"], size)
    if lengths.numel() == 0 or int(lengths.min()) >= 0 >= int(lengths.sum(-1).max()) - size:
        return None
    return Repair(repaired={"lengths": torch.zeros_like(lengths)})


def _rising(name: str, offsets: Tensor, size: int) -> Repair | None:
    if offsets.numel() == 0:
        return None
    repaired = offsets.clamp(0, size).cummax(-1).values
    return None if torch.equal(repaired, offsets) else Repair(repaired={name: repaired})


@rule("_validate_compressed_sparse_indices")
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
    return hit(
        "sparse_compressed_invariants",
        compressed_idx=torch.zeros_like(compressed),
        plain_idx=plain.new_empty((*plain.shape[:-1], 0)),
        nnz=0,
    )


def _is_compressed_layout(compressed: Tensor, plain: Tensor, size: int) -> bool:
    """Return whether index tensors keep the invariants of the compressed sparse layouts."""
    count = plain.size(-1)
    if bool((compressed[..., 0] != 0).any()) or bool((compressed[..., -1] != count).any()):
        return False
    if outside(compressed.diff(dim=-1), 0, size + 1) or outside(plain, 0, size):
        return False
    is_start = torch.zeros((*plain.shape[:-1], count + 1), dtype=torch.bool, device=plain.device)
    is_start.scatter_(-1, compressed.to(torch.int64), True)
    is_rising = plain.diff(dim=-1) > 0
    return bool((is_rising | is_start[..., 1:count]).all())


# --- values that no CUDA kernel checks ------------------------------------------------------------


Size = Callable[[Arguments], int | None]


def _classes(args: Arguments) -> int | None:
    return dim_size(args["self"], -1)


def _num_weights(args: Arguments) -> int | None:
    return int(args["num_weights"])


@rule("multi_margin_loss_backward", name="target", size=_classes)
@rule("multilabel_margin_loss_forward", name="target", size=_classes, lowest=-1)
@rule("multilabel_margin_loss_backward", name="target", size=_classes, lowest=-1)
@rule("_ctc_loss _ctc_loss.Tensor", name="targets", size=lambda a: dim_size(a["log_probs"], -1))
@rule("_ctc_loss_backward", name="targets", size=lambda a: dim_size(a["log_probs"], -1))
@rule("_ctc_loss_backward.Tensor", name="targets", size=lambda a: dim_size(a["log_probs"], -1))
@rule("embedding_dense_backward", name="indices", size=_num_weights)
@rule(
    "_embedding_bag_per_sample_weights_backward",
    name="indices",
    size=lambda a: dim_size(a["weight"], 0),
)
@rule("_convert_indices_from_coo_to_csr", name="self", size=lambda a: a["size"])
@rule("max_pool2d_with_indices_backward", name="indices", size=lambda a: _plane(a, 2), lowest=-1)
@rule("max_pool3d_with_indices_backward", name="indices", size=lambda a: _plane(a, 3), lowest=-1)
@rule("adaptive_max_pool2d_backward", name="indices", size=lambda a: _plane(a, 2))
@rule("adaptive_max_pool3d_backward", name="indices", size=lambda a: _plane(a, 3))
def _moved_inside(args: Arguments, name: str, size: Size, lowest: int = 0) -> Outcome:
    """Return the repair of indices.

    lowest: -1 where that is a mark, such as a window of padding, which the CPU kernel drops.
    """
    high = size(args)
    if high is None or high <= 0 or not outside(args[name], lowest, high):
        return None
    return Repair(repaired={name: clamped(args[name], lowest, high)})


def _plane(args: Arguments, rank: int) -> int:
    return int(args["self"].shape[-rank:].numel())


@rule("_embedding_bag_backward _embedding_bag_dense_backward")
def _bag_backward(args: Arguments) -> Outcome:
    name = "maximum_indices" if args["mode"] == _BAG_MODE_MAX else "indices"
    return _moved_inside(args, name, _num_weights)


@rule("_convert_indices_from_csr_to_coo")
def _from_rows(args: Arguments) -> Outcome:
    starts, columns = args["crow_indices"], args["col_indices"]
    if starts.dim() == 0 or columns.dim() == 0 or starts.dtype not in INDEX_DTYPES:
        return None
    return _rising("crow_indices", starts, columns.size(-1))


@rule("_jagged_to_padded_dense_forward")
def _jagged_to_padded(args: Arguments) -> Outcome:
    size, offsets = dim_size(args["values"], 0), args["offsets"]
    if size is None or len(offsets) != 1 or offsets[0].dtype not in INDEX_DTYPES:
        return None
    found = _rising("offsets", offsets[0], size)
    return found and Repair(repaired={"offsets": [found.repaired["offsets"]]})


@rule("linalg_lu_solve", factors="LU", name="pivots")
@rule("linalg_ldl_solve", factors="LD", name="pivots", is_signed=True)
@rule("lu_unpack", factors="LU_data", name="LU_pivots")
def _pivots(args: Arguments, factors: str, name: str, is_signed: bool = False) -> Outcome:
    """Repair pivots; those of LDL factors are negative where two rows belong together."""
    pivots, rows = args[name], dim_size(args[factors], -2)
    if not rows or pivots.dtype != torch.int32 or pivots.numel() == 0:
        return None
    if not outside(pivots.to(torch.int64).abs() if is_signed else pivots, 1, rows + 1):
        return None
    plain = torch.arange(1, pivots.size(-1) + 1, dtype=torch.int32) if pivots.dim() else 1
    return Repair(repaired={name: torch.zeros_like(pivots) + plain})
