"""Causes of numbers that are no probabilities, and of weights that nothing can be drawn from."""

from __future__ import annotations

import ast
import math

from cudalens.core.api_names import stem_of
from cudalens.core.evidence_types import NanCause
from cudalens.core.graph_types import DIVIDES, FIRST_NAN, WRITES
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, TensorFact, format_count
from cudalens.core.torch_functions import Trait, functions, stems
from cudalens.diagnosis.hints._makers import FROM_PYTHON, way_of
from cudalens.diagnosis.hints._roles import fault, name_of
from cudalens.diagnosis.user_code import list_of, renamed, rewritten

_BCE = "aten::binary_cross_entropy"
_DRAWS = ("aten::bernoulli", "aten::bernoulli_")
_ROUNDING = 1e-2
"""So far from 0 and 1 the rounding errors of a sum or product go."""
_PERCENT = 100
_RARE = 0.1
"""Of all values, so many may be stray ones."""
_HALVES = ("float16", "bfloat16")
_SCORES = functions(Trait.LAYER)
"""Ops that end a network without an activation."""
_POSITIVE = ("scale", "rate", "concentration", "concentration0", "concentration1", "df")
"""Parameters of distributions that have to be above 0."""
_ACTIVATIONS = functions(Trait.ACTIVATION)
"""Functions whose results go beyond 0 … 1."""


def _numbers(evidence: Evidence, *ops: str) -> tuple[str, TensorFact, float, float] | None:
    """Return the argument at fault when it has finite numbers, with the smallest and largest.

    ``None`` where earlier calls of the line had numbers of all kinds within the bound: what a batch
    has besides is no other scale.
    """
    at_fault, seen = fault(evidence), evidence.seen_before
    if seen is not None and (seen.min is None or seen.min != seen.max):
        return None
    if at_fault is None or evidence.op.name not in ops or "float" not in at_fault[1].dtype:
        return None
    fact = at_fault[1]
    low, high = fact.summary.min, fact.summary.max
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return None
    if fact.summary.nan or fact.summary.inf:
        return None
    return at_fault[0].argument, fact, float(low), float(high)


def _probabilities(evidence: Evidence) -> tuple[TensorFact, float, float] | None:
    """Return a finite argument that should be probabilities, with its ends."""
    numbers = _numbers(evidence, _BCE, *_DRAWS)
    if numbers is None or (numbers[0] == "target" and evidence.op.name == _BCE):
        return None
    return numbers[1:]


def _is_difference(fact: TensorFact, made: str) -> bool:
    """Return whether numbers of both signs are errors rather than scores."""
    node = fact.node
    is_written = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)
    return is_written or made.strip("_") in ("sub", "rsub", "subtract")


def _is_rounded(low: float, high: float) -> bool:
    return low >= -_ROUNDING and high <= 1 + _ROUNDING


def not_probabilities(evidence: Evidence) -> Hint | None:
    """Scores of a network, or results of another activation, stand for probabilities."""
    numbers = _probabilities(evidence)
    if numbers is None or _is_rounded(*numbers[1:]) or _scale(evidence, *numbers[1:]):
        return None
    fact, low, high = numbers
    text = f"{name_of(fact)} runs from {low:.4g} to {high:.4g}, "
    made, line = next(way_of(evidence), ("", ""))
    if _is_difference(fact, made):
        return Hint(text=f"{text}as {made or 'a difference'}{line} gives it. It has to be 0 … 1")
    if made in _ACTIVATIONS:
        return Hint(text=f"{text}made by {made}{line}: probabilities end with a sigmoid")
    if made not in _SCORES and low >= 0:
        percent = ". Divide percentages by 100" if 2 < high <= _PERCENT else ""
        return Hint(text=f"{text}and a probability is at most 1{percent}")
    if made not in _SCORES and low >= -1 and high <= 1:
        return Hint(text=f"{text}and a probability is at least 0")
    fix, cure = None, "torch.sigmoid makes probabilities of them"
    if evidence.op.name == _BCE:
        cure = "binary_cross_entropy_with_logits takes them as they are"
    if made not in _SCORES:
        # Nobody knows what they are; the call would run in either way.
        return Hint(text=f"{text}which no sigmoid gives. If they are scores, {cure}")
    if evidence.op.name == _BCE:
        fix = renamed(evidence, "binary_cross_entropy", "binary_cross_entropy_with_logits")
        fix = fix or renamed(
            evidence, "BCELoss", "BCEWithLogitsLoss", "binary_cross_entropy_with_logits"
        )
        if fix is None and evidence.module_type == "BCELoss":
            cure = "BCEWithLogitsLoss instead of BCELoss takes them as they are"
    return Hint(
        text=f"{text}which no sigmoid gives: the scores of a layer{line}. {cure}",
        fix=fix or rewritten(evidence, fact, "torch.sigmoid({x})"),
    )


