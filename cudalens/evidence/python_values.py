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
from typing import NamedTuple

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
from cudalens.evidence.program import Program, Spot, users_frames
from cudalens.recorder.calls import FROM_PYTHON
from cudalens.recorder.sites import RawSite, entries_of
from cudalens.source.running_node import running
from cudalens.source.scopes import (
    INNER,
    bindings_of,
    methods_called,
    parameters_of,
    reaching,
    stores,
    value_bound,
)
from cudalens.source.stack import place_of

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
    users, program = users_frames(frames), Program.of(frames)
    running_files = [it.f_code.co_filename for it in users]
    running_now = [program.running(running(place_of(it))) for it in users]
    found: list[Spot | None] = []
    entries = entries_of(entry) if entry is not None else []
    if entries:
        call = program.running(running(place_of(entries[-1])))
        made = None if call is None else _made_by(program, call)
        running_in = [at for at, it in enumerate(users) if it.f_code is entries[-1].code]
        callers = running_now[: running_in[-1]] if running_in else []
        if made is not None and None not in callers:
            outer = [*filter(None, callers)]
            found = [computing_line(program, made, outer, running_files)]
    elif origin is not None:
        for frame, at in zip(reversed(users), reversed(running_now), strict=True):
            held = [name for name, value in [*frame.f_locals.items()] if value is origin]
            if len(held) == 1 and at is not None:
                found = [*_made_of(program, held[0], at, running_files)]
                break
    return tuple(program.line(spot) for spot in found if spot is not None)


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
    made = program.statement(value)
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
            found = program.statement(way.at)
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


def _is_bound(program: Program, name: str) -> bool:
    """Return whether the program binds a name."""
    names = (it for it in program.nodes if isinstance(it, ast.Name) and it.id == name)
    return bool(program.functions(name)) or any(isinstance(it.ctx, ast.Store) for it in names)


def _function(program: Program, call: ast.Call) -> Spot | None:
    """Return the only function of the user's with the name of the called one.

    Not a decorated function, and not the user's ``clip`` for ``np.clip``.
    """
    text, name = ast.unparse(call.func), last_name(call.func) or ""
    is_own = text == name or (text.startswith("self.") and text.replace(".", "").isidentifier())
    match program.functions(name):
        case [Spot(_, ast.FunctionDef(decorator_list=[])) as found] if is_own:
            return None if is_rebound(program, name) else found
    return None


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
            end = None if function is None else program.returned(function)
            return None if end is None else _Origin(end, (*callers, way.at))
    return None


def _of_name(program: Program, way: _Origin, name: str) -> _Origin | None:
    value = _defined(program, name, way.at)
    if value is None:
        return None
    if isinstance(value.node, ast.FunctionDef):  # a parameter: continue with its argument
        if value.node.decorator_list:
            return None
        calls = [*program.given(value, name)]
        if way.callers:
            calls = [it for it in calls if it[0] == way.callers[-1]]
        elif reads_of(program, program.name_called(value)) != 1:
            return None  # ``model(x)`` calls ``forward``, but of which module is unknown
        is_only = len(calls) == 1
        return _Origin(Spot(calls[0][0].file, calls[0][1]), way.callers[:-1]) if is_only else None
    if added := _appended(program, name, value):
        is_empty = isinstance(value.node, ast.List) and not value.node.elts
        return _Origin(added[0], way.callers) if is_empty and len(added) == 1 else None
    is_same = program.function_around(value) is program.function_around(way.at)
    return _Origin(value, way.callers if is_same else ())


def _appended(program: Program, name: str, made: Spot) -> list[Spot]:
    """Return the values that the program appends to a list.

    Args:
        made: the empty list.  A local one that is not passed on is filled in its function alone.
    """
    own = program.function_around(made)
    is_given = any(isinstance(it, ast.arg) and it.arg == name for it in program.nodes)
    added = program.appended(None, name)
    return [it for it in added if own is None or is_given or own in program.above(it)]


# --- the one assignment that reaches a place ------------------------------------------------------


def _defined(program: Program, name: str, at: Spot) -> Spot | None:
    """Return the expression behind a name at a place, or the function of a parameter.

    For ``x += 1`` with a number, the statement's own expression.
    """
    path = [at.node] if isinstance(at.node, ast.stmt) else []
    scope: ast.AST = at.node
    for scope in program.above(at):
        for loop in getattr(scope, "generators", []):
            if stores(loop.target, name):
                return Spot(at.file, loop.iter) if isinstance(loop.target, ast.Name) else None
        if isinstance(scope, INNER) and not hasattr(scope, "generators"):
            break
        path = [scope, *path] if isinstance(scope, ast.stmt) else path
    if not isinstance(scope, ast.FunctionDef | ast.Module):
        return None
    if not bindings_of(scope, name):
        return _from_outside(program, name, Spot(at.file, scope))
    made = reaching(scope, path, name)
    if made is None:
        return None
    if _is_told(scope, name, made.lineno, path[-1].lineno):
        return None
    value = made if isinstance(made, ast.AugAssign) else value_bound(made, name)
    return None if value is None else Spot(at.file, value)


def _from_outside(program: Program, name: str, scope: Spot) -> Spot | None:
    """Return the function of a parameter, or the only value that a global has in the program."""
    if isinstance(scope.node, ast.FunctionDef):
        if name in parameters_of(scope.node):
            return scope
        own = {it.arg for it in ast.walk(scope.node.args) if isinstance(it, ast.arg)}
        if name in own or program.function_around(scope) is not None:
            return None
    bound = [
        Spot(file, it) for file, tree in program.trees.items() for it in bindings_of(tree, name)
    ]
    if len(bound) != 1 or any(_is_told(tree, name) for tree in program.trees.values()):
        return None
    ((file, made, _),) = bound
    value = None if isinstance(made, ast.For) else value_bound(made, name)
    return None if value is None else Spot(file, value)


def _is_told(scope: ast.AST, name: str, *lines: int) -> bool:
    """Return whether a statement calls a method that may change a variable in place."""
    return any(method != "append" for _, method in methods_called(scope, name, *lines))
