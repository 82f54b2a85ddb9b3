"""Copies of a call's arguments on the host, taken before the call.

Ops of extensions have no guard.  When one of their kernels faults, the device's context is gone
and nothing can be read any more, so what a replay and true values need is fetched before.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from cudalens.recorder.tensor_refs import tensor_values

_HOST_TYPES = {int, float, bool, complex, str, type(None), torch.dtype, torch.device}
_HOST_TYPES |= {torch.layout, torch.memory_format}
"""Arguments that cannot change after the call and hold nothing of a device's."""


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
        msg = f"a {type(value).__name__} cannot be kept"
        raise TypeError(msg)
    return value


def _rank(item: tuple[str, Tensor]) -> tuple[bool, bool]:
    name, tensor = item
    return tensor.is_floating_point() or tensor.is_complex(), name.endswith("]")
