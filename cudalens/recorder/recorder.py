"""The recorder as sessions use it: records while it is open, answers after a failure."""

from __future__ import annotations

from typing import Self

from torch import Tensor

from cudalens.core._torch import no_dispatch_modes, plain_torch
from cudalens.core.report_types import HistoryEntry
from cudalens.recorder import _torch, saved_tensor
from cudalens.recorder.failure import OpRecord
from cudalens.recorder.history import Snapshot
from cudalens.recorder.inplace_writes import IsBad
from cudalens.recorder.lineage import Lineage
from cudalens.recorder.mode import RecordingMode
from cudalens.recorder.ops import Call
from cudalens.recorder.provenance import Provenance, provenance_of
from cudalens.recorder.saved_tensor import ModifiedTensor
from cudalens.recorder.sites import entries_of
from cudalens.source.stack import StackEntry


class Recorder(RecordingMode):
    """Record every op while open; answer questions about them at any time.

    See :class:`RecordingMode` for the arguments.
    """

    _asked: tuple[int, Snapshot | None] = (0, None)
    _first_number: int | None = None
    """The sequence number that autograd would have given to the first node of the recording."""

    def __enter__(self) -> Self:
        """Start recording."""
        if self._first_number is None:
            self._first_number = _torch.next_sequence_nr()
        return super().__enter__()

    def synchronize(self) -> None:
        """Wait for the devices that were recorded on, so that a late fault is raised here."""
        for device in tuple(self._devices):
            _torch.synchronise(device)

    def in_flight(self, error: BaseException) -> OpRecord | None:
        """Return the op that raised ``error``."""
        return self._failures.find(error)

    def history(self, limit: int = 200) -> tuple[HistoryEntry, ...]:
        """Describe the last ops, oldest first."""
        return self.snapshot().history(limit)

    def module_roots(self) -> dict[str, set[int]]:
        """Return for each module path of the recorded ops the ``id`` of each module it is below."""
        return self.snapshot().module_roots()

    def forward_site(
        self, sequence_nr: int, node_name: str | None = None
    ) -> tuple[list[StackEntry], str | None] | None:
        """Return the forward lines and the module behind an autograd node; ``None`` when unsure.

        Args:
            sequence_nr: the node's sequence number.
            node_name: its name, such as ``MulBackward0``; with it a mistake is recognised.
        """
        snapshot = self.snapshot()
        call = snapshot.forward_call(sequence_nr, node_name)
        if call is None:
            return None
        return entries_of(call.site), snapshot.reader.module(call.site).path

    def provenance(self, tensor: Tensor, is_bad: IsBad) -> Provenance:
        """Follow a bad tensor back to the op that made it bad, or to where the data entered.

        Args:
            is_bad: tells whether a tensor holds a bad value; it is asked for living tensors only.
        """
        with no_dispatch_modes(), plain_torch():
            return provenance_of(tensor, self.lineage(), is_bad)

    def beyond_ring(self, what: str, node: int | None = None) -> str | None:
        """Say that something may have left the ring, where older ops were dropped from it.

        Args:
            what: what was looked for and not found.
            node: the sequence number of its autograd node; one from before the recording was
                never in the ring.
        """
        kept = self._ring.maxlen or 0
        is_older = node is not None and node < (self._first_number or 0)
        if is_older or len(self._ring) < kept or self.recorded_ops <= kept:
            return None
        return f"{what} is not among the last {kept} ops, which the recorder kept: max_ops={kept}"

    def modified_tensor(self, message: str) -> ModifiedTensor | None:
        """Find who modified the tensor that autograd complains of.

        Args:
            message: the error's text, "… has been modified by an inplace operation: …".
        """
        complaint = saved_tensor.read_complaint(message)
        if complaint is None:
            return None
        return saved_tensor.find_modified(self.lineage(), complaint)

    def lineage(self) -> Lineage:
        """Return the recorded calls in the form that answers questions about tensors."""
        snapshot = self.snapshot()
        return Lineage(snapshot.calls, self._batches, snapshot.reader)

    def snapshot(self) -> Snapshot:
        """Return the calls recorded so far; the same object until another op is recorded."""
        number, snapshot = self._asked
        if snapshot is None or number != self.recorded_ops:
            number = self.recorded_ops
            calls = [Call._make(item) for item in self._ring.copy()]
            snapshot = Snapshot(
                calls,
                is_complete=len(calls) < (self._ring.maxlen or 0),
                first_number=self._first_number or 0,
            )
            self._asked = (number, snapshot)
        return snapshot
