"""Places in source code, as data: lines, spans and frames."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CodeLine:
    """One numbered line of source text, without its line break."""

    line: int
    text: str


@dataclass(frozen=True, kw_only=True)
class LineRef:
    """A line of the user's code in the short form that lists use."""

    line: int | None = None
    text: str | None = None
    cell: int | None = None
    file: str | None = None

    @property
    def spoken(self) -> str:
        """The place and its text, ``In [3] line 7: w += 1``; empty when no line is known."""
        if self.line is None:
            return ""
        where = f"In [{self.cell}] line" if self.cell else f"{self.file}:"
        where += f" {self.line}" if self.cell else str(self.line)
        return f"{where}: {self.text}" if self.text else where


@dataclass(frozen=True, kw_only=True)
class SourceSpan:
    """A place in the user's code.  Lines are 1-based, columns 0-based and end-exclusive."""

    cell: int | None = None
    file: str | None = None
    line: int | None = None
    end_line: int | None = None
    column: int | None = None
    end_column: int | None = None
    text: str | None = None
    context: tuple[CodeLine, ...] = ()
    """A few unstripped lines around ``line``, for drawing; it includes ``line`` itself."""

    @property
    def ref(self) -> LineRef:
        """The line and its own text: ``text`` is the first line of the whole statement."""
        found = (item.text.strip() for item in self.context if item.line == self.line)
        text = next(found, self.text)
        return LineRef(line=self.line, text=text, cell=self.cell, file=self.file)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One frame of the call stack, outermost first in a report."""

    file: str
    line: int
    function: str
    text: str = ""
    is_user: bool = False
    cell: int | None = None
