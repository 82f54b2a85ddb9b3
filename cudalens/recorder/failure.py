"""Facts about the API call that raised an exception, from host memory alone.

Ops of extensions have no guard.  When one of their kernels faults, the device's context is gone and
nothing can be read any more, so what a replay needs is copied to the host before the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cudalens.core._torch import (
    is_accelerator,
    is_capturing,
    is_plain,
    meta_of,
    no_dispatch_modes,
    plain_torch,
)
from cudalens.core.call import ApiCall
from cudalens.core.report_types import Argument, Phase
from cudalens.recorder.sites import SiteReader, entries_of, phase_of
from cudalens.recorder.tensor_refs import tensor_values
from cudalens.source.stack import StackEntry

_MAX_TEXT = 80
_OF_BACKWARD = ("torch.Tensor.backward", "torch.autograd.backward", "torch.autograd.grad")


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """An API call that did not come back, described without a value of a device."""

    name: str | None
    """The public name of the function, the op's for an op of an extension, the autograd node's
    where a kernel of backward failed."""
    overload: str | None
    is_op: bool
    """True if an op of the dispatcher was called by its own name: ``torch.ops.mine.same``."""
    phase: Phase
    entries: tuple[StackEntry, ...]
    """The user's lines that led to the call, outermost first."""
    module_path: str | None
    arguments: tuple[Argument, ...]
    host_copies: Mapping[str, Tensor] = field(default_factory=dict)
    """Arguments copied to the host before the call, by schema name; only for extensions' ops."""
    call: dict[str, Any] | None = None
    """What such an op was given, by schema name, with the metadata of its tensors in their places;
    ``None`` where something else was among it, which cannot be kept."""
    node_name: str | None = None
    """The autograd node that was running, in a backward pass."""
    node_sequence_nr: int | None = None
    """Its sequence number, which leads to the forward call."""
    previous_op: str | None = None
    """An extension's op that finished just before, unwatched, and may have caused the error."""


def describe_failure(call: ApiCall) -> CallRecord:
    """Describe a call that did not come back; no value on a device is read."""
    op = overload_of(call.func)
    arguments = {} if call.func is None else named_arguments(call.func, call.args, call.kwargs)
    name = None if call.func is None else call.name
    if call.node is not None and name in (None, *_OF_BACKWARD):
        name = call.node.name  # a kernel of the node itself
    return CallRecord(
        name=name if op is None else op.name().partition(".")[0],
        overload=None if op is None else op._overloadname,
        is_op=op is not None,
        phase="backward" if call.node or name in _OF_BACKWARD else phase_of(call.site),
        entries=tuple(entries_of(call.site)),
        module_path=SiteReader().module(call.site).path,
        arguments=tuple(_argument(key, value) for key, value in arguments.items()),
        host_copies=call.host_copies,
        call=without_tensors(arguments) if call.host_copies else None,
        node_name=None if call.node is None else call.node.name,
        node_sequence_nr=None if call.node is None else call.node.sequence_nr,
        previous_op=call.previous_op,
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


def _argument(name: str, value: Any) -> Argument:
    if isinstance(value, Tensor):
        if not is_plain(value):
            return Argument(name=name, text=type(value).__name__)
        return Argument(name=name, tensors=(meta_of(value),))
    if isinstance(value, (list, tuple)):
        found = {place: item for place, item in enumerate(value) if isinstance(item, Tensor)}
        plain = {place: meta_of(item) for place, item in found.items() if is_plain(item)}
        if plain:
            return Argument(name=name, tensors=tuple(plain.values()), places=tuple(plain))
    return Argument(name=name, text=str(value)[:_MAX_TEXT])


# --- copies on the host, taken before a call of an extension's op ---------------------------------

_HOST_TYPES = {int, float, bool, complex, str, type(None), torch.dtype, torch.device}
_HOST_TYPES |= {torch.layout, torch.memory_format}
"""Arguments that cannot change after the call and are not of a device."""


def host_copies(arguments: Mapping[str, Any], budget: int) -> dict[str, Tensor]:
    """Copy tensor arguments to the host: integers and bools first, then floats, while they fit.

    Args:
        arguments: the arguments of the call by schema name.
        budget: how many bytes all copies together may have.

    Returns:
        the copies by name, elements of lists as ``boxes[1]``; empty where no argument is on an
        accelerator, and while a CUDA graph is captured.
    """
    tensors = {
        name: item
        for name, item in tensor_values(arguments).items()
        if is_plain(item) and item.layout == torch.strided
    }
    if not any(is_accelerator(item.device) for item in tensors.values()) or is_capturing():
        return {}
    with no_dispatch_modes(), plain_torch():
        return _copied(tensors, budget)


def _copied(tensors: Mapping[str, Tensor], budget: int) -> dict[str, Tensor]:
    copies: dict[str, Tensor] = {}
    for name, tensor in sorted(tensors.items(), key=_rank):
        size = tensor.numel() * tensor.element_size()
        if size <= budget and tensor.device.type != "meta":
            copies[name] = tensor.detach().to("cpu", copy=True)
            budget -= size
    return copies


def without_tensors(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments with metadata in place of each tensor, to be called again with copies.

    ``None`` where one is neither a tensor nor a value of the host's, such as a generator.
    """
    try:
        return {name: _without_tensors(value) for name, value in arguments.items()}
    except TypeError:
        return None


def _without_tensors(value: Any) -> Any:
    if isinstance(value, Tensor) and is_plain(value):
        return meta_of(value)
    if isinstance(value, (list, tuple)):
        return [_without_tensors(item) for item in value]
    if type(value) not in _HOST_TYPES:
        msg = f"a {type(value).__name__} cannot be copied"
        raise TypeError(msg)
    return value


def _rank(item: tuple[str, Tensor]) -> tuple[bool, bool]:
    name, tensor = item
    return tensor.is_floating_point() or tensor.is_complex(), name.endswith("]")
