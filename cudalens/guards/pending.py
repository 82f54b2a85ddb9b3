"""Extremes that the device still owes: slots there, read back without a wait of the host.

Any producer adds one with :meth:`Pending.note`: it says what must hold, writes the smallest and
the largest value into a slot on the device, and says what to report when they do not hold::

    PENDING.note(device, torch.int64, write, Claim(low=0, high=9, report=report))

``write(low, high)`` is given two 0-dim tensors of the slot, on ``device``, and launches what
fills them on the current stream, such as ``torch.aminmax(index, out=(low, high))``.
``report(smallest, largest)`` is called once, later, only when ``[smallest, largest]`` does not lie
in ``[low, high]``; it returns the exception to raise, or ``None``.  It must keep no tensor alive.

A slot is in a page of its stream and dtype.  A page that is full is copied to pinned memory by a
stream of its own, which waits for what fills the slots and for nothing behind that.  It is read
when the next page is full, or when somebody calls :meth:`Pending.settle`.

Not here: what is required of a call, and with which values it goes on (``deferred.py``).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.guards.captured import CAPTURED

_SLOTS = 256
"""Slots that share one copy to the host."""
MAX_PENDING = 2 * _SLOTS
"""Slots of one dtype that may be pending on a stream; then the oldest are waited for."""

_NEVER_FREED: list[object] = []
"""Queues whose pinned pages were copied to and cannot be freed: torch records an event when such a
page is freed, and where CUDA cannot be used the exception leaves a destructor and aborts."""

Write = Callable[[Tensor, Tensor], object]
Report = Callable[[Any, Any], BaseException | None]


@dataclass(slots=True, eq=False)
class Claim:
    """What one call requires of the extremes in a slot."""

    low: float
    high: float
    report: Report
    thread: int = field(default_factory=threading.get_ident)
    """The ``ident`` of the thread that made the call, or that called ``backward``."""
    number: int = field(default_factory=itertools.count(1).__next__)
    """The order in which claims were made, over all streams."""
    found: tuple[Any, Any] | None = None
    """The extremes, where they are out of bounds."""

    def is_for(self, thread: int) -> bool:
        """Return whether a thread is to raise it: its own, or that of one that comes no more."""
        others = (item for item in threading.enumerate() if item.ident == self.thread)
        return self.thread == thread or all(
            isinstance(item, threading._DummyThread) for item in others
        )


@dataclass(slots=True, eq=False)
class Slot:
    """The extremes of one tensor, and what calls require of them."""

    claims: list[Claim] | None
    """``None`` once the extremes have been read."""
    smallest: Any = None
    largest: Any = None

    def fill(self, smallest: Any, largest: Any, findings: list[Claim]) -> None:
        """Take in the extremes, and give the first claim that does not hold to the findings.

        May be done once more, where an interrupt came between.
        """
        self.smallest, self.largest = smallest, largest
        with _claiming:
            claim = self._first_failed(smallest, largest)
            if claim is not None:
                claim.found = smallest, largest
                if claim not in findings:
                    findings.append(claim)
            self.claims = None

    # By itself: an interrupt in a loop inside the block could pass over the block's end.
    def _first_failed(self, smallest: Any, largest: Any) -> Claim | None:
        for claim in self.claims or ():
            if not (claim.low <= smallest and largest <= claim.high):  # NaN is in no interval
                return claim  # the same values are not reported again for the calls behind it
        return None


_claiming = threading.Lock()


class _Page:
    """Slots of one device and dtype that are copied to the host together.

    Args:
        streams: the one that fills the slots, and another that copies them.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, streams: tuple[Any, Any] | None
    ) -> None:
        self._streams = streams
        # As torch takes them outside inference mode too.
        with torch.inference_mode(False):
            self._filled = self._values = _torch.zeros(_SLOTS, 2, dtype, device)
            self._pairs = [row.unbind() for row in self._filled.unbind()]
            if streams is not None:
                self._is_filled, self._is_copied = torch.cuda.Event(), torch.cuda.Event()
                self._values = torch.zeros(_SLOTS, 2, dtype=dtype, pin_memory=True)
        self.slots: list[Slot] = []

    def add(self, slot: Slot, write: Write) -> None:
        """Have the next slot filled."""
        write(*self._pairs[len(self.slots)])
        if self._streams is not None:
            self._is_filled.record(self._streams[0])
        self.slots.append(slot)

    def send(self) -> None:
        """Copy the slots to the host as soon as they are filled; the host does not wait."""
        if self._streams is not None:
            copying = self._streams[1]
            with torch.cuda.stream(copying):
                copying.wait_event(self._is_filled)
                self._values.copy_(self._filled, non_blocking=True)
                self._is_copied.record(copying)

    def read(self, findings: list[Claim]) -> None:
        """Wait for a page that was sent, fill its slots, and empty it."""
        if not self.slots:
            return
        if self._streams is not None:
            self._is_copied.synchronize()
        values = self._values[: len(self.slots)].tolist()
        for slot, (smallest, largest) in zip(self.slots, values, strict=True):
            slot.fill(smallest, largest, findings)
        self.slots = []


