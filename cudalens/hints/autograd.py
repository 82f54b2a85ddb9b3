"""Fixes for errors of the autograd graph."""

from __future__ import annotations

import ast
import re

from cudalens.facts import Hint
from cudalens.hints._base import rule
from cudalens.hints._fixes import rewritten
from cudalens.hints._reading import parsed
from cudalens.hosterrors import verdict_of
from cudalens.model import Evidence
from cudalens.parsing import parse

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


@rule(priority=30)
def out_of_place(evidence: Evidence) -> Hint | None:
    """The recorded line that changed a saved tensor has a form that makes a new one."""
    found = verdict_of(evidence, "saved_tensor_modified")
    place = evidence.fact("inplace.modified_at") if found else None
    if not place:
        return None
    code = place.partition(": ")[2]
    if _only_steps(code):
        return Hint(
            text="the step changes the parameters: run backward through this graph before it, or "
            "the forward pass again after it"
        )
    return Hint(
        text="make a new tensor instead of changing the one that backward needs",
        fix=_new_tensor(code),
    )


def _only_steps(code: str) -> bool:
    """Tell whether a line calls an optimizer's step and holds no other change in place."""
    try:
        nodes = list(ast.walk(parse(code.strip())))
    except SyntaxError:
        return False
    calls = [item.func for item in nodes if isinstance(item, ast.Call)]
    names = {item.attr for item in calls if isinstance(item, ast.Attribute)}
    if any(isinstance(item, ast.AugAssign) for item in nodes):
        return False
    return "step" in names and not any(map(_IN_PLACE.fullmatch, names - _OF_GRADIENTS))


def _new_tensor(code: str) -> str | None:
    """Write an in-place statement so that it makes a new tensor."""
    try:
        body = parse(code.strip()).body
    except SyntaxError:
        return None
    if len(body) != 1:
        return None
    statement = body[0]
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


_REMEDIES = {
    "item": "keep the tensor and take item() for printing only",
    "tolist": "keep the tensor and take tolist() for printing only",
    "detach": "leave detach() out of the loss",
    "data": "leave .data out of the loss",
    "numpy": "compute the loss with torch",
    "argmax": "compute the loss from the scores, which have a gradient",
    "tensor": "combine the tensors themselves, with torch.stack or +",
    "no_grad": "compute the loss outside of no_grad",
}
_REMOVED = {"item": ".item()", "tolist": ".tolist()", "detach": ".detach()", "data": ".data"}


@rule(priority=30)
def detached_loss(evidence: Evidence) -> Hint | None:
    """The line that made the loss cut it off its graph."""
    found = verdict_of(evidence, "no_graph")
    if found is None or not found.values["cause"]:
        return None
    cause, code = found.values["cause"], found.values["code"]
    removed = _REMOVED.get(cause)
    fix = None
    if removed and code.count(removed) == 1:
        fix = code.replace(removed, "")
        # What is left of torch.tensor(x.item()) is no better.
        fix = None if "tensor(" in fix else fix
    return Hint(text=f"line {found.values['line']}: {_REMEDIES[cause]}", fix=fix)


@rule(priority=30)
def reduce_loss(evidence: Evidence) -> Hint | None:
    """A loss of several elements is reduced before backward."""
    found = verdict_of(evidence, "not_a_scalar")
    if found is None or not found.values["expression"]:
        return None
    fact = evidence.tensor(found.argument or "")
    return Hint(
        text="reduce it to one number: mean() or sum()",
        fix=rewritten(evidence, fact, "{x}.mean()"),
    )


@rule(priority=30)
def change_without_graph(evidence: Evidence) -> Hint | None:
    """A parameter is changed in place where no graph is recorded."""
    found = verdict_of(evidence, "leaf_modified")
    text = evidence.source.text if evidence.source else None
    if found is None or text is None:
        return None
    whole = parsed(text) is not None or text.rstrip().endswith(")") or "=" in text
    return Hint(
        text="change a parameter under no_grad, so that the change is no part of the graph",
        fix=f"with torch.no_grad(): {text}" if whole and not text.endswith(":") else None,
    )


@rule(priority=30)
def count_of_gradients(evidence: Evidence) -> Hint | None:
    """backward returns None for inputs without a gradient."""
    found = verdict_of(evidence, "gradient_count")
    if found is None or found.values["got"] >= found.values["want"]:
        return None
    missing = found.values["want"] - found.values["got"]
    return Hint(
        text="an input without a gradient, such as a number or a flag, has None in its place",
        fix="return grad" + ", None" * missing if found.values["got"] == 1 else None,
    )


@rule(priority=30)
def split_out_of_place(evidence: Evidence) -> Hint | None:
    """A view of several is copied before it is changed."""
    found = verdict_of(evidence, "multi_view_modified")
    if found is None or not found.values["expression"]:
        return None
    return Hint(
        text="change a copy of it",
        fix=rewritten(evidence, evidence.tensor("self"), "{x}.clone()"),
    )
