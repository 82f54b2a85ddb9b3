"""The assertions that CUDA printed into the notebook, also while nothing was checked.

A kernel's stderr shows what the driver writes: a thread reads file descriptor 2 and gives each text
to the stream's ``write``.  A hook of the stream sees the texts on their way to the notebook and
keeps the assertions among them; nothing is held back and nothing else is kept.  An older stream,
such as Colab's, has no hooks: there the stream's ``write`` is hidden by one that listens.  (Newer
shells put a ``write`` of their own there for each cell, which would take ours away.)
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any

_MARK = "Assertion `"
_MAX_CHARACTERS = 1 << 16
_MAX_LINE = 1 << 12


class PrintedAsserts:
    """Listens to the stderr of a kernel; in a terminal nobody can, and nothing is known."""

    def __init__(self) -> None:
        self._asserts = self._begun = ""
        self._stream: Any = None
        self._write: Any = None
        # Again from inside: a signal handler may print.
        self._lock = threading.RLock()

    def attach(self) -> None:
        """Begin to listen, where the stream of this shell is a kernel's."""
        stream: Any = sys.stderr
        if not hasattr(stream, "pub_thread"):
            return
        self._stream = stream
        if hasattr(stream, "register_hook"):
            # Hooks belong to the thread that sends the texts.
            stream.pub_thread.schedule(partial(stream.register_hook, self._hook))
        else:
            self._write = stream.write
            stream.write = self._listen

    def detach(self) -> None:
        """Listen no longer; what somebody has put around our method goes on through it."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        if hasattr(stream, "register_hook"):
            if stream.pub_thread is not None:
                stream.pub_thread.schedule(partial(stream.unregister_hook, self._hook))
        elif vars(stream).get("write") == self._listen:
            del stream.write
            if stream.write != self._write:
                stream.write = self._write

    def text(self) -> str:
        """Return the assertions printed so far, one line for equal ones; empty without any."""
        from cudalens.core.device_asserts import fold  # loading the extension stays cheap

        if self._stream is not None:
            self._stream.flush()
        return "\n".join(line.text() for line in fold(self._asserts + self._begun))

    def _hook(self, message: dict[str, Any]) -> dict[str, Any]:
        self._keep(message.get("content", {}).get("text", ""))
        return message

    def _listen(self, text: str) -> Any:
        if self._stream is not None and isinstance(text, str):
            self._keep(text)
        return self._write(text)

    def _keep(self, text: str) -> None:
        """Keep the lines that assertions are on; a line may come in several texts."""
        with self._lock:
            *lines, begun = (self._begun + text).split("\n")
            self._begun = begun[-_MAX_LINE:]
            if len(self._asserts) < _MAX_CHARACTERS:
                asserts = "".join(f"{line}\n" for line in lines if _MARK in line)
                self._asserts += asserts[:_MAX_CHARACTERS]
