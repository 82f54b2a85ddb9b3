"""The user's own names for tensors: expressions of the running line that are proven to be them.

An expression names a tensor when its value is that tensor.  An argument of the running call also
does when the called function still holds, as its parameter, the very tensor: that names ``y - 1``,
whose value no reader could compute again.
"""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import NamedTuple

from cudalens.source.files import is_torch_file
from cudalens.source.running_call import ABSENT, RunningCall, signature_of
from cudalens.source.running_node import Running, Span, expressions_in, span_of, text_of
from cudalens.source.safe_eval import is_array, is_module, is_tensor, items_of
from cudalens.source.stack import Place

Same = Callable[[object, object], bool]

_MAX_ITEMS = 64
_MAX_OTHERS = 12
_MAX_LIBRARY_NAMES = 3
_REBINDS = ("STORE_FAST", "DELETE_FAST", "STORE_DEREF", "DELETE_DEREF")


class Name(NamedTuple):
    """An argument of the op and the user's expression that is that tensor."""

    key: str
    expression: str
    span: Span | None


class LineTensor(NamedTuple):
    """A tensor that an expression of the line is."""

    expression: str
    span: Span | None
    value: object


def tensors_on(run: Running, call: RunningCall, callee: Place | None) -> tuple[LineTensor, ...]:
    """Find the expressions of the running line that are tensors, nearest and shortest first."""
    tensors: dict[tuple[str, int], tuple[int, LineTensor]] = {}
    for read in _read(run, call, callee):
        for extra, text, node, tensor in _tensors_of(read, run.lines):
            rank = read.rank + extra
            # The same text twice may be two tensors: two calls of one function.
            key = text, id(tensor)
            if key not in tensors or tensors[key][0] > rank:
                tensors[key] = rank, LineTensor(text, span_of(node, run.lines), tensor)
    ordered = sorted(tensors.values(), key=lambda item: (item[0], len(item[1].expression)))
    return tuple(item for _, item in ordered)


def name_values(
    tensors: Sequence[LineTensor], values: Mapping[str, object], same: Same
) -> tuple[Name, ...]:
    """Name each value by the first expression that is proven to be it."""
    names = []
    for key, value in values.items():
        proven = next((item for item in tensors if same(item.value, value)), None)
        if proven is not None:
            names.append(Name(key, proven.expression, proven.span))
    return tuple(names)


def other_tensors(
    tensors: Sequence[LineTensor], values: Mapping[str, object], same: Same
) -> tuple[LineTensor, ...]:
    """List the tensors on the line that are none of ``values``, each once, in reading order."""
    others: list[LineTensor] = []
    for item in tensors:
        named = [*values.values(), *(other.value for other in others)]
        if not any(same(item.value, value) for value in named):
            others.append(item)
    return tuple(sorted(others[:_MAX_OTHERS], key=lambda item: item.span or (1 << 31, 0, 0)))


def library_names(
    places: Sequence[Place], values: Mapping[str, object], same: Same
) -> tuple[tuple[str, str], ...]:
    """Return each key with the variables that hold its value in library frames, innermost first."""
    names: list[tuple[str, str]] = []
    for place in reversed(places):
        if is_torch_file(place.filename):
            continue  # its parameters are called as in the schema
        variables = [pair for pair in place.variables.items() if is_tensor(pair[1])]
        for key, value in values.items():
            name = next((name for name, variable in variables if same(variable, value)), None)
            if name is not None and sum(other == key for other, _ in names) < _MAX_LIBRARY_NAMES:
                names.append((key, name))
    return tuple(names)


class _Read(NamedTuple):
    """An expression of the line with its value."""

    rank: int
    node: ast.expr
    value: object
    is_whole: bool = True
    """It is not only the receiver of an attribute or subscript, as ``batch`` in ``batch["y"]``."""


def _read(run: Running, call: RunningCall, callee: Place | None) -> Iterator[_Read]:
    """Return the expressions of the line that can be read, the running call's own first."""
    seen: set[int] = set()
    receivers: set[int] = set()
    for rank, root in ((0, run.node), (2, run.scope)):
        for node in expressions_in(root) if root is not None else ():
            if isinstance(node, ast.Attribute | ast.Subscript):
                receivers.add(id(node.value))
            value = call.value(node)
            if value is not ABSENT and id(node) not in seen:
                yield _Read(rank, node, value, id(node) not in receivers)
            seen.add(id(node))
    if callee is not None:
        for node, value in _bound_arguments(call, callee):
            yield _Read(0, node, value)


def _tensors_of(read: _Read, lines: Sequence[str]) -> Iterator[tuple[int, str, ast.expr, object]]:
    """Return the tensor that an expression is, or the tensors in the batch that it is.

    An item of a tuple or list that the line spells is named by its own expression.
    """
    node, value = read.node, read.value
    if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
        return
    if is_tensor(value):
        yield 0, text_of(node, lines), node, value
        return
    held = items_of(value, _MAX_ITEMS) if read.is_whole else []
    tensors = [(key, item) for key, item in held if type(key) in (str, int) and is_tensor(item)]
    text = text_of(node, lines) if tensors else ""
    spelled = node.elts if isinstance(node, ast.Tuple | ast.List) else []
    if any(isinstance(item, ast.Starred) for item in spelled) or len(spelled) != len(held):
        spelled = []
    for key, item in tensors:
        if spelled and isinstance(key, int):
            yield 1, text_of(spelled[key], lines), spelled[key], item
            continue
        shown = f'"{key}"' if isinstance(key, str) and key.isidentifier() else ascii(key)
        yield 1, f"{text}[{shown}]", node, item


