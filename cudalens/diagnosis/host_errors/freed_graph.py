"""A second backward through a part of the graph that an earlier one has freed."""

from __future__ import annotations

import ast
import re

from cudalens.core._python import parse
from cudalens.core.evidence_types import FreedGraph
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, LineRef
from cudalens.diagnosis.host_errors._base import Answer, autograd, pattern
from cudalens.diagnosis.host_errors._words import expression_of, named
from cudalens.diagnosis.user_code import parsed

_GENERAL = (
    "backward frees what the forward pass had saved. A second backward of the same loss, or a "
    "tensor kept from an earlier step (a hidden state, a running loss), leads into that part."
)
_CUTS = {
    "tensor": "{name}.detach()",
    "tuple": "tuple(item.detach() for item in {name})",
    "list": "[item.detach() for item in {name}]",
}
_BACKWARD = re.compile(r"\.backward\(\s*(?P<more>\)?)")


@pattern(r"Trying to backward through the graph a second time")
def second_backward(evidence: Evidence, match: re.Match[str]) -> Answer:
    """The graph was freed by an earlier backward."""
    fact = named(evidence, "self", "tensors", "tensors[0]", "outputs", "outputs[0]")
    name = expression_of(fact)
    freed = evidence.freed or FreedGraph(node="")
    made, by = _where(freed.made), _where(freed.freed)
    headline = f"a part of the graph of {name or 'this loss'} was freed by an earlier backward"
    if made and by:
        headline = f"{name or 'this loss'} leads into the graph of {made}, which backward in {by} "
        headline += "has freed"
    yield autograd(headline, _explanation(freed) or _GENERAL, fact.argument if fact else None)
    if not by:
        yield from _backward_above(evidence, name)
    elif not freed.read:
        yield _backward_twice(freed, name)
    elif freed.is_made_again:
        yield _carried_state(freed)
    else:
        yield _made_once(freed, name)


def _explanation(freed: FreedGraph) -> str:
    """Say what freed the graph, and what led back into it."""
    by, made, read, kept = _with_code(freed.freed, freed.made, freed.read, freed.kept)
    if not made or not by:
        return ""
    text = f"backward frees what the forward pass had saved: {by} freed {freed.node} of {made}."
    if not read:
        return text
    return (
        f"{text} After that, {read} read {freed.name or 'a tensor'} as {kept} had made it before."
    )


def _with_code(*lines: LineRef | None) -> list[str]:
    """Return places with their texts, each text once: ``line 7 (h = rnn(x, h))``."""
    found: list[str] = []
    for line in lines:
        where = _where(line)
        text = f"{where} ({line.text})" if line and line.text else where
        found.append(where if text in found else text)
    return found


def _where(line: LineRef | None) -> str:
    return line.where if line else ""


# --- hints ---------------------------------------------------------------------------------------


def _carried_state(freed: FreedGraph) -> Hint:
    """A state or a running sum goes from step to step with the graph of all steps before."""
    name, by = freed.name, _where(freed.freed)
    text = f"{name} goes on to the next step with the graph of this one: cut it off after the "
    text += f"backward in {by}"
    if name is None:
        text = f"{_where(freed.read)} reads what {_where(freed.kept)} made in an earlier step: "
        text += f"detach it after the backward in {by}"
    fix = f"{name} = {_CUTS[freed.container or 'tensor'].format(name=name)}" if name else None
    return Hint(rule="carried_state", text=text, fix=fix)


def _made_once(freed: FreedGraph, loss: str | None) -> Hint:
    """A result is read on both sides of a backward that frees its graph."""
    name, read = freed.name, _where(freed.read)
    text = f"{name or 'the result'} of {_where(freed.kept)} serves one backward: "
    if not freed.has_stepped:
        text += f"keep its graph in {_where(freed.freed)}, or make it again before {read}"
        return Hint(rule="made_once", text=text, fix=_keeping_graph(freed, loss))
    text += f"make it again before {read}"
    if name:
        text += f", or give {name}.detach() to the pass that does not train it"
    code = (freed.kept.text if freed.kept else None) or ""
    return Hint(rule="made_once", text=text, fix=code if _is_assignment(code) else None)


def _backward_twice(freed: FreedGraph, loss: str | None) -> Hint:
    """Two losses share a graph, or one loss is used twice."""
    by = _where(freed.freed)
    text, fix = f"keep the graph in {by}, or add the losses and run backward once", None
    if freed.has_stepped:
        text = f"the optimizer has changed the parameters since the backward in {by}: run the "
        text += "forward pass again before this one"
    else:
        fix = _keeping_graph(freed, loss)
    return Hint(rule="backward_twice", text=text, fix=fix)


def _backward_above(evidence: Evidence, name: str | None) -> Answer:
    """Without a recorder: the lines before show an earlier backward of the same tensor."""
    source = evidence.source
    if source is None or not name:
        return
    again = re.compile(rf"(?<![\w.]){re.escape(name)}\.backward\((?!.*retain_graph)")
    before = (item for item in source.context if item.line < (source.line or 0))
    earlier = [item.line for item in before if again.search(item.text)]
    if earlier:
        yield Hint(
            rule="backward_above",
            text=f"line {earlier[-1]} already ran backward on {name}: keep its graph there, or run "
            "the forward pass again",
            fix=f"{name}.backward(retain_graph=True)",
        )


def _keeping_graph(freed: FreedGraph, loss: str | None) -> str | None:
    """Write the backward that freed the graph so that it keeps it."""
    code = (freed.freed.text if freed.freed else None) or ""
    calls = _BACKWARD.findall(code)
    if len(calls) == 1 and parsed(code) is not None and "retain_graph" not in code:
        return _BACKWARD.sub(lambda at: _keeping(at["more"]), code)
    return f"{loss}.backward(retain_graph=True)" if loss and len(calls) > 1 else None


def _keeping(rest: str) -> str:
    return ".backward(retain_graph=True" + (")" if rest else ", ")


def _is_assignment(code: str) -> bool:
    """Return whether a line is one whole assignment, to be run again as it stands."""
    try:
        body = parse(code).body
    except SyntaxError:
        return False
    return len(body) == 1 and isinstance(body[0], ast.Assign)
