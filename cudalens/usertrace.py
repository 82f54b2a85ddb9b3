"""Takes the machinery of the magics out of a traceback before the shell shows it.

Between the line of a cell that calls a magic and the code that the magic runs lie frames of the
shell and of this package.  The user reads the traceback that the cell would have had without it.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from types import TracebackType

from cudalens.rewrite import MAGIC

__all__ = ["without_machinery"]

_MACHINERY = frozenset(str(Path(__file__).with_name(name)) for name in ("magics.py", "cellrun.py"))


def without_machinery(trace: TracebackType, cells: Container[str]) -> TracebackType | None:
    """Give a traceback of the user's frames only; ``None`` when there is nothing to take out.

    Args:
        trace: the traceback as the shell got it; it is not changed.
        cells: the file names that are cells.
    """
    entries = []
    entry: TracebackType | None = trace
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    kept: list[TracebackType] = []
    for entry in entries:
        if _calls_magic(entry):
            _drop_call(kept, cells)
        elif entry.tb_frame.f_code.co_filename not in _MACHINERY:
            kept.append(entry)
    if len(kept) == len(entries) or not kept or kept[-1] is not entries[-1]:
        return None
    shown: TracebackType | None = None
    for entry in reversed(kept):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown


def _calls_magic(entry: TracebackType) -> bool:
    frame = entry.tb_frame
    is_dispatch = frame.f_code.co_name in {"run_line_magic", "run_cell_magic"}
    return is_dispatch and frame.f_locals.get("magic_name") == MAGIC


def _drop_call(kept: list[TracebackType], cells: Container[str]) -> None:
    """Drop the line of a cell that called the magic: the code that it ran stands for it."""
    if (
        kept
        and kept[-1].tb_frame.f_code.co_filename in cells
        and kept[-1].tb_frame.f_code.co_name == "<module>"
    ):
        kept.pop()
