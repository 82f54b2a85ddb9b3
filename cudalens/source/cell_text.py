"""The text of a cell: what the user typed, what the shell makes of it, and how they correspond.

The shell is only talked to, never imported.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Sequence
from typing import Any

_NO_CODE = (tokenize.COMMENT, tokenize.ENDMARKER, tokenize.NEWLINE, tokenize.NL)


def transformed(shell: Any, body: str) -> str:
    """Turn the magics and shell escapes of ``body`` into Python, at their lines."""
    # The transformation drops leading blank lines, which would shift every line number.
    start = body.rfind("\n", 0, len(body) - len(body.lstrip())) + 1
    return "\n" * body.count("\n", 0, start) + str(shell.transform_cell(body[start:]))


def comment_out(lines: Sequence[str]) -> str:
    """Return the lines as comments, so that the line numbers below them stay."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def lines_above(raw: str | None, body: str) -> list[str] | None:
    """Return the lines that stand above the body in the raw cell.

    ``None`` when the body is not the end of the raw cell: somebody called the magic by hand.
    """
    if raw is None:
        return None
    raw_lines, lines = split_lines(raw), split_lines(body)
    count = len(raw_lines) - len(lines)
    tail = zip(raw_lines[count:], lines, strict=False)
    if count < 1 or not all(full.rstrip().endswith(part.strip()) for full, part in tail):
        return None
    return raw_lines[:count]


def typed_lines(raw: str, text: str) -> list[str]:
    """Return the typed lines that stand behind those of ``text``, what the shell made of ``raw``.

    From the first on, as many as are certain: a cell magic takes all below it into one line.
    """
    typed, lines = split_lines(raw), split_lines(text)
    blank = len(typed) - len(split_lines(raw.lstrip()))  # the shell drops blank lines above a cell
    kept = len(lines) - len(split_lines(text.lstrip()))
    typed = typed[max(0, blank - kept) :]
    if typed[kept:] and typed[kept].startswith("%%"):
        typed = typed[: kept + 1]
    elif len(typed) != len(lines):
        return []
    pairs = zip(typed, lines, strict=False)
    is_certain = all(a.rstrip() == b.rstrip() or "get_ipython()" in b for a, b in pairs)
    return typed if is_certain else []


def ends_in_semicolon(text: str) -> bool:
    """Return whether the shell would not show the value of ``text``.

    Before IPython 8 it tells that of nothing but the cell as a whole.
    """
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    code = [item for item in tokens if item.type not in _NO_CODE]
    return bool(code) and code[-1].string == ";"


def split_lines(text: str) -> list[str]:
    """Return the lines of ``text``; a line break at its end begins none."""
    return text.removesuffix("\n").split("\n")
