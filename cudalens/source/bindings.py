"""The assignment that gave a name on the running line its value, as far as the source proves it.

Only one scope is read, and nothing is run.  A binding is returned when it is on every path to the
running statement and no other one can come between.  The op that made a tensor is in the recorder.
"""

from __future__ import annotations

import ast
from types import CodeType
from typing import Any

from cudalens.core.evidence_types import Binding
from cudalens.core.report_types import Expression, SourceSpan
from cudalens.source.files import source_lines
from cudalens.source.locate import span_of_lines
from cudalens.source.readers import places_reading
from cudalens.source.running_node import Running, function_of, text_of
from cudalens.source.scopes import (
    INNER,
    loops_since,
    methods_called,
    pairs_of,
    reaching,
    statements_of,
    value_bound,
)

_SETTING = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For)


def binding_of(run: Running, name: str) -> Binding | None:
    """Return the binding of ``name``, which the running code reads, ``None`` if unproven."""
    scope = next((it for it in reversed(run.parents) if isinstance(it, (*INNER, ast.Module))), None)
    if not isinstance(scope, ast.Module | ast.FunctionDef) or run.statement is None:
        return None
    around = run.parents[run.parents.index(scope) + 1 :]
    path = [it for it in around if isinstance(it, ast.stmt)]
    made = reaching(scope, path, name) if run.statement in path else None
    if not isinstance(made, _SETTING):
        return None
    # The value of a loop's variable is an item of what the loop runs over.
    value = None if isinstance(made, ast.For) else value_bound(made, name)
    # Another line below it reads it again, as does another turn of a loop.
    first, last = getattr(run.node, "lineno", 0), getattr(run.node, "end_lineno", 0)
    reads = [it.lineno for it, _ in places_reading(scope, [ast.Name(name, ast.Load())])]
    is_below = any(it > made.lineno and not first <= it <= last for it in reads)
    dropped = methods_called(scope, name, made.lineno, run.statement.lineno)
    unkept = next((item for item, method in dropped if not method.endswith("_")), None)
    return Binding(
        at=_span(run, made),
        value=None if value is None else Expression(text_of(value, run.lines), value),
        is_read_again=is_below or bool(loops_since(made, path)),
        dropped=None if unkept is None else (text_of(unkept, run.lines), _span(run, unkept)),
        items=_items(value, run.place.filename),
        **_called(value),
    )


def _span(run: Running, statement: ast.stmt) -> SourceSpan:
    """Return the place of a statement, for a loop that of its header."""
    body = getattr(statement, "body", None)
    end = statement.end_lineno if body is None else body[0].lineno - 1
    first = statement.lineno
    return span_of_lines(run.place.filename, first, max(end or 0, first))


def attribute_binding(code: CodeType, name: str) -> Binding | None:
    """Return the binding of the attribute ``name`` in a method, if it has exactly one."""
    function, owner = function_of(code), code.co_varnames[:1]
    values: list[ast.expr] = []
    for item in statements_of(function) if function is not None and owner else ():
        match item:
            case ast.Assign(targets=targets, value=made):
                pairs = pairs_of(targets, made)
                values += [
                    it for target, it in pairs if ast.unparse(target) == f"{owner[0]}.{name}"
                ]
            case ast.Expr(
                ast.Call(ast.Attribute(attr="register_buffer"), [ast.Constant(key), made, *_])
            ) if key == name:
                values.append(made)
    if len(values) != 1:
        return None
    return _made(values[0], code.co_filename)


def _made(value: ast.expr, filename: str) -> Binding:
    """Return the binding of an expression's value, at the line where the expression begins."""
    text = Expression(text_of(value, source_lines(filename)), value)
    at = span_of_lines(filename, value.lineno)
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


def _called(value: ast.expr | None) -> dict[str, Any]:
    if not isinstance(value, ast.Call):
        return {}
    keywords = tuple(item.arg or "**" for item in value.keywords)
    return {"called": ast.unparse(value.func), "keywords": keywords}
