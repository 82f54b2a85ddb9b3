"""The user's own names for tensors: expressions of the running line that are proven to be them.

An expression names a tensor when its value is that tensor.  An argument of the running call also
does when the called function still holds, as its parameter, the very tensor: that names ``y - 1``,
whose value no reader could compute again.
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import NamedTuple

from cudalens.source.files import is_torch_file
from cudalens.source.running_node import Running, Span, expressions_in, span_of, text_of
from cudalens.source.safe_eval import SafeEvaluator, is_module, items_of, value_or
from cudalens.source.stack import Place

Same = Callable[[object, object], bool]
IsTensor = Callable[[object], bool]

_ABSENT = object()
_MAX_ITEMS = 64
_MAX_OTHERS = 12
_MAX_LIBRARY_NAMES = 3
_REBINDS = ("STORE_FAST", "DELETE_FAST", "STORE_DEREF", "DELETE_DEREF")


class Name(NamedTuple):
    """An argument of the op and the user's expression that is that tensor."""

    key: str
    expression: str
    span: Span | None


class Other(NamedTuple):
    """Another tensor on the failing line, under no argument's name."""

    key: None
    expression: str
    span: Span | None
    value: object


class LibraryName(NamedTuple):
    """The variable under which a library's function holds an argument of the op."""

    key: str
    name: str
    function: str
    file: str


class Candidate(NamedTuple):
    """A tensor that an expression of the line is; a lower rank is nearer to the call."""

    rank: int
    text: str
    span: Span | None
    value: object


def candidates(
    run: Running, callee: Place | None, evaluator: SafeEvaluator, is_tensor: IsTensor
) -> tuple[Candidate, ...]:
    """Find the expressions of the running line that are tensors, nearest and shortest first."""
    found: dict[tuple[str, int], Candidate] = {}
    for read in _read(run, callee, evaluator):
        for extra, text, tensor in _tensors_of(read, run.lines, is_tensor):
            candidate = Candidate(read.rank + extra, text, span_of(read.node, run.lines), tensor)
            # The same text twice may be two tensors: two calls of one function.
            key = text, id(tensor)
            if key not in found or found[key].rank > candidate.rank:
                found[key] = candidate
    return tuple(sorted(found.values(), key=lambda item: (item.rank, len(item.text))))


def name_values(
    found: Sequence[Candidate], values: Mapping[str, object], same: Same
) -> tuple[Name, ...]:
    """Name each value by the first expression that is proven to be it."""
    names = []
    for key, value in values.items():
        proven = next((item for item in found if same(item.value, value)), None)
        if proven is not None:
            names.append(Name(key, proven.text, proven.span))
    return tuple(names)


def other_tensors(
    found: Sequence[Candidate], values: Mapping[str, object], same: Same
) -> tuple[Other, ...]:
    """List the tensors on the line that are none of ``values``, each once, in reading order."""
    kept: list[Candidate] = []
    for item in found:
        known = [*values.values(), *(other.value for other in kept)]
        if not any(same(item.value, value) for value in known):
            kept.append(item)
    kept = sorted(kept[:_MAX_OTHERS], key=lambda item: item.span or (1 << 31, 0, 0))
    return tuple(Other(None, item.text, item.span, item.value) for item in kept)


def library_names(
    places: Sequence[Place], values: Mapping[str, object], same: Same, is_tensor: IsTensor
) -> tuple[LibraryName, ...]:
    """Find the variables that hold each value in library frames, innermost frame first."""
    found: list[LibraryName] = []
    for place in reversed(places):
        if is_torch_file(place.filename):
            continue  # its parameters are called as in the schema
        variables = [pair for pair in place.variables.items() if is_tensor(pair[1])]
        for key, value in values.items():
            if sum(item.key == key for item in found) >= _MAX_LIBRARY_NAMES:
                continue
            for name, variable in variables:
                if same(variable, value):
                    found.append(LibraryName(key, name, place.code.co_name, place.filename))
                    break
    return tuple(found)


