"""Which recorded backward pass freed a part of the graph, and which call leads back into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cudalens.recorder.history import Snapshot
from cudalens.recorder.sites import entries_of, phase_of
from cudalens.source.stack import StackEntry

Node = tuple[int, str]
"""Sequence number and name of an autograd node."""


@dataclass(frozen=True, kw_only=True)
class FreedPart:
    """A part of the graph that a backward pass has freed, by the user's lines, outermost first."""

    made: list[StackEntry]
    """Of the call that the freed node belongs to."""
    freed: list[StackEntry]
    """Of the pass; empty where several passes may have done it."""
    read: list[StackEntry]
    """Of the call, after the pass, that leads back into what was made before; empty where no
    recorded call does, or none is certain."""
    source: list[StackEntry] = field(default_factory=list)
    """Of the call whose result that call read."""
    kept: int | None = None
    """The place, on the way to the freed node, of the node whose result that call read."""
    is_made_again: bool = False
    """Whether the line that made that result has run again since."""
    has_stepped: bool = False
    """Whether an optimizer has changed parameters since the pass."""


def is_of_earlier_graph(snapshot: Snapshot, node: Node) -> bool:
    """Tell whether a node was made before an earlier pass: the failing one has not freed it.

    What the failing pass has run through, it has freed as well.
    """
    call = snapshot.forward_call(*node)
    return call is not None and any(item.first.seq > call.seq for item in snapshot.earlier_passes)


def find_freed(snapshot: Snapshot, way: Sequence[Node]) -> FreedPart | None:
    """Tell how a way through the graph came to lead into a freed part.

    Args:
        way: the nodes from the one that backward was asked of to the freed one.

    Returns:
        ``None`` when the freed node's call is not known.
    """
    calls = [snapshot.forward_call(*node) for node in way]
    made = calls[-1]
    if made is None:
        return None
    entries = entries_of(made.site)
    done = [item for item in snapshot.earlier_passes if item.first.seq > made.seq]
    if len(done) != 1:
        return FreedPart(made=entries, freed=[], read=[])
    freeing = done[0]
    after = [item for item in snapshot.calls if item.seq > freeing.last.seq]
    stepped = any(phase_of(item.site) == "optimizer" and item.facts.writes for item in after)
    found = FreedPart(made=entries, freed=entries_of(freeing.site), read=[], has_stepped=stepped)
    kept = next(
        (at for at, call in enumerate(calls) if call is None or call.seq < freeing.first.seq), 0
    )
    reader, source = calls[kept - 1] if kept else None, calls[kept]
    if reader is None or source is None:
        return found
    line = entries_of(source.site)
    return replace(
        found,
        read=entries_of(reader.site),
        source=line,
        kept=kept,
        is_made_again=any(entries_of(item.site) == line for item in after),
    )
