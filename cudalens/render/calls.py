"""The last calls before an error of the host, with their shapes, where there is no graph."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby, pairwise
from typing import TypeVar

from cudalens.core.report import (
    AutogradNeighbourhood,
    GraphEdge,
    GraphNode,
    HistoryEntry,
    Report,
    TensorFact,
)
from cudalens.render import words
from cudalens.render.fold import CALLS

MAX_CALLS = 6
_Holder = TypeVar("_Holder", Report, GraphNode, HistoryEntry)
_RESULT = re.compile(r"-> (\w+)\[([\d, ]*)\]")


def with_calls(report: Report) -> Report:
    """Return the report with the chain of its calls as its graph, when it has no graph itself.

    For a shape that does not fit it is the shapes on the way that tell where it went wrong.  The
    arrows say the order in which the calls ran.
    """
    if report.graph.nodes or report.kind != "host_error" or not report.op.name:
        return report
    calls = [_call(at, entries) for at, entries in enumerate(_calls(report))]
    given = [fact for fact in report.tensors if fact.argument]
    if not calls or not given:
        return report
    last = GraphNode(
        id=CALLS,
        name=report.op.name,
        op=report.op.name,
        role="failed",
        module_path=report.module_path,
        source=report.source.ref if report.source else None,
    )
    shapes = {call.shape for call in calls[-1:]}
    beside = [_input(report, at, fact) for at, fact in enumerate(given) if fact.shape not in shapes]
    edges = [GraphEdge(src=one.id, dst=other.id) for one, other in pairwise((*calls, last))]
    edges += [GraphEdge(src=node.id, dst=CALLS) for node in beside]
    graph = AutogradNeighbourhood(nodes=(*calls, *beside, last), edges=tuple(edges), focus=CALLS)
    return replace(report, graph=graph)


def with_module_names(report: Report) -> Report:
    """Return the report with the model's variable before its module paths, where it is proven."""
    names = dict(report.graph.module_names)
    if not names:
        return report

    def named(item: _Holder) -> _Holder:
        path = names.get(item.module_path or "")
        return item if path is None else replace(item, module_path=path)

    nodes = tuple(map(named, report.graph.nodes))
    graph = replace(report.graph, nodes=nodes, module_names=())
    history = tuple(map(named, report.history))
    return replace(named(report), graph=graph, history=history)


def module_types(report: Report) -> Mapping[str, str]:
    """Return the class of each module of the history, where its path stands for one class."""
    found: dict[str, set[str]] = {}
    for entry in report.history:
        if entry.module_path and entry.module_type:
            found.setdefault(words.one_line(entry.module_path), set()).add(entry.module_type)
    return {path: words.one_line(*kinds) for path, kinds in found.items() if len(kinds) == 1}


def _calls(report: Report) -> list[list[HistoryEntry]]:
    """Return the last calls before the one that failed: the ops of one module are one call."""
    forward = [entry for entry in report.history if entry.phase == "forward"]
    groups = [
        list(run)
        for _, run in groupby(forward, key=lambda item: item.module_path or f"\0{item.seq}")
    ]
    if groups and report.module_path and groups[-1][-1].module_path == report.module_path:
        groups.pop()  # the first ops of the call that failed
    return groups[-MAX_CALLS:]


def _call(at: int, entries: list[HistoryEntry]) -> GraphNode:
    last = entries[-1]
    found = _RESULT.search(last.shapes)
    sizes = re.findall(r"\d+", found[2]) if found else []
    # A call of several ops is named after the one that works on the largest part of the input.
    named = max(entries, key=lambda entry: len(entry.shapes.partition(" -> ")[0]))
    return GraphNode(
        id=f"call{at}",
        name=named.op,
        op=named.op,
        shape=tuple(map(int, sizes)) if found else None,
        dtype=found[1] if found else None,
        module_path=last.module_path,
        source=last.source,
    )


def _input(report: Report, at: int, fact: TensorFact) -> GraphNode:
    is_bad = words.is_at_fault(report, fact)
    return GraphNode(
        id=f"input{at}",
        name=words.tensor_name(fact),
        shape=fact.shape,
        dtype=fact.dtype,
        device=fact.device,
        role="bad_input" if is_bad else "leaf",
    )
