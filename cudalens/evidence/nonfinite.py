"""Reports of ``--nan``: the call that made a NaN or an infinity, and the sink that it reached.

Evidence about a maker is collected while it runs, once for each line.  Later calls of the line only
replace the values.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from cudalens.core import _python
from cudalens.core.call import OpCall
from cudalens.core.graph_types import FIRST_NAN, ProvenanceStep
from cudalens.core.limits import Limits
from cudalens.core.report import Evidence, Report
from cudalens.core.report_types import (
    LineRef,
    MarkedLine,
    Observation,
    OpName,
    TensorSummary,
    Violation,
)
from cudalens.diagnosis.diagnose import diagnose
from cudalens.evidence.call_stack import calling_frames, held_name, parameter_names
from cudalens.evidence.collect import evidence_of
from cudalens.evidence.failure import FailureContext, current_recorder
from cudalens.evidence.finding import evidence_of_call, nonfinite_error
from cudalens.guards.process import PROCESS
from cudalens.recorder.nonfinite_marks import Arrival, Maker, Step
from cudalens.recorder.sites import entries_of, phase_of
from cudalens.source.locate import locate_line

_MAX_CASES = 256
"""How many lines are kept with full evidence."""
_MADE, _ENTERED = "is made here", "comes in here"
_REACHES = {
    "loss": "is in the loss here",
    "gradient": "reaches a gradient here",
    "parameter": "reaches a parameter here",
    "read": "is read here",
    "result": "is the result of the cell",
    "scaler": "the scaler gives up here",
    "guard": "stops the kernel here",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """The evidence collected while a call made non-finite values."""

    violation: Violation
    evidence: Evidence
    report: Report
    """The report for stopping at the call itself."""


class NonFiniteReports:
    """Make the reports of one watch."""

    def __init__(self) -> None:
        self._cases: dict[object, Case | None] = {}

    def stop(
        self, arguments: Mapping[str, Any], violation: Violation, condition: Tensor | None = None
    ) -> BaseException | None:
        """Return the exception for a call that makes the first NaN or infinity."""
        op = OpCall(op=None, arguments=arguments, name=violation.op)

        def full(started: float) -> Report:
            return diagnose(*evidence_of_call(violation, op, started, condition))

        return nonfinite_error(violation, full)

    def note(
        self, arguments: Mapping[str, Any], violation: Violation, condition: Tensor | None = None
    ) -> Case | None:
        """Collect the evidence of the running call; keep no tensor."""
        place = self._place(violation)
        if place in self._cases:
            return self._cases[place]
        if len(self._cases) >= _MAX_CASES:
            return None
        op = OpCall(op=None, arguments=arguments, name=violation.op)

        def collect() -> Case:
            named = _with_name(violation, arguments.get(violation.argument))
            evidence, trial = evidence_of_call(named, op, time.perf_counter(), condition)
            return Case(violation=violation, evidence=evidence, report=diagnose(evidence, trial))

        limits = Limits()
        self._cases[place] = limits.attempt("evidence", collect)
        limits.attempt("variables", _python.forget)
        for line in limits.lines:
            PROCESS.internal_error(line)
        return self._cases[place]

    @staticmethod
    def _place(violation: Violation) -> object:
        frames = calling_frames(in_backward=True)
        lines = tuple((item.f_code, item.f_lasti) for item in frames[-8:])
        return (violation.op, violation.argument, lines)

    def arrived(self, arrival: Arrival) -> BaseException | None:
        """Return the exception for non-finite values at a sink."""
        maker = arrival.maker
        violation = maker.violation if maker is not None else None
        if violation is None:
            violation = _of_unseen(arrival)
        elif arrival.arguments is not None:
            violation = _with_name(violation, arrival.tensor, "param")
        return nonfinite_error(violation, partial(_report_of_arrival, arrival, violation))


def _with_name(violation: Violation, tensor: Any, key: str | None = None) -> Violation:
    """Return the violation with the name of a parameter, which the call's line does not have."""
    is_parameter = isinstance(tensor, Tensor) and tensor.is_leaf and tensor.requires_grad
    name = _name(tensor) if is_parameter else None
    if name is None:
        return violation
    place = f"{{input:{key or violation.argument}}}"
    return replace(violation, headline=violation.headline.replace(place, name))


def _of_unseen(arrival: Arrival) -> Violation:
    """Describe values without a maker: they were asked for, or are older than the recording."""
    maker = arrival.maker
    value = "nan" if arrival.has_nan else "an infinity"
    name = maker.step.name if maker is not None else ""
    nouns = {"loss": "the loss", "gradient": "a gradient", "parameter": "a parameter"}
    noun = nouns.get(arrival.sink, "the value")
    headline, why = f"{noun} is {value}", "No call that was seen has made it."
    if maker is not None and maker.kind == "asked":
        headline, why = f"{name} was given {value} as a number", "No call has computed it."
    elif name:
        headline = f"{value} was there already where {name} wrote"
    return Violation(
        guard="nonfinite",
        op=name or arrival.step.name,
        headline=headline,
        explanation=why,
        is_index=False,
        is_nonfinite=True,
    )


