"""Facts about the API call that raised an exception, without a value of a device."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cudalens.core._torch import is_plain, meta_of
from cudalens.core.call import ApiCall, NodeMark
from cudalens.core.report_types import Phase, TensorMeta
from cudalens.recorder.sites import SiteReader, entries_of, phase_of
from cudalens.recorder.tensor_refs import tensor_values
from cudalens.source.stack import StackEntry

_OF_BACKWARD = ("torch.Tensor.backward", "torch.autograd.backward", "torch.autograd.grad")


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """An API call that did not come back."""

    name: str | None
    """The public name of the function, the op's for an op of an extension, the autograd node's
    where a kernel of backward failed."""
    overload: str | None
    phase: Phase
    entries: tuple[StackEntry, ...]
    """The user's lines that led to the call, outermost first."""
    module_path: str | None
    tensors: Mapping[str, TensorMeta]
    """Its tensor arguments by name, elements of lists as ``boxes[1]``."""
    node: NodeMark | None
    """The autograd node that was running, in a backward pass."""


def describe_failure(call: ApiCall) -> CallRecord:
    """Describe a call that did not come back; no value on a device is read."""
    op = overload_of(call.func)
    arguments = {} if call.func is None else named_arguments(call.func, call.args, call.kwargs)
    name = None if call.func is None else call.name
    if call.node is not None and name in (None, *_OF_BACKWARD):
        name = call.node.name  # a kernel of the node itself
    tensors = tensor_values(arguments).items()
    return CallRecord(
        name=name if op is None else op.name().partition(".")[0],
        overload=None if op is None else op._overloadname,
        phase="backward" if call.node or name in _OF_BACKWARD else phase_of(call.site),
        entries=tuple(entries_of(call.site)),
        module_path=SiteReader().module(call.site).path,
        tensors={key: meta_of(value) for key, value in tensors if is_plain(value)},
        node=call.node,
    )


def overload_of(func: Any) -> Any | None:
    """Return the op's overload where a function is one, ``None`` for other functions."""
    kind = type(func).__name__
    if kind == "OpOverloadPacket" and len(names := func.overloads()) == 1:
        return getattr(func, names[0])
    return func if kind == "OpOverload" else None


def named_arguments(func: Any, args: tuple[Any, ...], kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by the names that the function gives them.

    Functions of C++ have those of the op of the same name; where there is none, the place is the
    name.
    """
    op = overload_of(func)
    names = [] if op is None else [item.name for item in op._schema.arguments]
    if not names:
        try:
            names = list(inspect.signature(func).parameters)
        except (TypeError, ValueError):
            names = _of_schema(getattr(func, "__name__", ""), args)
    rest = map(str, range(len(names), len(args)))
    return dict(zip([*names, *rest], args, strict=False)) | dict(kwargs or {})


def _of_schema(name: str, args: tuple[Any, ...]) -> list[str]:
    packet = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        arguments = getattr(packet, overload)._schema.arguments
        if len(arguments) >= len(args) and all(
            isinstance(value, Tensor) == (str(item.type) in ("Tensor", "Optional[Tensor]"))
            for item, value in zip(arguments, args, strict=False)
            if value is not None and type(value) is not object  # one that is not known
        ):
            return [item.name for item in arguments]
    return []
