"""The assertions that CUDA printed into the notebook, also while nothing was checked.

The driver writes to file descriptor 2.  In a kernel, a thread reads it and passes each text to the
``write`` of the stream stderr.  A hook of the stream sees the texts on their way to the notebook
and stores the assertions among them.  It holds nothing back and stores nothing else.  An older
stream, such as Colab's, has no hooks: there we replace its ``write``.  (Newer shells replace
``write`` for each cell, which would remove ours.)
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
    """Collects assertions from the stderr of a kernel; in a terminal that is not possible."""

    def __init__(self) -> None:
        self._asserts = self._begun = ""
        self._stream: Any = None
        self._write: Any = None
        # Reentrant: a signal handler may print while the lock is held.
        self._lock = threading.RLock()

    def attach(self) -> None:
        """Start collecting, if the stream of this shell is a kernel's."""
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
        """Stop collecting; a wrapper that other code has put around our method keeps working."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        if hasattr(stream, "register_hook"):
            if stream.pub_thread is not None:
                stream.pub_thread.schedule(partial(stream.unregister_hook, self._hook))
        # By `==`, because each access makes a new bound method.
        elif vars(stream).get("write") == self._listen:
            # The class has ``write``, unless other code had set one on the stream before us.
            del stream.write
            if stream.write != self._write:
                stream.write = self._write

    def text(self) -> str:
        """Return the assertions printed so far, equal ones as one line; empty without any."""
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
        """Store the lines with assertions; a line may arrive in several texts."""
        with self._lock:
            *lines, begun = (self._begun + text).split("\n")
            self._begun = begun[-_MAX_LINE:]
            if len(self._asserts) < _MAX_CHARACTERS:
                asserts = "".join(f"{line}\n" for line in lines if _MARK in line)
                self._asserts += asserts[:_MAX_CHARACTERS]
