"""Causes of weights that nothing can be drawn from: logits, empty rows, NaN and infinities."""

from __future__ import annotations

import ast
import re

from cudalens.core.report import Evidence
from cudalens.core.report_types import FIRST_BAD, Hint, TensorFact
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._reading import HALVES, ROUNDING, ends_of, numbers_of
from cudalens.diagnosis.user_code import last_name, parsed, rewritten, with_keyword

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
        text=f"the temperature is {value:g}: softmax of scores divided by it gives NaN; where "
        "always the largest score is wanted, take argmax and draw nothing",
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
        causes.append("a row of which top-k, top-p or a mask left nothing")
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
