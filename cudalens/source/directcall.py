"""The user's expressions for an op's arguments, by their places in the call that reached it.

``table.gather(1, ids - 1)`` goes straight into C++: no frame holds the value of ``ids - 1``, and no
reader could compute it again.  But when the line's running call is the very op, and nothing of
Python lies between, the schema says which argument each expression became.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from cudalens.source.argument_names import Name
from cudalens.source.running_node import Running, span_of, text_of
from cudalens.source.safe_eval import SafeEvaluator, value_or

_ABSENT = object()
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
    """Tell whether a part of a subscript becomes an index of the op; ``None`` when unknown.

    Numbers, slices and ``None`` do not; nor does a tensor of one number, which counts as it.
    """
    if isinstance(node, ast.Slice):
        return False
    value = value_or(evaluator, node, _ABSENT)
    if value is _ABSENT:
        return None
    if is_tensor(value):
        return True if getattr(value, "ndim", 0) else None
    return None if isinstance(value, list) else False
