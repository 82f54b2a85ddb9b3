"""Causes of class labels outside the classes."""

from __future__ import annotations

from cudalens.facts import Hint
from cudalens.hints._base import rule
from cudalens.model import Evidence

LABEL_OPS = frozenset(
    {
        "aten::nll_loss_forward",
        "aten::nll_loss_backward",
        "aten::nll_loss2d_forward",
        "aten::nll_loss2d_backward",
        "aten::multi_margin_loss",
    }
)


@rule(priority=20)
def one_based_labels(evidence: Evidence) -> Hint | None:
    """Labels run from 1 to C: shift them down by one."""
    violation = evidence.violation
    if violation is None or evidence.op.name not in LABEL_OPS or violation.size is None:
        return None
    labels = evidence.tensor("target")
    if labels is None or not isinstance(labels.summary.min, int):
        return None
    if labels.summary.min < 1 or labels.summary.max != violation.size:
        return None
    name = labels.expression
    return Hint(
        text=f"the labels run from {labels.summary.min} to {violation.size}: they look 1-based",
        fix=_replaced(evidence.call_text, name, f"{name} - 1") if name else None,
    )


def _replaced(call: str | None, name: str, by: str) -> str:
    if call and call.count(name) == 1 and "\n" not in call:
        return call.replace(name, by)
    return f"{name} = {by}"
