"""Device asserts of random sampling and of `repeat_interleave` with an output size."""

from __future__ import annotations

import torch
from torch import Tensor

from cudalens.simulate.asserts.rule import (
    INDEX_DTYPES,
    Arguments,
    Outcome,
    Rule,
    all_between,
    assertion,
    table,
)

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
    **table(_multinomial, "multinomial", "multinomial.out"),
    **table(_bernoulli_self, "bernoulli", "bernoulli.out"),
    **table(_bernoulli_p, "bernoulli.Tensor", "bernoulli.Tensor_out", "bernoulli_.Tensor"),
    **table(_poisson, "poisson", "poisson.out"),
    **table(_repeat_interleave, "repeat_interleave.Tensor", "repeat_interleave.Tensor_out"),
}
