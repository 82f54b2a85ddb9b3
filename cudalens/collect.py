"""Collect the evidence of one failure from live objects: stack, tensors, replay, graph, recorder.

Each collector stands alone: one that fails leaves one line in ``limits`` and the others go on.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType, TracebackType
from typing import Any, TypeVar

from torch import Tensor

from cudalens import _torch, autograd, environment, source
from cudalens.diagnose import diagnose, message
from cudalens.errors import DeviceAssertError, DeviceIndexError, DeviceValueError
from cudalens.facts import (
    AutogradNeighbourhood,
    LineRef,
    OpName,
    Phase,
    Replay,
    TensorFact,
    TensorSummary,
    Timing,
    Violation,
)
from cudalens.guarding import PROCESS
from cudalens.intercept import GuardedCall
from cudalens.model import ErrorFacts, Evidence, Report
from cudalens.replay import replay
from cudalens.values import summarise

_T = TypeVar("_T")
_HISTORY = 200


class SilentFindingWarning(UserWarning):
    """An op's result is certainly wrong, although neither CUDA nor the CPU complains."""


@dataclass
class Limits:
    """Collects one line for each thing that could not be established."""

    lines: list[str] = field(default_factory=list)

    def attempt(self, what: str, collect: Callable[[], _T], otherwise: _T) -> _T:
        """Give what ``collect`` gives; when it fails, note why and give ``otherwise``."""
        try:
            return collect()
        except Exception as trouble:  # our failure must never hide the user's
            reason = str(trouble).strip().split("\n", 1)[0]
            self.lines.append(f"{what} unavailable: {type(trouble).__name__}: {reason}")
            return otherwise


# --- a guard's finding ---------------------------------------------------------------------------


def on_violation(call: GuardedCall, violation: Violation) -> BaseException | None:
    """Make the report of a finding, tell who listens, and give the exception to raise."""
    started = time.perf_counter()
    violation = replace(
        violation, op=str(call.op._schema.name), overload=str(call.op._overloadname)
    )
    evidence = evidence_of_call(call, violation)
    report = diagnose(timed(evidence, started))
    if violation.is_silent:
        _tell_silent(report)
        return None
    PROCESS.found(report)
    kind: type[DeviceAssertError] = DeviceIndexError if violation.is_index else DeviceValueError
    return kind(message(report), report)


def _tell_silent(report: Report) -> None:
    PROCESS.found(report)
    if not PROCESS.listeners:
        warnings.warn(message(report), SilentFindingWarning, stacklevel=2)


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
    listeners = PROCESS.listeners
    return listeners[-1].recorder if listeners else None


def evidence_of_call(call: GuardedCall, violation: Violation) -> Evidence:
    """Collect everything about a call that a guard has stopped; the context is alive."""
    limits = Limits()
    values = tensor_values(call.arguments)
    node = _torch.current_node()
    frames = limits.attempt("frames", lambda: calling_frames(in_backward=node is not None), [])
    site = limits.attempt("source", lambda: locate(frames, values), source.CallSite())
    recorder = _recorder()
    sequence_nr = None if node is None else _torch.node_sequence_nr(node)
    forward = limits.attempt("forward source", lambda: _forward(recorder, sequence_nr), None)
    bad = bad_key(violation)
    tensors = limits.attempt("tensors", lambda: tensor_facts(values, site, bad), ())
    name = str(call.op._schema.name)
    evidence = Evidence(
        violation=violation,
        op=OpName(name=name, overload=str(call.op._overloadname), api=site.api),
        phase=phase_of(frames, node),
        prevented=not violation.is_silent,
        context_usable=True,
        source=site.source,
        forward_source=forward[0] if forward else None,
        call_text=site.call_text,
        module_path=site.module_path or (forward[1] if forward else None),
        module_type=site.module_type,
        frames=site.frames,
        tensors=tensors,
        scalars=scalars_of(call.arguments),
        replay=limits.attempt(
            "replay",
            lambda: replay(call.op, call.args, call.kwargs, is_safe=violation.is_replay_safe),
            Replay(),
        ),
        device_text=violation.device_text,
        graph=limits.attempt(
            "graph",
            lambda: graph_of(values, name, bad, recorder, node, site),
            AutogradNeighbourhood(),
        ),
        environment=environment.describe(),
        libraries=libraries(),
    )
    evidence = with_recording(evidence, recorder, values.get(bad), violation, limits)
    return replace(evidence, limits=(*site.limits, *limits.lines))


def bad_key(violation: Violation) -> str:
    """Give the key of the tensor at fault among :func:`tensor_values`."""
    if violation.list_position is None:
        return violation.argument
    return f"{violation.argument}[{violation.list_position}]"


