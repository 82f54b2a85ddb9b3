"""Takes the machinery of the magics out of a traceback before the shell shows it.

Between the line of a cell that calls a magic and the code that the magic runs lie frames of the
shell and of this package.  The user reads the traceback that the cell would have had without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from pathlib import Path
from types import TracebackType
from typing import Any

from cudalens.core._python import entries_from_traceback, linked
from cudalens.notebook.input_transform import MAGIC
from cudalens.source.files import is_top

_MACHINERY = frozenset(str(Path(__file__).with_name(name)) for name in ("magics.py", "run_cell.py"))


class ShellHandling:
    """How a shell shows exceptions while a checked cell runs, until :meth:`undo`.

    Those of the cell go to ``on_error``.  All that the shell shows, of ``%run``, of ``%%capture``,
    of a display or of an interrupt too, is shown without frames of ours.
    """

    def __init__(self, shell: Any, on_error: Callable[..., Any]) -> None:
        self._shell = shell
        self.before = (shell.custom_exceptions, shell.CustomTB)
        """The exceptions that somebody else handles, and how."""
        self._own = vars(shell).get("showtraceback")
        self._show = shell.showtraceback
        shell.set_custom_exc((Exception,), on_error)
        shell.showtraceback = self._showtraceback

    def undo(self) -> None:
        """Let the shell show exceptions as it did before."""
        self._shell.custom_exceptions, self._shell.CustomTB = self.before
        del self._shell.showtraceback
        if self._own is not None:
            self._shell.showtraceback = self._own

    def _showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        kind, error, trace = sys.exc_info() if exc_tuple is None else exc_tuple
        if isinstance(error, BaseException):
            from cudalens.session.printed import shown_by_shell

            exc_tuple = (kind, error, shown_by_shell(error, trace))
        self._show(exc_tuple, *args, **kwargs)


def without_machinery(trace: TracebackType, cells: Container[str]) -> TracebackType | None:
    """Return a traceback of the user's frames only; ``None`` when there is nothing to take out.

    ``cells`` are the file names of cells.
    """
    entries = entries_from_traceback(trace)
    kept: list[TracebackType] = []
    for entry in entries:
        if not _is_machinery(entry):
            kept.append(entry)
        elif kept and _is_line_of_cell(kept[-1], cells):
            kept.pop()  # it called the magic: the code that the magic ran stands for it
    if len(kept) == len(entries) or not kept or kept[-1] is not entries[-1]:
        return None
    return linked(kept)


def _is_machinery(entry: TracebackType) -> bool:
    frame = entry.tb_frame
    if frame.f_code.co_name in {"run_line_magic", "run_cell_magic"}:
        return frame.f_locals.get("magic_name") == MAGIC
    return frame.f_code.co_filename in _MACHINERY


def _is_line_of_cell(entry: TracebackType, cells: Container[str]) -> bool:
    code = entry.tb_frame.f_code
    return code.co_filename in cells and is_top(code.co_name)
