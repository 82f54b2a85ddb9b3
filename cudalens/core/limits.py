"""Steps that may fail: a failure of ours becomes one line, and the user's code goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from cudalens.core._python import raise_if_outside

MAX_LINES = 20
"""Lines that are kept; more would not help a reader."""

_T = TypeVar("_T")
_U = TypeVar("_U")


class Limits:
    """One line for each fact that could not be established, in the order of the failures."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str | None) -> None:
        """Add a line unless it is ``None``, a duplicate or beyond the limit."""
        if line is not None and line not in self.lines and len(self.lines) < MAX_LINES:
            self.lines.append(line)

    @overload
    def attempt(self, what: str, collect: Callable[[], _T]) -> _T | None: ...

    @overload
    def attempt(
        self,
        what: str,
        collect: Callable[[], _T],
        otherwise: Callable[[], _U],
        *,
        kind: type | None = None,
    ) -> _T | _U: ...

    def attempt(
        self,
        what: str,
        collect: Callable[[], Any],
        otherwise: Callable[[], Any] = lambda: None,
        *,
        kind: type | None = None,
    ) -> Any:
        """Return what ``collect`` returns; when it fails, add a line and return ``otherwise()``.

        Args:
            what: name of the missing part, which begins the line.
            otherwise: called only after a failure.  If it is a class, a result that is no instance
                of it is a failure too.
            kind: the class that a result must have, where ``otherwise`` is a function.
        """
        kind = otherwise if isinstance(otherwise, type) else kind
        try:
            result = collect()
            if kind is not None and not isinstance(result, kind):
                msg = f"it gave {type(result).__name__}"
                raise TypeError(msg)
        except Exception as error:
            # A signal handler or another thread may have raised it: then it is the user's.
            raise_if_outside(error)
            self.add(failure_line(what, error))
            return otherwise()
        return result


def failure_line(what: str, error: BaseException) -> str:
    """Return the line of ``limits`` that says which stage failed, and how."""
    # Only texts: an error's own __str__ could show an object of the user's, or fail in turn.
    text = next((part for part in error.args if type(part) is str), "")
    reason = text.strip().split("\n", 1)[0]
    return f"{what} unavailable: {type(error).__name__}: {reason}"
