"""The recorder as sessions use it: it records while open, and answers questions later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from cudalens.core._torch import no_dispatch_modes, plain_torch
from cudalens.core.report_types import HistoryEntry
from cudalens.recorder import _torch
from cudalens.recorder.calls import Recorded
from cudalens.recorder.earlier_calls import EarlierCalls, hides_changes, shares_memory
from cudalens.recorder.handing_on import handed_on
from cudalens.recorder.history import Snapshot
from cudalens.recorder.mode import RecordingMode
from cudalens.recorder.places import Position
from cudalens.recorder.provenance import IsBad, Provenance, ProvenanceWalk


class Recorder(RecordingMode):
    """Record every API call while open; answer questions about them at any time.

    See :class:`RecordingMode` for the arguments.
    """

    _last_snapshot: tuple[int, Snapshot | None] = (0, None)
    _earlier = EarlierCalls()

    def follow(self, earlier: EarlierCalls) -> None:
        """Start from the knowledge of earlier blocks; call it before recording."""
        with no_dispatch_modes(), plain_torch():
            earlier.note_changes()
        self._earlier = earlier
        self._batches.follow(earlier.batches)

    def handed_on(self) -> EarlierCalls:
        """Return what the next block may rely on about tensors that are still alive."""
        with no_dispatch_modes(), plain_torch():
            is_cut = self.recorded_ops > len(self._ring)  # the first calls have left the ring
            is_lost = is_cut and shares_memory(self._called())
            return handed_on(self.snapshot(), self.recorded_ops, is_lost)

    def _called(self) -> Iterator[str]:
        """Yield the name of each function called, including calls that left the ring."""
        return (api.stem for api in self._apis.values())

    def let_go(self) -> None:
        """Drop all references to tensors."""
        super().let_go()
        self._last_snapshot = (0, None)
        self._earlier = EarlierCalls()

    def synchronize(self) -> None:
        """Wait for all recorded devices, so that a pending fault is raised here."""
        # A copy, because another thread may add a device during the wait.
        for device in tuple(self.devices):
            _torch.wait_if_busy(device)

    def history(self, limit: int = 200) -> tuple[HistoryEntry, ...]:
        """Describe the last calls, oldest first."""
        return self.snapshot().history(limit)

    def provenance(
        self,
        tensor: Tensor,
        is_bad: IsBad,
        positions: Sequence[Position] = (),
        mask: Tensor | None = None,
    ) -> Provenance:
        """Trace a bad tensor back to the call that made it bad, or to where its data entered.

        Args:
            is_bad: returns whether a tensor has a bad value; called with living tensors only.
            positions: the positions of its bad elements, as far as they are listed.
            mask: bool[shape of the tensor], true at all bad elements, if known.
        """
        with no_dispatch_modes(), plain_torch():
            return ProvenanceWalk(tensor, self.snapshot(), is_bad, positions, mask).run()

    def beyond_ring(self, what: str) -> str | None:
        """Return a note that something may have left the ring; ``None`` if none ever did."""
        size = self._ring.maxlen or 0
        # A failed call has a number and is not in the ring, so neither count alone proves an
        # overflow.
        if len(self._ring) < size or self.recorded_ops <= size:
            return None
        return f"{what} is not among the last {size} calls, which the recorder kept: max_ops={size}"

    def snapshot(self) -> Snapshot:
        """Return the calls recorded so far, cached until another call is recorded."""
        number, snapshot = self._last_snapshot
        if snapshot is None or number != self.recorded_ops:
            number = self.recorded_ops
            # Copied in C in one step: a thread of autograd's may append a call meanwhile.
            calls = [Recorded._make(item) for item in self._ring.copy()]
            # A copy, because the snapshot adds to it, and the next snapshot starts from the table
            # again.
            earlier, changes = self._earlier, dict(self._earlier.changes)
            if earlier.versions and calls and calls[0].seq > 1:  # the first have left the ring
                changes = earlier.changes_before(calls, hides_changes(self._called()))
            snapshot = Snapshot(calls, self._batches, earlier, changes)
            with no_dispatch_modes(), plain_torch():
                snapshot.note_unseen_writes()
            self._last_snapshot = (number, snapshot)
        return snapshot
