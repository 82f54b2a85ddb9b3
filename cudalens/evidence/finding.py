"""Collect the evidence of one failure from live objects: stack, tensors, replay, graph, recorder.

Each collector stands alone: one that fails leaves one line in ``limits`` and the others go on.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

from cudalens.core import _python, _torch
from cudalens.core.call import OpCall
from cudalens.core.errors import (
    DeviceAssertError,
    DeviceIndexError,
    DeviceValueError,
    NonFiniteError,
    SilentFindingWarning,
)
from cudalens.core.evidence_types import CallContext
from cudalens.core.limits import Limits
from cudalens.core.report import ErrorFacts, Evidence, Report, is_of_cell
from cudalens.core.report_types import (
    FIRST_BAD,
    FIRST_NAN,
    AutogradNeighbourhood,
    Environment,
    HistoryEntry,
    LineRef,
    OpName,
    Replay,
    SeenBefore,
    SourceSpan,
    TensorFact,
    Timing,
    Violation,
)
from cudalens.diagnosis.diagnose import (
    bare_report_of_violation,
    diagnose,
    format_message,
    format_sentence,
)
from cudalens.evidence import autograd_graph
from cudalens.evidence.call_stack import (
    api_arguments,
    buffer_names,
    calling_frames,
    entries_of,
    locate,
    parameter_names,
    phase_of,
)
from cudalens.evidence.context import describe, observe
from cudalens.evidence.dataset_column import column_of
from cudalens.evidence.grown_parameter import grown_parameter
from cudalens.evidence.module_names import module_names, owner_modules
from cudalens.evidence.replay import replay
from cudalens.evidence.tensors import bad_key, breaks, facts_of, scalars_of
from cudalens.evidence.trial import trial_of_finding
from cudalens.guards.past_calls import PastCall, StackLine
from cudalens.guards.process import PROCESS
from cudalens.recorder.provenance import Provenance
from cudalens.recorder.tensor_refs import tensor_values
from cudalens.source.files import is_user_file, running_shell
from cudalens.source.locate import CallSite, locate_entries
from cudalens.source.stack import stack_of

FORWARD_CALL = "the forward call of the op that failed"


# --- findings while the code runs ----------------------------------------------------------------


def on_violation(call: OpCall, violation: Violation) -> BaseException | None:
    """Make the report of a guard's finding, tell the session, and return what is to be raised."""
    if violation.is_silent and is_repeated(violation, _running_line()):
        return None

    def replayed() -> Replay:
        return replay(call.op, call.args, call.kwargs, is_safe=violation.is_replay_safe)

    return _raised(violation, *_text_and_report(violation, call, replayed))


def on_past_violation(violation: Violation, past: PastCall) -> BaseException | None:
    """Make the report of a finding in a call that is over: no tensor of it is known."""
    if violation.is_silent and is_repeated(violation, _line_of(past)):
        return None
    values, calls = violation.offenders, f"call{'s' * (past.calls_ago != 1)}"
    extremes = (
        f"Its values went from {values.min} to {values.max}, {past.calls_ago} guarded {calls} ago; "
        "to see which element is bad, run it under %%cudacheck, or without deferred guards."
    )
    written = _written_buffers(past)
    why = " ".join(filter(None, (violation.explanation, extremes, written)))
    violation = replace(violation, explanation=why)
    started, limits = time.perf_counter(), Limits()
    return _raised(
        violation,
        *_reported(
            violation,
            limits,
            lambda: diagnose(_evidence_of_past(violation, past, started), None),
            is_deferred=True,
        ),
    )


def _written_buffers(past: PastCall) -> str:
    """Name the running statistics that took in values of batches since a call."""
    if not past.buffers:
        return ""
    names = buffer_names(calling_frames(), past.buffers)
    return f"Written since then, from its result or others: {', '.join(names)}."


