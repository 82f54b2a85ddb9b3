"""Which statement of a scope binds a name, and which one a place in the scope reads.

Only the syntax is read.  Where two statements may have bound the name, there is no answer.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator, Sequence

from cudalens.source.running_node import FUNCTIONS

INNER = (*FUNCTIONS, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Syntax with names of its own."""
LOOPS = (ast.For, ast.AsyncFor, ast.While)
_BLOCK = (ast.stmt, ast.ExceptHandler, ast.match_case)
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def statements_of(scope: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a scope in the order of the source, without inner scopes."""
    for part in _BLOCKS:
        for item in getattr(scope, part, ()):
            if isinstance(item, ast.stmt):
                yield item
            if not isinstance(item, INNER):
                yield from statements_of(item)


def bindings_of(scope: ast.AST, name: str) -> list[ast.stmt]:
    """Return the statements of a scope that bind a name."""
    return [it for it in statements_of(scope) if binds(it, name)]


def binds(statement: ast.stmt, name: str) -> bool:
    """Return whether a statement binds a name itself, outside its blocks."""
    if isinstance(statement, INNER):
        return getattr(statement, "name", None) == name
    own = [item for item in ast.iter_child_nodes(statement) if not isinstance(item, _BLOCK)]
    own += [case.pattern for case in getattr(statement, "cases", ())]
    nodes = [node for item in own for node in ast.walk(item)]
    nodes += getattr(statement, "handlers", ())
    # A comprehension has loop variables of its own.
    loops = [node.target for node in nodes if isinstance(node, ast.comprehension)]
    private = {id(node) for target in loops for node in ast.walk(target)}
    return any(_binds(node, name) for node in nodes if id(node) not in private)


def stores(target: ast.AST, name: str) -> bool:
    """Return whether the target of an assignment or a loop binds a name."""
    return any(_binds(node, name) for node in ast.walk(target))


def _binds(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Name(bound, ast.Store() | ast.Del()):
            return bound == name
        case ast.alias(path, alias):
            return (alias or path.partition(".")[0]) in (name, "*")
        case ast.ExceptHandler(name=bound) | ast.MatchAs(name=bound) | ast.MatchStar(name=bound):
            return bound == name
        case ast.MatchMapping(rest=bound):
            return bound == name
    return False


def reaching(scope: ast.AST, path: Sequence[ast.stmt], name: str) -> ast.stmt | None:
    """Return the statement whose binding of a name another one reads, ``None`` if unproven.

    It is on every path to the reading statement, and no other binding can come between.

    Args:
        path: the statements of the scope around the reading one, outermost first; it is the last.
    """
    declared = (it for it in ast.walk(scope) if isinstance(it, ast.Global | ast.Nonlocal))
    if any(name in it.names for it in declared):
        return None
    bindings = bindings_of(scope, name)
    # Of the bindings on every path the last one counts, unless another may run after it.
    sure = [it for it in _passed(scope, path) if it in bindings]
    if not sure:
        return None
    made = sure[-1]
    managed = (it for it in statements_of(scope) if isinstance(it, ast.With) and it not in path)
    if made is not bindings[0] and any(holds(it, made) for it in managed):
        return None  # a manager may swallow an error, and then the earlier binding is left
    outer = loops_since(made, path)
    for other in bindings:
        # One between the two, or one that a loop around the reading statement may run first.
        is_late = other.lineno > made.lineno
        if is_late and (other.lineno < path[-1].lineno or any(holds(it, other) for it in outer)):
            return None
    return made


def loops_since(made: ast.stmt, path: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the loops around the last statement of a path that do not run ``made`` again."""
    return [it for it in path if isinstance(it, LOOPS) and not holds(it, made)]


def _passed(scope: ast.AST, path: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that always run before the last one of ``path``, in order."""
    for block, inner in zip((scope, *path), path, strict=False):
        # A loop has set its variable in its body, not in its ``else`` or in what it runs over.
        if isinstance(block, ast.For) and inner in block.body:
            yield block
        for part in _BLOCKS:
            items = getattr(block, part, [])
            if inner in items:
                yield from _always_run(items[: items.index(inner)])


def _always_run(block: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for item in block:
        if not isinstance(item, ast.For):
            yield item
        if isinstance(item, ast.With):
            yield from _always_run(item.body)


def holds(block: ast.AST, wanted: ast.AST) -> bool:
    """Return whether a node is another one, or a part of it."""
    return any(item is wanted for item in ast.walk(block))


def loop_names(parents: Sequence[ast.AST]) -> frozenset[str]:
    """Return the variables of the loops and comprehensions around a place, in its function.

    Args:
        parents: the nodes around the place, outermost first.
    """
    loops: list[ast.AST] = []
    for parent in parents:
        loops = [] if isinstance(parent, FUNCTIONS) else [*loops, parent]
        loops += getattr(parent, "generators", ())
    targets = (it.target for it in loops if isinstance(it, ast.For | ast.comprehension))
    nodes = (node for target in targets for node in ast.walk(target))
    return frozenset(node.id for node in nodes if isinstance(node, ast.Name))


def value_bound(statement: ast.AST, name: str) -> ast.expr | None:
    """Return the expression whose value a statement binds to a name.

    ``None`` for an item of an unknown value, as in ``a, b = f()`` and ``for a, b in rows``.  The
    value for the variable of a loop is what the loop runs over.
    """
    match statement:
        case ast.Assign(targets):
            # In ``a, b = a = x`` the last target counts: they are bound from left to right.
            last = [it for it in targets if stores(it, name)][-1:]
            own = [pair for pair in pairs_of(last, statement.value) if stores(pair[0], name)]
            return own[0][1] if len(own) == 1 and isinstance(own[0][0], ast.Name) else None
        case ast.AnnAssign(ast.Name(), _, value):
            return value
        case ast.For(ast.Name(), over):
            return over
    return None


def pairs_of(targets: Iterable[ast.expr], value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each target of an assignment with its value, two of each for ``a, b = x, y``."""
    for target in targets:
        match target, value:
            case ast.Tuple(names), ast.Tuple(values) if len(names) == len(values):
                yield from zip(names, values, strict=True)
            case _:
                yield target, value


def item_of(display: ast.AST, key: int | str | None) -> ast.expr | None:
    """Return the item of a tuple, list or dict display that an index or a key selects."""
    match display:
        case ast.Tuple(items) | ast.List(items) if isinstance(key, int):
            is_whole = not any(isinstance(it, ast.Starred) for it in items)
            return items[key] if is_whole and -len(items) <= key < len(items) else None
        case ast.Dict(keys, values) if key is not None:
            pairs = zip(keys, values, strict=True)
            own = [it for at, it in pairs if isinstance(at, ast.Constant) and at.value == key]
            return own[0] if len(own) == 1 and None not in keys else None
    return None


def parameters_of(function: ast.FunctionDef) -> list[str]:
    """Return the names of the parameters, keyword-only ones last."""
    arguments = function.args
    return [it.arg for it in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def default_of(function: ast.FunctionDef, name: str) -> ast.expr | None:
    """Return the default value of a parameter."""
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    last = plain[len(plain) - len(arguments.defaults) :]
    pairs: list[tuple[ast.arg, ast.expr | None]] = [*zip(last, arguments.defaults, strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return next((value for it, value in pairs if it.arg == name), None)


def methods_called(
    scope: ast.AST, name: str, first: int = 0, last: float = math.inf
) -> Iterator[tuple[ast.Expr, str]]:
    """Yield the statements that only call a method of a variable, as ``a.sort()``.

    Each comes with the name of the method.

    Args:
        first: the statements are below this line.
        last: they are above this one.
    """
    for item in statements_of(scope):
        match item:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(owner), method))) if owner == name:
                if first < item.lineno < last:
                    yield item, method