class _Read(NamedTuple):
    """An expression of the line with its value."""

    rank: int
    node: ast.expr
    value: object
    is_whole: bool = True
    """It is not only the receiver of an attribute or subscript, as ``batch`` in ``batch["y"]``."""


def _read(run: Running, callee: Place | None, evaluator: SafeEvaluator) -> Iterator[_Read]:
    """Return the expressions of the line that can be read, the running call's own first."""
    seen: set[int] = set()
    receivers: set[int] = set()
    for rank, root in ((0, run.node), (2, run.scope)):
        for node in expressions_in(root) if root is not None else ():
            if isinstance(node, ast.Attribute | ast.Subscript):
                receivers.add(id(node.value))
            value = value_or(evaluator, node, _ABSENT)
            if value is not _ABSENT and id(node) not in seen:
                yield _Read(rank, node, value, id(node) not in receivers)
            seen.add(id(node))
    if isinstance(run.node, ast.Call) and callee is not None:
        for node, value in _bound_arguments(run.node, callee, evaluator):
            if value is not _ABSENT:
                yield _Read(0, node, value)


def _tensors_of(
    read: _Read, lines: Sequence[str], is_tensor: IsTensor
) -> Iterator[tuple[int, str, object]]:
    """Return the tensor that an expression is, or the tensors in the batch that it is."""
    node, value = read.node, read.value
    if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
        return
    if is_tensor(value):
        yield 0, text_of(node, lines), value
        return
    held = items_of(value, _MAX_ITEMS) if read.is_whole else []
    tensors = [(key, item) for key, item in held if type(key) in (str, int) and is_tensor(item)]
    text = text_of(node, lines) if tensors else ""
    for key, item in tensors:
        shown = f'"{key}"' if isinstance(key, str) and key.isidentifier() else ascii(key)
        yield 1, f"{text}[{shown}]", item


def _bound_arguments(
    call: ast.Call, callee: Place, evaluator: SafeEvaluator
) -> Iterator[tuple[ast.expr, object]]:
    """Return the arguments of a call with what the called function holds for them.

    Only when the function is proven to be the one that runs, and never rebinds the parameter.
    """
    function = value_or(evaluator, call.func, _ABSENT)
    code, skipped = _code_of(function)
    if code is not callee.code or callee.frame is None:
        return
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return
    variables = callee.variables
    rebound = {step.argval for step in dis.get_instructions(callee.code) if step.opname in _REBINDS}
    count, named = callee.code.co_argcount, callee.code.co_argcount + callee.code.co_kwonlyargcount
    parameters = callee.code.co_varnames
    has_rest, has_keywords = bool(callee.code.co_flags & 0x04), bool(callee.code.co_flags & 0x08)
    for index, argument in enumerate(call.args, start=skipped):
        if index < count:
            yield argument, _parameter(variables, parameters[index], rebound)
        elif has_rest:
            rest = _parameter(variables, parameters[named], rebound)
            if type(rest) is tuple and index - count < len(rest):
                yield argument, rest[index - count]
    for keyword in call.keywords:
        if keyword.arg in parameters[:named]:
            yield keyword.value, _parameter(variables, str(keyword.arg), rebound)
        elif has_keywords and keyword.arg is not None:
            extra = _parameter(variables, parameters[named + has_rest], rebound)
            if type(extra) is dict:
                yield keyword.value, extra.get(keyword.arg, _ABSENT)


def _parameter(variables: Mapping[str, object], name: str, rebound: set[str]) -> object:
    return _ABSENT if name in rebound else variables.get(name, _ABSENT)


def _code_of(function: object) -> tuple[object, int]:
    """Return the code that calling ``function`` runs, and how many parameters are bound already."""
    if type(function) is FunctionType:
        return function.__code__, 0
    if type(function) is MethodType:
        return _code_of(function.__func__)[0], 1
    if is_module(function):
        call = next(
            (vars(base)["__call__"] for base in type(function).__mro__ if "__call__" in vars(base)),
            None,
        )
        return _code_of(call)[0], 1
    return None, 0


