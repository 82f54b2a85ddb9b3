"""Try one-step edits of the failing call on copies, and return the only one that succeeds.

An edit applies one move to one operand, or to all operands that need it, in the user's own
expressions.  If several different edits succeed, only the user knows which is meant, and none is
returned.  The moves are in ``moves.py``, the trial on live tensors in ``evidence/trial.py``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from cudalens.core.evidence_types import Binding
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, TensorFact
from cudalens.core.torch_functions import Trait, functions
from cudalens.diagnosis.moves import (
    OF_KIND,
    PRODUCTS,
    Called,
    Move,
    moves,
    to_tensor_templates,
)
from cudalens.diagnosis.user_code import (
    Change,
    Fix,
    api_function,
    assignment,
    call_node,
    spliced,
    with_changes,
)

_ELEMENTWISE = {name.strip("_") for name in functions(Trait.BROADCASTS)}
_VIEW = "view size is not compatible with input tensor's size and stride"
_OF_DTYPE = re.compile(
    r"type|float|double|half|long|\bu?int|integ|byte|bool|complex|char|short", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The result of a trial; ``None`` instead if it could not be made."""

    succeeds: bool | None = None
    shape: tuple[int, ...] | None = None
    error: str | None = None
    """The reason of a failure, comparable with others."""


class Trial:
    """Interface for trying edits of the failing call.  The base class tries none."""

    operands: tuple[TensorFact, ...] = ()
    """The tensor operands of the call, by their text."""
    others: tuple[tuple[str, str], ...] = ()
    """Arguments that can be converted to a tensor: text and kind."""
    lists: tuple[tuple[str, list[Any]], ...] = ()
    """Arguments that are lists, by their text."""
    unregistered: tuple[str, str] | None = None
    """The list or dict that contains the called module, and its kind, if no module registers it."""
    is_of_loop = False
    """True if a loop around the line calls another object each time."""
    loop_names: frozenset[str] = frozenset()
    """The loop variables around the call, including those of comprehensions."""
    loop_arguments: frozenset[str] = frozenset()
    """Arguments of the running function that depend on a loop in the caller: ``f(x[n])``."""
    called = Called()
    """Facts about the called module, for the moves."""

    def __call__(self, fix: Fix | None) -> TrialResult:
        """Run the call on copies, with a fix or unchanged."""
        return TrialResult()

    def makes_finite(self, fix: Fix) -> bool:
        """Return whether values and gradients are finite with ``fix``, and are not without it."""
        return False

    def survives(self, fix: Fix, dims: int) -> bool:
        """Return whether the call also succeeds with another batch size."""
        return False

    def binding(self, expression: str, *, of_shape: bool = False) -> Binding | None:
        """Return where a name, or an attribute of a module, got its value, if proven.

        Args:
            of_shape: whether only its shape matters, which a write does not change.
        """
        return None

    def held_in(self, expression: str) -> tuple[str, str] | None:
        """Return the module attribute that is a tensor, or the class that registers it."""
        return None

    def other_readers(self, expression: str) -> tuple[list[int], list[int]]:
        """Return the other lines that read an operand, from the running one on, and those that
        need its exact numbers.
        """
        return [], []

    def layer(self, path: str, shape: tuple[int, ...] | None = None) -> Binding | None:
        """Return the user's name for the module at a path, and where it was made.

        Args:
            shape: the shape of one of its parameters.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One move, applied to one tensor or to all that need it."""

    rule: str
    words: str
    cost: int
    changes: tuple[tuple[TensorFact, str], ...]
    """The tensors, and the template that replaces each."""

    @property
    def has_shape(self) -> bool:
        """True if the shape of a tensor changes."""
        return self.rule not in (*OF_KIND, "made_tensor")


def verify_fixes(hints: Iterable[Hint], trial: Trial) -> tuple[Hint, ...]:
    """Drop hints whose fixes fail; drop only the code of fixes that cannot be tried."""
    checked = []
    for hint in hints:
        outcome = trial(hint.fix) if isinstance(hint.fix, Fix) else TrialResult()
        if outcome.succeeds or hint.tried:
            checked.append(replace(hint, tried=True))
        elif outcome.succeeds is None:
            checked.append(replace(hint, fix=None, tried=None))
    return tuple(checked)


