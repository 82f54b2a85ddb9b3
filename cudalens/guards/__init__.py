"""The catalogue of guards, keyed by op overload and gathered from the files of this folder."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from cudalens.core.report_types import Violation
from cudalens.guards import _base
from cudalens.guards._base import Check, Guard, full_name, resolve
from cudalens.guards._ranges import lies_within, out_of_range

__all__ = [
    "GUARDS",
    "Guard",
    "Violation",
    "all_guards",
    "catalogue_rows",
    "full_name",
    "lies_within",
    "out_of_range",
    "register",
]

_NO_GUARDS = frozenset({"interceptor", "process"})
for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_") and _module.name not in _NO_GUARDS:
        importlib.import_module(f"{__name__}.{_module.name}")

_table: dict[Any, tuple[Guard, ...]] = {}
GUARDS: Mapping[Any, tuple[Guard, ...]] = MappingProxyType(_table)
"""Op overload to the guards that look at its calls (read-only view)."""


def _enter(entry: Guard) -> tuple[Any, ...]:
    overloads = resolve(entry)
    for op in overloads:
        _table[op] = (*_table.get(op, ()), entry)
    return overloads


for _entry in _base._registered:
    _enter(_entry)


def all_guards() -> Iterator[Guard]:
    """Return every guard once, in the order of the catalogue's files."""
    return iter(dict.fromkeys(entry for entries in _table.values() for entry in entries))


def register(op: Any, check: Check) -> tuple[Any, ...]:
    """Add a guard of the user's own; return the overloads it acts on.

    Raises:
        GuardRegistrationError: the op is not registered, or its arguments do not match.
    """
    return _enter(_base.user_guard(op, check))


def catalogue_rows() -> list[dict[str, Any]]:
    """Return the catalogue as plain rows, one a guard: what ``cudalens guards`` prints."""
    ops: dict[Guard, list[str]] = {}
    for op, entries in _table.items():
        for entry in entries:
            ops.setdefault(entry, []).append(full_name(op))
    return [
        {
            "guard": entry.name,
            "op": sorted(names),
            "precondition": entry.precondition,
            "source": entry.source,
            "cost": entry.cost,
            "frequency": entry.frequency,
            "records": list(entry.records),
            "silent": entry.is_silent,
        }
        for entry, names in ops.items()
    ]
