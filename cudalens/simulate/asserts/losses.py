"""Device asserts of the losses, of random sampling and of `repeat_interleave` with a size."""

from __future__ import annotations

import torch
from torch import Tensor

from cudalens.simulate.asserts.rule import (
    INDEX_DTYPES,
    Arguments,
    Outcome,
    Repair,
    Rule,
    all_between,
    assertion,
    clamped,
    dim_size,
    outside,
    table,
    truncated,
)

_NO_REDUCTION = 0


_NLL_FORWARD = {
    "none": ("nll_loss_forward_none", "nll_loss_forward_none"),
    "1d": ("nll_loss_forward_reduced", "nll_loss_forward_1d"),
    "2d": ("nll_loss_forward_reduced", "nll_loss_forward_2d"),
}
_NLL_BACKWARD = {
    "none": ("nll_loss_backward_none", "nll_loss_backward_none"),
    "1d": ("nll_loss_backward_reduced", "nll_loss_backward_1d"),
    "2d": ("nll_loss_backward_reduced", "nll_loss_backward_2d"),
}
_NLL2D_FORWARD = {
    "none": ("nll_loss2d_forward", "nll_loss2d_forward_none"),
    "2d": ("nll_loss2d_forward", "nll_loss2d_forward"),
}
_NLL2D_BACKWARD = {
    "none": ("nll_loss2d_backward_none", "nll_loss2d_backward_none"),
    "2d": ("nll_loss2d_backward_reduced", "nll_loss2d_backward"),
}
_BCE_INPUT = assertion("bce_input")
_BCE_TARGET = assertion("bce_target")
_MULTI_MARGIN = assertion("multi_margin_loss")


def _check_target(args: Arguments, classes: int, record: str, key: str) -> Outcome:
    target, ignored = args["target"], int(args["ignore_index"])
    # Compared as int64: -100 would turn into 156 in a comparison with uint8.
    wide = target.to(torch.int64)
    bad = (wide != ignored) & ((wide < 0) | (wide >= classes))
    if not bool(bad.any()):
        return None
    # Compiled for uint8 the kernels test the upper bound alone.
    site = assertion(record, f"{key}_uint8" if target.dtype == torch.uint8 else key)
    if not classes:
        # There is no valid class, and 8 bits may not hold what is ignored.
        return site.hit(target=torch.zeros_like(target), ignore_index=0)
    return site.hit(target=torch.where(bad, torch.zeros_like(target), target))


def _nll_loss(args: Arguments, sites: dict[str, tuple[str, str]]) -> Outcome:
    scores, target = args["self"], args["target"]
    is_single = scores.dim() == 1 and target.dim() == 0
    is_batch = scores.dim() in (1, 2) and target.shape == scores.shape[:1]
    if target.dtype not in (torch.int64, torch.uint8) or not (is_single or is_batch):
        return None
    per_sample = "none" if args["reduction"] == _NO_REDUCTION else "2d"
    return _check_target(args, scores.size(-1), *sites["1d" if scores.dim() == 1 else per_sample])


def _nll_loss2d(args: Arguments, sites: dict[str, tuple[str, str]]) -> Outcome:
    scores, target = args["self"], args["target"]
    if scores.dim() != 4 or target.dtype != torch.int64:
        return None
    if target.shape != (scores.size(0), *scores.shape[2:]):
        return None
    key = "none" if args["reduction"] == _NO_REDUCTION else "2d"
    return _check_target(args, scores.size(1), *sites[key])


def _nll_loss_forward(args: Arguments) -> Outcome:
    return _nll_loss(args, _NLL_FORWARD)


def _nll_loss_backward(args: Arguments) -> Outcome:
    return _nll_loss(args, _NLL_BACKWARD)


def _nll_loss2d_forward(args: Arguments) -> Outcome:
    return _nll_loss2d(args, _NLL2D_FORWARD)


def _nll_loss2d_backward(args: Arguments) -> Outcome:
    return _nll_loss2d(args, _NLL2D_BACKWARD)


def _binary_cross_entropy(args: Arguments) -> Outcome:
    """Check the input first: one thread meets its assertion before that of the target."""
    probabilities, target = args["self"], args["target"]
    if not (probabilities.is_floating_point() and target.is_floating_point()):
        return None
    is_input_bad = not all_between(probabilities, 0, 1)
    is_target_bad = not all_between(target, 0, 1)
    if not (is_input_bad or is_target_bad):
        return None
    site = _BCE_INPUT if is_input_bad else _BCE_TARGET
    return site.hit(self=_probabilities(probabilities), target=_probabilities(target))


def _probabilities(values: Tensor) -> Tensor:
    return values.detach().nan_to_num(nan=0.0).clamp(0, 1)


def _multi_margin_loss(args: Arguments) -> Outcome:
    target, classes = args["target"], dim_size(args["self"], -1)
    if not classes or target.dtype != torch.int64 or not outside(target, 0, classes):
        return None
    compared = truncated(target, is_signed=True)
    if not outside(compared, 0, classes):
        return Repair(repaired={"target": compared.to(target.dtype)})
    return _MULTI_MARGIN.hit(target=clamped(target, 0, classes))


def _multi_margin_loss_backward(args: Arguments) -> Outcome:
    return _silent_target(args, 0)


def _multilabel_margin_loss(args: Arguments) -> Outcome:
    return _silent_target(args, -1)


def _silent_target(args: Arguments, low: int) -> Outcome:
    """Repair a target that the CUDA kernel of a margin loss takes as it is."""
    target, classes = args["target"], dim_size(args["self"], -1)
    if not classes or not outside(target, low, classes):
        return None
    return Repair(repaired={"target": clamped(target, low, classes)})


