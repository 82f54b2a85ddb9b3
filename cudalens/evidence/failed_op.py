"""Say what the recorder knows of the op that an exception came out of.

Everything comes from host memory: metadata noted before the call, and the copies of an extension's
arguments, so it is known after the device's context is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cudalens.core._torch import op_of
from cudalens.core.limits import Limits
from cudalens.core.report_types import (
    OpName,
    Phase,
    Replay,
    SourceSpan,
    TensorFact,
    TensorMeta,
    TensorSummary,
)
from cudalens.core.tensor_values import summarise
from cudalens.diagnosis.host_errors import is_sticky
from cudalens.evidence.finding import FORWARD_CALL, forward_place
from cudalens.evidence.replay import replay
from cudalens.evidence.tensors import of_meta
from cudalens.source.locate import CallSite, locate_entries
from cudalens.source.stack import frames_of


@dataclass(frozen=True, kw_only=True)
class FailedOp:
    """What the recorder knows of the op that an exception came out of."""

    name: OpName = field(default_factory=OpName)
    phase: Phase | None = None
    source: SourceSpan | None = None
    forward_source: SourceSpan | None = None
    module_path: str | None = None
    tensors: tuple[TensorFact, ...] = ()
    replay: Replay = field(default_factory=Replay)
    previous_op: str | None = None


def failed_record(recorder: Any, error: BaseException, *, is_lost: bool) -> tuple[Any, bool]:
    """Return the recorder's note of the op that raised, and whether it had raised before.

    Where the device's context had ended before, it is the op that ended it.
    """
    if recorder is None:
        return None, False
    if is_lost and recorder.is_over:
        if recorder.fatal is None:
            return None, False  # no call of the block's ended it
        record = recorder.fatal_call(error)
        if record is not None:
            return record, True
    return recorder.in_flight(error), False


def site_of_record(record: Any) -> CallSite:
    """Return the place of an op that is over, in place of that where its error was met again."""
    return CallSite(
        source=locate_entries(record.entries),
        frames=frames_of(record.entries),
        module_path=record.module_path,
    )


def failed_op(
    record: Any,
    recorder: Any,
    tensors: tuple[TensorFact, ...],
    limits: Limits,
) -> FailedOp:
    """Return the op, its arguments, its forward line and its replay.

    Args:
        tensors: of the user's call and line.
    """
    forward, module_path = limits.attempt(
        "forward source",
        lambda: forward_place(recorder, record.node_sequence_nr),
        lambda: (None, None),
        kind=tuple,
    )
    if record.node_sequence_nr is not None and forward is None:
        limits.add(recorder.beyond_ring(FORWARD_CALL, record.node_sequence_nr))
    return FailedOp(
        name=OpName(name=record.name, overload=record.overload),
        phase=record.phase,
        source=limits.attempt("source", lambda: locate_entries(record.entries)),
        forward_source=forward,
        module_path=record.module_path or module_path,
        tensors=_described(tensors, record, limits),
        replay=limits.attempt("replay", lambda: _replay(record), Replay),
        previous_op=None if recorder.is_synchronous else record.previous_op,
    )


def _described(
    tensors: tuple[TensorFact, ...], record: Any, limits: Limits
) -> tuple[TensorFact, ...]:
    """Put the op's own arguments first, with what was copied of their values before the call."""
    known = {item.argument: item for item in tensors if item.argument is not None}
    found = []
    for key, meta in (pair for item in record.arguments for pair in item.keyed):
        fact = known.pop(key, None) or of_meta(key, meta)
        copy = record.host_copies.get(key)
        if copy is not None and not isinstance(copy, (list, tuple)):
            read = partial(summarise, copy)
            fact = replace(fact, summary=limits.attempt("values", read, TensorSummary))
        found.append(fact)
    rest = [item for item in tensors if item.argument is None or item.argument in known]
    # What has no name of the user's is an argument of the function that they called, not of the op.
    return (*found, *(item for item in rest if item.expression is not None))


def _replay(record: Any) -> Replay:
    """Run an extension's op again on the host copies; what was not copied becomes zeros."""
    if not record.host_copies:
        return Replay()  # torch's own ops raise on the host by themselves
    if record.call is None:
        return Replay(reason="the op was given something that cannot be kept for a second call")
    op = op_of(f"{record.name}.{record.overload or 'default'}")
    zeros: list[str] = []
    values = {
        name: _value(name, value, record.host_copies, zeros) for name, value in record.call.items()
    }
    positional = [item.name for item in op._schema.arguments if not item.kwarg_only]
    result = replay(
        op,
        tuple(values[name] for name in positional if name in values),
        {name: value for name, value in values.items() if name not in positional},
    )
    if result.outcome == "raised" and is_sticky(result.message or ""):
        return Replay(reason="the op's CPU kernel needs the GPU, which is lost")
    if zeros and result.outcome != "unavailable":
        return replace(result, reason=f"{', '.join(zeros)} replayed as zeros: not copied in time")
    return result


def _value(key: str, value: Any, copies: Mapping[str, Tensor], zeros: list[str]) -> Any:
    """Return an argument of the host's: a copy, or zeros where a tensor was not copied."""
    if isinstance(value, list):
        return [_value(f"{key}[{n}]", item, copies, zeros) for n, item in enumerate(value)]
    if not isinstance(value, TensorMeta) or key in copies:
        return copies.get(key, value)
    zeros.append(key)
    # Named: the user's default device may be the one that is lost.
    return torch.zeros(value.shape, dtype=getattr(torch, value.dtype), device="cpu")
