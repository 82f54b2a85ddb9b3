"""Saved tensors: freed with the graph by an earlier backward, or changed in place since."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace

from cudalens.core.evidence_types import FreedGraph, InPlaceChange
from cudalens.core.graph_types import ProvenanceStep
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, LineRef, format_shape
from cudalens.core.torch_functions import Trait, functions
from cudalens.diagnosis.host_errors._base import Answer, autograd, pattern
from cudalens.diagnosis.host_errors._words import (
    MAX_HEADLINE,
    dtype,
    expression_of,
    ints,
    named,
)
from cudalens.diagnosis.user_code import statement_of, statements_of

_GENERAL = (
    "backward frees the tensors that the forward pass saved. A second backward of the same loss, "
    "or a tensor kept from an earlier step (a hidden state, a running loss), leads into that part."
)


@pattern(r"Trying to backward through the graph a second time")
def second_backward(evidence: Evidence, match: re.Match[str]) -> Answer:
    """The graph was freed by an earlier backward."""
    fact = named(evidence, "self", "tensors", "tensors[0]", "outputs", "outputs[0]")
    name = expression_of(fact)
    freed = evidence.freed or FreedGraph(node="")
    made, by = _where(freed.made), _where(freed.freed)
    headline = f"a part of the graph of {name or 'this loss'} was freed by an earlier backward"
    if made and by:
        headline = f"{name or 'this loss'} depends on the graph of {made}, which {by} has freed"
        if freed.read and freed.is_made_again and freed.name:
            others = (freed.made, freed.read, freed.holder)
            if freed.freed and any(it and it.cell and it.line == freed.freed.line for it in others):
                # A line of another cell has the same number.
                here = evidence.source
                by = replace(freed.freed, cell=here.cell, file=here.file).where if here else by
            headline = f"{_still_has(freed.name)} the graph of the previous step, which {by} has "
            headline += "freed"
    yield autograd(headline, _explanation(freed) or _GENERAL, fact.argument if fact else None)
    if not by:
        return
    if not freed.read:
        yield _backward_twice(evidence, freed)
    elif freed.is_made_again:
        yield _carried_state(evidence, freed)
    else:
        yield _made_once(evidence, freed)


def _explanation(freed: FreedGraph) -> str:
    """Say what freed the graph, and what led back into it."""
    by, made, read, holder = _with_code(freed.freed, freed.made, freed.read, freed.holder)
    if not made or not by:
        return ""
    text = "backward frees the tensors that the forward pass saved: "
    text += f"{by} freed {freed.node} of {made}."
    if not read:
        return text
    return f"{text} After that, {read} used the {freed.name or 'tensor'} that {holder} made before."


def _with_code(*lines: LineRef | None) -> list[str]:
    """Return places with their texts, each text once: ``line 7 (h = rnn(x, h))``."""
    places: list[str] = []
    for line in lines:
        where = _where(line)
        text = f"{where} ({line.text})" if line and line.text else where
        places.append(where if text in places else text)
    return places


def _where(line: LineRef | None) -> str:
    return line.where if line else ""


# --- hints ---------------------------------------------------------------------------------------


def _carried_state(evidence: Evidence, freed: FreedGraph, changed: str = "") -> Hint:
    """A state or a running sum goes from step to step with the graph of all steps before.

    Args:
        changed: text that names the line that has changed the parameters since.
    """
    name, by = freed.name or _attribute_kept(freed), _where(freed.freed)
    here = evidence.source
    if not by or (changed and here is not None):
        by = f"line {here.line}" if here is not None else "the backward"
    # Where a later line gives the variable its value, detaching it after backward comes too early.
    given = _names(freed.holder.text)[0] if freed.holder is not None else set()
    is_assigned = freed.name is not None and given.issuperset(freed.name.split(", "))
    if name is not None and freed.detached and is_assigned:
        text = f"{_still_has(name)} the graph of the previous step{changed}: add {name} = "
        text += f"{freed.detached} after {by}"
    elif name is not None:
        # A list of results is emptied, a state is detached.
        them = "them" if ", " in name else "it"
        text = f"{_still_has(name)} the graph of the previous step{changed}: detach {them} before "
        text += "the next step, or start anew"
    else:
        text = f"{_where(freed.read)} reads what {_where(freed.holder)} made in an earlier step"
        text += f"{changed}: detach it before the next step, or start anew"
    text += ". retain_graph=True does not help here" if changed else ""
    return Hint(rule="carried_state", text=text)


def _still_has(names: str) -> str:
    """Return ``h still has``, and ``h and c still have`` for ``h, c``."""
    return f"{names.replace(', ', ' and ')} still {'have' if ', ' in names else 'has'}"


def _attribute_kept(freed: FreedGraph) -> str | None:
    """Return the attribute, or the list, in which one pass left what the next one read."""
    text = freed.holder.text if freed.holder else None
    match statement_of(text):
        case ast.Expr(ast.Call(func=ast.Attribute(value=ast.Name() as kept, attr="append"))):
            return kept.id
    attributes = [name for name in _names(text)[0] if "." in name]
    return attributes[0] if len(attributes) == 1 else None


def _made_once(evidence: Evidence, freed: FreedGraph) -> Hint:
    """A result is read on both sides of a backward that frees its graph."""
    # What a line in between made of it is another result: to detach that is no help.
    is_it = _where(freed.made) == _where(freed.holder)
    name, read = freed.name if is_it else None, _where(freed.read)
    text = f"{name or 'the result'} of {_where(freed.made)} serves one backward: "
    if not freed.has_stepped:
        text += f"keep its graph in {_where(freed.freed)} (retain_graph=True), or make it again, "
        text += f"with all that it is made of, before {read}"
        here, reader = evidence.source, freed.read
        if name and not (reader and here and reader.line == here.line):
            text += f". A pass that is not to train what made {name} takes {name}.detach()"
        return Hint(rule="made_once", text=text)
    text += f"make it again, with all that it is made of, before {read}, or give "
    text += f"{name}.detach()" if name else "what is detached of it"
    return Hint(rule="made_once", text=f"{text} to a pass that is not to train it")


def _names(code: str | None) -> tuple[set[str], set[str]]:
    """Return the variables and attributes that an assignment gives a value, and those it reads."""
    step = statement_of(code)
    names = [item for item in ast.walk(step) if isinstance(item, ast.Name | ast.Attribute)]
    stored = {ast.unparse(item) for item in names if isinstance(item.ctx, ast.Store)}
    read = {ast.unparse(item) for item in names if isinstance(item.ctx, ast.Load)}
    return (stored, read) if isinstance(step, ast.Assign | ast.AugAssign) else (set(), read)


def _backward_twice(evidence: Evidence, freed: FreedGraph) -> Hint:
    """Two losses share a graph, or one loss is used twice."""
    by, here, line = _where(freed.freed), evidence.source, freed.freed
    text = f"keep the graph in {by} (retain_graph=True), or add the losses and run backward once"
    if line is not None and here is not None and line.line == here.line:
        text = f"backward runs again through what {_where(freed.made)} made once: run the forward "
        text += "pass again before each backward"
    elif freed.has_stepped:
        text = f"the optimizer has changed the parameters since the backward in {by}: run the "
        text += "forward pass again before this one"
    return Hint(rule="backward_twice", text=text)


# --- tensors that were changed in place -----------------------------------------------------------

_MAX_SAVERS = 3
_MAX_STALE = 4
_MAX_NAME = 24
_IN_PLACE = re.compile(r"[a-z]\w*[a-z]_")
_OF_GRADIENTS = {"clip_grad_norm_", "clip_grad_value_", "unscale_"}
"""Functions in place that change gradients only, and no tensor that backward needs."""
_ONLY_IN_PLACE = functions(Trait.ONLY_IN_PLACE)
_OF_VIEWS = ("AsStrided", "AsStridedBackward0", "T", "TBackward", "TBackward0", "ViewBackward0")
_AGAIN = "run the forward pass again after it"
"""A backward that is moved before a step adds its gradients to those that the step takes."""


@pattern(
    r"modified by an inplace operation: \[(?P<kind>[\w.]+) \[(?P<shape>[\d, ]*)\]\],?"
    r"(?: which is output (?P<at>\d+) of (?P<node>[\w:]+),)? is at version (?P<found>\d+); "
    r"expected version (?P<saved>\d+)"
)
def saved_tensor_modified(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A tensor that backward needs was changed in place after it had been saved."""
    step = evidence.modified.modified if evidence.modified else None
    tensor = [f"{dtype(match['kind'])} {format_shape(ints(match['shape']))}"]
    # The transposed weight of a layer is the output of an op that no user has called.
    node = match["node"] if match["node"] not in _OF_VIEWS else None
    tensor += [f"output {match['at']} of {node}"] if node else []
    facts = ", ".join(tensor)
    if step is None:
        headline = f"a tensor that backward needs was changed in place: {facts}"
        headline = (
            headline if len(headline) <= MAX_HEADLINE else headline.removesuffix(f": {facts}")
        )
        name = f"This tensor ({facts})"
        change = "an op changed it in place"
    else:
        changed = _changed(step.source)
        own = evidence.modified.name if evidence.modified else None
        headline = _headline(evidence, step, own or changed)
        name = f"`{changed}` ({facts})" if changed else f"The tensor ({facts})"
        writes = evidence.modified.writes if evidence.modified else ()
        places = dict.fromkeys(map(_format_step, writes or (step,)))
        change = f"changed in place by {' and by '.join(places)}"
    savers = list(map(_format_step, evidence.modified.savers)) if evidence.modified else []
    by = f"by {' or by '.join(savers)} " if 0 < len(savers) <= _MAX_SAVERS else ""
    yield autograd(
        headline,
        f"{name} was saved for backward {by}at version {match['saved']}, and is at version "
        f"{match['found']} now: {change}. With it, backward would compute wrong gradients.",
    )
    if (hint := _out_of_place(evidence)) is not None:
        yield hint


