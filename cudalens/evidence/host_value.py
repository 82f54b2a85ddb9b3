"""Which value the host refused: the guard of the op that raised is asked after the fact.

The kernels of the CPU check the same bounds as those of CUDA, but say neither where the bad value
is nor, often, what it is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core._torch import op_of
from cudalens.core.report_types import Argument, TensorFact, TensorMeta, Violation
from cudalens.evidence.call_stack import locate
from cudalens.evidence.tensors import is_alike, tensor_facts
from cudalens.guards import GUARDS
from cudalens.guards._base import ArgumentSlot, schema_parameters
from cudalens.guards._ranges import exact_offenders, format_offender
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
"""What CPU kernels say of a bad value, and of nothing else."""
_SAME_NAMES = {"self": ("self", "input")}


@dataclass(frozen=True, kw_only=True)
class ObservedValue:
    """The value that an exception is about, and the tensors by the names that it uses."""

    violation: Violation
    tensors: tuple[TensorFact, ...]
    api: str | None = None
    """The distribution that refused it, empty for one of the user's."""
    has_run_kernels: bool = False


def observed_value(
    message: str,
    entries: Sequence[TracebackType],
    record: Any,
    values: Mapping[str, Tensor],
    tensors: tuple[TensorFact, ...],
) -> ObservedValue | None:
    """Return the value and its position, of an exception that was raised because of it.

    By a distribution, or by a CPU kernel; ``None`` where neither can be asked, or nothing is found.

    Args:
        record: of the op that raised.
        values: the arguments of the user's call.
        tensors: those of the call and of the line.
    """
    refused = refused_parameter(message, entries)
    if refused is not None or record is None:
        return refused
    if not _VALUE_ERROR.search(message):
        return None
    op = op_of(f"{record.name}.{record.overload or 'default'}")
    if op not in GUARDS:
        return None
    given = {item.name: item for item in record.arguments}
    keys: dict[str, str] = {}
    arguments = {
        item.name: _value(item, given.get(item.name), _free(values, item.name, given), keys)
        for item in schema_parameters(op)
    }
    found = _ask(op, arguments)
    if found is None:
        return None
    return ObservedValue(violation=found, tensors=_named(tensors, keys, given))


def _ask(op: Any, arguments: Mapping[str, object]) -> Violation | None:
    """Return the first finding of the op's guards; one that lacks the values finds nothing."""
    for guard in GUARDS[op]:
        try:
            with _torch.plain_torch(), _torch.no_dispatch_modes():
                found = guard.check(*[arguments[name] for name in guard.parameters])
        except (RuntimeError, AttributeError):  # it read a stand-in
            continue
        if found is not None and not found.is_silent:
            return found
    return None


def _value(
    parameter: ArgumentSlot,
    given: Argument | None,
    values: Mapping[str, Tensor],
    keys: dict[str, str],
) -> object:
    """Return an argument of the op: its default, a plain value, or the tensor that it certainly
    was.

    A tensor that nothing of the user's certainly is becomes a stand-in without values.

    Args:
        keys: takes in which of ``values`` became which argument.
    """
    if given is None:
        return parameter.default
    if not given.tensors:
        return _plain(given.text)
    found: list[object] = []
    subscripts = _subscripts(given, values)
    for name, meta in given.keyed:
        key = subscripts.get(name) if subscripts else _key_of(name, meta, values)
        if key is None:
            found.append(_stand_in(meta))
        else:
            keys[key] = name
            found.append(values[key])
    if given.places is None:
        return found[0]
    placed = dict(zip(given.places, found, strict=True))
    return [placed.get(place) for place in range(max(placed) + 1)]


def _stand_in(meta: TensorMeta) -> Tensor:
    dtype = getattr(torch, meta.dtype)
    if meta.stride is None:
        return torch.empty(meta.shape, dtype=dtype, device="meta")
    return torch.empty_strided(meta.shape, meta.stride, dtype=dtype, device="meta")


def _plain(text: str | None) -> object:
    try:
        return ast.literal_eval(text or "None")
    except (ValueError, SyntaxError):
        return text


def _free(
    values: Mapping[str, Tensor], name: str, given: Mapping[str, Argument]
) -> dict[str, Tensor]:
    """Leave out the tensors that go by the name of another argument of the op."""
    return {
        key: value
        for key, value in values.items()
        if (owner := key.partition("[")[0]) == name or owner not in given
    }


