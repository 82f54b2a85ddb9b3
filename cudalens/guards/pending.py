"""Checks whose answer the device still owes: slots there, read back without a wait of the host.

Any producer adds one with :meth:`Pending.note`: it says what must hold, writes the smallest and
the largest value into a slot on the device, and says what is told when they do not hold::

    entry = PENDING.note(device, torch.int64, write, Check(low=0, high=9, tell=tell))

``write(low, high)`` is given two 0-dim tensors of the slot, on ``device``, and launches what
fills them on the current stream, such as ``torch.aminmax(index, out=(low, high))`` or two
``copy_``.  ``tell(smallest, largest)`` is called once, later, only when ``[smallest, largest]``
does not lie in ``[low, high]``; it returns the exception to raise, or ``None`` where nothing is
wrong after all.  It must keep no tensor alive beyond what :meth:`Pending.has_room` grants.

A slot lies in a page of its stream.  A page that is full is copied to pinned memory by a stream of
its own, which waits for what fills the slots and for nothing behind that; the copy's event is only
queried until somebody calls :meth:`Pending.settle`.  A page is given back once nothing is pending.

Not here: what is asked of a call, and with which values it goes on (``deferred.py``).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core._python import Uninterrupted
from cudalens.guards.captured import CAPTURED

_SLOTS = 64
"""Calls that share one copy to the host."""
_PAGES = 16
MAX_PENDING = _SLOTS * _PAGES
"""Calls that may be pending on one stream; then the oldest are waited for."""
KEPT_BYTES = 64 << 20
"""Memory that pending checks may keep alive, for the report of a finding."""
_SLOT_BYTES = 16
_QUERIED_EVERY = 8
"""A query of an event takes the time of a launch, so that not every call makes one."""

_NEVER_FREED: list[object] = []
"""Rings whose pinned pages were copied to and cannot be freed: torch records an event when such a
page is freed, and where CUDA cannot be used the exception leaves a destructor and aborts."""

Write = Callable[[Tensor, Tensor], object]
Tell = Callable[[Any, Any], BaseException | None]


@dataclass(slots=True)
class Check:
    """What must hold of the extremes in one slot, and what is told when it does not."""

    low: float
    high: float
    tell: Tell | None
    """``None`` once the check is dropped, such as that of a call that torch refused."""
    kept_bytes: int = 0
    """What :meth:`Pending.has_room` granted."""
    number: int = 0
    """The order in which checks were noted, over all streams."""
    dtype: torch.dtype = torch.int64
    smallest: Any = None
    largest: Any = None


class _HostCopy:
    """A copy of one device tensor in pinned memory, brought there beside the work of its stream.

    Args:
        filling: the stream that fills the tensor.
        copying: another one, which waits for what fills it and for nothing behind that.
    """

    def __init__(self, tensor: Tensor, filling: Any, copying: Any) -> None:
        self._tensor, self._filling, self._copying = tensor, filling, copying
        self._filled, self.copied = torch.cuda.Event(), torch.cuda.Event()
        self.values = torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        """Those of the last start, once ``copied`` is over."""

    def filled(self) -> None:
        """Note that the tensor is filled so far."""
        self._filled.record(self._filling)

    def start(self) -> None:
        """Copy it as soon as it is filled; the host does not wait."""
        with torch.cuda.stream(self._copying):
            self._copying.wait_event(self._filled)
            self.values.copy_(self._tensor, non_blocking=True)
            self.copied.record(self._copying)


class _SlotPage:
    """Slots on one device that are copied to the host together."""

    def __init__(self, device: torch.device, streams: tuple[Any, Any] | None) -> None:
        # As torch takes them outside inference mode too.
        with torch.inference_mode(False):
            self.slots = _torch.zeroed_bytes(_SLOTS, _SLOT_BYTES, device)
            self.copy = None if streams is None else _HostCopy(self.slots, *streams)
        self.checks: list[Check] = []
        self._pairs: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}

    def pair(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the next slot."""
        pairs = self._pairs.get(dtype)
        if pairs is None:
            rows = self.slots.view(dtype).unbind()
            pairs = self._pairs[dtype] = [(row[0], row[1]) for row in rows]
        return pairs[len(self.checks)]

    def is_there(self) -> bool:
        """Return whether it can be read without a wait, once it was sent."""
        # Where nothing tells when it is there, only who waits reads it.
        if self.copy is None:
            return _torch.is_host(self.slots.device)
        return bool(self.copy.copied.query())

    def read(self) -> list[Check]:
        """Return the checks that do not hold."""
        copied = self.slots.cpu() if self.copy is None else self.copy.values
        rows = {item.dtype: copied.view(item.dtype).tolist() for item in self.checks}
        failed = []
        for at, check in enumerate(self.checks):
            check.smallest, check.largest = rows[check.dtype][at][:2]
            if not (check.low <= check.smallest and check.largest <= check.high):
                failed.append(check)
        return failed


