"""The line of Python or NumPy that computed what a tensor was made of, by the program's syntax.

A tensor has no record before ``torch.tensor``, ``from_numpy`` and the like.  From the argument of
that call the syntax leads back: through names, items, copies, parameters and the user's functions,
as long as there is one way.  It ends at the first expression that computes something.  Nothing is
run, and where two lines may have given a name its value, nothing is said.
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
"""Functions and methods that give the values that they were given."""
_MODULES = ("np", "numpy", "torch", "copy", "pd")
"""Names whose attributes are functions of a module, and no methods of a value."""
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_BLOCKS = ("body", "orelse", "finalbody")
_COMPOUND = (ast.Try, ast.TryStar, ast.With, ast.AsyncWith, ast.Match)
"""Statements whose other blocks may have run before one of them."""


class _Origin(NamedTuple):
    """An expression on the way back, and the calls that led into the functions around it."""

    at: Spot
    callers: tuple[Spot, ...] = ()


def computed_lines(
    entry: RawSite | None, origin: Tensor | None, frames: Sequence[FrameType]
) -> tuple[LineRef, ...]:
    """Return the lines that values came from before the first recorded call, newest first.

    Args:
        entry: the place of the call that made the first tensor, or that read it.
        origin: the tensor that has them, where no recorded call made it.
        frames: the stack of the failure, outermost first.
    """
    users = [it for it in frames if is_user_file(it.f_code.co_filename)]
    # What runs the first cell is no part of the notebook.
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
    """Return the running expression of a frame in the whole of its file or cell."""
    run = running(place)
    file = run.place.filename
    known = run.node is not None and file in program.trees
    return program.find(file, run.node) if known and run.node is not None else None


def _made_by(program: Program, call: Spot) -> Spot | None:
    """Return the call that made a tensor of what Python has.

    That is ``torch.from_numpy`` on whose result a method is called, if no recorder saw it.
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
    """Yield the line that gave a variable its tensor, and the one that computed the values."""
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
    """Return the statement that computed what a call like ``torch.tensor`` was given.

    ``None`` where that is the statement of the call itself, where the numbers are typed, and where
    the syntax does not tell.

    Args:
        call: the call in the user's source.
        callers: the calls that led into the function around it, the outermost first.
        running: the files and cells of the failing stack.  An array shares its memory with what
            ``from_numpy`` made, and may be changed up to then.
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
            passed |= {*shown(way.at.node)}  # a result may be a view of what it was made of
            files.add(way.at.file)
            return None if may_change(program, passed, found.node, files) else found
        files.add(way.at.file)
        if isinstance(way.at.node, ast.Name | ast.Attribute):
            passed.add(last_name(way.at.node) or "")
        way = _before(program, way)
    return None


def _computes(node: ast.AST, program: Program) -> bool:
    """Return whether an expression computes values, and does not only hand them on."""
    if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare | ast.AugAssign):
        return not (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant))
    if not isinstance(node, ast.Call):
        return False
    return last_name(node.func) not in _HANDS_ON and _function(program, node) is None


def _is_of_class(program: Program, call: Spot) -> bool:
    """Return whether a method is called on its class, ``Model.f(model, x)``: one argument more."""
    owner = getattr(getattr(call.node, "func", None), "value", None)
    return isinstance(owner, ast.Name) and _is_bound(program, owner.id, is_class=True)


def _is_bound(program: Program, name: str, *, is_class: bool = False) -> bool:
    """Return whether the program gives a name a meaning of its own, a class or any."""
    kinds = ast.ClassDef if is_class else ast.FunctionDef | ast.ClassDef
    return any(
        (isinstance(node, kinds) and node.name == name)
        or (not is_class and _is_name(node, name) and isinstance(node.ctx, ast.Store))
        for node in program.nodes
    )


def _function(program: Program, call: ast.Call) -> Spot | None:
    """Return the one function of the user's that has the name of what is called.

    What a decorator makes of a function, and ``np.clip`` beside an own ``clip``, is another one.
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
    """Return the expression that an expression has its values from."""
    (file, node, _), callers = way.at, way.callers
    match node:
        case ast.Name(name):
            return _of_name(program, way, name)
        case ast.Attribute(ast.Name("self"), name):
            owner = program.class_around(way.at)
            values = [*program.values_of(owner.name, name)] if owner is not None else []
            is_only = len(values) == 1 == stores_of_attribute(program, name)
            return _Origin(values[0]) if is_only else None
        case ast.Subscript(value) | ast.Starred(value) | ast.Attribute(value, "values"):
            return _Origin(Spot(file, value), callers)
        case ast.List([item]) | ast.Tuple([item]):
            return _Origin(Spot(file, item), callers)
        case ast.ListComp(elt) | ast.GeneratorExp(elt):
            return _Origin(Spot(file, elt), callers)
        case ast.Call(func, args):
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
    """Yield what a function returns; a part of a tuple is not told from the others.

    A generator gives what it yields.
    """
    is_generator = any(isinstance(it, ast.Yield | ast.YieldFrom) for it in ast.walk(function))
    for node in () if is_generator else ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value


