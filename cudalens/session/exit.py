"""The exception that left a checked block: make its report, complete it, attach it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from opcode import opmap
from pathlib import Path
from types import TracebackType
from typing import Any

from cudalens.core._python import (
    entries_from_traceback,
    raise_if_outside,
)
from cudalens.core._torch import Unseen
from cudalens.core.errors import DeviceAssertError, NonFiniteError
from cudalens.core.limits import Limits
from cudalens.core.report import Report
from cudalens.core.reported import attach, report_beside
from cudalens.core.text_files import expanded
from cudalens.diagnosis.diagnose import bare_report_of_error, diagnose, format_message, format_note
from cudalens.evidence import exception, lost_context
from cudalens.evidence.call_stack import locate, trim, with_callers
from cudalens.evidence.failure import error_facts
from cudalens.evidence.torch_errors import is_of_torchscript, is_torch_error
from cudalens.source.files import is_own_file
from cudalens.source.locate import CallSite
from cudalens.source.shown_frames import shown_frames, with_causes


def explained(
    error: BaseException,
    recorder: Any,
    device_text: Any,
    started: float,
    limits: Limits,
    *,
    was_lost: bool = False,
    early: Report | None = None,
    is_refused: bool = False,
) -> Report | None:
    """Explain an exception of torch's, and note in one line on it what the report says.

    Args:
        recorder, device_text: of the block, ``None`` where there was none.
        started: when the work on the report began, on the performance counter.
        limits: of the block.
        was_lost: whether the device could not be used before the block began.
        early: the report that was made where the exception came up, if one was.
        is_refused: whether a guard has seen the op raise it.

    Returns:
        ``None`` when the exception is none of torch's business.  When an earlier failure ended the
        device's context, the report of that one.
    """
    raised = None if recorder is None else recorder.call_of(error)
    if not isinstance(error, Exception) or not (is_refused or is_torch_error(error, raised)):
        return None
    own_report = report_beside(error)
    if own_report is not None:
        return own_report  # a session inside this one has reported it
    if early is not None:
        return attached(error, early, note_line(early, limits))
    earlier = limits.attempt("earlier failure", lambda: lost_context.earlier_failure(error))
    if earlier is not None:
        return attached(error, earlier, f"cudalens: {lost_context.reminder(earlier)}")

    def full() -> Report:
        if lost_context.is_of_another(error):
            return exception.report_of_another(error)
        used = None if was_lost else recorder
        with Unseen():  # a subclass of the user's is not to see what is asked of its tensors
            return diagnose(
                *exception.evidence_of_error(
                    error, used, device_text, started=started, raised=raised, was_lost=was_lost
                )
            )

    def bare() -> Report:
        return bare_report_of_error(error_facts(error), tuple(limits.lines))

    report = limits.attempt("diagnosis", full, bare, kind=Report)
    return attached(error, report, note_line(report, limits))


def explained_early(
    error: BaseException, recorder: Any, device_text: Any, limits: Limits
) -> Report:
    """Explain an exception that has not left the user's call; nothing is noted on it."""
    trace = error.__traceback__
    # Restored below, because the exception goes on through the user's code.
    error.__traceback__ = with_callers(trace)
    try:
        started = time.perf_counter()
        raised = None if recorder is None else recorder.call_of(error)
        with Unseen():
            evidence, _ = exception.evidence_of_error(
                error, recorder, device_text, started=started, raised=raised
            )
        return diagnose(evidence)
    except Exception as failure:
        raise_if_outside(failure)
        return bare_report_of_error(error_facts(error), tuple(limits.lines))
    finally:
        error.__traceback__ = trace


def note_line(report: Report, limits: Limits) -> str:
    """Return the line that an exception gets as a note."""
    return limits.attempt(
        "note", lambda: format_note(report), lambda: f"cudalens: {report.headline}", kind=str
    )


