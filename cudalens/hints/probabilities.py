"""Causes of numbers that are no probabilities: binary cross entropy, sampling, NaN from before."""

from __future__ import annotations

import re

from cudalens.facts import FIRST_BAD, Hint, TensorFact
from cudalens.hints._base import rule
from cudalens.hints._fixes import renamed, rewritten, with_keyword
from cudalens.hints._roles import fault
from cudalens.model import Evidence

_BCE = "aten::binary_cross_entropy"
_ROUNDING = 1e-2
_IMAGE = 32.0
_HALVES = ("float16", "bfloat16")
_TEMPERATURE = re.compile(r"\btemp(erature)?\b|\btau\b", re.IGNORECASE)
_FILTER = re.compile(r"top_?[kp]\b|nucleus|min_p\b|masked_fill|filter", re.IGNORECASE)


def _numbers(evidence: Evidence, *ops: str) -> tuple[str, TensorFact] | None:
    """Give the argument at fault and its tensor when it holds floating-point numbers."""
    found = fault(evidence)
    if found is None or evidence.op.name not in ops or "float" not in found[1].dtype:
        return None
    return found[0].argument, found[1]


def _range(fact: TensorFact) -> tuple[float, float] | None:
    low, high = fact.summary.min, fact.summary.max
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return None
    return None if fact.summary.nan or fact.summary.inf else (float(low), float(high))


def _probabilities(evidence: Evidence) -> tuple[TensorFact, float, float] | None:
    """Give a finite argument that should be probabilities, with its ends."""
    ops = (_BCE, "aten::bernoulli", "aten::bernoulli_")
    found = _numbers(evidence, *ops)
    ends = _range(found[1]) if found else None
    if found is None or ends is None or (found[0] == "target" and evidence.op.name == _BCE):
        return None
    return found[1], *ends


@rule(priority=12)
def logits_as_probabilities(evidence: Evidence) -> Hint | None:
    """Scores of a network without sigmoid are given where probabilities are wanted."""
    found = _probabilities(evidence)
    if found is None or (found[1] >= -_ROUNDING and found[2] <= 1 + _ROUNDING):
        return None
    fact, low, high = found
    if low >= 0 and high > _IMAGE:
        return None
    fix: str | None
    if evidence.op.name == _BCE:
        fix = renamed(evidence, "binary_cross_entropy", "binary_cross_entropy_with_logits")
        fix = fix or renamed(evidence, "BCELoss", "BCEWithLogitsLoss")
        fix = fix or rewritten(evidence, fact, "torch.sigmoid({x})") or "nn.BCEWithLogitsLoss()"
        cure = "use the loss that takes logits, or a sigmoid"
    else:
        fix = rewritten(evidence, fact, "torch.sigmoid({x})") or "torch.sigmoid(logits)"
        cure = "use a sigmoid"
    return Hint(
        text=f"the input runs from {low:.4g} to {high:.4g}, which no sigmoid gives: these look "
        f"like logits; {cure}",
        fix=fix,
    )


@rule(priority=12)
def rounded_out_of_interval(evidence: Evidence) -> Hint | None:
    """Probabilities leave [0, 1] by a rounding error of the arithmetic that made them."""
    found = _probabilities(evidence)
    if found is None or found[1] < -_ROUNDING or found[2] > 1 + _ROUNDING:
        return None
    fact, low, high = found
    worst = low if low < 0 else high
    half = f" in {fact.dtype}" if fact.dtype in _HALVES else ""
    return Hint(
        text=f"the input leaves 0 … 1 by {max(-low, high - 1):.1e} only ({worst!r}): a rounding "
        f"error{half} of the sum or product that made it",
        fix=rewritten(evidence, fact, "{x}.clamp(0, 1)") or "probabilities.clamp(0, 1)",
    )


@rule(priority=12)
def image_not_divided(evidence: Evidence) -> Hint | None:
    """An image or mask of bytes is used as probabilities without dividing it by 255."""
    found = _numbers(evidence, _BCE)
    ends = _range(found[1]) if found else None
    if found is None or ends is None or ends[0] < 0 or not _IMAGE < ends[1] <= 255:
        return None
    return Hint(
        text=f"the {_argument(found[0])} runs from {ends[0]:g} to {ends[1]:g}, as the bytes of an "
        "image do: divide by 255",
        fix=rewritten(evidence, found[1], "{x} / 255") or "mask = mask / 255",
    )


def _argument(name: str) -> str:
    return "input" if name == "self" else name


@rule(priority=14)
def labels_as_binary_target(evidence: Evidence) -> Hint | None:
    """Labels such as -1 and 1, 1 and 2, or of three classes, are the target of a binary loss."""
    found = _numbers(evidence, _BCE)
    ends = _range(found[1]) if found else None
    if found is None or found[0] != "target" or ends is None or ends[1] > _IMAGE:
        return None
    low, high = ends
    if low != int(low) or high != int(high):
        return None
    change = {(-1.0, 1.0): "({x} + 1) / 2", (1.0, 2.0): "{x} - 1"}.get((low, high))
    if change is not None:
        text = f"the target goes from {low:g} to {high:g}: this loss wants 0 and 1"
        return Hint(text=text, fix=rewritten(evidence, found[1], change))
    if low < 0:
        return Hint(
            text=f"the target goes down to {low:g}: a mark, which this loss does not ignore"
        )
    return Hint(
        text=f"the target has labels up to {high:g}: more than two classes need cross_entropy",
        fix="F.cross_entropy(logits, target.long())  # one column of logits a class",
    )


