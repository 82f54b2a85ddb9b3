"""Tell how an assertion is printed by the release of torch at hand.

The guards and the rehearsal device quote the kernels of torch 2.13.0.  Between releases an
assertion moves to another line, is worded anew, or is not there yet.  ``data/assert_sites.json``
holds, for each release whose CUDA wheel was read (`tests/wheel_asserts.py`), what differs; in the
words of a release that was not read the line number is left out, because nobody looked it up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Final

__all__ = ["KNOWN_RELEASE", "as_printed_by", "known_releases"]

KNOWN_RELEASE: Final = "2.13.0"
_LINE = re.compile(
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
    """Give the line of an assertion as the kernels of a release print it.

    Args:
        release: ``torch.__version__``, such as ``2.14.1+cu130``.
        text: the line as torch 2.13.0 prints it; other text comes back as it is.

    Returns:
        The line; ``None`` where the release has no such assertion.
    """
    public = (release or "").partition("+")[0]
    found = _LINE.fullmatch(text)
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
    """Give the releases whose CUDA wheels were read."""
    return frozenset({KNOWN_RELEASE, *_moved()})


@cache
def _moved() -> Mapping[str, Mapping[str, Site | None]]:
    file = resources.files("cudalens") / "core" / "data" / "assert_sites.json"
    return {
        release: {key: None if site is None else tuple(site) for key, site in sites.items()}
        for release, sites in json.loads(file.read_text(encoding="utf-8")).items()
    }
