"""Facts that IPython's public interface does not offer, read from its frames and internals.

Each function names the releases or the code of IPython that it relies on.  Where another release
differs, it returns the value that its caller takes for unknown.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from cudalens.core._python import innermost

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ARROW, _AROUND = re.compile(r"-+> \d+( |$)"), re.compile(r" +\d+( |$)")
"""The marked line of a frame in a traceback, and one of those around it."""


def version() -> tuple[int, ...]:
    """Return the release of the running IPython, as ``(9, 4)``."""
    release: tuple[int, ...] = sys.modules["IPython"].version_info[:2]
    return release


def arrow_lines(parts: Any) -> Any:
    """Return a formatted traceback without the lines of code around the arrow of each frame.

    IPython can be asked for fewer lines of context, but releases and front ends count them
    differently: with one line, a kernel shows none.  So the lines are read from the finished text,
    in which a frame is a string of its own.

    Args:
        parts: the result of ``structured_traceback``: a list of strings, or text of another kind,
            which is returned unchanged.
    """
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        return parts
    return [_with_arrow_alone(part) for part in parts]


def _with_arrow_alone(frame: str) -> str:
    lines = frame.split("\n")
    plain = [_COLOUR.sub("", line) for line in lines]
    if not any(map(_ARROW.match, plain)):
        return frame
    return "\n".join(
        line for line, bare in zip(lines, plain, strict=True) if not _AROUND.match(bare)
    )


def is_read_by_time() -> bool:
    """Return whether the text that the shell transforms is that of ``%time``.

    ``ExecutionMagics.time`` calls ``transform_cell`` itself.
    """
    frame = _running("transform_cell")
    return frame is not None and _is_time(frame.f_back)


def is_shown_by_time(shower: FrameType) -> bool:
    """Return whether ``%time`` has called a function that shows a traceback.

    Before 9.4 it catches the exception of its statement, shows it and keeps it.
    """
    return _is_time(shower.f_back)


def text_of_time(compiler: FrameType) -> str:
    """Return the text that ``%time`` compiles, empty where something else calls the compiler.

    ``ExecutionMagics.time`` has it in its variable ``expr``.
    """
    caller = compiler.f_back
    return "" if caller is None else str(caller.f_locals.get("expr", ""))


def info_of_running_cell() -> Any:
    """Return the ``ExecutionInfo`` of the innermost running cell, ``None`` where it is unknown.

    The shell has no ``pre_run_cell`` event for a silent cell; ``run_cell_async`` has the ``info``.
    """
    frame = _running("run_cell_async")
    return None if frame is None else frame.f_locals.get("info")


def running_script() -> str | None:
    """Return the name of the notebook or ``.ipy`` file that ``%run`` is running cell by cell."""
    frame = _running("safe_execfile_ipy")
    return None if frame is None else Path(str(frame.f_locals.get("fname"))).name


def caller_of_line_magic() -> FrameType | None:
    """Return the frame whose line is the running line magic, ``None`` without one.

    The shell turns ``%name rest`` into a call of ``run_line_magic``.
    """
    frame = _running("run_line_magic")
    return None if frame is None else frame.f_back


def _running(name: str) -> FrameType | None:
    return innermost(lambda frame: frame.f_code.co_name == name)


def _is_time(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_name == "time"
