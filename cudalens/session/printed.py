"""Tracebacks that somebody prints while a check is open: without the frames of this package.

A traceback that leaves the block loses them when the session closes.  What a worker process, a
thread, ``logging`` or the shell prints earlier has to lose them there.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from cudalens.core._python import replace_attribute
from cudalens.guards.process import PROCESS
from cudalens.source.shown_frames import hide_own_frames, shown


class OwnFramesHidden:
    """While one is open, ``traceback`` and the hook of threads print none of our frames."""

    _lock = threading.RLock()
    _open = 0
    _undo = ExitStack()

    def __enter__(self) -> None:
        """Take the places where Python makes text of a traceback, unless that is done."""
        kind = OwnFramesHidden
        with kind._lock:
            if kind._open == 0:
                kind._undo.callback(wrap_function(traceback.TracebackException, "__init__", _init))
                kind._undo.callback(wrap_function(traceback, "extract_tb", _extract_tb))
                kind._undo.callback(wrap_function(threading, "excepthook", _excepthook))
            kind._open += 1

    def __exit__(self, *_: object) -> None:
        """Put everything back when the last one closes."""
        own = OwnFramesHidden
        with own._lock:
            own._open -= 1
            if own._open == 0:
                own._undo.close()


def shown_by_shell(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback with which the shell is to show an exception of a checked cell.

    What is open takes note that it was shown.
    """
    for listener in PROCESS.listeners:
        if (note := getattr(listener, "note_shown", None)) is not None:
            note(error)
    users = shown(trace)
    hide_own_frames(error)
    return users


def wrap_function(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Put what ``make`` makes of a function in its place, and return what undoes it."""
    before = getattr(owner, name)
    return replace_attribute(owner, name, functools.wraps(before)(make(before)))


def _init(init: Any) -> Any:
    # Named as Python names them: callers may give them by name.
    def without(
        self: Any, exc_type: Any, exc_value: Any, exc_traceback: Any, **options: Any
    ) -> None:
        init(self, exc_type, exc_value, shown(exc_traceback), **options)

    return without


def _extract_tb(extract: Any) -> Any:
    def without(tb: TracebackType | None, limit: int | None = None) -> Any:
        return extract(shown(tb), limit)

    return without


def _excepthook(hook: Any) -> Any:
    def without(args: Any) -> None:
        if args.exc_value is not None:
            hide_own_frames(args.exc_value)  # Python's own hook prints what hangs on the exception
        trace = shown(args.exc_traceback)
        kept = (args.exc_type, args.exc_value, trace, args.thread)
        hook(threading.ExceptHookArgs(kept))

    return without
