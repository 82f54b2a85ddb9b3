"""Whether a program may have changed a variable's values, other than by its assignments.

A list or an array may have aliases: ``b = a`` and ``b[0] = 9`` change ``a``.  Names are compared by
text, across functions, so that no alias is missed.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator

from cudalens.core.torch_functions import is_in_place
from cudalens.diagnosis.user_code import last_name
from cudalens.evidence.program import MAX_FILES, Program
from cudalens.source.scopes import bindings_of

_COPIES = frozenset({"array", "astype", "copy", "deepcopy", "float", "int", "len", "max", "min"})
_COPIES |= {"print", "range", "shape", "sum", "tensor", "tolist", "unique"}
_COPIES |= {"cat", "clone", "concatenate", "stack", "where"}
"""Functions whose result shares no memory with what they were given."""
_MUTATES = frozenset({"append", "clear", "extend", "fill", "insert", "itemset", "pop", "put"})
_MUTATES |= {"remove", "resize", "reverse", "setdefault", "sort", "update", "__setitem__"}
_HARMLESS = frozenset({"print", "display", "append"})
_MODULES = frozenset({"torch", "F", "nn", "plt"})
"""Functions, and modules of functions, that do not change their arguments."""
_HIDDEN = frozenset({"exec", "eval", "globals", "locals", "push", "setattr", "vars", "user_ns"})
"""Functions that assign to variables invisibly to the syntax."""
_NEW = (ast.BinOp, ast.Compare, ast.UnaryOp, ast.Constant)


def may_change(program: Program, names: set[str], found: ast.AST, files: set[str]) -> bool:
    """Return whether variables may have values that their assignments do not show.

    Args:
        names: the names of the variables and attributes on the way.
        found: the statement that computed the values, which does not count as a change.
        files: the files of the way.  For a way within one cell, other cells do not count: their
            top level ran before the values were computed.
    """
    if len(files) > 1 and len(program.trees) >= MAX_FILES:
        return True
    trees = program.trees.values() if len(files) > 1 else [program.trees[it] for it in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    if len(files) == 1:
        nodes += _called(program, nodes)
    if any(last_name(it) in _HIDDEN or _runs_a_script(it) for it in nodes):
        return True
    if any(isinstance(it, ast.Global | ast.Nonlocal) and names & {*it.names} for it in nodes):
        return True
    functions: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            own = {it.arg for it in ast.walk(node) if isinstance(it, ast.arg)} - {"self"}
            functions.setdefault(node.name, set()).update(own)
    known: set[str] = set()
    aliases = set(names)
    while aliases != known:
        known = set(aliases)
        for node in nodes:
            aliases |= _new_names(node, known, functions)
    inside = {id(it) for it in ast.walk(found)}
    others = (it for it in nodes if id(it) not in inside)
    return any(_is_change(it, aliases, names, functions) for it in others)


def _runs_a_script(node: ast.AST) -> bool:
    """Return whether a node is ``%run`` or ``%store``, in IPython's spelling or transformed."""
    match node:
        case ast.Call(ast.Attribute(attr="run_line_magic"), [ast.Constant("run" | "store"), *_]):
            return True
    return False


