"""A saved tensor that was changed in place before backward, and the line that changes none."""

from __future__ import annotations

import ast
import re

from cudalens.core._python import parse
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, ProvenanceStep
from cudalens.diagnosis.host_errors._base import Answer, autograd, pattern
from cudalens.diagnosis.host_errors._words import dtype, format_shape, ints

_MAX_SAVERS = 3
_OPERATORS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Pow: "**",
    ast.MatMult: "@",
}
_NO_TWIN = re.compile(
    "(apply|bernoulli|cauchy|copy|exponential|fill|fill_diagonal|geometric|log_normal|map|map2"
    "|normal|random|requires_grad|resize|resize_as|set|share_memory|uniform)_"
)
"""Methods in place without one that makes a new tensor of the same values."""
_IN_PLACE = re.compile(r"[a-z]\w*[a-z]_")
_OF_GRADIENTS = {"clip_grad_norm_", "clip_grad_value_", "unscale_"}
"""Functions in place that change gradients only, and no tensor that backward needs."""
_WRITES_ITEM = re.compile(r"aten::(copy_|fill_|index_put_|_index_put_impl_)\b")
"""Ops by which ``tensor[key] += value`` ends; of a list's item nothing is written by them."""
_IN_ORDER = "run backward through this graph before it, or the forward pass again after it"