class _Queue:
    """The slots of one stream and dtype: a page that is being filled, and one under way.

    Args:
        findings: takes the claims that do not hold.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, findings: list[Claim]) -> None:
        self.lock = threading.RLock()
        streams = None
        if device.type == "cuda":
            streams = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        self._findings = findings
        self._filling, self._sent = (_Page(device, dtype, streams) for _ in range(2))

    def add(self, slot: Slot, write: Write) -> None:
        """Have the next slot filled; a page that is full is sent, behind the one before it."""
        self._filling.add(slot, write)
        if len(self._filling.slots) == _SLOTS:
            self._turn()

    def flush(self) -> None:
        """Wait for everything."""
        if self._filling.slots:
            self._turn()
        self._sent.read(self._findings)

    def __len__(self) -> int:
        """Count the slots that have not been read."""
        return len(self._filling.slots) + len(self._sent.slots)

    def _turn(self) -> None:
        self._sent.read(self._findings)
        self._filling.send()
        self._filling, self._sent = self._sent, self._filling


class Pending:
    """The slots that are under way in this process, over all its devices and streams."""

    def __init__(self) -> None:
        self._queues: dict[tuple[Any, ...], _Queue] = {}
        self._tell_of_device: Callable[[], None] = lambda: None
        self.clear()
        self.inherited = 0
        """Slots of the parent's that were pending when this process was forked."""

    def clear(self) -> None:
        """Forget everything, as when the device is lost."""
        if self._queues and not _torch.is_device_usable():
            _NEVER_FREED.append(self._queues)
        self._lock = threading.RLock()
        self._queues = {}
        self._is_used = False
        """True if a slot was filled since everything was read."""
        self.findings: list[Claim] = []
        """What is known not to hold; :meth:`settle` reports it."""

    @property
    def count(self) -> int:
        """Return how many slots have not been read."""
        return sum(map(len, list(self._queues.values())))

    def __bool__(self) -> bool:
        """Return whether anything is pending or known to be wrong, or may be replayed."""
        return bool(self._is_used or self.findings or CAPTURED.is_used)

    def has_finding(self) -> bool:
        """Return whether this thread has a finding to raise; :meth:`settle` gives it."""
        here = threading.get_ident()
        return bool(self.findings) and any(item.is_for(here) for item in list(self.findings))

    def note(
        self, device: torch.device, dtype: torch.dtype, write: Write, claim: Claim
    ) -> Slot | None:
        """Have the extremes of a tensor noted on the current stream; the host does not wait.

        While a CUDA graph is captured, they are captured with it.

        Args:
            device: where the slot lies.
            dtype: of the slot: that of the values.
            write: launches what fills the slot.
            claim: what must hold.

        Returns:
            the slot, ``None`` for one of a captured graph.
        """
        if _torch.is_capturing():
            CAPTURED.note(device, dtype, write, claim)
            return None
        slot, queue = Slot([claim]), self._queue(device, dtype)
        self._is_used = True
        with queue.lock:
            queue.add(slot, write)
        return slot

    @staticmethod
    def claim(slot: Slot, claim: Claim) -> bool:
        """Require more of a slot that is pending; return ``False`` where it has been read."""
        with _claiming:
            if slot.claims is not None:
                slot.claims.append(claim)
            return slot.claims is not None

    @staticmethod
    def withdraw(slot: Slot, claim: Claim) -> None:
        """Drop the claim of a call that torch refused."""
        with _claiming:
            if slot.claims is not None:
                slot.claims = list(filter(partial(is_not, claim), slot.claims))

    def settle(self, thread: int | None = None) -> list[BaseException]:
        """Wait for everything that is pending; return what is to be raised, the first first.

        Args:
            thread: leave the findings of other threads that are at work to them.
        """
        self._is_used = False
        try:
            for queue in list(self._queues.values()):
                with queue.lock:
                    queue.flush()
        except BaseException:
            self._is_used = True
            raise
        if not (self.findings or CAPTURED.is_used):
            return []
        errors = []
        for claim in sorted(self.findings, key=lambda item: item.number):
            if thread is None or claim.is_for(thread):
                with suppress(ValueError):  # another thread has taken it
                    self.findings.remove(claim)
                    errors.append(claim.report(*(claim.found or ())))
        return [error for error in [*errors, *CAPTURED.collect()] if error is not None]

    def forked(self) -> None:
        """Begin anew in a child process: what is pending is the parent's."""
        self.inherited = self.count
        _NEVER_FREED.append(self._queues)
        self._queues = {}
        self.clear()

    def _queue(self, device: torch.device, dtype: torch.dtype) -> _Queue:
        key = (device, dtype, _torch.stream_id(device))
        queue = self._queues.get(key)
        if queue is None:
            with self._lock:
                queue = self._queues.setdefault(key, _Queue(device, dtype, self.findings))
            if not _torch.is_host(device):
                CAPTURED.prepare(device)
                tell, self._tell_of_device = self._tell_of_device, lambda: None
                tell()
        return queue

    def when_on_device(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Call a function once there is a check on a device other than the host.

        Returns:
            a function that undoes it.
        """
        if all(_torch.is_host(key[0]) for key in self._queues):
            self._tell_of_device = tell
        else:
            tell()
        return partial(setattr, self, "_tell_of_device", lambda: None)


PENDING = Pending()
"""The one queue of this process, as its dispatcher is one."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PENDING.forked)
