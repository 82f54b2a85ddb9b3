"""Checks whose extremes the device still owes: slots there, read back without a wait of the host.

A check says between what the smallest and the largest value of a tensor lie, and what to report
where they do not.  :meth:`Pending.note` launches one reduction, on the current stream, that writes
both into a slot of a page of that stream and dtype.  The page is copied to pinned memory by a
stream of its own, which waits for what fills the slots and for nothing behind that.  It is read
when it is full, or when somebody calls :meth:`Pending.settle`.

Not here: what is required of a call, and with which values it goes on (``deferred.py``); checks
in a CUDA graph (``captured.py``).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.guards.captured import CAPTURED

MAX_PENDING = 512
"""Checks of one dtype that may be pending on a stream; then they are waited for."""

_NEVER_FREED: list[object] = []
"""Pages whose pinned memory was copied to and cannot be freed: torch records an event when such a
page is freed, and where CUDA cannot be used the exception leaves a destructor and aborts."""

Report = Callable[..., BaseException | None]
"""Takes the smallest and the largest value, and the number of a replay where a CUDA graph made the
check; returns the exception to raise, or ``None``.  It must keep no tensor alive."""


@dataclass(slots=True, eq=False)
class Check:
    """Interval that all values of one tensor must lie in."""

    low: float
    high: float
    report: Report
    thread: int = field(default_factory=threading.get_ident)
    """The ``ident`` of the thread that made the call, or that called ``backward``."""
    number: int = field(default_factory=itertools.count(1).__next__)
    """The order in which checks were made, over all streams."""
    is_pending: bool = True
    smallest: Any = None
    largest: Any = None

    def implies(self, low: float, high: float) -> bool:
        """Return whether values in ``[low, high]`` need no check beside this one."""
        if self.is_pending:
            return low <= self.low and self.high <= high
        return bool(low <= self.smallest and self.largest <= high)  # NaN is in no interval

    def is_for(self, thread: int) -> bool:
        """Return whether a thread is to raise it: its own, or that of one that comes no more."""
        others = (item for item in threading.enumerate() if item.ident == self.thread)
        return self.thread == thread or all(
            isinstance(item, threading._DummyThread) for item in others
        )


class _Page:
    """Slots of the current stream of a device, and of one dtype.

    Args:
        findings: takes the checks that fail.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, findings: list[Check]) -> None:
        self.lock = threading.RLock()
        self.checks: list[Check] = []
        self._findings, self._stream = findings, None
        # As torch takes them outside inference mode too.
        with torch.inference_mode(False):
            self._filled = self._values = _torch.zeros(MAX_PENDING, 2, dtype, device)
            self._pairs = [row.unbind() for row in self._filled.unbind()]
            if device.type == "cuda":
                self._stream = torch.cuda.current_stream(device)
                self._copying = torch.cuda.Stream(device)
                self._is_filled, self._is_copied = torch.cuda.Event(), torch.cuda.Event()
                self._values = torch.zeros(MAX_PENDING, 2, dtype=dtype, pin_memory=True)

    def add(self, tensor: Tensor, check: Check) -> None:
        """Have the next slot filled; the host waits for a page that is full."""
        with self.lock:
            torch.aminmax(tensor, out=self._pairs[len(self.checks)])
            if self._stream is not None:
                self._is_filled.record(self._stream)
            self.checks.append(check)
            if len(self.checks) == MAX_PENDING:
                self.read()

    def read(self) -> None:
        """Wait for all slots; may be done once more, where an interrupt came between."""
        with self.lock:
            if not self.checks:
                return
            if self._stream is not None:
                with torch.cuda.stream(self._copying):
                    self._copying.wait_event(self._is_filled)
                    self._values.copy_(self._filled, non_blocking=True)
                    self._is_copied.record(self._copying)
                self._is_copied.synchronize()
            values = self._values[: len(self.checks)].tolist()
            for check, ends in zip(self.checks, values, strict=True):
                self._decide(check, *ends)
            self.checks = []

    def _decide(self, check: Check, smallest: Any, largest: Any) -> None:
        # Python 3.13 would leave the end of a loop with this condition out of the caller's block.
        check.smallest, check.largest, check.is_pending = smallest, largest, False
        if not check.implies(check.low, check.high) and check not in self._findings:
            self._findings.append(check)


class Pending:
    """The checks that are pending in this process, over all its devices and streams."""

    def __init__(self) -> None:
        self._pages: dict[tuple[Any, ...], _Page] = {}
        self.clear()
        self.inherited = 0
        """Checks of the parent's that were pending when this process was forked."""

    def clear(self) -> None:
        """Forget everything, as when the device is lost."""
        if self._pages and not _torch.is_device_usable():
            _NEVER_FREED.append(self._pages)
        self._lock = threading.RLock()
        self._pages = {}
        self._is_used = False
        """True if a slot was filled since everything was read."""
        self.findings: list[Check] = []
        """The checks that fail; :meth:`settle` reports them."""

    @property
    def count(self) -> int:
        """Return how many checks have not been read."""
        return sum(len(page.checks) for page in list(self._pages.values()))

    def __bool__(self) -> bool:
        """Return whether anything is pending or known to be wrong, or may be replayed."""
        return bool(self._is_used or self.findings or CAPTURED.is_used)

    def has_finding(self) -> bool:
        """Return whether this thread has a finding to raise; :meth:`settle` gives it."""
        here = threading.get_ident()
        return bool(self.findings) and any(item.is_for(here) for item in list(self.findings))

    def note(self, tensor: Tensor, check: Check) -> None:
        """Have the extremes of a tensor noted on the current stream; the host does not wait.

        While a CUDA graph is captured, the check is captured with it.
        """
        if _torch.is_capturing():
            CAPTURED.note(tensor, check)
            return
        device, dtype = tensor.device, tensor.dtype
        key = (device, dtype, _torch.stream_id(device))
        page = self._pages.get(key)
        if page is None:
            with self._lock:
                page = self._pages.setdefault(key, _Page(device, dtype, self.findings))
            if not _torch.is_host(device):
                CAPTURED.prepare(device)
        page.add(tensor, check)
        self._is_used = True

    def settle(self, thread: int | None = None) -> list[BaseException]:
        """Wait for everything that is pending; return what is to be raised, the first first.

        Args:
            thread: leave the findings of other threads that are at work to them.
        """
        self._is_used = False
        try:
            for page in list(self._pages.values()):
                page.read()
        except BaseException:
            self._is_used = True
            raise
        if not (self.findings or CAPTURED.is_used):
            return []
        errors = []
        for check in sorted(self.findings, key=lambda item: item.number):
            if thread is None or check.is_for(thread):
                with suppress(ValueError):  # another thread has taken it
                    self.findings.remove(check)
                    errors.append(check.report(check.smallest, check.largest))
        return [error for error in [*errors, *CAPTURED.collect()] if error is not None]

    def forked(self) -> None:
        """Begin anew in a child process: what is pending is the parent's."""
        self.inherited = self.count
        _NEVER_FREED.append(self._pages)
        self._pages = {}
        self.clear()


PENDING = Pending()
"""The one of this process, as its dispatcher is one."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PENDING.forked)