def _key_of(name: str, meta: TensorMeta, values: Mapping[str, Tensor]) -> str | None:
    """Name the tensor of the user's call that the op was given: by its name, or alone alike."""
    alike = [key for key, value in values.items() if _is_alike(_torch.meta_of(value), meta)]
    same = [key for key in alike if key in _SAME_NAMES.get(name, (name, name.removesuffix("[0]")))]
    if same:
        return same[0]
    return alike[0] if len(alike) == 1 and "[" not in name else None


def _subscripts(given: Argument, values: Mapping[str, Tensor]) -> dict[str, str]:
    """Name the tensors between the brackets for an op that indexes by tensors.

    ``x[0, ..., i, j]`` reaches it without what is no tensor, at other places and in this order.
    """
    written = [key for key in values if key == "indices" or key.startswith("indices[")]
    if given.name != "indices" or len(written) != len(given.tensors):
        return {}
    pairs = list(zip(written, given.keyed, strict=True))
    is_same = all(_is_alike(_torch.meta_of(values[key]), meta) for key, (_, meta) in pairs)
    return {name: key for key, (name, _) in pairs} if is_same else {}


def _is_alike(left: TensorMeta, right: TensorMeta) -> bool:
    return is_alike(left, right) and left.storage_offset == right.storage_offset


def _named(
    tensors: tuple[TensorFact, ...], keys: Mapping[str, str], given: Mapping[str, Argument]
) -> tuple[TensorFact, ...]:
    """Let the tensors go by the names of the op's arguments, which the finding speaks of.

    One of the same name that the op was not given keeps none: ``x`` of ``x[0, i]``, for ``self``.
    """
    taken = {name.partition("[")[0] for name in given}

    def name_of(argument: str | None) -> str | None:
        if argument in keys or argument is None:
            return keys.get(argument or "")
        return None if argument.partition("[")[0] in taken else argument

    return tuple(replace(fact, argument=name_of(fact.argument)) for fact in tensors)


# --- which value a distribution of torch's refused: its own check ---------------------------------


_COMPLAINT = "but found invalid values:"
_CHECKS = "distributions/distribution.py"


def refused_parameter(message: str, entries: Sequence[TracebackType]) -> ObservedValue | None:
    """Return the bad values of a parameter or sample that a distribution did not take.

    ``None`` for any other exception, and for a condition on whole matrices.
    """
    if _COMPLAINT not in message or not entries:
        return None
    frame = entries[-1].tb_frame
    names = frame.f_locals
    if torch_path(frame.f_code.co_filename) != _CHECKS or "value" not in names:
        return None
    owner, name = names.get("self"), names.get("param", "value")
    constraint = _elementwise(names.get("constraint", names.get("support")))
    given, value = _given(entries, owner, name), names["value"]
    tensor = given if isinstance(given, Tensor) else value
    with _torch.plain_torch(), _torch.no_dispatch_modes():
        found = _finding(tensor, value, constraint, name, type(owner).__name__)
    if found is None:
        return None
    site = locate(entries, {name: tensor})
    is_torchs = type(owner).__module__.startswith("torch.")
    return ObservedValue(
        violation=found,
        api=f"torch.distributions.{type(owner).__name__}" if is_torchs else "",
        tensors=tensor_facts({name: tensor}, site, name),
        has_run_kernels=True,
    )


def _given(entries: Sequence[TracebackType], owner: object, name: str) -> object:
    """Return what the user passed: a distribution may normalise it before it looks."""
    for entry in entries:
        variables = entry.tb_frame.f_locals
        if variables.get("self") is owner and variables.get(name) is not None:
            return variables[name]
    return None


def _elementwise(constraint: Any) -> Any:
    """Return the condition on one element behind one on rows of them."""
    while hasattr(constraint, "base_constraint"):
        constraint = constraint.base_constraint
    if isinstance(constraint, type(torch.distributions.constraints.simplex)):
        return torch.distributions.constraints.nonnegative  # what is left out is the sum of a row
    return constraint


def _finding(
    tensor: Tensor, value: Tensor, constraint: Any, name: str, kind: str
) -> Violation | None:
    """Describe the elements of ``tensor`` that break a condition; ``None`` where none does.

    Args:
        tensor: what the distribution was given.
        value: what it made of that, and looked at.
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
        problem = "is not a number" + (f"; {count} of {total} values are NaN" if total > 1 else "")
    return Violation(
        argument=name,
        headline=f"{format_offender(name, offenders)} {problem}",
        explanation=f"{kind} checks its parameters when it is created, and each sample that it is "
        "asked about.",
        offenders=offenders,
        is_index=False,
    )
