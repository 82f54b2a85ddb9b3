"""Collect the evidence of one failure from live objects: stack, tensors, replay, graph, recorder.

Each collector stands alone: one that fails leaves one line in ``limits`` and the others go on.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

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
from cudalens.core.report import ErrorFacts, Evidence, Report
from cudalens.core.report_types import (
    AutogradNeighbourhood,
    Environment,
    HistoryEntry,
    LineRef,
    OpName,
    ProvenanceStep,
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
    locate,
    op_signature,
    parameter_names,
    phase_of,
)
from cudalens.evidence.context import observe
from cudalens.evidence.replay import replay
from cudalens.evidence.tensors import (
    bad_key,
    breaks,
    facts_of,
    in_own_words,
    scalars_of,
    tensor_values,
)
from cudalens.guards.interceptor import GuardedCall
from cudalens.guards.process import PROCESS
from cudalens.source.files import is_user_file
from cudalens.source.locate import CallSite, locate_entries

_HISTORY = 200


# --- findings while the code runs ----------------------------------------------------------------


def on_violation(call: GuardedCall, violation: Violation) -> BaseException | None:
    """Make the report of a guard's finding, tell the session, and return what is to be raised."""
    if violation.is_silent and is_repeated(violation):
        return None
    text, report = _found(violation, call.arguments, lambda: _replayed(call, violation))
    if violation.is_silent:
        return None if PROCESS.listeners else _warn(text)
    kind: type[DeviceAssertError] = DeviceIndexError if violation.is_index else DeviceValueError
    return kind(text, report)


def on_nonfinite(
    op: Any, arguments: Mapping[str, Any], result: Tensor, violation: Violation
) -> BaseException | None:
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
    violation: Violation, arguments: Mapping[str, Any], replayed: Callable[[], Replay]
) -> tuple[str, Report]:
    """Return the text of the exception, and the report, which the session is given.

    Whatever fails on the way is a line of ``limits``: the sentence with the value has to arrive.
    """
    started, limits = time.perf_counter(), Limits()

    def full() -> Report:
        scene = make_scene(violation, arguments)
        return diagnose(timed(evidence_of(scene, replayed), started))

    report = limits.attempt(
        "diagnosis", full, lambda: bare_report_of_violation(violation), kind=Report
    )
    limits.attempt("variables", _python.forget)
    text = limits.attempt(
        "message", lambda: format_message(report), lambda: format_sentence(report), kind=str
    )
    report = replace(report, limits=(*report.limits, *limits.lines))
    limits.attempt("session", lambda: PROCESS.found(report))
    return text, report


def _replayed(call: GuardedCall, violation: Violation) -> Replay:
    return replay(call.op, call.args, call.kwargs, is_safe=violation.is_replay_safe)


def _warn(text: str) -> SilentFindingWarning | None:
    """Warn of a silent finding; return the warning where the user's filter makes it an error."""
    try:
        warnings.warn(text, SilentFindingWarning, stacklevel=3)
    except SilentFindingWarning as error:
        return error
    return None


def timed(evidence: Evidence, started: float) -> Evidence:
    """Put the counts, and the seconds since ``started``, into the evidence."""
    recorder = _recorder()
    timing = Timing(
        checked_ops=PROCESS.checked_ops,
        recorded_ops=recorder.recorded_ops if recorder is not None else 0,
        diagnose_s=round(time.perf_counter() - started, 4),
    )
    return replace(evidence, timing=timing)


