"""Likely causes and the line to change: a table of small rules over evidence."""

from __future__ import annotations

import importlib
import pkgutil

from cudalens.core.limits import Limits
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.hints._base import RuleEntry, matching, rule, table

__all__ = ["MAX_HINTS", "RuleEntry", "find_hints", "rule", "table"]

MAX_HINTS = 4

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")


def find_hints(evidence: Evidence, limits: Limits) -> tuple[Hint, ...]:
    """Return the hints of all rules, surest first; a rule that fails adds a line to ``limits``."""
    return tuple(matching(evidence, limits))[:MAX_HINTS]
