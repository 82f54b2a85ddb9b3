"""Collect evidence after an exception has left the checked block.

The stack lives on in the traceback.  Whether tensors may be read depends on whether the device's
context survived; after a device-side assert it did not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from cudalens.core.evidence_types import DeviceFault, RefusedCall
from cudalens.core.limits import Limits
from cudalens.core.report import ErrorFacts, Evidence, Report
from cudalens.core.report_types import AutogradNeighbourhood, Environment, OpName, Phase, TensorFact
from cudalens.diagnosis.diagnose import is_device_assert
from cudalens.evidence import autograd_graph, context, finding, lost_context, memory
from cudalens.evidence.call_arguments import call_arguments, refused_call, unread_arguments
from cudalens.evidence.call_stack import locate, phase_of, worker_line
from cudalens.evidence.failed_op import with_failed_op, with_unread
from cudalens.evidence.freed_graph import with_freed
from cudalens.evidence.modified_tensor import with_modified
from cudalens.evidence.tensors import tensor_facts, tensor_values
from cudalens.evidence.torch_errors import is_torch_error, visible_entries
from cudalens.source.files import is_own_file, is_user_file
from cudalens.source.locate import CallSite, runs_torch


def concerns_torch(error: BaseException) -> bool:
    """Return whether torch, or a library on top of it, raised ``error``."""
    if isinstance(getattr(error, "__cudalens_report__", None), Report):
        return True  # a check inside this one knew it, and took its own frames out
    return is_torch_error(error, is_own=is_own_file, is_user=is_user_file, runs_torch=_runs_torch)


def _runs_torch(entry: TracebackType) -> bool:
    return runs_torch(entry, is_tensor=lambda item: isinstance(item, Tensor))


def evidence_of_error(
    error: BaseException, recorder: Any, device_text: Any, *, was_lost: bool = False
) -> Evidence:
    """Collect everything about an exception that CUDA, torch or a library on top of it raised.

    Args:
        recorder, device_text: of the block that the exception left, ``None`` without one.
        was_lost: whether the device's context had ended before that block began.
    """
    limits = Limits()
    facts = finding.error_facts(error)
    hidden = limits.attempt("device", lambda: lost_context.hidden_fault(facts), DeviceFault)
    is_lost = hidden.hidden_error is not None or lost_context.is_lost(facts)
    entries = visible_entries(error.__traceback__, is_own=is_own_file, is_user=is_user_file)
    arguments = limits.attempt("arguments", lambda: call_arguments(entries), dict)
    values = tensor_values(arguments)
    site = limits.attempt("source", lambda: locate(entries, values), CallSite)
    tensors = limits.attempt("tensors", lambda: _tensors(values, site, read=not is_lost), tuple)
    call = limits.attempt("argument", lambda: refused_call(entries, arguments), RefusedCall)
    sent = limits.attempt("worker", lambda: worker_line(facts.message), str)
    evidence = Evidence(
        error=facts,
        op=OpName(api=site.api),
        phase=_phase(entries),
        context_usable=_context_usable(is_lost=is_lost),
        source=site.source,
        call_text=site.call_text,
        module_path=site.module_path,
        module_type=site.module_type,
        frames=site.frames,
        tensors=tensors,
        refused_call=call,
        device_fault=replace(hidden, was_before=was_lost and is_lost),
        worker_line=sent or None,
        memory_holders=() if sent else _memory_holders(facts, entries, limits),
        environment=limits.attempt("environment", context.describe, Environment),
        libraries=finding.libraries(),
    )
    is_expected = is_device_assert(facts) and not was_lost
    evidence = _with_device_text(evidence, device_text, limits, is_expected=is_expected)
    if recorder is not None:
        evidence = _with_recorder(evidence, recorder, error, entries, limits)
        evidence = _with_freed(evidence, values, recorder, entries, limits)
        if values and not is_lost:
            evidence = _with_names(evidence, tensors, entries, limits)
    graph = limits.attempt(
        "graph", lambda: _graph(site, values, evidence, recorder), AutogradNeighbourhood
    )
    return replace(evidence, graph=graph, limits=(*site.limits, *limits.lines))


def _context_usable(*, is_lost: bool) -> bool | None:
    """Return whether CUDA can be used on, ``None`` where this process has not used it."""
    if is_lost:
        return False
    return True if torch.cuda.is_initialized() else None


def _memory_holders(
    facts: ErrorFacts, entries: Sequence[TracebackType], limits: Limits
) -> tuple[str, ...]:
    """Return what fills the device, where the error says that it is full."""
    if not memory.is_full(facts.message):
        return ()
    frames = [item.tb_frame for item in entries]
    return limits.attempt("live tensors", lambda: memory.largest(frames), tuple)


def _with_recorder(
    evidence: Evidence,
    recorder: Any,
    error: BaseException,
    entries: Sequence[TracebackType],
    limits: Limits,
) -> Evidence:
    """Add the op that raised, and who changed a tensor that autograd had saved."""
    evidence = with_failed_op(evidence, recorder, error, limits)
    return limits.attempt(
        "writer",
        lambda: with_modified(evidence, recorder, str(error), entries),
        lambda: evidence,
        kind=Evidence,
    )


def _with_names(
    evidence: Evidence,
    tensors: tuple[TensorFact, ...],
    entries: Sequence[TracebackType],
    limits: Limits,
) -> Evidence:
    """Keep the names of the called function: the user did not call the op inside it."""
    unread = limits.attempt("arguments", lambda: unread_arguments(entries), dict)
    return replace(evidence, tensors=with_unread(evidence, tensors, unread))


def _with_freed(
    evidence: Evidence,
    values: Mapping[str, Tensor],
    recorder: Any,
    entries: Sequence[TracebackType],
    limits: Limits,
) -> Evidence:
    """Add which backward freed the graph that another one leads into."""
    return limits.attempt(
        "freed graph",
        lambda: with_freed(evidence, values, recorder, entries),
        lambda: evidence,
        kind=Evidence,
    )


def _tensors(values: Mapping[str, Tensor], site: CallSite, *, read: bool) -> tuple[TensorFact, ...]:
    """Describe the tensors of the call and of the line; parameters of a module without values."""
    seen = {item.key for item in site.names}
    hidden = {key: value for key, value in values.items() if key not in seen}
    shown = {key: value for key, value in values.items() if key in seen}
    facts = tensor_facts(shown, site, None, read=read) if shown or site.others else ()
    return (*facts, *(tensor_facts(hidden, CallSite(), None, read=False) if hidden else ()))


def _graph(
    site: CallSite, arguments: Mapping[str, Tensor], evidence: Evidence, recorder: Any
) -> AutogradNeighbourhood:
    """Draw the graph behind the tensors on the failing line; no value is read."""
    if evidence.device_fault.is_met_again:
        return evidence.graph  # these are the tensors of another line
    values = {item.expression: arguments[item.key] for item in site.names}
    for item in site.others:
        if isinstance(item.value, Tensor):
            values.setdefault(item.expression, item.value)
    name = evidence.op.name or evidence.op.api
    if not any(item.requires_grad for item in values.values()):
        return evidence.graph
    return autograd_graph.neighbourhood(
        values,
        op_name=name or "the failing call",
        bad=None,
        site=lambda number: finding.forward_line(recorder, number),
    )


def _phase(entries: Sequence[TracebackType]) -> Phase:
    names = {item.tb_frame.f_code.co_name for item in entries}
    if "_engine_run_backward" in names:
        return "backward"
    return phase_of([item.tb_frame for item in entries], None)


def _with_device_text(
    evidence: Evidence, device_text: Any, limits: Limits, *, is_expected: bool
) -> Evidence:
    if device_text is None:
        return evidence
    text = limits.attempt(
        "device text", lambda: device_text.text(is_expected=is_expected) or "", str
    )
    return replace(evidence, device_text=text or None)
