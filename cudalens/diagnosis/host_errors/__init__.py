"""Torch's own exceptions in plain words: kind, headline, argument at fault, hints.  No torch.

What no pattern knows is repeated in torch's words.
"""

from __future__ import annotations

import importlib
import pkgutil

from cudalens.diagnosis.host_errors._base import (
    REFUSED,
    Verdict,
    explain_host_error,
    is_known_message,
    table,
)
from cudalens.diagnosis.host_errors._words import is_sticky, is_without_gpu

__all__ = [
    "REFUSED",
    "Verdict",
    "explain_host_error",
    "is_known_message",
    "is_sticky",
    "is_without_gpu",
    "table",
]

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")
