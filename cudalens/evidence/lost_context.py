"""Recognise a CUDA context that an earlier fault has ended, and remember what ended it.

After such a fault every CUDA call of the process fails with the same error.  The first failure gets
a report.  Later ones get one line that refers to it.
"""

from __future__ import annotations

import re

import torch

from cudalens.core import _torch
from cudalens.core._python import entries_from_traceback
from cudalens.core.evidence_types import DeviceFault
from cudalens.core.report import ErrorFacts, Report, is_of_cell
from cudalens.diagnosis.diagnose import format_place, is_device_assert
from cudalens.diagnosis.host_errors import is_library_status, is_sticky
from cudalens.evidence import context
from cudalens.evidence.failure import error_facts
from cudalens.guards.process import PROCESS
from cudalens.source.files import running_shell, torch_path

STICKY_CODES = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721})
"""CUDA's error codes that end a context, so that the process must be restarted: memory and link
faults, illegal addresses, timeouts, asserts, launch failures."""
_DEVICE_ERROR = re.compile(r"\b(?:CUDA|HIP|XPU|MPS|SYCL)(?: driver| backend)? error\b", re.I)


def is_lost(error: ErrorFacts) -> bool:
    """Return whether the device is lost: the exception says so, and so does the device.

    The message alone may come from another process, or from the user's code.  cuBLAS and other
    libraries report it as a status of their own, which also has other causes.
    """
    return _says_lost(error) and probe(wait=True) is not None


def is_of_another(error: BaseException) -> bool:
    """Return whether an error reports a lost context although this process's works.

    An error during CUDA initialization belongs to this process, although it has no context yet.
    """
    if not isinstance(error, Exception) or not _names_lost_context(error_facts(error)):
        return False
    if not torch.cuda.is_initialized():
        codes = (item.tb_frame.f_code for item in entries_from_traceback(error.__traceback__))
        return all(torch_path(code.co_filename) != "cuda/__init__.py" for code in codes)
    # `probe` first: on a lost context `is_current_stream_capturing` raises.
    return probe(wait=True) is None and not torch.cuda.is_current_stream_capturing()


def _says_lost(error: ErrorFacts) -> bool:
    return _names_lost_context(error) or is_library_status(error.message)


def _names_lost_context(error: ErrorFacts) -> bool:
    return error.error_code in STICKY_CODES or is_sticky(error.message)


def is_of_device(error: BaseException) -> bool:
    """Return whether the device reported an exception: CUDA, or another runtime like it."""
    facts = error_facts(error)
    is_reported = facts.type_name == "AcceleratorError" or facts.error_code is not None
    return is_reported or _DEVICE_ERROR.search(facts.message) is not None or is_lost(facts)


def is_fatal(error: BaseException) -> bool:
    """Return whether the device cannot be used after an exception."""
    return isinstance(error, Exception) and is_lost(error_facts(error))


def is_unanswered() -> bool:
    """Return whether probing the device raises an error that does not end a context.

    Then the device may be alive or lost.
    """
    try:
        _torch.raise_pending_cuda_error(wait=True)
    except Exception as error:
        return not _names_lost_context(error_facts(error))
    return False


def probe(*, wait: bool = False) -> ErrorFacts | None:
    """Probe the device: return the error that ended its context, ``None`` if it works.

    Reads no value and launches no kernel.  Does nothing in a process that has not used CUDA.

    Args:
        wait: wait for running kernels; otherwise a fault that they are about to raise is missed.
    """
    try:
        _torch.raise_pending_cuda_error(wait=wait)
    except Exception as error:
        facts = error_facts(error)
        return facts if _names_lost_context(facts) else None
    return None


def end() -> Report | None:
    """Return the report of the failure that ended this process's context, ``None`` if it works.

    A rehearsal device works again after a reset or stop.  A GPU never does.
    """
    if PROCESS.lost is None:
        return None
    report, fault = PROCESS.lost
    if report.environment.simulated and context.rehearsed_fault() is not fault:
        PROCESS.lost = None
        return None
    return report


def earlier_failure(error: BaseException) -> Report | None:
    """Return the report of the failure that ended the context, if ``error`` only follows from it.

    The device is probed only where a failure is remembered.
    """
    report = end()
    return report if report is not None and is_fatal(error) else None


def remember(report: Report) -> None:
    """Remember the report of the failure that ended the context; the first one wins."""
    if report.context_usable is False and end() is None:
        PROCESS.lost = (report, context.rehearsed_fault())


def reminder(report: Report) -> str:
    """Return the line for a cell that fails only because of an earlier failure."""
    place = format_place(report)
    what = "a device-side assert" if report.kind == "device_assert" else "a CUDA error"
    named = f" in {report.op.name}" if report.op.name else ""
    # The place that reports an assert late is not its cause.
    reported = " that was reported" if report.certainty == "unknown" else ""
    at = f"{reported} at {place}" if place else ""
    is_script = running_shell() is None and not is_of_cell(report.source, report.frames)
    again = "start the process again" if is_script else "restart the kernel"
    return f"the CUDA context was lost to {what}{named}{at}: {again} to use the GPU"


def ask(error: ErrorFacts) -> tuple[bool, DeviceFault]:
    """Probe the device once; return :func:`is_lost`, and the error behind a library's status.

    cuBLAS, cuDNN and others fail with a status of their own after an assert.
    """
    is_said = _says_lost(error)
    fault = probe(wait=is_said)
    if fault is None or _names_lost_context(error):
        return is_said and fault is not None, DeviceFault()
    hidden = fault.message.split("\n", 1)[0]
    return is_said, DeviceFault(hidden_error=hidden, is_assert=is_device_assert(fault))
