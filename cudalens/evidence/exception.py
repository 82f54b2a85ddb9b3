"""Collect evidence after an exception has left the checked block.

The stack lives on in the traceback.  Whether tensors may be read depends on whether the device's
context survived; after a device-side assert it did not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from cudalens.core.evidence_types import DeviceFault, RefusedCall
from cudalens.core.limits import Limits
from cudalens.core.report import Evidence, Report
from cudalens.core.report_types import AutogradNeighbourhood, Environment, OpName, TensorFact
from cudalens.diagnosis.diagnose import is_device_assert
from cudalens.evidence import autograd_graph, context, finding, lost_context, memory
from cudalens.evidence.call_arguments import call_arguments, refused_call, unread_arguments
from cudalens.evidence.call_stack import locate, parameter_names, phase_of, worker_line
from cudalens.evidence.failed_op import with_failed_op, with_unread
from cudalens.evidence.freed_graph import FREED, with_freed
from cudalens.evidence.modified_tensor import MODIFIED, with_marked_node, with_modified
from cudalens.evidence.module_names import module_names
from cudalens.evidence.tensors import tensor_facts
from cudalens.evidence.torch_errors import visible_entries
from cudalens.evidence.trial import CopyTrial, trial_of
from cudalens.recorder.tensor_refs import tensor_values
from cudalens.source.locate import CallSite

_OF_SITE = ("source", "call_text", "module_path", "module_type", "frames")
"""What the evidence takes over from the place of the call."""


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
    entries = visible_entries(error)
    arguments = limits.attempt("arguments", lambda: call_arguments(entries), dict)
    values = tensor_values(arguments)
    site = limits.attempt("source", lambda: locate(entries, values), CallSite)
    tensors = limits.attempt("tensors", lambda: _tensors(values, site, read=not is_lost), tuple)
    call = limits.attempt("argument", lambda: refused_call(entries, arguments), RefusedCall)
    sent = limits.attempt("worker", lambda: worker_line(facts.message), str)
    frames = [item.tb_frame for item in entries]
    is_backward = any(item.f_code.co_name == "_engine_run_backward" for item in frames)
    is_assert = is_device_assert(facts) and not was_lost
    evidence = Evidence(
        error=facts,
        op=OpName(api=site.api),
        phase=phase_of(entries, in_backward=is_backward),
        # It is not known where this process has not used CUDA.
        context_usable=False if is_lost else torch.cuda.is_initialized() or None,
        tensors=tensors,
        device_text=_printed(device_text, limits, is_expected=is_assert),
        refused_call=call,
        device_fault=replace(hidden, was_before=was_lost and is_lost),
        worker_line=sent or None,
        memory_holders=limits.attempt("live tensors", lambda: memory.largest(frames), tuple)
        if memory.is_full(facts.message) and not sent
        else (),
        environment=limits.attempt("environment", context.describe, Environment),
        libraries=finding.libraries(),
        **{name: getattr(site, name) for name in _OF_SITE},
    )
    if recorder is not None:
        evidence = _with_recorder(evidence, values, recorder, error, entries, limits)
    draw = partial(_graph, site, values, evidence, recorder, frames)
    graph = limits.attempt("graph", draw, AutogradNeighbourhood)
    evidence = with_marked_node(replace(evidence, graph=graph))
    name = partial(module_names, evidence, recorder, entries, running=site.module_path)
    names = limits.attempt("module names", name, tuple)
    return replace(evidence, module_names=names, limits=(*site.limits, *limits.lines))


def _with_recorder(
    evidence: Evidence,
    values: Mapping[str, Tensor],
    recorder: Any,
    error: BaseException,
    entries: Sequence[TracebackType],
    limits: Limits,
) -> Evidence:
    """Add the op that raised, who changed a tensor that autograd had saved, and who freed it."""
    tensors = evidence.tensors
    evidence = with_failed_op(evidence, recorder, error, limits)
    modify = partial(with_modified, evidence, recorder, str(error))
    evidence = limits.attempt("writer", modify, lambda: evidence, kind=Evidence)
    free = partial(with_freed, evidence, values, recorder, entries)
    evidence = limits.attempt("freed graph", free, lambda: evidence, kind=Evidence)
    # What of the cause may have left the recorder's ring:
    if MODIFIED in str(error) and evidence.modified is None:
        limits.add(recorder.beyond_ring("the op that modified the tensor in place"))
    elif FREED in str(error) and evidence.freed is None:
        limits.add(recorder.beyond_ring("the op whose saved tensors were freed"))
    if values and evidence.context_usable is not False:
        # The names of the called function: the user did not call the op inside it.
        unread = limits.attempt("arguments", lambda: unread_arguments(entries), dict)
        evidence = replace(evidence, tensors=with_unread(evidence, tensors, unread))
    return evidence


def _printed(device_text: Any, limits: Limits, *, is_expected: bool) -> str | None:
    if device_text is None:
        return None
    read = partial(device_text.text, is_expected=is_expected)
    return limits.attempt("device text", lambda: read() or "", str) or None


def report_of_another(error: BaseException) -> Report:
    """Report an exception that tells of the end of a context which is not this process's."""
    evidence = evidence_of_error(error, None, None)
    first = str(error).strip().split("\n", 1)[0]
    known = "Asked after this exception, the CUDA devices of this process answered"
    if evidence.context_usable is None:
        known = "torch has not used CUDA in this process"
    return Report(
        kind="cuda_error",
        certainty="unknown",
        context_usable=evidence.context_usable,
        phase=evidence.phase,
        headline=f"no device of this process has failed, though the exception says: {first}",
        explanation=f"{known}. The text was raised by hand or came from another process: that is "
        "where to look for the failure.",
        source=evidence.source,
        frames=evidence.frames,
        tensors=evidence.tensors,
        environment=evidence.environment,
        limits=evidence.limits,
    )


def trial_of_error(error: BaseException) -> CopyTrial | None:
    """Make the trial of the call that raised ``error``, for as long as the report is made."""
    return trial_of(visible_entries(error), has_autograd=True)


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
    evidence: Evidence,
    recorder: Any,
    frames: Sequence[FrameType],
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
        names=parameter_names(frames),
    )
