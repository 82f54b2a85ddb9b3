"""Find the op that made the first NaN or infinity, forward or backward.

Each result is judged by its sum: one reduction and one number for the host.  Only when the sum is
not finite are the values looked at, and only values that were not among the inputs count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core.report_types import Bounds, Number, Offender, Offenders, Violation
from cudalens.core.tensor_values import find_offenders, number
from cudalens.recorder._torch import is_wrapped, physical
from cudalens.recorder.arguments import named_arguments
from cudalens.recorder.calls import FROM_PYTHON, Api, Write
from cudalens.recorder.tensor_refs import NO_TENSORS, tensors_in

OnNonFinite = Callable[[Mapping[str, Any], Violation], BaseException | None]
MAX_INPUTS = 3
_SOFTMAXES = ("softmax", "log_softmax")
_HANDFUL = 16
"""Values up to this number are added by Python, which is faster than any op of torch's."""
_MAX_NOTED = 4096
"""Number of calls with values that are not finite that are kept, as of calls in the ring."""


class NonFiniteWatch:
    """Called after each call; returns what ``on_found`` gives for one that makes a first NaN.

    Args:
        on_found: called with the call's arguments by name and the finding.
        recorder: returns the recorder that calls it.
    """

    def __init__(self, on_found: OnNonFinite, recorder: Callable[[], Any]) -> None:
        self._on_found = on_found
        self._recorder = recorder
        self._bad_calls: deque[int] = deque(maxlen=_MAX_NOTED)
        """Numbers of the calls that gave values that are not finite, or passed them on."""

    def __call__(
        self,
        api: Api,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        result: Any,
        written: Sequence[Write],
    ) -> BaseException | None:
        """Judge one call; a result that merely passes a non-finite input on is not its making."""
        # The usual results first: every call pays for it.
        kind = result.__class__
        if kind is Tensor and not _torch.has_dispatch_modes() and _is_surely_finite(result):
            return None
        if kind in NO_TENSORS and not written:
            return None
        overwritten = [item for write in written if (item := write.tensor()) is not None]
        look = self._judge
        return _torch.without_modes(look, api, args, kwargs or {}, result, overwritten)  # type: ignore[no-any-return]

    def of_node(self, node: Any, made: Sequence[Any], grads: Sequence[Any]) -> BaseException | None:
        """Judge the gradients that a node of a backward pass made."""
        if not _torch.has_dispatch_modes():
            with _torch.Unseen():
                made = _doubtful(made)
        return _torch.without_modes(self._judge_node, node, made, grads) if made else None

    def _judge_node(
        self, node: Any, made: Sequence[Any], grads: Sequence[Any]
    ) -> BaseException | None:
        inputs = _floats(grads)
        for tensor in _suspects(made):
            values = physical(tensor)
            bad = ~torch.isfinite(values)
            if bool(bad.any()) and all(map(_is_finite, inputs)):
                offenders = find_offenders(_real(values), bad)
                name = node.name().rpartition("::")[2]
                violation = Violation(
                    guard="nonfinite",
                    op=name,
                    headline=_headline(f"the backward node {name}", offenders.first[0], ()),
                    explanation=_how_many(offenders, has_infinite_inputs=False),
                    offenders=offenders,
                    is_index=False,
                    is_nonfinite=True,
                )
                return self._on_found({"gradient": inputs[0]} if inputs else {}, violation)
        return None

    def _judge(
        self,
        api: Api,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        written: Sequence[Tensor],
    ) -> BaseException | None:
        lost = {id(item) for item in written}
        for tensor in _suspects(written if result is None else (result,)):
            values = physical(tensor)
            bad = ~torch.isfinite(values)
            if not bool(bad.any()):
                continue
            self._bad_calls.append(self._recorder().recorded_ops)
            has_nan = bool(values.isnan().any())
            inputs = [item for item in _floats((*args, *kwargs.values())) if id(item) not in lost]
            with_nan = [item for item in map(physical, inputs) if bool(item.isnan().any())]
            numbers = [item for item in (*args, *kwargs.values()) if isinstance(item, float)]
            if api.stem in FROM_PYTHON or not all(map(math.isfinite, numbers)):
                continue  # it was asked for: ``masked_fill(mask, -inf)``
            if id(tensor) in lost and not all(map(self._was_finite, written)):
                continue  # overwritten in place: what it contained before is gone
            # NaN out of infinities is new; an infinity out of infinities is not.
            is_old = with_nan if has_nan else not all(map(_is_finite, map(physical, inputs)))
            if not is_old:
                arguments = named_arguments(api.func, args, kwargs)
                return self._on_found(arguments, _violation(api, arguments, values, bad, lost))
        return None

    def _was_finite(self, tensor: Tensor) -> bool:
        """Return whether a tensor that the running call has overwritten was last made finite."""
        recorder = self._recorder()
        snapshot = recorder.snapshot()
        call = snapshot.newest(snapshot.whole(ref(tensor)), before=recorder.recorded_ops)
        return call is not None and call.api.makes_values and call.seq not in self._bad_calls


