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
    AutogradNeighbourhood,
    Environment,
    LineRef,
    OpName,
    Replay,
    SourceSpan,
    Timing,
    Violation,
)
from cudalens.diagnosis.diagnose import (
    bare_report_of_violation,
    diagnose,
    format_message,
    format_sentence,
)
from cudalens.evidence import autograd_graph, context
from cudalens.evidence.call_stack import (
    api_arguments,
    calling_frames,
    entries_of,
    locate,
    op_signature,
    parameter_names,
    phase_of,
)
from cudalens.evidence.context import observe
from cudalens.evidence.dataset_labels import labels_of
from cudalens.evidence.grown_parameter import grown_parameter
from cudalens.evidence.module_names import module_names
from cudalens.evidence.replay import replay
from cudalens.evidence.tensors import bad_key, breaks, facts_of, in_own_words, scalars_of
from cudalens.evidence.trial import trial_of
from cudalens.guards.interceptor import GuardedCall
from cudalens.guards.past_calls import PastCall
from cudalens.guards.process import PROCESS
from cudalens.recorder import nonfinite
from cudalens.recorder.provenance import Provenance
from cudalens.recorder.tensor_refs import tensor_values
from cudalens.source.files import is_user_file, running_shell
from cudalens.source.locate import CallSite, locate_entries
from cudalens.source.stack import Entry, stack_of

FORWARD_CALL = "the forward call of the op that failed"


# --- findings while the code runs ----------------------------------------------------------------


def on_violation(call: GuardedCall, violation: Violation) -> BaseException | None:
    """Make the report of a guard's finding, tell the session, and return what is to be raised."""
    past = call.past
    if violation.is_silent and is_repeated(violation, past):
        return None
    if past is not None and past.written:
        names = " and ".join(past.written)
        note = f"{names} was written to with other values in place of the bad ones: do not use it."
        violation = replace(violation, explanation=f"{violation.explanation} {note}".strip())
    text, report = _found(violation, call.arguments, lambda: _replayed(call, violation), past)
    if violation.is_silent:
        return None if PROCESS.listeners else _warn(text)
    kind: type[DeviceAssertError] = DeviceIndexError if violation.is_index else DeviceValueError
    return kind(text, report)


def on_nonfinite(arguments: Mapping[str, Any], violation: Violation) -> BaseException | None:
    """Make the report of the first NaN or infinity, and return the exception to raise."""
    limits = Limits()
    error = limits.attempt(
        "report",
        lambda: NonFiniteError(*_found(violation, arguments, Replay)),
        lambda: NonFiniteError(violation.sentence()),
    )
    for line in limits.lines:
        PROCESS.internal_error(line)
    return error


def _found(
    violation: Violation,
    arguments: Mapping[str, Any],
    replayed: Callable[[], Replay],
    past: PastCall | None = None,
) -> tuple[str, Report]:
    """Return the text of the exception, and the report, which the session is given.

    Whatever fails on the way is a line of ``limits``: the sentence with the value has to arrive.
    """
    started, limits = time.perf_counter(), Limits()

    def full() -> Report:
        scene = Scene(violation, arguments, past)
        evidence = timed(evidence_of(scene, replayed), started)
        trial = limits.attempt("trial", lambda: trial_of(scene.frames, has_autograd=False))
        return _in_own_inputs(evidence, diagnose(evidence, trial))

    bare = partial(bare_report_of_violation, violation)
    report = limits.attempt("diagnosis", full, bare, kind=Report)
    report = replace(report, deferred=past is not None)
    limits.attempt("variables", _python.forget)
    text = limits.attempt(
        "message", lambda: format_message(report), lambda: format_sentence(report), kind=str
    )
    report = replace(report, limits=(*report.limits, *limits.lines))
    limits.attempt("session", lambda: PROCESS.found(report))
    return text, report


def _in_own_inputs(evidence: Evidence, report: Report) -> Report:
    """Call the inputs of a first NaN what the user calls them: in the headline and the table."""
    violation = evidence.violation
    if violation is None or not violation.is_nonfinite or not violation.offenders.first:
        return report

    def own(name: str) -> str:
        fact = evidence.tensor(name)
        return (fact.expression if fact is not None else None) or name

    offenders = violation.offenders
    listed = tuple(
        replace(item, inputs=tuple((own(name), value) for name, value in item.inputs))
        for item in offenders.first
    )
    inputs = [(own(name), value) for name, value in violation.inputs]
    return replace(
        report,
        headline_own=nonfinite.headline(violation.op, offenders.first[0], inputs),
        offenders=replace(offenders, first=listed),
    )


def _replayed(call: GuardedCall, violation: Violation) -> Replay:
    if call.past is not None and not call.past.is_whole:
        return Replay(reason="tensors of the call are gone, or have changed since")
    return replay(call.op, call.args, call.kwargs, is_safe=violation.is_replay_safe)


