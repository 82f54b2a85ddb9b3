"""Collect evidence after an exception has left the checked block.

The traceback keeps the stack.  Whether tensors may be read depends on whether the device's
context survived; after a device-side assert it did not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from cudalens.core.call import ApiCall, api_call_of
from cudalens.core.evidence_types import (
    DeviceFault,
    FreedGraph,
    InPlaceChange,
    RefusedCall,
    Synchronization,
)
from cudalens.core.limits import Limits
from cudalens.core.report import Evidence, Report
from cudalens.core.report_types import (
    CHANGED,
    AutogradNeighbourhood,
    Environment,
    HistoryEntry,
    OpName,
    SourceSpan,
    TensorFact,
    Timing,
)
from cudalens.diagnosis.diagnose import is_device_assert
from cudalens.evidence import autograd_graph, context, finding, lost_context, memory
from cudalens.evidence.call_stack import locate, parameter_names, phase_of, worker_line
from cudalens.evidence.failed_op import (
    FailedOp,
    failed_op,
    failed_record,
    site_of_record,
)
from cudalens.evidence.failing_call import api_call_of_stack, arguments_of, refused_call
from cudalens.evidence.freed_graph import FREED, freed_graph
from cudalens.evidence.host_value import observed_value
from cudalens.evidence.modified_tensor import MODIFIED, with_marked_write
from cudalens.evidence.module_names import module_names
from cudalens.evidence.tensors import tensor_facts
from cudalens.evidence.torch_errors import visible_entries
from cudalens.evidence.trial import ApiTrial, trial_of_error
from cudalens.recorder.tensor_refs import tensor_values
from cudalens.source.locate import CallSite, locate_entries

MAX_TENSORS = 40


def evidence_of_error(
    error: BaseException,
    recorder: Any,
    device_text: Any,
    *,
    started: float,
    trial: ApiTrial | None = None,
    was_lost: bool = False,
    is_checked: bool = True,
    beside: Callable[[], Sequence[TensorFact]] = tuple,
) -> Evidence:
    """Collect everything about an exception that CUDA, torch or a library on top of it raised.

    Args:
        recorder, device_text: of the block that the exception left, ``None`` without one.
        started: when the work on the report began, on the performance counter.
        trial: of the call that raised, which is read here otherwise.
        was_lost: whether the device's context had ended before that block began.
        is_checked: whether a check was open.
        beside: where the context is gone, other tensors, after those of the line.
    """
    limits = Limits()
    attempt, facts = limits.attempt, finding.error_facts(error)
    hidden = attempt("device", lambda: lost_context.hidden_fault(facts), DeviceFault)
    is_own = lost_context.is_lost(facts)
    is_lost = hidden.hidden_error is not None or is_own
    entries = visible_entries(error)
    frames = [item.tb_frame for item in entries]

    # The call: where it is, what it was given.
    find = partial(failed_record, recorder, error, is_lost=is_own)
    record, was_handled_inside = attempt("failing op", find, lambda: (None, False), kind=tuple)
    arguments: Mapping[str, object] = {}
    api: ApiCall | None = None
    if trial is None and not was_handled_inside:
        trial = attempt("call", lambda: trial_of_error(error, entries))
    if not was_handled_inside:
        seen = api_call_of(error)
        api = attempt("call", lambda: api_call_of_stack(entries) or seen)
        api = trial.call.api if trial is not None else api
        arguments = attempt("arguments", lambda: arguments_of(api), dict)
    operands = () if trial is None else trial.call.operands
    values = tensor_values(arguments)
    if was_handled_inside:
        site = attempt("source", lambda: site_of_record(record), CallSite)
    else:
        reader = None if trial is None else trial.line.call
        site = attempt("source", lambda: locate(entries, values, reader), CallSite)
    of_line = attempt("tensors", lambda: _tensors(values, site, read=not is_lost), tuple)
    failed = FailedOp(tensors=of_line)
    if record is not None:
        read = partial(failed_op, record, recorder, of_line, limits)
        failed = attempt("failing op", read, lambda: FailedOp(tensors=of_line), kind=FailedOp)
    # The names of the called function: the user did not call the op inside it.
    tensors = of_line if values and not is_lost else failed.tensors
    observed = None
    if not is_lost:
        call = None if recorder is None else api_call_of(error)
        look = partial(observed_value, facts.message, entries, call, values, tensors)
        observed = attempt("value", look)
    if observed is not None:
        tensors = observed.tensors
    if is_lost:
        shown = {item.expression for item in tensors}
        rest = [item for item in attempt("cell", beside, tuple) if item.expression not in shown]
        tensors = (*tensors, *rest)[:MAX_TENSORS]

    # What autograd complains of, and the graph.
    changed, saved_at, freed, made_at = _of_autograd(error, values, recorder, entries, site, limits)
    raised = api_call_of(error)
    others = partial(recorder.other_functions, raised) if recorder and raised else tuple
    called = failed.name.name or site.api
    draw = partial(_graph, site, values, called, recorder, frames)
    graph = attempt("graph", draw, AutogradNeighbourhood)
    graph = attempt("graph", lambda: with_marked_write(graph, changed), lambda: graph)
    history: tuple[HistoryEntry, ...] = ()
    if recorder is not None:
        history = attempt("history", recorder.history, tuple)
    module_path = site.module_path or failed.module_path
    paths = [item.module_path for item in history] + [item.module_path for item in graph.nodes]
    name = partial(module_names, module_path, paths, recorder, entries, running=site.module_path)

    op = replace(failed.name, api=site.api)
    if observed is not None and observed.api is not None:
        op = OpName(api=observed.api or None)
    sent = attempt("worker", lambda: worker_line(facts.message), str)
    is_full = memory.is_full(facts.message) and not sent
    is_backward = any(item.f_code.co_name == "_engine_run_backward" for item in frames)
    is_assert = is_device_assert(facts) and not was_lost
    is_synchronous = recorder is not None and recorder.is_synchronous
    write = changed.modified if changed is not None else None
    return Evidence(
        violation=None if observed is None else observed.violation,
        error=facts,
        op=op,
        phase=failed.phase or phase_of(entries, in_backward=is_backward),
        # It is not known where this process has not used CUDA.
        context_usable=False if is_lost else torch.cuda.is_initialized() or None,
        source=site.source or failed.source,
        forward_source=failed.forward_source or saved_at or made_at,
        call_text=site.call_text,
        module_path=module_path,
        module_type=site.module_type,
        module_names=attempt("module names", name, tuple),
        frames=site.frames,
        tensors=tensors,
        device_text=_printed(device_text, limits, is_expected=is_assert),
        graph=graph,
        provenance=() if write is None else (replace(write, note=CHANGED),),
        history=history,
        refused_call=replace(
            attempt("argument", lambda: refused_call(entries, arguments, operands), RefusedCall),
            other_functions=attempt("earlier calls", others, tuple),
        ),
        modified=changed,
        freed=freed,
        device_fault=replace(
            hidden, was_before=was_lost and is_lost, was_handled_inside=was_handled_inside
        ),
        synchronization=Synchronization(
            waits=is_synchronous if is_checked and not was_lost else None,
            is_op_unwaited=record is not None and not is_synchronous,
        ),
        has_run_kernels=observed is not None and observed.has_run_kernels,
        worker_line=sent or None,
        memory_holders=attempt("live tensors", lambda: memory.largest(frames), tuple)
        if is_full
        else (),
        environment=attempt("environment", context.describe, Environment),
        libraries=finding.libraries(),
        is_script=finding.is_script(site),
        is_checked=is_checked,
        timing=attempt("timing", lambda: finding.timing_since(started), Timing),
        limits=(*site.limits, *limits.lines),
    )


def _of_autograd(
    error: BaseException,
    values: Mapping[str, Tensor],
    recorder: Any,
    entries: Sequence[TracebackType],
    site: CallSite,
    limits: Limits,
) -> tuple[InPlaceChange | None, SourceSpan | None, FreedGraph | None, SourceSpan | None]:
    """Return who changed a saved tensor, who freed it, and the forward lines of both."""
    if recorder is None:
        return None, None, None, None

    def look() -> tuple[InPlaceChange | None, SourceSpan | None]:
        change, lines = recorder.modified_tensor(error)
        return change, locate_entries(lines) if lines else None

    message = str(error)
    changed, saved_at = limits.attempt("writer", look, lambda: (None, None), kind=tuple)
    freed, made_at = None, None
    if FREED in message:
        call = api_call_of(error)
        raising = call.node if call is not None else None
        find = partial(freed_graph, values, recorder, entries, site.source, raising)
        freed, made_at = limits.attempt("freed graph", find, lambda: (None, None), kind=tuple)
    # What of the cause may have left the recorder's ring:
    if MODIFIED in message and changed is None:
        limits.add(recorder.beyond_ring("the op that modified the tensor in place"))
    elif FREED in message and freed is None:
        limits.add(recorder.beyond_ring("the op whose saved tensors were freed"))
    return changed, saved_at, freed, made_at


def _printed(device_text: Any, limits: Limits, *, is_expected: bool) -> str | None:
    if device_text is None:
        return None
    read = partial(device_text.text, is_expected=is_expected)
    return limits.attempt("device text", lambda: read() or "", str) or None


def report_of_another(error: BaseException) -> Report:
    """Report an exception that tells of the end of a context which is not this process's."""
    evidence = evidence_of_error(error, None, None, started=time.perf_counter(), is_checked=False)
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


def _tensors(values: Mapping[str, Tensor], site: CallSite, *, read: bool) -> tuple[TensorFact, ...]:
    """Describe the tensors of the call and of the line; parameters of a module without values."""
    seen = {item.key for item in site.names}
    hidden = {key: value for key, value in values.items() if key not in seen}
    shown = {key: value for key, value in values.items() if key in seen}
    facts = tensor_facts(shown, site, None, read=read)
    return (*facts, *tensor_facts(hidden, CallSite(), None, read=False))


def _graph(
    site: CallSite,
    arguments: Mapping[str, Tensor],
    op_name: str | None,
    recorder: Any,
    frames: Sequence[FrameType],
) -> AutogradNeighbourhood:
    """Return the graph behind the tensors on the failing line; no value is read."""
    values = {item.expression: arguments[item.key] for item in site.names}
    for item in site.others:
        if isinstance(item.value, Tensor):
            values.setdefault(item.expression, item.value)
    if not any(item.requires_grad for item in values.values()):
        return AutogradNeighbourhood()
    return autograd_graph.neighbourhood(
        values,
        op_name=op_name or "the failing call",
        bad=None,
        site=lambda number: finding.forward_line(recorder, number),
        names=parameter_names(frames),
    )
