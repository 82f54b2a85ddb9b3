"""Search for the change of the refused call that makes it succeed; each is tried before it is said.

A candidate is the running call with its arguments replaced by what moves make of them, in the
user's own expressions.  A change after which the call is refused for another reason is one step on
the way: the next one is looked for behind it.  Not here: what the moves are (``moves.py``), and how
a call is tried, which needs its live tensors (``evidence/trial.py``).
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from cudalens.core._python import parse
from cudalens.core.evidence_types import Binding
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, TensorFact, Violation
from cudalens.diagnosis.moves import (
    CHOICES,
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
    function_named,
    renamed,
    renamed_keyword,
    spliced,
    swapped,
    with_changes,
    with_keyword,
)

_IN_WORDS = ("labels_in_order", "other_reading", "either_dimension", "one_hot_classes")
"""Rules of changes that succeed, of which only the user knows whether one is meant."""
BY_CHANCE = "fits_by_chance"
"""Rule of a change with which the call succeeds for this batch only."""
MAX_STEPS = 3
"""Changes of one call together: its device, its dtype, its shape."""
_MAX_SHOWN = 2
_MAX_BEGUN = 4
"""Changes that are followed further at each step, the cheapest ones."""
_SWAPPED = frozenset(
    {"embedding", "cross_entropy", "nll_loss", "binary_cross_entropy", "embedding_bag", "kl_div"}
    | {"binary_cross_entropy_with_logits", "linear", "gather", "conv1d", "conv2d", "one_hot"}
)
"""Functions whose first two tensors have different parts to play."""
_IN_PLACE_OF = "swap {} and {}"
_VIEWS = ("view", "reshape")
_OF_DTYPE = re.compile(
    r"type|float|double|half|long|\bu?int|integ|byte|bool|complex|char|short", re.IGNORECASE
)
_JOINS = ("cat", "concat", "concatenate", "stack", "hstack", "vstack")


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """Result of a trial: ``None`` where it could not be made."""

    succeeds: bool | None = None
    shape: tuple[int, ...] | None = None
    error: str | None = None
    """For what reason it failed; two that are equal are one reason."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Finding of a guard in the call as a fix had it."""

    fix: Fix
    violation: Violation
    fact: TensorFact
    """The tensor at fault, as the changed call passed it."""
    scalars: tuple[tuple[str, str], ...] = ()


class Trial:
    """The running call, ready to be tried with changes; by itself it knows nothing of it."""

    refusals: Sequence[Refusal] = ()
    """Findings of guards in the calls that were tried, in their order."""
    operands: tuple[TensorFact, ...] = ()
    """The tensors that the call works on, each by its text in the call."""
    others: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    """Arguments that are no tensors: the text, the kind, and what a tensor of it is called."""
    unregistered: tuple[str, str] | None = None
    """The list or dict in which the called module is, with its kind, where no module has it."""
    is_of_loop = False
    """True if a loop around the line calls another function in each turn."""
    called = Called()
    """Facts on the called module that the moves need."""

    def __call__(self, fix: Fix | None) -> TrialResult:
        """Run the call as ``fix`` has it, on copies; unchanged without one."""
        return TrialResult()

    def survives(self, fix: Fix, dims: int) -> bool:
        """Return whether the call that has just succeeded does so with another batch size too."""
        return False

    def binding(self, expression: str, *, of_shape: bool = False) -> Binding | None:
        """Return where a name, or an attribute of a module, got its value, where it is proven.

        Args:
            of_shape: its shape alone, which a write to the tensor leaves as it was.
        """
        return None

    def held_in(self, expression: str) -> tuple[str, str] | None:
        """Return what of a module holds a tensor, or the class that registers it; and its kind."""
        return None

    def other_readers(self, expression: str) -> tuple[list[int], list[int]]:
        """Return the lines from the running one on that read an operand in another place, and all
        that need its numbers as they are.
        """
        return [], []

    def layer(self, path: str, shape: tuple[int, ...] | None = None) -> Binding | None:
        """Return what the user calls the module of a path, and where it was made.

        Args:
            shape: of a parameter of the module.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One move, of one tensor or of all that need the same."""

    rules: tuple[str, ...]
    words: tuple[str, ...]
    cost: int
    changes: tuple[tuple[TensorFact, str], ...]
    """The tensors, and the template that takes the place of each."""

    @property
    def has_shape(self) -> bool:
        """True if the shape of a tensor is another one then."""
        return not set(self.rules) <= {*OF_KIND, "made_tensor", "choose_one"}

    def __add__(self, other: _Step) -> _Step:
        """Make one of two that follow each other, also on the same tensor."""
        changed = {fact.expression: (fact, template) for fact, template in self.changes}
        for fact, template in other.changes:
            before = changed.get(fact.expression, (fact, "{x}"))[1]
            changed[fact.expression] = fact, template.replace("{x}", before)
        return _Step(
            rules=(*self.rules, *other.rules),
            words=(*self.words, *other.words),
            cost=self.cost + other.cost,
            changes=tuple(changed.values()),
        )