_HEAD_OF_BLOCK = re.compile(r"^with\b[^:]*:\s*(?=\S)")
"""``with torch.no_grad():`` before the statement that it holds, in one line."""


def _headline(evidence: Evidence, step: ProvenanceStep, changed: str) -> str:
    """Return ``opt.step() in line 13 changed D[2].weight, which loss.backward() needs``."""
    ref, here = step.source, evidence.source
    code = (here and here.text) or ""
    # A long line, or one of several calls, is not named.
    is_short = re.fullmatch(r"[\w.]{1,20}\.backward\([\w=, ]{0,20}\)", code) is not None
    backward = code if is_short else "backward"
    if ref is None or not ref.where:
        return f"{step.op or 'an op'} changed a tensor, which {backward} needs"
    place = ref.near(here)
    rest = f"changed {changed or 'a tensor'}, which {backward} needs"
    if not ref.text:
        return f"{place} {rest}"
    rest = f" in {place} {rest}"
    room = MAX_HEADLINE - len(rest)
    text = _HEAD_OF_BLOCK.sub("", ref.text)
    text = text if len(text) <= room else f"{text[: max(room - 1, 12)].rstrip()}…"
    return f"{text}{rest}"


def _changed(ref: LineRef | None) -> str:
    """Return what one statement writes to: ``h`` of ``h += 1`` and of ``h[mask].clamp_(0)``."""
    statement = statement_of(ref.text if ref else None)
    node: ast.AST = statement
    if isinstance(statement, ast.AugAssign):
        node = statement.target
    elif isinstance(statement, ast.Assign):
        node = statement.targets[0]
        if not isinstance(node, ast.Subscript):
            node = statement.value
    elif isinstance(statement, ast.Expr):
        node = statement.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_in_place = _IN_PLACE.fullmatch(node.func.attr)
        node = node.func.value if is_in_place else ast.Pass()
    while isinstance(node, ast.Subscript):
        node = node.value
    name = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
    return name if len(name) <= _MAX_NAME else ""


