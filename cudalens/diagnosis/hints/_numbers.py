"""The floating-point numbers at fault, in the form in which the rules ask about them."""

from __future__ import annotations

from cudalens.core.report import Evidence
from cudalens.core.report_types import TensorFact
from cudalens.diagnosis.hints._roles import fault

ROUNDING = 1e-2
"""So far from 0 and 1 the rounding errors of a sum or product go."""
HALVES = ("float16", "bfloat16")


def numbers_of(evidence: Evidence, *ops: str) -> tuple[str, TensorFact] | None:
    """Give the argument at fault and its tensor when it holds floating-point numbers."""
    found = fault(evidence)
    if found is None or evidence.op.name not in ops or "float" not in found[1].dtype:
        return None
    return found[0].argument, found[1]


def ends_of(fact: TensorFact) -> tuple[float, float] | None:
    """Give the smallest and the largest number, ``None`` unless all are finite."""
    low, high = fact.summary.min, fact.summary.max
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return None
    return None if fact.summary.nan or fact.summary.inf else (float(low), float(high))
