"""Build the evidence of a failure: one table of collectors, and the loop that runs them.

Collectors are independent: one that fails leaves one line in ``limits``, and the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import BuiltinFunctionType
from typing import Any, NamedTuple

from cudalens.core.call import function_name
from cudalens.core.evidence_types import DatasetColumn, OwnerModule
from cudalens.core.graph_types import CHANGED, AutogradNeighbourhood, ProvenanceStep
from cudalens.core.report import Evidence, is_of_cell
from cudalens.core.report_types import (
    Replay,
    SeenBefore,
    SourceSpan,
    TensorFact,
    Timing,
    Violation,
)
from cudalens.core.user_objects import is_tensor
from cudalens.evidence import autograd_graph, context, memory
from cudalens.evidence.call_stack import worker_line
from cudalens.evidence.dataset_column import column_of
from cudalens.evidence.error_causes import (
    change_or_freed,
    cut_of_graph,
    frozen,
    lost_batch,
    other_rows,
    other_shapes,
    with_marked_write,
)
from cudalens.evidence.failing_call import refused_arguments
from cudalens.evidence.failure import FailureContext, current_recorder
from cudalens.evidence.module_names import module_names, other_modules, owner_modules
from cudalens.evidence.recorded_way import flattened
from cudalens.evidence.replay import replay
from cudalens.evidence.tensors import bad_key, facts_of, scalars_of, tensor_facts
from cudalens.evidence.value_facts import bound_of, marks_of_finding, nan_cause, nan_holder
from cudalens.guards.process import PROCESS
from cudalens.source.files import running_shell
from cudalens.source.locate import CallSite

MAX_TENSORS = 40


class Collector(NamedTuple):
    """A row of the table."""

    what: str
    """What is missing if it fails, as the line in ``limits`` begins."""
    fields: str
    """The fields of the evidence that it fills: one, or several for a tuple."""
    collect: Callable[[FailureContext], object]
    """Returns the field, ``None`` if nothing is known."""
    needs: str = ""
    """Attributes of the failure that it needs."""


def evidence_of(failure: FailureContext, **given: Any) -> Evidence:
    """Return the evidence of a failure.

    Args:
        given: the parts of the evidence that only its maker knows: phase, what became of the call.
    """
    failure.violation = failure.limits.attempt(
        "dataset", partial(_with_samples, failure), lambda: failure.violation
    )
    site, violation = failure.site, failure.violation
    api = failure.op.api or site.api
    if not failure.frames and not (api or "").startswith("torch.nn.functional."):
        api = None  # without variables, `x.take` may be a method or a function
    known = {
        "violation": violation,
        "error": failure.error,
        "op": replace(failure.op, api=api),
        "source": site.source,
        "call": site.call,
        "module_path": site.module_path,
        "module_type": site.module_type,
        "frames": site.frames,
        "device_text": None if violation is None else violation.device_text,
        "node_saved": () if failure.call.node is None else failure.call.node.saved,
        "has_nan_watch": bool(getattr(failure.recorder, "watch", None)),
        # Neither a notebook nor IPython runs the code.
        "is_script": running_shell() is None and not is_of_cell(site.source, site.frames),
    }
    vars(failure.found).update(known | given)
    for collector in COLLECTORS:
        if all(getattr(failure, need) for need in collector.needs.split()):
            _fill(failure, collector)
    failure.found.limits = (*site.limits, *failure.limits.lines)
    return Evidence(**vars(failure.found))


def _with_samples(failure: FailureContext) -> Violation | None:
    """Return the finding with the dataset index of each bad value, as far as known."""
    violation, samples = failure.violation, failure.way.samples
    if violation is None or not samples:
        return violation
    offenders = violation.offenders
    first = tuple(replace(item, sample=samples.get(item.position)) for item in offenders.first)
    return replace(violation, offenders=replace(offenders, first=first))


def _fill(failure: FailureContext, collector: Collector) -> None:
    """Run a collector and fill its fields."""
    names = collector.fields.split()
    kind = tuple if len(names) > 1 else type(getattr(failure.found, names[0]))
    found: Any = failure.limits.attempt(
        collector.what,
        partial(collector.collect, failure),
        lambda: None,
        kind=None if kind is type(None) else kind,
    )
    if found is not None:
        values = found if len(names) > 1 else (found,)
        vars(failure.found).update(zip(names, values, strict=True))


# --- the collectors -------------------------------------------------------------------------------


def tensors_of(failure: FailureContext) -> tuple[TensorFact, ...]:
    """Describe the tensors of the call and of the line, without the values of parameters."""
    values, site = failure.values, failure.site
    if failure.violation is not None:
        return facts_of(failure.violation, values, site, failure.named)
    seen = {item.key for item in site.names}
    hidden = {key: value for key, value in values.items() if key not in seen}
    shown = {key: value for key, value in values.items() if key in seen}
    facts = tensor_facts(shown, site, None, read=not failure.is_lost)
    facts = (*facts, *tensor_facts(hidden, CallSite(), None, read=False))
    if not failure.is_lost:
        return facts
    texts = {item.expression for item in facts}
    beside = failure.limits.attempt("cell", failure.beside, tuple)
    return (*facts, *(item for item in beside if item.expression not in texts))[:MAX_TENSORS]


def graph_of(failure: FailureContext) -> AutogradNeighbourhood:
    """Return the autograd graph around a call, with the user's names for its inputs.

    For an exception, the graph behind the tensors on the failing line.
    """
    violation, site = failure.violation, failure.site
    values, tensors = dict(failure.values), failure.found.tensors
    if failure.error is not None:
        tensors = ()
        values = {item.expression: values[item.key] for item in site.names}
        # If the call's arguments are known, the line's other tensors are not its inputs.
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
        node=failure.node,
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


def provenance_steps(failure: FailureContext) -> tuple[ProvenanceStep, ...]:
    """Return the path of the bad values, or the last write to a tensor that backward needs."""
    modified = failure.found.modified
    if modified is not None and modified.modified is not None:
        return (replace(modified.modified, note=CHANGED),)
    return tuple(failure.way.steps)


def forward_of(failure: FailureContext) -> tuple[SourceSpan | None, str | None]:
    """Return place and module of the forward call behind the running node."""
    known, node, recorder = failure.found, failure.call.node, failure.recorder
    if node is None or recorder is None:
        return known.forward_source, known.module_path
    source, module_path, name = failure.forward_call(node.sequence_nr)
    if name is None:
        failure.limits.add(recorder.beyond_ring("the forward call of the op that failed"))
    return source or known.forward_source, known.module_path or module_path


def _names_of_modules(failure: FailureContext) -> tuple[tuple[str, str], ...]:
    found = failure.found
    paths = [item.module_path for item in found.history]
    return module_names(
        found.module_path,
        [*paths, *(item.module_path for item in found.graph.nodes)],
        failure.recorder,
        failure.frames,
        failure.modules,
        running=failure.site.module_path,
    )


def replay_of(failure: FailureContext) -> Replay:
    """Return what the same call raises on the CPU.

    A C++ function of the API is replayed itself, because it may check its arguments on the CPU:
    ``one_hot`` checks its classes before it scatters.
    """
    violation, op, api = failure.violation, failure.guarded, failure.call.api
    if violation is None or op is None or op.op is None:
        return Replay()
    func, is_safe = None if api is None else api.func, violation.is_replay_safe
    own = violation.op.partition("::")[2].strip("_")
    is_builtin = isinstance(func, BuiltinFunctionType)
    if api is not None and is_builtin and function_name(func).strip("_") != own:
        return replay(func, api.args, api.kwargs, is_safe=is_safe)
    return replay(op.op, op.args, op.kwargs, is_safe=is_safe)


def seen_before(failure: FailureContext) -> SeenBefore | None:
    """Return the range of the argument at fault in earlier calls of the line.

    For calls on the CPU, whose values no guard reads, only their number.
    """
    violation, recorder = failure.violation, failure.recorder
    if failure.guarded is None:
        raised = failure.raised
        calls = 0 if raised is None else recorder.snapshot().calls_of_line(raised)
        return SeenBefore(calls=calls) if calls else None
    earlier = None if violation is None else recorder.seen_before(bad_key(violation))
    if earlier is None or violation is None:
        return None
    modules = earlier.pop("modules", ())
    related = failure.values.get(violation.related or "self")
    others = other_modules(
        modules, failure.modules, related, violation.size, violation.dim or 0, failure.frames
    )
    return SeenBefore(**earlier, other_modules=others)


def _line_of_bound(failure: FailureContext) -> SourceSpan | None:
    bound = failure.found.bound
    return bound.at if bound is not None and bound.is_set else None


def _column(failure: FailureContext) -> DatasetColumn | None:
    batch, violation = failure.way.batch, failure.violation
    return None if batch is None or violation is None else column_of(batch, violation)


def _owners(failure: FailureContext) -> tuple[OwnerModule, ...]:
    return owner_modules(
        failure.values, failure.frames, failure.modules, failure.site, failure.reader
    )


def _memory(failure: FailureContext) -> tuple[str, ...]:
    is_full = memory.is_full(failure.message) and not failure.found.worker_line
    return memory.largest(failure.frames) if is_full else ()


COLLECTORS: tuple[Collector, ...] = (
    # In order: a collector may read fields that are filled above it.
    Collector("forward source", "forward_source module_path", forward_of),
    Collector("history", "history", lambda it: it.recorder.history(), "recorder"),
    Collector("tensors", "tensors", tensors_of, "is_running"),
    Collector("scalars", "scalars", lambda it: scalars_of(it.arguments)),
    # What autograd rejects.
    Collector(
        "argument",
        "refused_arguments",
        lambda it: refused_arguments(it.trace, it.arguments, it.call.operands),
        "error",
    ),
    Collector("saved tensor", "modified freed", change_or_freed, "error recorder"),
    Collector("graph's end", "graph_cut", cut_of_graph, "error recorder"),
    Collector("parameters", "frozen frozen_at", frozen, "error recorder"),
    Collector("graph", "graph", graph_of, "is_running"),
    Collector("graph", "graph", with_marked_write, "error"),
    # Where the bad value, or the shape, comes from.
    Collector("provenance", "provenance", provenance_steps),
    Collector("bound", "bound", bound_of),
    Collector("bound", "bound_source", _line_of_bound, "violation"),
    Collector("marks", "marks", marks_of_finding, "violation"),
    Collector("variables", "nan_holder", lambda it: nan_holder(it, it.way.origin), "violation"),
    Collector("values", "nan_cause", lambda it: nan_cause(it.way), "guarded"),
    Collector("dataset", "dataset_column", _column, "violation"),
    Collector("earlier calls", "seen_before", seen_before, "violation recorder"),
    Collector(
        "earlier calls",
        "other_functions",
        lambda it: it.recorder.snapshot().other_functions(it.raised),
        "recorder raised",
    ),
    Collector("lost dimension", "lost_dimension", lost_batch, "error recorder"),
    Collector(
        "features", "flattened", lambda it: flattened(it.recorder.snapshot()), "error recorder"
    ),
    Collector("shapes", "earlier_shapes", other_shapes, "error recorder"),
    Collector("rows", "regrouped", other_rows, "error recorder"),
    Collector("replay", "replay", replay_of, "guarded"),
    # The process and the program.
    Collector("module names", "module_names", _names_of_modules),
    Collector("modules", "owners", _owners),
    Collector("observations", "call_context", lambda it: context.observe(it.frames, it.site)),
    Collector("worker", "worker_line", lambda it: worker_line(it.message) or None, "error"),
    Collector("live tensors", "memory_holders", _memory, "error"),
    Collector("environment", "environment", lambda _: context.describe()),
    Collector("timing", "timing", lambda it: timing_since(it.started)),
)
"""All collectors, in order, for findings, exceptions and past calls."""
