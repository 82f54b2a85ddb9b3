"""The arguments of a call that was refused, read from the traceback, by the names of its manual."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from cudalens.evidence.context import table_of_positions
from cudalens.source.api_name import api_name
from cudalens.source.files import is_torch_file, is_user_file, torch_path
from cudalens.source.locate import locate
from cudalens.source.running_node import running_segment
from cudalens.source.safe_eval import evaluator_for, is_module, value_or
from cudalens.source.stack import place_of

_OPERATIONS = (ast.BinOp, ast.AugAssign, ast.Compare, ast.UnaryOp, ast.Subscript)
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
        _of_functional(entries)
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


def argument_facts(
    entries: Entries, arguments: Mapping[str, object]
) -> tuple[tuple[str, str], ...]:
    """Say what is known of arguments besides their values: kinds, names of parameters, lengths."""
    return (
        *odd_argument(entries, arguments),
        *callee_parameters(entries),
        *given_parameters(entries),
        *table_of_positions(entries),
        *indexed_by_numbers(entries),
    )


def indexed_by_numbers(entries: Entries) -> tuple[tuple[str, str], ...]:
    """Tell that the running subscript is proven to hold whole numbers and slices only.

    Not ``...`` and ``None`` either, beside which torch does not count dimensions right.
    """
    node = running_segment(place_of(entries[-1])) if entries else None
    if not isinstance(node, ast.Subscript):
        return ()
    reader = evaluator_for(entries[-1].tb_frame)
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    values = [value_or(reader, item, item) for item in parts if not isinstance(item, ast.Slice)]
    is_plain = all(isinstance(item, int) for item in values)
    return (("indices.are", "numbers"),) if is_plain else ()


def odd_argument(entries: Entries, arguments: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Describe the first argument that is an array or container, and the user's name for it."""
    for name, value in arguments.items():
        is_list = isinstance(value, (list, tuple)) and all(isinstance(i, _PLAIN) for i in value)
        if isinstance(value, _PLAIN) or is_module(value) or (is_list and _has_tensor(value)):
            continue
        facts = [("argument.name", name), ("argument.type", _kind(value))]
        expression = _expression(entries, name, value)
        if expression is not None:
            facts.append(("argument.expression", expression))
        return tuple(facts)
    return ()


def callee_parameters(entries: Entries) -> tuple[tuple[str, str], ...]:
    """Name the parameters of the module whose forward refused its arguments."""
    frame = entries[-1].tb_frame if entries else None
    if frame is None or frame.f_code.co_name not in (
        "_call_impl",
        "__call__",
        "_wrapped_call_impl",
    ):
        return ()
    owner = frame.f_locals.get("self")
    forward = getattr(type(owner), "forward", None) if is_module(owner) else None
    if forward is None:
        return ()
    names = [name for name in inspect.signature(forward).parameters if name != "self"]
    return (("callee.parameters", " ".join(names[:_MAX_PARAMETERS])),)


def given_parameters(entries: Entries) -> tuple[tuple[str, str], ...]:
    """Name the parameters that the forward which raised had been given."""
    frame = entries[-1].tb_frame if entries else None
    if frame is None or frame.f_code.co_name != "forward":
        return ()
    names = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
    given = [name for name in names if frame.f_locals.get(name) is not None]
    return (("forward.given", " ".join(given)),)


def _has_tensor(value: Any) -> bool:
    return any(isinstance(item, Tensor) for item in value)


def _kind(value: object) -> str:
    kind = type(value)
    name = (
        kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    )
    if name == "numpy.ndarray":
        array: Any = value
        return f"{name} of {array.dtype} {tuple(array.shape)}"
    if isinstance(value, (list, tuple)):
        return f"{name} of {len(value)}"
    return name


def _expression(entries: Entries, name: str, value: object) -> str | None:
    site = locate(
        entries,
        {name: value},
        same=lambda one, two: one is two,
        is_tensor=lambda item: item is value,
    )
    return next((item.expression for item in site.names), None)


# --- where the arguments are ---------------------------------------------------------------------


def _of_functional(entries: Entries) -> dict[str, object]:
    """Read the parameters of the innermost public function of ``torch.nn.functional``."""
    for entry in reversed(entries):
        code = entry.tb_frame.f_code
        if torch_path(code.co_filename) == "nn/functional.py" and not code.co_name.startswith("_"):
            return _parameters(entry)
    return {}


