"""Other lines of the user's code that read a value of the running call.

Only the running scope is searched, and nothing is run.  Where a name got its value is in
``bindings.py``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from cudalens.core.torch_functions import CONVERSIONS, Trait, functions
from cudalens.source.running_node import Running

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_NO_VALUE = CONVERSIONS | functions(Trait.FACT)


def other_readers(run: Running, expression: ast.expr) -> tuple[list[int], list[int]]:
    """Return the lines that read a value of the running call in another place of its scope.

    For a variable of a comprehension, the collection that it runs over counts, too.  A line that
    casts or moves the value, or reads its shape, reads no number of it.

    Args:
        run: the running call.
        expression: a name, attribute or entry, as the call writes it.

    Returns:
        All those lines, and the ones that depend on the numbers: as an index, plus a number, or
        compared with one.
    """
    scope = next((item for item in reversed(run.parents) if isinstance(item, _SCOPES)), None)
    if scope is None or run.node is None:
        return [], []
    is_written = isinstance(getattr(run.node, "ctx", None), ast.Store)
    own = run.statement if is_written and run.statement is not None else run.node
    within = {id(item) for item in ast.walk(own)}
    wanted = [expression]
    for item in run.parents:
        if isinstance(item, _COMPREHENSIONS):
            names = {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)}
            for collection in _run_over(item, names):
                wanted.append(collection)
                within |= {id(part) for part in ast.walk(collection)}
    # The same expressions as targets of an assignment.
    stored = {ast.dump(it).replace("ctx=Load()", "ctx=Store()") for it in wanted}
    for item in ast.walk(scope):
        if isinstance(item, ast.Assign) and any(ast.dump(t) in stored for t in item.targets):
            within |= {id(part) for part in ast.walk(item.value)}  # y = y.flip(0) rebinds y
    last = min((it.end_lineno or 0 for it in _bound_anew(run, stored)), default=None)
    every, counting = set(), set()
    for node, parent in places_reading(scope, wanted):
        # Below the last binding the name has another value.
        if id(node) not in within and (last is None or node.lineno <= last):
            every.add(node.lineno)
            if _needs_numbers(parent, node):
                counting.add(node.lineno)
    return sorted(every), sorted(counting)


def places_reading(
    scope: ast.AST, wanted: Iterable[ast.expr]
) -> Iterator[tuple[ast.expr, ast.AST]]:
    """Yield the places of a scope that read one of some expressions, with their parents.

    Not where the value is cast or moved, or a fact such as its shape is read.
    """
    keys = {ast.dump(it) for it in wanted}
    for parent in ast.walk(scope):
        if not isinstance(parent, ast.Attribute) or parent.attr not in _NO_VALUE:
            for node in ast.iter_child_nodes(parent):
                if isinstance(node, ast.expr) and ast.dump(node) in keys:
                    yield node, parent


def _bound_anew(run: Running, stored: set[str]) -> Iterator[ast.Assign]:
    """Yield the assignments to a name that run on every path after the running statement."""
    path = {id(item) for item in (*run.parents, run.node)}
    for parent in run.parents:
        for part in ("body", "orelse", "finalbody"):
            block = getattr(parent, part, None)
            items = block if isinstance(block, list) else []
            # A ``finally`` runs after every other block of its statement.
            after = 0 if part == "finalbody" else len(items)
            at = next((at for at, item in enumerate(items) if id(item) in path), after)
            for item in items[at:]:
                targets = item.targets if isinstance(item, ast.Assign) else []
                if any(ast.dump(target) in stored for target in targets):
                    yield item


def _needs_numbers(parent: ast.AST, node: ast.expr) -> bool:
    if isinstance(parent, ast.Subscript):
        return parent.slice is node
    others: list[ast.expr] = []
    if isinstance(parent, ast.BinOp):
        others = [parent.left, parent.right]
    elif isinstance(parent, ast.Compare):
        others = [parent.left, *parent.comparators]
    return any(isinstance(item, ast.Constant) for item in others)


def _run_over(comprehension: ast.AST, names: set[str]) -> Iterator[ast.expr]:
    """Yield the collections over which the given variables of a comprehension run."""
    for generator in getattr(comprehension, "generators", ()):
        target, over = generator.target, generator.iter
        pairs = [(target, over)]
        if isinstance(target, ast.Tuple) and isinstance(over, ast.Call):
            function = getattr(over.func, "id", "")
            if function == "zip":
                pairs = list(zip(target.elts, over.args, strict=False))
            elif function == "enumerate":
                pairs = list(zip(target.elts[1:], over.args, strict=False))
        for one, collection in pairs:
            bound = {item.id for item in ast.walk(one) if isinstance(item, ast.Name)}
            if bound & names and isinstance(collection, ast.Name | ast.Attribute | ast.Subscript):
                yield collection
