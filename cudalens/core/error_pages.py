"""The pages on common errors: their address on the site, and their text in the package."""

from __future__ import annotations

from pathlib import Path

SITE = "https://cudalens.github.io/cudalens/"
"""Address of the documentation."""

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "docs" / "errors", _PACKAGE.parent / "docs" / "errors")
"""In an installed package, and in a checkout."""


def address(name: str) -> str:
    """Return the address of a page on the site."""
    return f"{SITE}docs/errors/{name}.html"


def offline(name: str) -> str:
    """Return the command that prints the same page without a network."""
    return f"cudalens page {name}"


def names() -> tuple[str, ...]:
    """Return the names of the pages."""
    return tuple(sorted(path.stem for path in _folder().glob("*.md") if path.stem != "README"))


def text(name: str = "README") -> str:
    """Return the text of a page; without a name, the table of messages.

    Raises:
        KeyError: there is no page of this name.
    """
    if name not in (*names(), "README"):
        raise KeyError(name)
    return (_folder() / f"{name}.md").read_text(encoding="utf-8")


def _folder() -> Path:
    return next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[0])
