"""Act on a module as soon as it is imported, without importing it.

Not here: the search for the user's own files, which :mod:`cudalens.source.files` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, found: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call ``found`` with a module that is not loaded yet, right behind its import.

    Returns:
        a function that waits no longer; harmless once the module was imported.
    """

    def forget() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    def imported(module: ModuleType) -> None:
        forget()
        found(module)

    finder = _Finder(name, imported)
    sys.meta_path.insert(0, finder)
    return forget


class _Finder:
    """Finds the module as Python would, and has ``found`` called when it is loaded."""

    def __init__(self, name: str, found: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._found = found

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        # Another that waits for the same module stands behind.
        at = sys.meta_path.index(self) + 1
        for finder in list(sys.meta_path[at:]):
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                _call_behind(spec.loader, self._found)
                return spec
        return None


def _call_behind(loader: Any, found: Callable[[ModuleType], None]) -> None:
    """Have ``found`` called behind the one module that a loader is to load; it leaves no trace."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)
        run(module)
        found(module)

    loader.exec_module = exec_module