def verify_fixes(hints: Iterable[Hint], trial: Trial) -> tuple[Hint, ...]:
    """Drop the hints whose fixes fail; keep as words those whose fixes cannot be tried."""
    checked = []
    for hint in hints:
        outcome = trial(hint.fix) if isinstance(hint.fix, Fix) else TrialResult()
        if outcome.succeeds or hint.tried:
            checked.append(replace(hint, tried=True))
        elif outcome.succeeds is None:
            checked.append(replace(hint, fix=None, tried=None))
    return tuple(checked)


def search(evidence: Evidence, trial: Trial) -> tuple[Hint, ...]:
    """Return the smallest changes of the call with which it succeeds."""
    operands = [item for item in trial.operands if item.expression]
    # Another order of the dimensions would be one of the elements too.
    reshaped = renamed(evidence, "view", "reshape")
    if reshaped is not None and (outcome := trial(reshaped)).succeeds:
        viewed = operands[0].shape if operands else ()
        if _is_written_to(evidence) or not _joins_or_splits(viewed, outcome.shape or ()):
            return ()  # a copy would take the write, or other elements stand in a row
        text = "reshape copies where a view is impossible"
        return (Hint(rule="reshape_for_view", text=text, fix=reshaped, tried=True),)
    whole = list(_of_whole_call(evidence, trial, operands))
    steps = [*_of_others(trial), *_of_operands(evidence, operands, trial.called)]
    changes = _followed(evidence, trial, steps, operands, most=1 if whole else None)
    hints = [*whole, *changes, *_of_product(evidence, trial)]
    choices = [item for item in hints if item.rule == "choose_one"]
    if len(choices) > 1:
        # The call succeeds with each, and only the user knows which one is meant.
        text = f"{choices[0].text} ({' or '.join(str(item.fix) for item in choices)})"
        return (Hint(rule="choose_one", text=text),)
    return tuple({(item.fix, item.text): item for item in hints}.values())[:_MAX_SHOWN]


def _joins_or_splits(old: Sequence[int], new: Sequence[int]) -> bool:
    """Return whether each dimension is a whole one of before, a part of one, or several in a row.

    (batch, heads, steps, features) read as (batch, steps, all features) is not of the same steps.
    """
    ends_of = [list(itertools.accumulate(sizes, operator.mul)) for sizes in (old, new)]
    shared = sorted(set(ends_of[0]) & set(ends_of[1]))
    starts = [1, *shared[:-1]]
    return all(
        any(not [end for end in ends if start < end < stop] for ends in ends_of)
        for start, stop in zip(starts, shared, strict=True)
    )


def _is_written_to(evidence: Evidence) -> bool:
    """Return whether a line writes to the result of the running call."""
    try:
        tree = parse((evidence.source and evidence.source.text) or "")
    except (SyntaxError, ValueError):
        return False
    call = ast.dump(call_node(evidence) or ast.Pass())
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value, ctx=ast.Store()) | ast.AugAssign(ast.Subscript(value)):
                pass
            case ast.Call(ast.Attribute(value, method)) if method.endswith("_"):
                pass
            case _:
                continue
        if ast.dump(value) == call:
            return True
    return False


