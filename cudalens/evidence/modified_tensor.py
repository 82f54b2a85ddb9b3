"""Who modified the saved tensor that autograd complains of, and who had saved it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cudalens.core.evidence_types import InPlaceChange
from cudalens.core.report_types import AutogradNeighbourhood, SourceSpan
from cudalens.source.locate import locate_entries
from cudalens.source.safe_eval import instance_dict

MODIFIED = "has been modified by an inplace operation"


def modified_tensor(
    recorder: Any, error: BaseException
) -> tuple[InPlaceChange | None, SourceSpan | None]:
    """Return the write to a saved tensor, and the place of the call that had saved it."""
    found = recorder.modified_tensor(error)
    if found is None:
        return None, None
    change = InPlaceChange(
        modified=found.written_by[-1] if found.written_by else None,
        made=found.made_by,
        read=found.read_by,
        savers=() if found.saved_by is None else (found.saved_by,),
        is_parameter=found.is_parameter,
        module=_module(found.written_within),
    )
    return change, locate_entries(list(found.saved_at)) if found.saved_at else None


def with_marked_write(
    graph: AutogradNeighbourhood, change: InPlaceChange | None
) -> AutogradNeighbourhood:
    """Mark the graph's node of the write, where only one node is of its op and its line."""
    step = change.modified if change is not None else None
    if step is None or step.op is None or step.source is None:
        return graph
    op, line = step.op, step.source
    found = [item.id for item in graph.nodes if (item.op, item.source) == (op, line)]
    if len(found) != 1:
        return graph
    marked = tuple(
        replace(item, role="bad_input", name=line.text or op) if item.id in found else item
        for item in graph.nodes
    )
    return replace(graph, nodes=marked)


def _module(module: object) -> str | None:
    """Name torch's module that was made with ``inplace=True``."""
    if instance_dict(module).get("inplace") is not True:
        return None
    kind = type(module)
    # Another's may mean something else by it.
    return kind.__name__ if kind.__module__.partition(".")[0] == "torch" else None