# --- NaN from before -----------------------------------------------------------------------------


@rule(priority=30)
def nan_before(evidence: Evidence) -> Hint | None:
    """NaN was in the input already: its cause is an earlier op, not this one."""
    found = fault(evidence)
    if found is None or not found[1].summary.nan:
        return None
    fact = found[1]
    count = f"{fact.summary.nan} of {found[0].offenders.total or fact.summary.nan} numbers"
    proven = (step.source for step in evidence.provenance if step.note == FIRST_BAD)
    first = next(proven, None)
    where = f"; the first recorded op that gave one is in line {first.line}" if first else ""
    return Hint(
        text=f"{count} were NaN before this op, which only met them{where}",
        fix="%%cudacheck --nan",
    )


# --- sampling ------------------------------------------------------------------------------------


def _weights(evidence: Evidence) -> TensorFact | None:
    found = _numbers(evidence, "aten::multinomial")
    is_silent = evidence.violation is not None and evidence.violation.is_silent
    return None if found is None or is_silent else found[1]


def _context(evidence: Evidence) -> str:
    """Give the code that the user can see: the call and the lines around it."""
    lines = evidence.source.context if evidence.source else ()
    return "\n".join([evidence.call_text or "", *(line.text for line in lines)])


@rule(priority=12)
def logits_as_weights(evidence: Evidence) -> Hint | None:
    """Scores without softmax are given as weights to draw from."""
    weights = _weights(evidence)
    ends = _range(weights) if weights else None
    if weights is None or ends is None or ends[0] >= 0:
        return None
    if ends[0] > -_ROUNDING and ends[1] <= 1 + _ROUNDING:
        return None
    return Hint(
        text=f"the weights run from {ends[0]:.4g} to {ends[1]:.4g}: these look like logits, "
        "softmax is missing",
        fix=rewritten(evidence, weights, "torch.softmax({x}, dim=-1)")
        or "torch.softmax(logits, dim=-1)",
    )


@rule(priority=12)
def nothing_to_draw(evidence: Evidence) -> Hint | None:
    """All weights of a row are 0: everything was filtered out, or underflowed."""
    weights = _weights(evidence)
    ends = _range(weights) if weights else None
    if weights is None or ends is None or ends[0] < 0 or evidence.violation is None:
        return None
    rows = evidence.violation.offenders
    if not rows.first or any(item.value not in (0, 0.0) for item in rows.first):
        return None
    causes = []
    if _FILTER.search(_context(evidence)):
        causes.append("top-k, top-p or a mask has left no candidate")
    if weights.dtype in _HALVES:
        causes.append(f"the weights are too small for {weights.dtype}")
    why = " or ".join(causes) or "a filter left no candidate, or all weights underflowed"
    return Hint(
        text=f"{rows.count} of {rows.total} rows sum to 0: {why}; keep at least one a row",
        fix="logits.masked_fill(remove, -inf).softmax(-1)  # remove must not hold a whole row",
    )


@rule(priority=12)
def not_a_number_weights(evidence: Evidence) -> Hint | None:
    """A softmax gave NaN: divided by temperature 0, over a row of -inf only, or over infinities."""
    weights = _weights(evidence)
    if weights is None or not weights.summary.nan:
        return None
    seen, half = _context(evidence), weights.dtype in _HALVES
    causes = []
    if _TEMPERATURE.search(seen):
        causes.append("a temperature of 0, or close to it")
    if _FILTER.search(seen):
        causes.append("a row of which top-k, top-p or a mask left nothing")
    if half:
        causes.append(f"logits beyond the largest {weights.dtype}")
    if not causes:
        return None
    fix = None
    if evidence.call_text and "generate" in evidence.call_text:
        fix = with_keyword(evidence, ("generate",), "do_sample", "False")
    elif half:
        fix = "torch.softmax(logits.float(), dim=-1)"
    elif (named := _TEMPERATURE.search(seen)) is not None:
        fix = f"{named[0]} = max({named[0]}, 1e-2)"
    return Hint(text=f"softmax gives NaN for {', or '.join(causes)}", fix=fix)


@rule(priority=12)
def infinite_weights(evidence: Evidence) -> Hint | None:
    """A weight is infinite: exp overflowed, as it does early in half precision."""
    weights = _weights(evidence)
    if weights is None or not weights.summary.inf or weights.summary.nan:
        return None
    half = weights.dtype == "float16"
    why = "float16 ends at 65504, exp of 11.1" if half else f"exp overflowed in {weights.dtype}"
    return Hint(
        text=f"{weights.summary.inf} weights are infinite: {why}; softmax in float32 does not "
        "overflow",
        fix="torch.softmax(logits.float(), dim=-1)",
    )
