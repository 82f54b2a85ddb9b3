"""Fixes for errors of the autograd graph."""

from __future__ import annotations

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._fixes import rewritten
from cudalens.diagnosis.hints._reading import parsed
from cudalens.diagnosis.host_errors import verdict_of

_REMEDIES = {
    "item": "keep the tensor and take item() for printing only",
    "tolist": "keep the tensor and take tolist() for printing only",
    "detach": "leave detach() out of the loss",
    "data": "leave .data out of the loss",
    "numpy": "compute the loss with torch",
    "argmax": "compute the loss from the scores, which have a gradient",
    "tensor": "combine the tensors themselves, with torch.stack or +",
    "no_grad": "compute the loss outside of no_grad",
}
_REMOVED = {"item": ".item()", "tolist": ".tolist()", "detach": ".detach()", "data": ".data"}


@rule(priority=30)
def detached_loss(evidence: Evidence) -> Hint | None:
    """The line that made the loss cut it off its graph."""
    found = verdict_of(evidence, "no_graph")
    if found is None or not found.values["cause"]:
        return None
    cause, code = found.values["cause"], found.values["code"]
    removed = _REMOVED.get(cause)
    fix = None
    if removed and code.count(removed) == 1:
        fix = code.replace(removed, "")
        # What is left of torch.tensor(x.item()) is no better.
        fix = None if "tensor(" in fix else fix
    return Hint(text=f"line {found.values['line']}: {_REMEDIES[cause]}", fix=fix)


@rule(priority=30)
def reduce_loss(evidence: Evidence) -> Hint | None:
    """A loss of several elements is reduced before backward."""
    found = verdict_of(evidence, "not_a_scalar")
    if found is None or not found.values["expression"]:
        return None
    fact = evidence.tensor(found.argument or "")
    return Hint(
        text="reduce it to one number: mean() or sum()",
        fix=rewritten(evidence, fact, "{x}.mean()"),
    )


@rule(priority=30)
def change_without_graph(evidence: Evidence) -> Hint | None:
    """A parameter is changed in place where no graph is recorded."""
    found = verdict_of(evidence, "leaf_modified")
    text = evidence.source.text if evidence.source else None
    if found is None or text is None:
        return None
    whole = parsed(text) is not None or text.rstrip().endswith(")") or "=" in text
    return Hint(
        text="change a parameter under no_grad, so that the change is no part of the graph",
        fix=f"with torch.no_grad(): {text}" if whole and not text.endswith(":") else None,
    )


@rule(priority=30)
def count_of_gradients(evidence: Evidence) -> Hint | None:
    """backward returns None for inputs without a gradient."""
    found = verdict_of(evidence, "gradient_count")
    if found is None or found.values["got"] >= found.values["want"]:
        return None
    missing = found.values["want"] - found.values["got"]
    return Hint(
        text="an input without a gradient, such as a number or a flag, has None in its place",
        fix="return grad" + ", None" * missing if found.values["got"] == 1 else None,
    )


@rule(priority=30)
def split_out_of_place(evidence: Evidence) -> Hint | None:
    """A view of several is copied before it is changed."""
    found = verdict_of(evidence, "multi_view_modified")
    if found is None or not found.values["expression"]:
        return None
    return Hint(
        text="change a copy of it",
        fix=rewritten(evidence, evidence.tensor("self"), "{x}.clone()"),
    )