def _followed(
    evidence: Evidence,
    trial: Trial,
    steps: Sequence[_Step],
    operands: Sequence[TensorFact],
    *,
    most: int | None,
) -> list[Hint]:
    """Try the steps; where none succeeds, try what follows those that changed the reason.

    Args:
        most: how much a change may cost at most, where another one is known to succeed.
    """
    begun: list[tuple[_Step | None, str | None]] = [(None, trial(None).error)]
    by_chance: list[Hint] = []
    for _ in range(MAX_STEPS):
        ways = [
            (step if so_far is None else so_far + step, reason)
            for so_far, reason in begun
            for step in steps
            if (so_far is None or _may_follow(so_far, step)) and _is_asked_for(step, reason)
        ]
        begun, successes = [], []
        limit = most
        for way, reason in sorted(ways, key=lambda item: item[0].cost):
            if limit is not None and way.cost > limit:
                break
            fix = _written(evidence, way)
            outcome = trial(fix) if fix else TrialResult()
            if fix and _holds(evidence, way, outcome, operands):
                hint = Hint(rule=way.rules[0], text="; ".join(way.words), fix=fix, tried=True)
                if way.has_shape and not trial.survives(fix, 1 + _is_elementwise(evidence)):
                    text = f"{hint.text}; these sizes may fit by chance"
                    by_chance.append(Hint(rule=BY_CHANCE, text=text))
                    continue
                if hint.rule in _IN_WORDS or (way.has_shape and _is_broadcast(evidence, way)):
                    hint = replace(hint, fix=None, tried=None)
                successes.append(hint)
                limit = way.cost
            elif outcome.succeeds is False and outcome.error != reason:
                begun.append((way, outcome.error))
        begun = begun[:_MAX_BEGUN]
        if successes or by_chance or most is not None:
            return successes or by_chance
    return []


def _is_asked_for(step: _Step, reason: str | None) -> bool:
    """Return whether a refusal speaks of a kind of number, where a step casts.

    A cast may let a call run by what it takes away: an integer tensor has no graph.
    """
    message = (reason or "").partition(": ")[2]
    return "cast_needed" not in step.rules or not message or bool(_OF_DTYPE.search(message))


def _may_follow(before: _Step, step: _Step) -> bool:
    """Return whether a step adds something to others: two of shape find ways nobody means."""
    if {"made_tensor", "choose_one"} & set(step.rules) or set(step.rules) & set(before.rules):
        return False
    return not (before.has_shape and step.has_shape)


def _holds(
    evidence: Evidence, way: _Step, outcome: TrialResult, operands: Sequence[TensorFact]
) -> bool:
    """Return whether a trial succeeded without making every element meet every other."""
    if not outcome.succeeds or outcome.shape is None or not _is_elementwise(evidence):
        return bool(outcome.succeeds)
    # Three dimensions that line up, as in scores and a mask of them, do so on purpose.
    if not way.has_shape and max(len(item.shape) for item in operands) > 2:
        return True
    # (32,) + (10,) as a table of 32 x 10 runs, and is seldom what was meant.
    return not outcome.shape or max(prod(item.shape) for item in operands) >= prod(outcome.shape)


def _is_broadcast(evidence: Evidence, way: _Step) -> bool:
    """Return whether a change lets an op compute each of one tensor with each of another.

    A mask is for just that.
    """
    added = [
        fact for fact, template in way.changes if "unsqueeze" in template or "None" in template
    ]
    return _is_elementwise(evidence) and any(fact.dtype != "bool" for fact in added)


def _is_elementwise(evidence: Evidence) -> bool:
    function = api_function(evidence)
    return not function or function.strip("_").lstrip("ir") in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "ne", "lt", "le"),
        *("gt", "ge", "and", "or", "xor", "where", "maximum", "minimum", "div", "masked_fill"),
    )


# --- the steps ------------------------------------------------------------------------------------


def _of_operands(
    evidence: Evidence, operands: Sequence[TensorFact], called: Called
) -> Iterator[_Step]:
    """Yield each move of each tensor, and of all the tensors that need the same."""
    groups: dict[tuple[str, str, object], list[tuple[TensorFact, Move]]] = {}
    # Of two factors it is the second one that is transposed, as a rule.
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
            # A name that stands there twice is changed before the call.
            fact, move = group[0]
            yield _step([(replace(fact, span=None), move)])


def _alike(evidence: Evidence, move: Move, fact: TensorFact, *, is_first: bool) -> object:
    """Return what tensors that need the same move have in common, ``None`` where none does."""
    if move.rule in OF_KIND:
        return fact.device if move.rule == "move_tensor" else fact.dtype
    is_state = (evidence.module_type or "").startswith(("LSTM", "GRU", "RNN")) and not is_first
    return fact.shape if is_state else None


