"""CPython's own ways: delayed interrupts, the random state, parsing in threads, dropped locals."""

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
    """Room for 500 more frames while the block runs, also where the user's recursion ends.

    The limit is that of all threads: it is put back when the last of such blocks is left.
    """

    FRAMES = 500
    _lock = threading.Lock()
    _open = 0
    _before = 0

    def __enter__(self) -> None:
        """Raise the limit, unless another block has done so."""
        # By a function of its own: Python lowers no limit where the stack is as high as that, and
        # so there is room for __exit__ wherever this succeeded.
        self._raise_limit()

    def _raise_limit(self) -> None:
        kind = type(self)
        with kind._lock:
            if kind._open == 0:
                kind._before = sys.getrecursionlimit()
                sys.setrecursionlimit(kind._before + kind.FRAMES)
            kind._open += 1

    def __exit__(self, *_: object) -> None:
        """Put the limit back, unless somebody else has set it meanwhile."""
        kind = type(self)
        with kind._lock:
            kind._open -= 1
            if kind._open == 0 and sys.getrecursionlimit() == kind._before + kind.FRAMES:
                sys.setrecursionlimit(kind._before)


class Uninterrupted:
    """Let an interrupt that comes inside the block take effect right behind it.

    For the few steps that must be done whole, such as installing and removing: Python raises
    ``KeyboardInterrupt`` between any two steps of the main thread, also inside the ``__exit__``
    that was to undo something.
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

    def __exit__(self, *_: object) -> None:
        """Put the handler back, and give it the interrupt that came meanwhile."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came:
                signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True


def replace_attribute(owner: Any, name: str, ours: object) -> Callable[[], None]:
    """Replace an attribute, and return what puts it back unless somebody else has replaced it."""
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
    """Leave the state of Python's ``random`` as it was: rich draws from it when it is imported."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


# --- exceptions that only came out of our code, and are not our code's own ------------------------


# Exceptions that Python raises without arguments.
_WITHOUT_TEXT = (AssertionError, MemoryError, StopIteration, StopAsyncIteration)


def is_of_user(error: BaseException) -> bool:
    """Return whether what came out of our code is an interrupt or of a signal handler."""
    return not isinstance(error, Exception) or came_from_outside(error)


def came_from_outside(error: BaseException) -> bool:
    """Return whether a signal handler, or another thread, raised a caught exception.

    Python runs handlers between any two steps of the main thread, so a time-out may come out of
    whatever is running.  A handler is given the frame that it interrupted, or is installed still;
    what another thread sets has no text, and no ``raise`` stands where it came.
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
    """Raise a caught exception on if it only came out of our code: it is the user's."""
    if came_from_outside(error):
        raise error


def _is_given(frame: FrameType, interrupted: list[FrameType]) -> bool:
    """Return whether one of the arguments of a function is a frame that led to it."""
    code = frame.f_code
    has_rest = bool(code.co_flags & inspect.CO_VARARGS)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + has_rest]
    variables = frame.f_locals
    values = [variables.get(name) for name in names]
    values += [item for value in values if type(value) is tuple for item in value]
    return any(value is item for value in values for item in interrupted)


