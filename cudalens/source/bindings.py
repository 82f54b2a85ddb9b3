"""The assignment that gave a name on the running line its value, as far as the source proves it.

Only one scope is read, and nothing is run.  A binding is returned when it is on every path to the
running statement and no other one can come between.  The op that made a tensor is in the recorder.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from cudalens.core.evidence_types import Binding
from cudalens.core.report_types import Expression, SourceSpan
from cudalens.core.torch_functions import CONVERSIONS
from cudalens.source.files import place_of_code, source_lines, typed_line
from cudalens.source.running_node import FUNCTIONS, Running, parsed_source, text_of

_INNER = (*FUNCTIONS, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SETTING = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For)
_BLOCK = (ast.stmt, ast.ExceptHandler, ast.match_case)
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def binding_of(run: Running, name: str) -> Binding | None:
    """Return the binding of ``name``, which the running code reads, ``None`` if unproven."""
    scope = next(
        (item for item in reversed(run.parents) if isinstance(item, (*_INNER, ast.Module))), None
    )
    if not isinstance(scope, ast.Module | ast.FunctionDef) or run.statement is None:
        return None
    path = run.parents[run.parents.index(scope) + 1 :]
    statements = [item for item in path if isinstance(item, ast.stmt)]
    declared = (item for item in ast.walk(scope) if isinstance(item, ast.Global | ast.Nonlocal))
    if any(name in item.names for item in declared) or run.statement not in statements:
        return None
    bindings = [item for item in _statements(scope) if _binds(item, name)]
    # Of the bindings on every path the last one counts, unless another may run after it.
    sure = [item for item in bindings if _is_passed(item, scope, statements)]
    if not sure or not isinstance(sure[-1], _SETTING):
        return None
    statement = sure[-1]
    loops = [item for item in statements if isinstance(item, _LOOPS) and item is not statement]
    outer = [loop for loop in loops if not _holds(loop, statement)]
    for other in bindings:
        # One between the two, or one that a loop around the running statement may run first.
        is_late = other.lineno > statement.lineno
        if is_late and (
            other.lineno < run.statement.lineno or any(_holds(o, other) for o in outer)
        ):
            return None
    value = None
    if isinstance(statement, ast.Assign):
        # In ``a, b = a = x`` the last target counts: they are bound from left to right.
        targets = [it for it in statement.targets if _is_bound_in(it, name)]
        pairs = _pairs(targets[-1], statement.value) if targets else ()
        value = next(
            (made for it, made in pairs if isinstance(it, ast.Name) and it.id == name), None
        )
    return Binding(
        at=_span(run, statement),
        value=None if value is None else Expression(text_of(value, run.lines), value),
        is_read_again=bool(outer) or _is_read_again(run, statement, name, scope),
        dropped=_dropped(run, statement, name, scope),
        items=_items(value, run.place.filename),
        **_called(value),
    )


def _binds(statement: ast.stmt, name: str) -> bool:
    """Return whether a statement binds a name itself, outside its blocks."""
    if isinstance(statement, _INNER):
        return getattr(statement, "name", None) == name
    own = [item for item in ast.iter_child_nodes(statement) if not isinstance(item, _BLOCK)]
    own += [case.pattern for case in getattr(statement, "cases", ())]
    nodes = [node for item in own for node in ast.walk(item)]
    nodes += getattr(statement, "handlers", ())
    # A comprehension has loop variables of its own.
    loops = [node.target for node in nodes if isinstance(node, ast.comprehension)]
    private = {id(node) for target in loops for node in ast.walk(target)}
    return any(name in _names_of(node) for node in nodes if id(node) not in private)


def _names_of(node: ast.AST) -> tuple[str | None, ...]:
    """Return the names that a node of the syntax binds."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return (name,)
        case ast.alias(name=path, asname=name):
            return (name or path.partition(".")[0],)
        case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
            return (name,)
        case ast.MatchMapping(rest=name):
            return (name,)
    return ()


def _is_bound_in(target: ast.expr, name: str) -> bool:
    return any(name in _names_of(node) for node in ast.walk(target))


