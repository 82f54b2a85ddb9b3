"""Guards for the whole process: reference-counted installation, listeners, the last report.

There is one interceptor for all sessions, context managers and installs, because a process has one
dispatcher.
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
"""Silent findings that were reported: file, instruction, guard and argument, by code object.

A cell that runs again is a new code object, so it is reported again.
"""


class Listener(Protocol):
    """What the guards call on an open session."""

    recorder: Any
    reported: ReportedLines

    def add_finding(self, report: Report) -> None:
        """Record a finding."""

    def call_failed(self, error: BaseException, arguments: Any) -> None:
        """Record the exception of a guarded call."""

    def internal_error(self, line: str) -> None:
        """Record an internal failure."""


_MOST_SAID = 20
"""How many lines are printed at most: a line that differs in each call must not fill a log."""
MakeInterceptor = Callable[["frozenset[str] | None"], Any]


class Guarding:
    """The guards of this process, installed while the install count is above zero."""

    def __init__(self) -> None:
        # Reentrant, because `acquire` calls `release` where it fails.
        self._lock = threading.RLock()
        self._wants: list[tuple[bool, bool]] = []
        """One entry for each install: whether checks may be deferred, and are in compiled code."""
        self._interceptor: Any = None
        self._listeners: list[tuple[int, Listener]] = []
        """Open sessions, each with the thread that opened it."""
        self._devices: frozenset[str] | None = None
        self._messages: set[str] = set()
        """Lines that were printed outside sessions."""
        self._reported: ReportedLines = WeakKeyDictionary()
        self.installs: list[bool] = []
        """One entry for each open ``cudalens.install()``: whether it is deferred."""
        self.last: Report | None = None
        self.last_check = "none"
        """The result of the last checked block, in words."""
        self.lost: tuple[Report, object | None] | None = None
        """What ended the device's context: see :mod:`cudalens.evidence.lost_context`."""

    @property
    def is_installed(self) -> bool:
        """Whether the guards are in the dispatcher."""
        return self._interceptor is not None

    @property
    def checked_ops(self) -> int:
        """The number of calls checked since the guards were installed."""
        return self._interceptor.checked_ops if self._interceptor is not None else 0

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """The open sessions, innermost last."""
        return tuple(listener for _, listener in self._listeners)

    @property
    def listener(self) -> Listener | None:
        """The session that this thread belongs to, ``None`` if that is ambiguous.

        The innermost one that this thread opened.  In a thread that opened none, the innermost of
        all, if a single thread opened them.
        """
        # A copy, because another thread may open or close a session meanwhile.
        here, opened = threading.get_ident(), list(self._listeners)
        threads = {thread for thread, _ in opened}
        if here not in threads and len(threads) > 1:
            return None
        own = [item for thread, item in opened if thread == here or here not in threads]
        return own[-1] if own else None

    @property
    def reported(self) -> ReportedLines:
        """The silent findings reported by this thread's session, or by the guards without one."""
        listener = self.listener
        return self._reported if listener is None else listener.reported

    @property
    def is_deferred(self) -> bool:
        """Whether the installed guards are deferred: no call waits for the device."""
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
        """Wait for the pending checks; return the exception to raise."""
        return None if self._interceptor is None else self._interceptor.settle()

    def refresh(self) -> None:
        """Reinstall the guards, with those that were registered meanwhile."""
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
        """Add a listener; return the function that removes it."""
        entry = (threading.get_ident(), listener)
        with self._lock:
            self._listeners.append(entry)

        def stop() -> None:
            with self._lock:
                if entry in self._listeners:
                    self._listeners.remove(entry)

        return stop

    def add_finding(self, report: Report) -> None:
        """Remember a finding, and pass it to its session."""
        self.last = report
        listener = self.listener
        if listener is not None:
            listener.add_finding(report)

    def call_failed(self, error: BaseException, arguments: Any) -> None:
        """Pass the exception of a guarded call to its session: the device may be lost.

        Except for our own exceptions, which are raised before a launch.
        """
        listener = self.listener
        if listener is not None and not isinstance(error, DeviceAssertError):
            listener.call_failed(error, arguments)

    def internal_error(self, line: str) -> None:
        """Pass an internal failure to its session; without one, print it once."""
        listener = self.listener
        if listener is not None:
            listener.internal_error(line)
        elif line not in self._messages and len(self._messages) < _MOST_SAID:
            self._messages.add(line)
            print(f"cudalens: {line}", file=sys.stderr)


PROCESS = Guarding()
"""One for the process: the dispatcher calls our kernels without saying who installed them."""
