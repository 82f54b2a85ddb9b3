"""Say what the recorder knows of the op that an exception came out of.

Everything comes from host memory, so it is known after the device's context is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cudalens.core.limits import Limits
from cudalens.core.report_types import (
    OpName,
    Phase,
    SourceSpan,
    TensorFact,
)
from cudalens.evidence.finding import FORWARD_CALL, forward_place
from cudalens.evidence.tensors import of_meta
from cudalens.source.locate import CallSite, locate_entries
from cudalens.source.stack import frames_of


@dataclass(frozen=True, kw_only=True)
class FailedOp:
    """The recorder's facts on the op that raised an exception."""

    name: OpName = field(default_factory=OpName)
    phase: Phase | None = None
    source: SourceSpan | None = None
    forward_source: SourceSpan | None = None
    module_path: str | None = None
    tensors: tuple[TensorFact, ...] = ()


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
    """Return the op, its arguments and its forward line.

    Args:
        tensors: of the user's call and line.
    """
    number = None if record.node is None else record.node.sequence_nr
    forward, module_path = limits.attempt(
        "forward source",
        lambda: forward_place(recorder, number),
        lambda: (None, None),
        kind=tuple,
    )
    if number is not None and forward is None:
        limits.add(recorder.beyond_ring(FORWARD_CALL, number))
    return FailedOp(
        name=OpName(name=record.name, overload=record.overload),
        phase=record.phase,
        source=limits.attempt("source", lambda: locate_entries(record.entries)),
        forward_source=forward,
        module_path=record.module_path or module_path,
        tensors=_described(tensors, record),
    )


def _described(tensors: tuple[TensorFact, ...], record: Any) -> tuple[TensorFact, ...]:
    """Return the op's own arguments, then the others of the line."""
    facts = {item.argument: item for item in tensors if item.argument is not None}
    own = [
        facts.pop(key) if key in facts else of_meta(key, meta)
        for key, meta in record.tensors.items()
    ]
    rest = [item for item in tensors if item.argument is None or item.argument in facts]
    # What has no name of the user's is an argument of the function that they called, not of the op.
    return (*own, *(item for item in rest if item.expression is not None))
