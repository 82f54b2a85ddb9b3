"""Find non-finite values in results and gradients, and describe them."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core._python import raise_if_outside
from cudalens.core.evidence_types import SavedValues
from cudalens.core.report_types import Number, Offender, Offenders, Violation
from cudalens.core.tensor_values import find_offenders, number, short
from cudalens.recorder._torch import is_wrapped, physical
from cudalens.recorder.calls import Api, is_pointwise
from cudalens.recorder.tensor_refs import tensor_values, tensors_in

MAX_INPUTS = 3
_SOFTMAXES = ("softmax", "log_softmax")
_SAVED = ("self", "result", "exponent", "other")
"""Attributes of the nodes of elementwise ops, without their prefix ``_saved_``."""
_STEEP = re.compile(
    "(R?[Ss]qrt|Reciprocal|Pow|Log|Log2|Log10|Log1P|Exp|LinalgVectorNorm|Norm|Acosh?|Asin|Atanh|Div)Backward"
)
"""Nodes whose derivative is infinite or undefined somewhere."""
_HANDFUL = 16
"""Up to this many values are summed in Python, which is faster than calling a torch op."""


def nonfinite(values: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each tensor with non-finite values, its values as a plain tensor, and their mask."""
    for tensor in floats(values):
        own = physical(tensor)
        # `abs`, because a complex sum is no number for `isfinite`.
        if not math.isfinite(abs(own.sum().item())):
            bad = ~torch.isfinite(own)
            if bool(bad.any()):  # a sum of finite values may overflow
                yield tensor, own, bad


def suspects(values: Iterable[Any]) -> list[Any]:
    """Return the tensors that may contain a NaN or an infinity."""
    return [item for item in values if item is not None and not is_surely_finite(item)]


def is_surely_finite(tensor: Tensor) -> bool:
    """Return whether the sum of a CPU tensor proves that all its values are finite.

    ``False`` also for tensors that cannot be checked so cheaply.
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
        # With the graph, the sum would make a node and take one of its sequence numbers.
        values = tensor.detach() if tensor.requires_grad else tensor
        return math.isfinite(values.sum().item())
    numbers: Any = tensor.tolist()
    for _ in range(tensor.dim() - 1):
        numbers = chain.from_iterable(numbers)
    return math.isfinite(sum(numbers))


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite."""
    return bool(torch.isfinite(tensor).all())


def floats(values: Iterable[Any]) -> list[Tensor]:
    """Return the readable tensors of a floating-point or complex dtype."""
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


def real(tensor: Tensor) -> Tensor:
    """Return the values, or the absolute values of a complex tensor."""
    return tensor.abs() if tensor.is_complex() else tensor


def violation_of_call(
    api: Api,
    arguments: Mapping[str, Any],
    result: Tensor,
    bad: Tensor,
    lost: Container[int],
    at: int | None = None,
) -> Violation:
    """Describe the non-finite values that a call has made, and the inputs at their position.

    Args:
        lost: the ``id`` of each tensor that the call has overwritten, so that its input is gone.
        at: the index of the result, for a call on lists of tensors.
    """
    if at is not None:
        arguments = _items(arguments, at)
    offenders = find_offenders(real(result), bad)
    first = offenders.first[0]
    arguments = {key: item for key, item in arguments.items() if key != "out"}
    overwritten = [
        key for key, item in arguments.items() if any(id(it) in lost for it in tensors_in([item]))
    ]
    written = tensors_in([arguments[key] for key in overwritten])
    read = {key: item for key, item in arguments.items() if key not in overwritten}
    beside = operands_beside(api, read, written, result, is_listed=at is not None)
    operands = floats(read.values())
    has_infinity = any(bool(item.isinf().any()) for item in operands)
    inputs: dict[str, Number] = {}
    largest: dict[str, Number] = {}
    if api.is_positional or at is not None:
        numbers = {key: item for key, item in read.items() if type(item) in (int, float)}
        inputs = {key: value_at(item, first) for key, item in beside.items()}
        inputs |= {key: item for key, item in numbers.items() if key in _OPERANDS}
    elif not has_infinity and api.stem not in _SOFTMAXES:
        largest = _largest(tensor_values(read))
    elif not (has_infinity and api.stem in _SOFTMAXES):  # there another element of the row did it
        inputs = {key: value_at(item, first) for key, item in beside.items()}
    listed = tuple(
        replace(item, inputs=tuple((key, value_at(it, item)) for key, it in beside.items()))
        for item in offenders.first
    )
    return make_violation(
        api.name,
        api.name,
        replace(offenders, first=listed),
        item=at,
        before=_INFINITIES if has_infinity else _UNKNOWN if overwritten else _FINITE,
        inputs=tuple((key, str(item)) for key, item in inputs.items())[:MAX_INPUTS],
        largest=tuple(largest.items())[:MAX_INPUTS],
        overwritten=tuple(overwritten),
        dtype=_torch.dtype_name(result.dtype),
        is_masked_row=_is_masked_row(api.stem, read, bad),
    )