@pattern(
    r"modified by an inplace operation: \[(?P<kind>[\w.]+) \[(?P<shape>[\d, ]*)\]\],?"
    r"(?: which is output (?P<at>\d+) of (?P<node>[\w:]+),)? is at version (?P<found>\d+); "
    r"expected version (?P<saved>\d+)"
)
def saved_tensor_modified(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A tensor that backward needs was changed in place after it had been saved."""
    modified = _format_step(evidence.modified.modified if evidence.modified else None)
    source = f", output {match['at']} of {match['node']}," if match["node"] else ""
    headline = "a tensor that backward needs was changed in place: "
    if modified:
        headline = f"{modified} changed a tensor that backward needs: "
    yield autograd(
        f"{headline}{dtype(match['kind'])} {format_shape(ints(match['shape']))}{source} is at "
        f"version {match['found']}, and was saved at version {match['saved']}",
        f"{_savers(evidence)}Each in-place op adds one to a tensor's version. backward refuses a "
        "saved tensor whose version has changed, because its values may no longer be the ones "
        "that were saved.",
    )
    if (hint := _out_of_place(evidence)) is not None:
        yield hint


def _savers(evidence: Evidence) -> str:
    """Say which op saved the tensor, or what is known of it besides."""
    known = evidence.modified
    if known is None:
        return ""
    savers = list(map(_format_step, known.savers))
    if len(savers) == 1:
        return f"It was saved by {savers[0]}. "
    if 1 < len(savers) <= _MAX_SAVERS:
        return f"It was saved by one of these: {'; '.join(savers)}. "
    made, read = _format_step(known.made), _format_step(known.read)
    if made and read and made != read:
        return f"It was made by {made} and last read by {read}. "
    if made or read:
        return f"It was {'made' if made else 'last read'} by {made or read}. "
    return ""


def _format_step(step: ProvenanceStep | None) -> str:
    """Return an op and its line: ``aten::add_ at In [3] line 7: w += 1``."""
    if step is None:
        return ""
    return " at ".join(filter(None, [step.op, step.source.format() if step.source else ""]))


def _out_of_place(evidence: Evidence) -> Hint | None:
    """Write the recorded line that changed the tensor so that it makes a new one."""
    known = evidence.modified
    if known is None or known.modified is None or known.modified.source is None:
        return None
    code = known.modified.source.text or ""
    text, fix = "make a new tensor instead of changing the one that backward needs", None
    if _only_steps(code):
        text = f"the step changes the parameters: {_IN_ORDER}"
    elif known.is_parameter:
        text = f"a parameter is changed between forward and backward: {_IN_ORDER}"
    elif known.module:
        text = f"{known.module} was made with inplace=True and writes over its input: let it make "
        text += "a new tensor"
        fix = f"{known.module_expression}.inplace = False" if known.module_expression else None
    else:
        fix = _new_tensor(code, known.modified.op or "")
    return Hint(rule="out_of_place", text=text, fix=fix)


def _only_steps(code: str) -> bool:
    """Return whether a line calls an optimizer's step and holds no other change in place."""
    try:
        nodes = list(ast.walk(parse(code.strip())))
    except SyntaxError:
        return False
    calls = [item.func for item in nodes if isinstance(item, ast.Call)]
    names = {item.attr for item in calls if isinstance(item, ast.Attribute)}
    if any(isinstance(item, ast.AugAssign) for item in nodes):
        return False
    return "step" in names and not any(map(_IN_PLACE.fullmatch, names - _OF_GRADIENTS))


def _new_tensor(code: str, op: str) -> str | None:
    """Write an in-place statement so that it makes a new tensor.

    Args:
        op: what wrote: the write of an item, or that of an item of a list.
    """
    try:
        body = parse(code.strip()).body
    except SyntaxError:
        return None
    if len(body) != 1:
        return None
    statement = body[0]
    if (written := _subscript_of_name(statement)) is not None:
        is_list = isinstance(statement, ast.AugAssign) and not _WRITES_ITEM.match(op)
        return None if is_list else _written_to_copy(statement, written)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        sign = _OPERATORS.get(type(statement.op))
        name = statement.target.id
        value = ast.unparse(statement.value)
        if not isinstance(statement.value, (ast.Name, ast.Constant, ast.Call, ast.Attribute)):
            value = f"({value})"
        return f"{name} = {name} {sign} {value}" if sign else None
    value_of = getattr(statement, "value", None)
    if isinstance(value_of, ast.Call) and isinstance(statement, (ast.Expr, ast.Assign)):
        return _call_of_new_tensor(statement, value_of)
    return None


def _call_of_new_tensor(statement: ast.Expr | ast.Assign, call: ast.Call) -> str | None:
    function = call.func
    target = ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else None
    flagged = [item for item in call.keywords if item.arg == "inplace"]
    if flagged:
        call.keywords.remove(flagged[0])
    elif isinstance(function, ast.Attribute) and _IN_PLACE.fullmatch(function.attr):
        if _NO_TWIN.fullmatch(function.attr):
            return None
        target = target or ast.unparse(function.value)
        if function.attr == "zero_":
            return f"{target} = torch.zeros_like({ast.unparse(function.value)})"
        function.attr = function.attr[:-1]
    else:
        return None
    return f"{target} = {ast.unparse(call)}" if target and target.isidentifier() else None


def _subscript_of_name(statement: ast.stmt) -> ast.Subscript | None:
    """Return the target of ``name[key] = value`` and ``name[key] += value``."""
    match statement:
        case ast.Assign(targets=[ast.Subscript(value=ast.Name()) as target]):
            return target
        case ast.AugAssign(target=ast.Subscript(value=ast.Name()) as target):
            return target
    return None


def _written_to_copy(statement: ast.stmt, target: ast.Subscript) -> str | None:
    """Write to a copy; elements chosen by a comparison are filled without one."""
    name, value = ast.unparse(target.value), getattr(statement, "value", None)
    if value is None or _mentions(value, name):
        return None  # what is read of the copy would be saved, and changed, again
    key = target.slice
    if isinstance(statement, ast.Assign) and _is_number(value) and _compares(key, name):
        return f"{name} = {name}.masked_fill({ast.unparse(key)}, {ast.unparse(value)})"
    if isinstance(statement, ast.AugAssign) and not isinstance(statement.op, ast.Add | ast.Sub):
        return None  # a product saves the elements before it changes them
    return f"{name} = {name}.clone(); {ast.unparse(statement)}"


def _mentions(expression: ast.expr, name: str) -> bool:
    return any(isinstance(item, ast.Name) and item.id == name for item in ast.walk(expression))


def _is_number(expression: ast.expr) -> bool:
    match expression:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return True
        case ast.Constant(value=int() | float()):
            return True
    return False


def _compares(key: ast.expr, name: str) -> bool:
    """Return whether a key compares the tensor itself: ``name < 0``, which is a mask of its
    shape.
    """
    match key:
        case ast.Compare(left=ast.Name(id=left), ops=[op]):
            return left == name and not isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn)
    return False
