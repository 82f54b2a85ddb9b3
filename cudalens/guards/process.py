"""Guards for the whole process: counted installation, the last report, and who is told of it.

There is one interceptor per process however many sessions, context managers and installs ask for
it, because the dispatcher is one per process too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary

from cudalens.core import user_warnings
from cudalens.core._python import Uninterrupted
from cudalens.core.errors import DeviceAssertError
from cudalens.core.report import Report

ReportedLines: TypeAlias = WeakKeyDictionary[CodeType, set[tuple[str, int, str, str]]]
"""Silent findings that are not reported again: file, instruction, guard and argument, by code.

A cell that is run again is new code, and is reported again.
"""


class Listener(Protocol):
    """Interface of a session to the guards while it is open."""

    recorder: Any
    reported: ReportedLines

    def add_finding(self, report: Report) -> None:
        """Take note of a finding."""

    def call_failed(self, error: BaseException, arguments: Any) -> None:
        """Take note of what a guarded call raised."""

    def internal_error(self, line: str) -> None:
        """Take note of a failure of our own."""


_MOST_SAID = 20
"""Lines of ours that are printed at most: what changes from call to call must not fill a log."""
MakeInterceptor = Callable[["frozenset[str] | None"], Any]


class Guarding:
    """The guards of this process, installed while anybody wants them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._wants: list[tuple[bool, bool]] = []
        """Of each who wants the guards: may they look later, and do they in compiled code."""
        self._interceptor: Any = None
        self._listeners: list[tuple[int, Listener]] = []
        """Open sessions, each with the thread that opened it."""
        self._devices: frozenset[str] | None = None
        self._messages: set[str] = set()
        """Lines that have been printed, where no session was open."""
        self._reported: ReportedLines = WeakKeyDictionary()
        self.installs: list[bool] = []
        """For each ``cudalens.install()`` that is not undone, whether it is deferred."""
        self.last: Report | None = None
        self.last_check = "none"
        """The last block that was checked, found good or not, in words."""
        self.lost: tuple[Report, object | None] | None = None
        """End of the device's context; :mod:`cudalens.evidence.lost_context` looks after it."""

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
    def reported(self) -> ReportedLines:
        """Return what this thread's session has reported; without one, the guards as installed."""
        listener = self.listener
        return self._reported if listener is None else listener.reported

    @property
    def is_deferred(self) -> bool:
        """Return whether the installed guards are deferred: no call waits for the device."""
        return self._interceptor is not None and all(later for later, _ in self._wants)

    def acquire(
        self, make: MakeInterceptor, *, is_deferred: bool = False, in_compiled: bool = False
    ) -> None:
        """Increment the install count; install on first use.

        Args:
            make: builds the interceptor for some device types, ``None`` for the accelerators.
            is_deferred: the caller accepts deferred checks; they are used while all callers do.
            in_compiled: also check inside compiled code; deferred guards always do.
        """
        with Uninterrupted(), self._lock:
            if self._interceptor is None:
                self._interceptor, self._reported = make(self._devices), WeakKeyDictionary()
            interceptor = self._interceptor
            self._wants.append((is_deferred, in_compiled))
            try:
                self._switch(interceptor)
                interceptor.install()
                user_warnings.install()
            except BaseException:
                self.release(is_deferred=is_deferred, in_compiled=in_compiled)
                raise

    def _switch(self, interceptor: Any) -> None:
        in_compiled = any(later or inside for later, inside in self._wants)
        interceptor.set_deferred(is_deferred=self.is_deferred, in_compiled=in_compiled)

    def release(self, *, is_deferred: bool = False, in_compiled: bool = False) -> None:
        """Decrement the install count; uninstall at zero.  Does nothing at zero."""
        with Uninterrupted(), self._lock:
            want, interceptor = (is_deferred, in_compiled), self._interceptor
            if self._wants:
                self._wants.remove(want if want in self._wants else self._wants[-1])
            if self._wants:
                self._switch(interceptor)
            elif interceptor is not None:
                self._interceptor = None
                user_warnings.remove()
                interceptor.uninstall()

    def settle(self) -> BaseException | None:
        """Wait for the checks that are pending; return what is to be raised."""
        return None if self._interceptor is None else self._interceptor.settle()

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

    def add_finding(self, report: Report) -> None:
        """Remember a finding and tell the session that it belongs to."""
        self.last = report
        listener = self.listener
        if listener is not None:
            listener.add_finding(report)

    def call_failed(self, error: BaseException, arguments: Any) -> None:
        """Tell the session what a guarded call raised: the device may be lost.

        Not what a guard raised inside it, before a launch.
        """
        listener = self.listener
        if listener is not None and not isinstance(error, DeviceAssertError):
            listener.call_failed(error, arguments)

    def internal_error(self, line: str) -> None:
        """Tell the session that something of ours failed; where there is none, print it once."""
        listener = self.listener
        if listener is not None:
            listener.internal_error(line)
        elif line not in self._messages and len(self._messages) < _MOST_SAID:
            self._messages.add(line)
            print(f"cudalens: {line}", file=sys.stderr)


PROCESS = Guarding()
"""That of this process.  The dispatcher calls our kernels without a word of who installed them, and
there is one dispatcher."""
