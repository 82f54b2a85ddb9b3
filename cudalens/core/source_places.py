"""Places in the user's code, as data: lines, spans, frames and expressions.

Like the other pieces of a report they are frozen, and hold neither frames nor modules.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from cudalens.core._python import without_comment


@dataclass(frozen=True, kw_only=True)
class CodeLine:
    """One numbered line of source text, without its line break."""

    line: int
    """Number of the line, 1-based."""
    text: str
    """Its text, with its indentation."""


@dataclass(frozen=True, kw_only=True)
class LineRef:
    """A line of the user's code in the short form that lists use."""

    line: int | None = None
    """Number of the line, 1-based."""
    text: str | None = None
    """Its text, without indentation and comment."""
    cell: int | None = None
    """Number of the notebook cell, as in ``In [3]``."""
    file: str | None = None
    """Path of the file; of a cell only where others have its number, as without history."""

    @property
    def where(self) -> str:
        """The place alone, as much as is known: ``In [3] line 7``, ``train.py:7``, ``line 7``."""
        if self.cell is None and self.file:
            return self.file if self.line is None else f"{self.file}:{self.line}"
        cell = None if self.cell is None else f"In [{self.cell}]"
        line = None if self.line is None else f"line {self.line}"
        return " ".join(filter(None, (cell, line)))

    def near(self, here: SourceSpan | None) -> str:
        """Return ``line 9`` of the cell or file of ``here``, the whole place of another."""
        is_near = here is not None and (self.cell, self.file) == (here.cell, here.file)
        return f"line {self.line}" if is_near else self.where

    def format(self) -> str:
        """Return the place and its text: ``In [3] line 7: w += 1``."""
        return f"{self.where}: {self.text}" if self.where and self.text else self.where


@dataclass(frozen=True, kw_only=True)
class SourceSpan:
    """A place in the user's code.  Lines are 1-based, columns 0-based and end-exclusive."""

    cell: int | None = None
    """Number of the notebook cell, as in ``In [3]``."""
    file: str | None = None
    """Path of the file; of a cell only where others have its number, as without history."""
    line: int | None = None
    """First line of the statement or expression."""
    end_line: int | None = None
    """Its last line."""
    column: int | None = None
    """Column where it begins."""
    end_column: int | None = None
    """Column after its end."""
    text: str | None = None
    """The first line of its text."""
    context: tuple[CodeLine, ...] = ()
    """A few unstripped lines around ``line``, for drawing; it includes ``line`` itself."""

    @property
    def ref(self) -> LineRef:
        """The line and its own text: ``text`` is the first line of the whole statement."""
        texts = (item.text.strip() for item in self.context if item.line == self.line)
        text = next(texts, self.text)
        code = without_comment(text) if text else text
        if code and code.startswith("#"):
            code = ""  # a comment never runs: the file has changed since it was imported
        return LineRef(line=self.line, text=code, cell=self.cell, file=self.file)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One frame of the call stack, outermost first in a report."""

    file: str
    """Path of the file, or the name of the cell."""
    line: int
    """Number of the line that was running."""
    function: str
    """Name of the function."""
    text: str = ""
    """The text of that line."""
    is_user: bool = False
    """True for code of the user, false for that of a library."""
    cell: int | None = None
    """Number of the notebook cell, where it is one."""


class Expression(str):
    """Text of an expression on the user's line, with the syntax that was read there.

    A copy or a pickle has the text alone.
    """

    node: ast.expr | None

    def __new__(cls, text: str, node: ast.expr | None) -> Expression:
        """Create the text and attach its syntax."""
        made = super().__new__(cls, text)
        made.node = node
        return made

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def syntax(text: str | None) -> ast.expr | None:
    """Return the syntax of an expression that was read on a line, ``None`` for any other text."""
    return text.node if isinstance(text, Expression) else None