def _handler_codes() -> set[CodeType]:
    """Return the code of the functions and methods that handle signals now."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    functions = [item.__func__ if isinstance(item, MethodType) else item for item in handlers]
    return {item.__code__ for item in functions if isinstance(item, FunctionType)}


# --- what is put on an exception of somebody else's ---------------------------------------------


def set_on(error: BaseException, name: str, value: object) -> None:
    """Set an attribute of an exception, as far as its class lets anybody: it may be frozen."""
    with suppress(Exception):
        vars(error)[name] = value


def notes_of(error: BaseException) -> list[Any]:
    """Return the notes of an exception; empty where something else is in their place."""
    notes = vars(error).get("__notes__", [])
    return notes if isinstance(notes, list) else []


def is_own_note(note: object) -> bool:
    """Return whether cudalens has added a note to an exception."""
    return isinstance(note, str) and note.startswith("cudalens: ")


def own_notes(error: BaseException) -> list[str]:
    """Return the notes that cudalens has added to an exception."""
    return [note for note in notes_of(error) if is_own_note(note)]


def add_note(error: BaseException, line: str) -> None:
    """Add a note to an exception, as :func:`set_on` sets an attribute."""
    notes = getattr(error, "__notes__", [])
    if isinstance(notes, list):
        set_on(error, "__notes__", [*notes, line])


# --- tracebacks and frames ------------------------------------------------------------------------


def entries_from_traceback(traceback: TracebackType | None) -> tuple[TracebackType, ...]:
    """Return the links of a traceback, outermost first, as :func:`cudalens.source.locate` takes."""
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    return tuple(entries)


def linked(entries: Sequence[TracebackType]) -> TracebackType | None:
    """Return a traceback of entries like these, outermost first; ``None`` where there is none."""
    made: TracebackType | None = None
    for entry in reversed(entries):
        made = TracebackType(made, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return made


def innermost(is_wanted: Callable[[FrameType], bool]) -> FrameType | None:
    """Return the innermost running frame that is wanted, ``None`` where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_wanted(frame):
        frame = frame.f_back
    return frame


def package_of(frame: FrameType) -> str | None:
    """Return the top-level package of a frame's module, ``None`` where it has no name."""
    name = frame.f_globals.get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else None


# --- parsing, also while other threads parse ------------------------------------------------------


_TRIES = 20
_alone = threading.Lock()
_NAME = "<text>"
_UNHEARD: Any = ("ignore", None, Warning, re.compile(re.escape(_NAME)), 0)
"""Filter for the warnings of code that we parse: Python has warned where that was compiled."""


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
    """Return one line of code without its comment, as it is where it is no whole statement."""
    if "#" not in line:
        return line
    try:
        end = parse(line.strip()).body[-1].end_col_offset
    except (SyntaxError, ValueError, IndexError):
        return line
    return line.strip().encode()[:end].decode()


def _parsed(text: str, mode: str) -> ast.AST:
    for _ in range(_TRIES):
        try:
            # The lock keeps our own threads apart; code of the user's may still be parsing.
            with _alone, _without_warnings():
                return compile(text, _NAME, mode, ast.PyCF_ONLY_AST, dont_inherit=True)
        except SystemError:
            continue
    return compile(text, _NAME, mode, ast.PyCF_ONLY_AST, dont_inherit=True)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Let Python not warn of the code that is parsed in the block.

    In place: ``warnings.catch_warnings`` would have every warning shown again that is shown once.
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
"""References to a dictionary that nobody else holds: the frame's, ours, and that of the count."""


def forget(error: BaseException | None = None) -> None:
    """Empty the copies in the running frames, and in those that ``error`` has left."""
    if sys.version_info >= (3, 13):
        return  # it is a view of the variables there
    running = walk_stack(sys._getframe(1))
    left = walk_tb(error.__traceback__ if error is not None else None)
    for frame, _ in chain(running, left):
        if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            continue  # a module or a class body: these are the variables themselves
        copies = frame.f_locals
        if sys.getrefcount(copies) <= _OURS:  # else the user holds it, by locals()
            copies.clear()


def live_instances(cls: type[_T]) -> list[_T]:
    """Return the living instances of a class and its subclasses that the collector knows.

    ``gc.get_objects`` would for a moment hold the tuples that other threads are building, and
    CPython raises a ``SystemError`` in the thread that then resizes one.  The referrers of a class
    are its instances and little else.
    """
    classes, found = {cls}, [cls]
    while found:
        below = [item for item in type.__subclasses__(found.pop()) if item not in classes]
        classes.update(below)
        found += below
    # Asked for its class, an object can run code of its own: a lazy module of another library.
    return [item for item in gc.get_referrers(*classes) if issubclass(type(item), cls)]