def _warn(text: str) -> SilentFindingWarning | None:
    """Warn of a silent finding; return the warning where the user's filter makes it an error."""
    try:
        warnings.warn(text, SilentFindingWarning, stacklevel=3)
    except SilentFindingWarning as error:
        return error
    return None


def timed(evidence: Evidence, started: float) -> Evidence:
    """Complete the evidence: counts, seconds since ``started``, and whether a script runs here."""
    recorder = _recorder()
    timing = Timing(
        checked_ops=PROCESS.checked_ops,
        recorded_ops=recorder.recorded_ops if recorder is not None else 0,
        diagnose_s=round(time.perf_counter() - started, 4),
    )
    is_script = running_shell() is None and not is_of_cell(evidence.source, evidence.frames)
    return replace(evidence, timing=timing, is_script=is_script)


def _recorder() -> Any:
    listener = PROCESS.listener
    return listener.recorder if listener is not None else None


class Scene:
    """The live objects around a finding; it exists only while the report is made.

    Args:
        past: the call, where it is over: its lines are known, and no frame of it.
    """

    def __init__(
        self, violation: Violation, arguments: Mapping[str, Any], past: PastCall | None
    ) -> None:
        self.violation, self.past = violation, past
        self.arguments, self.values = arguments, tensor_values(arguments)
        self.bad, self.recorder, self.limits = bad_key(violation), _recorder(), Limits()
        self.node = None if past is not None else _torch.current_node()
        self.frames: Sequence[FrameType] = []
        """The frames of a call that is running; none of one that is over."""
        self.entries: Sequence[Entry]
        """The lines of the call, with the frames that live."""
        if past is None:
            running = partial(calling_frames, in_backward=self.node is not None)
            self.entries = self.frames = self.limits.attempt("frames", running, list)
        else:
            self.entries = self.limits.attempt("frames", lambda: entries_of(past), list)
            for line in past.limits:
                self.limits.add(line)


def evidence_of(scene: Scene, replayed: Callable[[], Replay]) -> Evidence:
    """Collect everything about a call that a finding was made in; the context is alive."""
    limits, recorder = scene.limits, scene.recorder
    evidence = replace(
        _placed(scene),
        replay=limits.attempt("replay", replayed, Replay),
        graph=limits.attempt("graph", lambda: graph_of(scene), AutogradNeighbourhood),
    )
    evidence = with_recording(in_own_words(evidence, scene.bad), scene)
    name = partial(module_names, evidence, recorder, scene.frames, running=evidence.module_path)
    names = limits.attempt("module names", name, tuple)
    return replace(evidence, module_names=names, limits=(*evidence.limits, *limits.lines))


def _placed(scene: Scene) -> Evidence:
    """Say what the call is, where it stands in the user's code, and what its tensors hold."""
    violation, values, frames = scene.violation, scene.values, scene.frames
    past, limits, site = scene.past, scene.limits, _site(scene)
    node, watch = scene.node, getattr(scene.recorder, "watch", None)
    forward, forward_module = limits.attempt(
        "forward source", lambda: _forward(scene), lambda: (None, None), kind=tuple
    )
    return Evidence(
        violation=violation,
        op=OpName(name=violation.op, overload=violation.overload, api=site.api),
        phase=phase_of(scene.entries, in_backward=past.in_backward if past else node is not None),
        prevented=not (violation.is_silent or violation.is_nonfinite),
        deferred=past is not None,
        context_usable=True,
        source=site.source,
        forward_source=forward,
        call_text=site.call_text,
        module_path=site.module_path or forward_module,
        module_type=site.module_type,
        frames=site.frames,
        tensors=limits.attempt(
            "tensors",
            lambda: facts_of(violation, values, site, tuple(api_arguments(frames).items())),
            tuple,
        ),
        scalars=limits.attempt("scalars", lambda: scalars_of(scene.arguments), tuple),
        call_context=limits.attempt("observations", lambda: observe(frames, site), CallContext),
        nan_watch=None if watch is None else watch.facts,
        device_text=violation.device_text,
        environment=limits.attempt("environment", context.describe, Environment),
        libraries=libraries(),
        limits=site.limits,
    )


def _site(scene: Scene) -> CallSite:
    """Find the user's line, and what is proven to be each tensor on it."""
    attempt, signature = scene.limits.attempt, None
    if scene.past is None:
        signature = attempt("signature", lambda: op_signature(scene.violation))
    site = attempt("source", lambda: locate(scene.entries, scene.values, signature), CallSite)
    if scene.past is None:
        return site
    # Variables of a call that is over may be others by now: only what is its tensor is told.
    is_named = (site.api or "").startswith("torch.nn.functional.")
    return replace(site, others=(), library_names=(), api=site.api if is_named else None)


