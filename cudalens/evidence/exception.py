"""Collect evidence after an exception has left the checked block.

The traceback keeps the stack.  Tensors can be read only if the device's context survived, which it
does not after a device-side assert.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cudalens.core.call import ApiCall, Call
from cudalens.core.evidence_types import DeviceFault, Synchronization
from cudalens.core.limits import Limits
from cudalens.core.report import Evidence, Report
from cudalens.core.report_types import OpName, Phase, TensorFact
from cudalens.diagnosis.diagnose import is_device_assert
from cudalens.evidence import lost_context
from cudalens.evidence.call_stack import phase_of
from cudalens.evidence.collect import evidence_of
from cudalens.evidence.failing_call import api_call_of_stack, arguments_of
from cudalens.evidence.failure import FailureContext, error_facts
from cudalens.evidence.host_value import observed_value
from cudalens.evidence.torch_errors import visible_entries
from cudalens.evidence.trial import ApiTrial, trial_of_error
from cudalens.recorder.arguments import overload_of
from cudalens.recorder.calls import BACKWARD
from cudalens.recorder.sites import SiteReader, entries_of
from cudalens.recorder.sites import phase_of as phase_of_site
from cudalens.source.locate import CallSite, locate_entries
from cudalens.source.stack import frames_of

# CUDA calls it `cudaErrorStreamCaptureInvalidated`.
_CAPTURE_INVALIDATED = 901


def evidence_of_error(
    error: BaseException,
    recorder: Any,
    device_text: Any,
    *,
    started: float,
    raised: ApiCall | None = None,
    was_lost: bool = False,
    is_checked: bool = True,
    beside: Callable[[], Sequence[TensorFact]] = tuple,
) -> tuple[Evidence, ApiTrial | None]:
    """Collect the evidence about an exception of CUDA, torch or a library on top of it.

    Return a trial of the failing call with it, unless the device is lost.

    Args:
        recorder, device_text: of the block that the exception left, ``None`` without one.
        started: when the work on the report began, on the performance counter.
        raised: the call that raised it, where a recorder saw one.
        was_lost: whether the device's context had ended before that block began.
        is_checked: whether a check was open.
        beside: where the context is gone, other tensors, after those of the line.
    """
    error = _cause_in_capture(error)
    limits, facts = Limits(), error_facts(error)
    attempt = limits.attempt
    ask, unknown = partial(lost_context.ask, facts), (False, DeviceFault())
    is_own, hidden = attempt("device", ask, lambda: unknown, kind=tuple)
    is_lost = hidden.hidden_error is not None or is_own
    entries = visible_entries(error)

    # The call: where it is, what it was given.
    find = partial(failed_call, recorder, raised, is_lost=is_own)
    failed, was_handled_inside = attempt("failing op", find, lambda: (None, False), kind=tuple)
    call, trial = Call(), None
    if not was_handled_inside:
        trial = attempt("call", lambda: trial_of_error(error, entries, raised))
        read = partial(api_call_of_stack, entries)
        call = Call(api=attempt("call", read) or raised) if trial is None else trial.call
    # The user's line may call another function, which in turn called the one that failed.
    api = failed if is_lost and failed is not None and failed.func is not None else call.api
    arguments = attempt("arguments", lambda: arguments_of(api), dict)
    live = None if recorder is None else raised
    look = partial(observed_value, facts.message, entries, live, call.operands, recorder)
    observed = None if is_lost else attempt("value", look)
    failure = FailureContext(
        call=call if failed is None else replace(call, node=failed.node),
        entries=entries,
        error=facts,
        is_lost=is_lost,
        op=OpName() if failed is None else _op_of(failed),
        arguments=arguments,
        raised=raised,
        recorder=recorder,
        trial=trial,
        beside=beside,
        started=started,
        limits=limits,
    )
    if observed is not None:
        failure.violation, failure.values = observed.violation, observed.values
        # An op argument of the same name is another tensor: `self` is x in x[0, i].
        of_op = {key.partition("[")[0] for key in failure.values}
        failure.named = [it for it in arguments.items() if it[0].partition("[")[0] not in of_op]
        if observed.api is not None:
            failure.op = OpName(api=observed.api or None)
    if failed is not None and was_handled_inside:
        failure.site = attempt("source", lambda: site_of_call(failed), CallSite)
    is_backward = any(item.f_code.co_name == "_engine_run_backward" for item in failure.frames)
    is_assert = is_device_assert(facts) and not was_lost
    is_synchronous = recorder is not None and recorder.is_synchronous
    evidence = evidence_of(
        failure,
        phase=phase_of(entries, in_backward=is_backward) if failed is None else _phase_of(failed),
        context_usable=False if is_lost else _lives_on(error),
        device_text=_printed(device_text, limits, is_expected=is_assert),
        device_fault=replace(
            hidden, was_before=was_lost and is_lost, was_handled_inside=was_handled_inside
        ),
        synchronization=Synchronization(
            waits=is_synchronous if is_checked and not was_lost else None,
            is_op_unwaited=failed is not None and not is_synchronous,
        ),
        has_run_kernels=observed is not None and observed.has_run_kernels,
        is_checked=is_checked,
    )
    return evidence, None if is_lost else trial


def failed_call(
    recorder: Any, raised: ApiCall | None, *, is_lost: bool
) -> tuple[ApiCall | None, bool]:
    """Return the recorded call that raised, and whether it had raised earlier.

    If the device's context had already ended, it is the call that ended it.
    """
    if recorder is None:
        return None, False
    fatal = recorder.fatal
    if is_lost and recorder.is_over and fatal is not raised:
        if fatal is None:
            return None, False  # no call of this block has ended it
        # A call without a function was recorded on an autograd thread, before torch raised.
        if raised is None or fatal.func is not None or fatal.node != raised.node:
            return fatal, True
    return raised, False


def site_of_call(call: ApiCall) -> CallSite:
    """Return the place of a past call, not the place that met its error later."""
    entries = entries_of(call.site)
    return CallSite(
        source=locate_entries(entries),
        frames=frames_of(entries),
        module_path=SiteReader().module(call.site).path,
    )


def _op_of(call: ApiCall) -> OpName:
    """Name the function, the op of an extension, or the autograd node whose kernel failed."""
    if (op := overload_of(call.func)) is not None:
        return OpName(name=op.name().partition(".")[0], overload=op._overloadname)
    if call.node is not None and call.func in (None, *BACKWARD):
        return OpName(name=call.node.name)
    return OpName(name=None if call.func is None else call.name)


def _phase_of(call: ApiCall) -> Phase:
    is_backward = call.node is not None or call.func in BACKWARD
    return "backward" if is_backward else phase_of_site(call.site)


def _cause_in_capture(error: BaseException) -> BaseException:
    """Return the exception that ended a CUDA graph capture, for one that only says that it ended.

    A forbidden call raises, and leaving the capture block raises once more.
    """
    first = error.__context__
    is_end = getattr(error, "error_code", None) == _CAPTURE_INVALIDATED
    return first if is_end and first is not None and lost_context.is_of_device(first) else error


def _lives_on(error: BaseException) -> bool | None:
    """Return whether the device works after an exception, ``None`` if that is unknown."""
    # Without CUDA in use, there is no context that could be lost.
    if not torch.cuda.is_initialized():
        return None
    is_silent = lost_context.is_of_device(error) and lost_context.is_unanswered()
    return None if is_silent else True


def _printed(device_text: Any, limits: Limits, *, is_expected: bool) -> str | None:
    if device_text is None:
        return None
    read = partial(device_text.text, is_expected=is_expected)
    return limits.attempt("device text", lambda: read() or "", str) or None


def report_of_another(error: BaseException) -> Report:
    """Report an exception about a lost context of another process."""
    started = time.perf_counter()
    evidence, _ = evidence_of_error(error, None, None, started=started, is_checked=False)
    first = str(error).strip().split("\n", 1)[0]
    state = "The CUDA devices of this process still work after this exception"
    if evidence.context_usable is None:
        state = "torch has not used CUDA in this process"
    return Report(
        kind="cuda_error",
        certainty="unknown",
        context_usable=evidence.context_usable,
        phase=evidence.phase,
        headline=f"no device of this process has failed, but the exception reads: {first}",
        explanation=f"{state}. The text was raised by hand or came from another process: look for "
        "the failure there.",
        source=evidence.source,
        frames=evidence.frames,
        tensors=evidence.tensors,
        environment=evidence.environment,
        limits=evidence.limits,
    )
