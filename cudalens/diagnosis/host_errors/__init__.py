"""Put torch's own exceptions into words: kind, headline, argument at fault.  Pure, no torch.

One family of messages is one small function in a table; what no family knows is repeated as torch
said it.
"""

from __future__ import annotations

import importlib
import pkgutil

from cudalens.diagnosis.host_errors._base import (
    REFUSED,
    Family,
    HostVerdict,
    explain_host_error,
    is_known_message,
    table,
    verdict_of,
)
from cudalens.diagnosis.host_errors._words import STICKY, cast, is_sticky

__all__ = [
    "REFUSED",
    "STICKY",
    "Family",
    "HostVerdict",
    "cast",
    "explain_host_error",
    "is_known_message",
    "is_sticky",
    "table",
    "verdict_of",
]

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")