def _of_name(program: Program, way: _Origin, name: str) -> _Origin | None:
    value = _defined(program, name, way.at)
    if value is None:
        return None
    if isinstance(value.node, ast.FunctionDef):  # a parameter: on in the call
        if value.node.decorator_list:
            return None
        made = program.class_around(value) if value.node.name == "__init__" else None
        called = value.node.name if made is None else made.name
        if not way.callers:
            calls = [it for it in program.given(value, name) if not _is_of_class(program, it[0])]
            is_only = len(calls) == 1 == reads_of(program, called)
            return _Origin(Spot(calls[0][0].file, calls[0][1])) if is_only else None
        *outer, call = way.callers
        # ``model(x)`` calls ``forward``, perhaps that of another module with another x.
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
    """Yield what the program appends to a list of a name.

    Args:
        made: the empty list.  That of a function is filled in it alone, if no other is given it.
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
    """Return the expression whose value a name has at a place, the function of a parameter.

    A change in place of a number, ``x += 1``, is the expression itself.
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
            return None  # an earlier turn may have given it
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
    """Return the value of a variable that a function reads: the one when it is called."""
    assert isinstance(function.node, ast.FunctionDef)
    is_inner = program.function_around(function) is not None
    own = {it.arg for it in ast.walk(function.node.args) if isinstance(it, ast.arg)}
    is_local = name in own or any(_stores(it, name) for it in function.node.body)
    return None if is_inner or is_local else _global(program, name)


def _global(program: Program, name: str) -> Spot | None:
    """Return the one value that the modules and cells of the program give a variable."""
    values = [it for it in program.values_of(None, name) if program.function_around(it) is None]
    statements = [it for tree in program.trees.values() for it in tree.body]
    stored = sum(_stores(it, name) for it in statements)
    is_changed = any(_changes(it, name) for it in statements)
    return values[0] if len(values) == 1 == stored and not is_changed else None


def _last_in(block: Sequence[ast.stmt], name: str) -> tuple[ast.AST | None, bool]:
    """Return the last value that a block gives a name, and whether what it has then is known."""
    for statement in reversed(block):
        if _changes(statement, name):
            return None, False
        if not _stores(statement, name):
            continue
        match statement:
            case ast.Assign():
                own = [value for target, value in pairs_of(statement) if _is_name(target, name)]
                # Of a tuple that one call returned, no part is told from the others.
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
    """Return whether a statement may change what a variable holds: ``x[0] = 1``, ``x.sort()``."""
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
    """Return whether an expression is a variable, or an item or a part of it."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return _is_name(node, name)


def _is_name(node: ast.AST, name: str) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and node.id == name


def _binds(target: ast.AST, name: str) -> bool:
    return any(_is_name(it, name) for it in ast.walk(target))


def _stores(statement: ast.AST, name: str) -> bool:
    """Return whether a statement gives a variable a value, functions inside it left out."""
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
    """Return the statement around an expression."""
    if isinstance(at.node, ast.stmt):
        return at
    found = next((it for it in program.above(at) if isinstance(it, ast.stmt)), None)
    return None if found is None else Spot(at.file, found)
