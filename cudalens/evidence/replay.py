"""Run one call again on the CPU, for the CPU kernel's own words.

The replay is a second opinion beside the guard's predicate: CPU and CUDA do not check the same
things, and some CPU kernels check nothing at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core._python import raise_if_outside
from cudalens.core.report_types import Replay
from cudalens.recorder.tensor_refs import tensors_in

MAX_BYTES = 1 << 28
"""Arguments beyond this size are not copied: the replay would take longer than the reader has."""
_NO_KERNEL = "the op has no CPU kernel"
_UNSAFE = "the CPU kernel does not check this input and would write out of bounds"


def replay(
    op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_safe: bool = True
) -> Replay:
    """Call ``op`` with CPU copies of the same arguments and tell what happened.

    Args:
        op: the overload that was called; it is called again, not looked up by name.
        args, kwargs: its arguments; tensors may be on any device whose context is alive.
        is_safe: false when the CPU kernel reads or writes out of bounds on this input.
    """
    if not is_safe:
        return Replay(reason=_UNSAFE)
    if sum(map(_stored_bytes, tensors_in((*args, *kwargs.values())))) > MAX_BYTES:
        return Replay(reason="the arguments are too large to copy to the CPU")
    try:
        with torch.random.fork_rng(devices=()), _torch.plain_torch(), _torch.no_dispatch_modes():
            host_args, host_kwargs = _torch.pytree.tree_map(_to_cpu, (args, kwargs))
            try:
                op(*host_args, **host_kwargs)
            except Exception as error:
                raise_if_outside(error)
                if isinstance(error, NotImplementedError) and "Could not run" in str(error):
                    return Replay(reason=_NO_KERNEL)
                return Replay(
                    outcome="raised", exception=type(error).__name__, message=_first_line(error)
                )
    except Exception as failure:  # the copy failed, not the op
        raise_if_outside(failure)
        return Replay(reason=f"{type(failure).__name__}: {_first_line(failure)}")
    return Replay(outcome="returned", reason="the CPU kernel accepts these arguments")


def _stored_bytes(tensor: Tensor) -> int:
    if tensor.layout is torch.sparse_coo:  # which refuses nbytes
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        # A copy even on the CPU: the op may write to its arguments.
        return value.detach().to("cpu", copy=True)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    # A generator belongs to one device, and the CPU's own is used without one.
    return None if isinstance(value, torch.Generator) else value
