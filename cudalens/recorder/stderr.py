"""Read what CUDA prints on file descriptor 2 while a checked block runs.

Device-side assertions never reach Python: the driver writes them to the process's error stream.
The stream is led through ``tee``, a process of its own, so everything still arrives where it was
meant to go, at once, and even when this process is aborted in the middle of a line.  One ``tee``
serves all blocks of the process, until :func:`stop`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cudalens.core._python import raise_if_outside
from cudalens.core.device_asserts import AssertLine, fold

STDERR = 2
_PATIENCE_S = 0.25
_ARRIVAL_S = 2.0
"""As long tee is waited for while it is known to have bytes in hand."""
_POLL_S = 0.002
_START = 'exec 3<&0; "$0" -a "$1" <&3 >&2 2>/dev/null 3<&- & echo $!'
"""Starts tee from a shell that ends at once: a program that waits for all of its children, or
collects them, has nothing to do with it."""


class _Tee:
    """The program that writes what it reads both to where it was meant to go and to a file.

    Raises:
        OSError: it cannot be started here.
    """

    def __init__(self) -> None:
        program = shutil.which("tee") if os.name == "posix" else None
        if program is None:
            msg = "this system has no tee program"
            raise OSError(msg)
        self.owner, self.target = os.getpid(), _identity(STDERR)
        read_end, self.channel = _channel(STDERR)
        try:
            self.copy = _nameless_file()
            try:
                started = subprocess.run(
                    ["/bin/sh", "-c", _START, program, _path_of(self.copy)],
                    pass_fds=(self.copy,),
                    stdin=read_end,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # an interrupt is meant for the cell, not for tee
                    check=False,
                )
                if not started.stdout:
                    raise OSError("tee could not be started")
                self.pid = int(started.stdout)
                """The number of its process."""
            except BaseException:
                os.close(self.copy)
                raise
        except BaseException:
            os.close(self.channel)
            raise
        finally:
            os.close(read_end)

    def is_ours(self) -> bool:
        """Return whether it runs, and was started by this process."""
        return self.owner == os.getpid() and self._is_running()

    def _is_running(self) -> bool:
        with contextlib.suppress(OSError, IndexError):
            return self._state() not in "ZX"  # ended, and not collected by the first process yet
        try:
            os.kill(self.pid, 0)
        except OSError:
            return False
        return not Path("/proc/self/stat").exists()

    def _state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def size(self) -> int:
        """Return how many bytes it has written to the file."""
        return os.fstat(self.copy).st_size

    def is_busy(self) -> bool:
        """Return whether bytes are in the channel or in its hands; no where nobody can say."""
        with contextlib.suppress(ImportError, OSError, IndexError):
            import fcntl
            import termios

            if any(fcntl.ioctl(self.channel, termios.FIONREAD, bytes(4))):
                return True
            # A tee that sleeps beside an empty channel waits for more: it has written what it read.
            return self._state() in "RDTt"
        return False

    def close(self) -> None:
        """Let it end, once nobody writes any more; a program of the user's may."""
        for descriptor in (self.channel, self.copy):
            with contextlib.suppress(OSError):  # a program that becomes a daemon closes all
                os.close(descriptor)
        deadline = time.monotonic() + _PATIENCE_S
        while self.is_ours() and time.monotonic() < deadline:
            time.sleep(_POLL_S)


class _Running:
    """The tee of this process."""

    tee: _Tee | None = None


def stop() -> None:
    """Let the program end that was started for the first block."""
    tee, _Running.tee = _Running.tee, None
    if tee is not None:
        tee.close()


atexit.register(stop)


class DeviceText:
    """Copies file descriptor 2 while it is open; :meth:`text` gives the assertions among it.

    Raises:
        OSError: on entry, when the descriptor cannot be led elsewhere here.
    """

    def __init__(self) -> None:
        self._saved: int | None = None
        self._tee: _Tee | None = None
        self._start = 0
        self._asserts: tuple[AssertLine, ...] = ()

    def __enter__(self) -> DeviceText:
        """Lead the descriptor through tee, unless a block around this one does."""
        tee = _Running.tee
        if tee is not None and tee.is_ours() and _identity(STDERR) == _identity(tee.channel):
            self._tee, self._start = tee, tee.size()
            return self
        if tee is None or not tee.is_ours() or tee.target != _identity(STDERR):
            stop()
            tee = _Running.tee = _Tee()
        os.ftruncate(tee.copy, 0)
        _flush()
        self._saved = os.dup(STDERR)
        os.dup2(tee.channel, STDERR)
        _copy_size(self._saved, STDERR)
        self._tee, self._start = tee, 0
        return self

    def __exit__(self, *_: object) -> None:
        """Put the descriptor back; what was read stays readable."""
        tee, self._tee = self._tee, None
        if tee is None:
            return
        try:
            _wait_while_busy(tee)
        finally:
            saved, self._saved = self._saved, None
            if saved is not None:
                os.dup2(saved, STDERR)
                os.close(saved)
        self._asserts = self._read(tee)

    def text(self, *, is_expected: bool = False) -> str | None:
        """Return the assertion lines, equal ones folded into one; ``None`` when there are none.

        Args:
            is_expected: wait a moment for the first of them: an assert is known to have happened.
        """
        if (tee := self._tee) is not None:
            _wait_while_busy(tee)
            self._asserts = self._read(tee)
            deadline = time.monotonic() + (_PATIENCE_S if is_expected else 0)
            while not self._asserts and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                self._asserts = self._read(tee)
        return "\n".join(item.text() for item in self._asserts) or None

    def _read(self, tee: _Tee) -> tuple[AssertLine, ...]:
        with os.fdopen(os.dup(tee.copy), "rb") as copy:
            copy.seek(self._start)
            return fold(line.decode("utf-8", errors="replace") for line in copy)


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _path_of(descriptor: int) -> str:
    return f"/dev/fd/{descriptor}"


def _nameless_file() -> int:
    """Return a file of which nothing is left however this process ends, for tee to open again."""
    with tempfile.TemporaryFile("a+b") as file:
        with contextlib.suppress(OSError):
            os.close(os.open(_path_of(file.fileno()), os.O_WRONLY | os.O_APPEND))
            return os.dup(file.fileno())
        # Some sandboxes refuse one that has no name; a system without files in memory gets that.
        return os.memfd_create("cudalens") if hasattr(os, "memfd_create") else os.dup(file.fileno())


def _channel(original: int) -> tuple[int, int]:
    """Return a read and a write end.

    A terminal is replaced by a terminal: programs that ask what they write to go on as before.
    """
    if not os.isatty(original):
        return os.pipe()
    import tty

    master, slave = os.openpty()
    tty.setraw(slave)
    return master, slave


def _copy_size(source: int, target: int) -> None:
    """Give a terminal the size of another."""
    if os.isatty(target):
        import termios

        with contextlib.suppress(OSError, termios.error):
            termios.tcsetwinsize(target, termios.tcgetwinsize(source))


def _wait_while_busy(tee: _Tee) -> None:
    """Wait while bytes are known to be on their way, and until the file has stopped to grow."""
    _flush()
    deadline = time.monotonic() + _ARRIVAL_S
    size, quiet = -1, 0
    while quiet < 3 and time.monotonic() < deadline:
        now = tee.size()
        quiet = quiet + 1 if now == size and not tee.is_busy() else 0
        size = now
        time.sleep(_POLL_S)


def _flush() -> None:
    for stream in (sys.stderr, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except Exception as trouble:  # a closed or replaced stream has nothing to flush
            raise_if_outside(trouble)
