"""Show warnings at the line, and once per line, as if our frames were not on the stack.

Python locates a warning by counting frames: C++ takes the innermost, ``stacklevel`` one further
out.  With our frames in between, the warning gets the wrong line, whose registry of warnings then
suppresses that of another line.  So such a warning is issued again at the right place.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from itertools import chain
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

from cudalens.core._python import package_of

_warnings: Any = warnings
_REDISPATCH = str(Path("torch") / "_ops.py")
"""The file of the torch function through which we call an op."""
_DETOUR = str(Path("torch") / "overrides.py")
"""The file of the torch function through which a function in Python calls its modes."""

_MODULES = str(Path("nn") / "modules" / "module.py")
"""The file of the torch function that runs a module's hooks, in a nested function."""
_DIRECT = "return forward_call("
"""Text of the line on which that function runs a module without hooks."""
_KINDS_OF_HOOKS = ("backward", "backward_pre", "forward", "forward_pre")


class _AtUserLine:
    """Function that Python calls for each warning that passes the filters."""

    def __init__(self, show: Any) -> None:
        self.show = show

    def __call__(self, message: Any) -> None:
        __tracebackhide__ = True
        places = None
        # If we fail, the warning is shown as Python would show it.
        with suppress(Exception):
            places = _places(sys._getframe(1), message.filename, message.lineno)
        if places is None:
            self.show(message)
            return
        wrong, right = places
        # Else the registry of the wrong module would suppress the warning at its own line.
        registry = wrong.f_globals.get("__warningregistry__")
        key = (str(message.message), message.category)
        if isinstance(registry, dict):
            # The keys under which the filter actions register a warning.
            for kind in (key, (*key, 0), (*key, message.lineno)):
                registry.pop(kind, None)
        names, direct = right.f_globals, None
        with suppress(Exception):
            # With our hooks torch calls ``forward`` on another line of the same function.
            direct = _line_without_hooks(right)
        _warnings.warn_explicit(
            message.message,
            message.category,
            right.f_code.co_filename,
            direct or right.f_lineno,
            module=names.get("__name__") or "<string>",
            # Where Python notes which warnings this module has shown.
            registry=names.setdefault("__warningregistry__", {}),
            source=message.source,
        )


def install() -> None:
    """Show warnings at the user's line; does nothing twice."""
    if not isinstance(_warnings._showwarnmsg, _AtUserLine):
        _warnings._showwarnmsg = _AtUserLine(_warnings._showwarnmsg)


def remove() -> None:
    """Undo :func:`install`, unless other code has replaced the function since."""
    if isinstance(_warnings._showwarnmsg, _AtUserLine):
        _warnings._showwarnmsg = _warnings._showwarnmsg.show


def _places(caller: FrameType, filename: str, line: int) -> tuple[FrameType, FrameType] | None:
    """Return the frame that a warning was located at, and the one without our frames.

    ``None`` if both are the same, and for a warning that we issue ourselves.

    Args:
        caller: the frame that issued the warning, or called the C++ that did.
    """
    stack = [caller]
    while (stack[-1].f_code.co_filename, stack[-1].f_lineno) != (filename, line):
        outer = stack[-1].f_back
        if outer is None:
            return None
        stack.append(outer)
    if len(stack) > 1 and package_of(caller) == "cudalens":
        return None
    right = _next_without_us(caller)
    # As many frames further out as Python counted, but without ours.
    for _ in stack[1:]:
        right = None if right is None else _next_without_us(right.f_back)
    return None if right is None or right is stack[-1] else (stack[-1], right)


def _next_without_us(frame: FrameType | None) -> FrameType | None:
    """Return a frame, or the nearest outer one that would be on the stack without us."""
    inner: FrameType | None = None
    while frame is not None:
        file, is_ours = frame.f_code.co_filename, package_of(frame) == "cudalens"
        if file.endswith(_DETOUR) and inner is not None and package_of(inner) == "cudalens":
            # The user's call of the function runs its modes, and ours calls the function again.
            inner, frame = frame, frame.f_back and frame.f_back.f_back
            continue
        outer = frame.f_back
        if outer is not None and not is_ours:
            is_redispatch = file.endswith(_REDISPATCH) and package_of(outer) == "cudalens"
            # Torch's function that runs a module's hooks; here our hooks are the only ones.
            runs_hooks = frame.f_code.co_name == "inner" and file.endswith(_MODULES)
            is_ours = is_redispatch or (runs_hooks and _has_our_hooks_alone(outer))
        if not is_ours:
            return frame
        inner, frame = frame, outer
    return None


def _has_our_hooks_alone(call: FrameType) -> bool:
    """Return whether a frame is the call of a module that has no hooks but ours."""
    code = call.f_code
    if code.co_name != "_call_impl" or not code.co_filename.endswith(_MODULES):
        return False
    module = call.f_locals.get("self")
    hooks = [getattr(module, f"_{name}_hooks", None) for name in _KINDS_OF_HOOKS]
    of_all = (call.f_globals[f"_global_{name}_hooks"].values() for name in _KINDS_OF_HOOKS)
    homes = (str(getattr(it, "__module__", "")) for it in chain.from_iterable(of_all))
    return not any(hooks) and all(home.partition(".")[0] == "cudalens" for home in homes)


def _line_without_hooks(frame: FrameType) -> int | None:
    """Return the line at which torch calls a module's ``forward`` where there are no hooks."""
    if not _has_our_hooks_alone(frame):
        return None
    code = frame.f_code
    lines = (line for _, _, line in code.co_lines() if line is not None)
    return next((at for at in lines if _DIRECT in getline(code.co_filename, at)), None)
