"""Workarounds for CPython: delayed interrupts, random state, parsing in threads, copied locals."""

from __future__ import annotations

import ast
import dis
import gc
import inspect
import random
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from traceback import walk_stack, walk_tb
from types import CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any, TypeVar, cast

_T = TypeVar("_T")

_MAIN = threading.main_thread()


class MoreStack:
    """Raise the recursion limit by 500 frames for a block, even where the user's stack is full.

    The limit is process-wide, so the last such block to end restores it.
    """

    FRAMES = 500
    _lock = threading.Lock()
    _open = 0
    _before = 0

    def __enter__(self) -> None:
        """Raise the limit, unless another block has done so."""
        # One call deeper than needed.  Python refuses to set a limit that the stack has reached:
        # as this call fitted under the old limit, __exit__ can restore it.
        self._raise_limit()

    def _raise_limit(self) -> None:
        kind = type(self)
        with kind._lock:
            if kind._open == 0:
                kind._before = sys.getrecursionlimit()
                sys.setrecursionlimit(kind._before + kind.FRAMES)
            kind._open += 1

    def __exit__(self, *_: object) -> None:
        """Restore the limit, unless other code has changed it since."""
        kind = type(self)
        with kind._lock:
            kind._open -= 1
            if kind._open == 0 and sys.getrecursionlimit() == kind._before + kind.FRAMES:
                sys.setrecursionlimit(kind._before)


class Uninterrupted:
    """Delay an interrupt that arrives inside the block until its end.

    For short steps that must not be split, such as installing and removing.  Python raises
    ``KeyboardInterrupt`` between any two steps of the main thread, also inside an ``__exit__``
    that is about to undo something.
    Does nothing outside the main thread, because Python interrupts no other thread.
    """

    # Class attributes instead of __init__: an interrupt may arrive at the start of any function.
    _came = False
    _handler: Any = None

    def __enter__(self) -> None:
        """Hold interrupts back from here on."""
        # getsignal() is None for a handler that was not set from Python: it cannot be restored.
        if threading.get_ident() == _MAIN.ident and signal.getsignal(signal.SIGINT) is not None:
            self._handler = signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        """Restore the handler, and raise the signal again if it arrived in the block."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came:
                signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True


def replace_attribute(owner: Any, name: str, ours: object) -> Callable[[], None]:
    """Replace an attribute; return a function that restores it unless other code replaced it."""
    # An attribute that the owner inherits is restored by deleting ours.
    before, is_own = getattr(owner, name), name in getattr(owner, "__dict__", (name,))
    setattr(owner, name, ours)

    def undo() -> None:
        if getattr(owner, name) is not ours:
            return
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    return undo


@contextmanager
def same_random_state() -> Iterator[None]:
    """Restore the state of Python's ``random`` after the block: importing rich draws from it."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


# --- exceptions that pass through our code, but are the user's ------------------------------------


# Exceptions that Python raises without arguments.
_WITHOUT_TEXT = (AssertionError, MemoryError, StopIteration, StopAsyncIteration)


def is_of_user(error: BaseException) -> bool:
    """Return whether an exception is an interrupt, or a signal handler or thread raised it."""
    return not isinstance(error, Exception) or came_from_outside(error)


def came_from_outside(error: BaseException) -> bool:
    """Return whether a signal handler, or another thread, raised a caught exception.

    Python runs handlers between any two steps of the main thread, so a time-out may surface in any
    code.  A handler has received the frame that it interrupted, or is still installed.  An
    exception that another thread has set has no arguments, and surfaces at no ``raise``.
    """
    frames: list[FrameType] = []
    entries = entries_from_traceback(error.__traceback__)
    for entry in entries:
        frame = entry.tb_frame
        if frames and (_is_given(frame, frames) or frame.f_code in _handler_codes()):
            return True
        frames.append(frame)
    if not frames or error.args or isinstance(error, _WITHOUT_TEXT):
        return False
    last = frames[-1].f_code.co_code[entries[-1].tb_lasti]
    return not dis.opname[last].startswith(("RAISE", "RERAISE"))


def raise_if_outside(error: BaseException) -> None:
    """Re-raise a caught exception if a signal handler or another thread raised it."""
    if came_from_outside(error):
        raise error


def _is_given(frame: FrameType, interrupted: list[FrameType]) -> bool:
    """Return whether a function has received one of the interrupted frames as an argument."""
    code = frame.f_code
    has_rest = bool(code.co_flags & inspect.CO_VARARGS)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + has_rest]
    variables = frame.f_locals
    values = [variables.get(name) for name in names]
    # A handler may take them as ``*args``, which is a tuple.
    values += [item for value in values if type(value) is tuple for item in value]
    return any(value is item for value in values for item in interrupted)


