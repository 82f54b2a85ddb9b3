"""Report the findings of guards and of the NaN watch while the code runs.

The evidence for a report is built in ``collect.py``.
"""

from __future__ import annotations

import ast
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor
from torch.nn import functional

from cudalens.core import _python, _torch
from cudalens.core.api_names import api_names, stem_of
from cudalens.core.call import Call, NodeMark, OpCall
from cudalens.core.errors import (
    DeviceAssertError,
    DeviceIndexError,
    DeviceValueError,
    NonFiniteError,
    SilentFindingWarning,
)
from cudalens.core.limits import Limits
from cudalens.core.report import Evidence, Report
from cudalens.core.report_types import OpName, Violation
from cudalens.diagnosis.diagnose import (
    bare_report_of_violation,
    diagnose,
    format_message,
    format_sentence,
)
from cudalens.evidence.call_stack import (
    buffer_names,
    calling_frames,
    entries_of,
    phase_of,
)
from cudalens.evidence.collect import evidence_of
from cudalens.evidence.failing_call import arguments_of
from cudalens.evidence.failure import FailureContext, current_recorder
from cudalens.evidence.finite_trial import FiniteTrial, RunningNode
from cudalens.evidence.max_norm import of_lookup
from cudalens.evidence.recorded_way import refs_of
from cudalens.evidence.tensors import bad_key, with_own_planes
from cudalens.evidence.trial import ApiTrial, call_of_finding
from cudalens.guards.past_calls import PastCall, StackLine
from cudalens.guards.process import PROCESS
from cudalens.recorder.tensor_refs import tensor_values
from cudalens.source.files import is_user_file
from cudalens.source.locate import locate_entries
from cudalens.source.running_call import is_tensor_method
from cudalens.source.running_node import running
from cudalens.source.stack import Entry, places_of, stack_of

# --- findings while the code runs ----------------------------------------------------------------


def on_violation(op: OpCall, violation: Violation) -> BaseException | None:
    """Report a guard's finding to the session; return the exception to raise."""
    if violation.is_silent and is_repeated(violation, _running_line()):
        return None
    of_nan = Limits().attempt("NaN", partial(_nan_that_arrived, violation, op))
    if of_nan is not None:
        return of_nan
    op, violation = Limits().attempt(
        "lookup", partial(of_lookup, op, violation), lambda: (op, violation)
    )

    def report(started: float) -> Report:
        return diagnose(*evidence_of_call(violation, op, started))

    return _raised(violation, *_reported(violation, report))


def _nan_that_arrived(violation: Violation, op: OpCall) -> BaseException | None:
    """Return the exception for a NaN whose maker is known, instead of the guard's finding."""
    recorder, first = current_recorder(), violation.offenders.first
    bad = tensor_values(op.arguments).get(bad_key(violation))
    look = getattr(getattr(recorder, "watch", None), "of_guard", None)
    if look is None or bad is None or not first or first[0].value != "nan":
        return None
    error: BaseException | None = look(violation.op, bad, recorder.sites.of(sys._getframe()))
    return error


def on_past_violation(violation: Violation, past: PastCall) -> BaseException | None:
    """Report a finding in a past call, whose tensors are gone."""
    if violation.is_silent and is_repeated(violation, _users_line(past.lines)):
        return None
    values, when = violation.offenders, ", in the replays of a CUDA graph"
    if past.calls_ago is not None:
        ago = f", {past.calls_ago} guarded call{'s' * (past.calls_ago != 1)} ago"
        when = ago if past.calls_ago else ""
    extremes = (
        f"Its values went from {values.min} to {values.max}{when}. "
        "To see which element is bad, run it without deferred guards."
    )
    written = _written_buffers(past)
    why = " ".join(filter(None, (violation.explanation, extremes, written)))
    violation = replace(violation, explanation=why)
    report = partial(_report_of_past, violation, past)
    return _raised(violation, *_reported(violation, report, is_deferred=True))


