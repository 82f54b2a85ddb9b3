"""Causes of numbers that are no probabilities, and of weights that nothing can be drawn from."""

from __future__ import annotations

import ast
import re

from cudalens.core.report import Evidence
from cudalens.core.report_types import FIRST_BAD, Hint, TensorFact
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._reading import HALVES, ROUNDING, ends_of, numbers_of
from cudalens.diagnosis.hints._roles import fault
from cudalens.diagnosis.user_code import last_name, parsed, renamed, rewritten, with_keyword

_BCE = "aten::binary_cross_entropy"
_IMAGE = 32.0


def _probabilities(evidence: Evidence) -> tuple[TensorFact, float, float] | None:
    """Return a finite argument that should be probabilities, with its ends."""
    ops = (_BCE, "aten::bernoulli", "aten::bernoulli_")
    found = numbers_of(evidence, *ops)
    ends = ends_of(found[1]) if found else None
    if found is None or ends is None or (found[0] == "target" and evidence.op.name == _BCE):
        return None
    return found[1], *ends


@rule(priority=12)
def logits_as_probabilities(evidence: Evidence) -> Hint | None:
    """Scores of a network without sigmoid are given where probabilities are wanted."""
    found = _probabilities(evidence)
    if found is None or (found[1] >= -ROUNDING and found[2] <= 1 + ROUNDING):
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
    if found is None or found[1] < -ROUNDING or found[2] > 1 + ROUNDING:
        return None
    fact, low, high = found
    worst = low if low < 0 else high
    half = f" in {fact.dtype}" if fact.dtype in HALVES else ""
    return Hint(
        text=f"the input is outside 0 … 1 by only {max(-low, high - 1):.1e} ({worst!r}): a "
        f"rounding error{half} of the sum or product that made it",
        fix=rewritten(evidence, fact, "{x}.clamp(0, 1)") or "probabilities.clamp(0, 1)",
    )


@rule(priority=12)
def image_not_divided(evidence: Evidence) -> Hint | None:
    """An image or mask of bytes is used as probabilities without dividing it by 255."""
    found = numbers_of(evidence, _BCE)
    ends = ends_of(found[1]) if found else None
    if found is None or ends is None or ends[0] < 0 or not _IMAGE < ends[1] <= 255:
        return None
    return Hint(
        text=f"the {_argument(found[0])} runs from {ends[0]:g} to {ends[1]:g}, like the bytes of "
        "an image: divide by 255",
        fix=rewritten(evidence, found[1], "{x} / 255") or "mask = mask / 255",
    )


def _argument(name: str) -> str:
    return "input" if name == "self" else name


@rule(priority=14)
def labels_as_binary_target(evidence: Evidence) -> Hint | None:
    """Labels such as -1 and 1, 1 and 2, or of three classes, are the target of a binary loss."""
    found = numbers_of(evidence, _BCE)
    ends = ends_of(found[1]) if found else None
    if found is None or found[0] != "target" or ends is None or ends[1] > _IMAGE:
        return None
    low, high = ends
    if low != int(low) or high != int(high):
        return None
    change = {(-1.0, 1.0): "({x} + 1) / 2", (1.0, 2.0): "{x} - 1"}.get((low, high))
    if change is not None:
        text = f"the target goes from {low:g} to {high:g}: this loss takes 0 and 1"
        return Hint(text=text, fix=rewritten(evidence, found[1], change))
    if low < 0:
        return Hint(
            text=f"the target goes down to {low:g}: if that marks values to leave out, this loss "
            "does not ignore it"
        )
    return Hint(
        text=f"the target has labels up to {high:g}: more than two classes need cross_entropy",
        fix="F.cross_entropy(logits, target.long())  # one column of logits per class",
    )


# --- NaN from before -----------------------------------------------------------------------------


@rule(priority=30)
def nan_before(evidence: Evidence) -> Hint | None:
    """NaN was in the input already: its cause is an earlier op, not this one."""
    found = fault(evidence)
    watch = evidence.nan_watch
    if found is None or not found[1].summary.nan or (watch and watch.arrival):
        return None
    fact = found[1]
    count = f"{fact.summary.nan} of {found[0].offenders.total or fact.summary.nan} values"
    proven = (step.source for step in evidence.provenance if step.note == FIRST_BAD)
    first = next(proven, None)
    where = f"; the first recorded op that produced one is in line {first.line}" if first else ""
    return Hint(
        text=f"{count} were NaN before this op, which only received them{where}",
        fix=None if watch else "%%cudacheck --nan",
    )


# --- weights to draw from -------------------------------------------------------------------------


_FILTER = re.compile(r"top_?[kp]\b|nucleus|min_p\b|masked_fill|filter", re.IGNORECASE)
_TEMPERATURES = ("temperature", "temp", "tau")
_COLD = {"float16": 1e-3}
_FREEZING = 1e-30
"""Below it, scores of any usual size divided by the temperature overflow; in float16 earlier."""