def _bound_arguments(call: RunningCall, callee: Place) -> Iterator[tuple[ast.expr, object]]:
    """Return the arguments of a call with what the called function holds for them.

    Only when the function is proven to be the one that runs, and never rebinds the parameter.
    """
    if not isinstance(call.node, ast.Call):
        return
    code, skipped = _code_of(call.value(call.node.func))
    if code is not callee.code or callee.frame is None:
        return
    rebound = {step.argval for step in dis.get_instructions(callee.code) if step.opname in _REBINDS}
    signature = signature_of(callee.code)
    variables = callee.variables
    held = {
        name: variables[name]
        for name in signature.parameters
        if name in variables and name not in rebound
    }
    for name, parameter in signature.parameters.items():
        value = held.get(name)
        if parameter.kind is parameter.VAR_POSITIONAL and type(value) is tuple:
            held |= {f"{name}[{at}]": item for at, item in enumerate(value)}
        elif parameter.kind is parameter.VAR_KEYWORD and type(value) is dict:
            held = {**value, **held}
    for name, node in (call.bind(signature, skipped=skipped) or {}).items():
        if name in held:
            yield node, held[name]


def _code_of(function: object) -> tuple[object, int]:
    """Return the code that calling ``function`` runs, and how many parameters are bound already."""
    if type(function) is FunctionType:
        return function.__code__, 0
    if type(function) is MethodType:
        return _code_of(function.__func__)[0], 1
    if is_module(function):
        return _code_of(inspect.getattr_static(type(function), "__call__", None))[0], 1
    return None, 0


# --- the user's expressions for an op's arguments, by their place ---------------------------------


# From torch 2.15 on a number is written by index_fill_ and masked_fill_.
_INDEXING = ("index", "index_put", "_index_put_impl", "index_fill", "masked_fill")
_HOMES = ("torch", "torch.Tensor")


class OpSignature(NamedTuple):
    """Name and parameters of an op."""

    op: str
    """Name such as ``aten::gather``."""
    parameters: inspect.Signature
    """In the order of its schema."""


def direct_names(
    run: Running, call: RunningCall, api: str | None, signature: OpSignature, keys: Collection[str]
) -> tuple[Name, ...]:
    """Name the arguments ``keys`` by the expressions that the running call has in their places.

    Places are those of the op only where the call gives what this very overload takes: composite
    functions pass other tensors on under the same name.

    Args:
        run: the innermost entry of the stack; nothing of Python may run below it.
        call: what it is calling.
        api: its public name; ``None`` names nothing.
        signature: the op that was reached.
        keys: the op's tensors, such as ``index`` or ``indices[1]``, in the order of the schema.
    """
    if api is None:
        return ()
    op = signature.op.rpartition("::")[2].rstrip("_")
    home, _, function = api.rpartition(".")
    matches: list[tuple[str, ast.expr]] = []
    if isinstance(call.node, ast.Subscript) and op in _INDEXING:
        matches = _of_subscript(call, keys)
    elif function.rstrip("_") == op and home in _HOMES:
        is_method = home == "torch.Tensor"
        bound = call.bind(signature.parameters, is_method=is_method, is_whole=True)
        matches = list((bound or {}).items())
        if bound is None and is_method and call.receiver is not None:
            matches = [("self", call.receiver)]
    return tuple(
        Name(key, text_of(node, run.lines), span_of(node, run.lines))
        for key, node in matches
        # An expression that can be read and was not found to be the tensor is another one.
        if key in keys and not is_tensor(call.value(node))
    )


def _of_subscript(call: RunningCall, keys: Collection[str]) -> list[tuple[str, ast.expr]]:
    """Pair the parts of ``x[a, :, b]`` with the indices, when it is certain which part is which."""
    parts = call.indices()
    if any(isinstance(node, ast.Starred) for node in parts):
        return []
    kinds = [(_is_index(node, call), node) for node in parts]
    indices = [key for key in keys if key.startswith("indices[") or key in {"index", "mask"}]
    for accepted in ((True, None), (True,)):
        chosen = [node for kind, node in kinds if kind in accepted]
        if len(chosen) == len(indices):
            # Beside a slice or a number the op gets a view of what is indexed.
            pairs = list(zip(indices, chosen, strict=True))
            if isinstance(call.node, ast.Subscript) and len(chosen) == len(parts):
                pairs.append(("self", call.node.value))
            return pairs
    return []


def _is_index(node: ast.expr, call: RunningCall) -> bool | None:
    """Return whether a part of a subscript becomes an index of the op; ``None`` when unknown.

    Numbers, slices and ``None`` do not; nor does a tensor of one number, which counts as it.
    """
    if isinstance(node, ast.Slice):
        return False
    value = call.value(node)
    if value is ABSENT:
        return None
    if is_tensor(value):
        return True if getattr(value, "ndim", 0) else None
    if is_array(value):
        return bool(getattr(value, "ndim", 0))
    return None if isinstance(value, list) else False
