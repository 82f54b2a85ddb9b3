"""Read the user's running call, and write fixes as that call with one expression replaced.

Expressions are found by position in the syntax tree, not by text search.  A fix that does not parse
is dropped.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Container, Iterable, Mapping, Set
from typing import Any, NamedTuple

from cudalens.core._python import parse, parse_expression
from cudalens.core.evidence_types import Binding
from cudalens.core.report import Evidence
from cudalens.core.report_types import Expression, LineRef, SourceSpan, TensorFact, syntax

Rearrange = Callable[[Any, list[Any], dict[str, Any]], tuple[Any, list[Any], dict[str, Any]]]
"""Maps function and arguments of a call to those of another call."""


class Change(NamedTuple):
    """The replacement of an operand."""

    text: str
    """The operand as the line spells it."""
    template: str
    """The new expression, with ``{x}`` for the operand: ``{x} - 1``."""
    span: tuple[int, int, int] | None = None
    """The position, if the line has the operand several times; ``None`` for all."""


class Fix(str):
    """A fix as the user would write it, and its effect on the API call.

    Args:
        text: the user's changed call, or an assignment before it.
        changes: the changes of operands.
        rearrange: any other change of the call.
        device: the device that the called module is moved to.
    """

    changes: tuple[Change, ...]
    rearrange: Rearrange | None
    device: str | None

    def __new__(
        cls,
        text: str,
        changes: Iterable[Change] = (),
        rearrange: Rearrange | None = None,
        device: str | None = None,
    ) -> Fix:
        """Make the string, with the changes as attributes."""
        made = super().__new__(cls, text)
        made.changes = tuple(changes)
        made.rearrange = rearrange
        made.device = device
        return made

    def of_name(self) -> tuple[str, str] | None:
        """Return the only changed name or attribute, and its new expression; else ``None``."""
        if len(self.changes) != 1 or self.rearrange is not None or self.device is not None:
            return None
        name, template, _ = self.changes[0]
        is_name = all(part.isidentifier() for part in name.split("."))
        return (name, template.replace("{x}", name)) if is_name and "{x}" in template else None


_ATOMS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant, ast.List)
_TARGETS = (ast.Name, ast.Attribute, ast.Subscript)
_LONGEST_CODE = 80
LONGEST_NAME = 40
"""How many characters an expression may have at the start of a sentence."""


def code_of(binding: Binding) -> str:
    """Return the code that assigned a name, shortened if long."""
    return shortened(binding.value or binding.at.text or "")


def shortened(code: str) -> str:
    """Return code for use in a sentence, shortened if long."""
    return code if len(code) <= _LONGEST_CODE else f"{code[:_LONGEST_CODE].rstrip()}…"


def parsed(expression: str) -> ast.expr | None:
    """Return the syntax tree of an expression, ``None`` if the text is not one."""
    try:
        # Brackets allow line breaks, and the line break before the last one ends a comment.
        return parse_expression(f"({expression}\n)").body
    except (SyntaxError, ValueError):
        return None


def statements_of(code: str | None) -> list[ast.stmt]:
    """Return the statements of a recorded line, none if it is incomplete."""
    try:
        return parse((code or "").strip()).body
    except (SyntaxError, ValueError):
        return []


def statement_of(code: str | None) -> ast.stmt:
    """Return the syntax of a recorded line, ``pass`` if it is not a single statement."""
    statements = statements_of(code)
    return statements[0] if len(statements) == 1 else ast.Pass()


def chooses(tree: ast.AST, names: Set[str]) -> bool:
    """Return whether an index or an argument uses one of the names: ``x[n]``, ``f(n)``."""
    for node in ast.walk(tree):
        parts = [node.slice] if isinstance(node, ast.Subscript) else []
        if isinstance(node, ast.Call):
            parts = [*node.args, *(item.value for item in node.keywords)]
        inner = (item for part in parts for item in ast.walk(part))
        if any(isinstance(item, ast.Name) and item.id in names for item in inner):
            return True
    return False


def in_transformers(evidence: Evidence) -> bool:
    """Return whether transformers called the op, below the user's line."""
    last = max((at for at, frame in enumerate(evidence.frames) if frame.is_user), default=-1)
    below = [frame.file.replace("\\", "/") for frame in evidence.frames[last + 1 :]]
    return any("/transformers/" in file for file in below)


def call_node(evidence: Evidence) -> ast.expr | None:
    """Return the syntax of the running call, ``None`` if it is no expression."""
    node = None if evidence.call is None else evidence.call.node
    return node if isinstance(node, ast.expr) else None


