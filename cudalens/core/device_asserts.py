"""Read the assertion lines that CUDA prints: thousands of equal ones become one, with a meaning."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_LINES = 20
_LINE = re.compile(
    r"(?P<file>(?:\b[A-Za-z]:)?[^\s:]+):(?P<line>\d+): (?:(?P<function>.*?): )?"
    r"block: \[(?P<block>[^\]]*)\], thread: \[(?P<thread>[^\]]*)\] "
    r"Assertion `(?P<expression>.*)` failed\."
)
_FOLDER = re.compile(r".*[/\\]")


@dataclass(frozen=True, kw_only=True)
class AssertLine:
    """One assertion, with how often it was printed and by how many blocks and threads."""

    file: str
    line: int
    function: str
    expression: str
    count: int
    blocks: int
    threads: int
    first: str

    def text(self) -> str:
        """Give the first line as printed, and the count when there were more."""
        if self.count == 1:
            return self.first
        return f"{self.first} ({self.count} times, {self.blocks} blocks, {self.threads} threads)"


@dataclass
class _Seen:
    """What was seen of one assertion so far."""

    first: str
    count: int = 0
    blocks: set[str] = field(default_factory=set)
    threads: set[tuple[str, str]] = field(default_factory=set)


def fold(raw: str | Iterable[str]) -> tuple[AssertLine, ...]:
    """Give the different assertions of a printed text, in order of appearance, at most 20.

    Args:
        raw: the text, or its lines.
    """
    found: dict[tuple[str, str, str, str], _Seen] = {}
    for text in raw.splitlines() if isinstance(raw, str) else raw:
        for match in _LINE.finditer(text):
            key = (match["file"], match["line"], match["function"] or "", match["expression"])
            seen = found.setdefault(key, _Seen(match[0]))
            seen.count += 1
            seen.blocks.add(match["block"])
            seen.threads.add((match["block"], match["thread"]))
    return tuple(
        AssertLine(
            file=_FOLDER.sub("", file),
            line=int(line),
            function=function,
            expression=expression,
            count=seen.count,
            blocks=len(seen.blocks),
            threads=len(seen.threads),
            first=seen.first,
        )
        for (file, line, function, expression), seen in list(found.items())[:MAX_LINES]
    )