def _weights(evidence: Evidence) -> TensorFact | None:
    found = numbers_of(evidence, "aten::multinomial")
    is_silent = evidence.violation is not None and evidence.violation.is_silent
    return None if found is None or is_silent else found[1]


def _context(evidence: Evidence) -> str:
    """Return the code that the user can see: the call and the lines around it."""
    lines = evidence.source.context if evidence.source else ()
    return "\n".join([evidence.call_text or "", *(line.text for line in lines)])


@rule(priority=12)
def logits_as_weights(evidence: Evidence) -> Hint | None:
    """Scores without softmax are given as weights to draw from."""
    weights = _weights(evidence)
    ends = ends_of(weights) if weights else None
    if weights is None or ends is None or ends[0] >= 0:
        return None
    if ends[0] > -ROUNDING and ends[1] <= 1 + ROUNDING:
        return None
    return Hint(
        text=f"the weights run from {ends[0]:.4g} to {ends[1]:.4g}: these look like logits, "
        "softmax is missing",
        fix=rewritten(evidence, weights, "torch.softmax({x}, dim=-1)"),
    )


@rule(priority=12)
def nothing_to_draw(evidence: Evidence) -> Hint | None:
    """All weights of a row are 0: everything was filtered out, or underflowed."""
    weights = _weights(evidence)
    ends = ends_of(weights) if weights else None
    if weights is None or ends is None or ends[0] < 0 or evidence.violation is None:
        return None
    rows = evidence.violation.offenders
    if not rows.first or any(item.value not in (0, 0.0) for item in rows.first):
        return None
    causes = []
    if _FILTER.search(_context(evidence)):
        causes.append("top-k, top-p or a mask may have left no candidate")
    if weights.dtype in HALVES:
        causes.append(f"the weights may be too small for {weights.dtype}")
    why = "".join(f"{cause}; " for cause in causes)
    return Hint(
        text=f"{rows.count} of {rows.total} rows sum to 0: {why}keep at least one weight above 0 "
        "in each row",
    )


# --- NaN -----------------------------------------------------------------------------------------


@rule(priority=11)
def temperature_of_zero(evidence: Evidence) -> Hint | None:
    """The scores are divided by a temperature of 0, and softmax gives NaN."""
    weights, found = _weights(evidence), _temperature(evidence)
    if weights is None or not weights.summary.nan or found is None:
        return None
    name, value = found
    if abs(value) > _COLD.get(weights.dtype, _FREEZING):
        return None
    if last_name(_function(evidence)) == "generate":
        fix = with_keyword(evidence, ("generate",), "do_sample", "False")
    else:
        fix = f"{name} = max({name}, 1e-2)" if parsed(name) and not _is_number(name) else None
    return Hint(
        text=f"the temperature is {value:g}: softmax of scores divided by it gives NaN; to "
        "always pick the largest score, use argmax instead of sampling",
        fix=fix,
    )


def _function(evidence: Evidence) -> ast.expr:
    tree = parsed(evidence.call_text or "")
    return tree.func if isinstance(tree, ast.Call) else ast.Name("")


def _is_number(text: str) -> bool:
    return isinstance(parsed(text), ast.Constant)


def _temperature(evidence: Evidence) -> tuple[str, float] | None:
    """Return the temperature of the draw as it is written, and its value; ``None`` if not known."""
    values = dict(evidence.call_context.temperatures)
    tree = parsed(evidence.call_text or "")
    given = tree.keywords if isinstance(tree, ast.Call) else []
    for item in given:
        if item.arg in _TEMPERATURES:
            text = ast.unparse(item.value)
            value = item.value.value if isinstance(item.value, ast.Constant) else values.get(text)
            return (text, float(value)) if isinstance(value, (int, float)) else None
    seen = _context(evidence)
    divisors = (name for name in values if re.search(rf"/=?\s*{re.escape(name)}(?![\w.])", seen))
    name = next(divisors, None)
    return None if name is None else (name, values[name])


@rule(priority=12)
def not_a_number_weights(evidence: Evidence) -> Hint | None:
    """A softmax gave the first NaN: over a row of -inf only, or over infinities."""
    weights = _weights(evidence)
    if weights is None or not weights.summary.nan or not _softmax_was_first(evidence):
        return None
    causes = []
    if _FILTER.search(_context(evidence)):
        causes.append("a row in which top-k, top-p or a mask left no candidate")
    if weights.dtype in HALVES:
        causes.append(f"logits beyond the largest {weights.dtype}")
    if not causes:
        return None
    return Hint(text=f"softmax gives NaN for {', or '.join(causes)}")


def _softmax_was_first(evidence: Evidence) -> bool:
    """Return whether the recorder saw the first NaN come out of a softmax."""
    first = next((step.op for step in evidence.provenance if step.note == FIRST_BAD), None)
    return "softmax" in (first or "")


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
    )