def written(evidence: Evidence, node: ast.expr) -> str:
    """Return a part of the running call as typed."""
    call, whole = evidence.call, call_node(evidence)
    if call is None or whole is None or not call.is_written_so:
        return Expression(ast.unparse(node), node)
    start = whole.col_offset - isinstance(whole, ast.NamedExpr)  # it is in parentheses
    # Python counts the columns of syntax in bytes of UTF-8.
    text = call.text.encode()[node.col_offset - start : (node.end_col_offset or 0) - start]
    return Expression(text.decode(), node)


def spliced(evidence: Evidence, values: Mapping[Any, str]) -> str | None:
    """Return the running call with parts of its syntax replaced by texts."""
    call, whole = evidence.call, call_node(evidence)
    if call is None or whole is None:
        return None
    if call.is_written_so:
        line = call.text.encode()
        start = whole.col_offset - isinstance(whole, ast.NamedExpr)  # it is in parentheses
        # From right to left, so that the columns of the rest stay true.
        for node in sorted(values, key=lambda item: item.col_offset, reverse=True):
            before = line[: node.col_offset - start]
            line = before + values[node].encode() + line[node.end_col_offset - start :]
        text = line.decode()
    else:
        # `deepcopy` takes these from its memo in place of copies of the nodes.
        parts = {id(node): ast.Name(text) for node, text in values.items()}
        text = ast.unparse(copy.deepcopy(whole, parts))
    return text if parsed(text) is not None else None


def rewritten(evidence: Evidence, fact: TensorFact | None, template: str) -> Fix | None:
    """Return the call with ``fact`` replaced by ``template``, in which ``{x}`` is the expression.

    If the call does not contain the expression, as in ``model(**batch)``, the fix is an assignment
    before it.
    """
    if fact is None or fact.expression is None:
        return None
    if (changed := with_changes(evidence, [(fact, template)])) is not None:
        return Fix(changed, [Change(fact.expression, template, fact.span)])
    changed = assignment(fact, template)
    return None if changed is None else Fix(changed, [Change(fact.expression, template)])


def with_changes(evidence: Evidence, changes: Iterable[tuple[TensorFact, str]]) -> str | None:
    """Return the call with each expression replaced, ``None`` if it lacks one."""
    values = {}
    for fact, template in changes:
        wanted = fact.node
        place = None if wanted is None else _place_of(evidence, fact, wanted)
        if place is None:
            return None
        value = _filled(fact, template)
        if not _stands_alone(*place) and not isinstance(parsed(value), _ATOMS):
            value = f"({value})"
        values[place[0]] = value
    return spliced(evidence, values)


def assignment(fact: TensorFact, template: str) -> str | None:
    """Return the change of an expression as a statement before the call."""
    is_target = isinstance(fact.node, _TARGETS)
    return f"{fact.expression} = {_filled(fact, template)}" if is_target else None


def _filled(fact: TensorFact, template: str) -> str:
    inner = fact.expression or ""
    return template.replace("{x}", inner if isinstance(fact.node, _ATOMS) else f"({inner})")


_Place = tuple[ast.expr, ast.AST | None]


def _place_of(evidence: Evidence, fact: TensorFact, wanted: ast.expr) -> _Place | None:
    """Return an expression's node in the call, and its parent; ``None`` if ambiguous."""
    tree, key = call_node(evidence), ast.dump(wanted)
    places: list[_Place] = []
    waiting: list[tuple[ast.AST, ast.AST | None]] = [] if tree is None else [(tree, None)]
    while waiting:
        node, parent = waiting.pop()
        if isinstance(node, ast.expr) and ast.dump(node) == key:
            places.append((node, parent))
        else:
            waiting.extend((child, node) for child in ast.iter_child_nodes(node))
    if len(places) > 1:
        start = None if fact.span is None else fact.span[:2]
        here = [item for item in places if (item[0].lineno, item[0].col_offset) == start]
        direct = [item for item in places if item[1] is tree or isinstance(item[1], ast.keyword)]
        places = here or direct
    return places[0] if len(places) == 1 else None


def _stands_alone(node: ast.expr, parent: ast.AST | None) -> bool:
    """Return whether any expression can replace the node without parentheses."""
    if isinstance(parent, ast.Call):
        return parent.func is not node
    if isinstance(parent, ast.Subscript):
        return parent.slice is node
    return parent is None or isinstance(parent, ast.keyword | ast.Tuple | ast.List)


