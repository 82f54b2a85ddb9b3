"""The line of Python or NumPy that computed the data of a tensor, found by the program's syntax.

A tensor has no recorded history before ``torch.tensor``, ``from_numpy`` and the like.  From the
argument of that call the search goes back through names, items, copies, parameters and the user's
functions, as long as there is only one way.  It ends at the first expression that computes values.
No code is run.  If two lines may have set a name, the search fails.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import NamedTuple, TypeGuard

from torch import Tensor

from cudalens.core.report_types import LineRef
from cudalens.diagnosis.user_code import last_name
from cudalens.evidence.changes import (
    is_rebound,
    may_change,
    names_in,
    reads_of,
    shown,
    stores_of_attribute,
)
from cudalens.evidence.program import Program, Spot, pairs_of, parameters_of
from cudalens.recorder.calls import FROM_PYTHON
from cudalens.recorder.sites import RawSite, entries_of
from cudalens.source.files import cell_number, is_user_file
from cudalens.source.running_node import running
from cudalens.source.stack import Place, place_of

_MAX_HOPS = 24
_HANDS_ON = frozenset(
    {"array", "asarray", "ascontiguousarray", "astype", "contiguous", "copy", "cpu", "cuda"}
    | {"deepcopy", "detach", "flatten", "int", "list", "long", "numpy", "ravel"}
    | {"reshape", "sorted", "squeeze", "to", "tolist", "to_numpy", "tuple", "unsqueeze", "view"}
    | {"items", "values", "get_level_values", *FROM_PYTHON}
)
"""Functions and methods that return the values of their argument."""
_MODULES = ("np", "numpy", "torch", "copy", "pd")
"""Names of modules: their attributes are functions, not methods."""
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_BLOCKS = ("body", "orelse", "finalbody")
_COMPOUND = (ast.Try, ast.TryStar, ast.With, ast.AsyncWith, ast.Match)
"""Statements with several blocks, one of which may have run before another."""


class _Origin(NamedTuple):
    """An expression on the way back, and the calls of the functions around it."""

    at: Spot
    callers: tuple[Spot, ...] = ()


def computed_lines(
    entry: RawSite | None, origin: Tensor | None, frames: Sequence[FrameType]
) -> tuple[LineRef, ...]:
    """Return the lines behind values from before the first recorded call, newest first.

    Args:
        entry: the place of the call that made the first tensor, or first read it.
        origin: the tensor with the values, if no recorded call made it.
        frames: the stack of the failure, outermost first.
    """
    users = [it for it in frames if is_user_file(it.f_code.co_filename)]
    # Code that runs the cells is not part of the notebook.
    cells = (at for at, it in enumerate(users) if cell_number(it.f_code.co_filename) is not None)
    users = users[next(cells, 0) :]
    running_files = [it.f_code.co_filename for it in users]
    program = Program(reversed(running_files))
    found: list[Spot | None] = []
    entries = entries_of(entry) if entry is not None else []
    if entries:
        running_call = _running(program, place_of(entries[-1]))
        call = None if running_call is None else _made_by(program, running_call)
        running_in = [at for at, it in enumerate(users) if it.f_code is entries[-1].code]
        outer = users[: running_in[-1]] if running_in else []
        callers = [_running(program, place_of(it)) for it in outer]
        is_known = call is not None and None not in callers
        found = (
            [computing_line(program, call, [*filter(None, callers)], running_files)]
            if is_known and call
            else []
        )
    elif origin is not None:
        for frame in reversed(users):
            at = _running(program, place_of(frame))
            held = [name for name, value in [*frame.f_locals.items()] if value is origin]
            if len(held) == 1 and at is not None:
                found = [*_made_of(program, held[0], at, running_files)]
                break
    return tuple(program.line(spot) for spot in found if spot is not None)


def _running(program: Program, place: Place) -> Spot | None:
    """Return a frame's running expression, as a node of its whole file or cell."""
    run = running(place)
    file = run.place.filename
    known = run.node is not None and file in program.trees
    return program.find(file, run.node) if known and run.node is not None else None


def _made_by(program: Program, call: Spot) -> Spot | None:
    """Return the call that made a tensor from Python data.

    If the recorded call is a method of its result, that is an unrecorded ``torch.from_numpy``.
    """
    match call.node:
        case ast.Call(func) if last_name(func) in FROM_PYTHON:
            return call
        case ast.Call(ast.Attribute(ast.Name(name))):
            made = _defined(program, name, call)
        case ast.Call(ast.Attribute(ast.Call() as owner)):
            made = Spot(call.file, owner)
        case _:
            return None
    match made:
        case Spot(node=ast.Call(ast.Attribute(ast.Name("torch"), "from_numpy"))):
            return made
    return None


