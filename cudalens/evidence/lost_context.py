"""Recognise a CUDA context that an earlier fault has ended, and remember what ended it.

After such a fault every CUDA call of the process fails with the same error, whatever it does.  The
first failure is worth a report; the later ones are worth one line that points back to it.
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
"""CUDA's error codes after which a process has to be started anew: memory and link faults, illegal
addresses, time-outs, asserts, launch failures."""
_DEVICE_ERROR = re.compile(r"\b(?:CUDA|HIP|XPU|MPS|SYCL)(?: driver| backend)? error\b", re.I)


def is_lost(error: ErrorFacts) -> bool:
    """Return whether the device cannot be used again: an exception says so, and the device too.

    The words alone may have been written by hand, or have come from another process.  cuBLAS and
    the like say it with a status of theirs, which has other causes too.
    """
    return _says_lost(error) and probe(wait=True) is not None


def is_of_another(error: BaseException) -> bool:
    """Return whether an error reports a lost context although this process's works.

    What came up while torch started CUDA belongs to this process, though it has no context yet.
    """
    if not isinstance(error, Exception) or not _names_lost_context(error_facts(error)):
        return False
    if not torch.cuda.is_initialized():
        codes = (item.tb_frame.f_code for item in entries_from_traceback(error.__traceback__))
        return all(torch_path(code.co_filename) != "cuda/__init__.py" for code in codes)
    # On a lost context even the question about a capture raises.
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
    """Return whether the question for the device fails with an error that ends no context.

    Such an answer is no sign of life, and no proof of an end.
    """
    try:
        _torch.raise_pending_cuda_error(wait=True)
    except Exception as error:
        return not _names_lost_context(error_facts(error))
    return False


def probe(*, wait: bool = False) -> ErrorFacts | None:
    """Ask the device itself: give the error that ended its context, ``None`` while it lives.

    No value is read and no kernel launched.  A process that has not used CUDA is not asked.

    Args:
        wait: wait for the work under way; without it, a fault that is still to come is not seen.
    """
    try:
        _torch.raise_pending_cuda_error(wait=wait)
    except Exception as error:
        facts = error_facts(error)
        return facts if _names_lost_context(facts) else None
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
    is_script = running_shell() is None and not is_of_cell(report.source, report.frames)
    again = "start the process again" if is_script else "restart the kernel"
    return f"the CUDA context was lost to {what}{named}{at}: {again} to use the GPU"


def ask(error: ErrorFacts) -> tuple[bool, DeviceFault]:
    """Ask the device once: return :func:`is_lost`, and its own error behind another exception.

    cuBLAS, cuDNN and others fail with a status of theirs when an assert came before.
    """
    is_said = _says_lost(error)
    fault = probe(wait=is_said)
    if fault is None or _names_lost_context(error):
        return is_said and fault is not None, DeviceFault()
    hidden = fault.message.split("\n", 1)[0]
    return is_said, DeviceFault(hidden_error=hidden, is_assert=is_device_assert(fault))
