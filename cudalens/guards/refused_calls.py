"""Calls that torch refuses on the host before any launch: a violation there is not reported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudalens.guards._base import schema_parameters


def is_refused(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether torch refuses a call on the host, whatever its values are.

    Asked only of a call in which a guard has found something.
    """
    arguments = {item.name: item.of(args, kwargs) for item in schema_parameters(op)}
    if len(_devices(op, arguments)) > 1:
        return True
    if op._schema.name != "aten::masked_scatter_":
        return False
    self, mask = arguments["self"], arguments["mask"]
    # A mask that would need a larger tensor than the one that is written in place.
    return bool(torch.broadcast_shapes(self.shape, mask.shape) != self.shape)


def _devices(op: Any, arguments: dict[str, Any]) -> set[torch.device]:
    """Return the devices of the tensors that must be together.

    A number in a tensor without dimensions may stay on the CPU, and so may the indices of
    ``x[index]`` and the targets and lengths of a CTC loss.
    """
    devices: set[torch.device] = set()
    for value in arguments.values():
        is_list = isinstance(value, (list, tuple))
        for tensor in value if is_list else (value,):
            if isinstance(tensor, Tensor):
                is_host = tensor.device.type == "cpu"
                if not (is_host and (is_list or not tensor.dim() or "ctc" in op._schema.name)):
                    devices.add(tensor.device)
    return devices
