"""The value that a CPU kernel or a distribution rejected, found by the op's guard after the fact.

CPU kernels check the same bounds as CUDA kernels, but do not say where the bad value is, and often
not what it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core._python import raise_if_outside
from cudalens.core.call import ApiCall, Operand
from cudalens.core.report_types import Bounds, Violation
from cudalens.core.user_objects import is_tensor
from cudalens.evidence.attempt import RefusedError, ask_guards
from cudalens.evidence.counted_labels import counted_label
from cudalens.guards._ranges import exact_offenders, format_offender, violation_at
from cudalens.recorder.tensor_refs import tensor_values
from cudalens.source.files import torch_path

_VALUE_ERROR = re.compile(
    r"index out of range in self"
    r"|[Ii]ndex -?\d+ (?:is )?out of (?:bounds|range)"
    r"|Target -?\d+ is out of bounds"
    r"|all elements of (?:input|target) should be between 0 and 1"
    r"|probability tensor contains either"
    r"|invalid multinomial distribution"
    r"|out of range: tried to access index"
    r"|takes value -?\d+ which is not in the valid range"
    r"|invalid Poisson rate"
    r"|index out of range|target out of range"
    r"|Expected p_in >= 0 && p_in <= 1"
)
"""Messages that CPU kernels raise only for bad values."""
_EMPTY_SEQUENCE = "found an element in 'lengths' that is <= 0"


@dataclass(frozen=True, kw_only=True)
class ObservedValue:
    """The value behind an exception, and the tensors by the names that its text uses."""

    violation: Violation
    values: Mapping[str, Tensor]
    api: str | None = None
    """The distribution that rejected it, empty for a class of the user's."""
    has_run_kernels: bool = False


def observed_value(
    message: str,
    entries: Sequence[TracebackType],
    call: ApiCall | None,
    operands: Sequence[Operand],
    recorder: Any,
) -> ObservedValue | None:
    """Return the value, and its position, that a distribution or CPU kernel rejected.

    ``None`` if it is not found.

    Args:
        call: the API call that raised.
        operands: the operands of the user's line.
    """
    refused = refused_parameter(message, entries)
    if refused is not None or call is None or call.func is None:
        return refused
    if (counted := counted_label(message, call, operands, recorder)) is not None:
        violation, tensor = counted
        return ObservedValue(
            violation=violation, values={violation.argument: tensor}, has_run_kernels=True
        )
    if _EMPTY_SEQUENCE in message:
        return _empty_sequence(call, entries, operands)
    if not _VALUE_ERROR.search(message):
        return None
    answer = _ask_again(call)
    if answer is None:
        return None
    violation, arguments = answer
    return ObservedValue(violation=violation, values=tensor_values(arguments))


def _empty_sequence(
    call: ApiCall, entries: Sequence[TracebackType], operands: Sequence[Operand]
) -> ObservedValue | None:
    """Return the length below 1 that was passed for a packed sequence."""
    given = (*call.args, *call.kwargs.values())
    lengths = [it for it in given if is_tensor(it) and it.dim() == 1 and it.dtype == torch.int64]
    names = entries[-1].tb_frame.f_locals if entries else {}
    if len(lengths) != 1 or names.get("lengths") is not lengths[0]:
        return None
    with _torch.plain_torch(), _torch.no_dispatch_modes():
        own = _operand_of_equal_values(_as_given(lengths[0], names.get("sorted_indices")), operands)
        bad = own <= 0
        if not bool(bad.any()):
            return None
        violation = violation_at(
            own,
            bad,
            "is no length: a sequence has at least one step",
            argument="lengths",
            explanation="Each length is the number of steps of one sequence in the batch.",
            bounds=Bounds(min=1, max=max(int(own.max()), 1), text="from 1 on"),
            is_index=False,
        )
    return ObservedValue(violation=violation, values={"lengths": own})


def _operand_of_equal_values(values: Tensor, operands: Sequence[Operand]) -> Tensor:
    """Return the only operand with these values, else the values themselves."""
    listed = (it.value for it in operands if is_tensor(it.value))
    alike = {id(it): it for it in listed if it.dtype == values.dtype and torch.equal(it, values)}
    return next(iter(alike.values())) if len(alike) == 1 else values


def _as_given(lengths: Tensor, order: Tensor | None) -> Tensor:
    """Undo the ``torch.sort`` of lengths.

    Args:
        order: the original position of each length, ``None`` if they were not sorted.
    """
    return lengths if order is None else torch.empty_like(lengths).scatter_(0, order.cpu(), lengths)