def _evidence_of_past(violation: Violation, past: PastCall, started: float) -> Evidence:
    limits = Limits()
    attempt = limits.attempt
    entries = attempt("frames", lambda: entries_of(past.lines), list)
    site = attempt("source", lambda: locate(entries, {}), CallSite)
    # Without variables the line alone does not tell torch.take from a tensor's method.
    api = site.api if (site.api or "").startswith("torch.nn.functional.") else None
    return Evidence(
        violation=violation,
        op=OpName(name=violation.op, overload=violation.overload, api=api),
        phase=phase_of(entries, in_backward=past.in_backward),
        prevented=not violation.is_silent,
        deferred=True,
        context_usable=True,
        source=site.source,
        forward_source=locate_entries(entries_of(past.forward)),
        call_text=site.call_text,
        frames=site.frames,
        device_text=violation.device_text,
        environment=attempt("environment", describe, Environment),
        libraries=libraries(),
        is_script=is_script(site),
        timing=attempt("timing", lambda: timing_since(started), Timing),
        limits=(*site.limits, *limits.lines),
    )


def _raised(violation: Violation, text: str, report: Report) -> BaseException | None:
    """Return what is raised for a finding; a silent one is a warning."""
    if violation.is_silent:
        return None if PROCESS.listeners else _warn(text)
    kind: type[DeviceAssertError] = DeviceIndexError if violation.is_index else DeviceValueError
    return kind(text, report)


def on_nonfinite(arguments: Mapping[str, Any], violation: Violation) -> BaseException | None:
    """Make the report of the first NaN or infinity, and return the exception to raise."""
    limits = Limits()
    error = limits.attempt(
        "report",
        lambda: NonFiniteError(
            *_text_and_report(
                violation, OpCall(op=None, arguments=arguments, name=violation.op), Replay
            )
        ),
        lambda: NonFiniteError(violation.sentence()),
    )
    for line in limits.lines:
        PROCESS.internal_error(line)
    return error


def _text_and_report(
    violation: Violation, call: OpCall, replayed: Callable[[], Replay]
) -> tuple[str, Report]:
    """Return the text of the exception, and the report, of a call that is being made."""
    started, limits = time.perf_counter(), Limits()

    def full() -> Report:
        context = FailureContext(violation, call)
        return diagnose(evidence_of(context, replayed, started), context.trial)

    return _reported(violation, limits, full)


def _reported(
    violation: Violation, limits: Limits, full: Callable[[], Report], *, is_deferred: bool = False
) -> tuple[str, Report]:
    """Return the text of the exception, and the report, which the session is given.

    Whatever fails on the way is a line of ``limits``: the sentence with the value has to arrive.
    """

    def bare() -> Report:
        lines = tuple(limits.lines)
        return bare_report_of_violation(violation, is_deferred=is_deferred, limits=lines)

    report = limits.attempt("diagnosis", full, bare, kind=Report)
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
    """Warn of a silent finding; return the warning where the user's filter makes it an error."""
    try:
        warnings.warn(text, SilentFindingWarning, stacklevel=3)
    except SilentFindingWarning as error:
        return error
    return None


def timing_since(started: float) -> Timing:
    """Return the counts of the check, and the seconds since ``started``."""
    recorder = _recorder()
    return Timing(
        checked_ops=PROCESS.checked_ops,
        recorded_ops=recorder.recorded_ops if recorder is not None else 0,
        diagnose_s=round(time.perf_counter() - started, 4),
    )


def is_script(site: CallSite) -> bool:
    """Return whether a call was made by a script: no notebook and no IPython runs here."""
    return running_shell() is None and not is_of_cell(site.source, site.frames)


def _recorder() -> Any:
    listener = PROCESS.listener
    return listener.recorder if listener is not None else None


class FailureContext:
    """The live objects around a finding; it exists only while the report is made."""

    def __init__(self, violation: Violation, call: OpCall) -> None:
        self.violation = violation
        self.arguments, self.values = call.arguments, tensor_values(call.arguments)
        self.bad, self.recorder, self.limits = bad_key(violation), _recorder(), Limits()
        self.node = _torch.current_node()
        running = partial(calling_frames, in_backward=self.node is not None)
        self.frames: Sequence[FrameType] = self.limits.attempt("frames", running, list)
        self.trial = self.limits.attempt("trial", partial(trial_of_finding, self.frames, call))


