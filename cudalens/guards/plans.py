"""Positions of the guards' arguments in a call, and the calls that need no further look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from cudalens.guards import GUARDS
from cudalens.guards._base import ArgumentSlot, Check, Guard, schema_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A guard of one overload, and the positions of its arguments in a call."""

    guard: Guard
    check: Check
    parameters: tuple[ArgumentSlot, ...]
    pick: Callable[[tuple[Any, ...]], Sequence[Any]]
    """Returns them from the positional arguments of a call that gives them all."""
    last: int
    """The position of the last of them."""
    places: dict[str, int]
    """Their order, by name."""

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return them from any call."""
        return [item.of(args, kwargs) for item in self.parameters]


def plans_of(op: Any) -> tuple[Plan, ...]:
    """Return the guards of an overload."""
    parameters = {item.name: item for item in schema_parameters(op)}
    plans = []
    for entry in GUARDS[op]:
        asked = tuple(parameters[name] for name in entry.parameters)
        plans.append(
            Plan(
                guard=entry,
                check=entry.check,
                parameters=asked,
                pick=_picker(asked),
                last=max((item.position for item in asked), default=0),
                places={item.name: place for place, item in enumerate(asked)},
            )
        )
    return tuple(plans)


def _picker(asked: Sequence[ArgumentSlot]) -> Callable[[tuple[Any, ...]], Sequence[Any]]:
    positions = [item.position for item in asked]
    if len(positions) > 1:
        return itemgetter(*positions)
    return itemgetter(slice(positions[0], positions[0] + 1) if positions else slice(0, 0))


_INDICES: Final = "List[Optional[Tensor]]"
PLAIN: Final = frozenset({Tensor, Parameter, int, float, bool, str, type(None)})
"""Types of arguments that are no list and no subclass of a tensor."""


class UsualCall(NamedTuple):
    """The usual call of an op: no subclass of a tensor is among its arguments."""

    types: frozenset[type]
    """The types of its arguments; empty where no call counts as usual."""
    first: int
    """The place of an argument that is a tensor in every call."""
    listed: int | None
    """The place of a list of tensors."""


def usual_call(op: Any) -> UsualCall:
    """Return the usual call of an op."""
    kinds = [str(item.type) for item in op._schema.arguments]
    if "Tensor" not in kinds:
        return UsualCall(frozenset(), 0, None)
    first = kinds.index("Tensor")
    if _INDICES not in kinds:
        return UsualCall(PLAIN, first, None)
    return UsualCall(PLAIN | {list}, first, kinds.index(_INDICES))
