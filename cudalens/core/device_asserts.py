"""The assertions of CUDA kernels: reading what was printed, and the table of known ones.

Thousands of equal printed lines become one.  The table, ``data/asserts.json``, is the one place for
the texts: the guards and the simulated device take theirs from it by key, the diagnosis reads what
they mean.  ``data/assert_sites.json`` says what other releases of torch print instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Final

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
        """Return the first line as printed, and the count when there were more."""
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
    """Return the different assertions of a printed text, in order of appearance, at most 20.

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


@cache
def assert_table() -> tuple[Mapping[str, Any], ...]:
    """Return the rows of ``data/asserts.json``: assertions with one meaning share a row.

    A row holds ``sentence``; ``ops``, each with the argument at fault behind a colon; ``sites``,
    the assertions of torch 2.13.0 by key; ``texts``, expressions of other releases, after their
    file's name where two files share one; and ``by_file`` where that is so for the sites.
    """
    return tuple(_read("asserts.json"))


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


def _read(name: str) -> Any:
    file = resources.files("cudalens") / "core" / "data" / name
    return json.loads(file.read_text(encoding="utf-8"))


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
    moved = _moved().get(public)
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
    where, function, expression = site
    moved_site = AssertSite(
        place=where, function=function, expression=expression or found["expression"]
    )
    return moved_site.text(thread)


def known_releases() -> frozenset[str]:
    """Return the releases whose CUDA wheels were read."""
    return frozenset({KNOWN_RELEASE, *_moved()})


@cache
def _moved() -> Mapping[str, Mapping[str, Sequence[str] | None]]:
    """Return file with line, device function and expression, by release and by torch 2.13.0's."""
    sites: dict[str, dict[str, list[str] | None]] = _read("assert_sites.json")
    return sites
