"""Who wrote over a tensor that autograd had saved."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from cudalens.core.report_types import ProvenanceStep
from cudalens.recorder.lineage import FROM_PYTHON, Lineage, describe_step
from cudalens.recorder.ops import Call, aten, is_node_of
from cudalens.recorder.sites import calling_module, entries_of
from cudalens.recorder.tensor_refs import Ref
from cudalens.source.stack import StackEntry

_COMPLAINT: Final = re.compile(
    # "torch.cuda.FloatTensor"; torch spells CUDABFloat16Type and CUDABoolType as they are inside.
    r"modified by an inplace operation: \[(?:torch\.(?:\w+\.)?|CPU|CUDA|XPU|MPS)"
    r"(?P<type>[A-Z]\w*?)(?:Tensor|Type) "
    r"\[(?P<shape>[\d, ]*)\]\](?:, which is output (?P<output>\d+) of (?P<node>[\w:]+),)? "
    r"is at version (?P<found>\d+); expected version (?P<saved>\d+)"
)
_COMPLEX: Final = {
    "ComplexHalf": torch.complex32,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
}
"""The types for which torch has no class such as ``torch.FloatTensor``."""

_SAVING_NOTHING: Final = aten(
    "add sub rsub neg sum mean cat stack clone copy_ _to_copy empty_like zeros_like ones_like "
    "full_like rand_like randn_like eq ne lt le gt ge isnan isinf isfinite any all argmax "
    "logical_not _local_scalar_dense equal"
)
"""Ops that keep no tensor for backward: at most shapes and dtypes.

Source: tools/autograd/derivatives.yaml, torch 2.13.0
"""


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """What autograd says of a saved tensor that it found modified."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    made_by: str | None
    """The autograd node that the tensor is an output of; ``None`` for a leaf."""
    saved: int
    """Its version when it was saved."""
    found: int
    """Its version now."""


@dataclass(frozen=True, kw_only=True)
class ModifiedTensor:
    """A tensor that autograd had saved and found changed."""

    made_by: ProvenanceStep | None
    """The call that made the tensor, ``None`` when it was made before the recording."""
    written_by: tuple[ProvenanceStep, ...]
    """The calls that took it from the saved version to the found one, oldest first."""
    read_by: tuple[ProvenanceStep, ...] = ()
    """The calls that read it before the first of these writes and can have saved it."""
    saved_by: tuple[ProvenanceStep, ...] = ()
    """The calls of which one saved it; empty where a call that is not recorded may have."""
    saved_at: tuple[StackEntry, ...] = ()
    """The user's lines of the call that saved it, outermost first, where only one can have."""
    is_parameter: bool = False
    """Whether it certainly is a leaf that requires grad."""
    written_within: nn.Module | None = None
    """The module that made the last write, where a library did; not to be kept."""


def read_complaint(message: str) -> Complaint | None:
    """Read autograd's message; ``None`` when it is another one."""
    match = _COMPLAINT.search(message)
    if match is None:
        return None
    named = getattr(torch, f"{match['type']}Tensor", None)
    dtype = _COMPLEX.get(match["type"]) if named is None else named.dtype
    if dtype is None:
        return None
    return Complaint(
        shape=tuple(int(size) for size in match["shape"].split(",") if size.strip()),
        dtype=dtype,
        made_by=match["node"],
        saved=int(match["saved"]),
        found=int(match["found"]),
    )


def find_modified(lineage: Lineage, complaint: Complaint) -> ModifiedTensor | None:
    """Find the tensor that autograd complains of, and who wrote to it.

    A tensor fits when it, or a view of it, has the shape, dtype and origin that the message
    names, and recorded writes lead from the saved version to the found one without a gap.

    Returns:
        ``None`` unless exactly one tensor fits, or one line wrote to all that do.
    """
    fitting = [
        item
        for target, writes in _writes(lineage.calls)
        if (item := _fit(lineage, target, writes, complaint)) is not None
    ]
    if len(fitting) == 1:
        return fitting[0]
    if len({tuple(step.source for step in item.written_by) for item in fitting}) != 1:
        return None
    written_by = tuple(map(_of_one_line, zip(*(item.written_by for item in fitting), strict=True)))
    return ModifiedTensor(made_by=None, written_by=written_by)


def _of_one_line(writes: tuple[ProvenanceStep, ...]) -> ProvenanceStep:
    """Return what writes of one line have in common: the op only where all have the same."""
    is_one_op = len({step.op for step in writes}) == 1
    return writes[0] if is_one_op else replace(writes[0], op=None)


def _writes(calls: Sequence[Call]) -> list[tuple[Ref, list[tuple[Call, int]]]]:
    """Return each tensor that was written to, by its base when a view was, with the writes.

    Of each write the call, and the version of the tensor before it.
    """
    written: dict[int, tuple[Ref, list[tuple[Call, int]]]] = {}
    for call in calls:
        for tensor, version, base in call.written:
            if version is not None:
                target = tensor if base is None else base
                written.setdefault(id(target), (target, []))[1].append((call, version))
    return list(written.values())


