"""Guards of random sampling: weights, probabilities and rates that can be drawn from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cudalens.core.call import THREAD
from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Bounds, Violation, format_count
from cudalens.guards._base import guard
from cudalens.guards._ranges import (
    FEW,
    FLOATS,
    HANDFUL,
    all_true,
    bad_numbers,
    exact_offenders,
    format_position,
)
from cudalens.guards.catalogue._dims import broadcast
from cudalens.guards.engine import UNIT_INTERVAL, Between, Condition, Need

_WEIGHTS = Bounds(min=0.0, text="finite and at least 0")
# It is the same in every call.
_RATE = Between(
    "self",
    0,
    math.inf,
    bounds=Bounds(min=0.0, text="at least 0"),
    why="A rate is the expected count.",
    asserts="poisson",
)


@guard(
    "aten::multinomial",
    records=("multinomial_fast", "multinomial_renorm", "multinomial_sum"),
    frequency="very common",
    covers_inner=True,
    waits=True,
)
def multinomial_weights_drawable(self: Tensor, num_samples: int, replacement: bool) -> Need:
    """Every weight is in [0, inf), and the sum of every row in (0, inf) in the weights' dtype.

    Source:   MultinomialKernel.cu:60 and :112 (replacement, several samples), else
              TensorCompare.cu:109, torch 2.13.0; only the former stop at a sum that overflows
    Cost:     one reduction over the weights, one copy of a flag a row, or of one above 1024 rows
    Passes:   aten.multinomial(tensor([[0.0, 2.0], [1.0, 0.0]]), 1)
    Violates: aten.multinomial(tensor([[0.0, 2.0], [0.0, 0.0]]), 1)
    """
    if not _draws(self, num_samples, replacement):
        return None
    return Condition(lambda: _bad_weights(self, replacement and num_samples > 1))


def _bad_weights(weights: Tensor, searches: bool) -> Violation | None:
    if _rows_are_drawable(weights, searches):
        return None
    # Which weights and which rows: only now that something is wrong.
    bad = ((weights >= 0) & (weights < math.inf)).logical_not_()
    if not bool(bad.any()):
        return _bad_sums(weights, searches)
    is_nan = "; this one is NaN" if bool(weights[bad][0].isnan()) else ""
    searched = "multinomial_renorm" if bool((weights < 0).any()) else "multinomial_sum"
    return bad_numbers(
        weights,
        bad,
        argument="self",
        bounds=_WEIGHTS,
        why=f"Probabilities must be finite and at least 0{is_nan}.",
        device_text=assert_text(searched if searches else "multinomial_fast_weight"),
    )


def _draws(weights: Tensor, samples: int, replacement: bool) -> bool:
    """Return whether torch takes this call and there is something to draw from."""
    if weights.dim() not in (1, 2) or weights.dtype not in FLOATS or weights.numel() == 0:
        return False
    return samples > 0 and (replacement or samples <= weights.size(-1))


def _rows_are_drawable(weights: Tensor, searches: bool) -> bool:
    if searches:
        # Negative weights as NaN: the sum, in the weights' dtype as in the kernel, shows both.
        total = weights.masked_fill(weights < 0, math.nan).sum(-1)
        return all_true((total > 0) & (total < math.inf))
    if weights.numel() <= FEW and not weights.is_cpu:
        weights = weights.cpu()
    if weights.is_cpu and weights.numel() <= HANDFUL:
        rows = weights.tolist() if weights.dim() == 2 else [weights.tolist()]
        # NaN is in no interval.
        are_good = all(map(any, rows)) and all(0 <= item < math.inf for row in rows for item in row)
        if are_good and (lists := THREAD.running.extremes):
            extreme = ("self", min(map(min, rows)), max(map(max, rows)))
            for read in lists:
                read.append(extreme)
        return are_good
    low, high = torch.aminmax(weights, dim=-1)
    are_good = all_true((low >= 0) & (high > 0) & (high < math.inf))
    if are_good and (lists := THREAD.running.extremes):
        extreme = ("self", low.min().item(), high.max().item())
        for read in lists:
            read.append(extreme)
    return are_good


def _bad_sums(weights: Tensor, searches: bool) -> Violation:
    totals = weights.sum(-1)
    bad = (totals <= 0) | (totals == math.inf) if searches else totals <= 0
    offenders = exact_offenders(totals, bad)
    dtype = str(weights.dtype).removeprefix("torch.")
    overflows = f"inf, more than {dtype} can represent: no probability is left"
    is_infinite = str(offenders.first[0].value) == "inf"
    verdict = overflows if is_infinite else "0: nothing can be drawn from it"
    return Violation(
        argument="self",
        headline=f"{format_position(offenders)} sums to {verdict}",
        explanation="A row is drawn from in proportion to its sum.",
        offenders=offenders,
        bounds=Bounds(min=0.0, text="rows with a sum above 0 and finite"),
        is_index=False,
        device_text=assert_text("multinomial_sum" if searches else "multinomial_fast_sum"),
    )


@guard("aten::multinomial", is_silent=True, waits=True)
def multinomial_enough_categories(self: Tensor, num_samples: int, replacement: bool) -> Need:
    """Without replacement every row has as many weights above 0 as samples are drawn from it.

    Source:   Distributions.cpp, multinomial_out, torch 2.13.0: no assertion, none on the CPU
    Cost:     nothing for one sample; else one count over the weights, and a copy as above
    Passes:   aten.multinomial(tensor([1.0, 0.0, 2.0]), 2)
    Violates: aten.multinomial(tensor([1.0, 0.0, 2.0]), 3)
    """
    if replacement or num_samples == 1 or not _draws(self, num_samples, replacement):
        return None
    return Condition(lambda: _too_few_categories(self, num_samples))


def _too_few_categories(weights: Tensor, samples: int) -> Violation | None:
    weighted = torch.count_nonzero(weights, dim=-1)
    if all_true(weighted >= samples):
        return None
    offenders = exact_offenders(weighted, weighted < samples)
    have = format_count(int(str(offenders.first[0].value)), "weight")
    return Violation(
        argument="self",
        headline=f"{format_position(offenders)} has {have} above 0, "
        f"and {samples} samples are drawn from it without replacement",
        explanation="The samples that are missing are drawn from categories of weight 0.",
        offenders=offenders,
        bounds=Bounds(min=samples, text=f"at least {samples} weights above 0 in a row"),
        is_index=False,
        is_silent=True,
    )


@guard(
    "aten::bernoulli.default",
    "aten::bernoulli.out",
    records=("bernoulli_tensor",),
    frequency="common",
    covers_inner=True,
)
def bernoulli_input_in_unit_interval(self: Tensor, out: Tensor | None = None) -> Need:
    """Every probability of the input is in [0, 1]; NaN does not.

    Source:   DistributionTemplates.h:624 to :639, torch 2.13.0
    Cost:     one reduction over the input, one copy of two numbers
    Passes:   aten.bernoulli(tensor([0.0, 1.0]))
    Violates: aten.bernoulli(tensor([0.0, 1.5]))
    """
    drawn = self.dtype if out is None else out.dtype
    return _probabilities(self, self.shape, drawn, argument="self")


@guard(
    "aten::bernoulli.Tensor",
    "aten::bernoulli.Tensor_out",
    "aten::bernoulli_.Tensor",
    records=("bernoulli_tensor",),
    frequency="common",
    covers_inner=True,
)
def bernoulli_p_in_unit_interval(self: Tensor, p: Tensor) -> Need:
    """Every probability in p is in [0, 1]; NaN does not.

    Source:   DistributionTemplates.h:624 to :639, torch 2.13.0
    Cost:     one reduction over p, one copy of two numbers
    Passes:   zeros(2).bernoulli_(tensor([0.0, 1.0]))
    Violates: zeros(2).bernoulli_(tensor([0.0, 1.5]))
    """
    return _probabilities(p, self.shape, self.dtype, argument="p")


def _probabilities(p: Tensor, shape: torch.Size, drawn: torch.dtype, *, argument: str) -> Need:
    # Torch refuses probabilities that are no floating-point numbers.
    if p.dtype not in FLOATS or drawn.is_complex:
        return None
    if 0 in shape or broadcast((p.shape, shape)) != tuple(shape):
        return None
    # The kernel converts p before it compares: 1 + 1e-12 in float64 is a valid float32.
    dtype = torch.float64 if drawn == torch.float64 else torch.float32
    why = "Each element is drawn as 1 with its probability."
    return Between(
        argument, 0, 1, bounds=UNIT_INTERVAL, dtype=dtype, why=why, asserts="bernoulli_p1"
    )


@guard("aten::poisson", records=("poisson",), covers_inner=True)
def poisson_rate_not_negative(self: Tensor) -> Need:
    """Every rate is in [0, inf]; NaN does not.

    Source:   Distributions.cu:49, torch 2.13.0
    Cost:     one reduction over the rates, one copy of two numbers
    Passes:   aten.poisson(tensor([0.0, 3.0]))
    Violates: aten.poisson(tensor([-1.0, 3.0]))
    """
    return _RATE if self.dtype in FLOATS else None
