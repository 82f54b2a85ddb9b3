"""Cells that another cell runs, as ``%%capture`` does with its body, and ``%run`` with a notebook.

The shell counts the lines of such a cell from its own first one, and numbers it as if it came next.
The body of a magic is found again in the cell that the user typed.  Of a notebook's code cell, the
notebook and which of its code cells it is are known.  For another text only the cell that ran it is
known, and the how manieth of those it is.

IPython is only talked to, never imported.
"""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from cudalens.core._python import innermost
from cudalens.source.cell_text import comment_out, lines_above, split_lines
from cudalens.source.files import forget_cell, register_cell
from cudalens.source.timed_cells import Home, as_python, counted_lines

_MAX_CELLS = 256

_homes: dict[str, Home] = {}
"""By the name that the shell gave to the code; the newest is last."""


def note_inner(shell: Any, name: str, raw: str, outer: str, number: int, count: int) -> None:
    """Remember a cell that another one runs, before it runs.

    Args:
        name: that of its code.
        raw: its text.
        outer: the text of the cell that the user ran.
        number: the number of that one.
        count: how many cells that one has run by now, with this one.
    """
    forget_inner(name)
    _homes[name] = _in_outer(shell, raw, outer, number) or _alone(shell, raw, number, count)
    while len(_homes) > _MAX_CELLS:
        forget_inner(next(iter(_homes)))


def inner_home(filename: str) -> Home | None:
    """Return the place where the code of a file name was typed, ``None`` for other code."""
    return _homes.get(filename)


def forget_inner(name: str | None = None) -> None:
    """Undo :func:`note_inner` for the code of one name, such as the user runs again, or of all."""
    for each in list(_homes) if name is None else [name]:
        home = _homes.pop(each, None)
        if home is not None and home not in _homes.values():
            forget_cell(home.filename)


def _in_outer(shell: Any, raw: str, outer: str, number: int) -> Home | None:
    lines = counted_lines(outer)
    above = lines_above("\n".join(lines), raw)
    if above is None:
        return None
    name = f"<input-{number}-{zlib.crc32(outer.encode(errors='replace')):08x}>"
    magics = split_lines(comment_out(above))
    register_cell(name, number, [*magics, *_python(shell, lines[len(above) :])], lines)
    return Home(name, len(above) + _blank_lines(raw))


def _alone(shell: Any, raw: str, number: int, count: int) -> Home:
    name = f"<cell {count} run by In [{number}]>"
    if (place := _place_in_file(raw)) is not None:
        named = f"<{place} run by In [{number}]>"
        # Two files of one name may be run by one cell.
        name = name if any(home.filename == named for home in _homes.values()) else named
    typed = split_lines(raw)[_blank_lines(raw) :]
    register_cell(name, None, _python(shell, typed), typed)
    return Home(name)


def _place_in_file(raw: str) -> str | None:
    """Return which file under ``%run`` a text is, or which code cell of a notebook has it alone."""
    frame = innermost(lambda frame: frame.f_code.co_name == "safe_execfile_ipy")
    path = frame.f_locals.get("fname") if frame is not None else None
    if not isinstance(path, Path):
        return None
    # Whatever the file holds, IPython has read it: what cannot be found is not named.
    with suppress(OSError, ValueError, LookupError, TypeError):
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".ipynb":
            return path.name if text == raw else None
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        texts = ["".join(cell["source"]) for cell in cells]
        if texts.count(raw) == 1:
            return f"code cell {texts.index(raw) + 1} of {path.name}"
    return None


def _python(shell: Any, lines: list[str]) -> list[str]:
    """Return the lines as Python; as they are where a magic takes several of them into one."""
    found = as_python(shell, lines)
    return found if len(found) == len(lines) else lines


def _blank_lines(raw: str) -> int:
    """Count the lines above the first that has text: the shell drops them."""
    return raw.count("\n", 0, len(raw) - len(raw.lstrip()))