def item_of_list(api: Api, results: Any, tensor: Tensor) -> int | None:
    """Return the index of a tensor in the results of a ``torch._foreach_…`` call."""
    if not api.stem.startswith("_foreach_") or not isinstance(results, (list, tuple)):
        return None
    return next((at for at, item in enumerate(results) if item is tensor), None)


def _items(arguments: Mapping[str, Any], at: int) -> dict[str, Any]:
    """Replace each list among the arguments by its item number ``at``, named ``self[1]``."""
    items: dict[str, Any] = {}
    for key, value in arguments.items():
        is_list = isinstance(value, (list, tuple)) and at < len(value)
        items[f"{key}[{at}]" if is_list else key] = value[at] if is_list else value
    return items


_OPERANDS = ("self", "other", "input", "exponent", "end", "min", "max")
"""Arguments of elementwise ops that are operands even as numbers; other numbers are options."""
_FINITE = "all values of the inputs were finite"
_INFINITIES = "the inputs contained infinities, but no NaN"
_SAVED_INFINITIES = "what it saved in forward contained infinities, but no NaN"
_UNKNOWN = "all values of the other inputs were finite"


def _largest(operands: Mapping[str, Tensor]) -> dict[str, Number]:
    """Return, for each floating-point operand, the value furthest from 0."""
    largest: dict[str, Number] = {}
    for key, item in operands.items():
        for own in floats([item]):
            flat = real(own.detach()).reshape(-1)
            largest[key] = number(flat[flat.abs().argmax()].item())
    return largest


def make_violation(
    op: str,
    maker: str,
    offenders: Offenders,
    *,
    before: str = _FINITE,
    inputs: tuple[tuple[str, str], ...] = (),
    largest: tuple[tuple[str, Number], ...] = (),
    item: int | None = None,
    of: str = "the result",
    **facts: Any,
) -> Violation:
    """Return the finding that an op has made non-finite values.

    Args:
        maker: the op, as the headline names it.
        before: what is known about the values before the op.
        inputs: the operands at the first bad position.
        largest: the value furthest from 0 of each operand that has no such position.
        item: the index of the result, if there are several.
        of: the tensor with the values, as the explanation names it.
    """
    first = offenders.first[0]
    at = f"[{', '.join(map(str, first.position))}]" if first.position else "its result"
    at += "" if item is None else f" of item {item}"
    named = [f"{{input:{name}}} = {short(text)}" for name, text in inputs]
    for name, value in largest:
        text = short(value)
        named.append(f"{{input:{name}}} ({'down' if text.startswith('-') else 'up'} to {text})")
    bad = f"{of[0].upper()}{of[1:]} is"
    if offenders.total > 1:
        verb = "is" if offenders.count == 1 else "are"
        bad = f"{offenders.count} of {offenders.total} values of {of} {verb}"
    made_of = f" from {', '.join(named)}" if named else ""
    return Violation(
        guard="nonfinite",
        op=op,
        headline=f"{maker} made {first.value} at {at}{made_of}",
        explanation=f"{bad} not finite; {before}.",
        offenders=offenders,
        is_index=False,
        is_nonfinite=True,
        inputs=inputs,
        **facts,
    )


def _is_masked_row(name: str, arguments: Mapping[str, Any], bad: Tensor) -> bool:
    """Return whether each row that a softmax turned into NaN was all -inf."""
    scores, dim = arguments.get("self", arguments.get("input")), arguments.get("dim")
    if name not in _SOFTMAXES or not isinstance(scores, Tensor) or not isinstance(dim, int):
        return False
    if not scores.dim() or scores.shape != bad.shape:
        return False
    masked: Tensor = scores.detach().isneginf().all(dim)
    return bool((masked | ~bad.any(dim)).all())


