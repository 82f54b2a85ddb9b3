"""Files that users name, such as logs of any size, and the data files of this package."""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

LONGEST_LINE = 1 << 16
"""Characters that are read at once: a log may hold gigabytes without a line break."""


@cache
def packaged(name: str) -> Any:
    """Return the content of a JSON file in ``core/data``: cached, so callers must not change it."""
    file = resources.files("cudalens") / "core" / "data" / name
    return json.loads(file.read_text(encoding="utf-8"))


def expanded(name: str | Path) -> Path:
    """Return a path with ``~`` at its start replaced by the user's home."""
    return Path(os.path.expanduser(name))  # noqa: PTH111  Path's raises without a home


def lines_of(name: str) -> Iterator[str]:
    """Return the lines of a file, or of standard input for ``-``.

    Raises:
        OSError: it cannot be read; ``filename`` is set.
    """
    if name == "-":
        yield from _lines(sys.stdin.buffer)
        return
    with Path(name).open("rb") as file:
        try:
            yield from _lines(file)
        except OSError as error:
            error.filename = name
            raise


def _lines(file: Any) -> Iterator[str]:
    # PowerShell redirects output as UTF-16.  A byte that cannot be decoded is replaced.
    is_wide = file.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff")
    text = io.TextIOWrapper(file, encoding="utf-16" if is_wide else "utf-8", errors="replace")
    try:
        yield from iter(partial(text.readline, LONGEST_LINE), "")
    finally:
        text.detach()  # else the wrapper would close the file, which may be standard input


def why_unreadable(error: Exception) -> str:
    """Return the reason why a file could not be read as JSON, in a few words."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, UnicodeDecodeError):
        return "it is not a text file"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON ({error})"
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def why_unwritable(name: str) -> str | None:
    """Make the folder of a file; return why the file cannot be written, ``None`` if it can.

    The file itself is neither made nor changed.
    """
    path = expanded(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            # Opened to append, which leaves the content alone.
            with path.open("ab"):
                pass
        else:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        return error.strerror or str(error)
    return None
