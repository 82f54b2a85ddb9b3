"""Build the evidence of a failure from its call: stack, tensors, graph, recorder.

Each collector is on its own: one that fails leaves one line in ``limits`` and the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import FrameType
from typing import Any

from torch import Tensor

from cudalens.core import _torch
from cudalens.core.call import Call
from cudalens.core.evidence_types import CallContext, OwnerModule
from cudalens.core.graph_types import FIRST_BAD, FIRST_NAN, AutogradNeighbourhood, ProvenanceStep
from cudalens.core.limits import Limits
from cudalens.core.report import ErrorFacts, Evidence, is_of_cell
from cudalens.core.report_types import (
    Environment,
    HistoryEntry,
    OpName,
    Phase,
    SourceSpan,
    TensorFact,
    Timing,
    Violation,
)
from cudalens.core.tensor_values import outside
from cudalens.core.user_objects import is_tensor
from cudalens.evidence import autograd_graph, context
from cudalens.evidence.call_stack import locate, parameter_names
from cudalens.evidence.module_names import module_names, owner_modules
from cudalens.evidence.tensors import bad_key
from cudalens.guards._ranges import breaks
from cudalens.guards.process import PROCESS
from cudalens.recorder.provenance import Provenance
from cudalens.recorder.sites import entries_of
from cudalens.source.files import running_shell
from cudalens.source.locate import CallSite, locate_entries
from cudalens.source.module_path import running_modules
from cudalens.source.running_call import RunningCall
from cudalens.source.stack import Entry, StackEntry, frame_of, place_of

FORWARD_CALL = "the forward call of the op that failed"


@dataclass(kw_only=True)
class FailureContext:
    """A failed call with the live objects around it; it exists while its report is made."""

    call: Call
    values: Mapping[str, Tensor]
    """The tensors that it was given, by argument."""
    entries: Sequence[Entry]
    """The stack, outermost first: frames, links of a traceback, lines of a call that is over."""
    violation: Violation | None = None
    error: ErrorFacts | None = None
    op: OpName = field(default_factory=OpName)
    recorder: Any = None
    reader: RunningCall | None = None
    """The user's line, where more of it is known than its source and variables tell."""
    started: float
    """When the work on the report began, on the performance counter."""
    limits: Limits

    @cached_property
    def site(self) -> CallSite:
        """The user's line, and what is proven to be each tensor on it."""
        find = partial(locate, self.entries, self.values, self.reader)
        return self.limits.attempt("source", find, CallSite)

    @cached_property
    def frames(self) -> list[FrameType]:
        """The frames of the stack; none of a call that is over."""
        return [frame_of(item) for item in self.entries if not isinstance(item, StackEntry)]

    @cached_property
    def modules(self) -> list[object]:
        """The modules whose methods are on the stack, outermost first."""
        return running_modules([place_of(item) for item in self.frames])

    @cached_property
    def names(self) -> dict[int, str]:
        """Parameters, and other leaves, by ``id``."""
        return parameter_names(self.frames)

    def forward(self) -> tuple[SourceSpan | None, str | None]:
        """Return the place and the module of the forward call behind the node that ran."""
        node, recorder = self.call.node, self.recorder
        if node is None or recorder is None:
            return None, None
        place, module_path, name = self.forward_call(node.sequence_nr)
        if name is None:
            self.limits.add(recorder.beyond_ring(FORWARD_CALL))
        return place, module_path

    def forward_call(self, number: int) -> tuple[SourceSpan | None, str | None, str | None]:
        """Return place, module and name of the forward call behind an autograd node."""
        snapshot = None if self.recorder is None else self.recorder.snapshot()
        call = None if snapshot is None else snapshot.forward_call(number)
        if snapshot is None or call is None:
            return None, None, None
        module_path = snapshot.reader.module(call.site).path
        return locate_entries(entries_of(call.site)), module_path, call.name


def evidence_of(
    failure: FailureContext,
    *,
    phase: Phase,
    graph: AutogradNeighbourhood | None = None,
    forward_source: SourceSpan | None = None,
    **parts: Any,
) -> Evidence:
    """Return all that is known of a failure.

    Args:
        phase: of training, in which the call ran.
        graph: the autograd graph around it.
        forward_source: where the recorder does not know the forward call.
        parts: the other parts of the evidence, which differ by the kind of failure.
    """
    attempt, site, recorder = failure.limits.attempt, failure.site, failure.recorder
    frames = failure.frames
    forward, module_path = attempt(
        "forward source", failure.forward, lambda: (None, None), kind=tuple
    )
    history: tuple[HistoryEntry, ...] = ()
    if recorder is not None:
        history = attempt("history", recorder.history, tuple)
    graph = graph or AutogradNeighbourhood()
    module_path = site.module_path or module_path
    paths = [item.module_path for item in history] + [item.module_path for item in graph.nodes]
    running = site.module_path

    def names() -> tuple[tuple[str, str], ...]:
        stack = failure.modules
        return module_names(module_path, paths, recorder, frames, stack, running=running)

    def owners() -> tuple[OwnerModule, ...]:
        return owner_modules(failure.values, frames, failure.modules, site, failure.reader)

    api = failure.op.api or site.api
    if not frames and not (api or "").startswith("torch.nn.functional."):
        api = None  # without variables the line does not tell torch.take from a tensor's method
    return Evidence(
        violation=failure.violation,
        error=failure.error,
        op=replace(failure.op, api=api),
        phase=phase,
        node_saved=() if failure.call.node is None else failure.call.node.saved,
        source=site.source,
        forward_source=forward or forward_source,
        call=site.call,
        module_path=module_path,
        module_type=site.module_type,
        module_names=attempt("module names", names, tuple),
        frames=site.frames,
        graph=graph,
        history=history,
        owners=attempt("modules", owners, tuple),
        call_context=attempt("observations", lambda: context.observe(frames, site), CallContext),
        environment=attempt("environment", context.describe, Environment),
        # No notebook and no IPython runs here.
        is_script=running_shell() is None and not is_of_cell(site.source, site.frames),
        timing=attempt("timing", lambda: timing_since(failure.started), Timing),
        limits=(*site.limits, *failure.limits.lines),
        **parts,
    )


