"""The shell's own display of the value of a check, which is checked as well.

A check ends with its code; the shell asks the value for its text and pictures only afterwards, and
these may use the device.  So the hook that displays runs under a check of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cudalens.notebook.display import finish
from cudalens.session.options import Options

if TYPE_CHECKING:
    from cudalens.session.session import CheckSession


class CheckedDisplay:
    """A display hook for the rest of a cell, which checks the display of one value.

    That is known by its identity and not kept alive; ``make`` makes a session that is not open.
    """

    def __init__(
        self, shell: Any, value: object, options: Options, make: Callable[[], CheckSession]
    ) -> None:
        self._shell, self._options, self._make = shell, options, make
        self._key = id(value)
        self._before = sys.displayhook

    def install(self) -> None:
        """Take the place of the hook; the shell puts its own back when the cell ends."""
        sys.displayhook = self

    def remove(self) -> None:
        """Put the hook back that was there before, unless somebody else has taken the place."""
        if sys.displayhook is self:
            sys.displayhook = self._before

    def __call__(self, shown: object) -> None:
        """Display a value as the hook before does."""
        if id(shown) != self._key:
            self._before(shown)
            return
        self.remove()
        session = self._make()
        try:
            with session:
                self._before(shown)
        finally:
            # A variable that the check has bound keeps its report when the display has none.
            unbound = replace(self._options, report=None)
            finish(self._shell, session, self._options if session.report else unbound)