def _format_step(step: ProvenanceStep) -> str:
    """Return the line of an op with its code, the op where the line is not known."""
    code = step.source.text if step.source else None
    where = step.source.where if step.source else ""
    return (f"`{code}` at {where}" if code else where) or step.op or ""


def _out_of_place(evidence: Evidence) -> Hint | None:
    """Say where a new tensor has to be made instead."""
    modified = evidence.modified
    if modified is None or modified.modified is None or modified.modified.source is None:
        return None
    code = modified.modified.source.text or ""
    writes = [it.source for it in modified.writes if it.source] or [modified.modified.source]
    places = " and in ".join(dict.fromkeys(it.near(evidence.source) for it in writes))
    text = f"make a new tensor in {places} instead of changing the one that backward needs"
    if _only_steps(code):
        return _after_step(evidence, modified.modified.source, modified.savers)
    if modified.is_parameter:
        text = f"a parameter is changed between forward and backward: {_AGAIN}"
    elif modified.module:
        text = (
            f"{modified.module} was made with inplace=True and writes over its input: let it make "
        )
        text += "a new tensor"
    else:
        text = _before_writes(evidence, modified) or text
    return Hint(rule="out_of_place", text=text)


def _before_writes(evidence: Evidence, modified: InPlaceChange) -> str:
    """Say what to do before the first of all writes: a copy before a later one is too late.

    A copy does not help a line whose right side reads what the line itself writes over, again and
    again in a loop: the part that is read has to be copied there.
    """
    first = next((it for it in modified.writes or (modified.modified,) if it is not None), None)
    line = first.source if first is not None else None
    name = _changed(line)
    if line is None or not name:
        return ""
    where, statement = line.near(evidence.source), statement_of(line.text)
    savers = [it.source for it in modified.savers if it.source is not None]
    if any((it.line, it.cell, it.file) == (line.line, line.cell, line.file) for it in savers):
        parts = [part for part in ast.walk(statement) if _is_part_read(part, name)]
        if len(parts) == 1:
            part = ast.unparse(parts[0])
            return f"{where} writes over {part}, which backward needs: read {part}.clone() there"
        return f"{where} writes to {name}, which it has read: write to a new tensor there"
    others = [it.source for it in modified.writes[1:] if it.source is not None]
    places = " and ".join(it.near(evidence.source) for it in others)
    also = f" ({places} {'changes' if len(others) == 1 else 'change'} it too)" if others else ""
    if modified.is_shared:
        return f"{where} changes {name}, which another name has too: change a copy of it{also}"
    if new := _as_new_tensor(line.text or ""):
        return f"{where}: {new} makes a new tensor{also}"
    if _writes_to_part(statement):
        return f"before {where}: {name} = {name}.clone(), so that backward keeps the old one{also}"
    return ""  # an item of a list, or a method that no other replaces