def _handler_codes() -> set[CodeType]:
    """Return the code of the functions and methods that handle signals now."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    functions = [item.__func__ if isinstance(item, MethodType) else item for item in handlers]
    return {item.__code__ for item in functions if isinstance(item, FunctionType)}


# --- attributes and notes of the user's exceptions ----------------------------------------------


def set_on(error: BaseException, name: str, value: object) -> None:
    """Set an attribute in the dictionary of an exception: a frozen class refuses ``setattr``."""
    with suppress(Exception):
        vars(error)[name] = value


def notes_of(error: BaseException) -> list[Any]:
    """Return the notes of an exception, an empty list if ``__notes__`` is no list."""
    notes = vars(error).get("__notes__", [])
    return notes if isinstance(notes, list) else []


def is_own_note(note: object) -> bool:
    """Return whether a note of an exception is one of cudalens."""
    return isinstance(note, str) and note.startswith("cudalens: ")


def own_notes(error: BaseException) -> list[str]:
    """Return the notes that cudalens has added to an exception."""
    return [note for note in notes_of(error) if is_own_note(note)]


def add_note(error: BaseException, line: str) -> None:
    """Add a note to an exception; a frozen class takes it, too."""
    notes = getattr(error, "__notes__", [])
    if isinstance(notes, list):
        set_on(error, "__notes__", [*notes, line])


# --- tracebacks and frames ------------------------------------------------------------------------


def entries_from_traceback(traceback: TracebackType | None) -> tuple[TracebackType, ...]:
    """Return the entries of a traceback, outermost first."""
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    return tuple(entries)


def linked(entries: Sequence[TracebackType]) -> TracebackType | None:
    """Return a new traceback with copies of these entries, outermost first; ``None`` for none."""
    made: TracebackType | None = None
    for entry in reversed(entries):
        made = TracebackType(made, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return made


def innermost(is_wanted: Callable[[FrameType], bool]) -> FrameType | None:
    """Return the innermost running frame that fulfils ``is_wanted``, else ``None``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_wanted(frame):
        frame = frame.f_back
    return frame


def package_of(frame: FrameType) -> str | None:
    """Return the top-level package of a frame's module, ``None`` where it has no name."""
    name = frame.f_globals.get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else None


# --- parsing while other threads parse ------------------------------------------------------------


_TRIES = 20
_alone = threading.Lock()
_NAME = "<text>"
_UNHEARD: Any = ("ignore", None, Warning, re.compile(re.escape(_NAME)), 0)
"""Filter that drops warnings about code that we parse: Python issued them when it compiled it."""


def parse(text: str) -> ast.Module:
    """Parse statements.

    Raises:
        SyntaxError, ValueError: as :func:`ast.parse`.
    """
    return cast(ast.Module, _parsed(text, "exec"))


def parse_expression(text: str) -> ast.Expression:
    """Parse one expression; raises as :func:`parse`."""
    return cast(ast.Expression, _parsed(text, "eval"))


def without_comment(line: str) -> str:
    """Return one line of code without its comment; unchanged if it is no complete statement."""
    if "#" not in line:
        return line
    try:
        end = parse(line.strip()).body[-1].end_col_offset
    except (SyntaxError, ValueError, IndexError):
        return line
    return line.strip().encode()[:end].decode()  # the column counts UTF-8 bytes


def _parsed(text: str, mode: str) -> ast.AST:
    for _ in range(_TRIES):
        try:
            # The lock serializes our own threads; the user's code may still parse meanwhile.
            with _alone, _without_warnings():
                # This module's `__future__` imports must not change how the user's code is parsed.
                return compile(text, _NAME, mode, ast.PyCF_ONLY_AST, dont_inherit=True)
        except SystemError:  # another thread parsed at the same time
            continue
    return compile(text, _NAME, mode, ast.PyCF_ONLY_AST, dont_inherit=True)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence warnings about code that the block parses.

    The list of filters is changed in place, as ``warnings.catch_warnings`` would show every
    once-only warning again.
    """
    filters: Any = warnings.filters
    try:
        filters.insert(0, _UNHEARD)
        yield
    finally:
        with suppress(ValueError):  # another thread has reset the filters
            filters.remove(_UNHEARD)


# --- copies of local variables that Python keeps --------------------------------------------------


_OURS = 3
"""References to a dictionary that the user does not hold: the frame's, ours, getrefcount's."""


def forget(error: BaseException | None = None) -> None:
    """Clear the copies of locals in the running frames, and in those that ``error`` has left.

    Reading ``f_locals`` copies the variables into a dictionary that the frame keeps.
    """
    if sys.version_info >= (3, 13):
        return  # there f_locals is a view of the variables
    running = walk_stack(sys._getframe(1))
    left = walk_tb(error.__traceback__ if error is not None else None)
    for frame, _ in chain(running, left):
        if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            continue  # a module or a class body: these are the variables themselves
        copies = frame.f_locals
        if sys.getrefcount(copies) <= _OURS:  # else the user holds it, by locals()
            copies.clear()


def live_instances(cls: type[_T]) -> list[_T]:
    """Return the live instances of a class and its subclasses that the garbage collector tracks.

    ``gc.get_objects`` would briefly hold the tuples that other threads are building, and CPython
    raises a ``SystemError`` in a thread that resizes such a tuple.  The referrers of a class are
    its instances and little else.
    """
    classes, found = {cls}, [cls]
    while found:
        below = [item for item in type.__subclasses__(found.pop()) if item not in classes]
        classes.update(below)
        found += below
    # Not isinstance(): it reads ``__class__``, which runs code in a library's lazy module.
    return [item for item in gc.get_referrers(*classes) if issubclass(type(item), cls)]
