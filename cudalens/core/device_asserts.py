"""The assertions of CUDA kernels: a reader of the printed lines, and the table of known ones.

Thousands of equal printed lines become one.  The table, ``data/asserts.json``, is the only place
for the texts: the guards and the rehearsal device look theirs up by key, the diagnosis looks up
what they mean.  Line numbers change with each release.  The table has those of ``READ_RELEASE``,
read from the kernels of its CUDA wheel, and they are left out for another release.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from cudalens.core.report_types import format_count
from cudalens.core.text_files import packaged

ASSERT_CODE = 710
"""``cudaErrorAssert``."""
MAX_LINES = 20
MAX_THREADS = 1 << 14
"""Threads that are counted; a log may hold millions of lines."""
# A file with a line number, or a CUDA file without one; a Windows path begins with a drive letter.
_LINE = re.compile(
    r"(?P<file>(?:\b[A-Za-z]:)?[^\s:]+)(?::(?P<line>\d+)|(?<=\.cu)|(?<=\.cuh)|(?<=\.h)): "
    r"(?:(?P<function>.*?): )?"
    r"block: \[(?P<block>[^\]]*)\], thread: \[(?P<thread>[^\]]*)\] "
    r"Assertion `(?P<expression>.*?)` failed\b\.?"
)


@dataclass(kw_only=True)
class AssertLine:
    """One assertion, with how often it was printed and by which blocks and threads."""

    file: str
    line: int | None
    """``None`` where none was printed, as on the rehearsal device for most releases."""
    function: str
    expression: str
    first: str
    count: int = 0
    blocks: set[str] = field(default_factory=set)
    threads: set[tuple[str, str]] = field(default_factory=set)

    def text(self) -> str:
        """Return the first line as printed, and the count when there were more."""
        if self.count == 1:
            return self.first
        more = "at least " * (len(self.threads) >= MAX_THREADS)
        counts = (("block", len(self.blocks)), ("thread", len(self.threads)))
        of = ", ".join(f"{more}{format_count(count, what)}" for what, count in counts)
        return f"{self.first} ({self.count} times, {of})"


class AssertFold:
    """The distinct assertions of a text that is read piece by piece, at most 20 of them."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str | None, str, str], AssertLine] = {}

    def add(self, text: str) -> bool:
        """Add the assertions of a line; return whether it contains one."""
        is_one = False
        for match in _LINE.finditer(text):
            is_one = True
            # Keep the file's name alone: the end of a progress bar may precede the folder.
            file = match["file"].replace("\\", "/").rpartition("/")[2]
            function, expression = match["function"] or "", match["expression"]
            key = (file, match["line"], function, expression)
            if key not in self._lines and len(self._lines) == MAX_LINES:
                continue  # a new one is dropped, but the known ones are still counted
            first = AssertLine(
                file=file,
                line=int(match["line"]) if match["line"] else None,
                function=function,
                expression=expression,
                first=match[0],
            )
            seen = self._lines.setdefault(key, first)
            seen.count += 1
            if len(seen.threads) < MAX_THREADS:
                seen.blocks.add(match["block"])
                seen.threads.add((match["block"], match["thread"]))
        return is_one

    def lines(self) -> tuple[AssertLine, ...]:
        """Return the assertions in order of appearance."""
        return tuple(self._lines.values())


def fold(raw: str | Iterable[str]) -> tuple[AssertLine, ...]:
    """Return the distinct assertions of a printed text, in order of appearance, at most 20.

    Args:
        raw: the text, or its lines.
    """
    asserts = AssertFold()
    for text in raw.splitlines() if isinstance(raw, str) else raw:
        asserts.add(text)
    return asserts.lines()


# --- the table of assertions ---------------------------------------------------------------------


READ_RELEASE: Final = "2.15.0"


@dataclass(frozen=True, kw_only=True)
class AssertSite:
    """One assertion in the kernels of torch 2.15.0."""

    place: str
    """File and line, as ``IndexKernel.cu:111``."""
    function: str
    """The device function."""
    expression: str
    """The asserted expression with its message, as it is printed."""

    def text(self) -> str:
        """Return the line that CUDA prints, without the thread.

        It has no line number if torch is not 2.15.0.
        """
        # Not imported, because a log is read without torch.
        release = getattr(sys.modules.get("torch"), "__version__", "")
        # The build stands behind a plus: `2.15.0+cu128`.
        is_read = release.partition("+")[0] == READ_RELEASE
        place = self.place if is_read else self.place.partition(":")[0]
        return f"{place}: {self.function}: Assertion `{self.expression}` failed."


def assert_table() -> tuple[Mapping[str, Any], ...]:
    """Return the rows of ``data/asserts.json``: assertions with one meaning share a row.

    A row has these keys, of which some are optional:
        sentence: what the assertion means.
        ops: ops that assert it, each with the argument at fault after a colon.
        sites: the assertions of torch 2.15.0 by key.
        texts: expressions of other releases, after their file's name where two files share one.
        by_file: true where two files share the expression of a site.
    """
    return tuple(packaged("asserts.json"))


@cache
def assert_site(key: str) -> AssertSite:
    """Return an assertion of the table."""
    for row in assert_table():
        if key in (sites := row.get("sites", {})):
            place, function, expression = sites[key]
            return AssertSite(place=place, function=function, expression=expression)
    raise KeyError(key)


def assert_text(key: str) -> str:
    """Return the line that the installed torch prints for an assertion of the table."""
    return assert_site(key).text()
