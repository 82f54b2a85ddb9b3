"""What a block hands on to the next: the calls behind tensors that are still alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cudalens.recorder._torch import on_host
from cudalens.recorder.calls import Recorded
from cudalens.recorder.earlier_calls import (
    GIVING,
    SHARING,
    EarlierCalls,
    LastVersion,
    UnseenChange,
    files_of,
    note_change,
    state_of,
    version_or_none,
)
from cudalens.recorder.history import Snapshot

MAX_CALLS = 4096
"""How many calls of earlier blocks are kept, the newest: the default size of the ring."""


def handed_on(snapshot: Snapshot, ended: int, is_sharing_lost: bool = False) -> EarlierCalls:
    """Return what the next block may rely on.

    Args:
        ended: number of the last call.
        is_sharing_lost: whether a call that left the ring may have shared memory with code outside
            torch.
    """
    calls = [*snapshot.earlier.calls, *snapshot.calls]
    changes = dict(snapshot.changes)
    snapshot.earlier.note_edits(changes)
    kept, needed = _kept(calls, snapshot, changes)
    shared = dict(snapshot.earlier.shared)
    tensors = {id(item): item for call in kept for item in (*call.inputs, *call.results)}
    # Tensors that calls have shared with code outside torch, and their bases: a view may be gone.
    for call in snapshot.calls:
        is_given = call.api.stem in GIVING
        for item in (*call.inputs, *call.outputs) if call.api.stem in SHARING else ():
            for whole in (item, snapshot.whole(item)):
                if (living := whole()) is not None and (is_given or on_host(living)):
                    shared[id(whole)] = whole
    # Host tensors that may be shared: no recorded call has made them, or a call that left the ring
    # may have shared them.
    for item in tensors.values():
        living = item()
        if living is not None and on_host(living):
            is_unmade = not snapshot.is_made(snapshot.whole(item))
            if is_sharing_lost or is_unmade:
                shared[id(item)] = item
    shared = {key: item for key, item in shared.items() if item() is not None}
    # From here on they may change without a new version, so nothing before counts as their origin.
    for item in shared.values():
        note_change(changes, item, ended)
        note_change(changes, snapshot.whole(item), ended)
    versions, batches = [], snapshot.batches.living()
    tensors |= {id(item): item for batch in batches for item in batch.tensors}
    for item in tensors.values():
        if (living := item()) is not None:
            if (version := version_or_none(living)) is None:
                note_change(changes, item, ended)
            else:
                versions.append(LastVersion(item, snapshot.whole(item), version))
    return EarlierCalls(
        calls=[call._replace(seq=call.seq - ended) for call in kept],
        batches=[replace(it, seq=it.seq - ended) for it in batches],
        changes={
            key: UnseenChange(item, first - ended, last - ended)
            for key, (item, first, last) in changes.items()
            # A freed tensor may be an input of a kept call. The search for an origin must still
            # stop where it was changed.
            if key in needed or item() is not None
        },
        versions=versions,
        shared=shared,
        files={name: state_of(name) for name in files_of(kept)},
    )


def _kept(
    calls: Sequence[Recorded], snapshot: Snapshot, changes: dict[int, UnseenChange]
) -> tuple[list[Recorded], set[int]]:
    """Return the calls that led to living tensors, and the ``id`` of each tensor on the way.

    Optimizer steps and updates of running statistics are left out: through them, every call of a
    training loop would lead to the parameters.  Their writes count as unseen changes.
    """
    wholes = snapshot.whole
    needed = {
        id(whole)
        for call in calls
        for item in call.results
        if item() is not None
        for whole in (item, wholes(item))
    }
    kept: list[Recorded] = []
    # Newest first, since what a kept call has read is needed in turn.
    for call in reversed(calls):
        results = call.results
        if not any(id(item) in needed or id(wholes(item)) in needed for item in results):
            continue
        is_by_side = (
            bool(call.written)
            and not call.api.is_in_place
            and not any(id(it) in needed for it in call.outputs)
        )
        if call.reads is None or is_by_side:
            for item in results:
                note_change(changes, item, call.seq)
            continue
        kept.append(call)
        needed.update(id(whole) for item in call.inputs for whole in (item, wholes(item)))
        if len(kept) == MAX_CALLS:
            break
    return kept[::-1], needed
