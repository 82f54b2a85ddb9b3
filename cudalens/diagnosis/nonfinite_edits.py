"""One-step edits that keep a call, or its gradient, finite.

Only for causes with one obvious fix: a constant that is 0 in the tensor's dtype, a branch that
``where`` discards, a count of 0, an infinite slope at 0, a logarithm of 0.  Each edit is tried on
copies, forward and backward, before it is shown.  A negative number under a root, or a row of
scores that is masked everywhere, has no edit: the fix depends on the user's intention.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cudalens.core._python import parse
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, SourceSpan, TensorFact
from cudalens.core.torch_functions import Trait, functions
from cudalens.diagnosis.candidates import Trial
from cudalens.diagnosis.hints.nonfinite import ROUNDING, input_of, made
from cudalens.diagnosis.user_code import (
    Change,
    Fix,
    call_node,
    function_named,
    last_name,
    parsed,
    rewritten,
    spliced,
    written,
)

_SAFE = {**dict.fromkeys(functions(Trait.ARC), 0), "atanh": 0, "exp": 0, "expm1": 0, "acosh": 2}
"""An argument at which a function and its derivative are finite; 1 for functions not listed."""
_LOOKS = functions(Trait.COMPARES) | functions(Trait.FACT) | functions(Trait.NEVER_COPIES)
_LOOKS |= {"isfinite", "isnan", "isinf", "logical_not", "any", "all", "abs", "sum", "bool", "float"}
"""Functions without side effects, which a condition may call again."""
_TO_NUMBERS = functions(Trait.CAST | Trait.VIEW, without=Trait.TO_INTEGER) | {"sum"}
"""Functions that turn truth values into numbers, or count them."""
_STEPS_UP = (1e-7, 1e-6, 1e-5, 1e-4)
"""Replacements for a constant that vanishes in float16, smallest first."""
_LOST = 3e-8
"""Half of the smallest float16 above 0, which is rounded to 0."""


def finite_edit(evidence: Evidence, trial: Trial) -> Hint | None:
    """Return the first edit that makes all values and gradients of the call finite."""
    violation = evidence.violation
    if violation is None or not violation.is_nonfinite or violation.overwritten:
        return None
    for hint in _edits(evidence):
        if isinstance(hint.fix, Fix) and trial.makes_finite(hint.fix):
            return replace(hint, tried=True)
    return None


def _edits(evidence: Evidence) -> Iterator[Hint]:
    if evidence.phase == "backward":
        yield from _safe_branch(evidence)
        yield from _slope_at_zero(evidence)
        return
    if _is_written_here(evidence):
        yield from _larger_constant(evidence)
        yield from _log_softmax(evidence)
        yield from _within_domain(evidence)
        yield from _count_of_none(evidence)


def _is_written_here(evidence: Evidence) -> bool:
    """Return whether the user's line contains the call itself, not a module around it."""
    node, name = call_node(evidence), made(evidence)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Div) and name in ("div", "rdiv")
    return isinstance(node, ast.Call) and last_name(node.func) == name


# --- forward --------------------------------------------------------------------------------------


def _larger_constant(evidence: Evidence) -> Iterator[Hint]:
    """A constant that should keep an argument above 0 is 0 in float16: use a larger one."""
    call = call_node(evidence)
    for fact in (evidence.tensor("other"), evidence.tensor("self")):
        if call is None or fact is None or fact.node is None or fact.dtype != "float16":
            continue
        for lost in (item for part in ast.walk(fact.node) for item in _kept_above(part)):
            value = lost.value if isinstance(lost, ast.Constant) else None
            if not isinstance(value, float) or not 0 < value <= _LOST:
                continue
            places = (it for it in ast.walk(call) if ast.dump(it) == ast.dump(lost))
            place = next(places, None)
            for larger in _STEPS_UP if place is not None else ():
                changed = spliced(evidence, {place: _number(larger)})
                # `deepcopy` takes the new constant from its memo in place of a copy of the old one.
                exchanged = copy.deepcopy(fact.node, {id(lost): ast.Constant(larger)})
                change = Change(fact.expression or "", _number(ast.unparse(exchanged)), fact.span)
                text = f"{_number(value)} is 0 in float16, and {_number(larger)} is not"
                fix = None if changed is None else Fix(changed, [change])
                yield Hint(rule="vanished_constant", text=text, fix=fix)


def _number(code: object) -> str:
    """Return code or a number with ``1e-8`` for Python's ``1e-08``."""
    return str(code).replace("e-0", "e-")


