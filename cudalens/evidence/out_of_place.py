"""The form out of place of a change in place, tried on stand-ins of its recorded tensors."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cudalens.core._python import raise_if_outside
from cudalens.core.evidence_types import InPlaceChange
from cudalens.evidence.trial import quiet_torch
from cudalens.recorder.calls import Recorded
from cudalens.recorder.history import Snapshot
from cudalens.recorder.sites import entries_of
from cudalens.source.locate import locate_entries
from cudalens.source.running_call import method_of
from cudalens.source.running_node import running
from cudalens.source.stack import place_of

MODIFIED = "has been modified by an inplace operation"
_MOST_VALUES = 1 << 16
"""Above it shape and dtype alone are compared, without values."""


def with_tried_form(change: InPlaceChange, write: Recorded, snapshot: Snapshot) -> InPlaceChange:
    """Add the place of the write, where backward goes on with the op out of place.

    Only where no caller and no base of a view has the tensor too, and no other line has written to
    what backward needs.
    """
    entries = entries_of(write.site)
    statement = _read(running(place_of(entries[-1])).statement) if entries else None
    if statement is None:
        return change
    name, methods, args, kwargs = statement
    code = entries[-1].code
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    is_view = any(item.base is not None for item in write.written)
    if is_view or name in (*parameters, *code.co_freevars):
        return replace(change, is_shared=True)
    metas = [snapshot.meta_of(item) for item in write.inputs]
    if not change.is_only_line or any(shape is None for shape, _ in metas):
        return change
    try:
        is_tried = _is_tried(methods, args, kwargs, metas)
    except Exception as failure:  # whatever torch says of the stand-ins
        raise_if_outside(failure)
        return change
    return replace(change, out_of_place=locate_entries(entries)) if is_tried else change


_Statement = tuple[str, tuple[str, str], list[ast.expr], dict[str, ast.expr]]
"""The variable, the methods in place and out of place, and their arguments."""


def _read(statement: ast.stmt | None) -> _Statement | None:
    """Read ``h += 1.0`` and ``h.clamp_(0, max=1)``; ``None`` for other statements."""
    match statement:
        case ast.AugAssign(target=ast.Name(name), op=op, value=value):
            stem = method_of(op)
            return name, (f"__i{stem}__", f"__{stem}__"), [value], {}
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), method), args, keywords)):
            named = {item.arg or "": item.value for item in keywords}
            return name, (method, method.removesuffix("_")), args, named
    return None


def _is_tried(
    methods: tuple[str, str],
    args: Sequence[ast.expr],
    kwargs: Mapping[str, ast.expr],
    metas: Sequence[tuple[Any, Any]],
) -> bool:
    """Return whether backward refuses the method in place, and takes the other one's same result.

    Args:
        metas: shape and dtype of the tensor that is written to, and of those among the arguments.
    """
    (shape, dtype), *others = metas
    count = max(meta[0].numel() for meta in metas)
    device = "cpu" if count <= _MOST_VALUES else "meta"
    with quiet_torch(has_autograd=True):
        made = iter([torch.rand(*item[0], device=device).to(item[1]) for item in others])
        first = torch.rand(*shape, device=device).to(dtype)
        values = [_value(node, made) for node in args]
        named = {name: _value(node, made) for name, node in kwargs.items()}
        if next(made, None) is not None:
            return False
        results: list[Tensor] = []
        refused = []
        for method in methods:
            saved = first.detach().requires_grad_().exp()  # whose backward needs its result
            results.append(getattr(saved, method)(*values, **named))
            try:
                results[-1].sum().backward()
            except RuntimeError as error:
                refused.append(MODIFIED in str(error))
        changed, new = results
        is_same = (changed.shape, changed.dtype) == (new.shape, new.dtype)
        if device == "cpu":
            is_same = is_same and torch.equal(changed.detach(), new.detach())
        return is_same and refused == [True]


_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _value(node: ast.expr, tensors: Iterator[Tensor]) -> Any:
    """Return the value of numbers and of literals, the next stand-in for another expression."""
    if isinstance(node, ast.BinOp) and not any(isinstance(n, ast.Name) for n in ast.walk(node)):
        return _ARITHMETIC[type(node.op)](_value(node.left, tensors), _value(node.right, tensors))
    try:
        return ast.literal_eval(node)
    except ValueError:
        return next(tensors)
