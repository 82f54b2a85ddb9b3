"""Who modified the saved tensor that autograd complains of, and who had saved it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from cudalens.core.evidence_types import InPlaceChange
from cudalens.core.report import Evidence
from cudalens.core.report_types import CHANGED
from cudalens.source.locate import locate_entries
from cudalens.source.module_path import path_below
from cudalens.source.running_node import running
from cudalens.source.safe_eval import SafeEvaluator, evaluator_for, instance_dict, value_or
from cudalens.source.stack import place_of, running_frame

MODIFIED = "has been modified by an inplace operation"


def with_modified(
    evidence: Evidence, recorder: Any, message: str, entries: Sequence[TracebackType]
) -> Evidence:
    """Add the write, the op that had saved the tensor, and the module that was made in place."""
    found = recorder.modified_tensor(message)
    if found is None:
        return evidence
    forward = locate_entries(list(found.saved_at)) if found.saved_at else None
    module, expression = _module(found, entries)
    modified = InPlaceChange(
        modified=found.written_by[-1].step if found.written_by else None,
        made=found.made_by,
        read=found.read_by[-1] if found.read_by else None,
        savers=tuple(dict.fromkeys(replace(step, note=None) for step in found.saved_by)),
        is_parameter=found.is_parameter,
        module=module,
        module_expression=expression,
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


def _module(found: Any, entries: Sequence[TracebackType]) -> tuple[str | None, str | None]:
    """Name torch's module that was made with ``inplace=True``, as the user's line reaches it."""
    call = found.written_within
    if call is None or instance_dict(call.module).get("inplace") is not True:
        return None, None
    kind = type(call.module)
    if kind.__module__.partition(".")[0] != "torch":  # another's may mean something else by it
        return None, None
    return kind.__name__, _expression(call, entries)


def _expression(call: Any, entries: Sequence[TracebackType]) -> str | None:
    """Return the module as an expression of the user's line: ``self.net[2]``."""
    node = running(place_of(call.line)).node
    if not isinstance(node, ast.Call):
        return None
    frame = running_frame(call.line.code, entries)
    if frame is not None:
        reader = evaluator_for(frame)
    else:
        names = call.line.code.co_varnames[:1]
        reader = SafeEvaluator(dict.fromkeys(names, call.holder))
    path = path_below(call.called, call.module)
    if path is None or value_or(reader, node.func, None) is not call.called:
        return None
    parts = [part for part in path.split(".") if part]
    steps = (f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)
    return ast.unparse(node.func) + "".join(steps)
