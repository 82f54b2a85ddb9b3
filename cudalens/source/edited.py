"""Detect a file that was edited after its import: its lines are not those that ran.

Code that an import hook has rewritten, as pytest does, is not compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType, ModuleType


class ImportedFiles:
    """A cache of the modules that were imported from files, by file name."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def module_of(self, filename: str) -> ModuleType | None:
        """Return the module that Python's own loader imported from a file, ``None`` without one."""
        name = self._names.get(filename)
        # A copy, because another thread may import a module meanwhile.
        for key in list(sys.modules) if name is None else [name]:
            module = sys.modules.get(key)
            if type(module) is not ModuleType:
                continue
            names = vars(module)
            is_plain = type(names.get("__loader__")) is SourceFileLoader
            if is_plain and names.get("__file__") == filename:
                self._names[filename] = key
                return module
        return None


def is_edited(module: ModuleType, filename: str, lines: Sequence[str]) -> bool:
    """Return whether the module has a function that the lines do not define."""
    try:
        whole = compile("".join(lines), filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return True  # such lines cannot have been imported
    written = [*_codes_in(whole)]
    # Code objects are equal if they were made from the same text in the same line.
    return any(code not in written for code in _codes_of(module, filename))


def _codes_of(module: ModuleType, filename: str) -> Iterator[CodeType]:
    for value in list(vars(module).values()):
        is_class = isinstance(value, type) and value.__module__ == module.__name__
        for item in list(vars(value).values()) if is_class else [value]:
            if isinstance(item, FunctionType) and item.__code__.co_filename == filename:
                yield item.__code__


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield item
            yield from _codes_in(item)
