"""Follows the cells of a shell: the text of the running one, and its session under ``on``.

The shell is only talked to, never imported.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cudalens.core._python import entries_from_traceback, innermost
from cudalens.notebook.display import finish
from cudalens.notebook.input_transform import MAGIC
from cudalens.notebook.traceback import ShellHandling, without_machinery
from cudalens.session.options import Options
from cudalens.source.cell_text import typed_lines
from cudalens.source.files import (
    cells_of,
    forget_noted,
    is_shared,
    note_cell,
    note_running,
    note_typed,
)
from cudalens.source.inner_cells import forget_inner, note_inner
from cudalens.source.timed_cells import forget, note

if TYPE_CHECKING:
    from cudalens.session.session import CheckSession


_SEEN = "__cudalens_seen__"
_moments = itertools.count(1)


@dataclass
class _RunningCell:
    """A cell that is running."""

    raw: str
    shown: int
    """When it began, as :func:`last_shown` counts."""
    number: int = 0
    ran: int = 0
    """How many cells it has run."""
    session: CheckSession | None = None
    """Its own session, until that is closed."""
    options: Options = field(default_factory=Options)
    explained: BaseException | None = None
    """The last exception that a magic inside it has shown a report of."""
    shell_handling: ShellHandling | None = None
    """How the shell showed exceptions before, when this cell has changed it."""
    display: _CheckedDisplay | None = None
    """The hook that checks how the value of a check is displayed, while one is there."""

    @property
    def is_magic(self) -> bool:
        """Whether it begins with the magic."""
        return self.raw.lstrip().startswith(f"%%{MAGIC}")


class CellWatch:
    """The running cells of one shell; ``always`` makes each following one a checked cell."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.always: Options | None = None
        """The options of ``%cudacheck on``, ``None`` when it is off."""
        self._cells: list[_RunningCell] = []

    @property
    def raw(self) -> str | None:
        """The running cell as the user typed it, ``None`` when it is not known."""
        return self._cells[-1].raw if self._cells else None

    def note_explained(self, error: BaseException) -> bool:
        """Remember the error that a check has dealt with; tell whether one inside it had before."""
        if not self._cells:
            return False
        before, self._cells[-1].explained = self._cells[-1].explained, error
        return before is error

    def take_exceptions(self) -> None:
        """Show the exceptions of the running cell without the frames of the magics."""
        if self._cells and all(cell.shell_handling is None for cell in self._cells):
            self._cells[-1].shell_handling = ShellHandling(self.shell, self._on_error)

    def check_display(self, value: object, options: Options, done: CheckSession) -> None:
        """Have the display of what a check returned checked, unless a session of the cell does."""
        if value is None or not self._cells or any(cell.session for cell in self._cells):
            return
        self._forget_display(cell := self._cells[-1])
        cell.display = _CheckedDisplay(self.shell, value, options, done)

    def _forget_display(self, cell: _RunningCell) -> None:
        display, cell.display = cell.display, None
        if display is not None:
            display.remove()

    def attach(self) -> None:
        """Register with the shell's events."""
        note_running(self.shell)
        self.shell.events.register("pre_execute", self._before_any)
        self.shell.events.register("pre_run_cell", self._before)
        self.shell.events.register("post_run_cell", self._after)

    def detach(self) -> None:
        """Close what is open and leave the shell's events."""
        self.always = None
        while self._cells:
            self._after(None)
        forget()
        forget_inner()
        forget_noted()
        self.shell.events.unregister("post_run_cell", self._after)
        self.shell.events.unregister("pre_run_cell", self._before)
        self.shell.events.unregister("pre_execute", self._before_any)

    def _before(self, info: Any) -> None:
        cell = _RunningCell(info.raw_cell, last_shown())
        is_checked = any(outer.session is not None for outer in self._cells)
        self._cells.append(cell)
        # Since 9.8 a cell that goes into the history has raised the count for the next one by now.
        is_raised = info.store_history and _version() >= (9, 8)
        cell.number = int(self.shell.execution_count) - bool(is_raised)
        is_inner = len(self._cells) > 1 and not info.store_history
        if not is_inner:
            note(cell.number, cell.raw)
        self._note_name(cell, info, is_inner=is_inner)
        if self.always is not None and not is_checked and not cell.is_magic:
            cell.options = self.always
            cell.session = new_session(self.always).open()
            # The session has to see an exception before the shell shows it: it adds the note, and
            # cuts the traceback where a debugger is to land.
            self.take_exceptions()

    def _before_any(self) -> None:
        """Keep where a silent cell was typed, as those of a notebook under ``%run`` are.

        Of these the shell tells nothing; the function that runs them knows the text.
        """
        if not self._cells:
            return
        frame = innermost(lambda frame: frame.f_code.co_name == "run_cell_async")
        info = None if frame is None else frame.f_locals.get("info")
        if info is not None and info.silent:
            cell = _RunningCell(info.raw_cell, 0, self.shell.execution_count)
            self._note_name(cell, info, is_inner=True)

    def _note_name(self, cell: _RunningCell, info: Any, *, is_inner: bool) -> None:
        """Keep what the shell does not: numbers of cells, lines of magics as they were typed, and
        where a cell that another one runs was typed.
        """
        raw, keeps_numbers = cell.raw, hasattr(self.shell.compile, "_filename_map")
        # The body of the magic is compiled from a text of its own.
        if cell.is_magic and keeps_numbers and not is_inner:
            return
        text = getattr(info, "transformed_cell", None)
        if text is None:  # before IPython 9.4 it does not tell
            try:
                text = str(self.shell.transform_cell(raw))
            except Exception:  # of somebody's transformer: the shell says so, and runs nothing
                return
        name = self.shell.compile.get_code_name(raw, text, cell.number)
        if is_inner:
            outermost = self._cells[0]
            outermost.ran += 1
            note_inner(self.shell, name, raw, outermost.raw, outermost.number, outermost.ran)
        else:
            forget_inner(name)
        if not keeps_numbers:
            note_cell(name, cell.number)
        if "get_ipython()" in text and not cell.is_magic:
            note_typed(name, typed_lines(raw, text))

    def _on_error(
        self,
        shell: Any,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
        tb_offset: int | None = None,
    ) -> None:
        # A cell that this one runs keeps its errors to itself: the checked one goes on.
        self._close(self._cells[-1], error)
        outer = (cell.shell_handling for cell in self._cells if cell.shell_handling is not None)
        handled, show = next(outer).before
        if isinstance(error, handled):
            show(kind, error, trace, tb_offset=tb_offset)
            return
        users = trace and without_machinery(trace, cells_of(shell))
        shell.showtraceback(
            (kind, error, users or trace),
            tb_offset=tb_offset,
            running_compiled_code=True,
        )

    def _close(self, cell: _RunningCell, error: BaseException | None) -> None:
        session, cell.session = cell.session, None
        if session is not None:
            session.close(None if error is cell.explained else error)
            finish(self.shell, session, cell.options)

    def _after(self, result: Any) -> None:
        if not self._cells:
            return  # the cell that loaded the extension
        cell = self._cells.pop()
        self._forget_display(cell)
        error = getattr(result, "error_in_exec", None)
        if error is None:
            error = shown_since(cell.shown)
        self._close(cell, error)
        if self._cells and isinstance(last := getattr(sys, "last_value", None), BaseException):
            last.__dict__[_SEEN] = 0  # a cell that another one runs keeps its errors to itself
        if error is not None and _version() < (8, 14):  # which shows no notes of an exception
            for line in _own_notes(error):
                print(line, file=sys.stderr)
        if cell.shell_handling is not None:
            cell.shell_handling.undo()


