"""The recorded steps behind bad values: which made them, and which only handed them on."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from cudalens.core.api_names import stem_of
from cudalens.core.graph_types import DIVIDES, FIRST_BAD, WRITES, ProvenanceStep
from cudalens.core.report import Evidence
from cudalens.core.torch_functions import Trait, stems
from cudalens.diagnosis.user_code import last_name, statements_of

_REMAINDERS = ("remainder", "fmod", "mod")
COPIES = stems(Trait.KEEPS, without=Trait.SUBSTITUTES | Trait.WRITES | Trait.TO_HALF)
COPIES = COPIES - {"embedding"} | {"setitem"}
"""Functions that hand on, move, cast, choose or repeat the values that they were given."""
FROM_PYTHON = stems(Trait.FROM_PYTHON)


def way_of(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Yield the ops that made the values at fault, the last one first, with `` in line 7``.

    Ops that copy or move values are left out.  Where nothing was recorded, autograd may know the
    last op.
    """
    for step in evidence.provenance:
        name = stem_of(step.op or "")
        if name and name not in COPIES:
            yield name, f" in line {step.source.line}" if step.source else ""
    if not evidence.provenance:
        for node in evidence.graph.nodes:
            if node.role == "bad_input" and node.op:
                yield stem_of(node.op), ""


_FACTORIES = stems(Trait.FACTORY)


def is_made(evidence: Evidence) -> bool:
    """Return whether recorded arithmetic made the values at fault."""
    names = {name for name, _ in way_of(evidence)} if evidence.provenance else set()
    return bool(names - _FACTORIES)


_NUMBERING = stems(Trait.NUMBERS) | stems(Trait.SORTS) | {"floor_divide"}
"""Functions that give places, intervals or counts: they say nothing of how data counts."""


def is_numbered(evidence: Evidence) -> bool:
    """Return whether a function that numbers things gave the values at fault, or on their line."""
    for step in evidence.provenance:
        names = {stem_of(step.op or ""), *(last_name(it.func) for it in calls_on_line(step))}
        if names & _NUMBERING:
            return True
    return False


_MOVES = COPIES | {"sort"}
"""Functions that only move or repeat values."""
_HANDS_ON = stems(Trait.KEEPS, without=Trait.SUBSTITUTES) - {"embedding"} | {"sort"}
"""Functions that never make a value: they move, choose, store or convert what they were given."""
_CASTS = stems(Trait.CAST)
"""Functions whose result may overflow: a good value before, a bad one after."""
_OWN_VALUES = stems(Trait.NUMBERS) | _FACTORIES
"""Functions whose results are numbers of their own: places, counts, random numbers."""


def maker_steps(evidence: Evidence) -> list[ProvenanceStep]:
    """Return the recorded steps that made or wrote the bad values, newest first.

    All writers where the recorder saw them write, else the last call that did more than hand
    values on.  Empty where a loader gave the values as they are.
    """
    steps = [step for step in evidence.provenance if step.op and step.source is not None]
    stems = [stem_of(step.op or "") for step in steps]
    # What was divided is another number than the remainder.
    remainders = (at for at, stem in enumerate(stems) if stem.strip("_") in _REMAINDERS)
    end = next(remainders, len(steps)) + 1
    steps, stems = steps[:end], stems[:end]
    proven = [it for it in steps if (it.note or "").startswith((WRITES, FIRST_BAD))]
    proven = [it for it in proven if not _is_another(it, stems[: steps.index(it)], evidence)]
    if proven:
        return proven
    if evidence.provenance and evidence.provenance[-1].op is None and _MOVES.issuperset(stems):
        return []
    made = [step for step, stem in zip(steps, stems, strict=True) if stem not in _HANDS_ON]
    if len(made) > 1 and stem_of(made[0].op or "") == "where":
        made = made[1:]  # it chose among values that another line had made
    lists = [step for step, stem in zip(steps, stems, strict=True) if stem in FROM_PYTHON]
    divisions = [step for step in steps if step.note == DIVIDES]
    return list(dict.fromkeys((*(made or lists)[:1], *divisions)))


def _is_another(step: ProvenanceStep, since: Iterable[str], evidence: Evidence) -> bool:
    """Return whether arithmetic may have made other values of those that came in from Python.

    Args:
        since: the functions that were called since then.
    """
    changed = set(since) - _HANDS_ON
    if step.note != FIRST_BAD or stem_of(step.op or "") not in FROM_PYTHON or not changed:
        return False
    bad = evidence.violation.offenders.first if evidence.violation is not None else ()
    listed = [number for it in calls_on_line(step) if it.args for number in _listed(it.args[0])]
    # A clamp hands on what it does not cut off.
    return (
        not bad or not changed <= stems(Trait.CLAMPS) or any(it.value not in listed for it in bad)
    )


def makes_value(step: ProvenanceStep, value: object) -> bool:
    """Return whether a step is proven to make a bad value, and not to hand it on.

    A value of Python's is made by the line only where it is written there: ``torch.tensor([3, 9])``
    makes 9, ``torch.tensor(labels)`` brings it in.

    Args:
        value: the one that all bad elements have, ``None`` where they differ.
    """
    note, stem = step.note or "", stem_of(step.op or "").rstrip("_")
    if note.startswith(WRITES):
        return True
    if stem in FROM_PYTHON:
        return any(value in _listed(it.args[0]) for it in calls_on_line(step) if it.args)
    if note.startswith(FIRST_BAD):
        return stem not in _HANDS_ON or stem in _CASTS
    if not isinstance(value, (int, type(None))):
        return False  # what is NaN may have been NaN in an input
    return stem in _OWN_VALUES or (stem in ("add", "sub") and _shifts(step))


def _listed(node: ast.expr) -> list[object]:
    """Return the numbers that a list in the source shows, not those of indices and calls in it."""
    match node:
        case ast.List(items) | ast.Tuple(items):
            return [number for item in items for number in _listed(item)]
        case ast.Constant(value):
            return [value]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return [-value]
    return []


def _shifts(step: ProvenanceStep) -> bool:
    """Return whether the one sum or difference of a line is with a number other than 0."""
    sums = [
        item
        for item in _nodes_of(step)
        if isinstance(item, ast.BinOp | ast.AugAssign) and isinstance(item.op, ast.Add | ast.Sub)
    ]
    if len(sums) != 1:
        return False
    (made,) = sums
    by = [made.left, made.right] if isinstance(made, ast.BinOp) else [made.value]
    return any(isinstance(it, ast.Constant) and it.value for it in by)


def calls_on_line(step: ProvenanceStep) -> list[ast.Call]:
    """Return the calls on the line of a step, none where it is one line of several."""
    return [item for item in _nodes_of(step) if isinstance(item, ast.Call)]


def _nodes_of(step: ProvenanceStep) -> list[ast.AST]:
    """Return the syntax nodes of the line of a step, none where it is one line of several."""
    text = step.source.text if step.source is not None else None
    return list(ast.walk(ast.Module(statements_of(text), [])))