class _EnoughError(Exception):
    """Ends the second run of a call before its op is launched."""


def _ask_again(call: ApiCall) -> tuple[Violation, Mapping[str, Any]] | None:
    """Run a call again up to the op whose guard finds a violation; return what it found.

    The run also stops at an op that writes or draws random numbers, so it has no side effects.
    """

    def look(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            ask_guards(op, args, kwargs)
        except RefusedError as refused:
            if refused.violation is not None and not refused.violation.is_silent:
                raise
        if op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
            raise _EnoughError

    with ExitStack() as stack:
        for block in (torch.no_grad(), _torch.no_torch_function(), _torch.no_dispatch_modes()):
            stack.enter_context(block)
        try:
            with _torch.before_each_op(look):
                call.func(*call.args, **call.kwargs)
        except RefusedError as refused:
            if refused.violation is not None:
                return refused.violation, refused.arguments or {}
        except Exception as error:  # the original error again, or `_EnoughError`
            raise_if_outside(error)
    return None


# --- which value a distribution of torch's refused: its own check ---------------------------------


_COMPLAINT = "but found invalid values:"
_CHECKS = "distributions/distribution.py"


def refused_parameter(message: str, entries: Sequence[TracebackType]) -> ObservedValue | None:
    """Return the bad values of a parameter or sample that a distribution rejected.

    ``None`` for any other exception, and for constraints on whole matrices.
    """
    if _COMPLAINT not in message or not entries:
        return None
    frame = entries[-1].tb_frame
    names = frame.f_locals
    if torch_path(frame.f_code.co_filename) != _CHECKS or "value" not in names:
        return None
    owner, name = names.get("self"), names.get("param", "value")
    constraint = _elementwise(names.get("constraint", names.get("support")))
    value = names["value"]
    owner, tensor = _outermost(entries, owner, name, value)
    with _torch.plain_torch(), _torch.no_dispatch_modes():
        violation = _finding(tensor, value, constraint, name, type(owner).__name__)
    if violation is None:
        return None
    is_torchs = type(owner).__module__.startswith("torch.")
    return ObservedValue(
        violation=violation,
        api=f"torch.distributions.{type(owner).__name__}" if is_torchs else "",
        values={name: tensor},
        has_run_kernels=True,
    )


def _outermost(
    entries: Sequence[TracebackType], owner: object, name: str, value: Tensor
) -> tuple[object, Tensor]:
    """Return the distribution that the user made, and the value that they passed to it.

    It may wrap another distribution, and normalize its argument before the check.
    """
    for entry in entries:
        variables = entry.tb_frame.f_locals
        made, passed = variables.get("self"), variables.get(name)
        is_torchs = type(made).__module__.startswith("torch.distributions.")
        if isinstance(passed, Tensor) and (made is owner or is_torchs):
            return made, passed
    return owner, value


def _elementwise(constraint: Any) -> Any:
    """Return the constraint on single elements behind a constraint on rows."""
    while hasattr(constraint, "base_constraint"):
        constraint = constraint.base_constraint
    if isinstance(constraint, type(torch.distributions.constraints.simplex)):
        return torch.distributions.constraints.nonnegative  # the sum of a row is left out
    return constraint


def _finding(
    tensor: Tensor, value: Tensor, constraint: Any, name: str, kind: str
) -> Violation | None:
    """Describe the elements of ``tensor`` that violate a constraint, ``None`` without any.

    Args:
        tensor: the argument of the distribution.
        value: the value that it computed from the argument, and checked.
    """
    valid = constraint.check(tensor)
    bad = ~valid if valid.shape == tensor.shape else tensor.isnan()
    problem = f"does not satisfy {constraint!r}"
    if not bool(bad.any()):
        if value.shape != tensor.shape or not bool((bad := value.isnan()).any()):
            return None
        problem = f"becomes NaN in {kind}"
    offenders = exact_offenders(tensor, bad)
    if offenders.first[0].value == "nan":
        count, total = int(tensor.isnan().count_nonzero()), tensor.numel()
        problem = "is not a number" + (
            f"; {count} of {total} values {'is' if count == 1 else 'are'} NaN" if total > 1 else ""
        )
    return Violation(
        argument=name,
        headline=f"{format_offender(offenders)} {problem}",
        explanation=f"{kind} checks its parameters when it is created, and each value passed to it "
        "later.",
        offenders=offenders,
        is_index=False,
    )