def evidence_of(
    context: FailureContext, replayed: Callable[[], Replay], started: float
) -> Evidence:
    """Collect everything about a call that a finding was made in; the device is alive."""
    violation, values, frames = context.violation, context.values, context.frames
    node, recorder = context.node, context.recorder
    limits, attempt = context.limits, context.limits.attempt
    site = _site(context)
    forward, forward_module = attempt(
        "forward source", lambda: _forward(context), lambda: (None, None), kind=tuple
    )
    module_path = site.module_path or forward_module
    api = tuple(api_arguments(frames).items())
    tensors = attempt("tensors", lambda: facts_of(violation, values, site, api), tuple)
    replay = attempt("replay", replayed, Replay)
    names = parameter_names(frames)
    draw = partial(graph_of, context, tensors, names)
    graph = attempt("graph", draw, AutogradNeighbourhood)
    history: tuple[HistoryEntry, ...] = ()
    grown, watch = None, None
    if recorder is not None:
        watch = getattr(recorder, "watch", None)
        history = attempt("history", recorder.history, tuple)
        if violation.is_nonfinite:
            inputs = list(values.values())
            grown = attempt("parameters", lambda: grown_parameter(inputs, recorder, names))
    way = _provenance(context)
    if way.samples:
        violation = attempt("dataset", partial(_with_samples, violation, way), lambda: violation)
    batch = way.batch
    column = None if batch is None else attempt("dataset", partial(column_of, batch, violation))
    paths = [item.module_path for item in history] + [item.module_path for item in graph.nodes]
    name = partial(module_names, module_path, paths, recorder, frames, running=module_path)
    return Evidence(
        violation=violation,
        op=OpName(name=violation.op, overload=violation.overload, api=site.api),
        phase=phase_of(frames, in_backward=node is not None),
        prevented=not (violation.is_silent or violation.is_nonfinite),
        context_usable=True,
        source=site.source,
        forward_source=forward,
        call_text=site.call_text,
        module_path=module_path,
        module_type=site.module_type,
        module_names=attempt("module names", name, tuple),
        frames=site.frames,
        tensors=tensors,
        scalars=attempt("scalars", lambda: scalars_of(context.arguments), tuple),
        replay=replay,
        device_text=violation.device_text,
        graph=graph,
        provenance=tuple(way.steps),
        history=history,
        seen_before=attempt("earlier calls", lambda: _seen_before(context)),
        owners=attempt("modules", partial(owner_modules, context.values, frames, site), tuple),
        call_context=attempt("observations", lambda: observe(frames, site), CallContext),
        dataset_column=column,
        nan_watch=None if watch is None else watch.facts,
        grown=grown,
        environment=attempt("environment", describe, Environment),
        libraries=libraries(),
        is_script=is_script(site),
        timing=attempt("timing", lambda: timing_since(started), Timing),
        limits=(*site.limits, *limits.lines),
    )


def _site(context: FailureContext) -> CallSite:
    """Find the user's line, and what is proven to be each tensor on it."""
    reader = None if context.trial is None else context.trial.line.call
    find = partial(locate, context.frames, context.values, reader)
    return context.limits.attempt("source", find, CallSite)


def _forward(context: FailureContext) -> tuple[SourceSpan | None, str | None]:
    """Return the place and the module of the forward call of an op that runs in backward."""
    node, recorder = context.node, context.recorder
    number = _torch.node_sequence_nr(node)
    place = forward_place(recorder, number, type(node).__name__)
    if recorder is not None and number is not None and place[0] is None:
        context.limits.add(recorder.beyond_ring(FORWARD_CALL, number))
    return place


def graph_of(
    context: FailureContext, tensors: Sequence[TensorFact], names: Mapping[int, str]
) -> AutogradNeighbourhood:
    """Return the autograd graph around the failing op, its inputs by the user's names."""
    first = next(iter(context.violation.offenders.first), None)
    return autograd_graph.neighbourhood(
        context.values,
        op_name=context.violation.op,
        bad=context.bad,
        site=lambda number: forward_line(context.recorder, number),
        node=context.node,
        names=names,
        inputs=dict(first.inputs) if first is not None else None,
        expressions={
            item.argument: item.expression for item in tensors if item.argument and item.expression
        },
    )


