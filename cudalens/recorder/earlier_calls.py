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
"""Functions after which code outside torch can write to their argument's memory, like ``numpy``."""
SHARING = GIVING | functions(Trait.SHARES)
"""These, and functions whose result shares host memory with others, like ``from_numpy``."""
_HIDING = SHARING | {"data"}
"""These, and ``.data``, whose result has a version counter of its own."""


class UnseenChange(NamedTuple):
    """Unrecorded changes of a tensor, the first and the last by the call number before it."""

    tensor: Ref
    first: int
    last: int


class LastVersion(NamedTuple):
    """The version counter of a tensor at the end of a block."""

    tensor: Ref
    whole: Ref
    """Its base if it is a view, else the tensor itself."""
    version: int


@dataclass
class EarlierCalls:
    """The calls of earlier blocks, numbered from 0 downwards: the next block starts at 1."""

    calls: list[Recorded] = field(default_factory=list)
    """Oldest first."""
    batches: list[Batch] = field(default_factory=list)
    changes: dict[int, UnseenChange] = field(default_factory=dict)
    """By the ``id`` of the tensor's reference."""
    versions: list[LastVersion] = field(default_factory=list)
    """For the tensors that were alive when the last of these blocks ended."""
    shared: dict[int, Ref] = field(default_factory=dict)
    """Tensors whose memory code outside torch can write to."""

    files: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    """The files of the calls, each with its size and modification time."""

    def note_changes(self) -> None:
        """Note which tensors have changed since the last block; call it before the next one."""
        self.note_edits(self.changes)
        for tensor, whole, version in self.versions:
            living = tensor()
            if living is not None and version_or_none(living) != version:
                note_change(self.changes, tensor, 0)
                note_change(self.changes, whole, 0)

    def note_edits(self, changes: dict[int, UnseenChange]) -> None:
        """Disown the results of calls in edited files: their lines may show other code now."""
        edited = {name for name, state in self.files.items() if state_of(name) != state}
        for call in self.calls if edited else ():
            if not edited.isdisjoint(files_of([call])):
                for item in call.results:
                    note_change(changes, item, 0)

    def changes_before(self, ring: Sequence[Recorded], hides: bool) -> dict[int, UnseenChange]:
        """Return all changes, for a block whose first calls have left the ring.

        Args:
            ring: the calls that are left.
            hides: whether a call that left it may have changed a tensor without bumping its
                version counter.
        """
        changes = dict(self.changes)
        written: dict[int, int | None] = {}
        for write in chain.from_iterable(call.written for call in ring):
            # The oldest write in the ring has the version that the calls before it have left.
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
    """Note that a tensor may have changed unseen after call number ``seq``."""
    old = changes.get(id(tensor), UnseenChange(tensor, seq, seq))
    changes[id(tensor)] = UnseenChange(tensor, min(old.first, seq), max(old.last, seq))


def files_of(calls: Iterable[Recorded]) -> set[str]:
    """Return the files of all frames that led to calls."""
    sites = [call.site for call in calls]
    shared = {id(site): site for site in map(shared_site, sites)}  # few: one a module or line
    codes = {id(site[0]): site[0] for site in sites if isinstance(site, tuple)}
    codes |= {id(code): code for site in shared.values() for code in codes_of(site)}
    return {code.co_filename for code in codes.values()}


def state_of(filename: str) -> tuple[int, int] | None:
    """Return size and modification time of a file; ``None`` if it is none, such as a cell."""
    try:
        stat = Path(filename).stat()
    # `ValueError` is for a name with a null character.
    except (OSError, ValueError):
        return None
    return stat.st_size, stat.st_mtime_ns


def hides_changes(stems: Iterable[str]) -> bool:
    """Return whether one of these functions lets a tensor change without a new version."""
    return not _HIDING.isdisjoint(stems)


def shares_memory(stems: Iterable[str]) -> bool:
    """Return whether one of these functions shares memory with code outside torch."""
    return not SHARING.isdisjoint(stems)


def version_or_none(tensor: Tensor) -> int | None:
    """Return the version counter of a tensor, ``None`` for one made in inference mode."""
    return None if is_of_inference(tensor) else version_of(tensor)
