"""Read the assertion lines that CUDA prints: thousands of equal ones become one, with a meaning."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_LINES = 20
_LINE = re.compile(
    r"(?P<file>[^\s:]+):(?P<line>\d+): (?P<function>.*?): block: \[(?P<block>[^\]]*)\], "
    r"thread: \[(?P<thread>[^\]]*)\] Assertion `(?P<expression>.*)` failed\."
)


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


def fold(raw: str) -> tuple[AssertLine, ...]:
    """Give the different assertions of a printed text, in order of appearance, at most 20."""
    found: dict[tuple[str, str, str, str], list[re.Match[str]]] = {}
    for match in _LINE.finditer(raw):
        key = (match["file"], match["line"], match["function"], match["expression"])
        found.setdefault(key, []).append(match)
    return tuple(
        AssertLine(
            file=file.rpartition("/")[2],
            line=int(line),
            function=function,
            expression=expression,
            count=len(matches),
            blocks=len({match["block"] for match in matches}),
            threads=len({(match["block"], match["thread"]) for match in matches}),
            first=matches[0][0],
        )
        for (file, line, function, expression), matches in list(found.items())[:MAX_LINES]
    )
