"""The arguments of an API call by parameter name."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def overload_of(func: Any) -> Any | None:
    """Return the op overload that a function is, ``None`` for other functions."""
    kind = type(func).__name__
    if kind == "OpOverloadPacket" and len(names := func.overloads()) == 1:
        return getattr(func, names[0])
    return func if kind == "OpOverload" else None


def parameters_of(func: Any) -> list[str] | None:
    """Return the names of a function's parameters, ``None`` if it has no signature."""
    op = overload_of(func)
    if op is not None:
        return [item.name for item in op._schema.arguments]
    if type(func).__name__ == "OpOverloadPacket":  # its signature is `*args, **kwargs`
        return None
    try:
        return list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return None


def named_arguments(
    func: Any, args: tuple[Any, ...], kwargs: Any, parameters: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the arguments of a call by parameter name.

    A C++ function has the names of the ATen op with its name.  Without such an op, the position is
    the name.

    Args:
        parameters: the result of :func:`parameters_of` for the function, if the caller has it.
    """
    names = parameters if parameters is not None else parameters_of(func)
    if names is None:
        names = _of_schema(getattr(func, "__name__", ""), args)
    # For a function that takes `*args`, such as `torch.einsum`.
    rest = map(str, range(len(names), len(args)))
    return dict(zip([*names, *rest], args, strict=False)) | dict(kwargs or {})


def _of_schema(name: str, args: tuple[Any, ...]) -> list[str]:
    packet = getattr(torch.ops.aten, name, None)
    if not hasattr(packet, "overloads"):  # `torch.ops.aten.__eq__` is the namespace's own method
        packet = getattr(torch.ops.aten, name.strip("_"), None)
    for overload in packet.overloads() if packet is not None else ():
        arguments = getattr(packet, overload)._schema.arguments
        if len(arguments) >= len(args) and all(
            isinstance(value, Tensor) == (str(item.type) in ("Tensor", "Optional[Tensor]"))
            for item, value in zip(arguments, args, strict=False)
            if value is not None and type(value) is not object  # of unknown value
        ):
            return [item.name for item in arguments]
    return []
