"""Pending checks: their extremes are in slots on the device, and are read without a host sync.

A check has the bounds for the smallest and the largest value of a tensor, and a function that
reports a violation.  :meth:`Pending.note` launches one reduction on the current stream, which
writes both extremes into a slot.  The slots of one stream and dtype form a page.  A side stream
copies the page to the host: it waits for the event behind the last slot, not for later work.  A
page is read when it is full, or in :meth:`Pending.settle`.

During a CUDA graph capture no kernel runs, and during a replay no Python.  So the check itself is
captured, with a slot that each replay widens.

What a call requires, and which arguments it gets, is decided in ``deferred.py``.
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
"""How many checks of one dtype may be pending on a stream before the host waits for them."""
MAX_CAPTURED = 4096
"""How many checks captured graphs may have on one device, for integers and for floats each."""

Report = Callable[[Any, Any], BaseException | None]
"""Function of the smallest and the largest value that returns the exception to raise, or ``None``.
It must not keep a tensor alive."""


@dataclass(slots=True, eq=False)
class Check:
    """The interval that all values of one tensor must lie in."""

    low: float
    high: float
    report: Report
    thread: int = field(default_factory=threading.get_ident)
    """The ``ident`` of the thread that made the call, or that called ``backward``."""
    number: int = field(default_factory=itertools.count(1).__next__)
    """Counts checks over all streams, so that findings can be sorted by time."""
    is_pending: bool = True
    smallest: Any = None
    largest: Any = None

    def implies(self, low: float, high: float) -> bool:
        """Return whether this check, or its result, proves that all values are in [low, high]."""
        if self.is_pending:
            return low <= self.low and self.high <= high
        return bool(low <= self.smallest and self.largest <= high)  # NaN is in no interval

    def decide(self, ends: list[Any], findings: list[Check]) -> bool:
        """Store the extremes; add the check to the findings and return True if they are outside."""
        if self in findings:  # found before, and not reported yet
            return False
        (self.smallest, self.largest), self.is_pending = ends, False
        is_bad = not self.implies(self.low, self.high)
        if is_bad:
            findings.append(self)
        return is_bad

    def is_for(self, thread: int) -> bool:
        """Return whether a thread should raise it: its own thread, or any if that has ended."""
        threads = [item for item in threading.enumerate() if item.ident == self.thread]
        return self.thread == thread or not threads or isinstance(threads[0], _DummyThread)


class _Page:
    """The slots of a device's current stream for one dtype.

    Args:
        findings: list that receives the checks that fail.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, findings: list[Check]) -> None:
        # Reentrant, because the check that fills the page reads it.
        self.lock = threading.RLock()
        self.checks: list[Check] = []
        self._findings, self._stream = findings, None
        # Not inference tensors: torch rejects writes to those outside inference mode.
        with torch.inference_mode(False):
            self._filled = self._values = _torch.zeros(MAX_PENDING, 2, dtype, device)
            self._pairs = [row.unbind() for row in self._filled.unbind()]
            if device.type == "cuda":
                self._stream = torch.cuda.current_stream(device)
                self._copying, self._is_filled = torch.cuda.Stream(device), torch.cuda.Event()
                # Not pinned: pinned memory makes torch abort when it is freed after the device is
                # lost.
                self._values = torch.zeros(MAX_PENDING, 2, dtype=dtype)

    def add(self, tensor: Tensor, check: Check) -> None:
        """Launch the reduction into the next slot; wait for the page if that fills it."""
        with self.lock:
            torch.aminmax(tensor, out=self._pairs[len(self.checks)])
            if self._stream is not None:
                self._is_filled.record(self._stream)
            self.checks.append(check)
            if len(self.checks) == MAX_PENDING:
                self.read()

    def read(self) -> None:
        """Wait for all slots and decide their checks; safe to repeat after an interrupt."""
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

    They are allocated before a capture, outside the graph's memory pool, and never freed: a graph
    may be replayed at any time, and then writes to them.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.checks: list[Check] = []
        is_float, limit = dtype.is_floating_point, torch.iinfo(torch.int64)
        self._none_yet = (math.inf, -math.inf) if is_float else (limit.max, limit.min)
        self._slots = _torch.zeros(MAX_CAPTURED, 2, dtype, device)
        self._empty(self._slots)

    def _empty(self, slots: Tensor) -> None:
        # `fill_` runs on the device. A copy from the host would sync.
        for column, value in enumerate(self._none_yet):
            slots[..., column].fill_(value)

    def add(self, tensor: Tensor, check: Check) -> None:
        """Capture a check."""
        self.checks.append(check)
        self.launch(tensor, len(self.checks) - 1)

    def launch(self, tensor: Tensor, at: int) -> None:
        """Launch the kernels of a check, which each replay repeats."""
        slot = self._slots[at]
        now = torch.stack(torch.aminmax(tensor)).to(slot.dtype)
        slot.copy_(torch.stack([torch.minimum(slot[0], now[0]), torch.maximum(slot[1], now[1])]))

    def read(self, findings: list[Check]) -> None:
        """Wait for running replays, and decide the checks."""
        values = self._slots[: len(self.checks)].tolist() if self.checks else ()
        for at, ends in enumerate(values):
            if self.checks[at].decide(ends, findings):
                self._empty(self._slots[at])  # so that the next bad replay is found, too


