"""Collect evidence after an exception has left the checked block.

The traceback keeps the stack.  Whether tensors may be read depends on whether the device's
context survived; after a device-side assert it did not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from cudalens.core.call import ApiCall, Call
from cudalens.core.evidence_types import (
    DeviceFault,
    FreedGraph,
    GraphCut,
    InPlaceChange,
    LostDimension,
    Marks,
    RefusedCall,
    Regrouped,
    Synchronization,
)
from cudalens.core.graph_types import CHANGED, AutogradNeighbourhood, ProvenanceStep
from cudalens.core.limits import Limits
from cudalens.core.report import Evidence, Report
from cudalens.core.report_types import LineRef, OpName, Phase, TensorFact
from cudalens.core.user_objects import is_module, is_tensor
from cudalens.diagnosis.diagnose import is_device_assert
from cudalens.evidence import lost_context, memory
from cudalens.evidence.bound import bound_origin
from cudalens.evidence.call_stack import (
    held_name,
    phase_of,
    tensors_and_modules,
    worker_line,
)
from cudalens.evidence.collect import (
    FailureContext,
    error_facts,
    evidence_of,
    graph_of,
    provenance_of,
)
from cudalens.evidence.failing_call import api_call_of_stack, arguments_of, refused_call
from cudalens.evidence.freed_graph import FREED, MODIFIED, freed_graph, is_shared, stale_lines
from cudalens.evidence.host_value import observed_value
from cudalens.evidence.recorded_way import (
    flattened,
    frozen_parameters,
    graph_cut,
    lost_dimension,
    number_cut,
    regrouped,
)
from cudalens.evidence.tensors import bad_key, facts_of, scalars_of, tensor_facts
from cudalens.evidence.torch_errors import visible_entries
from cudalens.evidence.trial import ApiTrial, trial_of_error
from cudalens.evidence.value_facts import bound_of, marks_of_finding, nan_holder
from cudalens.evidence.variables import parameters_of
from cudalens.recorder.arguments import overload_of
from cudalens.recorder.calls import BACKWARD, Recorded
from cudalens.recorder.provenance import Provenance
from cudalens.recorder.saved_tensor import find_modified
from cudalens.recorder.sites import SiteReader, entries_of
from cudalens.recorder.sites import phase_of as phase_of_site
from cudalens.recorder.tensor_refs import tensor_values
from cudalens.source.locate import CallSite, locate_entries
from cudalens.source.stack import frame_of, frames_of, namespaces

MAX_TENSORS = 40
_NAMED = 4


_CAPTURE_INVALIDATED = 901


def evidence_of_error(
    error: BaseException,
    recorder: Any,
    device_text: Any,
    *,
    started: float,
    raised: ApiCall | None = None,
    was_lost: bool = False,
    is_checked: bool = True,
    beside: Callable[[], Sequence[TensorFact]] = tuple,
) -> tuple[Evidence, ApiTrial | None]:
    """Collect everything about an exception that CUDA, torch or a library on top of it raised.

    The trial of the call that raised comes with it, where it can be made: not on a lost device.

    Args:
        recorder, device_text: of the block that the exception left, ``None`` without one.
        started: when the work on the report began, on the performance counter.
        raised: the call that raised it, where a recorder saw one.
        was_lost: whether the device's context had ended before that block began.
        is_checked: whether a check was open.
        beside: where the context is gone, other tensors, after those of the line.
    """
    error = _cause_in_capture(error)
    limits, facts = Limits(), error_facts(error)
    attempt = limits.attempt
    hidden = attempt("device", lambda: lost_context.hidden_fault(facts), DeviceFault)
    is_own = lost_context.is_lost(facts)
    is_lost = hidden.hidden_error is not None or is_own
    entries = visible_entries(error)

    # The call: where it is, what it was given.
    find = partial(failed_call, recorder, raised, is_lost=is_own)
    failed, was_handled_inside = attempt("failing op", find, lambda: (None, False), kind=tuple)
    call, trial = Call(), None
    if not was_handled_inside:
        trial = attempt("call", lambda: trial_of_error(error, entries, raised))
        read = partial(api_call_of_stack, entries)
        call = Call(api=attempt("call", read) or raised) if trial is None else trial.call
    # What the user's line calls may be another function, around the one that the device ran.
    api = failed if is_lost and failed is not None and failed.func is not None else call.api
    arguments = attempt("arguments", lambda: arguments_of(api), dict)
    op = OpName() if failed is None else _op_of(failed)
    live = None if recorder is None else raised
    operands = () if trial is None else trial.call.operands
    look = partial(observed_value, facts.message, entries, live, operands, recorder)
    observed = None if is_lost else attempt("value", look)
    if observed is not None and observed.api is not None:
        op = OpName(api=observed.api or None)
    failure = FailureContext(
        call=call if failed is None else replace(call, node=failed.node),
        values=tensor_values(arguments) if observed is None else observed.values,
        entries=entries,
        violation=None if observed is None else observed.violation,
        error=facts,
        op=op,
        recorder=recorder,
        reader=None if trial is None else trial.line.call,
        started=started,
        limits=limits,
    )
    if failed is not None and was_handled_inside:
        failure.site = attempt("source", lambda: site_of_call(failed), CallSite)
    violation = failure.violation
    describe = partial(_tensors, failure, read=not is_lost)
    if violation is not None:
        # What the op calls so too is another tensor there: x of x[0, i], for self.
        of_op = {key.partition("[")[0] for key in failure.values}
        named = [item for item in arguments.items() if item[0].partition("[")[0] not in of_op]
        describe = partial(facts_of, violation, failure.values, failure.site, named)
    tensors = attempt("tensors", describe, tuple)
    if is_lost:
        shown = {item.expression for item in tensors}
        rest = [item for item in attempt("cell", beside, tuple) if item.expression not in shown]
        tensors = (*tensors, *rest)[:MAX_TENSORS]

    # What autograd complains of, and the graph.
    changed, freed = _of_autograd(error, entries, failure)
    graph = attempt("graph", partial(graph_of, failure), AutogradNeighbourhood)
    write = changed.modified if changed is not None else None
    graph = attempt("graph", lambda: _with_marked_write(graph, write), lambda: graph)
    refused = attempt("argument", lambda: refused_call(entries, arguments, operands), RefusedCall)
    sent = attempt("worker", lambda: worker_line(facts.message), str)
    is_full = memory.is_full(facts.message) and not sent
    is_backward = any(item.f_code.co_name == "_engine_run_backward" for item in failure.frames)
    is_assert = is_device_assert(facts) and not was_lost
    is_synchronous = recorder is not None and recorder.is_synchronous
    way = Provenance() if is_lost else attempt("provenance", partial(_way, failure), Provenance)
    none = (), None
    frozen, frozen_at = attempt("parameters", partial(_frozen, failure), lambda: none, kind=tuple)
    value: dict[str, Any] = {}
    number = arguments.get("k") if "selected index k out of range" in facts.message else None
    if type(number) is int and trial is not None:
        frames, running = failure.frames, trial.line.running
        find_number = partial(
            bound_origin, None, size=number, dim=None, snapshot=None, frames=frames, line=running
        )
        value["bound"] = attempt("bound", find_number)
    if violation is not None and not is_lost:
        origin = attempt("bound", partial(bound_of, failure, (), trial))
        holder = partial(nan_holder, failure, way.origin)
        value = {
            "bound": origin,
            "bound_source": origin.at if origin is not None and origin.is_set else None,
            "marks": attempt("marks", partial(marks_of_finding, failure, way, trial), Marks),
            "nan_holder": attempt("variables", holder),
        }
    evidence = evidence_of(
        failure,
        **value,
        phase=phase_of(entries, in_backward=is_backward) if failed is None else _phase_of(failed),
        context_usable=False if is_lost else _lives_on(error),
        tensors=tensors,
        scalars=attempt("scalars", lambda: scalars_of(arguments), tuple),
        device_text=_printed(device_text, limits, is_expected=is_assert),
        graph=graph,
        provenance=tuple(way.steps) if write is None else (replace(write, note=CHANGED),),
        refused_call=refused,
        modified=changed,
        freed=freed,
        graph_cut=attempt("graph's end", partial(_graph_cut, failure, refused)),
        frozen=frozen,
        frozen_at=frozen_at,
        lost_dimension=attempt("lost dimension", partial(_lost_dimension, failure)),
        regrouped=attempt("rows", partial(_regrouped, failure)),
        flattened=None
        if recorder is None
        else attempt("features", lambda: flattened(recorder.snapshot())),
        device_fault=replace(
            hidden, was_before=was_lost and is_lost, was_handled_inside=was_handled_inside
        ),
        synchronization=Synchronization(
            waits=is_synchronous if is_checked and not was_lost else None,
            is_op_unwaited=failed is not None and not is_synchronous,
        ),
        has_run_kernels=observed is not None and observed.has_run_kernels,
        worker_line=sent or None,
        memory_holders=attempt("live tensors", lambda: memory.largest(failure.frames), tuple)
        if is_full
        else (),
        is_checked=is_checked,
    )
    return evidence, None if is_lost else trial


def _way(failure: FailureContext) -> Provenance:
    """Return where the value came from that a distribution or a CPU kernel refused."""
    violation = failure.violation
    bad = None if violation is None else failure.values.get(bad_key(violation))
    if bad is None or failure.recorder is None:
        return Provenance()
    return provenance_of(failure, bad)


def failed_call(
    recorder: Any, raised: ApiCall | None, *, is_lost: bool
) -> tuple[ApiCall | None, bool]:
    """Return the recorded call that raised, and whether it had raised before.

    Where the device's context had ended before, it is the call that ended it.
    """
    if recorder is None:
        return None, False
    fatal = recorder.fatal
    if is_lost and recorder.is_over and fatal is not raised:
        if fatal is None:
            return None, False  # no call of the block's ended it
        # One without a function was noted on autograd's own thread, before torch raised it.
        if raised is None or fatal.func is not None or fatal.node != raised.node:
            return fatal, True
    return raised, False


def site_of_call(call: ApiCall) -> CallSite:
    """Return the place of a call that is over, in place of that where its error was met again."""
    entries = entries_of(call.site)
    return CallSite(
        source=locate_entries(entries),
        frames=frames_of(entries),
        module_path=SiteReader().module(call.site).path,
    )


def _op_of(call: ApiCall) -> OpName:
    """Name the function, the op of an extension, or the autograd node whose kernel failed."""
    if (op := overload_of(call.func)) is not None:
        return OpName(name=op.name().partition(".")[0], overload=op._overloadname)
    if call.node is not None and call.func in (None, *BACKWARD):
        return OpName(name=call.node.name)
    return OpName(name=None if call.func is None else call.name)


def _phase_of(call: ApiCall) -> Phase:
    is_backward = call.node is not None or call.func in BACKWARD
    return "backward" if is_backward else phase_of_site(call.site)


def _tensors(failure: FailureContext, *, read: bool) -> tuple[TensorFact, ...]:
    """Describe the tensors of the call and of the line; parameters of a module without values."""
    values, site = failure.values, failure.site
    seen = {item.key for item in site.names}
    hidden = {key: value for key, value in values.items() if key not in seen}
    shown = {key: value for key, value in values.items() if key in seen}
    facts = tensor_facts(shown, site, None, read=read)
    return (*facts, *tensor_facts(hidden, CallSite(), None, read=False))


def _of_autograd(
    error: BaseException, entries: Sequence[TracebackType], failure: FailureContext
) -> tuple[InPlaceChange | None, FreedGraph | None]:
    """Return who changed a saved tensor, or who freed it."""
    recorder, limits, message = failure.recorder, failure.limits, str(error)
    changed, freed = None, None
    node, here = failure.call.node, failure.site.source
    if recorder is not None and MODIFIED in message:
        write = limits.attempt("writer", lambda: find_modified(recorder.snapshot(), message, node))
        if write is not None:
            write = replace(write[0], name=_parameter_name(write[1], failure)), write[1]
            lines = partial(
                stale_lines, failure.values, recorder.snapshot(), entries, here, write[1]
            )
            changed = replace(
                write[0],
                is_shared=limits.attempt("other names", partial(is_shared, write[1]), bool),
                stale=limits.attempt("lines to run again", lines, tuple),
            )
            if node is not None:
                find = partial(freed_graph, failure.values, recorder, entries, here, node, write[1])
                freed = limits.attempt("way to the change", find)
        else:
            limits.add(recorder.beyond_ring("the op that modified the tensor in place"))
    elif recorder is not None and FREED in message:
        if node is not None:
            find = partial(freed_graph, failure.values, recorder, entries, here, node)
            freed = limits.attempt("freed graph", find)
        if freed is None:
            limits.add(recorder.beyond_ring("the op whose saved tensors were freed"))
    return changed, freed


def _parameter_name(write: Recorded, failure: FailureContext) -> str | None:
    """Return the user's name of the one parameter that a call wrote to and that backward misses."""
    match = _SHAPE.search(str(failure.error.message)) if failure.error is not None else None
    if match is None:
        return None
    shape = tuple(int(size) for size in re.findall(r"\d+", match[1]))
    # Autograd saves the weight of a linear layer as a view with its dimensions exchanged.
    shapes = (shape, shape[::-1])
    living = [item.tensor() for item in write.written]
    ids = {
        id(item)
        for item in living
        if is_tensor(item) and item.is_leaf and tuple(item.shape) in shapes
    }
    entries = [it for it in failure.entries if isinstance(it, FrameType | TracebackType)]
    names: dict[int, str] = {}
    scopes = namespaces([frame_of(entry) for entry in entries])
    for name, value in tensors_and_modules(scopes):
        if is_module(value) and not name.startswith("_"):
            for path, item in parameters_of(value):
                if id(item) in ids:
                    names.setdefault(id(item), _spelled(name, path))
    return next(iter(names.values())) if len(ids) == len(names) == 1 else None


