"""Import hooks: run a callback after a module is imported, without importing it.

Not here: the search for the user's own files, which :mod:`cudalens.source.files` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


def when_loaded(name: str, enter: Callable[[Any], Callable[[], object]]) -> Callable[[], None]:
    """Call ``enter`` with a module: now, or right behind its import.

    Returns:
        a function that undoes it, as what ``enter`` returned does, or waits no longer.
    """
    module = sys.modules.get(name)
    undo: list[Callable[[], object]] = []
    if module is not None:
        undo.append(enter(module))
    else:
        undo.append(when_imported(name, lambda module: undo.append(enter(module))))

    def leave() -> None:
        while undo:
            undo.pop()()

    return leave


def when_imported(name: str, callback: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call ``callback`` with a module that is not loaded yet, right behind its import.

    Returns:
        a function that waits no longer; harmless once the module was imported.
    """

    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as Python would, and call ``callback`` when it is loaded."""
        # Another that waits for the same module stands behind.
        behind = sys.meta_path[sys.meta_path.index(finder) + 1 :] if fullname == name else []
        for other in behind:
            spec = other.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _call_behind(spec.loader, imported)
                return spec
        return None

    def forget() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    def imported(module: ModuleType) -> None:
        forget()
        callback(module)

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
    return forget


def _call_behind(loader: Any, callback: Callable[[ModuleType], None]) -> None:
    """Call ``callback`` behind the one module that a loader is to load; it leaves no trace."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)
        run(module)
        callback(module)

    loader.exec_module = exec_module
