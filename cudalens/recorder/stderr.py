"""Read what CUDA prints on file descriptor 2 while a checked block runs.

Device-side assertions never reach Python: the driver writes them to the process's error stream.
The stream is led through ``tee``, a process of its own, so everything still arrives where it was
meant to go, at once, and even when this process is aborted in the middle of a line.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from types import FrameType

from cudalens.core._python import raise_if_outside
from cudalens.core.device_asserts import AssertLine, fold

STDERR = 2
_PATIENCE_S = 0.25
"""Seconds to wait for the end of tee: a program of the user's may have the stream open."""
_ARRIVAL_S = 2.0
"""Seconds to wait for bytes on their way to tee, and for an assertion that is expected."""
_POLL_S = 0.002
_START = (
    'trap "" HUP INT QUIT TERM TSTP TTOU; '
    'exec 3<&0; "$0" -a "$1" <&3 >&2 2>/dev/null 3<&- & echo $! >"$2"'
)
"""Starts tee from a shell that ends at once: a program that waits for all of its children, or
collects them, has nothing to do with it.  A signal to all of the program's processes is not meant
for tee, which ends by itself."""


_open: list[DeviceText] = []
"""Those that are open, of all threads: the process has one descriptor 2, which each has led on to
the one before, and they need not be closed in reverse order.
"""


class DeviceText:
    """Copies file descriptor 2 while it is open; :meth:`text` gives the assertions among it.

    Raises:
        OSError: on entry, when the descriptor cannot be led elsewhere here.
    """

    def __init__(self) -> None:
        self._open: contextlib.ExitStack | None = None
        self._asserts: tuple[AssertLine, ...] = ()

    def __enter__(self) -> DeviceText:
        """Lead the descriptor through tee."""
        program = shutil.which("tee") if os.name == "posix" else None
        if program is None:
            msg = "this system has no tee program"
            raise OSError(msg)
        saved = os.dup(STDERR)
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            ours.callback(os.close, saved)
            self._copy = _nameless_file()
            ours.callback(os.close, self._copy)
            self._ended, lives = os.pipe()
            ours.callback(os.close, self._ended)
            theirs.callback(os.close, lives)
            ours.callback(self._finish)
            source, self._channel = _channel(STDERR)
            theirs.callback(os.close, source)
            ours.callback(os.close, self._channel)
            _start(program, source, self._copy, lives)
            # The shell has ended: the number of tee is in the pipe, if tee was started.
            if not select.select([self._ended], [], [], 0)[0]:
                raise OSError("tee could not be started")
            self.pid = int(os.read(self._ended, 32))
            """The number of its process."""
            _flush()
            ours.callback(self._put_back, saved)
            self._saved = saved
            os.dup2(self._channel, STDERR)
            _copy_size(saved, STDERR)
            self._open = ours.pop_all()
            _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Put the descriptor back; what was read stays readable."""
        opened, self._open = self._open, None
        if opened is not None:
            with opened:
                self._drain()

    def _put_back(self, saved: int) -> None:
        """Lead the descriptor, and what a later block has kept of it, past this block's channel.

        What the program itself has led elsewhere meanwhile, or closed, stays as it is.
        """
        with contextlib.suppress(ValueError):
            _open.remove(self)
        for kept in (STDERR, *(item._saved for item in _open)):
            if _are_same(kept, self._channel):
                os.dup2(saved, kept)

    def _finish(self) -> None:
        """Let tee end, and read what it has copied."""
        select.select([self._ended], [], [], _PATIENCE_S)
        self._asserts = self._read()

    def _drain(self) -> None:
        """Wait until tee has taken what was written so far."""
        _flush()
        deadline = time.monotonic() + _ARRIVAL_S
        while _is_waiting(self._channel) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def text(self, *, is_expected: bool = False) -> str | None:
        """Return the assertion lines, equal ones folded into one; ``None`` when there are none.

        Args:
            is_expected: wait a moment for the first of them: an assert is known to have happened.
        """
        if self._open is not None:
            self._drain()
            time.sleep(5 * _POLL_S)  # tee writes what it has just read
            self._asserts = self._read()
            deadline = time.monotonic() + (_ARRIVAL_S if is_expected else 0)
            while not self._asserts and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                self._asserts = self._read()
        return "\n".join(item.text() for item in self._asserts) or None

    def _read(self) -> tuple[AssertLine, ...]:
        with os.fdopen(os.dup(self._copy), "rb") as copy:
            copy.seek(0)
            return fold(line.decode("utf-8", errors="replace") for line in copy)


def _are_same(left: int, right: int) -> bool:
    """Return whether two descriptors are of the same file; no where one is closed."""
    try:
        return os.path.samestat(os.fstat(left), os.fstat(right))
    except OSError:
        return False


def _start(program: str, source: int, copy: int, lives: int) -> None:
    """Start tee; its number is in the pipe ``lives``, which it has open as long as it runs."""
    # No Popen: what a signal handler raises in its finalizer is lost.
    first = max(source, copy, lives) + 1
    paths = [f"/dev/fd/{first}", f"/dev/fd/{first + 1}"]
    ends = ((source, 0), (copy, first), (lives, first + 1))
    with _own_child():
        shell = os.posix_spawn(
            "/bin/sh",
            ["/bin/sh", "-c", _START, program, *paths],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, ours, its) for ours, its in ends],
        )
        with contextlib.suppress(ChildProcessError):  # the program collects all of its children
            os.waitpid(shell, 0)


@contextlib.contextmanager
def _own_child() -> Iterator[None]:
    """Start a child and collect it in this block, of which a handler of the program is not told.

    Where another child has ended meanwhile, it is called as ever.  Outside the main thread no
    handler can be replaced.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    calls: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGCHLD, lambda *call: calls.append(call))
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
        if calls and _has_ended_child():
            handler(*calls[-1])


def _has_ended_child() -> bool:
    """Return whether a child has ended that nobody has collected."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _nameless_file() -> int:
    """Return a temporary file that is already unlinked, for tee to open again."""
    if hasattr(os, "memfd_create"):  # some sandboxes do not open a deleted file again
        return os.memfd_create("cudalens")
    with tempfile.TemporaryFile("a+b") as file:
        return os.dup(file.fileno())


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


def _is_waiting(channel: int) -> bool:
    """Return whether bytes in a pipe have not been read yet; no where nobody can say."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl
        import termios

        return any(fcntl.ioctl(channel, termios.FIONREAD, bytes(4)))
    return False


def _flush() -> None:
    for stream in (sys.stderr, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except Exception as trouble:  # a closed or replaced stream has nothing to flush
            raise_if_outside(trouble)
