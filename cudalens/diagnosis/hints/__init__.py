"""Likely causes and the line to change: a table of small rules over evidence."""

from __future__ import annotations

import importlib
import pkgutil

from cudalens.diagnosis.hints._base import MAX_HINTS, find_hints, table

__all__ = ["MAX_HINTS", "find_hints", "table"]

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")