def _writes_to_part(statement: ast.stmt) -> bool:
    """Return whether a statement that wrote to a tensor has it before a subscript.

    ``h[0] += 1`` may write to an item of a list, which takes no slice and no tuple.
    """
    match statement:
        case ast.Assign(targets=[ast.Subscript(), *_]):
            return True
        case ast.AugAssign(target=ast.Subscript(slice=ast.Tuple() | ast.Slice())):
            return True
    return False


def _is_part_read(node: ast.AST, name: str) -> bool:
    """Return whether a node reads a part of ``name``: ``rows[j]``."""
    is_read = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
    return is_read and ast.unparse(node.value) == name  # type: ignore[attr-defined]


def _as_new_tensor(code: str) -> str:
    """Return ``h = h + 1`` for ``h += 1``; empty where the tensor may be an item of a list."""
    statement = statement_of(code)
    match statement:
        case ast.AugAssign(target=ast.Name() | ast.Attribute()):
            changed = ast.BinOp(statement.target, statement.op, statement.value)
            new = ast.Assign([statement.target], changed, lineno=1)
        case ast.Expr(
            ast.Call(func=ast.Attribute((ast.Name() | ast.Attribute()) as name, method)) as call
        ) if _IN_PLACE.fullmatch(method) and method not in _ONLY_IN_PLACE:
            call.func = ast.Attribute(name, method.removesuffix("_"))
            new = ast.Assign([name], call, lineno=1)
        case _:
            return ""
    return ast.unparse(ast.fix_missing_locations(new))


def _after_step(evidence: Evidence, step: LineRef, savers: Sequence[ProvenanceStep]) -> Hint:
    """Name what the parameters computed before an optimizer changed them."""
    freed, saver = evidence.freed, savers[0].source if len(savers) == 1 else None
    place = step.near(evidence.source)
    if freed is not None and freed.read and freed.is_made_again:
        changed = f", and {place} has changed the parameters since"
        return _carried_state(evidence, freed, changed)
    made = ""
    if freed is not None and freed.name:
        made = f" with which {_where(freed.holder)} made {freed.name}"
    elif saver and (stored := _names(saver.text)[0]):
        made = f" with which {saver.near(evidence.source)} made {' and '.join(sorted(stored))}"
    text = f"the step changes the parameters{made}: {_again(evidence)}"
    return Hint(rule="out_of_place", text=text)


def _again(evidence: Evidence) -> str:
    """Return what to run again after a step: all lines between the parameters and the loss."""
    stale = evidence.modified.stale if evidence.modified is not None else ()
    if not 0 < len(stale) <= _MAX_STALE:
        return _AGAIN
    numbers = [str(line.line) for line in stale]
    if len(numbers) == 1:
        return f"run {stale[0].near(evidence.source)} again after it"
    listed = f"{', '.join(numbers[:-1])} and {numbers[-1]}"
    return f"run lines {listed} again after it"


def _only_steps(code: str) -> bool:
    """Return whether a line calls an optimizer's step and holds no other change in place."""
    nodes = [node for statement in statements_of(code) for node in ast.walk(statement)]
    calls = [item.func for item in nodes if isinstance(item, ast.Call)]
    names = {item.attr for item in calls if isinstance(item, ast.Attribute)}
    if any(isinstance(item, ast.AugAssign) for item in nodes):
        return False
    return "step" in names and not any(map(_IN_PLACE.fullmatch, names - _OF_GRADIENTS))