def rounded_out_of_interval(evidence: Evidence) -> Hint | None:
    """Probabilities leave [0, 1] by a rounding error of the arithmetic that made them."""
    numbers = _probabilities(evidence)
    if numbers is None or evidence.violation is None or not _is_rounded(*numbers[1:]):
        return None
    listed = (item.value for item in evidence.violation.offenders.first)
    values = [float(value) for value in listed if isinstance(value, (int, float))]
    worst = max(values, key=lambda value: max(-value, value - 1), default=None)
    if worst is None:
        return None
    return Hint(
        text=f"{name_of(numbers[0])} is outside 0 … 1 by only {max(-worst, worst - 1):.1e} "
        f"({worst!r}), as rounding in {numbers[0].dtype} can make it",
        fix=rewritten(evidence, numbers[0], "{x}.clamp(0, 1)"),
    )


def _scale(evidence: Evidence, low: float, high: float) -> tuple[int, str] | None:
    """Return by what whole numbers are to be divided to be probabilities, and what they are."""
    if low < 0 or not _PERCENT <= high <= 255:
        return None
    listed = evidence.violation.offenders.first if evidence.violation else ()
    seen = [low, high, *(item.value for item in listed)]
    if not all(float(item).is_integer() for item in seen if isinstance(item, (int, float))):
        return None
    return (100, "percentages") if high == _PERCENT else (255, "the bytes of an image")


def image_not_divided(evidence: Evidence) -> Hint | None:
    """Bytes of an image, or percentages, are used as probabilities without dividing them."""
    numbers = _numbers(evidence, _BCE, *_DRAWS)
    scale = _scale(evidence, *numbers[2:]) if numbers else None
    if numbers is None or scale is None:
        return None
    _, fact, low, high = numbers
    whole, what = scale
    text = f"{name_of(fact)} runs from {low:g} to {high:g}"
    if whole == _PERCENT:  # counts may end there as well
        return Hint(text=f"{text}. If these are {what}, divide by {whole}")
    return Hint(
        text=f"{text}, like {what}: divide by {whole}",
        fix=rewritten(evidence, fact, f"{{x}} / {whole}"),
    )


_CODED = {(-1.0, 1.0): (1, -1, "({x} + 1) / 2"), (1.0, 2.0): (1, 2, "{x} - 1")}
"""Two classes by their smallest and largest number: the number within 0 … 1, the one outside, and
what makes 0 and 1 of them."""


def labels_as_binary_target(evidence: Evidence) -> Hint | None:
    """Labels of two classes, -1 and 1 or 1 and 2, are the target of a binary loss."""
    numbers = _numbers(evidence, _BCE)
    violation = evidence.violation
    if numbers is None or violation is None or numbers[0] != "target":
        return None
    if evidence.marks.zero_at is not None:
        return None  # a weight leaves out just these values
    _, fact, low, high = numbers
    if (low, high) not in _CODED:
        return None
    bad, (inside, outside, change) = violation.offenders, _CODED[low, high]
    # The mean tells whether these two numbers are the only ones.
    mean = fact.summary.mean
    total = mean * bad.total if isinstance(mean, (int, float)) else math.nan
    if abs(total - (bad.count * outside + (bad.total - bad.count) * inside)) >= 0.5:
        return None
    text = f"{name_of(fact)} goes from {low:g} to {high:g}: this loss takes 0 and 1"
    return Hint(text=text, fix=rewritten(evidence, fact, change))


# --- NaN from before -----------------------------------------------------------------------------