def _statements(block: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a scope, in the order of the source."""
    for part in _BLOCKS:
        for item in getattr(block, part, ()):
            if isinstance(item, ast.stmt):
                yield item
            if not isinstance(item, _INNER):
                yield from _statements(item)


def _is_passed(binding: ast.stmt, scope: ast.AST, path: Sequence[ast.stmt]) -> bool:
    """Return whether a statement always runs before the last one of ``path``."""
    if isinstance(binding, ast.For) and binding in path[:-1]:
        # Neither in the loop's ``else`` nor in its iterable.
        return path[path.index(binding) + 1] in binding.body
    for block, inner in zip((scope, *path), path, strict=False):
        for part in _BLOCKS:
            items = getattr(block, part, [])
            if inner in items and binding in items[: items.index(inner)]:
                return not isinstance(binding, ast.For)
    return False


def _holds(block: ast.AST, wanted: ast.AST) -> bool:
    return any(item is wanted for item in ast.walk(block))


def _is_read_again(run: Running, statement: ast.stmt, name: str, scope: ast.AST) -> bool:
    """Return whether another line below a binding reads it, and does not cast or move it."""
    first, last = getattr(run.node, "lineno", 0), getattr(run.node, "end_lineno", 0)
    # A line that casts or moves the value itself does not depend on its dtype or device.
    changed = {
        id(item.value)
        for item in ast.walk(scope)
        if isinstance(item, ast.Attribute) and item.attr in CONVERSIONS
    }
    return any(
        isinstance(item, ast.Name)
        and item.id == name
        and isinstance(item.ctx, ast.Load)
        and item.lineno > statement.lineno
        and not first <= item.lineno <= last
        and id(item) not in changed
        for item in ast.walk(scope)
    )


def _dropped(
    run: Running, statement: ast.stmt, name: str, scope: ast.AST
) -> tuple[str, SourceSpan] | None:
    assert run.statement is not None
    for item in _statements(scope):
        call = item.value if isinstance(item, ast.Expr) else None
        function = call.func if isinstance(call, ast.Call) else None
        if (
            statement.lineno < item.lineno < run.statement.lineno
            and isinstance(function, ast.Attribute)
            and isinstance(function.value, ast.Name)
            and function.value.id == name
            and not function.attr.endswith("_")
        ):
            return text_of(item, run.lines), _span(run, item)
    return None


def _span(run: Running, statement: ast.stmt) -> SourceSpan:
    """Return the place of a statement, for a loop that of its header."""
    filename = run.place.filename
    cell, file = place_of_code(filename)
    body = getattr(statement, "body", None)
    end = statement.end_lineno if body is None else body[0].lineno - 1
    return SourceSpan(
        cell=cell,
        file=file,
        line=statement.lineno,
        end_line=max(end or 0, statement.lineno),
        text=typed_line(filename, run.lines, statement.lineno).strip(),
    )


def attribute_binding(code: CodeType, name: str) -> Binding | None:
    """Return the binding of the attribute ``name`` in a method, if it has exactly one."""
    tree = parsed_source(code.co_filename)
    owner = code.co_varnames[:1]
    values: list[ast.expr] = []
    for function in ast.walk(tree) if tree is not None and owner else ():
        if isinstance(function, ast.FunctionDef) and function.lineno == code.co_firstlineno:
            wanted = f"{owner[0]}.{name}"
            for item in _statements(function):
                match item:
                    case ast.Assign(targets=targets, value=made):
                        pairs = [pair for target in targets for pair in _pairs(target, made)]
                        values += [value for it, value in pairs if ast.unparse(it) == wanted]
                    case ast.Expr(
                        ast.Call(
                            func=ast.Attribute(attr="register_buffer"),
                            args=[ast.Constant(value=key), made, *_],
                        )
                    ) if key == name:
                        values.append(made)
    if len(values) != 1:
        return None
    return _made(values[0], code.co_filename)


def _made(value: ast.expr, filename: str) -> Binding:
    """Return the binding of an expression's value, at the line where the expression begins."""
    (cell, file), lines = place_of_code(filename), source_lines(filename)
    at = SourceSpan(
        cell=cell,
        file=file,
        line=value.lineno,
        text=typed_line(filename, lines, value.lineno).strip(),
    )
    text = Expression(text_of(value, lines), value)
    return Binding(at=at, value=text, items=_items(value, filename), **_called(value))


def _items(value: ast.expr | None, filename: str) -> tuple[Binding, ...]:
    """Return the maker of each layer of a torch container, if the expression lists all of them."""
    match value:
        case ast.Call(ast.Attribute(ast.Call() as owner)):
            return _items(owner, filename)  # nn.Sequential(…).to("cuda")
        case ast.Call(ast.Name("Sequential") | ast.Attribute(attr="Sequential"), layers):
            pass
        case ast.Call(
            ast.Name("ModuleList") | ast.Attribute(attr="ModuleList"),
            [ast.List(layers) | ast.Tuple(layers)],
        ):
            pass
        case _:
            return ()
    is_whole = not any(isinstance(item, ast.Starred) for item in layers)
    return tuple(_made(item, filename) for item in layers) if is_whole else ()


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each target of an assignment such as ``a, b = x, y`` with its value."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        if len(target.elts) == len(value.elts):
            yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


def _called(value: ast.expr | None) -> dict[str, Any]:
    if not isinstance(value, ast.Call):
        return {}
    keywords = tuple(item.arg or "**" for item in value.keywords)
    return {"called": ast.unparse(value.func), "keywords": keywords}
