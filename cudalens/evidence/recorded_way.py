"""The recorded calls behind a tensor: what cut it off its graph, or took its batch dimension.

No value is read: the calls have shapes, and the numbers of the autograd nodes that they made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from weakref import ref

from torch import Tensor, nn

from cudalens.core._torch import no_dispatch_modes, plain_torch
from cudalens.core.evidence_types import GraphCut, LostDimension
from cudalens.core.report_types import LineRef
from cudalens.recorder.calls import Recorded
from cudalens.recorder.history import Snapshot
from cudalens.recorder.tensor_refs import Ref

_MAX_CALLS = 500
"""Calls that are looked at."""
_CUTTING = frozenset({"detach", "detach_", "data"})


def _walk(
    tensors: Iterable[Ref],
    snapshot: Snapshot,
    visit: Callable[[Ref, Recorded | None], Iterable[Ref]],
) -> None:
    """Go from tensors to the calls that made them, nearest first, and on to what those read.

    Args:
        visit: is given a tensor and its maker, and returns the inputs to go on with.  Data has no
            maker, and neither has what is older than the recording.
    """
    waiting: list[tuple[Ref, int | None]] = [(item, None) for item in tensors]
    seen: set[tuple[int, int]] = set()
    for tensor, before in waiting:
        call = snapshot.newest(tensor, before)
        key = (id(tensor), -1 if call is None else call.seq)
        if key in seen:
            continue
        seen.add(key)
        inputs = visit(tensor, call)
        if len(seen) == _MAX_CALLS:
            return
        waiting += [(item, call.seq) for item in inputs if call is not None]


def graph_cut(tensor: Tensor, snapshot: Snapshot) -> GraphCut | None:
    """Return the line that cut a tensor without a graph off the graph that it is made of.

    ``None`` where several lines did, and where a frozen parameter may be the reason, or a tensor
    that is gone and that no recorded call made.
    """
    cuts: dict[LineRef | None, str] = {}
    unclear: list[Ref] = []

    def visit(current: Ref, call: Recorded | None) -> list[Ref]:
        living = current()
        if call is None:
            is_frozen = isinstance(living, nn.Parameter) and not living.requires_grad
            unclear.extend([current] * (is_frozen or living is None))
            return []
        # Of what has a graph, a call that gives a float beside it has read the size only.
        graphs = [_is_of_graph(item, call.seq, snapshot) for item in call.inputs]
        if any(graphs) and (call.api.stem in _CUTTING or not _is_float(current, snapshot)):
            cuts[snapshot.reader.line(call.site)] = call.api.stem
        return [item for item, has_graph in zip(call.inputs, graphs, strict=True) if not has_graph]

    with plain_torch(), no_dispatch_modes():
        _walk([ref(tensor)], snapshot, visit)
    ((line, op), *more) = cuts.items() or ((None, ""),)
    return None if line is None or more or unclear else GraphCut(op=op, line=line)


def _is_float(tensor: Ref, snapshot: Snapshot) -> bool:
    dtype = snapshot.meta_of(tensor)[1]
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)


def _is_of_graph(tensor: Ref, before: int, snapshot: Snapshot) -> bool:
    """Return whether a tensor had a graph, or required grad, when call ``before`` read it."""
    call, living = snapshot.newest(tensor, before), tensor()
    if call is not None:
        return call.last_nr > call.first_nr and _is_float(tensor, snapshot)
    return living is not None and living.requires_grad


def lost_dimension(tensors: Iterable[Tensor], snapshot: Snapshot) -> LostDimension | None:
    """Return the ``squeeze`` behind tensors that took the dimension of a batch of one away.

    It is one where an earlier call of its line had a larger batch, and left its dimension.
    """
    lost: list[LostDimension] = []

    def visit(current: Ref, call: Recorded | None) -> Sequence[Ref]:
        if call is None or lost:
            return ()
        if call.api.stem.strip("_") == "squeeze":
            lost.extend(_lost_by(call, snapshot))
        return call.inputs

    with plain_torch(), no_dispatch_modes():
        _walk(map(ref, tensors), snapshot, visit)
    return next(iter(lost), None)


def _lost_by(call: Recorded, snapshot: Snapshot) -> Iterator[LostDimension]:
    line, (old, new) = snapshot.reader.line(call.site), _shapes(call, snapshot)
    for other in snapshot.calls if line is not None and old[:1] == (1,) else ():
        if other.seq >= call.seq or other.api.func is not call.api.func:
            continue
        whole, result = _shapes(other, snapshot)
        is_alike = whole[1:] == old[1:] and len(result) == len(new) + 1 and result[:1] == whole[:1]
        if line and is_alike and snapshot.reader.line(other.site) == line:
            yield LostDimension(line=line, before=old, after=new, earlier=(whole, result))
            return


def _shapes(call: Recorded, snapshot: Snapshot) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the argument and the result; empty where they are not known."""
    shapes = (*map(snapshot.meta_of, call.inputs[:1]), *call.metas)[:2]
    old, new = (tuple(item[0] or ()) for item in shapes)
    return old, new