# --- the user's expressions for an op's arguments, by their place ---------------------------------


_MISSING = object()
_INDEXING = ("index", "index_put", "_index_put_impl")
_HOMES = ("torch", "torch.Tensor")


class Signature(NamedTuple):
    """What an op is called and takes, in the order of its schema."""

    op: str
    """As in ``aten::gather``."""
    parameters: tuple[str, ...]


class _Match(NamedTuple):
    key: str
    node: ast.expr


def direct_names(
    run: Running,
    api: str | None,
    signature: Signature,
    keys: Collection[str],
    evaluator: SafeEvaluator,
    is_tensor: Callable[[object], bool],
) -> tuple[Name, ...]:
    """Name the arguments ``keys`` by the expressions that the running call has in their places.

    Args:
        run: the innermost entry of the stack; nothing of Python may run below it.
        api: what it calls, by its public name; ``None`` names nothing.
        signature: the op that was reached.
        keys: the op's tensors, such as ``index`` or ``indices[1]``, in the order of the schema.
        evaluator: reads the expressions that can be read.
        is_tensor: whether a value is a tensor.
    """
    if api is None:
        return ()
    op = signature.op.rpartition("::")[2].rstrip("_")
    home, _, function = api.rpartition(".")
    matches: Iterator[_Match] = iter(())
    if isinstance(run.node, ast.Subscript) and op in _INDEXING:
        matches = _of_subscript(run.node, keys, evaluator, is_tensor)
    elif isinstance(run.node, ast.Call) and function.rstrip("_") == op and home in _HOMES:
        matches = _of_call(run.node, signature.parameters, is_method=home == "torch.Tensor")
    return tuple(
        Name(key, text_of(node, run.lines), span_of(node, run.lines))
        for key, node in matches
        # An expression that can be read and was not found to be the tensor is another one.
        if key in keys and not is_tensor(value_or(evaluator, node, None))
    )


def _of_call(call: ast.Call, parameters: Sequence[str], *, is_method: bool) -> Iterator[_Match]:
    given = call.args
    if is_method:
        if not isinstance(call.func, ast.Attribute):
            return  # ``take = table.take; take(ids)``: the receiver is not on the line
        given = [call.func.value, *call.args]
    for node, name in zip(given, parameters, strict=False):
        if isinstance(node, ast.Starred):
            break
        yield _Match(name, node)
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield _Match("self" if keyword.arg == "input" else keyword.arg, keyword.value)


def _of_subscript(
    subscript: ast.Subscript,
    keys: Collection[str],
    evaluator: SafeEvaluator,
    is_tensor: Callable[[object], bool],
) -> Iterator[_Match]:
    """Pair the parts of ``x[a, :, b]`` with the indices, when it is certain which part is which."""
    part = subscript.slice
    parts = part.elts if isinstance(part, ast.Tuple) else [part]
    if any(isinstance(node, ast.Starred) for node in parts):
        return
    kinds = [(_is_index(node, evaluator, is_tensor), node) for node in parts]
    indices = [key for key in keys if key.startswith("indices[")]
    for accepted in ((True, None), (True,)):
        chosen = [node for kind, node in kinds if kind in accepted]
        if len(chosen) == len(indices):
            yield from map(_Match, indices, chosen)
            return


def _is_index(
    node: ast.expr, evaluator: SafeEvaluator, is_tensor: Callable[[object], bool]
) -> bool | None:
    """Return whether a part of a subscript becomes an index of the op; ``None`` when unknown.

    Numbers, slices and ``None`` do not; nor does a tensor of one number, which counts as it.
    """
    if isinstance(node, ast.Slice):
        return False
    value = value_or(evaluator, node, _MISSING)
    if value is _MISSING:
        return None
    if is_tensor(value):
        return True if getattr(value, "ndim", 0) else None
    return None if isinstance(value, list) else False