def _spelled(root: str, path: str) -> str:
    """Return a parameter as code names it: ``D[2].weight``."""
    return root + "".join(f"[{key}]" if key.isdecimal() else f".{key}" for key in path.split("."))


_SHAPE = re.compile(r"modified by an inplace operation: \[[\w.]+ \[([\d, ]*)\]\]")
_OF_NUMBER = re.compile(r"^'(?:float|int)' object has no attribute 'backward'")
_WITHOUT_GRAPH = re.compile(r"^element (\d+) of tensors does not require grad")
_OF_SHAPES = re.compile(r"\bsizes?\b|\bshapes?\b|[Dd]imension|\b\dD\b|must match|batch_size")


def _graph_cut(failure: FailureContext, refused: RefusedCall) -> GraphCut | None:
    """Return what cut the tensor, or the number, off its graph that backward was asked of."""
    message = failure.error.message if failure.error else ""
    if failure.recorder is None:
        return None
    if _OF_NUMBER.search(message):
        names = [item.name for item in refused.odd_arguments]
        return number_cut(names[0], failure.recorder.snapshot()) if names else None
    tensor = _without_graph(failure)
    return None if tensor is None else graph_cut(tensor, failure.recorder.snapshot())


def _without_graph(failure: FailureContext) -> Tensor | None:
    """Return the tensor without a graph that backward was asked of."""
    match = _WITHOUT_GRAPH.search(failure.error.message if failure.error else "")
    keys = ("self", *(f"{name}[{match[1]}]" for name in ("tensors", "outputs"))) if match else ()
    return next((failure.values[key] for key in keys if key in failure.values), None)


