"""Let go of the copies of local variables that Python keeps once they were looked at.

Before Python 3.13, ``frame.f_locals`` fills a dictionary that stays with the frame.  A function
that runs on after a finding would keep every tensor that it deletes or replaces until it returns.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType

_OURS = 3
"""References to a dictionary that nobody else holds: the frame's, ours, and that of the count."""


def forget(error: BaseException | None = None) -> None:
    """Empty the copies in the running frames, and in those that ``error`` has left."""
    if sys.version_info >= (3, 13):
        return  # it is a view of the variables there
    for frame in (*_running(), *_left(error.__traceback__ if error is not None else None)):
        if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            continue  # a module or a class body: these are the variables themselves
        copies = frame.f_locals
        if sys.getrefcount(copies) <= _OURS:  # else the user holds it, by locals()
            copies.clear()


def _running() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _left(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