def _suspects(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors whose sum is not finite."""
    for tensor in _floats(values):
        if not math.isfinite(abs(physical(tensor).sum().item())):
            yield tensor


def _doubtful(values: Iterable[Any]) -> list[Any]:
    """Return the tensors that are not surely finite."""
    return [item for item in values if item is not None and not _is_surely_finite(item)]


def _is_surely_finite(tensor: Tensor) -> bool:
    """Return whether a tensor on the CPU has no NaN and no infinity, by its sum.

    ``False`` where its values have to be looked at in another way.
    """
    if not tensor.is_floating_point():
        return not tensor.is_complex()
    is_plain = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested
    if not is_plain or is_wrapped(tensor):
        return False
    count = tensor.numel()
    if count == 1:
        return math.isfinite(tensor.item())
    if count > _HANDFUL:
        values = tensor.detach() if tensor.requires_grad else tensor
        return math.isfinite(values.sum().item())
    numbers: Any = tensor.tolist()
    for _ in range(tensor.dim() - 1):
        numbers = chain.from_iterable(numbers)
    return math.isfinite(sum(numbers))


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _floats(values: Iterable[Any]) -> list[Tensor]:
    return list(filter(_has_floats, tensors_in(values)))


def _has_floats(tensor: Tensor) -> bool:
    is_inexact = tensor.is_floating_point() or tensor.is_complex()
    return bool(
        is_inexact
        and tensor.numel()
        and not tensor.is_meta
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and _torch.is_plain(tensor)
    )


def _real(tensor: Tensor) -> Tensor:
    return tensor.abs() if tensor.is_complex() else tensor


def _violation(
    api: Api, arguments: Mapping[str, Any], result: Tensor, bad: Tensor, lost: Container[int]
) -> Violation:
    offenders = find_offenders(_real(result), bad)
    first = offenders.first[0]
    # What the call wrote to no longer has the values that it was given.
    overwritten = [key for key, value in arguments.items() if id(value) in lost]
    written = [arguments[key] for key in overwritten]
    read = {key: value for key, value in arguments.items() if key not in overwritten}
    beside = _beside(api, read, written, result)
    numbers = {key: value for key, value in read.items() if type(value) in (int, float)}
    at_first = {key: _value(it, first) for key, it in beside.items()} | numbers
    inputs = tuple((key, str(value)) for key, value in at_first.items())[:MAX_INPUTS]
    if api.stem in _SOFTMAXES and _has_infinity(read):
        inputs = ()  # what made the result is another element of the row
    listed = tuple(
        replace(item, inputs=tuple((key, _value(it, item)) for key, it in beside.items()))
        for item in offenders.first
    )
    return Violation(
        guard="nonfinite",
        op=api.name,
        argument="",
        headline=_headline(api.name, first, inputs),
        explanation=_how_many(offenders, has_infinite_inputs=_has_infinity(read)),
        offenders=replace(offenders, first=listed),
        bounds=Bounds(),
        is_index=False,
        is_nonfinite=True,
        inputs=inputs,
        overwritten=tuple(overwritten),
        is_masked_row=_is_masked_row(api.stem, read, first),
    )


def _headline(op: str, first: Offender, inputs: Sequence[tuple[str, str]]) -> str:
    """Say what an op made and where, and of what, by the names of its inputs."""
    at = f"[{', '.join(map(str, first.position))}]" if first.position else "its result"
    named = (f"{{input:{name}}} = {value}" for name, value in inputs)
    origin = f" from {', '.join(named)}" if inputs else ""
    return f"{op} made {first.value} at {at}{origin}"


def _how_many(offenders: Offenders, *, has_infinite_inputs: bool) -> str:
    """Say how much of the result is bad; a NaN may be new where infinities came in."""
    before = "all values of the inputs were finite"
    if has_infinite_inputs:
        before = "the inputs contained infinities, but no NaN"
    if offenders.total == 1:
        return f"The result is not finite; {before}."
    verb = "is" if offenders.count == 1 else "are"
    return (
        f"{offenders.count} of {offenders.total} values of the result {verb} not finite; {before}."
    )


def _has_infinity(arguments: Mapping[str, Any]) -> bool:
    return any(bool(item.isinf().any()) for item in _floats(arguments.values()))


def _is_masked_row(name: str, arguments: Mapping[str, Any], first: Offender) -> bool:
    """Return whether a softmax was given a row of -inf alone: every place of it was masked."""
    scores, dim = arguments.get("self", arguments.get("input")), arguments.get("dim")
    if name not in _SOFTMAXES or not isinstance(scores, Tensor) or not isinstance(dim, int):
        return False
    at: list[Any] = list(first.position)
    if not at:
        return False
    at[dim] = slice(None)
    return bool(scores[tuple(at)].isneginf().all())


def _beside(
    api: Api, arguments: Mapping[str, Any], written: Sequence[Any], result: Tensor
) -> dict[str, Tensor]:
    """Return the inputs in the shape of the result, each element beside the one it went into.

    Only an elementwise op has such inputs, whatever the shapes of another's; and an input that
    shares memory with what the op wrote to has lost its values.
    """
    if not api.is_positional and api.stem not in _SOFTMAXES:
        return {}
    lost = {id(_origin(item)) for item in written if isinstance(item, Tensor)}
    inputs = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and _torch.is_plain(value) and id(_origin(value)) not in lost:
            try:
                inputs[name] = value.detach().expand(result.shape)
            except RuntimeError:  # an op may have an argument of another kind besides
                continue
    return dict(list(inputs.items())[:MAX_INPUTS])


def _origin(tensor: Tensor) -> Tensor:
    base = _torch.base_of(tensor)
    return tensor if base is None else base


def _value(tensor: Tensor, at: Offender) -> Number:
    value = tensor[at.position].item()
    return str(value) if isinstance(value, complex) else number(value)