def _frozen(failure: FailureContext) -> tuple[tuple[str, ...], LineRef | None]:
    """Name the parameters behind the tensor that backward was asked of, if all are frozen.

    With the line that froze all of them.
    """
    tensor, recorder = _without_graph(failure), failure.recorder
    if tensor is None or recorder is None:
        return (), None
    found = frozen_parameters(tensor, recorder.snapshot())
    # The others are counted: to look for each in a large model takes long.
    held = [held_name(item, failure.frames) for item in found[:_NAMED]]
    held += [failure.names.get(id(item)) for item in found[_NAMED:]]
    names = tuple(name or "a parameter" for name in held)
    reader = recorder.snapshot().reader
    lines = {reader.line(site) for site in recorder.frozen_at(found)}
    return names, lines.pop() if len(lines) == 1 else None


def _lost_dimension(failure: FailureContext) -> LostDimension | None:
    """Return the line that took a batch of one away from a tensor of the call."""
    message = failure.error.message.partition("\n")[0] if failure.error else ""
    if failure.recorder is None or not _OF_SHAPES.search(message):
        return None
    snapshot, node = failure.recorder.snapshot(), failure.call.node
    forward = None if node is None else snapshot.forward_call(node.sequence_nr)
    living = () if forward is None else (item() for item in forward.inputs)
    tensors = [*failure.values.values(), *(item for item in living if item is not None)]
    return lost_dimension(tensors, snapshot)


