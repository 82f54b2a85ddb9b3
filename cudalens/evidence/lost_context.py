"""Recognise a CUDA context that an earlier fault has ended, and remember what ended it.

After such a fault every CUDA call of the process fails with the same error, whatever it does.  The
first failure is worth a report; the later ones are worth one line that points back to it.
"""

from __future__ import annotations

from cudalens.core import _torch
from cudalens.core.evidence_types import DeviceFault
from cudalens.core.report import ErrorFacts, Report
from cudalens.diagnosis.diagnose import format_place, is_device_assert
from cudalens.diagnosis.host_errors import is_sticky
from cudalens.evidence import context
from cudalens.evidence.finding import error_facts
from cudalens.guards.process import PROCESS

__all__ = ["STICKY_CODES", "end", "is_fatal", "is_lost", "probe", "reminder"]

STICKY_CODES = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721})
"""CUDA's error codes after which a process has to be started anew: memory and link faults, illegal
addresses, time-outs, asserts, launch failures."""


def is_lost(error: ErrorFacts) -> bool:
    """Whether, by an exception's code or else its words, the device cannot be used again."""
    if error.error_code is not None and error.error_code in STICKY_CODES:
        return True
    return is_sticky(error.message)


def is_fatal(error: BaseException) -> bool:
    """Return whether the device cannot be used after an exception."""
    return isinstance(error, Exception) and is_lost(error_facts(error))


def probe(*, wait: bool = False) -> ErrorFacts | None:
    """Ask the device itself: give the error that ended its context, ``None`` while it lives.

    No value is read and no kernel launched.  A process that has not used CUDA is not asked.

    Args:
        wait: wait for the work under way; without it, a fault that is still to come is not seen.
    """
    try:
        _torch.ask_device(wait=wait)
    except Exception as error:
        facts = error_facts(error)
        return facts if is_lost(facts) else None
    return None


def end() -> Report | None:
    """Return the report of the failure that ended this process's context, ``None`` while it lives.

    A rehearsal device that was reset or stopped lives again; a GPU never does.
    """
    if PROCESS.lost is None:
        return None
    report, fault = PROCESS.lost
    if report.environment.simulated and context.rehearsed_fault() is not fault:
        PROCESS.lost = None
        return None
    return report


def remember(report: Report) -> None:
    """Keep the report of the first failure after which the device cannot be used."""
    if report.context_usable is False and end() is None:
        PROCESS.lost = (report, context.rehearsed_fault())


def reminder(report: Report) -> str:
    """Return the one line for a cell that fails only because of what ``report`` tells."""
    place = format_place(report)
    what = "a device-side assert" if report.kind == "device_assert" else "a CUDA error"
    named = f" in {report.op.name}" if report.op.name else ""
    # Who reports an assert late is not to be taken for its cause.
    reported = " that was reported" if report.certainty == "unknown" else ""
    at = f"{reported} at {place}" if place else ""
    return f"the CUDA context is gone since {what}{named}{at}: restart the kernel to use the GPU"


def hidden_fault(error: ErrorFacts) -> DeviceFault:
    """Return the device's own error behind another exception.

    cuBLAS, cuDNN and others fail with a status of theirs when an assert came before.
    """
    found = None if is_lost(error) else probe()
    if found is None:
        return DeviceFault()
    return DeviceFault(
        hidden_error=found.message.split("\n", 1)[0], is_assert=is_device_assert(found)
    )
