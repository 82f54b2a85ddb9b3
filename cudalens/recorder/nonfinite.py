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
from cudalens.core._python import raise_if_outside
from cudalens.core.report_types import Number, Offender, Offenders, Violation
from cudalens.core.tensor_values import find_offenders, number
from cudalens.recorder._torch import is_wrapped, physical
from cudalens.recorder.arguments import named_arguments
from cudalens.recorder.calls import FROM_PYTHON, Api, Write, is_pointwise
from cudalens.recorder.tensor_refs import NO_TENSORS, tensors_in

OnNonFinite = Callable[[Mapping[str, Any], Violation], BaseException | None]
MAX_INPUTS = 3
_SOFTMAXES = ("softmax", "log_softmax")
_SAVED = ("self", "result", "exponent", "other")
"""Attributes of the nodes of elementwise ops, without their prefix ``_saved_``."""
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
                made = _suspects(made)
        return _torch.without_modes(self._judge_node, node, made, grads) if made else None

    def _judge_node(
        self, node: Any, made: Sequence[Any], grads: Sequence[Any]
    ) -> BaseException | None:
        inputs = _floats(grads)
        for _, values, bad in _nonfinite(made):
            if all(map(_is_finite, inputs)):
                name = node.name().rpartition("::")[2]
                offenders = find_offenders(_real(values), bad)
                first = offenders.first[0]
                beside = _beside_of_node(node, name, inputs, values.shape).items()
                at_first = ((key, str(_value(it, first))) for key, it in beside)
                violation = _violation(
                    name,
                    f"the backward node {name}",
                    offenders,
                    inputs=tuple(at_first),
                    dtype=_torch.dtype_name(values.dtype),
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
        for tensor, values, bad in _nonfinite(written if result is None else (result,)):
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
                violation = _violation_of_call(api, arguments, values, bad, lost)
                return self._on_found(arguments, violation)
        return None

    def _was_finite(self, tensor: Tensor) -> bool:
        """Return whether a tensor that the running call has overwritten was last made finite."""
        recorder = self._recorder()
        snapshot = recorder.snapshot()
        call = snapshot.newest(snapshot.whole(ref(tensor)), before=recorder.recorded_ops)
        return call is not None and call.api.makes_values and call.seq not in self._bad_calls


def _nonfinite(values: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the tensors with values that are not finite, those values and where they are so."""
    for tensor in _floats(values):
        own = physical(tensor)
        if not math.isfinite(abs(own.sum().item())):
            bad = ~torch.isfinite(own)
            if bool(bad.any()):  # finite values may have a sum that is not
                yield tensor, own, bad


def _suspects(values: Iterable[Any]) -> list[Any]:
    """Return the values that may have a NaN or an infinity."""
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
    """Return the tensors whose values can be read and may be not finite."""
    return [
        item
        for item in tensors_in(values)
        if (item.is_floating_point() or item.is_complex())
        and item.numel()
        and not item.is_meta
        and item.layout == torch.strided
        and not item.is_nested
        and _torch.is_plain(item)
    ]


def _real(tensor: Tensor) -> Tensor:
    return tensor.abs() if tensor.is_complex() else tensor


def _violation_of_call(
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
    has_infinity = any(bool(item.isinf().any()) for item in _floats(read.values()))
    if api.stem in _SOFTMAXES and has_infinity:
        inputs = ()  # what made the result is another element of the row
    listed = tuple(
        replace(item, inputs=tuple((key, _value(it, item)) for key, it in beside.items()))
        for item in offenders.first
    )
    return _violation(
        api.name,
        api.name,
        replace(offenders, first=listed),
        has_infinite_inputs=has_infinity,
        inputs=inputs,
        overwritten=tuple(overwritten),
        dtype=_torch.dtype_name(result.dtype),
        is_masked_row=_is_masked_row(api.stem, read, first),
    )


def _violation(
    op: str,
    maker: str,
    offenders: Offenders,
    *,
    has_infinite_inputs: bool = False,
    inputs: tuple[tuple[str, str], ...] = (),
    **facts: Any,
) -> Violation:
    """Say what made how many bad values and where, and of what, by the names of its inputs.

    Args:
        maker: the op in the words of the headline.
        has_infinite_inputs: a NaN may be new where infinities came in.
    """
    first = offenders.first[0]
    at = f"[{', '.join(map(str, first.position))}]" if first.position else "its result"
    named = ", ".join(f"{{input:{name}}} = {value}" for name, value in inputs)
    before = "all values of the inputs were finite"
    if has_infinite_inputs:
        before = "the inputs contained infinities, but no NaN"
    bad = "The result is"
    if offenders.total > 1:
        verb = "is" if offenders.count == 1 else "are"
        bad = f"{offenders.count} of {offenders.total} values of the result {verb}"
    return Violation(
        guard="nonfinite",
        op=op,
        headline=f"{maker} made {first.value} at {at}{' from ' if inputs else ''}{named}",
        explanation=f"{bad} not finite; {before}.",
        offenders=offenders,
        is_index=False,
        is_nonfinite=True,
        inputs=inputs,
        **facts,
    )


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


def _beside_of_node(
    node: Any, name: str, grads: Sequence[Tensor], shape: Sequence[int]
) -> dict[str, Tensor]:
    """Return the gradient of a node, and what it saved, each element beside the one it went into.

    Of nodes of elementwise ops alone.
    """
    if not is_pointwise(name.partition("Backward")[0].lower()):
        return {}
    inputs = {"gradient": grads[0]} if len(grads) == 1 else {}
    for key in _SAVED:
        try:
            value = getattr(node, f"_saved_{key}", None)
            inputs |= {} if value is None else {key: torch.as_tensor(value).detach().expand(shape)}
        except Exception as trouble:  # it was changed in place, or a hook for saved tensors raised
            raise_if_outside(trouble)
    return {key: value for key, value in inputs.items() if _torch.is_plain(value)}


def _origin(tensor: Tensor) -> Tensor:
    base = _torch.base_of(tensor)
    return tensor if base is None else base


def _value(tensor: Tensor, at: Offender) -> Number:
    value = tensor[at.position].item()
    return str(value) if isinstance(value, complex) else number(value)
