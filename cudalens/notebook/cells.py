"""Checked cells of a shell: the shell runs them, this module opens and closes their sessions.

The line of ``%%cudacheck`` is removed before the shell parses the cell.  The session is opened by
the call that runs the cell's code, as the shell swallows exceptions of event callbacks and would
run the cell without its check.  Events close the session.  The shell shows its tracebacks without
our frames.  IPython is never imported here.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from cudalens.core._python import (
    add_note,
    is_of_user,
    own_notes,
    replace_attribute,
)
from cudalens.core.errors import DeviceAssertError, NonFiniteError
from cudalens.core.limits import failure_line
from cudalens.notebook import _ipython
from cudalens.notebook.display import Shown, action_line, finish, new_session
from cudalens.notebook.statement import CellPlace, give_line, place_in_cell, raising
from cudalens.notebook.timed import place_timed
from cudalens.session.options import Options, OptionsError, meant_command, split_line, subcommand
from cudalens.session.succession import SUCCESSION
from cudalens.source.cell_text import (
    counted_lines,
    is_tail,
    split_lines,
    typed_lines,
)
from cudalens.source.files import CELLS
from cudalens.source.shown_frames import (
    hide_own_frames,
    is_reported,
    shown,
    without_repeats,
    without_torch,
)

if TYPE_CHECKING:
    from cudalens.session.session import CheckSession

MAGIC = "cudacheck"
NOT_OPENED = (
    "cudalens: the check of this cell could not be opened, so the cell was not run. Without "
    f"%%{MAGIC}, or after %{MAGIC} off, it runs unchecked."
)
_MAGIC_LINE = re.compile(rf"\s*(?P<sign>%%?){MAGIC}(?:\s(?P<rest>.*))?", re.DOTALL)
# Stands for a blank line at the top, which the shell would drop.  The no-break space distinguishes
# it from a bare # of the user's, and counts as blank where it is compared with the typed line.
_BLANK = "#\N{NO-BREAK SPACE}"
_BLANK_SHOWN = re.compile(rf"(?m)^((?:\x1b\[[\d;]*m|[ \d>-])*){_BLANK}((?:\x1b\[[\d;]*m)*) *$")


@dataclass
class _Cell:
    """A cell that the shell has read and is about to run, or that is running."""

    options: Options | None = None
    """The options of its own check, ``None`` without one."""
    is_by_hand: bool = False
    """True if other code has called the magic: the exception is raised there."""
    typed: list[str] = field(default_factory=list)
    """The typed lines that set its line numbers."""
    part_of: _Cell | None = None
    """The running cell whose lower part it is, and whose line numbers it has."""
    name: str = ""
    """The file name of its code."""
    number: int | None = None
    is_silent: bool = True
    """True if the shell has no ``pre_run_cell`` event for it."""
    run: Any = None
    """The coroutine that runs its code, once it does."""
    session: CheckSession | None = None
    """Its own session, until that is closed."""
    was_checked: bool = False
    """True if its session was opened."""
    failure: BaseException | None = None
    """An exception of our callbacks for its start."""
    late: BaseException | None = None
    """A finding of deferred guards in an earlier cell, which surfaced when this one began."""
    ran: int = 0
    """Number of cells it has run."""
    explained: BaseException | None = None
    """The last exception whose report a check inside it has shown."""
    shown_by_time: BaseException | None = None
    """The exception that ``%time`` has shown and kept, as it does before IPython 9.4."""

    @property
    def is_over(self) -> bool:
        """True if its code is not running: it has ended, or was never reached."""
        return self.run is None or self.run.cr_frame is None


class CellWatch:
    """The cells of one shell; with ``always``, each following cell is checked."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.always: Options | None = None
        """The options of ``%cudacheck on``, ``None`` when it is off."""
        self._cells: list[_Cell] = []
        self._next = _Cell()
        """Facts on the text that the shell has read last."""
        self._text = ""
        """The Python that the shell has made of that text."""
        self._comments: set[str] = set()
        """Comments that replace the lines of magics in the running cell."""
        self._comments_of: dict[str, set[str]] = {}
        """The same of each cell, by its file name: ``%tb`` shows an earlier one."""
        self._is_by_hand = False
        self._timed: dict[str, CellPlace | None] = {}
        """The place of each text that ``%time`` has read."""
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Register with the shell."""
        CELLS.note_running(self.shell)
        SUCCESSION.sees_cells = True
        for event, function in self._events():
            self.shell.events.register(event, function)
        # Before the shell's own transforms, which drop blank lines and the first indentation.
        self.shell.input_transformers_cleanup.insert(0, self._read)
        self.shell.input_transformers_post.append(self._made)
        self._show, self._print = self.shell.showtraceback, self.shell._showtraceback
        self._run_nodes = self.shell.run_ast_nodes
        self._debugger = self.shell.InteractiveTB.debugger
        self._undo = [
            replace_attribute(self.shell, "run_ast_nodes", self._run_checked),
            replace_attribute(self.shell, "showtraceback", self._showtraceback),
            replace_attribute(self.shell, "_showtraceback", self._print_traceback),
            replace_attribute(self.shell.InteractiveTB, "debugger", self._debug),
            place_timed(self.shell.compile, self._timed),
        ]

    def detach(self) -> None:
        """Close open sessions, and remove everything from the shell."""
        self.always = None
        while self._cells:
            self._end(None)
        CELLS.numbers_of_shell.clear()
        SUCCESSION.sees_cells = False
        SUCCESSION.forget()
        while self._undo:
            self._undo.pop()()
        self.shell.input_transformers_post.remove(self._made)
        self.shell.input_transformers_cleanup.remove(self._read)
        for event, function in self._events():
            self.shell.events.unregister(event, function)

    def _events(self) -> list[tuple[str, Callable[..., None]]]:
        return [
            ("pre_execute", self._before_any),
            ("pre_run_cell", self._before),
            ("post_execute", self._after_any),
            ("post_run_cell", self._after),
        ]

    # --- the text ---------------------------------------------------------------------------------

    def _read(self, lines: list[str]) -> list[str]:
        """Replace the line of the magic by a comment, so that the lines below keep their numbers.

        The lower part of a running cell, as ``%%time`` runs it, gets comments for the lines that
        are above it in that cell.
        """
        try:
            return self._read_cell(lines)
        except KeyboardInterrupt:  # the shell does not catch it here: a kernel would not answer
            return ["raise KeyboardInterrupt\n"]

    _read.has_side_effects = True  # type: ignore[attr-defined]
    """The shell skips it to check whether a text is complete, which depends on the magic."""

    def _read_cell(self, lines: list[str]) -> list[str]:
        self._next = cell = _Cell(is_by_hand=self._is_by_hand)
        text = "".join(lines)
        cell.typed = counted_lines(text, f"%%{MAGIC}")
        whole = (item for item in self._cells if is_tail(split_lines(text), item.typed))
        if (part_of := next(whole, None)) is not None:
            cell.typed, cell.part_of = part_of.typed, part_of
        if not self._cells or cell.is_by_hand:
            lines = self._without_magic(lines, cell)
        if _first(lines).lstrip().startswith("%%"):
            return lines  # nothing may be above another magic
        if len(lines) < len(cell.typed):
            # Below our comments the shell would not find an indentation or prompts.
            for transform in self.shell.input_transformers_cleanup:
                if getattr(transform, "__module__", "").startswith("IPython."):
                    lines = transform(lines)
        # A cell with blank lines at the top has more lines than those that are numbered.
        above = cell.typed[: max(0, len(cell.typed) - len(lines))]
        # The shell drops blank lines at the top alone, so those below a comment stay blank.
        comments = [
            f"# {line.strip()}"
            if line.strip()
            else ""
            if any(map(str.strip, above[:at]))
            else _BLANK
            for at, line in enumerate(above)
        ]
        self._comments = (self._comments if self._cells else set()) | set(comments)
        return [*(f"{comment}\n" for comment in comments), *lines]

    def _without_magic(self, lines: list[str], cell: _Cell) -> list[str]:
        """Return the text of a cell without the magic that checks all of it; store its options.

        That is ``%%cudacheck`` over a cell, and ``%cudacheck`` before its only statement.  The
        magic itself handles anything else: help, misuse, and text that is read while a cell runs,
        for which the shell may have no event.
        """
        first = _first(lines)
        match = _MAGIC_LINE.fullmatch(first)
        if match is None:
            return lines
        below, is_line = lines[lines.index(first) + 1 :], match["sign"] == "%"
        try:
            options, rest = split_line((match["rest"] or "").strip())
            is_statement = subcommand(rest) is None and not meant_command(rest, self.shell.user_ns)
            is_alone = bool(rest) and is_statement and not _first(below)
            if options.help or (is_line and not is_alone) or (rest and not is_line):
                raise OptionsError
            # Without torch, or where the line is misused, the magic itself says what is wrong.
            importlib.import_module("torch")
        except (ImportError, OptionsError):
            return lines if below else [*lines, "\n"]  # a cell magic needs a body
        cell.options = options
        if is_line:
            cell.typed = [rest]
            return [f"{rest}\n"]
        return below

    def _made(self, lines: list[str]) -> list[str]:
        """Store the Python that the shell has made of the text that it read."""
        self._text = "".join(lines)
        if self._cells and _ipython.is_read_by_time():
            whole = self._next.part_of
            if whole is None:
                place = place_in_cell(self.shell, self._text.rstrip())
            else:  # ``%%time``, which runs the lower part of the cell
                typed = typed_lines(whole.typed, self._text)
                CELLS.register(whole.name, whole.number, split_lines(self._text), typed)
                place = CellPlace(whole.name)
            self._timed[self._text] = place
        return lines

    # --- life -------------------------------------------------------------------------------------

    def run(self, line: str, body: str) -> None:
        """Run a text as a checked cell, for code that has called the magic by hand.

        Raises:
            BaseException: the exception of the cell.
        """
        __tracebackhide__ = True
        self._is_by_hand = True
        result = self.shell.run_cell(f"%%{MAGIC} {line}".rstrip() + f"\n{body}")
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            raise error

    def _before_any(self) -> None:
        # Here and in _before, exceptions are stored: the shell would print them and run the cell.
        while self._cells and self._cells[-1].is_over:
            self._end(None)  # an interrupt kept the shell from the event of its end
        cell, self._next, self._is_by_hand = self._next, _Cell(), False
        try:
            self._cells.append(cell)
            if len(self._cells) > 1:
                # A silent cell, such as one of a notebook under %run, has no pre_run_cell event.
                info = _ipython.info_of_running_cell()
                if info is not None and info.silent:
                    self._note_name(cell, info, int(self.shell.execution_count))
        except BaseException as error:
            cell.failure = error

    def _before(self, info: Any) -> None:
        cell = self._cells[-1]
        cell.is_silent = False
        try:
            # Since 9.8 the count is raised for the next cell before a stored cell begins.
            is_raised = info.store_history and _ipython.version() >= (9, 8)
            self._note_name(cell, info, int(self.shell.execution_count) - bool(is_raised))
        except BaseException as error:
            cell.failure = error

    def _run_checked(self, nodes: Any, name: str, *args: Any, **options: Any) -> Any:
        """Open the check of a cell, and return the coroutine that runs its code.

        Where the check cannot be opened, as after an interrupt, that coroutine raises instead.
        """
        result, run = options.get("result"), None
        if result is None:
            return self._run_nodes(nodes, name, *args, **options)  # not a cell
        try:
            run = self._run_nodes(nodes, name, *args, **options)
            cell = self._begun(result.info)
            self._open(cell, result.info)
            if cell.session is None and not result.info.silent:  # silent: a front end's query
                SUCCESSION.before_unchecked(nodes)
            cell.run = run
        except BaseException as error:
            if run is not None:
                # Python warns of a coroutine that nobody awaits.
                run.close()
            run = self.shell.run_code(raising(error, name), result)
            if self._cells:
                self._cells[-1].run = run
        return run

    def _begun(self, info: Any) -> _Cell:
        """Return the cell that is about to run.

        An interrupt may have kept the shell from the events of its start.
        """
        if not self._cells or not self._cells[-1].is_over:
            self._before_any()
            if not info.silent:
                self._before(info)
        return self._cells[-1]

    def _open(self, cell: _Cell, info: Any) -> None:
        """Open the session of a cell, if it needs one.

        Raises:
            BaseException: raised by the start or the opening; the cell must not run.
        """
        failure = cell.failure
        if failure is not None and is_of_user(failure):
            raise failure
        is_inner = any(item.session for item in self._cells)
        # A cell that only turns checks off must run even where they cannot be opened.
        typed = [line.strip() for line in cell.typed if line.strip()]
        is_way_out = typed in ([f"%{MAGIC} off"], ["%unload_ext cudalens"])
        if cell.options is None and not (info.silent or is_inner or is_way_out):
            cell.options = self.always
        if cell.options is None:
            return
        try:
            cell.session = session = new_session(cell.options)
            session.is_followed = len(self._cells) == 1 and not cell.is_by_hand
            try:
                session.open()
            except DeviceAssertError as error:  # a deferred finding of an earlier cell
                cell.late = error
                session.open()
            if failure is not None:
                session.internal_error(failure_line("lines of the cell", failure))
            cell.was_checked = True
        except BaseException as error:
            cell.session = None
            if not is_of_user(error):
                add_note(error, NOT_OPENED)
            raise

    def _note_name(self, cell: _Cell, info: Any, number: int) -> None:
        """Store what the shell does not: cell numbers, typed lines, and the cell around another."""
        text = getattr(info, "transformed_cell", None) or self._text  # before IPython 9.4
        name = self.shell.compile.get_code_name(info.raw_cell, text, number)
        typed = typed_lines(cell.typed, text)
        CELLS.forget(name)
        self._comments_of[name] = self._comments
        cell.name, outermost = name, self._cells[0]
        if outermost is cell or info.store_history:
            cell.number = number
            if CELLS.of_shell(self.shell) is CELLS.numbers_of_shell:  # IPython keeps none itself
                CELLS.numbers_of_shell[name] = number
            CELLS.typed[name] = tuple(typed)
            return
        outermost.ran += 1
        title = ""
        if (cell.part_of or cell.is_by_hand) and outermost.number is not None:
            cell.number = outermost.number
        else:
            script = _ipython.running_script()
            source = "" if script is None else f" from {script}"
            title = f"<cell {outermost.ran} run by In [{outermost.number or 0}]{source}>"
        CELLS.register(name, cell.number, split_lines(text), typed, title)

    def _close(self, cell: _Cell, error: BaseException | None) -> BaseException | None:
        """Close the session of a cell, and show its report; return a finding that is found now."""
        session = cell.session
        if session is None:
            return None
        try:
            late = session.close(error)
        finally:
            cell.session = None
            session.remove()  # an interrupt may have come at the start of close()
        is_shown = error is not None and error is cell.explained
        finish(self.shell, session, cell.options or Options(), is_shown=is_shown)
        return late

    def _closed(self, cell: _Cell, error: BaseException | None) -> BaseException | None:
        """Close the session of a cell; return a finding that is found only now, or an interrupt."""
        name = None if cell.was_checked or cell.options is None else cell.options.report
        if name is not None:
            self.shell.user_ns[name] = None
        try:
            return self._close(cell, error)
        except BaseException as failure:
            if is_of_user(failure):
                return failure
            print(f"cudalens: {failure_line('end of the cell', failure)}", file=sys.stderr)
            return None

    def _after_any(self) -> None:
        if self._cells and self._cells[-1].is_silent:
            self._end(None)

    def _after(self, result: Any) -> None:
        # An empty cell has no start, and the cell that loaded the extension started before us.
        if self._cells and (result is None or result.info.raw_cell.strip()):
            self._end(result)

    def _end(self, result: Any) -> None:
        cell = self._cells[-1]
        error = getattr(result, "error_in_exec", None) or cell.shown_by_time
        try:
            late = self._closed(cell, error) or cell.late
        finally:
            self._cells.remove(cell)
        if not self._cells:
            self._timed.clear()
        if late is not None:
            give_line(self.shell, late)
            self.shell.showtraceback((type(late), late, late.__traceback__))
            if result is not None and result.success:
                result.error_in_exec = error = late
        if error is not None and _ipython.version() < (8, 14):
            # Such an IPython does not show the notes of an exception.
            is_beside = is_reported(error, Shown.report)
            action = action_line(Shown.report) if is_beside else ""
            is_said = is_beside and getattr(error, "report", None) is not None
            notes = [f"cudalens: {action}"] if action else []
            for line in ([] if is_said else notes) if is_beside else own_notes(error):
                print(line, file=sys.stderr)
        if result is not None and result.info.store_history and cell.number is not None:
            raw = result.info.raw_cell
            # The history gets the line of the magic, and not the comment in its place.
            if _MAGIC_LINE.fullmatch(raw):
                self.shell.history_manager.input_hist_parsed[cell.number] = raw.rstrip("\n")

    # --- tracebacks -------------------------------------------------------------------------------

    def note_explained(self, error: BaseException) -> bool:
        """Store the error that a check has reported; return whether an inner check had before."""
        if not self._cells:
            return False
        before, self._cells[-1].explained = self._cells[-1].explained, error
        return before is error

    @property
    def shown_by_time(self) -> BaseException | None:
        """The exception that ``%time`` has shown and kept in the running cell."""
        return self._cells[-1].shown_by_time if self._cells else None

    def _showtraceback(self, exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        """Show an exception without our frames, and without torch's where a report follows."""
        kind, error, trace = sys.exc_info() if exc_tuple is None else exc_tuple
        if not isinstance(error, BaseException):
            self._show(exc_tuple, *args, **options)
            return
        if options.get("running_compiled_code") and self._cells:
            # The session must see an exception before the shell shows it: it adds the note, and
            # cuts the traceback to the frame in which a debugger starts.
            cell = self._cells[-1]
            self._close(cell, error)
            if cell.is_by_hand:
                for outer in self._cells[-2:-1]:
                    outer.explained = error
                return
        elif self._cells and _ipython.is_shown_by_time(sys._getframe()):
            self._cells[-1].shown_by_time = error
        # Not imported, because that imports torch.
        guards = sys.modules.get("cudalens.guards.process")
        for listener in () if guards is None else guards.PROCESS.listeners:
            if (note_shown := getattr(listener, "note_shown", None)) is not None:
                note_shown(error)
        trace = shown(trace)
        hide_own_frames(error)
        is_ours = isinstance(error, DeviceAssertError | NonFiniteError)
        is_beside = is_reported(error, Shown.report)
        cut = without_torch(trace) if is_ours or is_beside else trace
        action = action_line(Shown.report) if is_beside else ""
        with without_repeats(error, Shown.report, action), self._arrow_lines(is_beside):
            self._show((kind, error, cut), *args, **options)
        # A debugger must reach the frames that are not shown.
        sys.last_traceback = self.shell.InteractiveTB.tb = trace

    def _debug(self, *args: Any, **options: Any) -> None:
        with CELLS.as_typed():
            self._debugger(*args, **options)

    @contextmanager
    def _arrow_lines(self, is_beside: bool) -> Iterator[None]:
        """Reduce a traceback to the arrow line of each frame, where the report shows the code.

        Both should be visible at once after Shift-Enter, and the other lines take a third of the
        page.
        """
        if not is_beside or getattr(self.shell, "kernel", None) is None:
            yield
            return
        traceback = self.shell.InteractiveTB
        original = traceback.structured_traceback

        def short(*args: Any, **options: Any) -> Any:
            return _ipython.arrow_lines(original(*args, **options))

        undo = replace_attribute(traceback, "structured_traceback", short)
        try:
            yield
        finally:
            undo()

    def _print_traceback(self, kind: Any, error: Any, lines: Any) -> None:
        trace = getattr(error, "__traceback__", None)
        names = {frame.f_code.co_filename for frame, _ in walk_tb(trace)}
        comments = self._comments.union(*(self._comments_of.get(name, ()) for name in names))
        # Show the lines of magics as typed, not as the comments that replaced them.
        for comment in filter(len, (item[2:] for item in comments)):
            lines = [line.replace(f"# {comment}", comment) for line in lines]
        if _BLANK in comments:
            lines = [_BLANK_SHOWN.sub(r"\1\2", line) for line in lines]
        self._print(kind, error, lines)


def _first(lines: list[str]) -> str:
    for line in lines:  # no generator: where one ends, Python drops a signal handler's exception
        if line.strip():
            return line
    return ""
