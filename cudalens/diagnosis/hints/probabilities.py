"""Causes of numbers that are no probabilities: binary cross entropy, NaN from before."""

from __future__ import annotations

from cudalens.core.report import Evidence
from cudalens.core.report_types import FIRST_BAD, Hint, TensorFact
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._reading import HALVES, ROUNDING, ends_of, numbers_of
from cudalens.diagnosis.hints._roles import fault
from cudalens.diagnosis.user_code import renamed, rewritten

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
        text=f"the input leaves 0 … 1 by {max(-low, high - 1):.1e} only ({worst!r}): a rounding "
        f"error{half} of the sum or product that made it",
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
        text=f"the {_argument(found[0])} runs from {ends[0]:g} to {ends[1]:g}, as the bytes of an "
        "image do: divide by 255",
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
    watch = evidence.nan_watch
    if found is None or not found[1].summary.nan or (watch and watch.arrival):
        return None
    fact = found[1]
    count = f"{fact.summary.nan} of {found[0].offenders.total or fact.summary.nan} numbers"
    proven = (step.source for step in evidence.provenance if step.note == FIRST_BAD)
    first = next(proven, None)
    where = f"; the first recorded op that gave one is in line {first.line}" if first else ""
    return Hint(
        text=f"{count} were NaN before this op, which only met them{where}",
        fix=None if watch else "%%cudacheck --nan",
    )
