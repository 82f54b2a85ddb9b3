"""What the recorders of earlier checked blocks know of tensors that still live.

A notebook makes its data in one cell and uses it in the next.  A block that ends hands on the calls
that led to what is alive then, and the next recorder reads them as the calls before its own.  Like
the ring they contain weak references and no tensor.

A tensor may change where nobody records: between two blocks, by an optimizer, through memory that
NumPy shares.  Such a change is noted, and no call before it is taken for the origin of what the
tensor has after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from cudalens.core.torch_functions import Trait, functions
from cudalens.recorder._torch import is_of_inference, version_of
from cudalens.recorder.calls import Recorded
from cudalens.recorder.dataloader import Batch
from cudalens.recorder.sites import codes_of, shared_site
from cudalens.recorder.tensor_refs import Ref

GIVING = functions(Trait.GIVES)
"""Functions after which others can write to the memory of their argument."""
SHARING = GIVING | functions(Trait.SHARES)
"""These, and those whose result others can write to, where it is on the host."""
_HIDING = SHARING | {"data"}
"""These, and the one whose result has versions of its own."""


class UnseenChange(NamedTuple):
    """Changes of a tensor that were not recorded, by the numbers of the calls before them."""

    tensor: Ref
    first: int
    last: int


class LastVersion(NamedTuple):
    """The version that a tensor had when a block ended."""

    tensor: Ref
    whole: Ref
    """The tensor that it is a view of, or itself."""
    version: int


@dataclass
class EarlierCalls:
    """The calls of earlier blocks, all numbered below those of the next one, from 0 downwards."""

    calls: list[Recorded] = field(default_factory=list)
    """Oldest first."""
    batches: list[Batch] = field(default_factory=list)
    changes: dict[int, UnseenChange] = field(default_factory=dict)
    """By the ``id`` of the tensor's reference."""
    versions: list[LastVersion] = field(default_factory=list)
    """Of the tensors that were alive when the last of these blocks ended."""
    shared: dict[int, Ref] = field(default_factory=dict)
    """Tensors whose memory others can write to."""

    files: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    """The files that the calls were made in, each with its size and the time of its change."""

    def note_changes(self) -> None:
        """Note which tensors were written to since the last block; called where one begins."""
        self.note_edits(self.changes)
        for tensor, whole, version in self.versions:
            living = tensor()
            if living is not None and version_or_none(living) != version:
                note_change(self.changes, tensor, 0)
                note_change(self.changes, whole, 0)

    def note_edits(self, changes: dict[int, UnseenChange]) -> None:
        """Hide the calls of files that were edited: their lines are not known any more."""
        edited = {name for name, state in self.files.items() if state_of(name) != state}
        for call in self.calls if edited else ():
            if not edited.isdisjoint(files_of([call])):
                for item in call.results:
                    note_change(changes, item, 0)

    def changes_before(self, ring: Sequence[Recorded], hides: bool) -> dict[int, UnseenChange]:
        """Return all changes, where the first calls of the running block have left the ring.

        Args:
            ring: the calls that are left.
            hides: True if one of the calls that are gone may have changed a tensor without a trace
                in its version.
        """
        changes = dict(self.changes)
        written: dict[int, int | None] = {}
        for write in chain.from_iterable(call.written for call in ring):
            for item in {id(write.tensor), id(write.target)}:
                written.setdefault(item, write.before)
        for tensor, whole, version in self.versions:
            living = tensor()
            now = None if living is None else written.get(id(tensor), version_or_none(living))
            if hides or now != version:
                note_change(changes, tensor, ring[0].seq - 1)
                note_change(changes, whole, ring[0].seq - 1)
        return changes


def note_change(changes: dict[int, UnseenChange], tensor: Ref, seq: int) -> None:
    """Note that a tensor may have changed after call number ``seq``."""
    old = changes.get(id(tensor), UnseenChange(tensor, seq, seq))
    changes[id(tensor)] = UnseenChange(tensor, min(old.first, seq), max(old.last, seq))


def files_of(calls: Iterable[Recorded]) -> set[str]:
    """Return the files that led to calls."""
    sites = [call.site for call in calls]
    shared = {id(site): site for site in map(shared_site, sites)}  # few: one a module or line
    codes = {id(site[0]): site[0] for site in sites if isinstance(site, tuple)}
    codes |= {id(code): code for site in shared.values() for code in codes_of(site)}
    return {code.co_filename for code in codes.values()}


def state_of(filename: str) -> tuple[int, int] | None:
    """Return what is another after a file was edited; ``None`` if it is none, such as a cell."""
    try:
        stat = Path(filename).stat()
    except (OSError, ValueError):
        return None
    return stat.st_size, stat.st_mtime_ns


def hides_changes(stems: Iterable[str]) -> bool:
    """Return whether one of these functions lets a tensor change without a trace in its version."""
    return not _HIDING.isdisjoint(stems)


def shares_memory(stems: Iterable[str]) -> bool:
    """Return whether one of these functions gives memory to others, or has it from them."""
    return not SHARING.isdisjoint(stems)


def version_or_none(tensor: Tensor) -> int | None:
    """Return the version of a tensor, ``None`` in inference mode, where it has none."""
    return None if is_of_inference(tensor) else version_of(tensor)
