"""Checks whose extremes the device still owes: slots there, read back without a wait of the host.

A check says between what the smallest and the largest value of a tensor lie, and what to report
where they do not.  :meth:`Pending.note` launches one reduction, on the current stream, that writes
both into a slot of a page of that stream and dtype.  The page is copied to the host by a stream of
its own, which waits for what fills the slots and for nothing behind that.  It is read when it is
full, or when somebody calls :meth:`Pending.settle`.

While a CUDA graph is captured nothing runs, and in a replay no Python does.  So the check itself is
captured, with a slot that each replay widens.

Not here: what is required of a call, and with which values it goes on (``deferred.py``).
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from threading import _DummyThread
from typing import Any

import torch
from torch import Tensor

from cudalens.core import _torch

MAX_PENDING = 512
"""Checks of one dtype that may be pending on a stream; then they are waited for."""
MAX_CAPTURED = 4096
"""Checks of integers, and of numbers, in captured graphs on one device; beyond, none is guarded."""

Report = Callable[[Any, Any], BaseException | None]
"""Takes the smallest and the largest value, and returns the exception to raise, or ``None``.  It
must keep no tensor alive."""


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

    def decide(self, ends: list[Any], findings: list[Check]) -> bool:
        """Take the extremes, and join the findings if they are outside; return whether it did."""
        if self in findings:  # it is not reported yet
            return False
        (self.smallest, self.largest), self.is_pending = ends, False
        is_bad = not self.implies(self.low, self.high)
        if is_bad:
            findings.append(self)
        return is_bad

    def is_for(self, thread: int) -> bool:
        """Return whether a thread is to raise it: its own, or that of one that comes no more."""
        threads = [item for item in threading.enumerate() if item.ident == self.thread]
        return self.thread == thread or not threads or isinstance(threads[0], _DummyThread)


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
                self._copying, self._is_filled = torch.cuda.Stream(device), torch.cuda.Event()
                self._values = torch.zeros(MAX_PENDING, 2, dtype=dtype)

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
                _torch.wait_for(self._copying)
            values = self._values[: len(self.checks)].tolist()
            for check, ends in zip(self.checks, values, strict=True):
                check.decide(ends, self._findings)
            self.checks = []


class _Replays:
    """Slots of captured checks on a device: the extremes over all replays since the last finding.

    They are made before a capture, outside the graph's own memory, and never given back: a graph
    may be replayed at any time, and writes there.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.checks: list[Check] = []
        is_float, limit = dtype.is_floating_point, torch.iinfo(torch.int64)
        self._none_yet = (math.inf, -math.inf) if is_float else (limit.max, limit.min)
        self._slots = _torch.zeros(MAX_CAPTURED, 2, dtype, device)
        self._empty(self._slots)

    def _empty(self, slots: Tensor) -> None:
        # Filled on the device: a copy of the host's numbers would wait for it.
        for column, value in enumerate(self._none_yet):
            slots[..., column].fill_(value)

    def add(self, tensor: Tensor, check: Check) -> None:
        """Capture a check; the host reads nothing."""
        self.checks.append(check)
        self.launch(tensor, len(self.checks) - 1)

    def launch(self, tensor: Tensor, at: int) -> None:
        """Launch what each replay does."""
        slot = self._slots[at]
        now = torch.stack(torch.aminmax(tensor)).to(slot.dtype)
        slot.copy_(torch.stack([torch.minimum(slot[0], now[0]), torch.maximum(slot[1], now[1])]))

    def read(self, findings: list[Check]) -> None:
        """Wait for the replays that are under way."""
        values = self._slots[: len(self.checks)].tolist() if self.checks else ()
        for at, ends in enumerate(values):
            if self.checks[at].decide(ends, findings):
                self._empty(self._slots[at])  # the next replay that fails is found again


class Pending:
    """The checks that are pending in this process, over all its devices and streams."""

    def __init__(self) -> None:
        self.inherited = 0
        """Checks of the parent's that were pending when this process was forked."""
        self._replays: dict[tuple[torch.device, bool], _Replays] = {}
        """By device, and by whether they are of floating-point numbers."""
        self._has_captured = False
        self.clear()

    def clear(self) -> None:
        """Forget everything outside captured graphs, as when the device is lost."""
        self._lock = threading.RLock()
        self._pages: dict[tuple[Any, ...], _Page] = {}
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
        return bool(self._is_used or self.findings or self._has_captured)

    def has_finding(self) -> bool:
        """Return whether this thread has a finding to raise; :meth:`settle` gives it."""
        here = threading.get_ident()
        return bool(self.findings) and any(item.is_for(here) for item in list(self.findings))

    def can_note(self, device: torch.device) -> bool:
        """Return whether a check can be noted; no capture of a CUDA graph can make room for it."""
        if not _torch.is_capturing():
            return True
        rooms = [self._replays.get((device, is_float)) for is_float in (False, True)]
        return all(item is not None and len(item.checks) < MAX_CAPTURED for item in rooms)

    def note(self, tensor: Tensor, check: Check) -> None:
        """Have the extremes of a tensor noted on the current stream; the host does not wait.

        While a CUDA graph is captured, the check is captured with it; :meth:`can_note` was asked.
        """
        device, dtype = tensor.device, tensor.dtype
        if _torch.is_capturing():
            with self._lock:
                self._replays[device, dtype.is_floating_point].add(tensor, check)
                self._has_captured = True
            return
        key = (device, dtype, _torch.stream_id(device))
        page = self._pages.get(key)
        if page is None:
            with self._lock:
                page = self._pages.setdefault(key, _Page(device, dtype, self.findings))
                if not _torch.is_host(device) and (device, False) not in self._replays:
                    self.prepare(device)
        page.add(tensor, check)
        self._is_used = True

    def prepare(self, device: torch.device) -> None:
        """Make room for checks in graphs that will be captured on a device."""
        for dtype in (torch.int64, torch.float64):
            self._replays[device, dtype.is_floating_point] = _Replays(device, dtype)

    def settle(
        self, thread: int | None = None, others: Collection[int] = ()
    ) -> list[BaseException]:
        """Wait for everything that is pending; return what is to be raised, the first first.

        Args:
            thread: leave the findings of other threads that are at work to them.
            others: but not those of these threads.
        """
        self._is_used = False
        try:
            for page in list(self._pages.values()):
                page.read()
            for replays in list(self._replays.values()):
                replays.read(self.findings)
        except BaseException:
            self._is_used = True
            raise
        errors = []
        for check in sorted(self.findings, key=lambda item: item.number):
            if thread is None or check.is_for(thread) or check.thread in others:
                with suppress(ValueError):  # another thread has taken it
                    self.findings.remove(check)
                    errors.append(check.report(check.smallest, check.largest))
        return [error for error in errors if error is not None]

    def forked(self) -> None:
        """Begin anew in a child process: what is pending is the parent's."""
        self.inherited, self._replays, self._has_captured = self.count, {}, False
        self.clear()


PENDING = Pending()
"""The one of this process, as its dispatcher is one."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PENDING.forked)
