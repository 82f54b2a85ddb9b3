"""The graph's node of a write to a saved tensor that autograd complains of."""

from __future__ import annotations

from dataclasses import replace

from cudalens.core.evidence_types import InPlaceChange
from cudalens.core.report_types import AutogradNeighbourhood

MODIFIED = "has been modified by an inplace operation"


def with_marked_write(
    graph: AutogradNeighbourhood, change: InPlaceChange | None
) -> AutogradNeighbourhood:
    """Mark the graph's node of the write, where only one node is of its op and its line."""
    step = change.modified if change is not None else None
    if step is None or step.op is None or step.source is None:
        return graph
    op, line = step.op, step.source
    writers = [item.id for item in graph.nodes if (item.op, item.source) == (op, line)]
    if len(writers) != 1:
        return graph
    marked = tuple(
        replace(item, role="bad_input", name=line.text or op) if item.id in writers else item
        for item in graph.nodes
    )
    return replace(graph, nodes=marked)
