"""Decide whether an exception is torch's business: raised by torch, or by a library on top of it.

Everything else passes through a checked cell untouched and unexplained.
"""

from __future__ import annotations

from types import FrameType, TracebackType
from typing import Any

_NEVER = (
    OSError,
    ImportError,
    MemoryError,
    StopIteration,
    SyntaxError,
    NameError,
    AttributeError,
    ArithmeticError,
    UnicodeError,
)
"""Kinds that say something of the file system or of Python, wherever they were raised."""


def package_of(frame: FrameType) -> str | None:
    """Give the top-level package of a frame's module, ``None`` where it has no name."""
    name = frame.f_globals.get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else None


def stands_on_torch(frame: FrameType) -> bool:
    """Tell whether a frame's module uses torch: it *is* torch, or has it among its names."""
    names = frame.f_globals
    if package_of(frame) == "torch":
        return True
    torch_like = ("torch", "nn", "F")
    return any(getattr(names.get(name), "__name__", "").startswith("torch") for name in torch_like)


def last_traceback(traceback: TracebackType | None) -> TracebackType | None:
    """Give the innermost entry of a traceback, where the exception was raised."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback


def is_torch_error(error: BaseException, *, is_user_frame: Any, runs_torch: Any) -> bool:
    """Tell whether torch, or a library on top of it, raised ``error``.

    Args:
        is_user_frame: frame -> bool, whether it belongs to the user's own code.
        runs_torch: traceback entry -> bool, whether the expression that was running in this entry
            calls or indexes something of torch's.
    """
    if not isinstance(error, Exception) or isinstance(error, _NEVER):
        return _is_cuda_error(error)
    entry = last_traceback(error.__traceback__)
    if entry is None:
        return False
    if _is_cuda_error(error):
        return True
    if is_user_frame(entry.tb_frame):
        # C++ raised it below the user's own line, or the user's line itself did.
        return bool(runs_torch(entry))
    return stands_on_torch(entry.tb_frame)


def _is_cuda_error(error: BaseException) -> bool:
    kind = type(error)
    return kind.__module__.partition(".")[0] == "torch" or str(error).startswith("CUDA error")