class _CheckedDisplay:
    """A display hook for the rest of a cell, which checks the display of what a check returned.

    A check ends with its code; the shell asks the value for its text and pictures only afterwards,
    and these may use the device.  The value is known by its identity and not kept alive; the shell
    puts its own hook back when the cell ends.
    """

    def __init__(self, shell: Any, value: object, options: Options, done: CheckSession) -> None:
        self._shell, self._options, self._key = shell, options, id(value)
        self._counts = done.checked_ops, done.recorded_ops
        self._before, sys.displayhook = sys.displayhook, self

    def remove(self) -> None:
        """Put the hook back that was there before, unless somebody else has taken the place."""
        if sys.displayhook is self:
            sys.displayhook = self._before

    def __call__(self, shown: object) -> None:
        """Display a value as the hook before does."""
        if id(shown) != self._key:
            self._before(shown)
            return
        self.remove()
        session = new_session(self._options)
        session.counted_before = self._counts
        try:
            with session:
                self._before(shown)
        finally:
            # A variable that the check has bound keeps its report when the display has none.
            unbound = replace(self._options, report=None)
            finish(self._shell, session, self._options if session.report else unbound)


def _own_notes(error: BaseException) -> list[str]:
    notes = error.__dict__.get("__notes__")
    found = notes if isinstance(notes, list) else []
    return [note for note in found if isinstance(note, str) and note.startswith("cudalens: ")]


def new_session(options: Options) -> CheckSession:
    """Return a session with these options, which is not open yet."""
    from cudalens.session.session import CheckSession

    return CheckSession(**options.for_session())


def last_shown() -> int:
    """Count a moment, and mark what the shell has shown last as older; nothing is kept alive."""
    moment, error = next(_moments), getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        # Not its address: the next exception may have the same once this one is gone.
        error.__dict__.setdefault(_SEEN, moment)
    return moment


def shown_since(before: int) -> BaseException | None:
    """Return the exception that ``%time`` has shown and kept, as it does before IPython 9.4.

    ``before`` is what :func:`last_shown` gave when the code began.
    """
    error = getattr(sys, "last_value", None)
    if _version() >= (9, 4) or not isinstance(error, BaseException):
        return None
    mark = error.__dict__.get(_SEEN)
    if mark is not None and mark <= before:
        return None
    links = entries_from_traceback(error.__traceback__)
    is_timed = any(is_shared(link.tb_frame.f_code.co_filename) for link in links)
    return error if is_timed else None


def _version() -> tuple[int, ...]:
    found: tuple[int, ...] = sys.modules["IPython"].version_info[:2]
    return found
