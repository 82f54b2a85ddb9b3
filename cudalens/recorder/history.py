"""The recorded calls as a list to read, and the forward call behind an autograd node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cudalens.facts import HistoryEntry
from cudalens.recorder.ops import Call, Ref, is_node_of, short_meta
from cudalens.recorder.sites import SiteReader, entries_of, phase_of
from cudalens.source import StackEntry


def history(calls: Sequence[Call], limit: int) -> tuple[HistoryEntry, ...]:
    """Describe the last ``limit`` calls, oldest first."""
    reader = SiteReader()
    metas = _known_metas(calls)
    return tuple(
        HistoryEntry(
            seq=call.seq,
            op=call.facts.full_name,
            shapes=_shapes(call, metas),
            source=reader.line(call.site),
            module_path=reader.module_path(call.site),
            phase=phase_of(call.site),
        )
        for call in (calls[-limit:] if limit > 0 else ())
    )


def _known_metas(calls: Iterable[Call]) -> dict[int, tuple[Any, Any]]:
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
    if call.is_brief:
        return f"-> {outputs}"
    return f"{inputs} -> {outputs}" if inputs else f"-> {outputs}"


def forward_call(
    calls: Sequence[Call], sequence_nr: int, node_name: str | None, *, is_complete: bool
) -> Call | None:
    """Find the call that created the autograd node with this sequence number.

    Autograd draws the number before it runs the op, so the call is the first one that saw the
    counter one further.  ``None`` when that is not certain: the first such call may have left the
    ring, two threads may have drawn the same number, or the op is not the node's.
    """
    forward = [call for call in calls if not call.is_brief]
    found = [call for call in forward if call.sequence_nr == sequence_nr + 1]
    if not found or (found[0] is forward[0] and not is_complete):
        return None
    first = found[0]
    if node_name is not None and not _may_create(first, node_name):
        return None
    numbers = [call.sequence_nr for call in forward]
    if numbers != sorted(numbers) and any(call.site != first.site for call in found):
        return None
    return first


def _may_create(call: Call, node_name: str) -> bool:
    if is_node_of(node_name, call.facts.name):
        return True
    stem = node_name.rpartition("::")[2]
    # A custom Function's node has the name of its class; the ops inside belong to no other node.
    return not stem[-1:].isdigit() and stem.endswith("Backward")


def forward_site(call: Call) -> tuple[list[StackEntry], str | None]:
    """Give the user's lines that led to a call, outermost first, and the module's path."""
    return entries_of(call.site), SiteReader().module_path(call.site)
