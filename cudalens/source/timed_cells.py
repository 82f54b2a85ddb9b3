"""Code that IPython's ``%time`` runs, found again in the cell that it was typed in.

IPython compiles all such code under the same two names, whatever the cell, and counts its lines
from the magic on.  The code itself tells where it belongs: each cell that was noted is compiled
again, as the magic did, and the one that gives the very same code is its home.  Where two places
give it, none is certain.

IPython is only talked to, never imported.
"""

from __future__ import annotations

import ast
import itertools
import re
import shlex
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

from cudalens.core._python import parse
from cudalens.core.limits import Limits
from cudalens.source.cell_text import comment_out, transformed
from cudalens.source.files import forget_cell, is_shared, register_cell, running_shell, share_names

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
_OPTION = "--no-raise-error"


class Home(NamedTuple):
    """Where code was typed: add ``lines`` and ``columns`` to the positions that it has."""

    filename: str
    lines: int = 0
    columns: int | None = 0
    """``None`` where the text that ran is not the typed one: its columns mean nothing."""


_Moved: TypeAlias = tuple[int, int | None]
"""How many lines and columns a text of a cell that is compiled by itself is moved by."""


@dataclass(kw_only=True)
class _TimedCell:
    """A cell in which something is timed."""

    number: int
    lines: tuple[str, ...]
    """As typed, from the line on that counts as the first."""
    codes: list[tuple[CodeType, _Moved]] | None = None
    """What the magic makes of it, once somebody has asked."""


class _Memory:
    """What was noted, and what was found since then."""

    def __init__(self) -> None:
        self.cells: dict[str, _TimedCell] = {}
        """By the name that their lines have in Python's cache; the newest is last."""
        self.answers: dict[int, tuple[CodeType, Home | None]] = {}
        """By ``id``: to compare codes is to compare their constants, the user's objects."""


_memory = _Memory()


def note(number: int, raw: str) -> None:
    """Remember a cell, before it runs, when something in it is timed."""
    if "%time" not in raw:
        return
    lines = counted_lines(raw)
    name = f"<timed-input-{number}-{zlib.crc32(raw.encode(errors='replace')):08x}>"
    _memory.cells.pop(name, None)
    _memory.cells[name] = _TimedCell(number=number, lines=tuple(lines))
    share_names(*_NAMES)
    while len(_memory.cells) > _MAX_CELLS:
        _forget(next(iter(_memory.cells)))
    _memory.answers = {}


def counted_lines(raw: str) -> list[str]:
    """Return the lines of a cell as typed, from the one on that counts as the first."""
    lines = raw.rstrip().split("\n")
    if raw.lstrip().startswith("%%cudacheck"):
        return lines
    # The shell drops the blank lines above others.
    return list(itertools.dropwhile(lambda line: not line.strip(), lines))


def forget() -> None:
    """Undo every :func:`note`."""
    for name in list(_memory.cells):
        _forget(name)
    share_names()
    _memory.answers = {}


def home_of(code: CodeType) -> Home | None:
    """Return the place where timed code was typed, ``None`` for other code and where none is
    certain.

    The newest of several cells with the same text is meant: one that was run again.
    """
    if not is_shared(code.co_filename):
        return None
    # Another thread may note a cell meanwhile: what is found then goes with the old answers.
    answers = _memory.answers
    found = answers.get(id(code))
    if found is None or found[0] is not code:
        shell = running_shell()
        # A transformer that somebody gave the shell may fail.
        home = None if shell is None else Limits().attempt("cell", lambda: _find(shell, code))
        found = answers[id(code)] = (code, home)
    return found[1]


def _forget(name: str) -> None:
    _memory.cells.pop(name, None)
    forget_cell(name)


def _find(shell: Any, code: CodeType) -> Home | None:
    home = text = None
    for name, cell in reversed(list(_memory.cells.items())):
        if text is not None and cell.lines == text:
            continue
        if cell.codes is None:
            cell.codes = [
                (item, moved)
                for body, moved in _parts(shell, cell.lines)
                for item in _codes(shell, body)
            ]
        places = {moved for item, moved in cell.codes if _is_same(code, item)}
        if not places:
            continue
        if len(places) > 1 or text is not None:
            return None
        home, text = _home(shell, name, cell, *places.pop()), cell.lines
        if code.co_name == "<module>":
            break  # it runs once, and no cell below the newest is running
    return home


def _home(shell: Any, name: str, cell: _TimedCell, number: int, columns: int | None) -> Home | None:
    lines = as_python(shell, cell.lines)
    if len(lines) != len(cell.lines):
        return None  # a magic over several lines: nobody can tell which line is which
    register_cell(name, cell.number, lines, cell.lines)
    return Home(name, number, columns)


def _parts(shell: Any, lines: Sequence[str]) -> Iterator[tuple[str, _Moved]]:
    """Return the texts of a cell that the magic compiles by themselves, and where they stand."""
    above = _magics_above(lines)
    if above and _magic(lines[above - 1]) == "time":
        body = "\n".join(lines[above:])
        # The shell drops the blank lines above, and the code counts without them.
        blank = body.count("\n", 0, len(body) - len(body.lstrip()))
        yield shell.transform_cell(body), (above + blank, 0)
    for number, line in enumerate(lines):
        if number >= above and (found := _LINE.match(line)):
            text = line[found.end() :]
            yield shell.transform_cell(text), (number, found.end())
            if (other := _as_arguments(text)) not in (None, text):
                yield shell.transform_cell(other), (number, None)


def _as_arguments(text: str) -> str | None:
    """Return the text that the magic runs since it has an option: words, with one blank between."""
    words = shlex.shlex(text, posix=False)
    words.whitespace_split, words.commenters = True, ""
    try:
        return " ".join(word for word in words if word != _OPTION)
    except ValueError:
        return None


def as_python(shell: Any, lines: Sequence[str]) -> list[str]:
    """Return the lines of a cell as Python: its magics as comments or as calls of the shell."""
    above = _magics_above(lines)
    text = comment_out(lines[:above]) + transformed(shell, "\n".join(lines[above:]))
    found = text.rstrip().split("\n")
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