def graph_of(
    failure: FailureContext, tensors: Sequence[TensorFact] = (), node: Any = None
) -> AutogradNeighbourhood:
    """Return the autograd graph around a call, its inputs by the user's names.

    Without a finding it is the graph behind the tensors on the failing line.

    Args:
        tensors: what is known of the call's.
        node: the autograd node that was running.
    """
    violation, site = failure.violation, failure.site
    values = dict(failure.values)
    if failure.error is not None:
        values = {item.expression: values[item.key] for item in site.names}
        # Where arguments of the call are named, the other tensors of the line are not its inputs.
        for item in site.others if not values else ():
            if is_tensor(item.value):
                values.setdefault(item.expression, item.value)
        if not any(item.requires_grad for item in values.values()):
            return AutogradNeighbourhood()
    offenders = () if violation is None else violation.offenders.first
    return autograd_graph.neighbourhood(
        values,
        op_name=failure.op.name or site.api or "the failing call",
        bad=None if failure.error is not None or violation is None else bad_key(violation),
        site=failure.forward_call,
        node=node,
        names=failure.names,
        inputs=dict(offenders[0].inputs) if offenders else None,
        expressions={
            item.argument: item.expression for item in tensors if item.argument and item.expression
        },
    )


def timing_since(started: float) -> Timing:
    """Return the counts of the check, and the seconds since ``started``."""
    recorder = current_recorder()
    return Timing(
        checked_ops=PROCESS.checked_ops,
        recorded_ops=recorder.recorded_ops if recorder is not None else 0,
        diagnose_s=round(time.perf_counter() - started, 4),
    )


def current_recorder() -> Any:
    """Return the recorder of the running check, ``None`` without one."""
    listener = PROCESS.listener
    return listener.recorder if listener is not None else None


def error_facts(error: BaseException) -> ErrorFacts:
    """Describe an exception without keeping it."""
    code = getattr(error, "error_code", None)
    return ErrorFacts(
        type_name=type(error).__name__,
        bases=tuple(item.__name__ for item in type(error).__mro__[1:-1]),
        message=str(error),
        error_code=code if isinstance(code, int) else None,
    )


def provenance_of(failure: FailureContext, bad: Any) -> Provenance:
    """Return where the bad values came from, as far as the recorder knows."""
    violation, recorder = failure.violation, failure.recorder
    assert violation is not None
    positions = [item.position for item in violation.offenders.first]
    is_bad = breaks(violation)
    if violation.is_nonfinite and not violation.argument:
        is_bad, positions = has_infinity, []
    mask = failure.limits.attempt("bad values", partial(bad_places, violation, bad))
    look = partial(recorder.provenance, bad, is_bad, positions, mask)
    provenance = failure.limits.attempt("provenance", look, Provenance)
    if positions and violation.offenders.first[0].value == "nan":
        provenance.steps = [_of_nan(item) for item in provenance.steps]
    if provenance.is_open:
        failure.limits.add(recorder.beyond_ring("the op that made the bad values, or wrote them,"))
    return provenance


def bad_places(violation: Violation, tensor: Tensor) -> Tensor | None:
    """Return which elements are outside the bound, as bool[shape of the tensor]."""
    low, high = violation.bounds.min, violation.bounds.max
    if violation.is_nonfinite or low is None or high is None or not _torch.is_plain(tensor):
        return None
    with _torch.plain_torch(), _torch.no_dispatch_modes():
        bad = outside(tensor.detach(), float(low), float(high))
        for value in violation.bounds.also_allowed:
            bad &= tensor != value
        # A bound on sums or rows says nothing of single elements.
        return bad if int(bad.count_nonzero()) == violation.offenders.count else None


def has_infinity(tensor: Tensor) -> bool:
    """Return whether a tensor contains an infinity above 0."""
    return tensor.is_floating_point() and bool(tensor.isposinf().any())


def _of_nan(step: ProvenanceStep) -> ProvenanceStep:
    return replace(step, note=FIRST_NAN) if step.note == FIRST_BAD else step
