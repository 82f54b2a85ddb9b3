"""A finished call: the source lines that led to it, without frames or tensors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType

from torch import Tensor

StackLine = tuple[CodeType, int]
"""The code object and instruction of a frame, which keep no variable alive."""
IsUsers = Callable[[str], bool]
"""True if a file is the user's."""

_MAX_LINES, _USERS_LINES = 60, 2
_BACKWARD = "_engine_run_backward"


@dataclass(frozen=True, kw_only=True)
class PastCall:
    """What is kept of a deferred call, enough to report it later."""

    lines: tuple[StackLine, ...]
    """From the user's line down to the call, outermost first."""
    in_backward: bool
    forward: tuple[StackLine, ...] = ()
    """For a call in backward: where the forward op was called, if known."""
    calls_ago: int | None = 0
    """Number of guarded calls since; ``None`` for replays of a CUDA graph."""
    buffers: tuple[Tensor, ...] = ()
    """Running statistics that were written since.  Held only while the report is made."""


def running_call(is_users: IsUsers) -> tuple[int, tuple[StackLine, ...]]:
    """Return the thread that makes the running call, and its lines from the user's down.

    On autograd's threads: the stack of the thread that called backward.
    """
    lines, has_users = _lines(sys._getframe(1), is_users)
    if not has_users:
        for thread, frame in sys._current_frames().items():
            if frame.f_code.co_name == _BACKWARD:
                return thread, _lines(frame, is_users)[0]
    return threading.get_ident(), lines


def _lines(frame: FrameType | None, is_users: IsUsers) -> tuple[tuple[StackLine, ...], bool]:
    """Return the lines from the user's down to a frame, and whether any is the user's."""
    lines: list[StackLine] = []
    users = 0
    # Two lines of the user's, because the inner one may be code that Dynamo generated.
    while frame is not None and len(lines) < _MAX_LINES and users < _USERS_LINES:
        code = frame.f_code
        lines.append((code, frame.f_lasti))
        users += is_users(code.co_filename)
        frame = frame.f_back
    return tuple(lines[::-1]), users > 0


def traced_line(file: str, line: int, function: str) -> StackLine:
    """Return a stack entry for a line of a traced function, which has no frame when compiled."""
    code = compile("0", file, "exec").replace(co_firstlineno=line, co_name=function)
    # There is one position for each code unit, which has two bytes.
    positions = enumerate(code.co_positions())
    return code, next(2 * at for at, position in positions if position[0] == line)