def has_become(finding: Report, error: BaseException) -> bool:
    """Return whether ``error`` was raised in place of a finding, which then is what went wrong.

    By ``raise … from …``, by a ``raise`` in the except clause that caught it, or by TorchScript.
    What fails in the clause for a reason of its own is another error.
    """
    if leads_to(finding, error, "__cause__") or is_retold(finding, error):
        return True
    caught = error.__context__
    if caught is None or not leads_to(finding, error, "__context__"):
        return False
    raised_at = entries_from_traceback(error.__traceback__)[-1:]
    caught_at = entries_from_traceback(caught.__traceback__)[:1]
    return any(
        entry.tb_frame is caught_at[0].tb_frame and _raises(entry)
        for entry in raised_at
        if caught_at
    )


def _raises(entry: TracebackType) -> bool:
    """Return whether a frame is at a ``raise`` statement of its own, and not in a call."""
    # `co_code` has the opcodes as compiled, without those that the interpreter specializes.
    return entry.tb_frame.f_code.co_code[entry.tb_lasti] == opmap["RAISE_VARARGS"]


def note_finding(error: BaseException, finding: Report) -> None:
    """Note on an exception which finding it stands for; the user's own exceptions stay as is."""
    if is_torch_error(error) and report_beside(error) is None:
        attached(error, finding, note_line(finding, Limits()))


def is_retold(finding: Report, error: BaseException | None) -> bool:
    """Return whether an exception is ``finding`` in the words of TorchScript's interpreter.

    It raises an error of its own, which holds the text of the one that was raised inside.
    """
    if error is None or not is_of_torchscript(error):
        return False
    return any(text in str(error) for text in (finding.headline, finding.headline_schema) if text)


def report_of_own(
    error: DeviceAssertError | NonFiniteError, findings: Iterable[Report]
) -> Report | None:
    """Return the report of one of our own exceptions that came without it.

    The finding whose words it has: torch raises anew what a replica raised.  Where a report could
    not be made, all that is known is the exception's own sentence.  ``None`` for an exception that
    somebody else raised.
    """
    text = str(error)
    matching = (
        item
        for item in findings
        if format_message(item) in text or text in (item.headline, item.headline_schema)
    )
    match = next(matching, None)
    innermost = entries_from_traceback(error.__traceback__)[-1:]
    # The guards' own frames may be left off: then it comes out of a call, where no code raised it.
    is_ours = any(
        is_own_file(entry.tb_frame.f_code.co_filename) or not _raises(entry) for entry in innermost
    )
    if match is not None or not is_ours:
        return match
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


def site_from_traceback(
    error: DeviceAssertError | NonFiniteError, report: Report
) -> CallSite | None:
    """Return the place that could not be seen where the guard fired, in a thread of autograd's.

    The report of the block is about its first finding; another may have left it.
    """
    trim(error)
    if report.source is not None or error.report is not report:
        return None
    entries = shown_frames(error.__traceback__)
    return Limits().attempt("source", lambda: locate(entries, {}), CallSite)


def complete_message(error: BaseException, before: Report, report: Report) -> None:
    """Put the line that the traceback has told into the text of a guard's exception."""
    if str(error) == format_message(before):
        error.args = (format_message(report), *error.args[1:])


def write_files(
    report: Report, html: str | Path | None, json: str | Path | None
) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Write a report to files.

    The option says the form, whatever the file is called.

    Returns:
        the files that were written, and a line for each that could not be.
    """
    written: list[Path] = []
    failures: list[str] = []
    for name, form in ((html, Report.to_html), (json, Report.to_json)):
        if name is None:
            continue
        path = expanded(name).absolute()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(form(report), encoding="utf-8")
            written.append(path)
        except Exception as failure:  # a view that fails must not hide the user's error
            failures.append(f"{path.name} was not written: {failure}")
    return tuple(written), tuple(failures)


def attached(error: BaseException, report: Report, line: str) -> Report:
    """Note ``line`` on an exception, keep the report beside it, and return the report."""
    attach(error, report, line)
    return report
