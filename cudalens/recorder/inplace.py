"""Who wrote over a tensor that autograd had saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cudalens.facts import ProvenanceStep
from cudalens.recorder.lineage import FROM_PYTHON, describe_step
from cudalens.recorder.ops import Call, Ref
from cudalens.recorder.sites import SiteReader


@dataclass(frozen=True, kw_only=True)
class Write:
    """A recorded call that changed a tensor in place."""

    step: ProvenanceStep
    version: int | None
    """The version of the tensor before the call, ``None`` where it was not noted."""


@dataclass(frozen=True, kw_only=True)
class ModifiedTensor:
    """A tensor that autograd had saved and found changed."""

    made_by: ProvenanceStep | None
    """The call that made the tensor, ``None`` when it was made before the recording."""
    written_by: tuple[Write, ...]
    """The calls that took it from the saved version to the found one, oldest first."""
    read_by: tuple[ProvenanceStep, ...] = ()
    """The calls that read it before the first of these writes; one of them had saved it."""


def modified(
    self, shape: tuple[int, ...], dtype: torch.dtype, *, saved: int, found: int, made_by: str
) -> ModifiedTensor | None:
    """Find the tensor that autograd found modified, from what its message says.

    Args:
        saved: the version at which it was saved (the message: "expected version").
        found: its version now.
        made_by: the name of the autograd node that it is an output of, empty for a leaf.

    Returns:
        ``None`` unless exactly one tensor fits: its versions before the recorded writes lead
        from ``saved`` to ``found`` without a gap.
    """
    found_tensors = [
        item
        for target, calls in self._writes().values()
        if (item := self._fit(target, calls, shape, dtype, saved, found, made_by)) is not None
    ]
    if len(found_tensors) == 1:
        return found_tensors[0]
    # Several fit, but one line of the user's may have written to all of them.
    lines = {tuple(write.step.source for write in item.written_by) for item in found_tensors}
    if len(lines) != 1:
        return None
    steps = [item.written_by for item in found_tensors]
    return ModifiedTensor(made_by=None, written_by=steps[0])

def _writes(self) -> dict[int, tuple[Ref, list[Call]]]:
    written: dict[int, tuple[Ref, list[Call]]] = {}
    for call in self._calls:
        if call.version is not None:
            target = call.base if call.base is not None else call.output
            written.setdefault(id(target), (target, []))[1].append(call)
    return written

def _fit(
    self,
    target: Ref,
    calls: list[Call],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    saved: int,
    found: int,
    made_by: str,
) -> ModifiedTensor | None:
    between = [call for call in calls if saved <= (call.version or 0) < found]
    if [call.version for call in between] != list(range(saved, found)):
        return None
    first = between[0].seq
    aliases = self._aliases(target, first)
    makers = [(item, self._maker(item)) for item in aliases]
    fitting = [
        maker
        for item, maker in makers
        if _has_meta(item, maker, shape, dtype) and _is_result_of(maker, made_by)
    ]
    if not fitting:
        return None
    readers = [
        call
        for call in self._calls
        if call.seq < first
        and not call.facts.is_view
        and any(item is alias for item in call.inputs for alias in aliases)
    ]
    return ModifiedTensor(
        made_by=None if fitting[0] is None else self.step(fitting[0]),
        written_by=tuple(
            Write(step=self.step(call), version=call.version) for call in between
        ),
        read_by=tuple(self.step(call) for call in readers),
    )

def _aliases(self, target: Ref, before: int) -> list[Ref]:
    """Give a tensor and the views of it that were made before call number ``before``."""
    found = [target]
    for call in self._calls:
        if call.seq >= before:
            break
        if call.facts.is_view and any(item is known for item in call.inputs for known in found):
            found += call.outputs
    return found

def _maker(self, tensor: Ref) -> Call | None:
    return next(
        (
            call
            for call in self._calls
            if not call.facts.is_in_place and any(item is tensor for item in call.outputs)
        ),
        None,
    )


def _has_meta(target: Ref, maker: Call | None, shape: Any, dtype: torch.dtype) -> bool:
    living = target()
    if living is not None:
        return tuple(living.shape) == tuple(shape) and living.dtype == dtype
    if maker is None:
        return False
    position = next(i for i, item in enumerate(maker.outputs) if item is target)
    known_shape, known_dtype = maker.metas[position]
    return known_shape is not None and tuple(known_shape) == tuple(shape) and known_dtype == dtype


def _is_result_of(maker: Call | None, node_name: str) -> bool:
    """Tell whether a node of this name can belong to the call that made a tensor."""
    if not node_name:
        return maker is None or maker.facts.name in _FROM_PYTHON
    return maker is not None and is_node_of(node_name, maker.facts.name)


def is_node_of(node_name: str, op_name: str) -> bool:
    """Tell whether an autograd node such as ``NllLossBackward0`` belongs to an op by its name."""
    node = node_name.rpartition("::")[2].rstrip("0123456789").lower()
    op = op_name.rpartition("::")[2].replace("_", "").lower()
    stem = node.removesuffix("backward")
    return node != stem and op in (stem, f"{stem}forward")
