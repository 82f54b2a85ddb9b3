"""The table of guards by op overload, filled from the files of ``catalogue/``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cudalens.core.api_names import api_names_of_all
from cudalens.guards import _base
from cudalens.guards._base import Guard, UserCheck, full_name, resolve
from cudalens.guards._ranges import lies_within, out_of_range
from cudalens.guards.catalogue import CATALOGUE

__all__ = [
    "GUARDS",
    "Guard",
    "add",
    "catalogue_rows",
    "full_name",
    "lies_within",
    "out_of_range",
    "remove",
]

_table: dict[Any, tuple[Guard, ...]] = {}
GUARDS: Mapping[Any, tuple[Guard, ...]] = MappingProxyType(_table)
"""Op overload to the guards that look at its calls (read-only view)."""


def _enter(entry: Guard) -> None:
    for op in resolve(entry):
        _table[op] = (*_table.get(op, ()), _base.of_overload(entry, op))


for _entry in CATALOGUE:
    _enter(_entry)


def add(op: Any, check: UserCheck, name: str | None = None) -> Guard:
    """Add a guard of the user's own, in place of an earlier one of this name for the same op.

    A lambda without ``name`` has none, and replaces nothing.

    Raises:
        GuardRegistrationError: the op is not registered, or its arguments do not match.
    """
    entry = _base.user_guard(op, check, name)
    for overload in resolve(entry) if entry.name != _NO_NAME else ():
        for other in _table.get(overload, ()):
            if other.name == entry.name and other.frequency == _base.OF_USER:
                _take_out(overload, other)
    _enter(entry)
    return entry


_NO_NAME = (lambda: None).__name__


def remove(entry: Guard) -> None:
    """Take a guard out of the catalogue; harmless when it is not there any more."""
    for overload in resolve(entry):
        _take_out(overload, entry)


def _take_out(overload: Any, entry: Guard) -> None:
    rest = tuple(item for item in _table.pop(overload, ()) if item is not entry)
    if rest:
        _table[overload] = rest


def catalogue_rows() -> list[dict[str, Any]]:
    """Return the catalogue as plain rows, one a guard: what ``cudalens guards`` prints."""
    rows: dict[Any, tuple[Guard, list[str]]] = {}
    for op, entries in _table.items():
        for entry in entries:
            rows.setdefault(entry.requires, (entry, []))[1].append(full_name(op))
    return [
        {
            "guard": entry.name,
            "op": sorted(names),
            "api": list(api_names_of_all(sorted(names))),
            "precondition": entry.precondition,
            "source": entry.source,
            "cost": entry.cost,
            "frequency": entry.frequency,
            "records": list(entry.records),
            "silent": entry.is_silent,
            "waits": entry.waits,
        }
        for entry, names in rows.values()
    ]