def _forward(scene: Scene) -> tuple[SourceSpan | None, str | None]:
    """Return the place and the module of the forward call of an op that runs in backward."""
    past, node, recorder = scene.past, scene.node, scene.recorder
    if past is not None and past.forward:
        return locate_entries(entries_of(past, past.forward)), None
    number = _torch.node_sequence_nr(node)
    found = forward_place(recorder, number, type(node).__name__)
    if recorder is not None and number is not None and found[0] is None:
        scene.limits.add(recorder.beyond_ring(FORWARD_CALL, number))
    return found


def graph_of(scene: Scene) -> AutogradNeighbourhood:
    """Draw the autograd graph around the failing op."""
    first = next(iter(scene.violation.offenders.first), None)
    return autograd_graph.neighbourhood(
        scene.values,
        op_name=scene.violation.op,
        bad=scene.bad,
        site=lambda number: forward_line(scene.recorder, number),
        node=scene.node,
        names=parameter_names(scene.frames),
        inputs=dict(first.inputs) if first is not None else None,
    )


def with_recording(evidence: Evidence, scene: Scene) -> Evidence:
    """Add what the flight recorder knows: the last ops and the way of the bad values."""
    recorder, limits, bad = scene.recorder, scene.limits, scene.values.get(scene.bad)
    if recorder is None:
        return evidence
    evidence = replace(evidence, history=limits.attempt("history", recorder.history, tuple))
    if scene.violation.is_nonfinite:
        names = parameter_names(scene.frames)
        given = list(scene.values.values())
        grown = limits.attempt("parameters", lambda: grown_parameter(given, recorder, names))
        evidence = replace(evidence, grown=grown)
    if bad is None:
        return evidence
    found = limits.attempt(
        "provenance", lambda: recorder.provenance(bad, breaks(scene.violation)), Provenance
    )
    if found.is_open:
        limits.add(recorder.beyond_ring("the op that made the bad values, or wrote them,"))
    return limits.attempt(
        "data set", lambda: _with_provenance(evidence, found), lambda: evidence, kind=Evidence
    )


def _with_provenance(evidence: Evidence, found: Provenance) -> Evidence:
    """Add the way of the bad values, and the data set's row of each of them."""
    violation = evidence.violation
    if violation is not None and found.samples:
        first = tuple(
            replace(item, sample=found.samples.get(item.position))
            for item in violation.offenders.first
        )
        offenders = replace(violation.offenders, first=first)
        evidence = replace(evidence, violation=replace(violation, offenders=offenders))
    known = None if found.batch is None else labels_of(found.batch, evidence.violation)
    return replace(evidence, provenance=tuple(found.steps), dataset_labels=known)


def libraries() -> tuple[str, ...]:
    """Name the imported libraries that some hints speak of."""
    known = ("transformers", "torch_geometric", "torchvision", "accelerate", "datasets")
    return tuple(name for name in known if name in sys.modules)


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
    found = None
    if recorder is not None and sequence_nr is not None:
        found = recorder.forward_site(sequence_nr, node_name)
    if found is None:
        return None, None
    entries, module_path = found
    return locate_entries(entries), module_path


def forward_line(recorder: Any, sequence_nr: int) -> tuple[LineRef | None, str | None]:
    """Return :func:`forward_place` in the short form that graphs use."""
    span, module_path = forward_place(recorder, sequence_nr)
    return None if span is None else span.ref, module_path


# --- silent findings: each line of a loop once ----------------------------------------------------


_Places = WeakKeyDictionary[CodeType, set[tuple[int, str, str]]]

_told_silently: WeakKeyDictionary[object, _Places] = WeakKeyDictionary()
"""For each check, and for the guards as installed where no check listens.

A cell that is run again is new code, and is reported again.
"""


def is_repeated(violation: Violation, past: PastCall | None = None) -> bool:
    """Return whether this instruction of the user's has met this finding before."""
    line = _users_line(past)
    if line is None:
        return False  # a thread of autograd's own: no line of the user's is known
    places = _told_silently.setdefault(PROCESS.audience, WeakKeyDictionary())
    met = places.setdefault(line[0], set())
    here = line[1], violation.guard, violation.argument
    if here in met:
        return True
    met.add(here)
    return False


def _users_line(past: PastCall | None) -> tuple[CodeType, int] | None:
    """Return the deepest line of the user's: that of a call that is over, else the running one."""
    lines = iter(() if past is None else reversed(past.stack))
    if past is None:
        lines = ((item.f_code, item.f_lasti) for item in reversed(stack_of(sys._getframe(2))))
    return next((line for line in lines if is_user_file(line[0].co_filename)), None)