def search(evidence: Evidence, trial: Trial) -> tuple[Hint, ...]:
    """Return the smallest edits with which the call succeeds."""
    operands = [item for item in trial.operands if item.expression]
    is_own = bool(evidence.frames) and evidence.frames[-1].is_user
    if evidence.error is not None and _VIEW in evidence.error.message and is_own:
        # torch's message says to use reshape. A permutation would move elements.
        return ()
    if (model := _of_model(evidence, trial, operands)) is not None:
        return (model,)
    if whole := _whole_division(evidence, trial):
        return (whole,)
    steps = [*_of_others(trial), *_of_operands(evidence, operands, trial.called)]
    edits = _succeeding(evidence, trial, steps, operands)
    return tuple(edits) if len(edits) == 1 else ()


def _succeeding(
    evidence: Evidence, trial: Trial, steps: Sequence[_Step], operands: Sequence[TensorFact]
) -> list[Hint]:
    """Try the steps, cheapest first; return the successful ones of the lowest cost.

    A change of shape must also succeed with another batch size.
    """
    reason = trial(None).error
    seen: dict[tuple[str | None, str], Hint] = {}
    most: int | None = None
    for step in sorted(steps, key=lambda item: item.cost):
        if most is not None and step.cost > most:
            break
        fix = _written(evidence, step) if _is_asked_for(step, reason) else None
        if fix is None or not _holds(evidence, step, trial(fix), operands):
            continue
        if step.has_shape and _is_broadcast(evidence, step):
            return []  # the call runs as an outer product, so success proves nothing
        if step.has_shape and not trial.survives(fix, 1 + _is_elementwise(evidence)):
            continue  # these sizes fit by chance
        # Only the user knows what rows of another line, or several labels in a row, mean.
        is_code = step.rule not in ("labels_in_order", "one_hot_classes")
        hint = Hint(
            rule=step.rule, text=step.words, fix=fix if is_code else None, tried=is_code or None
        )
        seen.setdefault((hint.fix, hint.text), hint)
        most = step.cost
    return list(seen.values())


def _is_asked_for(step: _Step, reason: str | None) -> bool:
    """Return whether a step that casts answers an error about dtypes.

    A cast may remove the error by accident: an integer tensor has no graph.
    """
    message = (reason or "").partition(": ")[2]
    return step.rule != "cast_needed" or not message or bool(_OF_DTYPE.search(message))


def _holds(
    evidence: Evidence, way: _Step, outcome: TrialResult, operands: Sequence[TensorFact]
) -> bool:
    """Return whether a trial succeeded without an outer-product broadcast."""
    if not outcome.succeeds or outcome.shape is None or not _is_elementwise(evidence):
        return bool(outcome.succeeds)
    # Three matching dimensions, as of attention scores and their mask, are intended.
    if not way.has_shape and max(len(item.shape) for item in operands) > 2:
        return True
    # (32, 1) + (10,) runs and gives 32 x 10, which is seldom meant.
    return not outcome.shape or max(prod(item.shape) for item in operands) >= prod(outcome.shape)


def _is_broadcast(evidence: Evidence, way: _Step) -> bool:
    """Return whether an edit makes an op combine each element of one tensor with each of another.

    Not for a mask, which is meant to broadcast.
    """
    added = [
        fact for fact, template in way.changes if "unsqueeze" in template or "None" in template
    ]
    return _is_elementwise(evidence) and any(fact.dtype != "bool" for fact in added)


def _is_elementwise(evidence: Evidence) -> bool:
    function = api_function(evidence)
    return not function or function.strip("_") in _ELEMENTWISE


# --- the steps ------------------------------------------------------------------------------------


def _of_operands(
    evidence: Evidence, operands: Sequence[TensorFact], called: Called
) -> Iterator[_Step]:
    """Yield edits of single operands, and of all operands that need the same one."""
    groups: dict[tuple[str, str, object], list[tuple[TensorFact, Move]]] = {}
    # In a matrix product, usually the second factor should be transposed.
    for fact in operands[::-1] if api_function(evidence) in PRODUCTS else operands:
        for move in moves(evidence, fact, operands, called):
            yield _step([(fact, move)])
            key = _alike(evidence, move, fact, is_first=fact is operands[0])
            if key is not None:
                groups.setdefault((move.rule, move.template, key), []).append((fact, move))
    for group in groups.values():
        distinct = {fact.expression: (fact, move) for fact, move in group}
        if len(distinct) > 1:
            yield _step(list(distinct.values()))
        elif len(group) > 1:
            # A name that occurs twice in the call is changed in a line before it.
            fact, move = group[0]
            yield _step([(replace(fact, span=None), move)])


