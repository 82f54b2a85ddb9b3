"""Tell who modified the saved tensor that autograd complains of, and who had saved it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from cudalens.core.report import Evidence
from cudalens.core.report_types import ProvenanceStep
from cudalens.source.locate import locate_entries
from cudalens.source.module_path import path_below
from cudalens.source.running_node import running
from cudalens.source.safe_eval import SafeEvaluator, evaluator_for, instance_dict, value_or
from cudalens.source.stack import place_of, running_frame

_Fact = tuple[str, str]


def with_modified(
    evidence: Evidence, recorder: Any, message: str, entries: Sequence[TracebackType]
) -> Evidence:
    """Add the write, the op that had saved the tensor, and the module that was told to write."""
    found = recorder.modified_tensor(message)
    if found is None:
        return evidence
    forward = locate_entries(list(found.saved_at)) if found.saved_at else None
    return replace(
        evidence,
        forward_source=evidence.forward_source or forward,
        facts=(*evidence.facts, *_facts(found), *_module(found, entries)),
    )


def _facts(found: Any) -> tuple[_Fact, ...]:
    facts = [("inplace.saved_version", str(found.complaint.saved))]
    facts.append(("inplace.found_version", str(found.complaint.found)))
    for key, step in (
        ("modified", found.written_by[-1].step if found.written_by else None),
        ("made", found.made_by),
        ("read", found.read_by[-1] if found.read_by else None),
    ):
        if step is not None:
            facts += [(f"inplace.{key}_by", step.op or ""), (f"inplace.{key}_at", _place(step))]
    savers = dict.fromkeys((step.op or "", _place(step)) for step in found.saved_by)
    facts += [
        (f"inplace.saver_{number}", " at ".join(filter(None, step)))
        for number, step in enumerate(savers)
    ]
    if found.is_parameter:
        facts.append(("inplace.parameter", "yes"))
    return tuple(facts)


def _place(step: ProvenanceStep) -> str:
    """Return a step's line as ``In [3] line 7: w += 1``."""
    return "" if step.source is None else step.source.spoken


def _module(found: Any, entries: Sequence[TracebackType]) -> tuple[_Fact, ...]:
    """Name torch's module that was made with ``inplace=True``, as the user's line reaches it."""
    call = found.written_within
    if call is None or instance_dict(call.module).get("inplace") is not True:
        return ()
    kind = type(call.module)
    if kind.__module__.partition(".")[0] != "torch":  # another's may mean something else by it
        return ()
    text = _spelled(call, entries)
    return (("inplace.module", kind.__name__), *([("inplace.spelled", text)] if text else []))


def _spelled(call: Any, entries: Sequence[TracebackType]) -> str:
    """Return the module as an expression of the user's line: ``self.net[2]``; empty if unsure."""
    node = running(place_of(call.line)).node
    if not isinstance(node, ast.Call):
        return ""
    frame = running_frame(call.line.code, entries)
    if frame is not None:
        reader = evaluator_for(frame)
    else:
        names = call.line.code.co_varnames[:1]
        reader = SafeEvaluator(dict.fromkeys(names, call.holder))
    path = path_below(call.called, call.module)
    if path is None or value_or(reader, node.func, None) is not call.called:
        return ""
    parts = [part for part in path.split(".") if part]
    steps = (f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)
    return ast.unparse(node.func) + "".join(steps)
