"""Read what CUDA prints on file descriptor 2 while a checked block runs.

Device-side assertions never reach Python: the driver writes them to the process's error stream.
The stream is piped through ``tee``, a separate process, so all output still reaches its destination
at once, even if this process is aborted in the middle of a line.
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
"""Seconds to wait for tee to end: a program of the user's may hold the stream open."""
_ARRIVAL_S = 2.0
"""Seconds to wait for unread bytes in the pipe, and for an assertion that is expected."""
_POLL_S = 0.002
_START = (
    'trap "" HUP INT QUIT TERM TSTP TTOU; '
    # A shell gives a program in the background /dev/null as its input, so the pipe is kept as 3.
    'exec 3<&0; "$0" -a "$1" <&3 >&2 2>/dev/null 3<&- & echo $! >"$2"'
)
"""Starts tee from a shell that exits at once, so that tee is not our child: a program that waits
for all of its children does not wait for tee.  tee ignores signals to the process group, because
it ends by itself."""


_open: list[DeviceText] = []
"""All open ones, of all threads.  The process has one descriptor 2, and each of them writes to the
one before.  They may be closed in any order.
"""


class DeviceText:
    """Copy file descriptor 2 while open; :meth:`text` returns the assertions in the copy.

    Raises:
        OSError: on entry, if the descriptor cannot be redirected on this system.
    """

    def __init__(self) -> None:
        self._open: contextlib.ExitStack | None = None
        self._asserts: tuple[AssertLine, ...] = ()

    def __enter__(self) -> DeviceText:
        """Redirect the descriptor through tee."""
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
            # The shell has exited, so the pid of tee is in the pipe, or tee was not started.
            if not select.select([self._ended], [], [], 0)[0]:
                raise OSError("tee could not be started")
            self.pid = int(os.read(self._ended, 32))
            """The process id of tee."""
            _flush()
            ours.callback(self._put_back, saved)
            self._saved = saved
            os.dup2(self._channel, STDERR)
            _copy_size(saved, STDERR)
            self._open = ours.pop_all()
            _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the descriptor; the copied text stays readable."""
        opened, self._open = self._open, None
        if opened is not None:
            with opened:
                self._drain()

    def _put_back(self, saved: int) -> None:
        """Redirect all descriptors that write to this block's pipe to the original stream.

        These are descriptor 2, and the copies that later blocks keep of it.  A descriptor that the
        program itself has redirected or closed meanwhile is left alone.
        """
        with contextlib.suppress(ValueError):
            _open.remove(self)
        for kept in (STDERR, *(item._saved for item in _open)):
            if _are_same(kept, self._channel):
                os.dup2(saved, kept)

    def _finish(self) -> None:
        """Wait for tee to end, and read its copy."""
        select.select([self._ended], [], [], _PATIENCE_S)
        self._asserts = self._read()

    def _drain(self) -> None:
        """Wait until tee has read everything written so far."""
        _flush()
        deadline = time.monotonic() + _ARRIVAL_S
        while _is_waiting(self._channel) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def text(self, *, is_expected: bool = False) -> str | None:
        """Return the assertion lines, equal ones folded into one; ``None`` without any.

        Args:
            is_expected: wait a moment for the first line, because an assert is known to have fired.
        """
        if self._open is not None:
            self._drain()
            time.sleep(5 * _POLL_S)  # tee has read the last bytes, and may not have written them
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
    """Return whether two descriptors refer to the same file; false if one is closed."""
    try:
        return os.path.samestat(os.fstat(left), os.fstat(right))
    except OSError:
        return False


def _start(program: str, source: int, copy: int, lives: int) -> None:
    """Start tee; its pid is in the pipe ``lives``, which it holds open while it runs."""
    # Above all descriptors in use, so that no copy of one closes another that is copied next.
    first = max(source, copy, lives) + 1
    paths = [f"/dev/fd/{first}", f"/dev/fd/{first + 1}"]
    ends = ((source, 0), (copy, first), (lives, first + 1))
    with _own_child():
        # Not Popen: Python drops an exception that a signal handler raises in its finalizer.
        shell = os.posix_spawn(
            "/bin/sh",
            ["/bin/sh", "-c", _START, program, *paths],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, ours, its) for ours, its in ends],
        )
        with contextlib.suppress(ChildProcessError):  # the program reaps all of its children
            os.waitpid(shell, 0)


@contextlib.contextmanager
def _own_child() -> Iterator[None]:
    """Hide the child of this block from the program's SIGCHLD handler.

    If another child has ended meanwhile, the handler is called afterwards.  Outside the main
    thread, Python does not allow replacing a handler.
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
    """Return whether a child has ended that was not reaped yet."""
    try:
        # `WNOWAIT` leaves the child to the program, which has to reap it.
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _nameless_file() -> int:
    """Return the descriptor of an unlinked temporary file, which tee opens by its /dev/fd path."""
    if hasattr(os, "memfd_create"):  # some sandboxes cannot reopen an unlinked file
        return os.memfd_create("cudalens")
    with tempfile.TemporaryFile("a+b") as file:
        return os.dup(file.fileno())


def _channel(original: int) -> tuple[int, int]:
    """Return a read and a write end.

    For a terminal, those of a pseudo-terminal: programs check ``isatty`` for colours and bars.
    """
    if not os.isatty(original):
        return os.pipe()
    import tty

    master, slave = os.openpty()
    # The real terminal translates line ends and echoes. Twice would be wrong.
    tty.setraw(slave)
    return master, slave


def _copy_size(source: int, target: int) -> None:
    """Copy the window size of a terminal to another."""
    if os.isatty(target):
        import termios

        with contextlib.suppress(OSError, termios.error):
            termios.tcsetwinsize(target, termios.tcgetwinsize(source))


def _is_waiting(channel: int) -> bool:
    """Return whether a pipe holds unread bytes; false where the system cannot tell."""
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
