"""Describe the tensors of a call and those on the user's line, with readable values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from cudalens.core import _torch
from cudalens.core.limits import failure_line
from cudalens.core.report_types import (
    TensorFact,
    TensorMeta,
    TensorSummary,
    Violation,
    ravel,
    unravel,
)
from cudalens.core.tensor_values import find_offenders, outside, summarise
from cudalens.core.user_objects import is_tensor
from cudalens.guards.process import PROCESS
from cudalens.source.locate import CallSite
from cudalens.source.safe_eval import instance_dict


def bad_key(violation: Violation) -> str:
    """Return the key of the tensor at fault among the ``tensor_values``."""
    if violation.list_position is None:
        return violation.argument
    return f"{violation.argument}[{violation.list_position}]"


def scalars_of(arguments: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the arguments that are numbers, strings or ``None``, as text."""
    return tuple(
        (name, str(value))
        for name, value in arguments.items()
        if value is None or isinstance(value, (bool, int, float, str))
    )


def tensor_facts(
    values: Mapping[str, Tensor],
    site: CallSite,
    bad: str | None,
    *,
    api: Sequence[tuple[str, object]] = (),
    first_bad: tuple[int, ...] | None = None,
    read: bool = True,
) -> tuple[TensorFact, ...]:
    """Describe the op's tensors and the others on the failing line.

    Args:
        values: the op's tensor arguments by schema name.
        site: the user's expressions for them, and the other tensors on the line.
        bad: the key of the tensor at fault.
        api: names and values of the arguments of the function that the user called.
        first_bad: position of the first bad value in the tensor at fault.
        read: false if the device's context is lost, so that values cannot be read.

    An intermediate tensor of a library is left out if the line has others, unless it is the one at
    fault.
    """
    named = {key: (text, span) for key, text, span in site.names}
    shown = {key: item for key, item in values.items() if key in named or key == bad}
    rest = [
        (item, item.value)
        for item in site.others
        if is_tensor(item.value)
        and not any(_torch.same_tensor(item.value, other) for other in shown.values())
    ]
    if not shown and not rest:
        shown = dict(values)
    facts = [
        _fact(key, tensor, *named.get(key, (None, None)), read=read)
        for key, tensor in shown.items()
    ]
    bad_tensor = values.get(bad or "")
    for item, tensor in rest:
        name = next((name for name, value in api if value is tensor), None)
        fact = _fact(name, tensor, item.expression, item.span, read=read)
        if bad_tensor is not None and first_bad is not None and read:
            fact = replace(fact, bad_at=same_spot(tensor, bad_tensor, first_bad))
        facts.append(fact)
    return tuple(facts)


def facts_of(
    violation: Violation,
    values: Mapping[str, Tensor],
    site: CallSite,
    api: Sequence[tuple[str, object]],
) -> tuple[TensorFact, ...]:
    """Describe the tensors around a guard's finding, with the first bad position in each."""
    first = next((item.position for item in violation.offenders.first), None)
    key = bad_key(violation)
    facts = tensor_facts(values, site, key, api=api, first_bad=first)
    is_named = any(it.argument == key and it.expression for it in facts)
    if first is not None and not is_named and all(it.bad_at is None for it in facts):
        # No name on the line has it.  The argument of torch's function has the user's shape.
        given = next((value for name, value in api if name == key and is_tensor(value)), None)
        spot = None if given is None else same_spot(given, values[key], first)
        if given is not None and spot is not None:
            facts = (*facts, replace(_fact(key, given, None, None, read=True), bad_at=spot))
    if not violation.overwritten:
        return facts
    # They are overwritten: their values before the op are unknown.
    return tuple(
        replace(fact, summary=TensorSummary())
        if (fact.argument or "").partition("[")[0] in violation.overwritten
        else fact
        for fact in facts
    )


def with_own_planes(
    violation: Violation, values: Mapping[str, Tensor], site: CallSite
) -> Violation:
    """Return the finding with the slices of the user's tensor, if the op got another shape.

    ``cross_entropy`` gives its op ``[N, 1, D * H * W]`` for labels of a volume ``[N, D, H, W]``.
    """
    operand = values.get(bad_key(violation) or "")
    offenders, bounds = violation.offenders, violation.bounds
    low, high = bounds.min, bounds.max
    if operand is None or not offenders.planes:
        return violation
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return violation
    for tensor in (item.value for item in site.others if is_tensor(item.value)):
        if same_spot(tensor, operand, offenders.first[0].position) is None:
            continue
        with _torch.plain_torch(), _torch.no_dispatch_modes():
            bad = outside(tensor, low, high)
            for value in bounds.also_allowed:
                bad &= tensor != value
            own = find_offenders(tensor, bad, marked=bounds.also_allowed)
        if own.count == offenders.count:
            return replace(violation, offenders=replace(offenders, planes=own.planes))
    return violation


def same_spot(tensor: Tensor, operand: Tensor, position: tuple[int, ...]) -> tuple[int, ...] | None:
    """Translate a position of the op's tensor to a tensor with the same values in another shape.

    A loss passes its op ``[N, 1, L]`` for the user's ``[N, L]``.  Proven only if all values agree.
    """
    if tensor.shape == operand.shape or tensor.numel() != operand.numel():
        return None
    if tensor.dtype != operand.dtype or tensor.device != operand.device:
        return None
    with _torch.plain_torch(), _torch.no_dispatch_modes():
        if not tensor.reshape(-1).equal(operand.reshape(-1)):
            return None
    return unravel(ravel(position, operand.shape), tuple(tensor.shape))


def _summary(tensor: Tensor, name: str | None) -> TensorSummary:
    """Summarize the values of a tensor; a failure becomes a line in the report."""
    try:
        with _torch.plain_torch(), _torch.no_dispatch_modes():
            return summarise(tensor)
    except RuntimeError as failure:
        PROCESS.internal_error(failure_line(f"values of {name or 'a tensor'}", failure))
        return TensorSummary()


def _fact(
    argument: str | None,
    tensor: Tensor,
    expression: str | None,
    span: tuple[int, int, int] | None,
    *,
    read: bool,
) -> TensorFact:
    is_readable = read and _torch.is_plain(tensor) and tensor.device.type != "meta"
    summary = _summary(tensor, expression or argument) if is_readable else TensorSummary()
    fact = of_meta(argument, _torch.meta_of(tensor), expression)
    return replace(fact, summary=summary, span=span)


def of_meta(argument: str | None, meta: TensorMeta, expression: str | None = None) -> TensorFact:
    """Describe a tensor from its metadata alone, which is safe on a lost device."""
    return TensorFact(
        argument=argument,
        expression=expression,
        shape=meta.shape,
        dtype=meta.dtype,
        device=meta.device,
        stride=meta.stride,
        requires_grad=meta.requires_grad,
        grad_fn=meta.grad_fn,
    )


def tensors_of_output(value: object) -> dict[str, Tensor]:
    """Return the tensors in a transformers model's output, by name."""
    if not type(value).__module__.startswith("transformers."):
        return {}
    entries = instance_dict(value).items()
    return {key: item for key, item in entries if is_tensor(item)}
