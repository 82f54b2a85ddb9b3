"""Who modified the saved tensor that autograd complains of, and who had saved it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cudalens.core.evidence_types import InPlaceChange
from cudalens.core.report import Evidence
from cudalens.core.report_types import CHANGED
from cudalens.source.locate import locate_entries
from cudalens.source.safe_eval import instance_dict

MODIFIED = "has been modified by an inplace operation"


def with_modified(evidence: Evidence, recorder: Any, message: str) -> Evidence:
    """Add the write, the op that had saved the tensor, and the module that was made in place."""
    found = recorder.modified_tensor(message)
    if found is None:
        return evidence
    forward = locate_entries(list(found.saved_at)) if found.saved_at else None
    modified = InPlaceChange(
        modified=found.written_by[-1] if found.written_by else None,
        made=found.made_by,
        read=found.read_by[-1] if found.read_by else None,
        savers=tuple(dict.fromkeys(replace(step, note=None) for step in found.saved_by)),
        is_parameter=found.is_parameter,
        module=_module(found.written_within),
    )
    changed = () if modified.modified is None else (replace(modified.modified, note=CHANGED),)
    return replace(
        evidence,
        forward_source=evidence.forward_source or forward,
        modified=modified,
        provenance=changed,
    )


def with_marked_node(evidence: Evidence) -> Evidence:
    """Mark the graph's node of the write, where only one node is of its op and its line."""
    step = evidence.modified.modified if evidence.modified is not None else None
    if step is None or step.op is None or step.source is None:
        return evidence
    op, line = step.op.partition(".")[0].rstrip("_"), step.source
    nodes = evidence.graph.nodes
    found = [item.id for item in nodes if (item.op, item.source) == (op, line)]
    if len(found) != 1:
        return evidence
    marked = tuple(
        replace(item, role="bad_input", name=line.text or op) if item.id in found else item
        for item in nodes
    )
    return replace(evidence, graph=replace(evidence.graph, nodes=marked))


def _module(module: object) -> str | None:
    """Name torch's module that was made with ``inplace=True``."""
    if instance_dict(module).get("inplace") is not True:
        return None
    kind = type(module)
    # Another's may mean something else by it.
    return kind.__name__ if kind.__module__.partition(".")[0] == "torch" else None
