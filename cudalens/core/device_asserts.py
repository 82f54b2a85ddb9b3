"""The assertions of CUDA kernels: reading what was printed, and the table of known ones.

Thousands of equal printed lines become one.  The table, ``data/asserts.json``, is the one place for
the texts: the guards and the simulated device take theirs from it by key, the diagnosis reads what
they mean.  ``data/assert_sites.json`` says what other releases of torch print instead:
file with line, device function and expression, by release and by torch 2.13.0's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from cudalens.core.text_files import packaged

MAX_LINES = 20
MAX_THREADS = 1 << 14
"""Threads that are told apart; a log may hold millions of lines."""
_LINE = re.compile(
    r"(?P<file>(?:\b[A-Za-z]:)?[^\s:]+):(?P<line>\d+): (?:(?P<function>.*?): )?"
    r"block: \[(?P<block>[^\]]*)\], thread: \[(?P<thread>[^\]]*)\] "
    r"Assertion `(?P<expression>.*?)` failed\b\.?"
)


@dataclass(kw_only=True)
class AssertLine:
    """One assertion, with how often it was printed and by which blocks and threads."""

    file: str
    line: int
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
        of = f"{more}{len(self.blocks)} blocks, {more}{len(self.threads)} threads"
        return f"{self.first} ({self.count} times, {of})"


class AssertFold:
    """The different assertions of a text that is read piece by piece, at most 20 of them."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str, str], AssertLine] = {}

    def add(self, text: str) -> bool:
        """Take in a line; return whether an assertion stood in it."""
        is_one = False
        for match in _LINE.finditer(text):
            is_one = True
            # What stands before a folder may be the end of a progress bar.
            file = match["file"].replace("\\", "/").rpartition("/")[2]
            function, expression = match["function"] or "", match["expression"]
            key = (file, match["line"], function, expression)
            if key not in self._found and len(self._found) == MAX_LINES:
                continue
            first = AssertLine(
                file=file,
                line=int(match["line"]),
                function=function,
                expression=expression,
                first=match[0],
            )
            seen = self._found.setdefault(key, first)
            seen.count += 1
            if len(seen.threads) < MAX_THREADS:
                seen.blocks.add(match["block"])
                seen.threads.add((match["block"], match["thread"]))
        return is_one

    def lines(self) -> tuple[AssertLine, ...]:
        """Return the assertions in order of appearance."""
        return tuple(self._found.values())


def fold(raw: str | Iterable[str]) -> tuple[AssertLine, ...]:
    """Return the different assertions of a printed text, in order of appearance, at most 20.

    Args:
        raw: the text, or its lines.
    """
    found = AssertFold()
    for text in raw.splitlines() if isinstance(raw, str) else raw:
        found.add(text)
    return found.lines()


# --- the table of assertions ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AssertSite:
    """One assertion in the kernels of torch 2.13.0."""

    place: str
    """File and line, as ``IndexKernel.cu:111``."""
    function: str
    """The device function."""
    expression: str
    """The asserted expression with its message, as it is printed."""

    def text(self, thread: str = "") -> str:
        """Return the line that CUDA prints.

        Args:
            thread: ``block: [0,0,0], thread: [0,0,0] ``; left out where it is not known.
        """
        return f"{self.place}: {self.function}: {thread}Assertion `{self.expression}` failed."


def assert_table() -> tuple[Mapping[str, Any], ...]:
    """Return the rows of ``data/asserts.json``: assertions with one meaning share a row.

    A row holds ``sentence``; ``ops``, each with the argument at fault behind a colon; ``sites``,
    the assertions of torch 2.13.0 by key; ``texts``, expressions of other releases, after their
    file's name where two files share one; and ``by_file`` where that is so for the sites.
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


@cache
def assert_text(key: str) -> str:
    """Return the line that torch 2.13.0 prints for an assertion of the table, without thread."""
    return assert_site(key).text()


# --- what other releases of torch print ----------------------------------------------------------


KNOWN_RELEASE: Final = "2.13.0"
_PRINTED = re.compile(
    r"(?P<file>[\w.-]+):(?P<line>\d+): (?P<function>.*?): (?P<thread>block: .*?thread: \S+ )?"
    r"Assertion `(?P<expression>.*)` failed\."
)
# Rows were scattered by the general kernel before they got one of their own.
_BEFORE: Final = {"IndexKernelUtils.cu:122": "gather_scatter"}


def as_printed_by(release: str | None, text: str) -> str | None:
    """Return the line of an assertion as the kernels of a release print it.

    Args:
        release: ``torch.__version__``, such as ``2.14.1+cu130``.
        text: the line as torch 2.13.0 prints it; other text comes back as it is.

    Returns:
        The line; ``None`` where the release has no such assertion.
    """
    public = (release or "").partition("+")[0]
    found = _PRINTED.fullmatch(text)
    if public == KNOWN_RELEASE or found is None:
        return text
    moved = packaged("assert_sites.json").get(public)
    if moved is None:
        return text.replace(f"{found['file']}:{found['line']}:", f"{found['file']}:", 1)
    place = f"{found['file']}:{found['line']}"
    # A kernel without words of its own prints its caller's: such a place stands alone.
    key = next((key for key in (f"{place} {found['expression']}", place) if key in moved), None)
    if key is None:
        return text
    site, thread = moved[key], found["thread"] or ""
    if site is None:
        before = _BEFORE.get(place)
        return as_printed_by(release, assert_site(before).text(thread)) if before else None
    place, function, expression = site
    expression = expression or found["expression"]
    return AssertSite(place=place, function=function, expression=expression).text(thread)
