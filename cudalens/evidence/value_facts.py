"""Facts about a bad value: its bound, its marks, the origin of a NaN."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from weakref import ref

from torch import Tensor

from cudalens.core import _torch
from cudalens.core.api_names import stem_of
from cudalens.core.evidence_types import (
    AddedNumber,
    BoundOrigin,
    Marks,
    NanCause,
    NanHolder,
    ShortInput,
)
from cudalens.core.graph_types import FIRST_BAD, FIRST_NAN, WRITES, ProvenanceStep
from cudalens.core.report_types import LineRef
from cudalens.core.tensor_values import find_offenders
from cudalens.core.torch_functions import is_in_place
from cudalens.diagnosis.user_code import statement_of
from cudalens.evidence.added import added_number
from cudalens.evidence.bound import bound_origin
from cudalens.evidence.call_stack import held_name, visible_parameters
from cudalens.evidence.ctc import short_input
from cudalens.evidence.failure import FailureContext, bad_places
from cudalens.evidence.marks import marks_of, nan_slice, vanished
from cudalens.evidence.python_values import computed_lines
from cudalens.evidence.recorded_way import sources_of
from cudalens.guards._ranges import breaks
from cudalens.recorder.earlier_calls import GIVING
from cudalens.recorder.provenance import Provenance

_OUT_OF_RANGE = "selected index k out of range"
_MAX_READ = 1 << 26
"""How many parameter values are searched for a NaN of unknown origin."""


def nan_holder(failure: FailureContext, origin: Tensor | None) -> NanHolder | None:
    """Return the named tensor that a NaN came from.

    If the NaN cannot be traced, the first parameter with one, among those read on the way if known.
    """
    violation, frames = failure.violation, failure.frames
    assert violation is not None
    name = None if origin is None else held_name(origin, frames)
    if origin is not None and name is not None:
        return _holding(name, origin)
    first = violation.offenders.first[:1]
    if violation.is_nonfinite or not first or first[0].value != "nan":
        return None
    on_the_way = _ids_on_the_way(failure)
    with _torch.no_dispatch_modes(), _torch.plain_torch():
        return _parameter_with_nan(failure, on_the_way)


def _parameter_with_nan(failure: FailureContext, on_the_way: set[int] | None) -> NanHolder | None:
    """Return the first of the user's parameters that contains a NaN.

    Args:
        on_the_way: ids of the tensors read on the way to the failing call, ``None`` if unknown.
    """
    room = _MAX_READ
    for name, parameter in visible_parameters(failure.frames):
        if on_the_way is not None and id(parameter) not in on_the_way:
            continue  # a model of an earlier cell may contain NaN, too
        room -= parameter.numel()
        if room < 0:
            return None
        if (held := _holding(name, parameter)) is not None:
            written = _writers_of_nan(failure, parameter, held)
            return replace(
                held,
                name=held_name(parameter, failure.frames) or name,
                is_read=False,
                written=written,
                changed=None if written else _last_change(failure, parameter),
            )
    return None


def _ids_on_the_way(failure: FailureContext) -> set[int] | None:
    """Return the ids of the tensors that led to the bad one, if its maker is recorded."""
    tensor = failure.bad
    if tensor is None or failure.recorder is None:
        return None
    snapshot = failure.recorder.snapshot()
    if snapshot.maker(ref(tensor)) is None:
        return None
    return {id(it) for it in sources_of(tensor, snapshot)}


def _writers_of_nan(
    failure: FailureContext, tensor: Tensor, held: NanHolder
) -> tuple[LineRef, ...]:
    """Return the lines that wrote NaN to some or all elements of a tensor."""
    if failure.recorder is None or failure.violation is None:
        return ()
    positions, is_nan = [item.position for item in held.nan.first], breaks(failure.violation)
    way = failure.recorder.provenance(tensor, is_nan, positions, tensor.detach().isnan())
    lines = (step.source for step in way.steps if step.source and _writes_nan(step))
    return tuple(dict.fromkeys(lines))


def _last_change(failure: FailureContext, tensor: Tensor) -> LineRef | None:
    """Return the last line of this block that wrote to a tensor, if all writes were recorded."""
    if failure.recorder is None:
        return None
    snapshot = failure.recorder.snapshot()
    writes = snapshot.writes_to(ref(tensor))
    # `>`, because a write through `.data` bumps another counter.
    if not writes or tensor._version > max(write.after for _, write in writes):
        return None
    call = writes[-1][0]
    # An array may have written to the memory since, whenever it was taken, and ``p.data = x`` after
    # the write gives the parameter another memory.
    is_hidden = any(
        it.api.stem in GIVING
        or (it.api.stem == "data" and len(it.inputs) > 1 and it.seq > call.seq)
        for it in (*snapshot.earlier.calls, *snapshot.calls)
    )
    return snapshot.reader.line(call.site) if call.seq > 0 and not is_hidden else None


def _writes_nan(step: ProvenanceStep) -> bool:
    return step.note == f"{WRITES} nan" or (
        step.note == FIRST_BAD and is_in_place(stem_of(step.op or ""))
    )


def nan_cause(way: Provenance) -> NanCause | None:
    """Return why a softmax has made NaN, from its input.

    A row with finite scores beside -inf gives no NaN.
    """
    given, makers = way.given, [item for item in way.steps if item.note == FIRST_NAN]
    is_softmax = [stem_of(item.op or "") for item in makers] in (["softmax"], ["log_softmax"])
    if given is None or not is_softmax or given.is_meta or not _torch.is_plain(given):
        return None
    with _torch.no_dispatch_modes(), _torch.plain_torch():
        has_inf, has_minus_inf = bool(given.isposinf().any()), bool(given.isneginf().any())
    if has_inf and has_minus_inf:
        return None  # there are rows of both kinds, so the cause is ambiguous
    return "infinity" if has_inf else "masked row" if has_minus_inf else None


def _holding(name: str, tensor: Tensor) -> NanHolder | None:
    if not tensor.is_floating_point() or not _torch.is_plain(tensor):
        return None
    nan = find_offenders(tensor, tensor.detach().isnan())
    return NanHolder(name=name, nan=nan) if nan.count else None


def bound_of(failure: FailureContext) -> BoundOrigin | None:
    """Return where the size behind the bound was chosen, or a ``k`` that is out of range."""
    violation, recorder = failure.violation, failure.recorder
    running = None if failure.trial is None else failure.trial.line.running
    if violation is None:
        number = failure.arguments.get("k") if _OUT_OF_RANGE in failure.message else None
        if type(number) is not int or running is None:
            return None
        return bound_origin(
            None, size=number, dim=None, snapshot=None, frames=failure.frames, line=running
        )
    if not violation.size or violation.is_nonfinite:
        return None
    own = failure.values.get(violation.related or "self")
    bad = failure.bad
    # A torch function may pass its op another tensor than its argument, or a number.
    given = [it for it in (own, *(value for _, value in failure.named)) if isinstance(it, Tensor)]
    fitting = [it for it in given if it is not bad and violation.size in it.shape]
    find = partial(
        bound_origin,
        size=violation.size,
        snapshot=None if recorder is None else recorder.snapshot(),
        frames=failure.frames,
        line=running,
    )
    dims = [violation.dim if own is not None and it.shape == own.shape else None for it in fitting]
    found = (find(it, dim=dim) for it, dim in [*zip(fitting, dims, strict=True), (None, None)])
    with _torch.no_dispatch_modes(), _torch.plain_torch():
        return next((it for it in found if it is not None), None)


def marks_of_finding(failure: FailureContext) -> Marks:
    """Return the marks of the bad values."""
    violation, way, trial = failure.violation, failure.way, failure.trial
    assert violation is not None
    if violation.is_nonfinite:
        statement = None if trial is None else trial.line.running.statement
        if (node := failure.call.node) is not None:  # its forward call was on another line
            place = failure.forward_call(node.sequence_nr)[0]
            statement = None if place is None else statement_of(place.text)
        of_nan = failure.limits.attempt("NaN", partial(_of_nan, failure), Marks)
        return replace(
            of_nan, vanished=vanished(statement, violation.dtype), short_input=_of_ctc(failure)
        )
    tensor = failure.bad
    bad = None if tensor is None else bad_places(violation, tensor)
    if tensor is None or bad is None:
        return _of_nan(failure)
    plain = named_tensors(failure)
    with _torch.no_dispatch_modes(), _torch.plain_torch():
        marks = marks_of(
            violation, tensor, bad, others=plain, steps=way.steps, frames=failure.frames
        )
    lines = computed_lines(way.entry, way.origin, failure.frames)
    length = failure.limits.attempt("length", partial(_length, failure))
    added = failure.limits.attempt("sum", partial(_added, failure, tensor, bad))
    return replace(marks, computed=lines, aliases=_aliases(way), length=length, added=added)


def _added(failure: FailureContext, tensor: Tensor, bad: Tensor) -> AddedNumber | None:
    """Return the number that an earlier line added to the bad values."""
    violation, recorder = failure.violation, failure.recorder
    if violation is None or recorder is None:
        return None
    with _torch.no_dispatch_modes(), _torch.plain_torch():
        return added_number(violation, tensor, bad, recorder.snapshot(), failure.frames)


def _of_nan(failure: FailureContext) -> Marks:
    """Return the position of a NaN that the tensor already had, and the lines that computed it."""
    tensor = failure.bad
    if tensor is None or not tensor.is_floating_point() or not _torch.is_plain(tensor):
        return Marks()
    with _torch.no_dispatch_modes(), _torch.plain_torch():
        if not bool(tensor.detach().isnan().any()):
            return Marks()
        found, way = nan_slice(tensor, named_tensors(failure)), failure.way
    return Marks(in_slice=found, computed=computed_lines(way.entry, way.origin, failure.frames))


def _of_ctc(failure: FailureContext) -> ShortInput | None:
    """Return the item with too few steps, if ``ctc_loss`` made an infinity."""
    violation, op = failure.violation, failure.call.op
    is_ctc = violation is not None and "ctc_loss" in stem_of(violation.op)
    first = violation.offenders.first[:1] if violation is not None else ()
    if not is_ctc or op is None or not first or first[0].value != "inf":
        return None
    return failure.limits.attempt("CTC", partial(short_input, op.arguments))


def named_tensors(failure: FailureContext) -> list[tuple[str, Tensor]]:
    """Return the tensors on the user's line, by expression."""
    site = failure.site
    named = [(str(it.expression), failure.values[it.key]) for it in site.names]
    named += [(str(it.expression), it.value) for it in site.others if isinstance(it.value, Tensor)]
    return [(name, it) for name, it in named if _torch.is_plain(it)]


def _length(failure: FailureContext) -> BoundOrigin | None:
    """Return where the length of the ids was chosen that a library made positions from."""
    violation, site = failure.violation, failure.site
    last = None if violation is None else violation.offenders.max
    bad = failure.bad
    is_run = bad is not None and isinstance(last, int) and bad.shape[-1:] == (last + 1,)
    if (
        not is_run
        or not isinstance(last, int)
        or any(failure.values[it.key] is bad for it in site.names)
    ):
        return None
    for item in site.others:
        value = item.value
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == last + 1:
            return bound_origin(
                value,
                size=last + 1,
                dim=1,
                snapshot=None if failure.recorder is None else failure.recorder.snapshot(),
                frames=failure.frames,
                line=None,
            )
    return None


def _aliases(way: Provenance) -> tuple[str, ...]:
    """Return the keys of a batch that hold the tensor with the bad values."""
    batch = way.batch
    if batch is None or batch.is_stacked:
        return ()
    own = batch.tensors[batch.at]
    pairs = zip(batch.keys, batch.tensors, strict=True)
    keys = [str(key) for key, tensor in pairs if tensor is own and key is not None]
    return tuple(sorted(keys)) if len(keys) > 1 else ()