_ROWS = re.compile(r"^Expected input batch_size \((\d+)\) to match target batch_size \((\d+)\)")


def _regrouped(failure: FailureContext) -> Regrouped | None:
    """Return the line that made other rows of those that the target still has."""
    match = _ROWS.search(failure.error.message) if failure.error is not None else None
    if match is None or failure.recorder is None:
        return None
    found, wanted = int(match[1]), int(match[2])
    snapshot = failure.recorder.snapshot()
    inputs = (it for it in failure.values.values() if it.dim() and it.shape[0] == found)
    return next(filter(None, (regrouped(it, wanted, snapshot) for it in inputs)), None)


def _with_marked_write(
    graph: AutogradNeighbourhood, step: ProvenanceStep | None
) -> AutogradNeighbourhood:
    """Mark the graph's node of the write, where only one node is of its op and its line."""
    if step is None or step.op is None or step.source is None:
        return graph
    op, line = step.op, step.source
    writers = [item.id for item in graph.nodes if (item.op, item.source) == (op, line)]
    if len(writers) != 1:
        return graph
    marked = tuple(
        replace(item, role="bad_input", name=line.text or op) if item.id in writers else item
        for item in graph.nodes
    )
    return replace(graph, nodes=marked)


def _cause_in_capture(error: BaseException) -> BaseException:
    """Return what ended the capture of a CUDA graph, where an exception only says that it ended.

    A forbidden call raises, and as the block is left the end of the capture raises once more.
    """
    first = error.__context__
    is_end = getattr(error, "error_code", None) == _CAPTURE_INVALIDATED
    return first if is_end and first is not None and lost_context.is_of_device(first) else error


def _lives_on(error: BaseException) -> bool | None:
    """Return whether the device goes on after an exception; ``None`` where that is not known."""
    if not torch.cuda.is_initialized():
        return None
    is_silent = lost_context.is_of_device(error) and lost_context.is_unanswered()
    return None if is_silent else True


def _printed(device_text: Any, limits: Limits, *, is_expected: bool) -> str | None:
    if device_text is None:
        return None
    read = partial(device_text.text, is_expected=is_expected)
    return limits.attempt("device text", lambda: read() or "", str) or None


def report_of_another(error: BaseException) -> Report:
    """Report an exception that tells of the end of a context which is not this process's."""
    started = time.perf_counter()
    evidence, _ = evidence_of_error(error, None, None, started=started, is_checked=False)
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