def _provenance(context: FailureContext) -> Provenance:
    """Return where the bad values came from, as far as the recorder knows."""
    bad, recorder = context.values.get(context.bad), context.recorder
    if recorder is None or bad is None:
        return Provenance()
    positions = [item.position for item in context.violation.offenders.first]
    look = partial(recorder.provenance, bad, breaks(context.violation), positions)
    provenance = context.limits.attempt("provenance", look, Provenance)
    if positions and context.violation.offenders.first[0].value == "nan":
        provenance.steps = [
            replace(item, note=FIRST_NAN) if item.note == FIRST_BAD else item
            for item in provenance.steps
        ]
    if provenance.is_open:
        context.limits.add(recorder.beyond_ring("the op that made the bad values, or wrote them,"))
    return provenance


def _seen_before(context: FailureContext) -> SeenBefore | None:
    """Return what earlier calls of the line gave the argument at fault."""
    read = getattr(context.recorder, "seen_before", None)
    violation = context.violation
    place = "" if violation.list_position is None else f"[{violation.list_position}]"
    earlier = None if read is None else read(f"{violation.argument}{place}")
    return None if earlier is None else SeenBefore(**earlier)


def _with_samples(violation: Violation, way: Provenance) -> Violation:
    """Add the dataset's row of each bad value."""
    offenders = violation.offenders
    first = tuple(replace(item, sample=way.samples.get(item.position)) for item in offenders.first)
    return replace(violation, offenders=replace(offenders, first=first))


def libraries() -> tuple[str, ...]:
    """Name the imported libraries that some hints speak of."""
    names = ("transformers", "torch_geometric", "torchvision", "accelerate", "datasets")
    return tuple(name for name in names if name in sys.modules)


def error_facts(error: BaseException) -> ErrorFacts:
    """Describe an exception without keeping it."""
    code = getattr(error, "error_code", None)
    return ErrorFacts(
        type_name=type(error).__name__,
        bases=tuple(item.__name__ for item in type(error).__mro__[1:-1]),
        message=str(error),
        error_code=code if isinstance(code, int) else None,
    )


def forward_place(
    recorder: Any, sequence_nr: int | None, node_name: str | None = None
) -> tuple[SourceSpan | None, str | None]:
    """Return the place and the module of the forward call behind an autograd node."""
    site = None
    if recorder is not None and sequence_nr is not None:
        site = recorder.forward_site(sequence_nr)
    if site is None:
        return None, None
    entries, module_path, _ = site
    return locate_entries(entries), module_path


def forward_line(recorder: Any, sequence_nr: int) -> tuple[LineRef | None, str | None, str | None]:
    """Return line, module and name of the forward call behind an autograd node."""
    site = None if recorder is None else recorder.forward_site(sequence_nr)
    if site is None:
        return None, None, None
    entries, module_path, name = site
    span = locate_entries(entries)
    return None if span is None else span.ref, module_path, name


# --- silent findings: each line of a loop once ----------------------------------------------------


_Places = WeakKeyDictionary[CodeType, set[tuple[int, str, str]]]

_reported_silently: WeakKeyDictionary[object, _Places] = WeakKeyDictionary()
"""For each check, and for the guards as installed where no check listens.

A cell that is run again is new code, and is reported again.
"""


def is_repeated(violation: Violation, line: StackLine | None) -> bool:
    """Return whether this instruction of the user's has met this finding before."""
    if line is None:
        return False  # a thread of autograd's own: no line of the user's is known
    places = _reported_silently.setdefault(PROCESS.dedup_scope, WeakKeyDictionary())
    seen = places.setdefault(line[0], set())
    here = line[1], violation.guard, violation.argument
    if here in seen:
        return True
    seen.add(here)
    return False


def _running_line() -> StackLine | None:
    """Return the deepest line of the user's that is running."""
    frames = reversed(stack_of(sys._getframe(1)))
    lines = ((item.f_code, item.f_lasti) for item in frames)
    return next((line for line in lines if is_user_file(line[0].co_filename)), None)


def _line_of(past: PastCall) -> StackLine | None:
    """Return the user's line of a call that is over."""
    lines = reversed(past.lines)
    return next((line for line in lines if is_user_file(line[0].co_filename)), None)