def _ctc_loss(args: Arguments) -> Outcome:
    """Repair labels that no CTC kernel checks: the CPU one would read out of bounds as well."""
    targets, classes = args["targets"], dim_size(args["log_probs"], -1)
    if not classes or not outside(targets, 0, classes):
        return None
    return Repair(repaired={"targets": clamped(targets, 0, classes)})


# --- sampling and repeats -------------------------------------------------------------------------


_RENORM = assertion("multinomial_renorm")
_SUM = assertion("multinomial_sum")
_FAST_ENTRY = assertion("multinomial_fast", "multinomial_fast_weight")
_FAST_SUM = assertion("multinomial_fast", "multinomial_fast_sum")
# The kernel is unrolled four times; each copy has its own line and variable.
_BERNOULLI = tuple(assertion("bernoulli_tensor", f"bernoulli_p{n}") for n in (1, 2, 3, 4))
_POISSON = assertion("poisson")
_REPEAT_SIZE = assertion("repeat_interleave_size")
_REPEAT_NEGATIVE = assertion("repeat_interleave_negative")


def _multinomial(args: Arguments) -> Outcome:
    weights, count = args["self"], args["num_samples"]
    if weights.dim() not in (1, 2) or not weights.is_floating_point() or weights.numel() == 0:
        return None
    if count <= 0 or (not args["replacement"] and count > weights.size(-1)):
        return None
    if args["replacement"] and count > 1:
        return _sample_by_search(weights)
    return _sample_by_race(weights)


def _sample_by_search(weights: Tensor) -> Outcome:
    """Check rows as the binary search kernel does; sums are taken in the dtype of the weights."""
    negative = (weights < 0).any(-1)
    total = weights.sum(-1)
    bad = negative | ~(total > 0) | ~total.isfinite() | ~weights.isfinite().all(-1)
    if not bool(bad.any()):
        return None
    site = _RENORM if bool(negative.any()) else _SUM
    return site.hit(self=_uniform_where(bad, weights))


def _sample_by_race(weights: Tensor) -> Outcome:
    """Check as the path for one sample, or without replacement, does before it launches."""
    invalid = ~((weights >= 0) & (weights < torch.inf)).all(-1)
    empty = weights.sum(-1) == 0
    bad = invalid | empty
    if not bool(bad.any()):
        return None
    site = _FAST_ENTRY if bool(invalid.any()) else _FAST_SUM
    return site.hit(self=_uniform_where(bad, weights))


def _uniform_where(bad: Tensor, weights: Tensor) -> Tensor:
    return torch.where(bad.unsqueeze(-1), torch.ones_like(weights), weights)


def _bernoulli_self(args: Arguments) -> Outcome:
    return _bernoulli(args["self"], "self")


def _bernoulli_p(args: Arguments) -> Outcome:
    return _bernoulli(args["p"], "p")


def _bernoulli(p: Tensor, name: str) -> Outcome:
    if not p.is_floating_point() or all_between(p, 0, 1):
        return None
    valid = ((p >= 0) & (p <= 1)).reshape(-1)
    first_bad = int(valid.to(torch.int8).argmin())
    in_range = p.detach().nan_to_num(nan=0.0).clamp(0, 1)
    return _BERNOULLI[first_bad % len(_BERNOULLI)].hit(**{name: in_range})


def _poisson(args: Arguments) -> Outcome:
    rate = args["self"]
    if not rate.is_floating_point() or bool((rate >= 0).all()):
        return None
    return _POISSON.hit(self=rate.detach().nan_to_num(nan=0.0).clamp(min=0))


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
    return (_REPEAT_SIZE if is_size_wrong else _REPEAT_NEGATIVE).hit(repeats=replaced)


RULES: dict[str, Rule] = {
    **table(_nll_loss_forward, "nll_loss_forward", "nll_loss_forward.output"),
    **table(_nll_loss_backward, "nll_loss_backward", "nll_loss_backward.grad_input"),
    **table(_nll_loss2d_forward, "nll_loss2d_forward", "nll_loss2d_forward.output"),
    **table(_nll_loss2d_backward, "nll_loss2d_backward", "nll_loss2d_backward.grad_input"),
    **table(_binary_cross_entropy, "binary_cross_entropy", "binary_cross_entropy.out"),
    **table(_multi_margin_loss, "multi_margin_loss", "multi_margin_loss.out"),
    **table(_multi_margin_loss_backward, "multi_margin_loss_backward"),
    **table(_multi_margin_loss_backward, "multi_margin_loss_backward.grad_input"),
    **table(_multilabel_margin_loss, "multilabel_margin_loss_forward"),
    **table(_multilabel_margin_loss, "multilabel_margin_loss_forward.output"),
    **table(_multilabel_margin_loss, "multilabel_margin_loss_backward"),
    **table(_multilabel_margin_loss, "multilabel_margin_loss_backward.grad_input"),
    **table(_ctc_loss, "_ctc_loss", "_ctc_loss.Tensor"),
    **table(_ctc_loss, "_ctc_loss_backward", "_ctc_loss_backward.Tensor"),
    **table(_multinomial, "multinomial", "multinomial.out"),
    **table(_bernoulli_self, "bernoulli", "bernoulli.out"),
    **table(_bernoulli_p, "bernoulli.Tensor", "bernoulli.Tensor_out", "bernoulli_.Tensor"),
    **table(_poisson, "poisson", "poisson.out"),
    **table(_repeat_interleave, "repeat_interleave.Tensor", "repeat_interleave.Tensor_out"),
}
