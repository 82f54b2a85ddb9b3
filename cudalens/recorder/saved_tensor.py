"""Who wrote over a tensor that autograd had saved."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from torch import nn

from cudalens.core.report_types import ProvenanceStep
from cudalens.recorder.calls import Recorded, Write
from cudalens.recorder.history import Snapshot
from cudalens.recorder.provenance import describe_step
from cudalens.recorder.sites import calling_module, entries_of
from cudalens.recorder.tensor_refs import Ref
from cudalens.source.stack import StackEntry

_COMPLAINT: Final = re.compile(
    r"modified by an inplace operation: \[[\w.]+ \[(?P<shape>[\d, ]*)\]\].*"
    r" is at version (?P<found>\d+); expected version (?P<saved>\d+)"
)


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


def find_modified(
    snapshot: Snapshot, message: str, saver: Recorded | None
) -> ModifiedTensor | None:
    """Find the tensor that autograd complains of, and who wrote to it.

    A tensor fits when the call that saved it, where that is known, had it, when it or a view of it
    has as many elements as the message says, and when recorded writes lead from the saved version
    to the found one without a gap.

    Args:
        message: "… has been modified by an inplace operation: …".
        saver: the forward call of the node that complains.

    Returns:
        ``None`` unless exactly one tensor fits, or one line wrote to all that do.
    """
    match = _COMPLAINT.search(message)
    if match is None:
        return None
    count = math.prod(int(size) for size in match["shape"].split(",") if size.strip())
    between = partial(
        _between, saved=int(match["saved"]), now=int(match["found"]), since=saver and saver.seq
    )
    fitting = []
    for target in snapshot.written_tensors():
        writes = snapshot.writes_to(target)
        views = [write.tensor for _, write in writes] if saver is None else _tensors_of(saver)
        views = [item for item in views if snapshot.whole(item) is target]
        shapes = [snapshot.meta_of(item)[0] for item in (target, *views)]
        is_alike = any(shape is not None and math.prod(shape) == count for shape in shapes)
        if views and is_alike and (calls := between(writes)):
            fitting.append(_describe(snapshot, target, calls, saver))
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


def _tensors_of(call: Recorded) -> list[Ref]:
    return [*call.inputs, *call.outputs]


def _between(
    writes: Sequence[tuple[Recorded, Write]], saved: int, now: int, since: int | None
) -> list[Recorded]:
    """Return the writes from the saved version to the present one, none where one is missing.

    Args:
        since: the number of the call that saved the tensor, where it is known.
    """
    version, calls = saved, list[Recorded]()
    for call, item in writes:
        if item.before is None or call.seq <= (since or 0):
            continue
        if item.before <= version < item.after:
            calls.append(call)
            version = item.after
    return calls if version >= now else []


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