def _made_of(
    program: Program, name: str, at: Spot, running_files: Sequence[str]
) -> Iterator[Spot | None]:
    """Yield the line that assigned a variable's tensor, and the line that computed its values."""
    value = _defined(program, name, at)
    if value is None or isinstance(value.node, ast.FunctionDef):
        return
    made = _statement(program, value)
    names = {name, *shown(value.node)}
    if made is None or may_change(program, names, made.node, {made.file, *running_files}):
        return
    yield made
    calls = (it for it in ast.walk(value.node) if isinstance(it, ast.Call))
    first = next((it for it in calls if last_name(it.func) in FROM_PYTHON), None)
    if first is not None:
        yield computing_line(program, Spot(value.file, first), running=running_files)


def computing_line(
    program: Program, call: Spot, callers: Sequence[Spot] = (), running: Iterable[str] = ()
) -> Spot | None:
    """Return the statement that computed the argument of a call like ``torch.tensor``.

    ``None`` if that is the statement of the call itself, if the numbers are literals, and if the
    syntax is ambiguous.

    Args:
        call: the call in the user's source.
        callers: the calls of the functions around it, outermost first.
        running: the files and cells of the failing stack.  An array shares memory with the tensor
            of ``from_numpy``, and may have been changed until the failure.
    """
    node = call.node
    if not isinstance(node, ast.Call) or last_name(node.func) not in FROM_PYTHON or not node.args:
        return None
    way: _Origin | None = _Origin(Spot(call.file, node.args[0]), tuple(callers))
    passed, files = set[str](), {call.file, *running}
    for _ in range(_MAX_HOPS):
        if way is None:
            return None
        if _computes(way.at.node, program):
            found = _statement(program, way.at)
            if found is None or (found.file, found.line) == (call.file, call.line):
                return None
            passed |= {
                it for target in getattr(found.node, "targets", ()) for it in names_in(target)
            }
            passed |= {*shown(way.at.node)}  # the result may be a view of its source
            files.add(way.at.file)
            return None if may_change(program, passed, found.node, files) else found
        files.add(way.at.file)
        if isinstance(way.at.node, ast.Name | ast.Attribute):
            passed.add(last_name(way.at.node) or "")
        way = _before(program, way)
    return None


def _computes(node: ast.AST, program: Program) -> bool:
    """Return whether an expression computes values, rather than passing them on."""
    if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare | ast.AugAssign):
        return not (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant))
    if not isinstance(node, ast.Call):
        return False
    return last_name(node.func) not in _HANDS_ON and _function(program, node) is None


def _is_of_class(program: Program, call: Spot) -> bool:
    """Return whether a method is called on its class, as in ``Model.f(model, x)``."""
    owner = getattr(getattr(call.node, "func", None), "value", None)
    return isinstance(owner, ast.Name) and _is_bound(program, owner.id, is_class=True)


def _is_bound(program: Program, name: str, *, is_class: bool = False) -> bool:
    """Return whether the program binds a name, or defines a class of that name."""
    kinds = ast.ClassDef if is_class else ast.FunctionDef | ast.ClassDef
    return any(
        (isinstance(node, kinds) and node.name == name)
        or (not is_class and _is_name(node, name) and isinstance(node.ctx, ast.Store))
        for node in program.nodes
    )


def _function(program: Program, call: ast.Call) -> Spot | None:
    """Return the only function of the user's with the name of the called one.

    Not a decorated function, and not the user's ``clip`` for ``np.clip``.
    """
    name = last_name(call.func)
    is_own = isinstance(call.func, ast.Name) or _root_is(call.func, "self")
    found = [
        Spot(file, node)
        for file, tree in program.trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
    ]
    if len(found) != 1 or not is_own or name is None or is_rebound(program, name):
        return None
    node = found[0].node
    is_plain = isinstance(node, ast.FunctionDef) and not node.decorator_list
    return found[0] if is_plain else None


