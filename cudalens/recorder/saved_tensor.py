"""Who wrote over a tensor that autograd had saved."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import nn

from cudalens.core.report_types import ProvenanceStep
from cudalens.recorder.calls import Recorded, Write
from cudalens.recorder.history import Snapshot
from cudalens.recorder.provenance import describe_step
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
    read_by: ProvenanceStep | None = None
    """The call that saved it, where it read it."""
    saved_by: ProvenanceStep | None = None
    """The call that saved it."""
    saved_at: tuple[StackEntry, ...] = ()
    """The user's lines of the call that saved it, outermost first."""
    is_parameter: bool = False
    """True if it certainly is a leaf that requires grad."""
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


def find_modified(
    snapshot: Snapshot, complaint: Complaint, saver: Recorded | None
) -> ModifiedTensor | None:
    """Find the tensor that autograd complains of, and who wrote to it.

    A tensor fits when the call that saved it, where that is known, had it, when it or a view of it
    has the shape and type of the message, and when recorded writes lead from the saved version to
    the found one without a gap.

    Args:
        saver: the forward call of the node that complains.

    Returns:
        ``None`` unless exactly one tensor fits, or one line wrote to all that do.
    """
    had = None if saver is None else {id(snapshot.whole(item)) for item in _tensors_of(saver)}
    fitting = [
        _describe(snapshot, target, between, saver)
        for target, writes in _writes(snapshot.calls)
        if (had is None or id(target) in had)
        and (between := _between(writes, complaint, 0 if saver is None else saver.seq))
        and _is_alike(snapshot, target, complaint)
    ]
    if len(fitting) == 1:
        return fitting[0]
    if len({tuple(step.source for step in item.written_by) for item in fitting}) != 1:
        return None
    written_by = tuple(map(_of_one_line, zip(*(item.written_by for item in fitting), strict=True)))
    return replace(fitting[0], made_by=None, written_by=written_by, read_by=None)


def _of_one_line(writes: tuple[ProvenanceStep, ...]) -> ProvenanceStep:
    """Return what writes of one line have in common: the function only where all have the same."""
    is_one_op = len({step.op for step in writes}) == 1
    return writes[0] if is_one_op else replace(writes[0], op=None)


def _tensors_of(call: Recorded) -> tuple[Ref, ...]:
    return (*call.inputs, *call.outputs)


def _writes(calls: Sequence[Recorded]) -> list[tuple[Ref, list[tuple[Recorded, Write]]]]:
    """Return each tensor that was written to, by its base when a view was, with the writes."""
    written: dict[int, tuple[Ref, list[tuple[Recorded, Write]]]] = {}
    for call in calls:
        for item in call.written:
            if item.before is not None:
                written.setdefault(id(item.target), (item.target, []))[1].append((call, item))
    return list(written.values())


def _between(
    writes: Sequence[tuple[Recorded, Write]], complaint: Complaint, since: int
) -> list[Recorded]:
    """Return the writes from the saved version to the found one, none where one is missing.

    Args:
        since: the number of the call that saved the tensor, 0 where it is not known.
    """
    version, found = complaint.saved, list[Recorded]()
    for call, item in writes:
        if call.seq > since and item.before is not None and item.before <= version < item.after:
            found.append(call)
            version = item.after
    return found if version >= complaint.found else []


def _is_alike(snapshot: Snapshot, target: Ref, complaint: Complaint) -> bool:
    """Return whether a tensor, or a recorded view of it, is one as autograd complains of."""
    metas = [snapshot.meta_of(item) for item in (target, *snapshot.views_of(target))]
    living = target()
    if complaint.made_by is None and living is not None and living.grad_fn is not None:
        is_float = complaint.dtype.is_floating_point or complaint.dtype.is_complex
        if is_float and not living.is_leaf and living.requires_grad:
            return False
    return any(
        shape is not None
        and dtype == complaint.dtype
        and (tuple(shape) == complaint.shape or math.prod(shape) == math.prod(complaint.shape))
        for shape, dtype in metas
    )


def _describe(
    snapshot: Snapshot, target: Ref, between: Sequence[Recorded], saver: Recorded | None
) -> ModifiedTensor:
    made = snapshot.maker(target)
    living = target()
    is_read = saver is not None and any(snapshot.whole(item) is target for item in saver.inputs)
    step = partial(describe_step, snapshot=snapshot)
    return ModifiedTensor(
        made_by=None if made is None else step(made),
        written_by=tuple(map(step, between)),
        read_by=step(saver) if saver is not None and is_read else None,
        saved_by=None if saver is None else step(saver),
        saved_at=() if saver is None else tuple(entries_of(saver.site)),
        is_parameter=living is not None and living.is_leaf and living.requires_grad,
        written_within=calling_module(between[-1].site),
    )
