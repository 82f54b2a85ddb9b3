"""What a block that has ended hands on to the next: the calls that led to what is alive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from cudalens.recorder._torch import on_host
from cudalens.recorder.calls import Recorded
from cudalens.recorder.earlier_calls import (
    SHARING,
    EarlierCalls,
    UnseenChange,
    note_change,
    version_or_none,
)
from cudalens.recorder.history import Snapshot
from cudalens.recorder.tensor_refs import Ref

MAX_CALLS = 4096
"""So many calls of earlier blocks are kept, the newest: as many as the ring has by default."""


def handed_on(snapshot: Snapshot, ended: int) -> EarlierCalls:
    """Return what a block that has ended hands on to the next.

    Args:
        ended: number of the last call.
    """
    calls = [*snapshot.earlier.calls, *snapshot.calls]
    changes = dict(snapshot.changes)
    kept, needed = _kept(calls, snapshot, changes)
    shared = dict(snapshot.earlier.shared)
    shared.update((id(item), item) for item in _shared_by(snapshot.calls))
    shared = {key: item for key, item in shared.items() if item() is not None}
    for item in shared.values():
        note_change(changes, item, ended)
        note_change(changes, snapshot.whole(item), ended)
    versions, batches = [], snapshot.batches.living()
    tensors = chain(*map(_tensors_of, kept), *(it.tensors for it in batches))
    for item in {id(it): it for it in tensors}.values():
        if (living := item()) is not None:
            if (version := version_or_none(living)) is None:
                note_change(changes, item, ended)
            else:
                versions.append((item, version))
    return EarlierCalls(
        calls=[call._replace(seq=call.seq - ended) for call in kept],
        batches=[replace(it, seq=it.seq - ended) for it in batches],
        changes={
            key: UnseenChange(item, first - ended, last - ended)
            for key, (item, first, last) in changes.items()
            if key in needed or item() is not None
        },
        versions=versions,
        shared=shared,
    )


def _kept(
    calls: Sequence[Recorded], snapshot: Snapshot, changes: dict[int, UnseenChange]
) -> tuple[list[Recorded], set[int]]:
    """Return the calls that led to what is alive, and the ``id`` of each tensor on the way.

    What an optimizer does is not kept, nor the statistics that a layer updates: that would be all
    of a training loop.  Their writes are changes.
    """
    wholes = snapshot.whole
    needed = {
        id(whole)
        for call in calls
        for item in _results_of(call)
        if item() is not None
        for whole in (item, wholes(item))
    }
    kept: list[Recorded] = []
    for call in reversed(calls):
        results = [*_results_of(call)]
        if not any(id(item) in needed or id(wholes(item)) in needed for item in results):
            continue
        is_by_side = not call.api.is_in_place and not any(id(it) in needed for it in call.outputs)
        if call.reads is None or (call.written and is_by_side):
            for item in results:
                note_change(changes, item, call.seq)
            continue
        kept.append(call)
        needed.update(id(whole) for item in call.inputs for whole in (item, wholes(item)))
        if len(kept) == MAX_CALLS:
            break
    return kept[::-1], needed


def _results_of(call: Recorded) -> Iterator[Ref]:
    """Yield the tensors that a call gave back or wrote to."""
    yield from call.outputs
    for write in call.written:
        yield from {write.tensor, write.target} if write.base else (write.tensor,)


def _tensors_of(call: Recorded) -> Iterator[Ref]:
    yield from call.inputs
    yield from _results_of(call)


def _shared_by(calls: Iterable[Recorded]) -> Iterator[Ref]:
    """Yield the living tensors whose memory calls gave to others, or have from them."""
    for call in calls:
        for item in (*call.inputs, *call.outputs) if call.api.stem in SHARING else ():
            if (living := item()) is not None and on_host(living):
                yield item
