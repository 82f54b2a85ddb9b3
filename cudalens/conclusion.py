"""Make the report of an exception that left a checked block, and attach it to the exception."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cudalens import collect, fallback, lostcontext, postmortem, refused
from cudalens.diagnose import diagnose, note
from cudalens.hosterrors import REFUSED
from cudalens.model import Evidence, Report


def explained(
    error: BaseException,
    recorder: Any,
    device_text: Any,
    started: float,
    *,
    was_lost: bool = False,
) -> Report | None:
    """Explain an exception of torch's, and note in one line on it what the report says.

    Args:
        recorder, device_text: of the block, ``None`` where there was none.
        started: when the work on the report began, on the performance counter.
        was_lost: whether the device could not be used before the block began.

    Returns:
        ``None`` when the exception is none of torch's business.  When an earlier failure ended the
        device's context, the report of that one.
    """
    if not isinstance(error, Exception) or not postmortem.concerns_torch(error):
        return None
    known = getattr(error, "__cudalens_report__", None)
    if isinstance(known, Report):
        return known  # a session inside this one has said it all
    limits = collect.Limits()
    earlier = limits.attempt("earlier failure", lambda: _earlier(error), None)
    if earlier is not None:
        return _attached(error, earlier, f"cudalens: {lostcontext.reminder(earlier)}")

    def full() -> Report:
        evidence = postmortem.evidence_of_error(
            error, None if was_lost else recorder, device_text, was_lost=was_lost
        )
        if not was_lost:
            waits = recorder is not None and recorder.is_synchronous
            told = ("check.waits", "yes" if waits else "no")
            evidence = replace(evidence, facts=(*evidence.facts, told))
        seen = limits.attempt(
            "value", lambda: refused.with_observed_value(evidence, error, recorder), None
        )
        if seen is not None:
            return _of_value(collect.timed(seen, started))
        return diagnose(collect.timed(evidence, started))

    report = limits.attempt("diagnosis", full, fallback.of_error(collect.error_facts(error)))
    said = f"cudalens: {report.headline}"
    _attached(error, report, limits.attempt("note", lambda: note(report), said))
    return replace(report, limits=(*report.limits, *limits.lines))


def saved(report: Report, paths: Iterable[Path]) -> Report:
    """Write a report to files; what could not be written becomes a limit of it."""
    for path in paths:
        try:
            report.save(path)
        except Exception as trouble:  # a view that fails must not hide the user's error
            line = f"{path.name} was not written: {trouble}"
            report = replace(report, limits=(*report.limits, line))
    return report


def listed(others: Iterable[Report]) -> str:
    """Name the other findings of a block after a colon: the first few, each with how often."""
    times = Counter(item.headline for item in others)
    lines = [text if n == 1 else f"{text} ({n} times)" for text, n in list(times.items())[:5]]
    return f": {'; '.join(lines)}." if lines else "."


def kept(is_of_thread: bool) -> str:
    """Say why a finding did not leave its block."""
    if is_of_thread:
        return "It was raised in another thread, and did not leave the block"
    return "An except clause caught it"


def _of_value(evidence: Evidence) -> Report:
    """Describe a value that the host refused as a guard would, and say that the host did."""
    report = diagnose(evidence)
    why = evidence.violation.explanation if evidence.violation is not None else ""
    return replace(report, kind="host_error", explanation=f"{why} {REFUSED}".strip())


def _earlier(error: BaseException) -> Report | None:
    """Give the report of the failure that this one only repeats."""
    if not lostcontext.is_lost(collect.error_facts(error)):
        return None
    return lostcontext.end()


def _attached(error: BaseException, report: Report, line: str) -> Report:
    error.add_note(line)
    error.__cudalens_report__ = report  # type: ignore[attr-defined]
    return report
