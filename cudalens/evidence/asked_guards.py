"""Ask the guards before an op runs on copies, and keep what one of them finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cudalens.core.report_types import Violation
from cudalens.guards import GUARDS
from cudalens.guards._base import schema_parameters


class RefusedError(Exception):
    """The code changes values, mixes devices, or breaks the bound of a guard."""

    violation: Violation | None = None
    """What the guard found."""
    given: Mapping[str, Any] | None = None
    """The arguments of the op that it looked at."""


def ask_guards(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what a guard would not let onto the device."""
    slots = schema_parameters(op) if op in GUARDS else ()
    given = {item.name: item.default for item in slots} | kwargs
    given.update(zip([item.name for item in slots], args, strict=False))
    for guard in GUARDS.get(op, ()):
        found = guard.check(*[given[name] for name in guard.parameters])
        if found is not None:
            error = RefusedError()
            error.violation = replace(found, op=str(op._schema.name), overload=op._overloadname)
            error.given = given
            raise error
