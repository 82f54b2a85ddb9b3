"""Fixes for a second backward through a part of the graph that an earlier one has freed."""

from __future__ import annotations

import ast
import re

from cudalens.core._python import parse
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._reading import parsed
from cudalens.diagnosis.host_errors import HostVerdict, verdict_of

_CUTS = {
    "tensor": "{name}.detach()",
    "tuple": "tuple(item.detach() for item in {name})",
    "list": "[item.detach() for item in {name}]",
}
_BACKWARD = re.compile(r"\.backward\(\s*(?P<more>\)?)")


def _freed(evidence: Evidence) -> HostVerdict | None:
    found = verdict_of(evidence, "second_backward")
    return found if found is not None and found.values["by"] else None


@rule(priority=30)
def carried_state(evidence: Evidence) -> Hint | None:
    """A state or a running sum goes from step to step with the graph of all steps before."""
    found = _freed(evidence)
    if found is None or not found.values["read"] or not found.values["is_made_again"]:
        return None
    name, by = found.values["name"], found.values["by"]
    if name is None:
        return Hint(
            text=f"{found.values['read']} reads what {found.values['kept']} made in an earlier "
            f"step: detach it after the backward in {by}"
        )
    return Hint(
        text=f"{name} goes on to the next step with the graph of this one: cut it off after the "
        f"backward in {by}",
        fix=f"{name} = {_CUTS[found.values['kind']].format(name=name)}",
    )


@rule(priority=30)
def made_once(evidence: Evidence) -> Hint | None:
    """A result is read on both sides of a backward that frees its graph."""
    found = _freed(evidence)
    if found is None or not found.values["read"] or found.values["is_made_again"]:
        return None
    name, by, read = (found.values[key] for key in ("name", "by", "read"))
    what = f"{name or 'the result'} of {found.values['kept']}"
    if not found.values["has_stepped"]:
        return Hint(
            text=f"{what} serves one backward: keep its graph in {by}, or make it again before "
            f"{read}",
            fix=_keeping_graph(found),
        )
    text = f"{what} serves one backward: make it again before {read}"
    if name:
        text += f", or give {name}.detach() to the pass that does not train it"
    code = found.values["kept_code"]
    return Hint(text=text, fix=code if _is_assignment(code) else None)


@rule(priority=30)
def backward_twice(evidence: Evidence) -> Hint | None:
    """Two losses share a graph, or one loss is used twice."""
    found = _freed(evidence)
    if found is None or found.values["read"]:
        return None
    by = found.values["by"]
    if found.values["has_stepped"]:
        return Hint(
            text=f"the optimizer has changed the parameters since the backward in {by}: run the "
            "forward pass again before this one"
        )
    return Hint(
        text=f"keep the graph in {by}, or add the losses and run backward once",
        fix=_keeping_graph(found),
    )


@rule(priority=30)
def backward_above(evidence: Evidence) -> Hint | None:
    """Without a recorder: the lines before show an earlier backward of the same tensor."""
    found = verdict_of(evidence, "second_backward")
    source = evidence.source
    if found is None or found.values["by"] or source is None or not found.values["expression"]:
        return None
    name = found.values["expression"]
    earlier = [
        item.line
        for item in source.context
        if item.line < (source.line or 0)
        and re.search(rf"(?<![\w.]){re.escape(name)}\.backward\((?!.*retain_graph)", item.text)
    ]
    if not earlier:
        return None
    return Hint(
        text=f"line {earlier[-1]} ran backward on {name} already: keep its graph there, or run the "
        "forward pass again",
        fix=f"{name}.backward(retain_graph=True)",
    )


def _keeping_graph(found: HostVerdict) -> str | None:
    """Write the backward that freed the graph so that it keeps it."""
    code = found.values["code"]
    calls = _BACKWARD.findall(code)
    if len(calls) == 1 and parsed(code) is not None and "retain_graph" not in code:
        return _BACKWARD.sub(lambda at: _keeping(at["more"]), code)
    name = found.values["expression"]
    return f"{name}.backward(retain_graph=True)" if name and len(calls) > 1 else None


def _keeping(rest: str) -> str:
    return ".backward(retain_graph=True" + (")" if rest else ", ")


def _is_assignment(code: str) -> bool:
    """Return whether a line is one whole assignment, to be run again as it stands."""
    try:
        body = parse(code).body
    except SyntaxError:
        return False
    return len(body) == 1 and isinstance(body[0], ast.Assign)
