"""Read access to recorded calls: their history, and which calls made or wrote to a tensor.

A tensor is identified by its weak reference, which stays unique after the tensor has died.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any
from weakref import ref

from torch.nn import Parameter

from cudalens.core._torch import base_of
from cudalens.core.call import ApiCall
from cudalens.core.report_types import HistoryEntry
from cudalens.recorder.calls import Recorded, Write, meta_of
from cudalens.recorder.dataloader import Batches
from cudalens.recorder.earlier_calls import (
    GIVING,
    EarlierCalls,
    UnseenChange,
    note_change,
    version_or_none,
)
from cudalens.recorder.places import address_of
from cudalens.recorder.sites import RawSite, SiteReader, phase_of, shared_site
from cudalens.recorder.tensor_refs import Ref

_LONG = re.compile(r"^torch\.(?:(b?f|u|i|c)(?:loat|int|nt|omplex))?")


class Snapshot:
    """The recorded calls at one moment, with lookup tables that are built once, on first use.

    A report asks for the forward call of each of some sixty nodes.

    Args:
        calls: the calls of the running block.
        earlier: the calls that earlier blocks have handed on, searched as well.
        changes: unrecorded changes of tensors.
    """

    def __init__(
        self,
        calls: Sequence[Recorded],
        batches: Batches,
        earlier: EarlierCalls,
        changes: dict[int, UnseenChange],
    ) -> None:
        self.calls = calls
        self.batches = batches
        self.earlier, self.changes = earlier, changes
        self.reader = SiteReader()

    def history(self, limit: int) -> tuple[HistoryEntry, ...]:
        """Describe the last ``limit`` calls, oldest first."""
        return tuple(
            HistoryEntry(
                seq=call.seq,
                op=call.name,
                shapes=self._shapes(call),
                source=self.reader.line(call.site),
                module_path=(module := self.reader.module(call.site)).path,
                module_type=module.type_name,
                phase="backward" if call.api.is_backward else phase_of(call.site),
            )
            for call in (self.calls[-limit:] if limit > 0 else ())
        )

    def _shapes(self, call: Recorded) -> str:
        """Return ``f32[32, 10] -> f32[]``, with ``?`` for a tensor of unknown shape."""

        def text(tensors: Sequence[Ref]) -> str:
            metas = [self.meta_of(item) for item in tensors]
            return ", ".join(
                "?" if shape is None else _LONG.sub(r"\1", str(dtype)) + str(list(shape))
                for shape, dtype in metas
            )

        return f"{text(call.inputs)} -> {text(call.outputs)}".strip()

    def module_roots(self) -> dict[str, set[int]]:
        """Return, for each module path, the ``id`` of every root module that has it."""
        shared = {id(site): site for site in (shared_site(call.site) for call in self.calls)}
        roots: dict[str, set[int]] = {}
        for site in shared.values():
            module = self.reader.module(site)
            if module.path is not None:
                roots.setdefault(module.path, set()).add(id(module.root))
        return roots

    def forward_call(self, number: int) -> Recorded | None:
        """Return the call that made the autograd node with a sequence number.

        ``None`` for a node from before the recording, and for a call that left the ring.
        """
        return self._makers.get(number)

    @cached_property
    def _makers(self) -> dict[int, Recorded]:
        # Newest first, so that a call inside a backward pass overwrites the pass: it is recorded
        # before the pass, and the range of the pass contains its own.
        makers: dict[int, Recorded] = {}
        for call in reversed(self.calls):
            makers.update(dict.fromkeys(range(call.first_nr, call.last_nr), call))
        return makers

    @cached_property
    def earlier_passes(self) -> list[tuple[int, Recorded]]:
        """Return the finished backward passes, each with the number of its first call."""
        passes, before = [], 0
        for call in self.calls:
            is_inside = phase_of(call.site) == "backward"
            if call.api.is_backward:
                # A pass is recorded when it ends, behind the calls that ran inside it.
                passes.append((call.seq if is_inside else before + 1, call))
            if not is_inside:
                before = call.seq
        return passes

    def other_functions(self, call: ApiCall) -> tuple[str, ...]:
        """Return the names of other functions that the instruction of a failed call has called.

        ``loss_fn(...)`` may be another loss in another iteration, or in another instance.
        """
        place = (call.code, call.lasti)
        named = (
            item.name
            for item in self.calls
            if type(item.site) is tuple
            and item.site[:2] == place
            and item.api.func is not call.func
        )
        return tuple(dict.fromkeys(named))

    def calls_of_line(self, call: ApiCall) -> int:
        """Return how often the line of a failed call has called its function, in its module."""
        place = _line_and_module(call.site)
        same = (it for it in self.calls if it.api.func is call.func)
        return sum(_line_and_module(item.site) == place for item in same)

    # --- who made a tensor, and wrote to it ------------------------------------------------------

    def meta_of(self, tensor: Ref) -> tuple[Any, Any]:
        """Return shape and dtype of a tensor, also of a freed one that a recorded call returned."""
        living = tensor()
        if living is not None:
            return meta_of(living)
        return self._index.metas.get(id(tensor), (None, None))

    def newest(self, tensor: Ref, before: int | None = None) -> Recorded | None:
        """Return the last call that made a tensor or may have written to it, or to its base."""
        made = self._index.made.get(id(tensor), ())
        calls = (*made, *(call for call, _ in self.writes_to(tensor)))
        earlier = [call for call in calls if before is None or call.seq < before]
        return self._if_last(tensor, max(earlier, key=lambda call: call.seq, default=None), before)

    def maker(self, tensor: Ref, before: int | None = None) -> Recorded | None:
        """Return the last call that returned a tensor."""
        calls = self._index.made.get(id(tensor), ())
        earlier = (it for it in reversed(calls) if before is None or it.seq < before)
        return self._if_last(tensor, next(earlier, None), before)

    def _if_last(self, tensor: Ref, call: Recorded | None, before: int | None) -> Recorded | None:
        """Return a call, unless its tensor may have changed unrecorded after it."""
        is_hidden = call is not None and self.is_hidden(tensor, call.seq, before)
        return None if is_hidden else call

    def is_hidden(self, tensor: Ref, seq: int, before: int | None) -> bool:
        """Return whether a tensor may have changed unrecorded between two calls.

        Args:
            seq: number of the older call.
            before: number of the newer call, ``None`` for now.
        """
        changes = self._changes_of(tensor)
        return any(seq <= it.last and (before is None or it.first < before) for it in changes)

    def _changes_of(self, tensor: Ref) -> list[UnseenChange]:
        keys = {id(tensor), id(self.whole(tensor))}
        tables = (self.changes, self._shared)
        return [table[key] for table in tables for key in keys if key in table]

    @cached_property
    def _shared(self) -> dict[int, UnseenChange]:
        """Possible changes of tensors that share memory without a recorded call that shows it.

        No mode sees ``y.set_(x)`` or ``to_dlpack(x)``, after which each tensor has a version
        counter of its own.
        """
        owners: dict[int, dict[int, Ref]] = {}
        changes: dict[int, UnseenChange] = {}
        last = self.calls[-1].seq if self.calls else 0
        known: set[int] = set()
        for call in (*self.earlier.calls, *self.calls):
            inputs = [self.whole(item) for item in call.inputs]
            given = {_own_address(item) for item in inputs}
            for item in (*inputs, *map(self.whole, call.outputs)):
                if id(item) in known:
                    continue
                known.add(id(item))
                place, is_given = _own_address(item), any(item is it for it in inputs)
                if place is None or (place in given and not is_given):
                    continue  # a view of an input, which shares its version counter
                same = owners.setdefault(place, {})
                same[id(item)] = item
                for owner in same.values() if len(same) > 1 else ():
                    note_change(changes, owner, call.seq)
                    # From that call on it may change at any time.
                    note_change(changes, owner, last)
        return changes

    def is_made(self, tensor: Ref) -> bool:
        """Return whether a recorded call has made a tensor, not only written to it."""
        return any(not call.api.is_in_place for call in self._index.made.get(id(tensor), ()))

    def is_of_data(self, tensor: Ref) -> bool:
        """Return whether a tensor is ``x.data`` or a view of it: x has another version counter."""
        for call in self._index.made.get(id(tensor), ()):
            shown = call.inputs[0] if call.is_alias and call.inputs else tensor
            if call.api.stem == "data" or (shown is not tensor and self.is_of_data(shown)):
                return True
        return False

    def note_unseen_writes(self) -> None:
        """Note tensors that may have changed without a recorded write.

        ``x.data = other`` swaps the memory.  After ``x.numpy()`` an array may write to it.  And a
        version counter beyond the recorded writes shows that another thread has written.
        """
        last = self.calls[-1].seq if self.calls else 0
        for call in self.calls:
            is_given = call.api.stem in GIVING
            if call.inputs and (is_given or (call.api.stem == "data" and not call.outputs)):
                for item in (call.inputs[0], self.whole(call.inputs[0])):
                    note_change(self.changes, item, call.seq)
                    if is_given:
                        note_change(self.changes, item, last)
        for tensor, whole, version in self.earlier.versions:
            if (living := tensor()) is None:
                continue
            now = version_or_none(living)
            writes = (write.after for call, write in self.writes_to(tensor) if call.seq > 0)
            if now is None or now > max(writes, default=version):
                for item in (tensor, whole):
                    note_change(self.changes, item, 0)
                    note_change(self.changes, item, last)

    def writes_to(self, tensor: Ref) -> list[tuple[Recorded, Write]]:
        """Return the writes to a tensor, to its base and to views of it, oldest first."""
        return self._index.writes.get(id(self.whole(tensor)), [])

    def is_untouched(self, tensor: Ref, since: float) -> bool:
        """Return whether provably nothing has written to a tensor since call number ``since``."""
        if any(change.last >= since for change in self._changes_of(tensor)):
            return False
        living = tensor()
        place = None if living is None else address_of(living)
        is_written = place is not None and self._last_writes.get(place, -math.inf) >= since
        return not is_written and not self.has_write(tensor, since)

    def has_write(self, tensor: Ref, since: float) -> bool:
        """Return whether a recorded call wrote to a tensor since call number ``since``."""
        return any(it.seq >= since for it, _ in self.writes_to(tensor))

    @cached_property
    def _last_writes(self) -> dict[int, int]:
        """By storage address, the last call that wrote to it.

        By address, because ``nn.Parameter(x)`` shares the memory of x, and no call shows it.
        """
        last: dict[int, int] = {}
        for call in (*self.earlier.calls, *self.calls):
            for write in call.written:
                living = self.whole(write.target)()
                place = None if living is None else address_of(living)
                if place is not None:
                    last[place] = call.seq
        return last

    def whole(self, tensor: Ref) -> Ref:
        """Return the base of a view, by the recorded calls and by torch; else the tensor itself."""
        return self._index.whole(tensor)

    @cached_property
    def _index(self) -> _Index:
        index = _Index()
        for call in (*self.earlier.calls, *self.calls):
            index.add(call)
        return index


def _line_and_module(site: RawSite) -> tuple[object, ...]:
    shared = shared_site(site)
    module = None if shared is None else shared.module
    if isinstance(site, tuple):
        return (*site[:2], module)
    return (None, 0, module) if shared is None else (shared.code, shared.lasti, module)


def _own_address(tensor: Ref) -> int | None:
    """Return the storage address of a living tensor.

    ``None`` for views and parameters, which share the version counter of their source.
    """
    living = tensor()
    is_own = living is not None and not isinstance(living, Parameter) and base_of(living) is None
    return address_of(living) if is_own and living is not None else None


class _Index:
    """The calls that made or wrote to each tensor, by the ``id`` of its weak reference.

    The calls keep the references alive, so each ``id`` stays unique.
    """

    def __init__(self) -> None:
        self.made: dict[int, list[Recorded]] = {}
        """The calls that returned a tensor."""
        self.metas: dict[int, tuple[Any, Any]] = {}
        """Shape and dtype of a tensor as it was last returned."""
        self.writes: dict[int, list[tuple[Recorded, Write]]] = {}
        """By base, the writes to it and to its views."""
        self.bases: dict[int, Ref] = {}
        """The base of each view: torch keeps none in inference mode."""

    def whole(self, tensor: Ref) -> Ref:
        known = self.bases.get(id(tensor))
        if known is not None:
            return known
        living = tensor()
        base = None if living is None else base_of(living)
        if base is None:
            return tensor
        # The base of a view of ``x.detach()`` is the detached tensor. Only the call leads to x.
        known = ref(base)
        return self.bases.get(id(known), known)

    def add(self, call: Recorded) -> None:
        # Look up bases now: a view from before the recording may be freed by later.
        self._note_bases(call.inputs)
        is_view = call.is_alias or call.api.stem == "data"
        shown = call.inputs[0] if call.inputs and is_view else None
        for item, meta in zip(call.outputs, call.metas, strict=True):
            self.made.setdefault(id(item), []).append(call)
            self.metas[id(item)] = meta
            if shown is not None and item is not shown:
                self.bases[id(item)] = self.whole(shown)
        self._note_bases(call.outputs)
        for write in call.written:
            whole = self.whole(write.target)
            if write.tensor is not whole:
                self.bases.setdefault(id(write.tensor), whole)
            self.writes.setdefault(id(whole), []).append((call, write))

    def _note_bases(self, tensors: Iterable[Ref]) -> None:
        for item in tensors:
            if (whole := self.whole(item)) is not item:
                self.bases[id(item)] = whole