def _step(group: Sequence[tuple[TensorFact, Move]]) -> _Step:
    first = group[0][1]
    return _Step(
        rules=(first.rule,),
        words=tuple(move.words for _, move in group),
        cost=first.cost + len(group) - 1,
        changes=tuple((fact, move.template) for fact, move in group),
    )


def _of_others(trial: Trial) -> Iterator[_Step]:
    """Make a tensor of what is none: of a list, an array, a method that was not called."""
    for text, kind, parts in trial.others:
        fact = TensorFact(argument=None, expression=text)
        for template, words in to_tensor_templates(text, kind, parts, trial.called.device):
            cost = 2 if template.endswith((".float()", f'.to("{trial.called.device}")')) else 1
            rule = "choose_one" if kind in CHOICES else "made_tensor"
            yield _Step(rules=(rule,), words=(words,), cost=cost, changes=((fact, template),))


def _written(evidence: Evidence, step: _Step) -> Fix | None:
    """Write the call with the changes of a step, or one assignment for each before it."""
    changes = [
        Change(fact.expression or "", template, fact.span) for fact, template in step.changes
    ]
    if (call := with_changes(evidence, step.changes)) is not None:
        return Fix(call, changes)
    lines = [assignment(fact, template) for fact, template in step.changes]
    everywhere = [item._replace(span=None) for item in changes]
    return Fix("\n".join(line or "" for line in lines), everywhere) if all(lines) else None


# --- the whole call -------------------------------------------------------------------------------


def _of_whole_call(
    evidence: Evidence, trial: Trial, operands: Sequence[TensorFact]
) -> Iterator[Hint]:
    """Try the arguments in another order or number, and the model on its input's device."""
    tree = call_node(evidence)
    if isinstance(tree, ast.Call):
        yield from _of_model(evidence, tree, trial, operands)
        for rule, words, fix in _of_arguments(evidence, tree, operands):
            outcome = trial(fix)
            is_view = api_function(evidence) in _VIEWS
            batch = operands[0].shape[:1] if operands else None
            if outcome.succeeds and (not is_view or (outcome.shape or ())[:1] == batch):
                is_code = rule not in _IN_WORDS
                yield Hint(
                    rule=rule, text=words, fix=fix if is_code else None, tried=is_code or None
                )


def _of_model(
    evidence: Evidence, tree: ast.Call, trial: Trial, operands: Sequence[TensorFact]
) -> Iterator[Hint]:
    here = trial.called.device
    device = next((item.device for item in operands if item.device != "cpu"), None)
    model = ast.unparse(tree.func)
    moved = spliced(evidence, {tree.func: f'{model}.to("{device}")'}) if here and device else None
    fix = Fix(moved, device=device) if moved else None
    if not fix or device == here or not trial(fix).succeeds:
        return
    if trial.unregistered is None and model.startswith("self."):
        # Its parts on other lines are where it is, and are moved with it.
        text = f"move the module that contains {model} to {device}, where its input is"
        yield Hint(rule="move_model", text=text)
    elif trial.unregistered is None:
        text = f"move {model} to {device}, where its input is"
        yield Hint(rule="move_model", text=text, fix=fix, tried=True)
    else:
        name, kind = trial.unregistered
        made = "nn.ModuleDict" if kind == "dict" else "nn.ModuleList"
        text = f"{name} is a plain {kind} and registers no module, so that .to() of the model and "
        text += f"its optimizer miss them: make it an {made}"
        yield Hint(rule="not_registered", text=text)


def _of_arguments(
    evidence: Evidence, tree: ast.Call, operands: Sequence[TensorFact]
) -> Iterator[tuple[str, str, Fix]]:
    """Write the call with its arguments in another order, or with another size or setting.

    Yields:
        The rule, the words, the call.
    """
    function = api_function(evidence)
    names = {function, (evidence.module_type or "").lower()}
    is_ordered = _SWAPPED & names or any("loss" in name for name in names)
    if is_ordered and (swap := _swapped(evidence, tree)):
        yield "other_arguments", *swap
    is_view = function in _VIEWS and len(tree.args) > 1 and operands
    if is_view and (text := spliced(evidence, {tree.args[0]: "-1"})):
        fix = Fix(text, rearrange=_with_open_batch)
        words = f"dimension 0 is {operands[0].shape[0]} here: leave its size open"
        yield "other_arguments", words, fix
    yield from _of_settings(evidence, tree, operands)


