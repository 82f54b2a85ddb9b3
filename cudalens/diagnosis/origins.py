"""Move a fix to the line that made the values, and explain how they got the wrong kind.

A fix inside one call does not change other uses of the tensor.  Bindings are proven in
``source/bindings.py``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from cudalens.core.api_names import stem_of
from cudalens.core.evidence_types import Binding, LostDimension
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, SourceSpan, format_shape, syntax
from cudalens.diagnosis.candidates import Trial
from cudalens.diagnosis.moves import OF_KIND
from cudalens.diagnosis.user_code import (
    Change,
    Fix,
    Rearrange,
    api_function,
    call_node,
    chooses,
    code_of,
    list_of,
    parsed,
    place,
    statement_of,
)

_AT_ORIGIN = frozenset(
    {"image_not_divided", "labels_as_binary_target", "mask_of_0_and_255"}
    | {"one_based_labels", "one_hot_target", "relabel", "segment_ids"}
)
"""Rules whose fix changes the values, for all calls that read them.

A cast or a move is applied at the failing call only: others may need the current dtype and device.
"""
_MAX_HOPS = 4
_NAMES = re.compile(r"(?<=\bid=)'\w+'|(?<=\bvalue=)[\d.]+")
"""Names and numbers in the dump of a syntax tree."""


def at_origin(hints: Iterable[Hint], evidence: Evidence, trial: Trial) -> tuple[Hint, ...]:
    """Return the hints, with the fix at the line that made the tensor if it is used again."""
    placed = (_placed(item, evidence, trial) if item.fix else item for item in hints)
    return tuple(_where_it_acts(item, evidence, trial) for item in placed if item.text)


def _where_it_acts(hint: Hint, evidence: Evidence, trial: Trial) -> Hint:
    """Drop the code of a fix if other code of the user's may need the old value."""
    fix, text = hint.fix, hint.text
    if not isinstance(fix, Fix) or not fix.changes:
        return hint
    if _is_chosen_in_loop(hint, fix, trial):
        text += ". Each turn of the loop has another tensor here: check them all"
        return replace(hint, text=text, fix=None, tried=None, at=None)
    every: list[int] = []
    counting: list[int] = []
    if hint.rule in (*_AT_ORIGIN, *OF_KIND) and len(fix.changes) == 1:
        every, counting = trial.other_readers(name := fix.changes[0].text)
        if hint.rule == "image_not_divided" and (made := _argument(name, trial)) is not None:
            # The caller may need the bytes, too, as an autoencoder's target.
            text += f". It is {made.name}, made in {place(made.at, evidence)}: divide it there"
            return replace(hint, text=text, fix=None, tried=None, at=None)
    if trial.is_of_loop and hint.at is None and hint.rule != "move_tensor":
        # Any function needs it on the right device, but maybe not with this dtype or shape.
        text += ". The loop may call other functions here: change what is given to it"
    elif others := evidence.other_functions:
        text += f". This call was {others[-1].rpartition('.')[2]} before, which took it as it is"
    elif hint.rule in OF_KIND:
        # Other readers may need the current dtype and device.
        reads = _elsewhere(every, name, evidence) if every else ""
        alike = _alike(evidence)
        more = (reads, f"The line has {alike} too" if alike else "")
        return replace(hint, text=". ".join(filter(None, (text, *more))))
    elif hint.at is None and every:
        reads = _elsewhere(every, name, evidence) or f"This line reads {name} again"
        text += f". {reads}: change it where it is made"
    elif hint.at is not None and counting:
        text += f", and adapt line {list_of(counting)}, which needs its numbers as they are"
    else:
        return hint
    return replace(hint, text=text, fix=None, tried=None, at=None)


def _is_chosen_in_loop(hint: Hint, fix: Fix, trial: Trial) -> bool:
    """Return whether the changed expression depends on a loop variable, like ``truth[n]``.

    Not for the loop variable itself, or a constant entry of it, as in a loop over batches.  A
    tensor that a caller's loop chooses may be cast or moved, but iterations may differ in values.
    """
    has_values = hint.rule in _AT_ORIGIN
    for change in fix.changes:
        tree = parsed(change.text) if change.text else None
        if tree is None:
            continue
        read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if chooses(tree, trial.loop_names) or (has_values and read & trial.loop_arguments):
            return True
    return False


def _elsewhere(lines: Iterable[int], name: str, evidence: Evidence) -> str:
    """Return the other lines that read a name."""
    here = evidence.source.line if evidence.source is not None else None
    others = [line for line in lines if line != here]
    if not others:
        return ""
    return (
        f"Line {others[0]} reads {name} too"
        if len(others) == 1
        else (f"Lines {list_of(others)} read {name} too")
    )


