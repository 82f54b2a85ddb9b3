"""A second backward through a part of the graph that an earlier one has freed."""

from __future__ import annotations

import re

from cudalens.core.report import Evidence
from cudalens.diagnosis.host_errors._base import HostVerdict, autograd, family
from cudalens.diagnosis.host_errors._words import expression, named

_GENERAL = (
    "backward frees what the forward pass had saved. A second backward of the same loss, or a "
    "tensor kept from an earlier step (a hidden state, a running loss), leads into that part."
)


@family(r"Trying to backward through the graph a second time")
def second_backward(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The graph was freed by an earlier backward."""
    fact = named(evidence, "self", "tensors", "tensors[0]", "outputs", "outputs[0]")
    subject = expression(fact) or "this loss"
    made, by = _line(evidence, "made"), _line(evidence, "by")
    headline = f"a part of the graph of {subject} was freed by an earlier backward"
    if made and by:
        headline = f"{subject} leads into the graph of {made}, which backward in {by} has freed"
    return autograd(
        headline,
        _told(evidence) or _GENERAL,
        fact.argument if fact else None,
        expression=expression(fact),
        name=evidence.fact("freed.name"),
        kind=evidence.fact("freed.kind"),
        by=by,
        read=_line(evidence, "read"),
        kept=_line(evidence, "kept"),
        is_made_again=evidence.fact("freed.again") is not None,
        has_stepped=evidence.fact("freed.stepped") is not None,
        code=(evidence.fact("freed.by_at") or "").partition(": ")[2],
        kept_code=(evidence.fact("freed.kept_at") or "").partition(": ")[2],
    )


def _told(evidence: Evidence) -> str:
    """Say what freed the graph, and what led back into it."""
    by, made, read, kept = _spelled(evidence, "by", "made", "read", "kept")
    if not made or not by:
        return ""
    node = evidence.fact("freed.node")
    said = f"backward frees what the forward pass had saved: {by} freed {node} of {made}."
    if not read:
        return said
    what = evidence.fact("freed.name") or "a tensor"
    return f"{said} After that, {read} read {what} as {kept} had made it before."


def _spelled(evidence: Evidence, *keys: str) -> list[str]:
    """Give places with their texts, each text once: ``line 7 (h = rnn(x, h))``."""
    found: list[str] = []
    for key in keys:
        line, _, code = (evidence.fact(f"freed.{key}_at") or "").partition(": ")
        spelled = f"{line} ({code})" if code else line
        found.append(line if spelled in found else spelled)
    return found


def _line(evidence: Evidence, key: str) -> str | None:
    """Give the place without its text: ``line 7``."""
    place = evidence.fact(f"freed.{key}_at")
    return place.partition(": ")[0] if place else None
