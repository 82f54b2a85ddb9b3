"""What a call read, as cheaply as it can be noted: weak references, at times with a number.

Some values can never be found out after a failure: by how much an op moved its input, or which
number it wrote where a mask said.  They are Python's own numbers, and noting them waits for no
device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

Ref = ref[Tensor]
"""A weak reference without callback: the same object for each use of one tensor, even after its
death, as long as somebody holds it.  So ``is`` tells whether two calls saw the same tensor."""

Version = tuple[Ref, int | None, Ref | None]
"""A tensor that is written to, its version before, and its base when it is a view."""

SHIFTS = {"aten::add.Tensor": 1, "aten::sub.Tensor": -1, "aten::add_.Tensor": 1}
SHIFTS |= {"aten::sub_.Tensor": -1}
"""Ops that move every value by the same number, when their second argument is one."""

NUMBERS = {
    "aten::index_put_": 2,
    "aten::masked_fill_.Scalar": 2,
    "aten::masked_fill_.Tensor": 2,
    "aten::index_fill_.int_Scalar": 3,
    "aten::index_fill_.int_Tensor": 3,
    "aten::scatter_.value": 3,
}
"""Ops that may write one number to some of the elements, and the place of that argument."""

_ACCUMULATES = {"aten::index_put_": 3}
"""Ops with a flag, and its place, that makes them add to what is there."""

NO_TENSORS = frozenset({int, float, bool, complex, str, type(None), torch.dtype, torch.device})
"""Classes of arguments that hold no tensor."""
_NUMBER_TYPES = frozenset({int, float, bool})


class Noted(list[Ref]):
    """The tensors that a call read, and what else of it can never be found out later."""

    shift: int | None = None
    """The whole number by which it moved every value."""
    number: float | None = None
    """The one number that it wrote to some of the elements of the first; ``None`` also where it
    wrote several, or one that lies on a device."""
    adds = False
    """Whether it added to what was there."""
    versions: tuple[Version, ...] = ()
    """The tensors that it wrote to, where those are several."""

    def __init__(self, reads: Iterable[Ref] = (), **noted: Any) -> None:
        super().__init__(reads)
        vars(self).update(noted)


def references(
    args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, noted: str = ""
) -> list[Ref]:
    """Refer to the tensors among the arguments of a call.

    Args:
        noted: the op's name with its overload where it is one of :data:`SHIFTS` or
            :data:`NUMBERS`: the number is noted too.
    """
    found: list[Ref] = []
    for value in args:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            found.append(ref(value))
        elif kind not in NO_TENSORS:
            found += map(ref, tensors_in((value,)))
    if kwargs:
        found += map(ref, tensors_in(kwargs.values()))
    return _with_number(noted, args, found) if noted and not kwargs else found


def _with_number(name: str, args: tuple[Any, ...], reads: list[Ref]) -> list[Ref]:
    """Add the number that a call moved its values by, or wrote."""
    if name in SHIFTS:
        is_shift = len(args) == 2 and type(args[1]) is int
        return Noted(reads, shift=SHIFTS[name] * args[1]) if is_shift else reads
    at, flag = NUMBERS[name], _ACCUMULATES.get(name, len(args))
    number = _number(args[at]) if at < len(args) else None
    return Noted(reads, number=number, adds=flag < len(args) and bool(args[flag]))


def _number(value: Any) -> float | None:
    """Read a number that lies in the memory of the host: no device is waited for."""
    if type(value) is Tensor and value.is_cpu and value.dim() == 0:
        value = value.item()
    return value if type(value) in _NUMBER_TYPES else None


def tensor_values(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among the arguments, elements of lists as ``indices[1]``."""
    found: dict[str, Tensor] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, (list, tuple)):
            for position, item in enumerate(value):
                if isinstance(item, Tensor):
                    found[f"{name}[{position}]"] = item
    return found


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments or results, and in lists and tuples among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found