def _before(program: Program, way: _Origin) -> _Origin | None:
    """Return the expression that another one got its values from."""
    (file, node, _), callers = way.at, way.callers
    match node:
        case ast.Name(name):
            return _of_name(program, way, name)
        case ast.Attribute(ast.Name("self"), name):
            owner = program.class_around(way.at)
            values = [*program.values_of(owner.name, name)] if owner is not None else []
            is_only = len(values) == 1 == stores_of_attribute(program, name)
            return _Origin(values[0]) if is_only else None
        # Items, slices and comprehensions: the values are among those of the container.
        case ast.Subscript(value) | ast.Starred(value) | ast.Attribute(value, "values"):
            return _Origin(Spot(file, value), callers)
        case ast.List([item]) | ast.Tuple([item]):
            return _Origin(Spot(file, item), callers)
        case ast.ListComp(elt) | ast.GeneratorExp(elt):
            return _Origin(Spot(file, elt), callers)
        case ast.Call(func, args):
            # A function that keeps values leads to its argument, or to the object of its method.
            if (called := last_name(func)) in _HANDS_ON:
                if called is None or _is_bound(program, called):
                    return None
                given = args[:1]
                is_module = getattr(getattr(func, "value", None), "id", "") in _MODULES
                if isinstance(func, ast.Attribute) and not is_module:
                    given = [func.value]
                return _Origin(Spot(file, given[0]), callers) if given else None
            function = _function(program, node)
            returns = [] if function is None else [*_returns(function.node)]
            if function is None or len(returns) != 1:
                return None
            return _Origin(Spot(function.file, returns[0]), (*callers, way.at))
    return None


def _returns(function: ast.AST) -> Iterator[ast.expr]:
    """Yield the returned expressions of a function, or the yielded ones of a generator.

    Items of a returned tuple are not distinguished.
    """
    is_generator = any(isinstance(it, ast.Yield | ast.YieldFrom) for it in ast.walk(function))
    for node in () if is_generator else ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value


def _of_name(program: Program, way: _Origin, name: str) -> _Origin | None:
    value = _defined(program, name, way.at)
    if value is None:
        return None
    if isinstance(value.node, ast.FunctionDef):  # a parameter: continue with its argument
        if value.node.decorator_list:
            return None
        made = program.class_around(value) if value.node.name == "__init__" else None
        called = value.node.name if made is None else made.name
        if not way.callers:
            calls = [it for it in program.given(value, name) if not _is_of_class(program, it[0])]
            is_only = len(calls) == 1 == reads_of(program, called)
            return _Origin(Spot(calls[0][0].file, calls[0][1])) if is_only else None
        *outer, call = way.callers
        # ``model(x)`` calls ``forward``, but of which module is unknown.
        if not isinstance(call.node, ast.Call) or last_name(call.node.func) != called:
            return None
        if _is_of_class(program, call):
            return None
        given = program.given_to(value, name, call)
        return None if given is None else _Origin(Spot(call.file, given), tuple(outer))
    if added := [*_appended(program, name, value)]:
        is_empty = isinstance(value.node, ast.List) and not value.node.elts
        return _Origin(added[0], way.callers) if is_empty and len(added) == 1 else None
    is_same = program.function_around(value) is program.function_around(way.at)
    return _Origin(value, way.callers if is_same else ())


def _appended(program: Program, name: str, made: Spot) -> Iterator[Spot]:
    """Yield the values that the program appends to a list.

    Args:
        made: the empty list.  A local one that is not passed on is filled in its function alone.
    """
    own = program.function_around(made)
    is_given = any(isinstance(it, ast.arg) and it.arg == name for it in program.nodes)
    scopes = program.trees if own is None or is_given else {made.file: own}
    for file, scope in scopes.items():
        for node in ast.walk(scope):
            match node:
                case ast.Call(ast.Attribute(ast.Name(owner), "append"), [value]) if owner == name:
                    yield Spot(file, value)


# --- the one assignment that reaches a place ------------------------------------------------------