def _report_of_arrival(arrival: Arrival, violation: Violation, started: float) -> Report:
    maker, recorder = arrival.maker, current_recorder()
    case = maker.case if maker is not None else None
    if arrival.arguments is not None:
        op = OpCall(op=None, arguments=arrival.arguments, name=violation.op)
        report = diagnose(*evidence_of_call(violation, op, started))
    elif isinstance(case, Case) and case.violation is violation:
        report = case.report
    elif isinstance(case, Case):  # evidence of an earlier call of the line
        report = diagnose(_with_values(case.evidence, violation), None)
    else:
        report = diagnose(_evidence_of_site(arrival, violation, started, recorder), None)
    return _with_way(report, arrival)


def _with_values(evidence: Evidence, violation: Violation) -> Evidence:
    """Return the evidence of an earlier call of a line, with the values of a later call."""
    # The summaries and the provenance are those of the earlier call.
    facts = tuple(replace(item, summary=TensorSummary()) for item in evidence.tensors)
    return replace(evidence, violation=violation, tensors=facts, provenance=())


def _evidence_of_site(
    arrival: Arrival, violation: Violation, started: float, recorder: Any
) -> Evidence:
    """Return the evidence that the place of a past call gives."""
    maker = arrival.maker
    site = arrival.step.site if maker is None or not maker.step.name else maker.step.site
    failure = FailureContext(
        entries=entries_of(site),
        violation=violation,
        op=OpName(name=violation.op),
        recorder=recorder,
        started=started,
    )
    return evidence_of(failure, phase=phase_of(site), prevented=False, context_usable=True)


# --- the way from the maker to the sink ----------------------------------------------------------


def _with_way(report: Report, arrival: Arrival) -> Report:
    sink = _step(arrival.step, f"{_value(arrival)} {_REACHES[arrival.sink]}")
    middle = [_step(item) for item in reversed(arrival.way)]
    first = _first_step(report, arrival.maker)
    steps = tuple(dict.fromkeys((sink, *middle, first, *report.provenance)))
    sentence = _sentence(arrival, sink.source)
    observations = (
        *report.observations,
        *(_observation("maker", item) for item in (first,) if item.source is not None),
        replace(_observation("sink", sink), text=sentence),
    )
    return replace(
        report,
        provenance=steps,
        # If several nodes made bad values, a change to one does not help.
        hints=tuple(it for it in report.hints if arrival.is_alone or not it.tried),
        observations=observations,
        explanation=f"{report.explanation} {sentence[0].upper()}{sentence[1:]}.".strip(),
    )


def _first_step(report: Report, maker: Maker | None) -> ProvenanceStep:
    source = report.forward_source or report.source
    value = "NaN" if maker is not None and maker.has_nan else "inf"
    note = f"{value} {_MADE}"
    if maker is not None and maker.kind == "made" and maker.has_nan:
        note = FIRST_NAN
    if maker is not None and maker.kind == "entered":
        note = f"{value} {_ENTERED}"
        if report.argument == "gradient" and report.phase == "backward":
            note = f"the gradient of the result is {value}"
    return ProvenanceStep(
        op=report.op.name, source=None if source is None else source.ref, note=note
    )


def _step(step: Step, note: str | None = None) -> ProvenanceStep:
    line = locate_line(entries_of(step.site)) if step.site is not None else None
    return ProvenanceStep(op=step.name, source=line, note=note)


def _value(arrival: Arrival) -> str:
    return "NaN" if arrival.has_nan else "inf"


def _observation(kind: Any, step: ProvenanceStep) -> Observation:
    source, mark = step.source, step.note or ""
    if mark == FIRST_NAN:
        mark = f"NaN {_MADE}"
    marked: Sequence[MarkedLine] = ()
    if source is not None:
        fields = {name: getattr(source, name) for name in ("cell", "file", "line", "text")}
        marked = (MarkedLine(**fields, mark=mark),)
    place = "" if source is None else f" in {source.format()}"
    return Observation(
        kind=kind, text=f"{mark}{place}", facts={"op": step.op or ""}, sources=tuple(marked)
    )


def _sentence(arrival: Arrival, source: LineRef | None) -> str:
    """Return the sentence about the sink."""
    place = "" if source is None else f" in {source.format()}"
    name = _name(arrival.tensor)
    value = _value(arrival)
    if arrival.sink == "scaler":
        return f"{arrival.text}{place}"
    words = {
        "loss": f"{value} is in the loss{place}",
        "gradient": f"{value} reaches the gradient of {name or 'a leaf'}{place}",
        "parameter": f"{value} reaches the parameter {name or ''}{place}".replace("  ", " "),
        "read": f"{value} is read by the host{place}",
        "result": f"{value} is in the result of the cell",
        "guard": f"{value} reaches {arrival.step.name}{place}, whose kernel it stops",
    }
    return words[arrival.sink]


def _name(tensor: Tensor | None) -> str | None:
    """Return the name of a parameter in the running code."""
    if tensor is None:
        return None
    frames = calling_frames(in_backward=True)
    name = Limits().attempt("names", lambda: held_name(tensor, frames))
    return name or (Limits().attempt("names", lambda: parameter_names(frames)) or {}).get(
        id(tensor)
    )