def _fit(
    lineage: Lineage, target: Ref, writes: Sequence[tuple[Call, int]], complaint: Complaint
) -> ModifiedTensor | None:
    between = [item for item in writes if complaint.saved <= item[1] < complaint.found]
    if [version for _, version in between] != list(range(complaint.saved, complaint.found)):
        return None
    earlier = [call for call in lineage.calls if call.seq < between[0][0].seq]
    aliases = _aliases(earlier, target)
    fitting = [
        alias
        for alias in aliases
        if lineage.meta_of(alias) == (complaint.shape, complaint.dtype)
        and (
            _is_result_of(_maker(earlier, alias), complaint.made_by)
            or (complaint.made_by is None and _has_no_node(alias, complaint))
            # A saved input is said to come from its newest node: that of a write.
            or any(is_node_of(complaint.made_by or "", call.facts.name) for call, _ in between)
        )
    ]
    if not fitting:
        return None
    maker = _maker(earlier, fitting[0])
    readers = _readers(earlier, aliases)
    if complaint.made_by is None and maker and not readers and not _has_brief(earlier, maker):
        return None  # nothing has read it: a new parameter that got its first values
    savers = _savers(earlier, maker, readers, complaint)
    return ModifiedTensor(
        made_by=None if maker is None else describe_step(maker, lineage.reader),
        written_by=tuple(describe_step(call, lineage.reader) for call, _ in between),
        read_by=tuple(describe_step(call, lineage.reader) for call in readers),
        saved_by=tuple(describe_step(call, lineage.reader) for call in savers),
        saved_at=_one_place(savers),
        is_parameter=any(map(_is_parameter, fitting)),
        written_within=calling_module(between[-1][0].site),
    )


def _readers(earlier: Sequence[Call], aliases: Sequence[Ref]) -> list[Call]:
    """Return the calls that read a tensor, or a view of it, and can have saved it."""
    return [
        call
        for call in earlier
        if not call.facts.is_view
        and call.facts.name not in _SAVING_NOTHING
        and _reads(call, aliases)
        and not any(item is alias for item in call.outputs for alias in aliases)
    ]


def _is_parameter(tensor: Ref) -> bool:
    living = tensor()
    return living is not None and living.is_leaf and living.requires_grad


def _savers(
    earlier: Sequence[Call], maker: Call | None, readers: Sequence[Call], complaint: Complaint
) -> list[Call]:
    """Return the calls of which one saved the tensor.

    None where others may have: a tensor that was made before the recording may have been saved
    before it too, and what a backward pass read was not noted.
    """
    if maker is None or _has_brief(earlier, maker):
        return []
    # Autograd names the maker when it is a result that was saved, or when no write has a node.
    is_result = is_node_of(complaint.made_by or "", maker.facts.name)
    keeps = not maker.facts.is_view and maker.facts.name not in _SAVING_NOTHING
    return [*([maker] if is_result and keeps else []), *readers]


def _one_place(calls: Sequence[Call]) -> tuple[StackEntry, ...]:
    """Return the user's lines of some calls where all have the same."""
    places = [entries_of(call.site) for call in calls]
    return tuple(places[0]) if places and all(item == places[0] for item in places) else ()


def _has_brief(earlier: Sequence[Call], maker: Call) -> bool:
    """Return whether a call since then was recorded without what it read."""
    return any(call.is_brief and call.seq > maker.seq for call in earlier)


def _aliases(earlier: Sequence[Call], target: Ref) -> list[Ref]:
    """Return a tensor and the recorded views of it."""
    found = [target]
    for call in earlier:
        if call.facts.is_view and _reads(call, found):
            found += call.outputs
    return found


def _reads(call: Call, tensors: Sequence[Ref]) -> bool:
    return any(item is tensor for item in call.inputs for tensor in tensors)


def _maker(calls: Sequence[Call], tensor: Ref) -> Call | None:
    for call in calls:
        if not call.facts.is_in_place and any(item is tensor for item in call.outputs):
            return call
    return None


def _has_no_node(tensor: Ref, complaint: Complaint) -> bool:
    """Return whether a tensor certainly is the result of no autograd node: a mask, an index."""
    if not complaint.dtype.is_floating_point and not complaint.dtype.is_complex:
        return True
    living = tensor()
    return living is not None and not living.requires_grad


def _is_result_of(maker: Call | None, node_name: str | None) -> bool:
    """Return whether a node of this name can belong to the call that made a tensor."""
    if node_name is not None and is_node_of(node_name, "aten::as_strided"):
        # A view whose base was written to meanwhile: autograd has rebuilt its history.
        return maker is not None and maker.facts.is_view
    if node_name is None:
        return maker is None or maker.facts.name in FROM_PYTHON or not maker.inputs
    return maker is not None and is_node_of(node_name, maker.facts.name)
