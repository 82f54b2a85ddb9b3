"""Torch's own exceptions in plain words: kind, headline, argument at fault, hints.  No torch.

What no pattern knows is repeated in torch's words.
"""

from __future__ import annotations

import importlib

from cudalens.diagnosis.host_errors._base import (
    REFUSED,
    Verdict,
    explain_host_error,
    is_known_message,
    is_of_cpu,
    table,
)
from cudalens.diagnosis.host_errors._words import (
    is_library_status,
    is_sticky,
    is_without_gpu,
)

__all__ = [
    "REFUSED",
    "Verdict",
    "explain_host_error",
    "is_known_message",
    "is_library_status",
    "is_of_cpu",
    "is_sticky",
    "is_without_gpu",
    "table",
]

_IN_ORDER = (
    "advice",
    "arguments",
    "autograd_errors",
    "cuda_errors",
    "saved_tensors",
    "sentences",
)
"""The modules with patterns: of two that match a message the earlier is asked first."""

for _module in _IN_ORDER:
    importlib.import_module(f"{__name__}.{_module}")
