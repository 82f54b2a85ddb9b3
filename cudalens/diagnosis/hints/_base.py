"""Readings: evidence in, at most one hint out.

A reading is one small pure function that looks at an :class:`~cudalens.core.report.Evidence` and
returns a :class:`~cudalens.core.report_types.Hint` only when the evidence carries the cause.  A
false hint is worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from cudalens.core.limits import Limits
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint

Reading = Callable[[Evidence], "Hint | None"]


def first_reading(
    readings: Iterable[Reading], evidence: Evidence, limits: Limits
) -> tuple[Hint, ...]:
    """Return the hint of the first reading that applies, under its own name or the function's.

    A reading that fails leaves one line in ``limits``, and the next one is asked.
    """
    for reading in readings:
        name = getattr(reading, "__name__", repr(reading))
        hint = limits.attempt(f"hint {name}", partial(reading, evidence))
        if hint is not None:
            return (replace(hint, rule=hint.rule or name),)
    return ()