def with_keyword(
    evidence: Evidence,
    functions: Iterable[str],
    keyword: str,
    value: str,
) -> Fix | None:
    """Return the call with ``keyword=value`` added or replaced.

    ``None`` if the line has no call of one of ``functions``, by last name.
    """
    node = _call_of(evidence, set(functions))
    if node is None:
        return None
    if values := [item.value for item in node.keywords if item.arg == keyword]:
        text = spliced(evidence, {values[0]: value})
    # `**options` may contain the keyword already.
    elif any(item.arg is None for item in node.keywords):
        return None
    else:
        inside = written(evidence, node)[:-1].rstrip().rstrip(",")
        comma = "" if inside.endswith("(") else ", "
        made = f"{inside}{comma}{keyword}={value})"
        text = spliced(evidence, {node: made})
        tree = call_node(evidence)
        if text and isinstance(tree, ast.Call) and node not in (tree, tree.func):
            return Fix(text, [Change(ast.unparse(node), made)])  # of an operand's own call

    def put(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return function, args, {**kwargs, keyword: ast.literal_eval(value)}

    return Fix(text, rearrange=put) if text else None


def _call_of(evidence: Evidence, names: Container[str | None]) -> ast.Call | None:
    """Return the first call of one of these names inside the running call."""
    tree = call_node(evidence)
    nodes = (item for item in ast.walk(tree) if isinstance(item, ast.Call)) if tree else ()
    return next((item for item in nodes if last_name(item.func) in names), None)


def last_name(node: ast.AST) -> str | None:
    """Return the last part of a dotted name: ``cross_entropy`` for ``F.cross_entropy``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def is_name(expression: str | None) -> bool:
    """Return whether an expression is a short name, attribute or entry."""
    return isinstance(syntax(expression), _TARGETS) and len(expression or "") <= LONGEST_NAME


def called_name(evidence: Evidence) -> str | None:
    """Return the dotted name that the user's line calls, such as ``self.bert`` or ``F.one_hot``."""
    tree = call_node(evidence)
    if not isinstance(tree, ast.Call):
        return None
    text = ast.unparse(tree.func)
    return text if all(part.isidentifier() for part in text.split(".")) else None


def renamed(evidence: Evidence, old: str, new: str, function: str | None = None) -> Fix | None:
    """Return the call with its function ``old`` replaced by ``new``.

    Args:
        function: torch's name of the new function, if it differs from ``new``.
    """
    node = _call_of(evidence, {old})
    name = node and ast.unparse(node.func).removesuffix(old) + new
    text = node and name and spliced(evidence, {node.func: name})
    if not text:
        return None
    return Fix(text, rearrange=function_named(function or new))


def function_named(name: str) -> Rearrange:
    """Return the change that calls another function with the same arguments."""

    def put(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return name, args, kwargs

    return put


def list_of(values: Iterable[int], limit: int = 4, *, first: Container[int] = ()) -> str:
    """Return the first few numbers: ``10, 11, 12 and 3 more``.

    Args:
        first: numbers that must not be left out.
    """
    ordered = sorted(values)
    if len(ordered) > limit:
        ordered.sort(key=lambda value: value not in first)
    shown = ", ".join(str(value) for value in ordered[:limit])
    rest = len(ordered) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown


# --- parts of the running call -------------------------------------------------------------------


def api_function(evidence: Evidence) -> str:
    """Return the last part of the called function's name: ``conv1d``, ``__matmul__``."""
    return (evidence.op.api or "").rpartition(".")[2]


def list_items(evidence: Evidence) -> tuple[str, ...]:
    """Return the item expressions of the list display that the line passes first."""
    # Without a Python frame below it, the line's call is the one that raised.
    call = call_node(evidence) if evidence.frames and evidence.frames[-1].is_user else None
    if not isinstance(call, ast.Call) or last_name(call.func) != api_function(evidence):
        return ()
    named = (item.value for item in call.keywords if item.arg == "tensors")
    node = next(named, call.args[0] if call.args else None)
    if not isinstance(node, ast.List | ast.Tuple):
        return ()
    if any(isinstance(item, ast.Starred) for item in node.elts):
        return ()
    return tuple(Expression(ast.unparse(item), item) for item in node.elts)


def place(at: SourceSpan | LineRef, evidence: Evidence) -> str:
    """Return ``line 7``, with the cell or file if it differs from the failing line's."""
    if evidence.source is None:
        return f"line {at.line}"
    return LineRef(line=at.line, cell=at.cell, file=at.file).near(evidence.source)


def is_failing_line(at: SourceSpan | LineRef, evidence: Evidence) -> bool:
    """Return whether a place is on a line of the failing statement."""
    here = evidence.source
    if here is None or here.line is None or at.line is None:
        return False
    is_same_code = (at.cell, at.file) == (here.cell, here.file)
    return is_same_code and here.line <= at.line <= (here.end_line or here.line)
