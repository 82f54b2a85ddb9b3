"""The arguments of a call that was refused, read from the traceback, by the names of its manual."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from cudalens.core._torch import signature_of_schema
from cudalens.core.evidence_types import OddArgument, RefusedCall
from cudalens.evidence.call_stack import api_arguments, parameters_of
from cudalens.evidence.context import table_of_positions
from cudalens.source.api_name import api_name
from cudalens.source.files import is_torch_file, is_user_file, torch_path
from cudalens.source.running_call import ABSENT, RunningCall
from cudalens.source.safe_eval import is_module, is_tensor
from cudalens.source.stack import place_of

_PLAIN = (Tensor, str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)
_MAX_PARAMETERS = 60

Entries = Sequence[TracebackType]


@dataclass(frozen=True)
class _Unread:
    """An argument that cannot be read without running code; the line spells it all the same."""

    text: str


def call_arguments(entries: Entries) -> dict[str, object]:
    """Return the arguments of the innermost public function of torch's on a traceback, by name.

    The names are those of the function that was called; ``self`` and ``other`` for operators.
    What cannot be read without running code is left out.
    """
    if not entries:
        return {}
    found = (
        api_arguments(entries)
        or _of_frames(entries)
        or _read(_of_running(entries[-1]))
        or _of_module(entries)
    )
    return {name: value for name, value in found.items() if value is not None}


def unread_arguments(entries: Entries) -> dict[str, str]:
    """Return the text of what the user's line passes to torch and nothing holds: ``f(x)``.

    Nothing of Python may lie below that line.
    """
    if not entries or not is_user_file(entries[-1].tb_frame.f_code.co_filename):
        return {}
    found = _of_running(entries[-1])
    return {name: item.text for name, item in found.items() if isinstance(item, _Unread)}


def _read(arguments: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in arguments.items() if not isinstance(value, _Unread)}


def refused_call(entries: Entries, arguments: Mapping[str, object]) -> RefusedCall:
    """Return what is known of arguments besides their values: kinds, names of parameters, sizes."""
    if not entries:
        return RefusedCall()
    return RefusedCall(
        odd_argument=_odd_argument(arguments),
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


# --- where the arguments are ---------------------------------------------------------------------


def _of_frames(entries: Entries) -> dict[str, object]:
    """Read the parameters of a method or function of torch's that is written in Python."""
    for entry in entries:
        frame = entry.tb_frame
        path, name = torch_path(frame.f_code.co_filename), frame.f_code.co_name
        is_method = path == "_tensor.py" and "self" in frame.f_locals
        is_function = path in ("functional.py", "autograd/__init__.py")
        if (is_method or is_function) and not name.startswith(("_make", "_tensor_or", "<")):
            return parameters_of(frame)
    return {}


def _of_module(entries: Entries) -> dict[str, object]:
    """Read the parameters of the forward of a module of torch's own."""
    for entry in reversed(entries):
        frame = entry.tb_frame
        if not is_torch_file(frame.f_code.co_filename):
            return {}
        if frame.f_code.co_name == "forward" and is_module(frame.f_locals.get("self")):
            names = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
            return {item: frame.f_locals.get(item) for item in names}
    return {}


def _of_running(entry: TracebackType) -> dict[str, object]:
    """Return the operands of the expression that an entry runs; some are only spelled."""
    place = place_of(entry)
    call = RunningCall.at(place)
    if isinstance(call.node, ast.Call):
        return _of_call(call, api_name([place]) or "")
    if isinstance(call.node, ast.Attribute):
        owner = call.node.value
        return {ast.unparse(owner): _value(call, owner)}
    return {name: _value(call, node) for name, node in call.operands().items()}


def _value(call: RunningCall, node: ast.expr) -> object:
    """Return the value of an argument, or its text; of a list, those of its items."""
    if isinstance(node, ast.List | ast.Tuple):
        return [_value_or_text(call, part) for part in node.elts]
    return _value_or_text(call, node)


def _value_or_text(call: RunningCall, node: ast.expr) -> object:
    value = call.value(node)
    return _Unread(ast.unparse(node)) if value is ABSENT else value


def _of_call(call: RunningCall, name: str) -> dict[str, object]:
    if not name.startswith("torch."):
        return _of_foreign_call(call)
    home, _, function = name.rpartition(".")
    is_method = home == "torch.Tensor" and call.receiver is not None
    packet = getattr(torch.ops.aten, function, None)
    for overload in packet.overloads() if packet is not None else ():
        schema = getattr(packet, overload)._schema
        kinds = {item.name: str(item.type) for item in schema.arguments}
        bound = call.bind(signature_of_schema(schema), is_method=is_method) or {}
        values = {name: _value(call, node) for name, node in bound.items()}
        # An overload without self, such as that of repeat_interleave, is not the method's.
        if values and all(_takes(kinds.get(item, ""), v) for item, v in values.items()):
            return values
    return {"self": _value(call, call.receiver)} if is_method and call.receiver else {}


def _of_foreign_call(call: RunningCall) -> dict[str, object]:
    """Read the receiver of a method, or what ``float`` and its kin are asked to convert."""
    assert isinstance(call.node, ast.Call)
    function, given = call.node.func, call.node.args
    if isinstance(function, ast.Name) and function.id in ("float", "int", "bool", "len", "iter"):
        return {"self": _value(call, given[0])} if len(given) == 1 else {}
    if call.receiver is not None:
        return {ast.unparse(call.receiver): _value(call, call.receiver)}
    return {}


def _takes(kind: str, value: object) -> bool:
    if isinstance(value, Tensor):
        return "Tensor" in kind and "List" not in kind
    if isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
        return "List[" in kind and "Tensor" in kind
    return True