def _recorder() -> Any:
    listener = PROCESS.listener
    return listener.recorder if listener is not None else None


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The live objects around a finding; it exists only while the report is made."""

    violation: Violation
    arguments: Mapping[str, Any]
    values: Mapping[str, Tensor]
    bad: str
    frames: Sequence[FrameType]
    node: Any
    recorder: Any
    limits: Limits


def make_scene(violation: Violation, arguments: Mapping[str, Any]) -> Scene:
    """Take in the stack and the tensors of the running call."""
    limits, node = Limits(), _torch.current_node()
    return Scene(
        violation=violation,
        arguments=arguments,
        values=tensor_values(arguments),
        bad=bad_key(violation),
        frames=limits.attempt("frames", lambda: calling_frames(in_backward=node is not None), list),
        node=node,
        recorder=_recorder(),
        limits=limits,
    )


def evidence_of(scene: Scene, replayed: Callable[[], Replay]) -> Evidence:
    """Collect everything about a call that a finding was made in; the context is alive."""
    limits = scene.limits
    evidence = _placed(scene, limits)
    evidence = replace(
        evidence,
        replay=limits.attempt("replay", replayed, Replay),
        graph=limits.attempt("graph", lambda: graph_of(scene), AutogradNeighbourhood),
    )
    evidence = with_recording(in_own_words(evidence, scene.bad), scene, limits)
    return replace(evidence, limits=(*evidence.limits, *limits.lines))


def _placed(scene: Scene, limits: Limits) -> Evidence:
    """Say what the call is, where it stands in the user's code, and what its tensors hold."""
    violation, values, frames = scene.violation, scene.values, scene.frames
    signature = limits.attempt("signature", lambda: op_signature(violation))
    site = limits.attempt("source", lambda: locate(frames, values, signature), CallSite)
    node = scene.node
    sequence_nr = None if node is None else _torch.node_sequence_nr(node)
    node_name = None if node is None else type(node).__name__
    forward, forward_module = limits.attempt(
        "forward source",
        lambda: forward_place(scene.recorder, sequence_nr, node_name),
        lambda: (None, None),
        kind=tuple,
    )
    return Evidence(
        violation=violation,
        op=OpName(name=violation.op, overload=violation.overload, api=site.api),
        phase=phase_of(frames, scene.node),
        prevented=not (violation.is_silent or violation.is_nonfinite),
        context_usable=True,
        source=site.source,
        forward_source=forward,
        call_text=site.call_text,
        module_path=site.module_path or forward_module,
        module_type=site.module_type,
        frames=site.frames,
        tensors=limits.attempt(
            "tensors",
            lambda: facts_of(violation, values, site, api_arguments(frames)),
            tuple,
        ),
        scalars=limits.attempt("scalars", lambda: scalars_of(scene.arguments), tuple),
        call_context=limits.attempt("observations", lambda: observe(frames, site), CallContext),
        nan_watch=context.nan_watch(),
        device_text=violation.device_text,
        environment=limits.attempt("environment", context.describe, Environment),
        libraries=libraries(),
        limits=site.limits,
    )


def graph_of(scene: Scene) -> AutogradNeighbourhood:
    """Draw the autograd graph around the failing op."""
    return autograd_graph.neighbourhood(
        scene.values,
        op_name=scene.violation.op,
        bad=scene.bad,
        site=lambda number: forward_line(scene.recorder, number),
        node=scene.node,
        names=parameter_names(scene.frames),
    )


def with_recording(evidence: Evidence, scene: Scene, limits: Limits) -> Evidence:
    """Add what the flight recorder knows: the last ops and the way of the bad values."""
    recorder, bad = scene.recorder, scene.values.get(scene.bad)
    if recorder is None:
        return evidence
    history: tuple[HistoryEntry, ...] = limits.attempt(
        "history", lambda: recorder.history(_HISTORY), tuple
    )
    provenance: tuple[ProvenanceStep, ...] = ()
    if bad is not None:
        provenance = limits.attempt(
            "provenance", lambda: recorder.provenance(bad, breaks(scene.violation)), tuple
        )
    return replace(evidence, history=history, provenance=provenance)


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


def is_repeated(violation: Violation) -> bool:
    """Return whether the running instruction of the user's has met this finding before."""
    frame = sys._getframe(1)
    while not is_user_file(frame.f_code.co_filename):
        if frame.f_back is None:
            return False  # a thread of autograd's own: no line of the user's is known
        frame = frame.f_back
    places = _told_silently.setdefault(PROCESS.audience, WeakKeyDictionary())
    met = places.setdefault(frame.f_code, set())
    here = frame.f_lasti, violation.guard, violation.argument
    if here in met:
        return True
    met.add(here)
    return False
