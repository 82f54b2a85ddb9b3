"""Read what CUDA prints on file descriptor 2 while a checked block runs.

Device-side assertions never reach Python: the driver writes them to the process's error stream.
The stream is led through ``tee``, a process of its own, so everything still arrives where it was
meant to go, at once, and even when this process is aborted in the middle of a line.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from cudalens.core._python import raise_if_outside
from cudalens.core.device_asserts import AssertLine, fold

STDERR = 2
_PATIENCE_S = 0.25
_ARRIVAL_S = 2.0
"""As long tee is waited for while it is known to have bytes in hand."""
_POLL_S = 0.002


class DeviceText:
    """Copies file descriptor 2 while it is open; :meth:`text` gives the assertions among it.

    Raises:
        OSError: on entry, when the descriptor cannot be led elsewhere here.
    """

    def __init__(self) -> None:
        self._saved: int | None = None
        self._copy: IO[bytes] | None = None
        self._tee: subprocess.Popen[bytes] | None = None
        self._asserts: tuple[AssertLine, ...] = ()

    def __enter__(self) -> DeviceText:
        """Lead the descriptor through tee."""
        program = shutil.which("tee") if os.name == "posix" else None
        if program is None:
            msg = "there is no tee program on this system"
            raise OSError(msg)
        try:
            self._saved = os.dup(STDERR)
            # A file without a name: nothing is left of it however this process ends.
            self._copy = tempfile.TemporaryFile("a+b")
            if not _opens_again(self._copy.fileno()):
                self._copy.close()
                self._copy = os.fdopen(os.memfd_create("cudalens"), "a+b")
            self._lead_through(program, self._copy.fileno())
        except BaseException:
            self._drop()
            raise
        return self

    def _lead_through(self, program: str, copy: int) -> None:
        assert self._saved is not None
        read_end, write_end = _channel(self._saved)
        try:
            self._tee = subprocess.Popen(
                [program, "-a", _path_of(copy)],
                pass_fds=(copy,),
                stdin=read_end,
                stdout=self._saved,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt is meant for the cell, not for tee
            )
            _flush()
            os.dup2(write_end, STDERR)
        finally:
            os.close(read_end)
            os.close(write_end)

    def __exit__(self, *_: object) -> None:
        """Put the descriptor back; what was read stays readable."""
        if self._saved is None or self._tee is None:
            return
        try:
            _let_read(self._tee)
        finally:
            os.dup2(self._saved, STDERR)
        # A program that the cell started may hold the stream open: tee then goes on for it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._tee.wait(timeout=_PATIENCE_S)
        self._asserts = self._fold()
        self._drop()

    def _drop(self) -> None:
        if self._saved is not None:
            os.close(self._saved)
            self._saved = None
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    def _fold(self) -> tuple[AssertLine, ...]:
        if self._copy is None:
            return self._asserts
        self._copy.seek(0)
        return fold(line.decode("utf-8", errors="replace") for line in self._copy)

    def text(self, *, is_expected: bool = False) -> str | None:
        """Return the assertion lines, equal ones folded into one; ``None`` when there are none.

        Args:
            is_expected: wait a moment for the first of them: an assert is known to have happened.
        """
        self._arrive()
        self._asserts = self._fold()
        deadline = time.monotonic() + (_PATIENCE_S if is_expected else 0)
        while not self._asserts and self._copy is not None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self._asserts = self._fold()
        return "\n".join(item.text() for item in self._asserts) or None

    def _arrive(self) -> None:
        """Wait a moment for what is on its way through the channel."""
        if self._copy is None or self._tee is None:
            return
        _flush()
        size, deadline = -1, time.monotonic() + _ARRIVAL_S
        quiet = 0
        while quiet < 3 and time.monotonic() < deadline:
            now = os.fstat(self._copy.fileno()).st_size
            quiet = quiet + 1 if now == size and not _is_busy(self._tee) else 0
            size = now
            time.sleep(_POLL_S)


def _path_of(descriptor: int) -> str:
    return f"/dev/fd/{descriptor}"


def _opens_again(descriptor: int) -> bool:
    """Return whether tee can open the file: some sandboxes refuse one that has no name."""
    try:
        os.close(os.open(_path_of(descriptor), os.O_WRONLY | os.O_APPEND))
    except OSError:
        # A system without files in memory gets what it has.
        return not hasattr(os, "memfd_create")
    return True


def _channel(original: int) -> tuple[int, int]:
    """Return a read and a write end.

    A terminal is replaced by a terminal: programs that ask what they write to go on as before.
    """
    if not os.isatty(original):
        return os.pipe()
    import termios
    import tty

    master, slave = os.openpty()
    tty.setraw(slave)
    with contextlib.suppress(OSError, termios.error):
        termios.tcsetwinsize(slave, termios.tcgetwinsize(original))
    return master, slave


def _is_busy(tee: subprocess.Popen[bytes]) -> bool:
    """Whether bytes are in the channel or in tee's hands; where nobody can say, they are not."""
    with contextlib.suppress(ImportError, OSError, IndexError):
        import fcntl
        import termios

        if any(fcntl.ioctl(STDERR, termios.FIONREAD, bytes(4))):
            return True
        # A tee that sleeps beside an empty channel waits for more: it has written what it read.
        state = Path(f"/proc/{tee.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in "RDTt"
    return False


def _let_read(tee: subprocess.Popen[bytes]) -> None:
    """Wait while bytes are known to be on their way."""
    _flush()
    deadline = time.monotonic() + _ARRIVAL_S
    while _is_busy(tee) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _flush() -> None:
    for stream in (sys.stderr, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except Exception as trouble:  # a closed or replaced stream has nothing to flush
            raise_if_outside(trouble)