class Pending:
    """All pending checks of this process."""

    def __init__(self) -> None:
        self.inherited = 0
        """How many checks were pending in the parent when this process was forked."""
        self._replays: dict[tuple[torch.device, bool], _Replays] = {}
        """By device, and by whether the dtype is floating-point."""
        self._has_captured = False
        self.clear()

    def clear(self) -> None:
        """Drop everything outside captured graphs, for example when the device is lost."""
        # A new lock, because in a forked process a thread that is gone may hold the old one.
        self._lock = threading.RLock()
        self._pages: dict[tuple[Any, ...], _Page] = {}
        self._is_used = False
        """True if a slot was filled since the last complete read."""
        self.findings: list[Check] = []
        """The checks that fail; :meth:`settle` reports them."""

    @property
    def count(self) -> int:
        """The number of checks that have not been read."""
        # A copy, because other threads may add pages meanwhile.
        return sum(len(page.checks) for page in list(self._pages.values()))

    def __bool__(self) -> bool:
        """Return whether a check is pending or has failed, or a graph may be replayed."""
        return bool(self._is_used or self.findings or self._has_captured)

    def has_finding(self) -> bool:
        """Return whether this thread has a finding to raise in :meth:`settle`."""
        here = threading.get_ident()
        return bool(self.findings) and any(item.is_for(here) for item in list(self.findings))

    def can_note(self, device: torch.device) -> bool:
        """Return whether a check can be noted: slots cannot be allocated during a capture."""
        if not _torch.is_capturing():
            return True
        rooms = [self._replays.get((device, is_float)) for is_float in (False, True)]
        return all(item is not None and len(item.checks) < MAX_CAPTURED for item in rooms)

    def note(self, tensor: Tensor, check: Check) -> None:
        """Launch the check of a tensor on the current stream, without a host sync.

        During a CUDA graph capture it is captured.  Call :meth:`can_note` first.
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
                # Another thread on the same stream may have made it meanwhile.
                page = self._pages.setdefault(key, _Page(device, dtype, self.findings))
                if not _torch.is_host(device) and (device, False) not in self._replays:
                    self.prepare(device)
        page.add(tensor, check)
        self._is_used = True

    def prepare(self, device: torch.device) -> None:
        """Allocate the slots for graphs that will be captured on a device."""
        # These hold the values of all smaller dtypes without rounding.
        for dtype in (torch.int64, torch.float64):
            self._replays[device, dtype.is_floating_point] = _Replays(device, dtype)

    def settle(
        self, thread: int | None = None, others: Collection[int] = ()
    ) -> list[BaseException]:
        """Wait for all pending checks; return the exceptions to raise, oldest call first.

        Args:
            thread: leave findings of other running threads to those threads.
            others: threads whose findings are raised here all the same.
        """
        # Before the read, so that a check that another thread notes meanwhile sets it again.
        self._is_used = False
        try:
            for page in list(self._pages.values()):
                page.read()
            for replays in list(self._replays.values()):
                replays.read(self.findings)
        except BaseException:
            # An interrupt has left slots unread.
            self._is_used = True
            raise
        errors = []
        for check in sorted(self.findings, key=lambda item: item.number):
            if thread is None or check.is_for(thread) or check.thread in others:
                with suppress(ValueError):  # another thread has just taken it
                    self.findings.remove(check)
                    errors.append(check.report(check.smallest, check.largest))
        return [error for error in errors if error is not None]

    def forked(self) -> None:
        """Start afresh in a forked process: pending checks belong to the parent."""
        self.inherited, self._replays, self._has_captured = self.count, {}, False
        self.clear()


PENDING = Pending()
"""One for the whole process, like torch's dispatcher."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PENDING.forked)
