"""What is said of a failure when the diagnosis itself failed: less than usual, never nothing."""

from __future__ import annotations

from cudalens.core.report import ErrorFacts, Report
from cudalens.core.report_types import Bounds, Kind, Offenders, OpName, Violation

__all__ = ["bounds_of", "of_error", "of_violation", "offenders_of", "sentence", "trouble_line"]


def trouble_line(what: str, trouble: BaseException) -> str:
    """Give the line of ``limits`` that says which stage failed, and how."""
    reason = str(trouble).strip().split("\n", 1)[0]
    return f"{what} unavailable: {type(trouble).__name__}: {reason}"


def offenders_of(violation: Violation) -> Offenders | None:
    """Give the bad elements, ``None`` where the guard counted none: 0 of 0 would be untrue."""
    return None if violation.offenders == Offenders() else violation.offenders


def bounds_of(violation: Violation) -> Bounds | None:
    """Give the allowed values, ``None`` where the guard named none."""
    return None if violation.bounds == Bounds() else violation.bounds


def of_violation(violation: Violation) -> Report:
    """Report a finding from nothing but what its guard said: it is as certain as ever."""
    is_noticed = violation.is_silent or violation.is_nonfinite
    headline = violation.headline.replace("{argument}", violation.argument)
    return Report(
        kind=_kind_of(violation),
        certainty="proven",
        prevented=not is_noticed,
        context_usable=True,
        headline=headline.replace("{related}", violation.related or "the input"),
        explanation=violation.explanation,
        op=OpName(name=violation.op, overload=violation.overload),
        argument=violation.argument,
        offenders=offenders_of(violation),
        bounds=bounds_of(violation),
        device_text=violation.device_text,
    )


def _kind_of(violation: Violation) -> Kind:
    if violation.is_nonfinite:
        return "nonfinite"
    return "silent" if violation.is_silent else "device_assert"


def of_error(error: ErrorFacts) -> Report:
    """Report an exception of torch's in its own words."""
    return Report(
        kind="python_error",
        headline=error.message.strip().split("\n", 1)[0] or error.type_name,
    )


def sentence(report: Report) -> str:
    """Give the one sentence with the observed value, the bound and the count."""
    text = report.headline
    if report.bounds is not None and report.bounds.text:
        text += f" (allowed {report.bounds.text})"
    if report.offenders is not None and report.offenders.total > 1:
        text += f"; {report.offenders.count} of {report.offenders.total} bad"
    return text
