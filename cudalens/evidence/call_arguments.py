"""The arguments of a call that was refused, read from the traceback, by the names of its manual."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from cudalens.core.evidence_types import OddArgument, RefusedCall
from cudalens.evidence.context import table_of_positions
from cudalens.source.running_call import RunningCall
from cudalens.source.safe_eval import is_module, is_tensor
from cudalens.source.stack import place_of

_PLAIN = (Tensor, str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)
_MAX_PARAMETERS = 60

Entries = Sequence[TracebackType]


def refused_call(entries: Entries, arguments: Mapping[str, object]) -> RefusedCall:
    """Return what is known of arguments besides their values: kinds, names of parameters, sizes."""
    if not entries:
        return RefusedCall()
    return RefusedCall(
        odd_argument=_odd_argument(arguments) or _odd_argument(_asked(entries)),
        parameters=_callee_parameters(entries),
        given=_given_parameters(entries),
        position_table=table_of_positions(entries),
        is_indexed_by_numbers=_is_indexed_by_numbers(entries),
    )


def _is_indexed_by_numbers(entries: Entries) -> bool:
    """Return whether the running subscript is proven to hold whole numbers and slices only.

    Not ``...`` and ``None`` either, beside which torch does not count dimensions right.
    """
    call = RunningCall.at(place_of(entries[-1]))
    values = [call.value(item) for item in call.indices() if not isinstance(item, ast.Slice)]
    return bool(call.indices()) and all(isinstance(item, int) for item in values)


def _asked(entries: Entries) -> dict[str, object]:
    """Return what the innermost line asks for an attribute, by its text: ``input_ids.size``."""
    call = RunningCall.at(place_of(entries[-1]))
    asked = call.node.func if isinstance(call.node, ast.Call) else call.node
    if not isinstance(asked, ast.Attribute):
        return {}
    value = call.value(asked.value)
    is_data = isinstance(value, (list, tuple, dict)) or type(value).__module__ == "numpy"
    return {ast.unparse(asked.value): value} if is_data else {}


def _odd_argument(arguments: Mapping[str, object]) -> OddArgument | None:
    """Describe the first argument that is an array or container."""
    for name, value in arguments.items():
        items = value if isinstance(value, (list, tuple)) else ()
        is_list = any(map(is_tensor, items)) and all(isinstance(item, _PLAIN) for item in items)
        if not (isinstance(value, _PLAIN) or is_list):
            return OddArgument(name=name, kind=_kind(value))
    return None


def _callee_parameters(entries: Entries) -> tuple[str, ...]:
    """Name the parameters of the module whose forward refused its arguments."""
    frame = entries[-1].tb_frame
    owner = frame.f_locals.get("self")
    forward = getattr(type(owner), "forward", None) if is_module(owner) else None
    calls = ("_call_impl", "__call__", "_wrapped_call_impl", "inner")
    if forward is None or frame.f_code.co_name not in calls:
        return ()
    names = [name for name in inspect.signature(forward).parameters if name != "self"]
    return tuple(names[:_MAX_PARAMETERS])


def _given_parameters(entries: Entries) -> tuple[str, ...] | None:
    """Name the parameters that the forward which raised had been given."""
    frame = entries[-1].tb_frame
    if frame.f_code.co_name != "forward":
        return None
    names = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
    return tuple(name for name in names if frame.f_locals.get(name) is not None)


def _kind(value: object) -> str:
    kind = type(value)
    if kind.__module__ == "builtins":
        name = kind.__qualname__
    else:
        name = f"{kind.__module__}.{kind.__name__}"
    if name == "numpy.ndarray":
        array: Any = value
        return f"{name} of {array.dtype} {tuple(array.shape)}"
    return f"{name} of {len(value)}" if isinstance(value, (list, tuple)) else name
