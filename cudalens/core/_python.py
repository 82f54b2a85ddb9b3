"""Put off an interrupt for the few steps that must be done whole, such as installing and removing.

Python raises ``KeyboardInterrupt`` between any two steps of the main thread, also inside the
``__exit__`` that was to undo something.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Uninterrupted"]

_MAIN = threading.main_thread()


class Uninterrupted:
    """Let an interrupt that comes inside the block take effect right behind it.

    Does nothing outside the main thread, which Python never interrupts.
    """

    # Class attributes in place of an __init__: an interrupt may come wherever a function begins.
    _came = False
    _handler: Any = None

    def __enter__(self) -> None:
        """Take note of interrupts from here on."""
        # A handler that is not Python's own cannot be put back, so it stays.
        if threading.get_ident() == _MAIN.ident and signal.getsignal(signal.SIGINT) is not None:
            self._handler = signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put the handler back, and give it the interrupt that came meanwhile."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came:
                signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
