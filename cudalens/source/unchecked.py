"""Whether unchecked code can write to a tensor unseen before the next checked block begins.

A tensor's version counter shows most writes, but none through ``.data`` or through memory that
NumPy shares.  So only code that cannot do either is accepted: it defines, imports, prints, reads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from cudalens.core.torch_functions import Trait, functions
from cudalens.source.running_node import FUNCTIONS, parsed_source

_FUNCTIONS_THAT_READ = frozenset(
    (
        *("print", "display", "len", "type", "isinstance", "id", "repr", "str", "abs", "round"),
        *("int", "float", "bool", "range"),
    )
)
_METHODS_THAT_READ = frozenset(
    (
        *("size", "dim", "numel", "item", "tolist", "unique", "min", "max", "mean", "sum"),
        *("keys", "values", "items", "format"),
    )
)
_VIEWS = functions(Trait.PROPERTY | Trait.VIEW, without=Trait.RENEWS) | {"grad"}
"""Attributes of a tensor that share its memory, or that of another recorded tensor."""
_WRITING = (ast.AugAssign, ast.Await, ast.Yield, ast.YieldFrom)
_ITERATING = (ast.For, ast.AsyncFor, ast.comprehension)
"""Statements that run the code of an iterator."""


def is_next_checked(statements: Sequence[ast.stmt]) -> bool | None:
    """Return whether statements lead to a checked block without writing to a tensor before.

    Returns:
        ``None`` where they end without a block, and do not write either.
    """
    for statement in statements:
        if _is_block(statement):
            return True
        is_kept = not isinstance(statement, ast.Expr)
        for node in _executed(statement):
            # A later block could write through a view that is kept.
            if _may_write(node) or (is_kept and _may_be_view(node)):
                return False
    return None


def _is_check(statement: ast.With) -> bool:
    """Return whether a statement is ``with cudalens.check(...):``, with any arguments."""
    call = statement.items[0].context_expr
    return isinstance(call, ast.Call) and ast.unparse(call.func) == "cudalens.check"


def _is_block(statement: ast.stmt) -> bool:
    """Return whether a statement is ``with cudalens.check(...):`` with constant arguments."""
    if not isinstance(statement, ast.With) or not _is_check(statement):
        return False
    call: Any = statement.items[0].context_expr
    given = (*call.args, *(it.value for it in call.keywords))
    return all(isinstance(it, ast.Constant) for it in given)


def _may_be_view(node: ast.AST) -> bool:
    """Return whether a node may return a view, through which a later block could write.

    The recorder does not know the base of such a view.
    """
    match node:
        case ast.Subscript(slice=ast.Constant(str())):
            return False  # an item of a dictionary
        case ast.Attribute(attr=name):
            return name in _VIEWS
    return isinstance(node, ast.Subscript)


def _may_write(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="data") | ast.NamedExpr() | ast.keyword(arg="out" | None):
            return True  # None: ``**options`` may contain ``out``
        case ast.Call(func=ast.Name(name)):
            return name not in _FUNCTIONS_THAT_READ
        case ast.Call(func=ast.Attribute(attr=name)):
            return name not in _METHODS_THAT_READ
        case ast.Attribute() | ast.Subscript():
            return not isinstance(node.ctx, ast.Load)
    return isinstance(node, (ast.Call, ast.With, ast.AsyncWith, *_WRITING, *_ITERATING))


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a statement runs, without bodies of functions."""
    yield node
    if isinstance(node, FUNCTIONS):
        parts: Iterator[ast.AST] = iter((*getattr(node, "decorator_list", ()), node.args))
    else:
        parts = ast.iter_child_nodes(node)
    for child in parts:
        yield from _executed(child)


def statements_after(filename: str, line: int) -> tuple[Sequence[ast.stmt], bool] | None:
    """Return the statements that run after the block of a ``with`` statement of ours.

    It may have no other context manager, which would end later and may hide an error.

    Args:
        line: the first line of the ``with`` statement.

    Returns:
        the statements, and whether they are the last of a whole file or cell; ``None`` where the
        line has no such ``with``.
    """
    tree = parsed_source(filename)
    for node in ast.walk(tree) if tree is not None else ():
        for part in ("body", "orelse", "finalbody"):
            block = getattr(node, part, None)
            items: list[ast.stmt] = block if isinstance(block, list) else []
            for at, item in enumerate(items):
                if isinstance(item, ast.With) and item.lineno == line:
                    is_alone = len(item.items) == 1 and _is_check(item)
                    return (items[at + 1 :], node is tree) if is_alone else None
    return None