def nan_before(evidence: Evidence) -> Hint | None:
    """NaN was in the input already: its cause is an earlier op, not this one."""
    at_fault = fault(evidence)
    if at_fault is None or not at_fault[1].summary.nan:
        return None
    fact = at_fault[1]
    count = f"{fact.summary.nan} of {at_fault[0].offenders.total or fact.summary.nan} values"
    where, is_open = _where_from(evidence, fact)
    more = ""
    if is_open and not _is_given(evidence) and not evidence.has_nan_watch:
        more = f". {evidence.steps.nan} at the first one"
    verb = "is" if fact.summary.nan == 1 else "are"
    return Hint(text=f"{count} {verb} NaN already in the input of this op{where}{more}")


_CAUSES: dict[NanCause, str] = {
    "masked row": "A row that softmax was given is -inf everywhere: all its places are masked",
    "infinity": "Softmax was given a row with inf",
}


def _is_given(evidence: Evidence) -> bool:
    """Return whether no op is known that may have made the NaN: ``--nan`` would find none either.

    They were there when the check began, or came in from Python's numbers or an array.
    """
    steps = [step for step in evidence.provenance if step.op]
    return not steps or stem_of(steps[-1].op or "") in FROM_PYTHON


def _where_from(evidence: Evidence, fact: TensorFact) -> tuple[str, bool]:
    """Say how far back the NaN is known, and whether it may come from further back."""
    divisions = (step.source for step in evidence.provenance if step.note == DIVIDES)
    if division := next(divisions, None):
        return f". Line {division.line} divides by 0: {division.text}", False
    proven = (
        step.source
        for step in evidence.provenance
        if step.note == FIRST_NAN and stem_of(step.op or "") not in FROM_PYTHON
    )
    if first := next(proven, None):
        text = f". Line {first.line} made them: {first.text}"
        if evidence.nan_cause is not None:
            text += f". {_CAUSES[evidence.nan_cause]}"
        elif "softmax" in (first.text or ""):
            text += ". Softmax gives NaN for a row with inf, and for one of -inf alone"
        return text, False
    held = evidence.nan_holder
    if held is not None and len(held.written) > 1:
        lines = list_of(sorted(it.line or 0 for it in held.written))
        return f". Lines {lines} wrote NaN to {held.name}", False
    written = (step.source for step in evidence.provenance if step.note == f"{WRITES} nan")
    if write := next(written, None):  # as a number: ``x[2] = float("nan")``
        return f". Line {write.line} wrote NaN: {write.text}", False
    steps = [step for step in evidence.provenance if step.op and step.source is not None]
    names = [stem_of(step.op or "") for step in steps]
    if steps and names[-1] == "tensor" and set(names) <= {"tensor", "to", "cuda", "float", "clone"}:
        return f". Line {steps[-1].source.line} made it from numbers that contained them", False  # type: ignore[union-attr]
    at = ""
    if held is not None and held.nan.total > 1:
        at = f", the first at {list(held.nan.first[0].position)}"
    if held is not None and not held.is_read:
        text = f". {held.name} contains NaN ({held.nan.count} of {held.nan.total} values{at})"
        return text, not held.written  # of what was written as a number, --nan says nothing
    if held is not None and steps:
        text = f"{names[-1]} in line {steps[-1].source.line} read them from {held.name}"  # type: ignore[union-attr]
        return f". {text} ({held.nan.count} of {held.nan.total} values{at})", False
    others = (item for item in evidence.tensors if item is not fact and item.expression)
    holder = next((item for item in others if item.summary.nan), None)
    if holder is not None:
        own = f"{holder.summary.nan} of {math.prod(holder.shape)} values"
        return f". {holder.expression} contains NaN too ({own})", True
    return "", True


# --- parameters of a distribution -----------------------------------------------------------------