def _defined(program: Program, name: str, at: Spot) -> Spot | None:
    """Return the expression behind a name at a place, or the function of a parameter.

    For ``x += 1`` with a number, the statement's own expression.
    """
    node = at.node
    for above in program.above(at):
        for loop in getattr(above, "generators", []):
            if _binds(loop.target, name):
                return Spot(at.file, loop.iter) if isinstance(loop.target, ast.Name) else None
        for block in (getattr(above, part, None) for part in _BLOCKS):
            if isinstance(block, list) and node in block:
                found, is_known = _last_in(block[: block.index(node)], name)
                if found is not None or not is_known:
                    return None if found is None else Spot(at.file, found)
        if isinstance(above, _LOOPS) and any(_stores(it, name) for it in above.body):
            return None  # an earlier iteration may have set it
        if isinstance(above, ast.For) and _binds(above.target, name):
            is_whole = isinstance(above.target, ast.Name)
            return Spot(at.file, above.iter) if is_whole and node is not above.iter else None
        if isinstance(above, ast.FunctionDef) and name in parameters_of(above):
            return Spot(at.file, above)
        if isinstance(above, ast.Lambda | ast.AsyncFunctionDef):
            return None
        if isinstance(above, ast.FunctionDef):
            return _from_outside(program, name, Spot(at.file, above))
        tested = getattr(above, "test", None)
        if _stores(above if isinstance(above, _COMPOUND) else tested or ast.Pass(), name):
            return None
        node = above
    return None if isinstance(at.node, ast.Module) else _global(program, name)


def _from_outside(program: Program, name: str, function: Spot) -> Spot | None:
    """Return the value of a global that a function reads: its value at the call."""
    assert isinstance(function.node, ast.FunctionDef)
    is_inner = program.function_around(function) is not None
    own = {it.arg for it in ast.walk(function.node.args) if isinstance(it, ast.arg)}
    is_local = name in own or any(_stores(it, name) for it in function.node.body)
    return None if is_inner or is_local else _global(program, name)


def _global(program: Program, name: str) -> Spot | None:
    """Return the only value that the modules and cells of the program assign to a variable."""
    values = [it for it in program.values_of(None, name) if program.function_around(it) is None]
    statements = [it for tree in program.trees.values() for it in tree.body]
    stored = sum(_stores(it, name) for it in statements)
    is_changed = any(_changes(it, name) for it in statements)
    return values[0] if len(values) == 1 == stored and not is_changed else None


def _last_in(block: Sequence[ast.stmt], name: str) -> tuple[ast.AST | None, bool]:
    """Return the last value that a block assigns to a name, and whether that is its final one."""
    for statement in reversed(block):
        if _changes(statement, name):
            return None, False
        if not _stores(statement, name):
            continue
        match statement:
            case ast.Assign():
                own = [value for target, value in pairs_of(statement) if _is_name(target, name)]
                # Items of a tuple that a call returned are not distinguished.
                return (own[0] if len(own) == 1 else None), False
            case ast.AnnAssign(value=ast.expr() as value):
                return value, False
            case ast.AugAssign():
                return statement, False
            case ast.With(items, body) if not any(_stores(it, name) for it in items):
                found = _last_in(body, name)
                if found[0] is not None or not found[1]:
                    return found
            case _:
                return None, False
    return None, True


def _changes(statement: ast.AST, name: str) -> bool:
    """Return whether a statement may change a variable in place: ``x[0] = 1``, ``x.sort()``."""
    for node in ast.walk(statement):
        match node:
            case ast.Subscript(value=value, ctx=ast.Store()) if _root_is(value, name):
                return True
            case ast.Expr(ast.Call(ast.Attribute(owner, method), args)):
                is_own = _root_is(owner, name) and method != "append"
                if is_own or (method == "shuffle" and any(_is_name(it, name) for it in args)):
                    return True
            case ast.keyword("out", value) if _root_is(value, name):
                return True
    return False


def _root_is(node: ast.AST, name: str) -> bool:
    """Return whether an expression is a variable, or an item or attribute of it."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return _is_name(node, name)


def _is_name(node: ast.AST, name: str) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and node.id == name


def _binds(target: ast.AST, name: str) -> bool:
    return any(_is_name(it, name) for it in ast.walk(target))


def _stores(statement: ast.AST, name: str) -> bool:
    """Return whether a statement binds a variable, without functions inside it."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return statement.name == name
    for item in ast.walk(statement):
        if isinstance(item, ast.Import | ast.ImportFrom):
            given = {it.asname or it.name.partition(".")[0] for it in item.names}
            if given & {name, "*"}:
                return True
    stored = (it for it in ast.walk(statement) if isinstance(it, ast.Name))
    return any(it.id == name and isinstance(it.ctx, ast.Store) for it in stored)


def _statement(program: Program, at: Spot) -> Spot | None:
    """Return the enclosing statement of an expression."""
    if isinstance(at.node, ast.stmt):
        return at
    found = next((it for it in program.above(at) if isinstance(it, ast.stmt)), None)
    return None if found is None else Spot(at.file, found)
