"""Cells that another cell runs and does not contain, such as those of a notebook under ``%run``.

The shell numbers such a cell as if it came next: it has no number, only a name that tells who ran
it.  IPython is only talked to, never imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cudalens.core._python import innermost
from cudalens.source.files import forget_cell, register_cell
from cudalens.source.timed_cells import CellPosition

_MAX_CELLS = 256

_positions: dict[str, CellPosition] = {}
"""By the name that the shell gave to the code; the newest is last."""


def note_inner(
    name: str, lines: Sequence[str], typed: Sequence[str], *, number: int, count: int
) -> None:
    """Remember a cell that another one runs, before it runs.

    Args:
        name: that of its code.
        lines, typed: its lines as Python, and as they were typed.
        number: the number of the other one.
        count: how many cells that one has run by now, with this one.
    """
    forget_inner(name)
    frame = innermost(lambda frame: frame.f_code.co_name == "safe_execfile_ipy")
    source = "" if frame is None else f" from {Path(str(frame.f_locals.get('fname'))).name}"
    position = CellPosition(f"<cell {count} run by In [{number}]{source}>")
    register_cell(position.filename, None, lines, typed)
    _positions[name] = position
    while len(_positions) > _MAX_CELLS:
        forget_inner(next(iter(_positions)))


def inner_position(filename: str) -> CellPosition | None:
    """Return the place where the code of a file name was typed, ``None`` for other code."""
    return _positions.get(filename)


def forget_inner(name: str | None = None) -> None:
    """Undo :func:`note_inner` for the code of one name, such as the user runs again, or of all."""
    for each in list(_positions) if name is None else [name]:
        if (position := _positions.pop(each, None)) is not None:
            forget_cell(position.filename)