def scores_as_probabilities(evidence: Evidence) -> Hint | None:
    """Scores are given to a distribution as ``probs``, which takes them as ``logits``."""
    at_fault, kind = fault(evidence), (evidence.op.api or "").removeprefix("torch.distributions.")
    if at_fault is None or at_fault[0].argument != "probs" or kind == evidence.op.api:
        return None
    violation, fact = at_fault
    low, high, mean = fact.summary.min, fact.summary.max, fact.summary.mean
    if isinstance(low, (str, type(None))) or isinstance(high, (str, type(None))):
        return None
    if isinstance(mean, (str, type(None))) or fact.summary.nan or fact.summary.inf:
        return None
    bad = violation.offenders
    is_whole = all(isinstance(it.value, (int, float)) and it.value % 1 == 0 for it in bad.first)
    is_rare = bad.count <= _RARE * bad.total
    sums_to_one = bool(fact.shape) and abs(mean * fact.shape[-1] - 1) < _ROUNDING
    if low >= -_ROUNDING or is_whole or is_rare or sums_to_one or _is_difference(fact, ""):
        return None  # rounding, counts, marks, stray values
    made, line = next(way_of(evidence), ("", ""))
    text = f"{name_of(fact)} runs from {low:.4g} to {high:.4g}"
    if made not in _SCORES:
        # Probabilities with noise, or errors, are drawn from as well, and mean something else.
        return Hint(text=f"{text}. If these are scores, {kind} takes them as logits")
    name = fact.expression or "them"
    return Hint(
        text=f"{text}: the scores of a layer{line}, which {kind} takes as logits: pass "
        f"logits={name} in place of probs"
    )


# --- weights to draw from -------------------------------------------------------------------------


_WRITES = stems(Trait.WRITES, without=Trait.ADDS)
_MASKS = {it.rstrip("_") for it in _WRITES | stems(Trait.SUBSTITUTES) | stems(Trait.BLANKS)}
"""Ops with which a filter or a mask leaves candidates out."""


def _weights(evidence: Evidence) -> TensorFact | None:
    at_fault = fault(evidence)
    if at_fault is None or evidence.op.name != "aten::multinomial" or at_fault[0].is_silent:
        return None
    return at_fault[1] if "float" in at_fault[1].dtype else None


def bad_weights(evidence: Evidence) -> Hint | None:
    """Weights are negative as scores are, infinite, or all 0 in a row."""
    weights, numbers = _weights(evidence), _numbers(evidence, "aten::multinomial")
    if weights is None or weights.summary.nan:
        return None
    if weights.summary.inf:
        made, line = next(way_of(evidence), ("", ""))
        count = weights.summary.inf
        text = f"{format_count(count, 'weight')} {'is' if count == 1 else 'are'} infinite"
        if not made.startswith("exp"):
            return None
        return Hint(
            text=f"{text}, made by {made}{line} in {weights.dtype}: softmax, which subtracts the "
            "largest score first, does not overflow"
        )
    if numbers is None:
        return None
    low, high = numbers[2:]
    if low >= 0:
        return _nothing_to_draw(evidence, weights)
    if _is_rounded(low, high):
        return None
    made, line = next(way_of(evidence), ("", ""))
    text = f"the weights run from {low:.4g} to {high:.4g}, and none may be below 0"
    # No code: for scores of another kind the draw would run as well, and mean something else.
    if made in (*_SCORES, "log_softmax", "_log_softmax"):
        what = "logarithms of probabilities" if "log" in made else "the scores of a layer"
        cure = "exp" if "log" in made else "softmax"
        return Hint(text=f"{text}: {what}{line}, of which {cure} makes weights")
    return Hint(text=f"{text}: softmax makes weights of scores, abs() of errors")


def _nothing_to_draw(evidence: Evidence, weights: TensorFact) -> Hint | None:
    """All weights of a row are 0: everything was filtered out, or underflowed."""
    rows = evidence.violation.offenders if evidence.violation else None
    if rows is None or not rows.first or any(item.value not in (0, 0.0) for item in rows.first):
        return None
    masks = (f"{op}{line}" for op, line in way_of(evidence) if op.rstrip("_") in _MASKS)
    mask = next(masks, None)
    why = f"{mask} may have left no candidate. " if mask else ""
    if weights.dtype in _HALVES:
        why += f"The weights may be too small for {weights.dtype}. "
    return Hint(
        text=f"{rows.count} of {rows.total} rows sum to 0. {why}Keep at least one weight above 0 "
        "in each row"
    )