def tensor_values(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Give the tensors among the arguments, elements of lists as ``indices[1]``."""
    found: dict[str, Tensor] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, (list, tuple)):
            for position, item in enumerate(value):
                if isinstance(item, Tensor):
                    found[f"{name}[{position}]"] = item
    return found


def scalars_of(arguments: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Give the arguments that are plain numbers, texts or ``None``, as text."""
    return tuple(
        (name, str(value))
        for name, value in arguments.items()
        if value is None or isinstance(value, (bool, int, float, str))
    )


# --- the stack -----------------------------------------------------------------------------------


def calling_frames(*, in_backward: bool = False) -> list[FrameType]:
    """Give the Python frames of the running call, outermost first, without our own.

    In autograd's own threads there is no Python stack: the one of the thread that called
    ``backward`` stands in when exactly one thread is doing so.
    """
    frames = _stack(sys._getframe(1))
    if not in_backward or any(source.is_user_file(item.f_code.co_filename) for item in frames):
        return frames
    callers = [
        stack
        for frame in list(sys._current_frames().values())
        if _runs_backward(stack := _stack(frame))
    ]
    return callers[0] if len(callers) == 1 else frames


def _stack(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    while found and source.is_own_file(found[0].f_code.co_filename):
        found.pop(0)
    return found[::-1]


def _runs_backward(stack: Sequence[FrameType]) -> bool:
    return any(item.f_code.co_name == "_engine_run_backward" for item in stack[-3:])


def locate(
    frames: Sequence[FrameType | TracebackType], values: Mapping[str, Tensor]
) -> source.CallSite:
    """Find the user's line, his expressions for the tensors, the API and the module."""
    return source.locate(
        frames,
        values,
        same=_torch.same_tensor,
        is_tensor=lambda item: isinstance(item, Tensor),
    )


def phase_of(frames: Sequence[FrameType], node: Any) -> Phase:
    """Tell the phase: inside autograd's backward, inside an optimizer's step, or forward."""
    if node is not None:
        return "backward"
    for frame in reversed(frames):
        file = frame.f_code.co_filename.replace("\\", "/")
        if "/torch/optim/" in file:
            return "optimizer"
    return "forward"


def _forward(recorder: Any, sequence_nr: int | None) -> tuple[Any, str | None] | None:
    if recorder is None or sequence_nr is None:
        return None
    found = recorder.forward_site(sequence_nr)
    if found is None:
        return None
    entries, module_path = found
    return source.locate_entries(entries), module_path


# --- tensors, graph, recording -------------------------------------------------------------------


def tensor_facts(
    values: Mapping[str, Tensor], site: source.CallSite, bad: str | None, *, read: bool = True
) -> tuple[TensorFact, ...]:
    """Describe the op's tensors and the others on the failing line, the one at fault first read.

    A tensor that the user cannot see (an intermediate of a library) is left out when the line
    shows others, unless it is the one at fault.
    """
    named = {key: (text, span) for key, text, span in site.names}
    shown = {key: item for key, item in values.items() if key in named or key == bad}
    rest = [item for item in site.others if not _is_any(item.value, shown.values())]
    if not shown and not rest:
        shown = dict(values)
    facts = [
        _fact(key, tensor, *named.get(key, (None, None)), read=read)
        for key, tensor in shown.items()
    ]
    facts += [_fact(item.key, item.value, item.expression, item.span, read=read) for item in rest]
    return tuple(facts)


def _is_any(tensor: object, others: Any) -> bool:
    return any(_torch.same_tensor(tensor, other) for other in others)


def _fact(
    argument: str | None,
    tensor: Tensor,
    expression: str | None,
    span: tuple[int, int, int] | None,
    *,
    read: bool,
) -> TensorFact:
    meta = _torch.meta_of(tensor)
    summary = TensorSummary()
    if read and _torch.is_plain(tensor) and tensor.device.type != "meta":
        with _torch.plain_torch(), _torch.no_dispatch_modes(), contextlib.suppress(RuntimeError):
            summary = summarise(tensor)
    return TensorFact(
        argument=argument,
        expression=expression,
        shape=meta.shape,
        dtype=meta.dtype,
        device=meta.device,
        stride=meta.stride,
        requires_grad=meta.requires_grad,
        grad_fn=meta.grad_fn,
        summary=summary,
        span=span,
    )


def graph_of(
    values: Mapping[str, Tensor],
    op_name: str,
    bad: str | None,
    recorder: Any,
    node: Any,
    site: source.CallSite,
) -> AutogradNeighbourhood:
    """Draw the autograd graph around the failing op."""

    def where(sequence_nr: int) -> tuple[LineRef | None, str | None]:
        found = _forward(recorder, sequence_nr)
        if found is None or found[0] is None:
            return None, found[1] if found else None
        span = found[0]
        ref = LineRef(line=span.line, text=span.text, cell=span.cell, file=span.file)
        return ref, found[1]

    return autograd.neighbourhood(
        values, op_name=op_name, bad=bad, site=where, node=node, names=site.parameter_names
    )


def with_recording(
    evidence: Evidence, recorder: Any, bad: Tensor | None, violation: Violation, limits: Limits
) -> Evidence:
    """Add what the flight recorder knows: the last ops and the way of the bad values."""
    if recorder is None:
        return evidence
    history = limits.attempt("history", lambda: recorder.history(_HISTORY), ())
    provenance = ()
    if bad is not None:
        provenance = limits.attempt(
            "provenance", lambda: recorder.provenance(bad, breaks(violation)), ()
        )
    return replace(evidence, history=history, provenance=provenance)


def breaks(violation: Violation) -> Callable[[Tensor], bool]:
    """Give a test that tells whether a tensor holds a value outside the violated bound."""
    low, high = violation.bounds.min, violation.bounds.max
    also = violation.bounds.also_allowed

    def is_bad(tensor: Tensor) -> bool:
        if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
            return False
        inside = (tensor >= low) & (tensor <= high)
        for value in also:
            inside |= tensor == value
        return not bool(inside.all())

    return is_bad


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


def traceback_frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    """Give the entries of a traceback, outermost first, without our own."""
    while traceback is not None:
        if not source.is_own_file(traceback.tb_frame.f_code.co_filename):
            yield traceback
        traceback = traceback.tb_next