def _parameters(entry: TracebackType) -> dict[str, object]:
    code, variables = entry.tb_frame.f_code, entry.tb_frame.f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return {name: variables.get(name) for name in names}


def _of_frames(entries: Entries) -> dict[str, object]:
    """Read the parameters of a method or function of torch's that is written in Python."""
    for entry in entries:
        frame = entry.tb_frame
        path, name = torch_path(frame.f_code.co_filename), frame.f_code.co_name
        is_method = path == "_tensor.py" and "self" in frame.f_locals
        is_function = path in ("functional.py", "autograd/__init__.py")
        if (is_method or is_function) and not name.startswith(("_make", "_tensor_or", "<")):
            return _parameters(entry)
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
    node = running_segment(place)
    reader = evaluator_for(entry.tb_frame)

    def value(item: ast.expr) -> object:
        if isinstance(item, ast.List | ast.Tuple):
            return [value_or(reader, part, _Unread(ast.unparse(part))) for part in item.elts]
        return value_or(reader, item, _Unread(ast.unparse(item)))

    if isinstance(node, ast.Call):
        name = api_name([place], lambda item: isinstance(item, Tensor)) or ""
        found = _of_call(node, name, value)
    elif isinstance(node, ast.Attribute):
        found = {ast.unparse(node.value): value(node.value)}
    elif isinstance(node, _OPERATIONS):
        found = dict(_of_operation(node, value))
    else:
        return {}
    return found


def _of_operation(node: ast.AST, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(node, ast.BinOp):
        yield from (("self", value(node.left)), ("other", value(node.right)))
    elif isinstance(node, ast.AugAssign):
        yield from (("self", value(node.target)), ("other", value(node.value)))
    elif isinstance(node, ast.Compare):
        yield from (("self", value(node.left)), ("other", value(node.comparators[0])))
    elif isinstance(node, ast.UnaryOp):
        yield "self", value(node.operand)
    elif isinstance(node, ast.Subscript):
        yield "self", value(node.value)
        if not isinstance(node.slice, ast.Tuple):
            yield "indices", value(node.slice)
        else:
            for at, part in enumerate(node.slice.elts):
                yield f"indices[{at}]", value(part)


def _of_call(node: ast.Call, name: str, value: Any) -> dict[str, object]:
    short = name.rpartition(".")[2]
    is_method = name.startswith("torch.Tensor.") and isinstance(node.func, ast.Attribute)
    if not name.startswith("torch."):
        return _of_foreign_call(node, value)
    receiver = [value(node.func.value)] if is_method else []  # type: ignore[attr-defined]
    if any(isinstance(item, ast.Starred) for item in node.args):
        return {"self": receiver[0]} if receiver else {}
    given = [*receiver, *map(value, node.args)]
    keywords = {item.arg: value(item.value) for item in node.keywords if item.arg}
    names = _parameter_names(short, given, keywords)
    if names is None:
        return {"self": receiver[0]} if receiver else {}
    return dict(zip(names, given, strict=False)) | keywords


def _of_foreign_call(node: ast.Call, value: Any) -> dict[str, object]:
    """Read the receiver of a method, or what ``float`` and its kin are asked to convert."""
    function = node.func
    if isinstance(function, ast.Name) and function.id in ("float", "int", "bool", "len", "iter"):
        return {"self": value(node.args[0])} if len(node.args) == 1 else {}
    if isinstance(function, ast.Attribute):
        return {ast.unparse(function.value): value(function.value)}
    return {}


def _parameter_names(
    op: str, given: Sequence[object], keywords: Mapping[str, object]
) -> list[str] | None:
    """Return the positional names of the first overload that takes these arguments."""
    packet = getattr(torch.ops.aten, op, None)
    for overload in packet.overloads() if packet is not None else ():
        arguments = getattr(packet, overload)._schema.arguments
        positional = [item for item in arguments if not item.kwarg_only]
        known = {item.name for item in arguments}
        if (
            len(given) <= len(positional)
            and known.issuperset(keywords)
            and all(
                _takes(str(item.type), value)
                for item, value in zip(positional, given, strict=False)
            )
        ):
            return [item.name for item in positional]
    return None


def _takes(kind: str, value: object) -> bool:
    if isinstance(value, Tensor):
        return "Tensor" in kind and "List" not in kind
    if isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
        return "List[" in kind and "Tensor" in kind
    return True
