"""What a call writes to without giving it back: lists of parameters, buffers of a library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import ref

from torch.autograd.graph import increment_version

from cudalens.recorder.ops import OpFacts, version_and_base
from cudalens.recorder.reads import Version, tensors_in


def versions_before(facts: OpFacts, arguments: Mapping[str, Any]) -> tuple[Version, ...]:
    """Note the tensors that a call is about to write to.

    Of lists only those that require grad: the others are the state of an optimizer, which no
    graph has saved.
    """
    return tuple(
        (ref(tensor), *version_and_base(tensor))
        for name in facts.writes
        for tensor in tensors_in((arguments.get(name),))
        if tensor.requires_grad or not isinstance(arguments[name], (list, tuple))
    )


def count_writes(facts: OpFacts, written: tuple[Version, ...]) -> None:
    """Count the writes of a call over lists as torch counts them where no mode is on.

    On the CPU such a call counts them in ops of its own, below which a dispatch mode has switched
    the counting off: backward would pass over a weight that was changed.
    """
    if not facts.name.startswith("aten::_foreach_"):
        return  # the fused optimizers count nothing
    for item, version, _ in written:
        tensor = item()
        if tensor is not None and version is not None and tensor._version == version:
            increment_version(tensor)