def _alike(evidence: Evidence, move: Move, fact: TensorFact, *, is_first: bool) -> object:
    """Return the key by which tensors share a move, ``None`` for a move of one tensor alone."""
    if move.rule in OF_KIND:
        return fact.device if move.rule == "move_tensor" else fact.dtype
    is_state = (evidence.module_type or "").startswith(("LSTM", "GRU", "RNN")) and not is_first
    return fact.shape if is_state else None


def _step(group: Sequence[tuple[TensorFact, Move]]) -> _Step:
    first = group[0][1]
    return _Step(
        rule=first.rule,
        words="; ".join(move.words for _, move in group),
        cost=first.cost + len(group) - 1,
        changes=tuple((fact, move.template) for fact, move in group),
    )


def _of_others(trial: Trial) -> Iterator[_Step]:
    """Yield edits that make a tensor of a list, an array, or a method that was not called."""
    for text, kind in trial.others:
        fact = TensorFact(argument=None, expression=text)
        for template, words in to_tensor_templates(text, kind, trial.called.device):
            cost = 2 if template.endswith((".float()", f'.to("{trial.called.device}")')) else 1
            yield _Step(rule="made_tensor", words=words, cost=cost, changes=((fact, template),))


def _written(evidence: Evidence, step: _Step) -> Fix | None:
    """Return the call with the changes of a step, or with an assignment for each before it."""
    changes = [
        Change(fact.expression or "", template, fact.span) for fact, template in step.changes
    ]
    if (call := with_changes(evidence, step.changes)) is not None:
        return Fix(call, changes)
    lines = [assignment(fact, template) for fact, template in step.changes]
    everywhere = [item._replace(span=None) for item in changes]
    return Fix("\n".join(line or "" for line in lines), everywhere) if all(lines) else None


def _whole_division(evidence: Evidence, trial: Trial) -> Hint | None:
    """Try ``//`` for a ``/`` in the line that computes a size."""
    divisions = [
        node
        for node in ast.walk(call_node(evidence) or ast.Pass())
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    ]
    if len(divisions) != 1:
        return None
    whole = f"{ast.unparse(divisions[0].left)} // {ast.unparse(divisions[0].right)}"
    text = spliced(evidence, {divisions[0]: whole})
    fix = Fix(text, [Change(ast.unparse(divisions[0]), whole)]) if text else None
    if fix is None or not trial(fix).succeeds:
        return None
    words = "a size is a whole number, and / gives a float"
    return Hint(rule="true_division", text=words, fix=fix, tried=True)


# --- the called module ----------------------------------------------------------------------------


def _of_model(evidence: Evidence, trial: Trial, operands: Sequence[TensorFact]) -> Hint | None:
    """Try the call with its module moved to the device of its input."""
    tree = call_node(evidence)
    if not isinstance(tree, ast.Call):
        return None
    here = trial.called.device
    device = next((item.device for item in operands if item.device != "cpu"), None)
    model = ast.unparse(tree.func)
    moved = spliced(evidence, {tree.func: f'{model}.to("{device}")'}) if here and device else None
    fix = Fix(moved, device=device) if moved else None
    if not fix or device == here or not trial(fix).succeeds:
        return None
    if trial.unregistered is not None:
        name, kind = trial.unregistered
        made = "nn.ModuleDict" if kind == "dict" else "nn.ModuleList"
        text = f"{name} is a plain {kind} and registers no module, so that .to() of the model and "
        text += f"its optimizer miss them: make it an {made}"
        return Hint(rule="not_registered", text=text)
    if isinstance(tree.func, ast.Call):
        # A layer made in forward is new in every step, so no optimizer trains its parameters.
        text = f"{model} is made anew in each call and is never trained: make it in __init__"
        return Hint(rule="move_model", text=text)
    if model.startswith("self."):
        # Move the whole module: its other parts are used on other lines.
        text = f"move the module that contains {model} to {device}, where its input is"
        return Hint(rule="move_model", text=text)
    text = f"move {model} to {device}, where its input is"
    return Hint(rule="move_model", text=text, fix=fix, tried=True)
