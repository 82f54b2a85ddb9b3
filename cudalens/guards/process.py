"""Guards for the whole process: counted installation, the last report, and who is told of it.

There is one interceptor per process however many sessions, context managers and installs ask for
it, because the dispatcher is one per process too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from cudalens.core._python import Uninterrupted
from cudalens.core.report import Report


class Listener(Protocol):
    """What a session offers to the guards while it is open."""

    recorder: Any

    def found(self, report: Report) -> None:
        """Take note of a finding."""

    def internal_error(self, line: str) -> None:
        """Take note of a failure of our own."""


MakeInterceptor = Callable[["frozenset[str] | None"], Any]


class Guarding:
    """The guards of this process, installed while anybody wants them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._wanted = 0
        self._interceptor: Any = None
        self._listeners: list[tuple[int, Listener]] = []
        """Open sessions, each with the thread that opened it."""
        self._devices: frozenset[str] | None = None
        self.last: Report | None = None
        self.lost: tuple[Report, object | None] | None = None
        """What ended the device's context; :mod:`cudalens.evidence.lost_context` looks after it."""

    @property
    def is_installed(self) -> bool:
        """Return whether the guards are in the dispatcher."""
        return self._interceptor is not None

    @property
    def checked_ops(self) -> int:
        """Count the calls that the guards have looked at since they were installed."""
        return self._interceptor.checked_ops if self._interceptor is not None else 0

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """Return the open sessions, innermost last."""
        return tuple(listener for _, listener in self._listeners)

    @property
    def listener(self) -> Listener | None:
        """Return the session that this thread works for, ``None`` when that is not certain.

        The innermost that this thread opened; in a thread that opened none, the innermost of all
        while they are one thread's.
        """
        here, opened = threading.get_ident(), list(self._listeners)
        threads = {thread for thread, _ in opened}
        if here not in threads and len(threads) > 1:
            return None
        own = [item for thread, item in opened if thread == here or here not in threads]
        return own[-1] if own else None

    @property
    def audience(self) -> object:
        """Return whom a finding of this thread is for: its session, else the installation
        itself.
        """
        return self.listener or self._interceptor or self

    def acquire(self, make: MakeInterceptor) -> None:
        """Want the guards once more; installs them when they are not there.

        Args:
            make: builds the interceptor for some device types, ``None`` for the accelerators.
        """
        with Uninterrupted(), self._lock:
            if self._interceptor is None:
                interceptor = make(self._devices)
                interceptor.install()
                self._interceptor = interceptor
            self._wanted += 1

    def release(self) -> None:
        """Want the guards once less; removes them when nobody does.  Harmless at zero."""
        with Uninterrupted(), self._lock:
            self._wanted = max(0, self._wanted - 1)
            if self._wanted == 0 and self._interceptor is not None:
                interceptor, self._interceptor = self._interceptor, None
                interceptor.uninstall()

    def refresh(self) -> None:
        """Put guards that were registered meanwhile into the dispatcher."""
        with Uninterrupted(), self._lock:
            if self._interceptor is not None:
                self._interceptor.uninstall()
                self._interceptor.install()

    @contextmanager
    def acting_on(self, *devices: str) -> Iterator[None]:
        """Let guards installed inside the block act on these device types (tests, benchmarks)."""
        before, self._devices = self._devices, frozenset(devices)
        try:
            yield
        finally:
            self._devices = before

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Tell ``listener`` of every finding until the returned function is called."""
        entry = (threading.get_ident(), listener)
        with self._lock:
            self._listeners.append(entry)

        def stop() -> None:
            with self._lock:
                if entry in self._listeners:
                    self._listeners.remove(entry)

        return stop

    def found(self, report: Report) -> None:
        """Remember a finding and tell the session that it belongs to."""
        self.last = report
        listener = self.listener
        if listener is not None:
            listener.found(report)

    def internal_error(self, line: str) -> None:
        """Tell the session that something of ours failed."""
        listener = self.listener
        if listener is not None:
            listener.internal_error(line)


PROCESS = Guarding()