def _of_product(evidence: Evidence, trial: Trial) -> Iterator[Hint]:
    """Try the factors of a matrix product in the other order."""
    tree, swap = call_node(evidence), None
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.MatMult):
        one, two = ast.unparse(tree.left), ast.unparse(tree.right)
        swap = _IN_PLACE_OF.format(one, two), Fix(f"{two} @ {one}", swapped(one, two))
    elif isinstance(tree, ast.Call) and api_function(evidence) in ("matmul", "mm", "bmm"):
        swap = _swapped(evidence, tree)
    if swap and trial(swap[1]).succeeds:
        yield Hint(rule="other_arguments", text=swap[0], fix=swap[1], tried=True)


def _swapped(evidence: Evidence, tree: ast.Call) -> tuple[str, Fix] | None:
    """Write a call with its first two arguments in the other order."""
    if len(tree.args) < 2:
        return None
    one, two = map(ast.unparse, tree.args[:2])
    both = spliced(evidence, {tree.args[0]: two, tree.args[1]: one})
    return (_IN_PLACE_OF.format(one, two), Fix(both, swapped(one, two))) if both else None


def _with_open_batch(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    shape = args[1:] if len(args) != 2 or isinstance(args[1], int) else list(args[1])
    return function, [args[0], -1, *shape[1:]], kwargs


def _of_settings(
    evidence: Evidence, tree: ast.Call, operands: Sequence[TensorFact]
) -> Iterator[tuple[str, str, Fix]]:
    """Write the call with another number, dimension or flag beside its tensors."""
    call, function = evidence.call_text or "", api_function(evidence)
    written: list[tuple[str, Fix | None]] = []
    readings: list[tuple[str, Fix | None]] = []
    if function in _JOINS and tree.args and not operands:
        numbers = Fix(
            f"torch.tensor({ast.unparse(tree.args[0])})", rearrange=function_named("tensor")
        )
        written.append(("its items are numbers: make one tensor of them", numbers))
    if function in _JOINS and operands:
        if len(tree.args) > 1:
            items = f"({', '.join(map(ast.unparse, tree.args))})"
            called = f"{ast.unparse(tree.func)}({items})"
            joined = Fix(called, rearrange=lambda f, args, kwargs: (f, [tuple(args)], kwargs))
            written.append((f"{function} takes its tensors as one list", joined))
    elif operands and len(operands[0].shape) == 1:
        name = operands[0].expression
        fix = with_keyword(evidence, (function,), "dim", "0") if "dim" in call else None
        words = f"{name} has one dimension, which is number 0: of a batch it would be the samples"
        readings.append((words, fix))
    if (fix := with_keyword(evidence, ("flatten",), "start_dim", "1")) and "start_dim" not in call:
        if _is_of_images(evidence, tree):
            words = "flatten without a number makes one dimension of the batch too"
            written.append((words, fix))
        else:
            words = "flatten without a number makes one dimension of all; if the first is the "
            readings.append((f"{words}batch, flatten(1) keeps it", fix))
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            whole = f"{ast.unparse(node.left)} // {ast.unparse(node.right)}"
            words = "a size is a whole number, and / gives a float"
            if text := spliced(evidence, {node: whole}):
                written.append((words, Fix(text, [Change(ast.unparse(node), whole)])))
    fix = with_keyword(evidence, ("pack_padded_sequence",), "enforce_sorted", "False")
    written.append(("the lengths are not sorted: let it sort them", fix))
    fix = renamed_keyword(evidence, "attn_mask", "key_padding_mask")
    words = "the mask is (batch, keys), as is key_padding_mask, where True leaves a key out"
    readings.append((words, fix))
    for rule, group in (("other_arguments", written), ("other_reading", readings)):
        yield from ((rule, words, fix) for words, fix in group if fix and fix != call)


def _is_of_images(evidence: Evidence, tree: ast.Call) -> bool:
    """Return whether the line flattens four dimensions: samples, channels, rows, columns."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(ast.Name("torch"), "flatten"), [value, *_]):
                text = ast.unparse(value)
            case ast.Call(ast.Attribute(value, "flatten")):
                text = ast.unparse(value)
            case _:
                continue
        return any(len(it.shape) == 4 for it in evidence.tensors if it.expression == text)
    return False
