"""The exception that left a checked block: make its report, complete it, attach it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cudalens.core._python import entries_from_traceback, is_raised_in_op
from cudalens.core.errors import DeviceAssertError, NonFiniteError
from cudalens.core.limits import Limits
from cudalens.core.report import Evidence, Report
from cudalens.core.text_files import expanded
from cudalens.diagnosis.candidates import Trial
from cudalens.diagnosis.diagnose import bare_report_of_error, diagnose, format_message, format_note
from cudalens.diagnosis.host_errors import REFUSED
from cudalens.evidence import exception, host_value, lost_context
from cudalens.evidence.call_stack import locate, traceback_frames, trim
from cudalens.evidence.finding import error_facts, timed
from cudalens.evidence.torch_errors import is_torch_error
from cudalens.session.printed import with_causes
from cudalens.source.files import is_own_file
from cudalens.source.locate import CallSite


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
    if not isinstance(error, Exception) or not is_torch_error(error):
        return None
    known = getattr(error, "__cudalens_report__", None)
    if isinstance(known, Report):
        return known  # a session inside this one has reported it
    limits = Limits()
    is_lost = limits.attempt("earlier failure", lambda: lost_context.is_lost(error_facts(error)))
    if is_lost and (earlier := lost_context.end()) is not None:
        return attached(error, earlier, f"cudalens: {lost_context.reminder(earlier)}")

    def full() -> Report:
        if lost_context.is_of_another(error):
            return exception.report_of_another(error)
        evidence = exception.evidence_of_error(
            error, None if was_lost else recorder, device_text, was_lost=was_lost
        )
        if not was_lost:
            waits = recorder is not None and recorder.is_synchronous
            known = replace(evidence.synchronization, waits=waits)
            evidence = replace(evidence, synchronization=known)
        seen = limits.attempt(
            "value", lambda: host_value.with_observed_value(evidence, error, recorder)
        )
        trial = None
        if evidence.context_usable is not False:
            trial = limits.attempt("trial", lambda: exception.trial_of_error(error))
        if seen is not None:
            return _of_value(timed(seen, started), trial)
        return diagnose(timed(evidence, started), trial)

    report = limits.attempt(
        "diagnosis", full, lambda: bare_report_of_error(error_facts(error)), kind=Report
    )
    line = note_line(report, limits)
    return attached(error, replace(report, limits=(*report.limits, *limits.lines)), line)


def note_line(report: Report, limits: Limits) -> str:
    """Return the line that an exception gets as a note."""
    return limits.attempt(
        "note", lambda: format_note(report), lambda: f"cudalens: {report.headline_own}", kind=str
    )


def wraps_finding(error: BaseException, finding: Report) -> bool:
    """Return whether a library puts ``finding`` in its own words, and note then which it means.

    It says so itself, with ``raise … from …``.
    """
    if not leads_to(finding, error, "__cause__") or not is_torch_error(error):
        return False
    if not hasattr(error, "__cudalens_report__"):
        attached(error, finding, note_line(finding, Limits()))
    return True


def report_of_own(
    error: DeviceAssertError | NonFiniteError, findings: Iterable[Report]
) -> Report | None:
    """Return the report of one of our own exceptions that came without it.

    The finding whose words it has: torch raises anew what a replica raised.  Where a report could
    not be made, all that is known is the exception's own sentence.  ``None`` for an exception that
    somebody else raised.
    """
    text = str(error)
    matching = (item for item in findings if format_message(item) in text or item.headline == text)
    found = next(matching, None)
    innermost = entries_from_traceback(error.__traceback__)[-1:]
    is_ours = is_raised_in_op(error) or any(
        is_own_file(entry.tb_frame.f_code.co_filename) for entry in innermost
    )
    if found is not None or not is_ours:
        return found
    is_assert = isinstance(error, DeviceAssertError)
    return Report(
        kind="device_assert" if is_assert else "nonfinite",
        certainty="proven",
        prevented=is_assert,
        context_usable=True,
        headline=text.split("\n", 1)[0],
    )


def leads_to(finding: Report, error: BaseException, link: str) -> bool:
    """Return whether the exception of ``finding`` is behind ``error``, by cause or by context."""
    # A list: an interrupt while an unfinished generator is cleared away would be lost.
    behind = [item for item in with_causes(error, link) if item is not error]
    return id(finding) in [id(getattr(item, "report", None)) for item in behind]


def complete_from_traceback(
    error: DeviceAssertError | NonFiniteError, report: Report, finding: Report | None
) -> Report:
    """Fill in, from the traceback, what could not be seen where the guard fired.

    The report of the block is about its first finding; another may have left it.
    """
    if finding is None:
        return report
    trim(error)
    if report.source is not None or error.report is not finding:
        return report
    entries = list(traceback_frames(error.__traceback__))
    site = Limits().attempt("source", lambda: locate(entries, {}), CallSite)
    is_relayed = str(error) != format_message(report)
    report = replace(
        report,
        source=site.source,
        frames=site.frames or report.frames,
        op=replace(report.op, api=report.op.api or site.api),
    )
    if not is_relayed:
        error.args = (format_message(report), *error.args[1:])
    error.report = report
    return report


def write_files(
    report: Report, html: str | Path | None, json: str | Path | None
) -> tuple[Report, tuple[Path, ...]]:
    """Write a report to files; what could not be written becomes a limit of it.

    The option says the form, whatever the file is called.

    Returns:
        the report, and the files that were written.
    """
    written: list[Path] = []
    for name, form in ((html, Report.to_html), (json, Report.to_json)):
        if name is None:
            continue
        path = expanded(name).absolute()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(form(report), encoding="utf-8")
            written.append(path)
        except Exception as failure:  # a view that fails must not hide the user's error
            line = f"{path.name} was not written: {failure}"
            report = replace(report, limits=(*report.limits, line))
    return report, tuple(written)


def _of_value(evidence: Evidence, trial: Trial | None) -> Report:
    """Describe a value that the host refused as a guard would, and say that the host did."""
    report = diagnose(evidence, trial)
    why = evidence.violation.explanation if evidence.violation is not None else ""
    if not evidence.has_run_kernels:
        why = f"{why} {REFUSED}".strip()
    return replace(report, kind="host_error", explanation=why)


def attached(error: BaseException, report: Report, line: str) -> Report:
    """Note ``line`` on an exception, hang the report on it, and return the report."""
    error.add_note(line)
    error.__cudalens_report__ = report  # type: ignore[attr-defined]
    return report
