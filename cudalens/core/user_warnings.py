"""Warnings that arise in a function of ours are shown at the user's line.

torch's C++ warns at the innermost Python frame, which is ours where we call an op for the user.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from cudalens.core._python import package_of

_warnings: Any = warnings
_OURS = str(Path(__file__).parent.parent)
_REDISPATCH = str(Path("torch") / "_ops.py")
"""The file of torch's own function through which we call an op."""


class _AtUserLine:
    """Function that Python calls for each warning that passes the filters."""

    def __init__(self, show: Any) -> None:
        self.show = show

    def __call__(self, message: Any) -> None:
        with suppress(Exception):
            frame = _user_frame(message.filename, message.lineno)
            if frame is not None:
                message.filename, message.lineno = frame.f_code.co_filename, frame.f_lineno
        self.show(message)


def install() -> None:
    """Show warnings at the user's line; does nothing twice."""
    if not isinstance(_warnings._showwarnmsg, _AtUserLine):
        _warnings._showwarnmsg = _AtUserLine(_warnings._showwarnmsg)


def remove() -> None:
    """Undo :func:`install`, unless somebody else has replaced the function since."""
    if isinstance(_warnings._showwarnmsg, _AtUserLine):
        _warnings._showwarnmsg = _warnings._showwarnmsg.show


def _user_frame(filename: str, line: int) -> FrameType | None:
    """Return the frame that called ours, ``None`` where a warning is not at a frame of ours."""
    if not filename.startswith(_OURS) and not filename.endswith(_REDISPATCH):
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (filename, line):
        frame = frame.f_back
    if frame is not None and package_of(frame) != "cudalens":
        frame = frame.f_back
        if frame is None or package_of(frame) != "cudalens":
            return None  # somebody else calls torch's function
    while frame is not None and package_of(frame) == "cudalens":
        frame = frame.f_back
    return frame
