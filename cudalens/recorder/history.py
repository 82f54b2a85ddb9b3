"""The recorded calls as a list to read, and the forward call behind an autograd node."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cudalens.core.report_types import HistoryEntry
from cudalens.recorder.ops import Call, is_node_of, short_meta
from cudalens.recorder.sites import Site, SiteReader, entries_of, phase_of, shared_site
from cudalens.recorder.tensor_refs import Ref
from cudalens.source.stack import StackEntry


@dataclass(frozen=True)
class BackwardPass:
    """A recorded backward pass."""

    site: Site
    """The place that its calls share."""
    first: Call
    last: Call


class Snapshot:
    """The recorded calls at one moment, and what was worked out of them so far.

    A report asks for the forward call of each of some sixty nodes.
    """

    def __init__(self, calls: Sequence[Call], *, is_complete: bool, first_number: int = 0) -> None:
        self.calls = calls
        self.reader = SiteReader()
        self._is_complete = is_complete
        self._first_number = first_number

    def history(self, limit: int) -> tuple[HistoryEntry, ...]:
        """Describe the last ``limit`` calls, oldest first."""
        metas = known_metas(self.calls)
        return tuple(
            HistoryEntry(
                seq=call.seq,
                op=call.facts.full_name,
                shapes=_shapes(call, metas),
                source=self.reader.line(call.site),
                module_path=(module := self.reader.module(call.site)).path,
                module_type=module.type_name,
                phase=phase_of(call.site),
            )
            for call in (self.calls[-limit:] if limit > 0 else ())
        )

    def module_roots(self) -> dict[str, set[int]]:
        """Return for each module path the ``id`` of each module that it is below."""
        shared = {id(site): site for site in (shared_site(call.site) for call in self.calls)}
        found: dict[str, set[int]] = {}
        for site in shared.values():
            module = self.reader.module(site)
            if module.path is not None:
                found.setdefault(module.path, set()).add(id(module.root))
        return found

    def forward_call(self, sequence_nr: int, node_name: str | None) -> Call | None:
        """Find the call that created the autograd node with this sequence number.

        Autograd draws the number before it runs the op, so the call is the first one that saw
        the counter one further.  ``None`` when that is not certain: the first such call may have
        left the ring, two threads may have drawn the same number, or the op is not the node's.
        A node from before the recording has none: an op that draws no number sees its counter too.
        """
        if sequence_nr < self._first_number:
            return None
        found = self._by_number.get(sequence_nr + 1)
        if found is None or (found[0] is self._forward[0] and not self._is_complete):
            return None
        first = found[0]
        if node_name is not None and not _may_create(first, node_name):
            return None
        if not self._is_in_order and any(call.site != first.site for call in found):
            return None
        return first

    @functools.cached_property
    def earlier_passes(self) -> list[BackwardPass]:
        """Return the backward passes, without the newest where that may be the one that failed."""
        passes: dict[int, BackwardPass] = {}
        for call in self.calls:
            site = _pass_of(call)
            if site is not None:
                known = passes.get(id(site))
                passes[id(site)] = BackwardPass(site, call if known is None else known.first, call)
        found = list(passes.values())
        # The failing pass ends the recording, unless it failed before its first op.
        return found[:-1] if found and found[-1].last is self.calls[-1] else found

    @functools.cached_property
    def _forward(self) -> list[Call]:
        # A thread of autograd's counts for itself; what it writes in place is noted in full.
        return [call for call in self.calls if not call.is_brief and not _is_of_worker(call)]

    @functools.cached_property
    def _by_number(self) -> dict[int, list[Call]]:
        found: dict[int, list[Call]] = {}
        for call in self._forward:
            found.setdefault(call.sequence_nr, []).append(call)
        return found

    @functools.cached_property
    def _is_in_order(self) -> bool:
        """Whether the numbers only grow, as they do when one thread draws them."""
        return all(
            left.sequence_nr <= right.sequence_nr
            for left, right in itertools.pairwise(self._forward)
        )


def _pass_of(call: Call) -> Site | None:
    site = shared_site(call.site)
    found = None
    while site is not None:
        # A thread of autograd's has a place for each of its calls, named after the node.
        if site.phase == "backward" and site.node is None and site.module is None:
            found = site
        site = site.outer
    return found


def _is_of_worker(call: Call) -> bool:
    site = shared_site(call.site)
    return site is not None and site.node is not None


def _may_create(call: Call, node_name: str) -> bool:
    if is_node_of(node_name, call.facts.name):
        return True
    stem = node_name.rpartition("::")[2]
    # A custom Function's node has the name of its class; the ops inside belong to no other node.
    return not stem[-1:].isdigit() and stem.endswith("Backward")


def known_metas(calls: Iterable[Call]) -> dict[int, tuple[Any, Any]]:
    """Map references to what was noted of their tensors, for those that are dead by now."""
    known: dict[int, tuple[Any, Any]] = {}
    for call in calls:
        for item, meta in zip(call.outputs, call.metas, strict=True):
            if meta[0] is not None:
                known[id(item)] = meta
    return known


def _shapes(call: Call, metas: dict[int, tuple[Any, Any]]) -> str:
    def text(tensor: Ref) -> str:
        living = tensor()
        try:
            if living is not None:
                return short_meta(living.shape, living.dtype)
        except RuntimeError:  # nested tensors have no shape
            return "?"
        return short_meta(*metas.get(id(tensor), (None, None)))

    inputs = ", ".join(map(text, call.inputs))
    outputs = ", ".join(map(text, call.outputs))
    return f"{inputs} -> {outputs}".strip()


# --- which recorded backward pass freed a part of the graph, and what leads back into it ----------


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


def is_of_earlier_graph(snapshot: Snapshot, node: Any) -> bool:
    """Return whether a node was made before an earlier pass: the failing one has not freed it.

    What the failing pass has run through, it has freed as well.
    """
    call = _maker(snapshot, node)
    return call is not None and any(item.first.seq > call.seq for item in snapshot.earlier_passes)


def find_freed(snapshot: Snapshot, way: Sequence[Any]) -> FreedPart | None:
    """Return how a way came to lead into a freed part; ``None`` if its last call is not known.

    Args:
        way: autograd's nodes, from the one that backward was asked of to the freed one.
    """
    calls = [_maker(snapshot, node) for node in way]
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


def _maker(snapshot: Snapshot, node: Any) -> Call | None:
    return snapshot.forward_call(int(node._sequence_nr()), str(node.name()))
