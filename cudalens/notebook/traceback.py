"""Takes the machinery of the magics out of a traceback before the shell shows it.

Between the line of a cell that calls a magic and the code that the magic runs lie frames of the
shell and of this package.  The user reads the traceback that the cell would have had without it.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from types import TracebackType

from cudalens.notebook.input_transform import MAGIC
from cudalens.source.files import is_top

__all__ = ["without_machinery"]

_MACHINERY = frozenset(str(Path(__file__).with_name(name)) for name in ("magics.py", "run_cell.py"))


def without_machinery(trace: TracebackType, cells: Container[str]) -> TracebackType | None:
    """Return a traceback of the user's frames only; ``None`` when there is nothing to take out.

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
        if not _is_machinery(entry):
            kept.append(entry)
        elif kept and _is_line_of_cell(kept[-1], cells):
            kept.pop()  # it called the magic: the code that the magic ran stands for it
    if len(kept) == len(entries) or not kept or kept[-1] is not entries[-1]:
        return None
    shown: TracebackType | None = None
    for entry in reversed(kept):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown


def _is_machinery(entry: TracebackType) -> bool:
    frame = entry.tb_frame
    if frame.f_code.co_name in {"run_line_magic", "run_cell_magic"}:
        return frame.f_locals.get("magic_name") == MAGIC
    return frame.f_code.co_filename in _MACHINERY


def _is_line_of_cell(entry: TracebackType, cells: Container[str]) -> bool:
    code = entry.tb_frame.f_code
    return code.co_filename in cells and is_top(code.co_name)
