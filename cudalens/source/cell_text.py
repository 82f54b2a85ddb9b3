"""The text of a cell: the lines that the user typed, and the Python that the shell makes of it."""

from __future__ import annotations

from collections.abc import Sequence


def split_lines(text: str) -> list[str]:
    """Return the lines of ``text``; a line break at its end starts no further line."""
    return text.removesuffix("\n").split("\n")


def counted_lines(raw: str, magic: str) -> list[str]:
    """Return the lines of a cell as typed, beginning with the one that has number 1.

    The shell drops blank lines above a cell, unless it begins with ``magic``.
    """
    lines = split_lines(raw)
    first = next((at for at, line in enumerate(lines) if line.strip()), 0)
    return lines if lines[first].lstrip().startswith(magic) else lines[first:]


def is_tail(lines: Sequence[str], of: Sequence[str]) -> bool:
    """Return whether lines are the end of other lines, below nothing but cell magics."""
    count = len(of) - len(lines)
    is_same = [line.rstrip() for line in lines] == [line.rstrip() for line in of[count:]]
    above = [line.strip() for line in of[:count]]
    return count > 0 and is_same and all(not line or line.startswith("%%") for line in above)


def typed_lines(typed: Sequence[str], python: str) -> list[str]:
    """Return the typed lines that correspond to ``python``, the shell's version of a cell.

    Only lines that correspond for certain: a cell magic turns the whole cell into one line.
    """
    lines = split_lines(python)
    if typed and typed[0].lstrip().startswith("%%") and "get_ipython()" in lines[0]:
        return list(typed[:1])
    if len(typed) != len(lines):
        return []
    for line, made in zip(typed, lines, strict=True):
        is_comment = made.lstrip().removeprefix("#").strip() == line.strip()
        if not (line.rstrip() == made.rstrip() or "get_ipython()" in made or is_comment):
            return []
    return list(typed)
