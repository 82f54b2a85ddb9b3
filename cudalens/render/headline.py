"""The headline of a report as the views print it."""

from __future__ import annotations

from cudalens.core.report import Report
from cudalens.render.words import KINDS, format_bounds, format_number, one_line


def headline(report: Report) -> str:
    """Return the headline in the user's names, with the bound that was broken.

    Falls back to the kind of the failure when nothing else is known.
    """
    line = report.headline_own
    if not line.strip():
        return f"{KINDS.get(report.kind, report.kind)}: nothing more could be established"
    allowed = format_bounds(report)
    is_said = "allowed" in line or line.endswith(allowed)
    return one_line(line if is_said else f"{line}: allowed {allowed}")


def headline_parts(report: Report) -> tuple[str, str]:
    """Split the headline into the observed value, ``y[17] = 10``, and the rest.

    The first part is empty unless the headline opens with the first bad value of the report.
    """
    line = headline(report)
    first = report.offenders.first[0] if report.offenders and report.offenders.first else None
    for value in () if first is None else (first.value, format_number(first.value)):
        name, equals, rest = line.partition(one_line(f" = {value}"))
        if equals and not rest[:1].isalnum() and not rest.startswith("."):
            return name + equals, rest
    return "", line