def nonfinite_error(violation: Violation, full: Callable[[float], Report]) -> BaseException | None:
    """Report a NaN or infinity to the session; return the exception to raise.

    Args:
        full: makes the report, given when the work on it began.
    """
    limits = Limits()
    error = limits.attempt(
        "report",
        lambda: NonFiniteError(*_reported(violation, full)),
        lambda: NonFiniteError(violation.sentence()),
    )
    for line in limits.lines:
        PROCESS.internal_error(line)
    return error


def _raised(violation: Violation, text: str, report: Report) -> BaseException | None:
    """Return the exception for a finding; warn of a silent one."""
    if violation.is_silent:
        return None if PROCESS.listeners else _warn(text)
    kind: type[DeviceAssertError] = DeviceIndexError if violation.is_index else DeviceValueError
    return kind(text, report)


def _reported(
    violation: Violation, full: Callable[[float], Report], *, is_deferred: bool = False
) -> tuple[str, Report]:
    """Make the report and pass it to the session; return the exception's text and the report.

    A failure on the way becomes a line of ``limits``: the sentence with the value must get through.

    Args:
        full: makes the report, given when the work on it began.
    """
    started, limits = time.perf_counter(), Limits()

    def bare() -> Report:
        lines = tuple(limits.lines)
        return bare_report_of_violation(violation, is_deferred=is_deferred, limits=lines)

    report = limits.attempt("diagnosis", lambda: full(started), bare, kind=Report)
    limits.attempt("variables", _python.forget)
    text = limits.attempt(
        "message", lambda: format_message(report), lambda: format_sentence(report), kind=str
    )
    limits.attempt("session", lambda: PROCESS.add_finding(report))
    for line in limits.lines:
        if line not in report.limits:
            PROCESS.internal_error(line)
    return text, report


def _warn(text: str) -> SilentFindingWarning | None:
    """Warn of a silent finding; return the warning if the user's filter turns it into an error."""
    try:
        warnings.warn(text, SilentFindingWarning, stacklevel=3)
    except SilentFindingWarning as error:
        return error
    return None


def evidence_of_call(
    violation: Violation, op: OpCall, started: float, condition: Tensor | None = None
) -> tuple[Evidence, ApiTrial | None]:
    """Return the evidence about the running call, and a trial for changes to it.

    Args:
        condition: of the ``where`` that the result went into, of a function whose node runs.
    """
    limits, node = Limits(), _torch.current_node()
    attempt = limits.attempt
    frames = attempt("frames", partial(calling_frames, in_backward=node is not None), list)
    trial = attempt("trial", partial(_trial, violation, op, frames, node, condition))
    number = _torch.node_sequence_nr(node)
    failure = FailureContext(
        call=replace(
            Call(op=op) if trial is None else trial.call,
            node=None if number is None else NodeMark(type(node).__name__, number),
        ),
        entries=frames,
        violation=violation,
        op=OpName(name=violation.op, overload=violation.overload),
        arguments=op.arguments,
        node=node,
        recorder=current_recorder(),
        trial=trial,
        started=started,
        limits=limits,
    )
    # An edit of the call cannot help if its inputs were bad already.
    if isinstance(trial, FiniteTrial):
        trial.is_bad_before = attempt("trial", partial(_is_bad_before, failure), lambda: False)
    called = failure.call.api
    # torch.nn.functional may rename or reorder arguments for its op: keep both sets of names.
    if getattr(called and called.func, "__module__", None) == functional.__name__:
        failure.named = attempt("arguments", lambda: tuple(arguments_of(called).items()), tuple)
    # The finding in the user's own shape: the collectors read it.
    in_own_shape = partial(with_own_planes, violation, failure.values, failure.site)
    failure.violation = attempt("planes", in_own_shape, lambda: violation)
    evidence = evidence_of(
        failure,
        phase=phase_of(frames, in_backward=node is not None),
        prevented=not (violation.is_silent or violation.is_nonfinite),
        context_usable=True,
    )
    return evidence, trial


