"""Code that IPython's ``%time`` runs, and the cell that it was typed in.

IPython compiles all such code under the same two names, whatever the cell.  Each text that the
magic has compiled is compiled once more when somebody asks, and the one that gives the very same
code is that of the place.

IPython is only talked to, never imported.
"""

from __future__ import annotations

import ast
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import NamedTuple

from cudalens.core._python import parse
from cudalens.source.cell_text import split_lines
from cudalens.source.files import (
    forget_cell,
    is_shared,
    register_cell,
    running_shell,
    share_names,
)

_NAMES = ("<timed exec>", "<timed eval>")
_MAX_TEXTS = 256


class Home(NamedTuple):
    """Where code was typed: add ``lines`` and ``columns`` to the positions that it has."""

    filename: str
    lines: int = 0
    columns: int | None = 0
    """``None`` where the text that ran is not the typed one: its columns mean nothing."""


@dataclass(frozen=True)
class _TimedText:
    """A text that the magic has compiled."""

    python: str
    cell: int
    typed: tuple[str, ...]
    """The lines of the cell."""
    line: int | None
    """How many of them are above the text; ``None`` when it has as many lines above it itself."""

    @property
    def name(self) -> str:
        """The name that its lines have in Python's cache."""
        crc = zlib.crc32("\n".join((self.python, *self.typed)).encode(errors="replace"))
        return f"<timed-input-{self.cell}-{self.line}-{crc:08x}>"

    def home(self) -> Home:
        """Put its lines into Python's cache, at their columns in the cell."""
        above, lines = self.line or 0, split_lines(self.python)
        column: int | None = 0
        if self.line is not None:
            typed, first = self.typed[self.line], lines[0]
            column = len(typed) - len(first) if typed.endswith(first) else None
            # Python again: the magic and what its value is bound to become a statement as long.
            lines[0] = "pass;".ljust(column or 0) + first
        lines = [*[""] * above, *lines, *[""] * (len(self.typed) - above - len(lines))]
        register_cell(self.name, self.cell, lines, self.typed)
        return Home(self.name, above, column)


_texts: dict[_TimedText, list[CodeType] | None] = {}
"""What the magic makes of each, once somebody has asked; the newest is last."""
_answers: dict[int, tuple[CodeType, Home | None]] = {}
"""By ``id``: to compare codes is to compare their constants."""


def note_timed(python: str, cell: int, typed: Sequence[str], line: int | None) -> None:
    """Remember a text that ``%time`` is about to compile.

    Args:
        python: the text, without magics.
        cell: the number of its cell.
        typed: the lines of the cell.
        line: how many of them are above the text; ``None`` when it has so many lines itself.
    """
    text = _TimedText(python.rstrip(), cell, tuple(typed), line)
    _texts[text] = _texts.pop(text, None)
    share_names(*_NAMES)
    while len(_texts) > _MAX_TEXTS:
        _forget(next(iter(_texts)))


def forget() -> None:
    """Undo every :func:`note_timed`."""
    for text in list(_texts):
        _forget(text)
    _answers.clear()
    share_names()


def home_of(code: CodeType) -> Home | None:
    """Return the place where timed code was typed, ``None`` for other code and where none is
    certain.

    The newest of several cells with the same text is meant: one that was run again.
    """
    if not is_shared(code.co_filename):
        return None
    known = _answers.get(id(code))
    if known is None or known[0] is not code:
        while len(_answers) >= _MAX_TEXTS:
            _answers.pop(next(iter(_answers)), None)
        known = _answers[id(code)] = (code, _find(code))
    return known[1]


def _find(code: CodeType) -> Home | None:
    found: list[_TimedText] = []
    for text in reversed(list(_texts)):
        codes = _texts.get(text)
        if codes is None:
            codes = _texts[text] = list(_codes(text.python))
        if any(code == item and code.co_linetable == item.co_linetable for item in codes):
            found.append(text)
    # A module's code runs once, so it is that of the newest; a function may be of any of them.
    is_certain = code.co_name == "<module>" or len({(text.typed, text.line) for text in found}) == 1
    return found[0].home() if found and is_certain else None


def _forget(text: _TimedText) -> None:
    _texts.pop(text, None)
    forget_cell(text.name)


def _codes(text: str) -> Iterator[CodeType]:
    """Compile a text as the magic does, in the ways of its releases; give inner code too."""
    flags = getattr(getattr(running_shell(), "compile", None), "flags", 0)
    try:
        whole = parse(text)
        trees: list[ast.Module | ast.Expression] = [whole]
        if whole.body and isinstance(last := whole.body[-1], ast.Expr):
            trees += [ast.Module(whole.body[:-1], []), ast.Expression(last.value)]
        kinds = {ast.Module: "exec", ast.Expression: "eval"}
        todo = [compile(tree, "<timed>", kinds[type(tree)], flags, True) for tree in trees]
    except (SyntaxError, ValueError):
        return
    while todo:
        yield (code := todo.pop())
        todo += [value for value in code.co_consts if isinstance(value, CodeType)]