def _kept_above(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what an expression adds, or clamps from below with."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from (node.left, node.right)
    if isinstance(node, ast.Call) and last_name(node.func) in functions(Trait.CLAMPS):
        yield from node.args[:2]
        yield from (item.value for item in node.keywords if item.arg == "min")


def _log_softmax(evidence: Evidence) -> Iterator[Hint]:
    """Replace the logarithm of a softmax by ``log_softmax``, which stays finite."""
    fact, call = evidence.tensor("self"), call_node(evidence)
    inner = fact.node if fact is not None else None
    is_softmax = isinstance(inner, ast.Call) and last_name(inner.func) == "softmax"
    if fact is None or made(evidence) != "log" or call is None or not is_softmax:
        return
    assert isinstance(inner, ast.Call)
    text = ast.unparse(inner)
    name = ast.unparse(inner.func).removesuffix("softmax") + "log_softmax"
    template = f"{name}{text.removeprefix(ast.unparse(inner.func))}"
    whole = spliced(evidence, {call: template})
    if whole and fact.expression:
        change = Change(fact.expression, template, fact.span)
        yield Hint(
            rule="log_of_softmax",
            text="the softmax is 0 there, and log_softmax computes its logarithm without the 0",
            # The new argument is the logarithm already, so the trial calls an identity in place of
            # `log`.
            fix=Fix(whole, [change], rearrange=function_named("positive")),
        )


def _within_domain(evidence: Evidence) -> Iterator[Hint]:
    """Clamp the argument of a logarithm of 0, or one that rounding moved out of the domain."""
    fact, name = evidence.tensor("self"), made(evidence)
    # A clamp would hide an infinity, which no rounding has made.
    if fact is None or fact.summary.inf:
        return
    low, high = fact.summary.min, fact.summary.max
    if isinstance(low, str) or isinstance(high, str) or low is None or high is None:
        return
    # float16 rounds 1e-8 to 0.
    small = "1e-7" if fact.dtype == "float16" else "1e-8"
    if name in functions(Trait.LOGARITHM) and low == 0:
        text = f"{name}(0) is -inf: clamp_min changes no value above {small}"
        yield from _hint(evidence, fact, f"{{x}}.clamp_min({small})", "log_of_zero", text)
    if name in functions(Trait.ARC) and max(-1 - low, high - 1) <= ROUNDING:
        text = f"rounding took a value beyond the numbers from -1 to 1, which {name} takes"
        for end in ("1", "0.999999"):  # at 1 the derivative is infinite
            template = f"{{x}}.clamp(-{end}, {end})"
            yield from _hint(evidence, fact, template, "rounded_out_of_domain", text)
    if name == "sqrt" and -ROUNDING <= low < 0 and high > 0:
        text = "rounding took a value below 0, where sqrt has no value"
        for end in ("0", small):
            template = f"{{x}}.clamp_min({end})"
            yield from _hint(evidence, fact, template, "rounded_out_of_domain", text)


def _hint(
    evidence: Evidence, fact: TensorFact, template: str, rule: str, text: str
) -> Iterator[Hint]:
    fix = rewritten(evidence, fact, template)
    if fix is not None:
        yield Hint(rule=rule, text=text, fix=fix)


def _count_of_none(evidence: Evidence) -> Iterator[Hint]:
    """Clamp a count of 0 that an empty sum is divided by."""
    if made(evidence) != "div" or input_of(evidence, "self") != 0:
        return
    node, fact = call_node(evidence), evidence.tensor("other")
    text = "the count is 0 there, and 0 / 0 is nan: at least 1 keeps every other quotient"
    if fact is not None and _is_count(fact):
        yield from _hint(evidence, fact, "{x}.clamp(min=1)", "count_of_none", text)
    elif fact is None and isinstance(node, ast.BinOp) and _is_length(node.right):
        whole = spliced(evidence, {node.right: f"max({written(evidence, node.right)}, 1)"})
        if whole is not None:
            yield Hint(rule="count_of_none", text=text, fix=Fix(whole, rearrange=_at_least_one))


def _at_least_one(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return function, [*args[:1], *(max(item, 1) for item in args[1:2]), *args[2:]], kwargs


def _is_count(fact: TensorFact) -> bool:
    """Return whether a tensor is a count: integers, or the sum of a comparison."""
    low = fact.summary.min
    if fact.dtype.startswith(("int", "uint")):
        return not isinstance(low, str) and low is not None and low >= 0
    node = fact.node
    while isinstance(node, ast.Call) and last_name(node.func) in _TO_NUMBERS:
        node = node.func.value if isinstance(node.func, ast.Attribute) else None
    return isinstance(node, ast.Compare)


def _is_length(node: ast.expr) -> bool:
    is_call = isinstance(node, ast.Call) and last_name(node.func) in ("len", "numel")
    return is_call or (isinstance(node, ast.Subscript) and last_name(node.value) == "shape")


# --- backward -------------------------------------------------------------------------------------


def _safe_branch(evidence: Evidence) -> Iterator[Hint]:
    """``where`` discards a value, but not its infinite gradient: make the input safe first."""
    line, name = _statement(evidence), _of_node(evidence)
    wheres = [item for item in _calls(line) if last_name(item.func) == "where"]
    if len(wheres) != 1 or len(wheres[0].args) != 3 or wheres[0].keywords:
        return
    condition, *branches = wheres[0].args
    looks = {last_name(item.func) for item in _calls(condition)}
    found = [(at, it) for at, arg in enumerate(branches) for it in _inputs(arg, name)]
    at, (whole, inner) = found[0] if len(found) == 1 else (0, (None, None))
    if whole is None or inner is None or not looks <= _LOOKS:
        return
    safe = _SAFE.get(name, 1)
    parts = [_text(evidence, condition), _text(evidence, inner), str(safe)]
    order = parts if at == 0 else [parts[0], parts[2], parts[1]]
    changed = _replaced(evidence, wheres[0], inner, f"torch.where({', '.join(order)})")
    place = _span(evidence, wheres[0])
    if changed is None or place is None:
        return
    template = f"torch.where(condition, {{x}}, {safe})"
    if at == 1:
        template = f"torch.where(condition, {safe}, {{x}})"
    text = f"{name} gets {safe} where where() discards its result"
    fix = Fix(changed, [Change(ast.unparse(inner), template)])
    yield Hint(rule="safe_branch", text=text, fix=fix, at=place)


def _slope_at_zero(evidence: Evidence) -> Iterator[Hint]:
    """A root has an infinite derivative at 0: add a small number under it."""
    name, line = _of_node(evidence), _statement(evidence)
    is_root = name == "sqrt" and input_of(evidence, "result") == 0
    if name == "pow":
        is_root = input_of(evidence, "self") == 0 and input_of(evidence, "exponent") == 1 / 2
    found = list(_inputs(line, name)) if is_root and line is not None else []
    if name == "pow":
        found = [item for item in found if _is_half(item[0])]
    if len(found) != 1:
        return
    whole, inner = found[0]
    violation = evidence.violation
    small = "1e-7" if violation is not None and violation.dtype == "float16" else "1e-12"
    place = _span(evidence, whole)
    is_method = not isinstance(whole, ast.Call) or not whole.args or name == "pow"
    text = f"{_text(evidence, inner)} + {small}"
    changed = _replaced(evidence, whole, inner, f"({text})" if is_method else text)
    if changed is not None and place is not None:
        yield Hint(
            rule="slope_at_zero",
            text=f"the slope of a root is infinite at 0: {small} beneath it bounds the slope",
            fix=Fix(changed, [Change(ast.unparse(inner), f"{{x}} + {small}")]),
            at=place,
        )


def _is_half(power: ast.expr) -> bool:
    match power:
        case ast.BinOp(right=ast.Constant(0.5)) | ast.Call(args=[ast.Constant(0.5)]):
            return True
    return False


def _of_node(evidence: Evidence) -> str:
    return made(evidence).partition("Backward")[0].lower()


def _inputs(tree: ast.AST, name: str) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the calls of a function in an expression, each with its critical argument."""
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(_, ast.Div(), below) if name in ("div", "reciprocal"):
                yield node, below
            case ast.BinOp(base, ast.Pow()) if name == "pow":
                yield node, base
            case ast.Call(ast.Attribute(ast.Name("torch"), called), [first, *_]) if called == name:
                yield node, first
            case ast.Call(ast.Attribute(of, called), []) if called == name:
                yield node, of
            case ast.Call(ast.Attribute(of, "pow"), [_]) if name == "pow":
                yield node, of


def _calls(tree: ast.AST | None) -> list[ast.Call]:
    return [] if tree is None else [it for it in ast.walk(tree) if isinstance(it, ast.Call)]


def _statement(evidence: Evidence) -> ast.stmt | None:
    """Return the syntax of the forward line, if it contains the whole statement."""
    text = evidence.forward_source.text if evidence.forward_source is not None else None
    if not text or "\n" in text:
        return None
    try:
        body = parse(text).body
    except (SyntaxError, ValueError):
        return None
    return body[0] if len(body) == 1 else None


def _text(evidence: Evidence, node: ast.AST) -> str:
    """Return a part of the forward line as typed."""
    text = evidence.forward_source.text if evidence.forward_source is not None else None
    return ast.get_source_segment(text or "", node) or ast.unparse(node)


def _replaced(evidence: Evidence, whole: ast.expr, part: ast.expr, new: str) -> str | None:
    """Return an expression of the forward line with one part replaced."""
    # Python counts the columns of syntax in bytes of UTF-8.
    old, start = _text(evidence, whole).encode(), whole.col_offset
    ends = part.col_offset - start, (part.end_col_offset or 0) - start
    text = (old[: ends[0]] + new.encode() + old[ends[1] :]).decode()
    return text if parsed(text) is not None else None


def _span(evidence: Evidence, node: ast.expr) -> SourceSpan | None:
    """Return the position of an expression in the forward line, if it occurs once."""
    at, text = evidence.forward_source, _text(evidence, node)
    line = next((it.text for it in at.context if it.line == at.line), "") if at else ""
    if at is None or line.count(text) != 1:
        return None
    column = line.index(text)
    return replace(at, end_line=at.line, column=column, end_column=column + len(text))
