"""Read the assertion lines that CUDA prints: thousands of equal ones become one, with a meaning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Final

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


# --- tell how an assertion is printed by the release of torch at  ---------------------------------


KNOWN_RELEASE: Final = "2.13.0"
_PRINTED = re.compile(
    r"(?P<file>[\w.-]+):(?P<line>\d+): (?P<function>.*?): (?P<thread>block: .*?thread: \S+ )?"
    r"Assertion `(?P<expression>.*)` failed\."
)
# Rows were scattered by the general kernel before they got one of their own.
_BEFORE: Final = {
    "IndexKernelUtils.cu:122": "ScatterGatherKernel.cu:203: operator(): {thread}Assertion "
    '`idx_dim >= 0 && idx_dim < index_size && "scatter gather kernel index out of bounds"` failed.'
}
Site = tuple[str, str, str]
"""File with line, device function, asserted expression."""


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
        return as_printed_by(release, before.format(thread=thread)) if before else None
    where, function, expression = site
    return f"{where}: {function}: {thread}Assertion `{expression or found['expression']}` failed."


def known_releases() -> frozenset[str]:
    """Return the releases whose CUDA wheels were read."""
    return frozenset({KNOWN_RELEASE, *_moved()})


@cache
def _moved() -> Mapping[str, Mapping[str, Site | None]]:
    file = resources.files("cudalens") / "core" / "data" / "assert_sites.json"
    return {
        release: {key: None if site is None else tuple(site) for key, site in sites.items()}
        for release, sites in json.loads(file.read_text(encoding="utf-8")).items()
    }