def _is_bad_before(failure: FailureContext) -> bool:
    """Return whether an input of the call already had bad values that another call has made."""
    recorder, watch = failure.recorder, getattr(failure.recorder, "watch", None)
    if watch is None:
        return False
    snapshot = recorder.snapshot()
    node = failure.call.node
    forward = None if node is None else snapshot.forward_call(node.sequence_nr)
    given = failure.values.values() if forward is None else (it() for it in forward.inputs)
    sources = (it for root in given if root is not None for it in refs_of(root, snapshot))
    marks = (watch.marked.get(id(it)) for it in sources)
    return any(mark is not None and not mark.may_be_mask for mark in marks)


def _trial(
    violation: Violation,
    op: OpCall,
    frames: Sequence[FrameType],
    node: Any,
    condition: Tensor | None,
) -> ApiTrial | None:
    """Return the trial of the call in which a value was found."""
    found = call_of_finding(frames, op)
    if found is None:
        return None
    if not violation.is_nonfinite:
        return ApiTrial(*found, has_autograd=False)
    gradient = op.arguments.get("gradient") if node is not None else None
    running = None if gradient is None else RunningNode(node, gradient, condition)
    return FiniteTrial(*found, running)


def _report_of_past(violation: Violation, past: PastCall, started: float) -> Report:
    limits = Limits()
    entries = limits.attempt("frames", lambda: entries_of(past.lines), list)
    failure = FailureContext(
        entries=entries,
        violation=violation,
        op=OpName(
            name=violation.op,
            overload=violation.overload,
            api=limits.attempt("api", lambda: _compiled_function(violation.op, entries)),
        ),
        started=started,
        limits=limits,
    )
    evidence = evidence_of(
        failure,
        phase=phase_of(entries, in_backward=past.in_backward),
        forward_source=locate_entries(entries_of(past.forward)),
        prevented=not violation.is_silent,
        deferred=True,
        context_usable=True,
    )
    return diagnose(evidence, None)


def _compiled_function(op: str, entries: Sequence[Entry]) -> str | None:
    """Return the C++ function of ``torch.nn.functional`` that a line called, such as ``F.one_hot``.

    Only a function that calls the op, and that is no tensor method.
    """
    places = places_of(entries)
    # A Python function would have a frame of its own below.
    node = running(places[-1]).node if places else None
    name = stem_of(ast.unparse(node.func)) if isinstance(node, ast.Call) else ""
    is_known = f"F.{name}" in api_names(op) and not is_tensor_method(name)
    return f"torch.nn.functional.{name}" if is_known else None


def _written_buffers(past: PastCall) -> str:
    """Name the running statistics that were updated since a call."""
    if not past.buffers:
        return ""
    names = buffer_names(calling_frames(), past.buffers)
    return f"Written since then, from its result or others: {', '.join(names)}."


# --- silent findings: each line of a loop once ----------------------------------------------------


def is_repeated(violation: Violation, line: StackLine | None) -> bool:
    """Return whether this instruction of the user's has already reported this finding."""
    if line is None:
        return False  # an autograd thread: the user's line is unknown
    seen = PROCESS.reported.setdefault(line[0], set())
    # With the file, because code objects of equal source compare equal across files.
    here = line[0].co_filename, line[1], violation.guard, violation.argument
    if here in seen:
        return True
    seen.add(here)
    return False


def _running_line() -> StackLine | None:
    """Return the user's innermost running line."""
    frames = stack_of(sys._getframe(1))
    return _users_line([(item.f_code, item.f_lasti) for item in frames])


def _users_line(lines: Sequence[StackLine]) -> StackLine | None:
    """Return the user's innermost line."""
    return next((item for item in reversed(lines) if is_user_file(item[0].co_filename)), None)
