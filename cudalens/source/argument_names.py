"""The user's own names for tensors: expressions of the running line that evaluate to them.

An expression names a tensor only when its value, as ``running_call`` reads it, is that tensor.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cudalens.core.report_types import Expression
from cudalens.core.user_objects import is_tensor
from cudalens.source.files import is_torch_file
from cudalens.source.running_call import ABSENT, RunningCall
from cudalens.source.running_node import Span, expressions_in, span_of, text_of
from cudalens.source.safe_eval import items_of
from cudalens.source.stack import Place

Same = Callable[[object, object], bool]
RowOf = Callable[[object, object], int | None]
"""Returns which row of the second value is the first one, ``None`` if no row is."""

# Expressions that a subscript can follow without parentheses.
_PRIMARIES = (ast.Name, ast.Attribute, ast.Subscript)
# Expressions that need parentheses, else a subscript would apply to their last part alone.
_LOOSE = (ast.BinOp, ast.BoolOp, ast.IfExp, ast.NamedExpr, ast.Await)
_MAX_ITEMS = 64
_MAX_OTHERS = 12
_MAX_LIBRARY_NAMES = 3


class Name(NamedTuple):
    """An argument of the op, and the user's expression that evaluates to it."""

    key: str
    expression: Expression
    span: Span | None


class LineTensor(NamedTuple):
    """A tensor, and the expression of the line that evaluates to it."""

    expression: Expression
    span: Span | None
    value: object


def tensors_on(call: RunningCall) -> tuple[LineTensor, ...]:
    """Return the expressions of the running line that are tensors, nearest and shortest first."""
    run = call.run
    tensors: dict[tuple[str, int], tuple[int, LineTensor]] = {}
    for read in _read(call):
        is_stored = isinstance(getattr(read.node, "ctx", None), ast.Store | ast.Del)
        # ``x += 1`` reads its target, too.  The target of a ``for`` still has its earlier value.
        is_read = isinstance(run.node, ast.AugAssign) and read.node is run.node.target
        if is_stored and not is_read:
            continue
        for extra, text, node, tensor in _tensors_of(read, run.lines):
            # An operand of the call itself is preferred to other expressions of the same value.
            rank = read.rank + extra - (id(node) in call.spelled)
            # The same text twice may be two tensors: two calls of one function.
            key = text, id(tensor)
            if key not in tensors or tensors[key][0] > rank:
                tensors[key] = rank, LineTensor(text, span_of(node, run.lines), tensor)
    ordered = sorted(tensors.values(), key=lambda item: (item[0], len(item[1].expression)))
    return tuple(item for _, item in ordered)


def name_values(
    tensors: Sequence[LineTensor], values: Mapping[str, object], same: Same, row_of: RowOf | None
) -> tuple[Name, ...]:
    """Name each value by the first expression that is proven to be it, or to have it as a row.

    A library selects rows of its arguments: the ends of edges, the channels of an image.
    """
    names = []
    for key, value in values.items():
        proven = next((item for item in tensors if same(item.value, value)), None)
        if proven is not None:
            names.append(Name(key, proven.expression, proven.span))
        elif row_of is not None:
            for whole in tensors:
                syntax = whole.expression.node
                row = row_of(value, whole.value) if isinstance(syntax, _PRIMARIES) else None
                if row is not None:
                    node = ast.Subscript(syntax, ast.Constant(row), ast.Load())  # type: ignore[arg-type]
                    entry = Expression(f"{whole.expression}[{row}]", node)
                    names.append(Name(key, entry, whole.span))
                    break
    return tuple(names)


def other_tensors(
    tensors: Sequence[LineTensor], values: Mapping[str, object], same: Same
) -> tuple[LineTensor, ...]:
    """Return the tensors on the line that are not in ``values``, each once, in reading order."""
    others: list[LineTensor] = []
    for item in tensors:
        named = [*values.values(), *(other.value for other in others)]
        if not any(same(item.value, value) for value in named):
            others.append(item)
    # Those without a place come last.
    return tuple(sorted(others[:_MAX_OTHERS], key=lambda item: item.span or (1 << 31, 0, 0)))


def library_names(
    places: Sequence[Place], values: Mapping[str, object], same: Same
) -> tuple[tuple[str, str], ...]:
    """Return each key with the variables that hold its value in library frames, innermost first."""
    names: list[tuple[str, str]] = []
    for place in reversed(places):
        if is_torch_file(place.filename):
            continue  # its parameters have the names of the schema
        variables = [pair for pair in place.variables.items() if is_tensor(pair[1])]
        for key, value in values.items():
            name = next((name for name, variable in variables if same(variable, value)), None)
            if name is not None and sum(other == key for other, _ in names) < _MAX_LIBRARY_NAMES:
                names.append((key, name))
    return tuple(names)


class _Read(NamedTuple):
    """An expression of the line with its value."""

    rank: int
    node: ast.expr
    value: object
    is_whole: bool = True
    """False for the receiver of an attribute or subscript, as ``batch`` in ``batch["y"]``."""


def _read(call: RunningCall) -> Iterator[_Read]:
    """Yield the expressions of the line that can be read, the running call's own first."""
    seen: set[int] = set()
    receivers: set[int] = set()
    for rank, root in ((0, call.run.node), (2, call.run.scope)):
        for node in expressions_in(root) if root is not None else ():
            if isinstance(node, ast.Attribute | ast.Subscript):
                receivers.add(id(node.value))
            value = call.value(node)
            if value is not ABSENT and id(node) not in seen:
                yield _Read(rank, node, value, id(node) not in receivers)
            seen.add(id(node))


def _tensors_of(
    read: _Read, lines: Sequence[str]
) -> Iterator[tuple[int, Expression, ast.expr, object]]:
    """Yield the tensor that an expression evaluates to, or the tensors of its batch.

    An item of a tuple or list that the line writes out is named by its own expression.
    """
    node, value = read.node, read.value
    if is_tensor(value):
        yield 0, Expression(text_of(node, lines), node), node, value
        return
    held = items_of(value, _MAX_ITEMS) if read.is_whole else []
    tensors = [(key, item) for key, item in held if type(key) in (str, int) and is_tensor(item)]
    text = text_of(node, lines) if tensors else ""
    text = f"({text})" if isinstance(node, _LOOSE) else text
    spelled = node.elts if isinstance(node, ast.Tuple | ast.List) else []
    if any(isinstance(item, ast.Starred) for item in spelled) or len(spelled) != len(held):
        spelled = []
    for key, item in tensors:
        if spelled and isinstance(key, int):
            part = spelled[key]
            yield 1, Expression(text_of(part, lines), part), part, item
            continue
        shown = f'"{key}"' if isinstance(key, str) and key.isidentifier() else ascii(key)
        entry = ast.Subscript(node, ast.Constant(key), ast.Load())  # type: ignore[arg-type]
        yield 1, Expression(f"{text}[{shown}]", entry), node, item
