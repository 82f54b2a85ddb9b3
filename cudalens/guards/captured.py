"""Checks that are captured with a CUDA graph: rows on the device that each replay adds to.

While a graph is captured nothing runs, and in a replay no Python does.  So what a check needs is
captured too: each replay counts itself, and notes the extremes of the first replay in which they
are out of bounds.  The rows are read where the host waits (:meth:`Captured.collect`).

A page of rows is made before the capture, outside the graph's own memory, and is never given back:
a graph may be replayed at any time, and writes there.

Not here: checks of calls that are made outside a capture (``pending.py``).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core.report_types import Violation

MAX_CAPTURED = 4096
"""Checks in captured graphs on one device; what is captured beyond them is not guarded."""
_COUNTERS, _PAIR, _NOW, _ROW_BYTES = slice(0, 16), slice(16, 32), slice(32, 48), 48


@dataclass(slots=True)
class _Row:
    """One check in a graph, and what it has of a page."""

    claim: Any
    replays: Tensor
    """0-dim: how often the graph was replayed."""
    found_in: Tensor
    """0-dim: the first replay in which the check did not hold, 0 where there is none."""
    pair: Tensor
    """The extremes of that replay."""
    now: Tensor
    """Those of the last one."""

    def launch(self, write: Callable[[Tensor, Tensor], object]) -> None:
        """Launch what a replay does; the host reads nothing."""
        low, high = self.now.unbind()
        write(low, high)
        self.replays.add_(1)
        # Of no number at all, both comparisons are false.
        holds = high <= self.claim.high
        if self.claim.low != -math.inf:
            holds = holds & (low >= self.claim.low)
        is_first = ~holds & (self.found_in == 0)
        self.pair.copy_(torch.where(is_first, self.now, self.pair))
        self.found_in.copy_(torch.where(is_first, self.replays, self.found_in))


class _RowPage:
    def __init__(self, device: torch.device) -> None:
        self.rows = _torch.zeros(MAX_CAPTURED, _ROW_BYTES, torch.uint8, device)
        self.used: list[_Row] = []

    def add(self, dtype: torch.dtype, claim: Any) -> _Row:
        bytes_ = self.rows[len(self.used)]
        counters = bytes_[_COUNTERS].view(torch.int64)
        pairs = (bytes_[part].view(dtype)[:2] for part in (_PAIR, _NOW))
        row = _Row(claim, counters[0], counters[1], *pairs)
        self.used.append(row)
        return row


class Captured:
    """The checks in captured graphs of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pages: dict[torch.device, _RowPage] = {}
        self.is_used = False
        """True if any check was captured."""
        self.replay: int | None = None
        """The replay whose finding is being told."""

    @property
    def is_open(self) -> bool:
        """Return whether a call on the current device can be captured with its checks."""
        return self.has_room(_torch.current_device())

    def with_replay(self, found: Violation) -> Violation:
        """Return a finding with the replay in which it was made, if it was made in one."""
        if self.replay is None:
            return found
        why = f"{found.explanation} It was in replay {self.replay} of a CUDA graph."
        return replace(found, explanation=why.lstrip())

    def prepare(self, device: torch.device) -> None:
        """Make room for checks on a device, before anything is captured there."""
        if device not in self._pages and not _torch.is_capturing():
            with self._lock:
                self._pages.setdefault(device, _RowPage(device))

    def has_room(self, device: torch.device) -> bool:
        """Return whether a check on a device can be captured."""
        page = self._pages.get(device)
        return page is not None and len(page.used) < MAX_CAPTURED

    def note(
        self,
        device: torch.device,
        dtype: torch.dtype,
        write: Callable[[Tensor, Tensor], object],
        claim: Any,
    ) -> None:
        """Capture a check with the graph, as :meth:`cudalens.guards.pending.Pending.note` does;
        :meth:`has_room` was asked.
        """
        with self._lock:
            row = self._pages[device].add(dtype, claim)
            self.is_used = True
        row.launch(write)

    def collect(self) -> list[BaseException]:
        """Wait for the replays that are under way; return what is to be raised."""
        errors = []
        for page in list(self._pages.values()):
            if not page.used:
                continue
            counters = page.rows[: len(page.used), _COUNTERS].cpu().view(torch.int64)
            for row, replay in zip(page.used, counters[:, 1].tolist(), strict=True):
                if replay and (error := self._told(row, replay)) is not None:
                    errors.append(error)
        return errors

    def _told(self, row: _Row, replay: int) -> BaseException | None:
        smallest, largest = row.pair.tolist()
        row.found_in.zero_()  # the next replay in which it does not hold is found again
        self.replay = replay
        try:
            error: BaseException | None = row.claim.report(smallest, largest)
        finally:
            self.replay = None
        return error


CAPTURED = Captured()
"""The one of this process."""
