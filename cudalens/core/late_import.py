"""Import hooks: run a callback after a module is imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


def when_loaded(name: str, enter: Callable[[Any], Callable[[], object]]) -> Callable[[], None]:
    """Call ``enter`` with a module, now if it is loaded, else right after its import.

    Returns:
        a function that calls what ``enter`` returned, or cancels the wait.
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
    """Call ``callback`` with a module that is not loaded yet, right after its import.

    Returns:
        a function that cancels the wait; it does nothing once the module was imported.
    """

    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as Python would, and call ``callback`` after it is loaded."""
        # Skip the finders before this one: another one of ours may wait for the same module.
        behind = sys.meta_path[sys.meta_path.index(finder) + 1 :] if fullname == name else []
        for other in behind:
            spec = other.find_spec(fullname, path, target)
            # A namespace package has no loader, and runs no code.
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
    """Call ``callback`` after a loader's next module, and restore the loader before that."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        # The attribute of the instance goes, and the method of its class is visible again.
        vars(loader).pop("exec_module", None)
        run(module)
        callback(module)

    loader.exec_module = exec_module
