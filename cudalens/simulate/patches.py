"""Replace attributes and put every original back."""

from __future__ import annotations

from typing import Any, Final

_ABSENT: Final = object()


class Patches:
    """Remember each replaced attribute; `undo` restores them in reverse order."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace or add one attribute of a module or class."""
        self._originals.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace one attribute that the installed torch has; leave it out where it has not."""
        if hasattr(owner, name):
            self.set(owner, name, value)

    def undo(self) -> None:
        """Put back every original attribute."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
