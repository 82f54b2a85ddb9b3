"""Code that IPython's ``%time`` runs, and the cell that it was typed in.

IPython compiles all such code under the same two names, whatever the cell.  The texts that the
magic has compiled are compiled once more when somebody asks: the one that gives the very same code
is that of the place.

IPython is only talked to, never imported.
"""

from __future__ import annotations

import ast
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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
_MAX_TEXTS = 64


class CellPosition(NamedTuple):
    """Where code was typed: add ``lines`` and ``columns`` to the positions that it has."""

    filename: str
    lines: int = 0
    columns: int | None = 0
    """``None`` where the text that ran is not the typed one: its columns mean nothing."""


@dataclass
class _TimedText:
    """A text that the magic has compiled."""

    python: str
    cell: int
    typed: Sequence[str]
    """The lines of the cell."""
    line: int | None
    """How many of them are above the text; ``None`` when it has as many lines above it itself."""

    @cached_property
    def codes(self) -> list[CodeType]:
        """What the magic makes of it."""
        return list(_codes(self.python))

    @cached_property
    def position(self) -> CellPosition:
        """Its place, where its lines are at their columns of the cell then."""
        above, lines = self.line or 0, split_lines(self.python)
        column: int | None = 0
        if self.line is not None:
            typed, first = self.typed[self.line], lines[0]
            column = len(typed) - len(first) if typed.endswith(first) else None
            # Python again: the magic and what its value is bound to become a statement as long.
            lines[0] = "pass;".ljust(column or 0) + first
        lines = [*[""] * above, *lines, *[""] * (len(self.typed) - above - len(lines))]
        crc = zlib.crc32("\n".join((*lines, *self.typed)).encode(errors="replace"))
        name = f"<timed-input-{self.cell}-{crc:08x}>"
        register_cell(name, self.cell, lines, self.typed)
        _registered.add(name)
        return CellPosition(name, above, column)


_texts: deque[_TimedText] = deque(maxlen=_MAX_TEXTS)
_answers: dict[int, tuple[CodeType, CellPosition | None]] = {}
"""By ``id``: to compare codes is to compare their constants."""
_registered: set[str] = set()


def note_timed(python: str, cell: int, typed: Sequence[str], line: int | None) -> None:
    """Remember a text that ``%time`` is about to compile.

    Args:
        python: the text, without magics.
        cell: the number of its cell.
        typed: the lines of the cell.
        line: how many of them are above the text; ``None`` when it has so many lines itself.
    """
    text = _TimedText(python.rstrip(), cell, tuple(typed), line)
    if text not in list(_texts)[-1:]:
        _texts.append(text)
    share_names(*_NAMES)


def forget() -> None:
    """Undo every :func:`note_timed`."""
    _texts.clear()
    _answers.clear()
    while _registered:
        forget_cell(_registered.pop())
    share_names()


def cell_position_of(code: CodeType) -> CellPosition | None:
    """Return the place where timed code was typed; ``None`` for other code, and where none is
    known.

    The newest of several like texts is meant: a cell that was run again.
    """
    if not is_shared(code.co_filename):
        return None
    known = _answers.get(id(code))
    if known is None or known[0] is not code:
        while len(_answers) >= _MAX_TEXTS:
            _answers.pop(next(iter(_answers)), None)
        found = (text.position for text in reversed(list(_texts)) if _is_of(code, text))
        known = _answers[id(code)] = (code, next(found, None))
    return known[1]


def _is_of(code: CodeType, text: _TimedText) -> bool:
    return any(code == item and code.co_linetable == item.co_linetable for item in text.codes)


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