def operands_beside(
    api: Api,
    arguments: Mapping[str, Any],
    written: Sequence[Any],
    result: Tensor,
    *,
    is_listed: bool = False,
) -> dict[str, Tensor]:
    """Return the inputs of an elementwise op, broadcast to the shape of the result.

    Empty for other ops, even if the shapes fit.  Without inputs that share memory with what the op
    wrote to: their values are gone.
    """
    if not (api.is_positional or is_listed) and api.stem not in _SOFTMAXES:
        return {}
    lost = {id(_origin(item)) for item in written if isinstance(item, Tensor)}
    inputs = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and _torch.is_plain(value) and id(_origin(value)) not in lost:
            try:
                inputs[name] = value.detach().expand(result.shape)
            except RuntimeError:  # an argument of another shape is no operand
                continue
    return dict(list(inputs.items())[:MAX_INPUTS])


def beside_of_node(
    node: Any, name: str, grads: Sequence[Tensor], shape: Sequence[int]
) -> dict[str, Tensor]:
    """Return the gradient of an elementwise op's node, and its saved tensors, broadcast."""
    if not is_pointwise(name.partition("Backward")[0].lower()):
        return {}
    # An input that was broadcast has a gradient of its own shape, not of the result's.
    is_aligned = len(grads) == 1 and grads[0].shape == shape
    inputs = {"gradient": grads[0]} if is_aligned else {}
    for key in _SAVED:
        try:
            value = getattr(node, f"_saved_{key}", None)
            inputs |= {} if value is None else {key: torch.as_tensor(value).detach().expand(shape)}
        except Exception as trouble:  # it was changed in place, or a hook for saved tensors raised
            raise_if_outside(trouble)
    return {key: value for key, value in inputs.items() if _torch.is_plain(value)}


_MAX_READ = 1 << 20
"""Largest saved tensor that is read in advance, for an error that may never come."""


def is_steep(name: str) -> bool:
    """Return whether a node of this name may have an infinite derivative."""
    return bool(_STEEP.match(name))


def saved_values(node: Any) -> tuple[SavedValues, ...]:
    """Return the range of each saved input or result of a node that may have a pole."""
    found = []
    for name in _SAVED if _STEEP.match(node.name()) else ():
        try:
            value = getattr(node, f"_saved_{name}", None)
            for item in floats([value]) if isinstance(value, Tensor) else ():
                if item.numel() > _MAX_READ or item.is_complex():
                    continue
                own = physical(item).detach()
                has_nan = bool(own.isnan().any())
                low, high, nearest = (
                    float(end.item()) for end in (own.min(), own.max(), own.abs().min())
                )
                found.append(SavedValues(name, low, high, nearest, has_nan))
        except Exception as trouble:  # it was changed in place, or a hook for saved tensors raised
            raise_if_outside(trouble)
    return tuple(found)


def violation_of_node(
    node: Any, values: Tensor, bad: Tensor, inputs: Sequence[Tensor]
) -> Violation:
    """Describe the non-finite gradient that a backward node has made."""
    name = node.name().rpartition("::")[2]
    offenders = find_offenders(real(values), bad)
    beside = beside_of_node(node, name, inputs, values.shape).items()
    at_first = tuple((key, str(value_at(item, offenders.first[0]))) for key, item in beside)
    saved = saved_nonfinite(node, at_first)
    return make_violation(
        name,
        f"the backward node {name}",
        offenders,
        before=_SAVED_INFINITIES if saved == "inf" else _FINITE,
        inputs=at_first,
        dtype=_torch.dtype_name(values.dtype),
    )


def of_saved_nan(violation: Violation) -> Violation:
    """Reword a node's finding: it has read a NaN that forward saved."""
    count = violation.explanation.partition(";")[0]
    return replace(
        violation,
        headline=f"the backward node {violation.op} computes with a nan that forward has saved",
        explanation=f"{count}; the gradient that it was given is.",
    )


def saved_nonfinite(node: Any, at_first: Sequence[tuple[str, str]]) -> Literal["nan", "inf"] | None:
    """Return whether a node has saved a NaN or an infinity in forward.

    Args:
        at_first: the operands of an elementwise op's node at the first bad position.
    """
    own = [value for key, value in at_first if key != "gradient"]
    if not own:
        names = (name for name in dir(node) if name.startswith("_saved_"))
        for item in floats(saved_value(node, name) for name in names):
            values = physical(item)
            own += ["nan"] if bool(values.isnan().any()) else []
            own += ["inf"] if bool(values.isinf().any()) else []
    return "nan" if "nan" in own else "inf" if {"inf", "-inf"} & {*own} else None


