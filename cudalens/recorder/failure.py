"""What is kept of the op that was running when an exception came."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cudalens.core._torch import is_plain, meta_of
from cudalens.core.report_types import Argument, Phase
from cudalens.recorder import _torch
from cudalens.recorder.hostcopies import without_tensors
from cudalens.recorder.ops import OpFacts
from cudalens.recorder.sites import RawSite, entries_of, phase_of, shared_site
from cudalens.source.stack import StackEntry

_MAX_TEXT = 80


@dataclass(frozen=True, kw_only=True)
class OpRecord:
    """An op that did not come back, described from host memory alone."""

    name: str
    overload: str | None
    phase: Phase
    entries: tuple[StackEntry, ...]
    """The user's lines that led to the op, outermost first."""
    module_path: str | None
    arguments: tuple[Argument, ...]
    host_copies: dict[str, Tensor] = field(default_factory=dict)
    """Arguments copied to the host before the call, by schema name; only for extensions' ops."""
    call: dict[str, Any] | None = None
    """What such an op was given, by schema name, with the metadata of its tensors in their places;
    ``None`` where something else was among it, which cannot be kept."""
    node_name: str | None = None
    """The autograd node that was running, in a backward pass."""
    node_sequence_nr: int | None = None
    """Its sequence number, which leads to the forward call."""
    previous_op: str | None = None
    """An extension's op that finished just before, unwatched, and may have caused the error."""


_MARK = "__cudalens_op__"
"""An attribute of an exception, to recognise it without keeping it, and its frames, alive: its
``id`` may be that of a later one."""


class Failures:
    """The last failure of each thread."""

    def __init__(self) -> None:
        self._by_thread: dict[int, tuple[OpRecord, object]] = {}

    def note(self, record: OpRecord, error: BaseException) -> None:
        """Remember that ``error`` came out of the recorded op."""
        # A check around this one may have met it before; a class may forbid attributes.
        mark = error.__dict__.setdefault(_MARK, object())
        # Inserted anew, so that the newest is last.
        self._by_thread.pop(threading.get_ident(), None)
        self._by_thread[threading.get_ident()] = (record, mark)

    def find(self, error: BaseException) -> OpRecord | None:
        """Return the record of the op that raised ``error``."""
        own = error.__dict__.get(_MARK)
        failures = reversed(list(self._by_thread.values()))
        return next((record for record, mark in failures if mark is own), None)


def describe_failure(
    facts: OpFacts,
    arguments: dict[str, Any],
    site: RawSite,
    *,
    module_path: str | None,
    host_copies: dict[str, Tensor],
    previous_op: str | None,
) -> OpRecord:
    """Describe an op that did not come back; no value on a device is read."""
    node = _torch.current_node()
    shared = shared_site(site)
    known = shared.node if shared is not None else None
    return OpRecord(
        name=facts.name,
        overload=facts.overload,
        phase="backward" if node is not None else phase_of(site),
        entries=tuple(entries_of(site)),
        module_path=module_path,
        arguments=tuple(_argument(name, value) for name, value in arguments.items()),
        host_copies=host_copies,
        call=without_tensors(arguments) if host_copies else None,
        node_name=type(node).__name__ if node is not None else known and known[0],
        node_sequence_nr=node._sequence_nr() if node is not None else known and known[1],
        previous_op=previous_op,
    )


def _argument(name: str, value: Any) -> Argument:
    if isinstance(value, Tensor):
        if not is_plain(value):
            return Argument(name=name, text=type(value).__name__)
        return Argument(name=name, tensors=(meta_of(value),))
    if isinstance(value, (list, tuple)):
        found = {place: item for place, item in enumerate(value) if isinstance(item, Tensor)}
        plain = {place: meta_of(item) for place, item in found.items() if is_plain(item)}
        if plain:
            return Argument(name=name, tensors=tuple(plain.values()), places=tuple(plain))
    return Argument(name=name, text=str(value)[:_MAX_TEXT])
