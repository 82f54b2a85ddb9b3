"""Code that IPython's ``%time`` runs, found again in the cell that it was typed in.

IPython compiles all such code under the same two names, whatever the cell, and counts its lines
from the magic on.  The code itself tells where it belongs: each cell that was noted is compiled
again, as the magic did, and the one that gives the very same code is its home.

IPython is only talked to, never imported.
"""

from __future__ import annotations

import ast
import re
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

from cudalens.files import forget_cell, register_cell, running_shell, share_name, unshare_name
from cudalens.parsing import parse

__all__ = ["Home", "forget", "home_of", "note"]

_NAMES = ("<timed exec>", "<timed eval>")
_MAX_CELLS = 256
_PASSED_ON = frozenset({"capture", "cudacheck"})
"""Cell magics that hand their body on as it is, so that the magic below them has its turn."""
_LINE = re.compile(
    r"\s*(?:[\w.,][\w.,\s]*=\s*)?"  # what its value is bound to
    r"(?:%cudacheck\s+(?:\S+\s+)*?)?"
    r"%time\s+(?:-\S+\s+)*(?=\S)"
)
_STAND_IN = "pass;"
"""As long as ``%time``: the statement behind it keeps its columns, and the line is Python."""

_cells: OrderedDict[str, _Cell] = OrderedDict()


class Home(NamedTuple):
    """Where code was typed: add ``lines`` and ``columns`` to the positions that it has."""

    filename: str
    lines: int = 0
    columns: int = 0


class _Cell(NamedTuple):
    """A cell in which something is timed."""

    number: int
    lines: tuple[str, ...]
    """As typed, from the line on that counts as the first."""


class _Part(NamedTuple):
    """A text of a cell that is compiled by itself."""

    text: str
    lines: int
    columns: int


def note(number: int, raw: str) -> None:
    """Remember a cell, before it runs, when something in it is timed."""
    if "%time" not in raw:
        return
    lines = raw.rstrip().split("\n")
    if not raw.lstrip().startswith("%%cudacheck"):  # the shell drops the blank lines above others
        while lines and not lines[0].strip():
            lines.pop(0)
    cell = _Cell(number, tuple(lines))
    _cells[f"<timed-input-{number}-{zlib.crc32(raw.encode()):08x}>"] = cell
    for name in _NAMES:
        share_name(name)
    while len(_cells) > _MAX_CELLS:
        forget_cell(_cells.popitem(last=False)[0])
    home_of.cache_clear()


def forget() -> None:
    """Undo every :func:`note`."""
    while _cells:
        forget_cell(_cells.popitem()[0])
    for name in _NAMES:
        unshare_name(name)
    home_of.cache_clear()


@lru_cache(maxsize=1024)
def home_of(code: CodeType) -> Home | None:
    """Give the place where timed code was typed, ``None`` for other code and where none is certain.

    The newest cell wins: one that was run twice gives the same code.
    """
    if code.co_filename not in _NAMES or (shell := running_shell()) is None:
        return None
    try:
        return _find(shell, code)
    except Exception:  # of a transformer that somebody gave the shell
        return None


def _find(shell: Any, code: CodeType) -> Home | None:
    for name, cell in reversed(_cells.items()):
        for part in _parts(shell, cell.lines):
            if any(_is_same(code, item) for item in _codes(shell, part.text)):
                return _home(shell, name, cell, part)
    return None


def _home(shell: Any, name: str, cell: _Cell, part: _Part) -> Home | None:
    lines = _as_python(shell, cell.lines)
    if len(lines) != len(cell.lines):
        return None  # a magic over several lines: nobody can tell which line is which
    register_cell(name, cell.number, lines, cell.lines)
    return Home(name, part.lines, part.columns)


def _parts(shell: Any, lines: Sequence[str]) -> Iterator[_Part]:
    above = _magics_above(lines)
    if above and _magic(lines[above - 1]) == "time":
        body = "\n".join(lines[above:])
        # The shell drops the blank lines above, and the code counts without them.
        blank = body.count("\n", 0, len(body) - len(body.lstrip()))
        yield _Part(shell.transform_cell(body), above + blank, 0)
    for number, line in enumerate(lines):
        if number >= above and (found := _LINE.match(line)):
            yield _Part(shell.transform_cell(line[found.end() :]), number, found.end())


def _as_python(shell: Any, lines: Sequence[str]) -> list[str]:
    """Give the lines of a cell as Python: its magics as comments or as calls of the shell."""
    above = _magics_above(lines)
    body = lines[above:]
    blank = next((number for number, line in enumerate(body) if line.strip()), len(body))
    text = str(shell.transform_cell("\n".join(body[blank:])))
    found = [f"# {line}".rstrip() for line in lines[:above]] + [""] * blank
    found += text.rstrip().split("\n")
    for number, line in enumerate(lines):
        match = _LINE.match(line) if number >= above else None
        if match and number < len(found):
            indent = line[: len(line) - len(line.lstrip())]
            found[number] = (indent + _STAND_IN).ljust(match.end()) + line[match.end() :]
    return found


def _magics_above(lines: Sequence[str]) -> int:
    """Count the lines down to the last of the cell magics that stand above the code."""
    count = 0
    for number, line in enumerate(lines, start=1):
        name = _magic(line)
        if name is not None:
            count = number
        if name not in _PASSED_ON and line.strip():
            break
    return count


def _magic(line: str) -> str | None:
    return line[2:].split(maxsplit=1)[0] if re.match(r"%%\w", line) else None


def _codes(shell: Any, text: str) -> Iterator[CodeType]:
    """Compile a text as the magic does, in the ways of its releases; give inner code too."""
    try:
        whole = parse(text)
        codes = [_compiled(shell, whole, "exec")]
        if whole.body and isinstance(last := whole.body[-1], ast.Expr):
            codes.append(_compiled(shell, ast.Module(whole.body[:-1], []), "exec"))
            codes.append(_compiled(shell, ast.Expression(last.value), "eval"))
    except (SyntaxError, ValueError):
        return
    for code in codes:
        yield from _with_inner(code)


def _compiled(shell: Any, tree: ast.Module | ast.Expression, mode: str) -> CodeType:
    code: CodeType = compile(tree, "<timed>", mode, shell.compile.flags, dont_inherit=True)
    return code


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _with_inner(value)


def _is_same(code: CodeType, other: CodeType) -> bool:
    return code == other and code.co_linetable == other.co_linetable