def saved_value(node: Any, name: str) -> Any:
    """Return a saved tensor of a node, ``None`` if it cannot be unpacked."""
    try:
        return getattr(node, name)
    except Exception as trouble:  # it was changed in place, or a hook for saved tensors raised
        raise_if_outside(trouble)
        return None


def is_discarded_at(bad: Tensor, gradient: Tensor, taken: Tensor) -> bool:
    """Return whether ``where`` discards a function's result wherever its gradient is bad.

    Args:
        gradient: the gradient of the result.
        taken: true where ``where`` selects the result.
    """
    if gradient.shape != bad.shape or taken.dim() > bad.dim():
        return False
    try:
        kept = taken.expand(bad.shape)
    except RuntimeError:  # the result was broadcast to the condition's shape
        return False
    return not bool((bad & (kept | (gradient != 0))).any())


def violation_of_input(
    api: Api, arguments: Mapping[str, Any], tensor: Tensor, values: Tensor, bad: Tensor
) -> Violation:
    """Describe a tensor that was already non-finite when a call first read it."""
    key = next((key for key, item in tensor_values(arguments).items() if item is tensor), "input")
    before = "no call that was seen has made them so"
    return _already(api.name, key, values, bad, before, reader=api.name)


def violation_of_gradient(node: Any, values: Tensor, bad: Tensor) -> Violation:
    """Describe a gradient that was already non-finite at the first node of a pass."""
    name = node.name().rpartition("::")[2]
    before = "no node that was seen has made it so, but a hook may have, or the caller of backward"
    return _already(name, "gradient", values, bad, before, reader=f"the backward node {name}")


def violation_of_stepped_gradient(
    name: str, gradient: Tensor, values: Tensor, bad: Tensor
) -> Violation:
    """Describe a parameter's gradient that was already non-finite when a step read it.

    Args:
        name: the step, in words.
    """
    before = "no call that was seen has made it so, but a hook of the parameter may have"
    found = _already(name, "grad", values, bad, before, reader=name)
    return replace(found, headline=found.headline.replace("{input:grad}", "{input:param}.grad"))


def _already(
    name: str, key: str, values: Tensor, bad: Tensor, before: str, *, reader: str
) -> Violation:
    """Describe an input that was non-finite before the op read it."""
    offenders = find_offenders(real(values), bad)
    first = offenders.first[0]
    at = f"[{', '.join(map(str, first.position))}]" if first.position else ""
    found = make_violation(name, name, offenders, of="the tensor", before=before)
    headline = f"{{input:{key}}}{at} = {first.value} already where {reader} reads it"
    return replace(found, headline=headline, argument=key, dtype=_torch.dtype_name(values.dtype))


def violation_of_step(
    optimizer: Any, state: str, parameter: Tensor, values: Tensor, bad: Tensor, name: str
) -> Violation:
    """Describe a parameter, or its optimizer state, that a step has made non-finite.

    Args:
        state: the name of the state, empty for the parameter itself.
        name: the step, in words.
    """
    offenders = find_offenders(real(values), bad)
    first, grad = offenders.first[0], parameter.grad
    at = ", ".join(map(str, first.position))
    facts: list[str] = []
    if grad is not None and grad.layout == torch.strided and grad.shape == values.shape:
        facts.append(f"its gradient is {short(value_at(grad, first))} there")
    rate = next(
        group.get("lr")
        for group in optimizer.param_groups
        if any(item is parameter for item in group["params"])
    )
    if isinstance(rate, (int, float)) or (isinstance(rate, Tensor) and rate.numel() == 1):
        facts.append(f"lr = {short(float(rate))}")
    found = make_violation(
        name,
        name,
        offenders,
        of=f"{state} of the parameter" if state else "the parameter",
        before="the parameter was finite before the step",
        overwritten=("param",),
        dtype=_torch.dtype_name(values.dtype),
    )
    of = f"{state} of " if state else ""
    headline = f"{name} made {of}{{input:param}}[{at}] = {first.value}"
    return replace(found, headline=": ".join(filter(None, (headline, ", ".join(facts)))))


def _origin(tensor: Tensor) -> Tensor:
    base = _torch.base_of(tensor)
    return tensor if base is None else base


def value_at(tensor: Tensor, at: Offender) -> Number:
    """Return a value at the position of an offender."""
    value = tensor[at.position].item()
    return str(value) if isinstance(value, complex) else number(value)
