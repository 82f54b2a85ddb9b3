"""Checks that are captured with a CUDA graph: rows on the device that each replay updates.

While a graph is captured nothing runs, and in a replay no Python does.  So the check itself is
captured: each replay counts itself, and keeps the extremes of the first replay that fails.  The
rows are read where the host waits.  They are made before the capture, outside the graph's own
memory, and never given back: a graph may be replayed at any time, and writes there.

Not here: checks of calls that are made outside a capture (``pending.py``).
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from cudalens.core import _torch

MAX_CAPTURED = 4096
"""Checks in captured graphs on one device; what is captured beyond them is not guarded."""


class _Rows:
    """Rows of a device: the replays, the first that failed (0 for none), and its extremes."""

    def __init__(self, device: torch.device) -> None:
        self.values = _torch.zeros(MAX_CAPTURED, 4, torch.int64, device)
        self.checks: list[tuple[Any, torch.dtype]] = []


def launch(row: Tensor, tensor: Tensor, low: float, high: float) -> None:
    """Launch what a replay does; the host reads nothing."""
    now = torch.stack(torch.aminmax(tensor)).to(_wide(tensor.dtype))
    replays, failed, ends = row[0], row[1], row[2:].view(now.dtype)
    replays.add_(1)
    # Of no number at all, both comparisons are false.
    is_first = ~((now[0] >= low) & (now[1] <= high)) & (failed == 0)
    ends.copy_(torch.where(is_first, now, ends))
    failed.copy_(torch.where(is_first, replays, failed))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else torch.int64


class Captured:
    """The checks in captured graphs of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._rows: dict[torch.device, _Rows] = {}
        self.is_used = False
        """True if any check was captured."""

    def prepare(self, device: torch.device) -> None:
        """Make room for checks on a device, before anything is captured there."""
        if device not in self._rows and not _torch.is_capturing():
            with self._lock:
                self._rows.setdefault(device, _Rows(device))

    def has_room(self, device: torch.device) -> bool:
        """Return whether a check on a device can be captured."""
        rows = self._rows.get(device)
        return rows is not None and len(rows.checks) < MAX_CAPTURED

    def note(self, tensor: Tensor, check: Any) -> None:
        """Capture a check, as ``Pending.note`` does; :meth:`has_room` was asked."""
        rows = self._rows[tensor.device]
        with self._lock:
            row = rows.values[len(rows.checks)]
            rows.checks.append((check, tensor.dtype))
            self.is_used = True
        launch(row, tensor, check.low, check.high)

    def collect(self) -> list[BaseException | None]:
        """Wait for the replays that are under way; return what is to be raised."""
        errors: list[BaseException | None] = []
        for rows in list(self._rows.values()) if self.is_used else ():
            values = rows.values[: len(rows.checks)].cpu()
            for at in values[:, 1].nonzero().flatten().tolist():
                check, dtype = rows.checks[at]
                ends, replay = values[at, 2:].view(_wide(dtype)).tolist(), int(values[at, 1])
                rows.values[at, 1] = 0  # the next replay that fails is found again
                errors.append(check.report(*ends, replay))
        return errors


CAPTURED = Captured()
"""The one of this process."""
