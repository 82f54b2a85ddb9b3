"""What the user's running call spells: the receiver of a method, the items of a list.

An expression that no frame holds the value of is still certain by its place in the call, where
torch's own function was called by nobody but that line.
"""

from __future__ import annotations

import ast

from cudalens.core.parsing import parse_expression
from cudalens.core.report import Evidence
from cudalens.diagnosis.host_errors._words import called

_ATOMS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)


def receiver(evidence: Evidence) -> str | None:
    """Give the expression on which the line calls the method that raised: ``f(x)``, ``(a + b)``."""
    call = _direct_call(evidence)
    if call is None or not (evidence.op.api or "").startswith("torch.Tensor."):
        return None
    function = call.func
    if not isinstance(function, ast.Attribute):
        return None
    text = ast.unparse(function.value)
    return text if isinstance(function.value, _ATOMS) else f"({text})"


def list_items(evidence: Evidence) -> tuple[str, ...]:
    """Give the expressions of the list of tensors that the line passes first, if it spells it."""
    call = _direct_call(evidence)
    if call is None:
        return ()
    named = (item.value for item in call.keywords if item.arg == "tensors")
    node = next(named, call.args[0] if call.args else None)
    if not isinstance(node, ast.List | ast.Tuple):
        return ()
    if any(isinstance(item, ast.Starred) for item in node.elts):
        return ()
    return tuple(map(ast.unparse, node.elts))


def passed(evidence: Evidence, function: str, position: int, keyword: str) -> str | None:
    """Give the expression that the line passes to ``function``, which it calls by this name."""
    call = _call_of(evidence, function)
    if call is None or any(isinstance(item, ast.Starred) for item in call.args):
        return None
    named = (item.value for item in call.keywords if item.arg == keyword)
    node = next(named, call.args[position] if position < len(call.args) else None)
    return None if node is None else ast.unparse(node)


def _direct_call(evidence: Evidence) -> ast.Call | None:
    """Give the line's call when it is the one that raised, with nothing of Python below it."""
    if not evidence.frames or not evidence.frames[-1].is_user:
        return None
    return _call_of(evidence, called(evidence))


def _call_of(evidence: Evidence, wanted: str) -> ast.Call | None:
    if not evidence.call_text:
        return None
    try:
        call = parse_expression(f"({evidence.call_text}\n)").body
    except (SyntaxError, ValueError):
        return None
    if not isinstance(call, ast.Call):
        return None
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    return call if name == wanted else None