def _called(program: Program, nodes: Iterable[ast.AST]) -> list[ast.AST]:
    """Return the nodes of all functions and classes that some nodes mention, transitively."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    named = [it for it in program.nodes if isinstance(it, kinds)]
    waiting = [*nodes]
    found: list[ast.AST] = []
    seen: set[str | None] = set()
    while waiting:
        mentioned = {last_name(it) for it in waiting} - seen
        seen |= mentioned
        waiting = [it for one in named if one.name in mentioned for it in ast.walk(one)]
        found += waiting
    return found


def _new_names(node: ast.AST, known: set[str], functions: dict[str, set[str]]) -> set[str]:
    """Return the new aliases of known names that a node makes."""
    match node:
        case ast.Assign(targets, value):
            pairs = [(it, value) for it in targets]
        case ast.NamedExpr(target, value) | ast.AnnAssign(target, _, ast.expr() as value):
            pairs = [(target, value)]
        case ast.For(target, value) | ast.comprehension(target, value):
            pairs = [(target, value)]
        case ast.withitem(value, ast.expr() as target):
            pairs = [(target, value)]
        case ast.Call(func, args, keywords):
            given = [*args, *(it.value for it in keywords)]
            is_given = any(known & {*shown(it)} for it in given)
            return functions.get(last_name(func) or "", set()) if is_given else set()
        case _:
            return set()
    return {name for target, value in pairs if known & {*shown(value)} for name in names_in(target)}


def _is_change(
    node: ast.AST, aliases: set[str], names: set[str], functions: Container[str]
) -> bool:
    """Return whether a node changes the object behind one of the names in place."""
    match node:
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
            return bool(aliases & {*names_in(value)})
        case ast.AugAssign(ast.Subscript()):
            return False  # a change of its items is a subscript, handled above
        case ast.AugAssign(target):
            # Reassigning a plain variable is no hidden change: its assignment is found by name.
            is_own = isinstance(target, ast.Name) and target.id in names
            return not is_own and bool(aliases & {*names_in(target)})
        case ast.Attribute(value, attr) if attr in _MUTATES or is_in_place(attr):
            is_own = attr == "append" and isinstance(value, ast.Name) and value.id in names
            return not is_own and bool(aliases & {*names_in(value)})
        case ast.keyword("out", value):
            return bool(aliases & {*names_in(value)})
        case ast.Expr(ast.Call(ast.Attribute(attr="copy_"))):
            return False  # it reads its arguments; an in-place method is handled above
        case ast.Expr(ast.Call(func, args, keywords)):
            called = last_name(func) or ""
            if called in functions or called in _HARMLESS or _MODULES & {*names_in(func)}:
                return False  # a function of the user's is followed through its parameters
            given = [*args, *(it.value for it in keywords)]
            return any(aliases & {*shown(it)} for it in given)
    return False


def shown(node: ast.AST) -> Iterator[str]:
    """Yield the names that the value of an expression may alias."""
    if isinstance(node, _NEW):
        return
    if isinstance(node, ast.Call):
        if last_name(node.func) not in _COPIES:
            owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            for part in (*owner, *node.args, *(it.value for it in node.keywords)):
                yield from shown(part)
        return
    if isinstance(node, ast.Name) and node.id in (*_MODULES, "np", "numpy"):
        return
    if (text := last_name(node)) is not None:
        yield text
    for child in ast.iter_child_nodes(node):
        yield from shown(child)


def names_in(node: ast.AST) -> Iterator[str]:
    """Yield the names and attributes in an expression, without ``self``."""
    for item in ast.walk(node):
        text = last_name(item)
        if text is not None and text != "self":
            yield text


def stores_of_attribute(program: Program, name: str) -> int:
    """Count the assignments to an attribute with a name, in a class body or on any object."""
    stored = (it for it in program.nodes if isinstance(it, ast.Attribute) and it.attr == name)
    classes = (it for it in program.nodes if isinstance(it, ast.ClassDef))
    of_classes = sum(len(bindings_of(it, name)) for it in classes)
    return of_classes + sum(isinstance(it.ctx, ast.Store) for it in stored)


def reads_of(program: Program, name: str) -> int:
    """Count the mentions of a function, without its definition."""
    return sum(last_name(it) == name for it in program.nodes)


def is_rebound(program: Program, name: str) -> bool:
    """Return whether a function's name may be rebound, by an assignment or an import."""
    named = (it for it in program.nodes if last_name(it) == name)
    stored = (isinstance(getattr(it, "ctx", None), ast.Store) for it in named)
    imported = ((it.asname or it.name) == name for it in program.nodes if isinstance(it, ast.alias))
    return any(stored) or any(imported)