class _Ring:
    """The pages of one stream: one that is being filled, those under way, and those to fill.

    Args:
        failed: takes the checks that do not hold.
    """

    def __init__(self, device: torch.device, failed: list[Check]) -> None:
        self.lock = threading.RLock()
        self.kept_bytes = 0
        self._device = device
        self._failed = failed
        self._streams = None
        if device.type == "cuda":
            self._streams = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        self._page = _SlotPage(device, self._streams)
        self._sent: deque[_SlotPage] = deque()
        self._free: list[_SlotPage] = []
        self._made = 1
        self._since = 0

    def add(self, check: Check, write: Write) -> None:
        """Fill the next slot, and look at what has come back."""
        page = self._page
        write(*page.pair(check.dtype))
        if page.copy is not None:
            page.copy.filled()
        page.checks.append(check)
        self.kept_bytes += check.kept_bytes
        if len(page.checks) == _SLOTS:
            self._turn()
        self._since += 1
        if self._sent and self._since >= _QUERIED_EVERY:
            self._since = 0
            self._collect(wait=False)

    def flush(self) -> None:
        """Wait for everything."""
        if self._page.checks:
            self._turn()
        self._collect(wait=True)

    def __len__(self) -> int:
        """Count the checks that have not been looked at."""
        return sum(len(page.checks) for page in (*self._sent, self._page))

    def _collect(self, *, wait: bool) -> None:
        """Read the pages that have come back, or wait for them."""
        while self._sent and (wait or self._sent[0].is_there()):
            self._read_oldest()

    def _read_oldest(self) -> None:
        page = self._sent[0]
        if page.copy is not None:
            page.copy.copied.synchronize()
        with Uninterrupted():  # an interrupt must not lose what was read
            self._failed += page.read()
            self.kept_bytes -= sum(check.kept_bytes for check in page.checks)
            page.checks = []
            self._free.append(self._sent.popleft())

    def _turn(self) -> None:
        """Send the page, and take another; the oldest is waited for where there is none."""
        if not self._free:
            if self._made < _PAGES:
                self._free.append(_SlotPage(self._device, self._streams))
                self._made += 1
            else:
                self._read_oldest()
        with Uninterrupted():
            if self._page.copy is not None:
                self._page.copy.start()
            self._sent.append(self._page)
            self._page = self._free.pop()


class Pending:
    """The checks that are under way in this process, over all its devices and streams."""

    def __init__(self) -> None:
        self._rings: dict[tuple[torch.device, int], _Ring] = {}
        self.clear()
        self.inherited = 0
        """Checks of the parent's that were pending when this process was forked."""
        self.told: set[object] = set()
        """What the tensors are that have been told of while findings are told together."""

    def clear(self) -> None:
        """Forget everything, as when the device is lost."""
        if self._rings and not _torch.is_device_usable():
            _NEVER_FREED.append(self._rings)
        self._lock = threading.RLock()
        self._rings = {}
        self._failed: list[Check] = []
        self._numbers = itertools.count(1)

    @property
    def kept_bytes(self) -> int:
        """Return how much memory the pending checks keep alive."""
        return sum(ring.kept_bytes for ring in list(self._rings.values()))

    @property
    def count(self) -> int:
        """Return how many checks have not been looked at."""
        return sum(map(len, list(self._rings.values())))

    def __bool__(self) -> bool:
        """Return whether anything is pending or known to be wrong, or may be replayed."""
        return bool(self._failed or CAPTURED or any(list(self._rings.values())))

    @property
    def has_failed(self) -> bool:
        """Return whether a check is known not to hold; :meth:`settle` says which."""
        return bool(self._failed)

    def has_room(self, nbytes: int) -> bool:
        """Return whether a check may keep so many bytes of memory alive."""
        return self.kept_bytes + nbytes <= KEPT_BYTES

    def note(self, device: torch.device, dtype: torch.dtype, write: Write, check: Check) -> Check:
        """Add a check to the queue of the current stream; the host does not wait for it.

        One that is made while a CUDA graph is captured is captured with it.

        Args:
            device: where the slot lies.
            dtype: of the slot: that of the values.
            write: launches what fills the slot.
            check: what must hold.

        Returns:
            ``check``, to be dropped where its call is never made.
        """
        check.dtype, check.number = dtype, next(self._numbers)
        if _torch.is_capturing():
            CAPTURED.note(device, write, check)
            return check
        ring = self._ring(device)
        with ring.lock:
            ring.add(check, write)
        return check

    def settle(self) -> list[BaseException]:
        """Wait for everything that is pending; return what is to be raised, the first first."""
        for ring in list(self._rings.values()):
            with ring.lock:
                ring.flush()
        failed = self._failed[:]
        del self._failed[: len(failed)]
        errors = []
        self.told.clear()
        for check in sorted(failed, key=lambda item: item.number):
            error = None if check.tell is None else check.tell(check.smallest, check.largest)
            if error is not None:
                errors.append(error)
        return errors + CAPTURED.collect()

    def forked(self) -> None:
        """Begin anew in a child process: what is pending is the parent's."""
        self.inherited = self.count
        _NEVER_FREED.append(self._rings)
        self._rings = {}
        self.clear()

    def _ring(self, device: torch.device) -> _Ring:
        key = (device, _torch.stream_id(device))
        ring = self._rings.get(key)
        if ring is None:
            if not _torch.is_host(device):
                CAPTURED.prepare(device)
            with self._lock:
                ring = self._rings.setdefault(key, _Ring(device, self._failed))
        return ring


PENDING = Pending()
"""The one queue of this process, as its dispatcher is one."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PENDING.forked)