def _alike(evidence: Evidence) -> str:
    """Return another call in the failing line that differs only in names and numbers."""
    node, source = call_node(evidence), evidence.source
    if node is None or source is None:
        return ""
    form, own = _NAMES.sub("", ast.dump(node)), ast.dump(node)
    line = statement_of(source.text)
    every = (it for it in ast.walk(line) if isinstance(it, type(node)))
    others = [it for it in every if ast.dump(it) != own and _NAMES.sub("", ast.dump(it)) == form]
    return ast.unparse(others[0]) if isinstance(node, ast.Call) and others else ""


def _root(node: ast.AST | None) -> ast.AST | None:
    """Return the innermost expression of calls, attributes and subscripts."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def _argument(expression: str, trial: Trial) -> Binding | None:
    """Return where a caller made the argument that an expression is a view of."""
    node = _root(parsed(expression))
    made = trial.binding(node.id, of_shape=True) if isinstance(node, ast.Name) else None
    return made if made is not None and made.name else None


def _placed(hint: Hint, evidence: Evidence, trial: Trial) -> Hint:
    changed = hint.fix.of_name() if isinstance(hint.fix, Fix) else None
    name, value = changed or ("", "")
    binding = trial.binding(name) if name and hint.rule in (*_AT_ORIGIN, *OF_KIND) else None
    moved = _indexed(hint.fix) if hint.rule == "move_tensor" and isinstance(hint.fix, Fix) else ""
    # `.to()` of a module misses tensors that it does not register: registering is the fix.
    if moved and (held := trial.held_in(moved)):
        if held[1] == "module":
            text = f"{hint.text}: .to() of the {held[0]} that registers it does that"
            return replace(hint, text=text, fix=None, tried=None)
        kind, place_of = held[1], trial.binding(held[0])
        what = "" if held[0] == name else f"{held[0]}, "
        what = f"{what}a plain attribute" if kind == "attribute" else f"in {what}a plain {kind}"
        if place_of is not None and place_of.value:
            what += f" made in {place(place_of.at, evidence)}: {code_of(place_of)}"
        text = f"{hint.text}. It is {what}. The module's .to() moves what is registered: make it "
        registered = "a buffer with register_buffer"
        assert isinstance(hint.fix, Fix)
        stray = hint.fix.changes[0].text
        if any(it.requires_grad for it in evidence.tensors if it.expression == stray):
            listed = {"attribute": "an nn.Parameter", "dict": "one of an nn.ParameterDict"}
            registered = listed.get(kind, "one of an nn.ParameterList")
        return replace(hint, text=text + registered, fix=None, tried=None)
    if binding is None:
        return hint
    # A cast or move stays at the call, unless its result was computed and dropped on a line.
    if hint.rule in OF_KIND:
        if binding.dropped is not None:
            return _keep_result(hint, name, value, binding.dropped, trial)
        return hint
    assert isinstance(hint.fix, Fix)
    # Values that are wrong for every reader are changed once, where they are made.
    own, (change,) = binding.name or name, hint.fix.changes
    value = change.template.replace("{x}", own)
    fix = Fix(f"{own} = {value}", [change._replace(span=None)])
    if not binding.is_read_again or not trial(fix).succeeds:
        return hint
    text = f"{hint.text}. {own} is used more than once: change it after line {binding.at.line}"
    return replace(hint, text=text, fix=fix, at=binding.at)


def _indexed(fix: Fix) -> str:
    """Return the name or attribute that a fix changes, as a whole or in some elements."""
    if len(fix.changes) != 1:
        return ""
    node: ast.expr | None = syntax(fix.changes[0].text)
    while isinstance(node, ast.Subscript):
        node = node.value
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _keep_result(
    hint: Hint, name: str, value: str, dropped: tuple[str, SourceSpan], trial: Trial
) -> Hint:
    """Return the advice to keep a result that a line computed and dropped, if that is the cause."""
    text, at = dropped
    for written in (text, value):
        template = re.sub(rf"\b{re.escape(name)}\b(?!\s*=)", "{x}", written)
        fix = Fix(f"{name} = {written}", [Change(name, template)])
        if trial(fix).succeeds:
            advice = (
                f"{hint.text}. Line {at.line}: {text} gives a new tensor, its result is not kept"
            )
            return replace(hint, text=advice, fix=fix, at=at)
    return hint


def true_division(evidence: Evidence, trial: Trial) -> Iterator[Hint]:
    """Yield the line that made a float from integers with ``/``, if the call rejects floats."""
    message = evidence.error.message.partition("\n")[0] if evidence.error is not None else ""
    is_asked = _OF_INTEGERS.search(message)
    for node in ast.walk(call_node(evidence) or ast.Pass()) if is_asked else ():
        name, made = "", None
        value: ast.AST | None = node
        for _ in range(_MAX_HOPS):
            if not isinstance(value, ast.Name):
                break
            made = trial.binding(name := value.id)
            value = _root(syntax((made and made.value) or ""))
        if made is not None and isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
            text = f"{name} is made in {place(made.at, evidence)}: {code_of(made)}"
            text += ". The operator / gives floats, // gives whole numbers"
            yield Hint(rule="true_division", text=text)
            return


_OF_INTEGERS = re.compile(r"int(?:32/int)?64|\blong\b|\bints?\b|integer")


_RECURRENT = ("RNN", "LSTM", "GRU")


def batch_second(evidence: Evidence, trial: Trial) -> Hint | None:
    """Return that a torch layer reads dimension 1 as the batch, if its inputs have it first.

    Proven if the sizes fit with dimension 0 as the batch, and not as the layer reads them.
    """
    tree, inputs = call_node(evidence), [item for item in trial.operands if item.expression]
    x = next((item for item in inputs if len(item.shape) == 3), None)
    if not trial.called.is_batch_second or trial.called.is_model or x is None:
        return None
    if not isinstance(tree, ast.Call) or x is not inputs[0] or x.shape[0] == x.shape[1]:
        return None
    is_state = evidence.module_type in _RECURRENT or api_function(evidence) in _RECURRENT
    batch, at = x.shape[0], int(is_state)
    for item in inputs[1:]:
        rank, sizes = len(item.shape), item.shape
        is_mask = rank == 2 and not is_state and sizes == x.shape[:2]
        if is_mask or (rank == 3 and sizes[at] == batch and sizes[1] != x.shape[1]):
            name = ast.unparse(tree.func)
            made = trial.binding(name)
            line = f", made in {place(made.at, evidence)}: {code_of(made)}" if made else ""
            return Hint(
                rule="batch_second",
                text=f"{name} has batch_first=False{line}. It takes dimension 1 for the batch, and "
                f"{x.expression} {format_shape(x.shape)} fits "
                f"{item.expression} {format_shape(sizes)} with a batch of "
                f"{batch} in dimension 0, as with batch_first=True",
            )
    return None


def lost_dimension(evidence: Evidence, lost: LostDimension) -> Hint:
    """Return which ``squeeze`` removed the batch dimension, and what it should remove instead."""
    old, new = lost.earlier
    dropped = [at for at, size in enumerate(old) if size == 1]
    text = f"{place(lost.line, evidence)} took the batch dimension away: {lost.line.text}. It made "
    text += f"{lost.after} of {lost.before}, and {new} of {old} before"
    if dropped:
        which = f"dimension {dropped[0]}" if len(dropped) == 1 else f"dimensions {(*dropped,)}"
        text += f": give squeeze the {which}"
    return Hint(rule="batch_squeezed", text=text)


def features_of_images(evidence: Evidence, trial: Trial) -> Hint | None:
    """Return the linear layer after a flatten whose size equals the features of one image.

    Without a batch dimension, one image looks like a batch of rows.
    """
    weight, flat = evidence.tensor("weight"), evidence.flattened
    if flat is None or weight is None or not evidence.history or not evidence.module_path:
        return None
    layer = trial.layer(evidence.module_path)
    call = layer and syntax(layer.value)
    if layer is None or not layer.value or not isinstance(call, ast.Call) or not call.args:
        return None
    number, old, new = call.args[0], weight.shape[-1], flat.after[1]
    is_written = isinstance(number, ast.Constant) and number.value == old
    if not is_written or number.lineno != call.lineno or number.end_col_offset is None:
        return None
    start, end = (at - call.col_offset for at in (number.col_offset, number.end_col_offset))
    text = f"{layer.value[:start]}{new}{layer.value[end:]}"
    fix = Fix(text, rearrange=_with_features(old, new))
    if not trial(fix).succeeds or not trial.survives(fix, 1):
        return None
    made_by = stem_of(evidence.history[-1].op)
    reason = f"{made_by} makes {new} features of {format_shape(flat.before[1:])}"
    at = replace(layer.at, column=call.col_offset, end_column=call.end_col_offset)
    return Hint(rule="features_of_images", text=reason, fix=fix, tried=True, at=at)


def _with_features(old: int, new: int) -> Rearrange:
    def put(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        # The only layer of that size in the called module. A function has no modules.
        (layer,) = (it for it in function.modules() if getattr(it, "in_features", None) == old)
        layer.weight.data = layer.weight.data.new_zeros(layer.out_features, new)
        return function, args, kwargs

    return put
