"""Where in a call of an op the arguments of its guards are, and how the usual call is looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from cudalens.guards import GUARDS
from cudalens.guards._base import ArgumentSlot, Check, Guard, schema_parameters
from cudalens.guards.engine import quick_checker


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A guard of one overload, and where in a call its arguments are."""

    guard: Guard
    check: Check
    parameters: tuple[ArgumentSlot, ...]
    pick: Callable[[tuple[Any, ...]], Sequence[Any]]
    """Returns them from the positional arguments of a call that gives them all."""

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return them from any call."""
        return [item.of(args, kwargs) for item in self.parameters]


def plans_of(op: Any) -> tuple[Plan, ...]:
    """Return the guards of an overload."""
    parameters = {item.name: item for item in schema_parameters(op)}
    plans = []
    for entry in GUARDS[op]:
        asked = tuple(parameters[name] for name in entry.parameters)
        plans.append(Plan(guard=entry, check=entry.check, parameters=asked, pick=_picker(asked)))
    return tuple(plans)


def _picker(asked: Sequence[ArgumentSlot]) -> Callable[[tuple[Any, ...]], Sequence[Any]]:
    positions = [item.position for item in asked]
    if len(positions) > 1:
        return itemgetter(*positions)
    return itemgetter(slice(positions[0], positions[0] + 1) if positions else slice(0, 0))


_USUAL: Final = frozenset({Tensor, Parameter, int, float, bool, type(None)})


def quick_look(
    op: Any, plans: tuple[Plan, ...]
) -> tuple[int, Callable[[tuple[Any, ...]], bool], frozenset[type]]:
    """Return what looks at the usual call of an op in one go; nothing where it has several guards.

    Returns:
        the place of an argument that is a tensor in every call, the function that looks, and the
        types of the arguments of a usual call: no list, no subclass.
    """
    plan, *others = plans
    arguments = enumerate(op._schema.arguments)
    tensors = [place for place, item in arguments if isinstance(item.type, torch.TensorType)]
    is_of_catalogue = getattr(plan.check, "__wrapped__", None) is plan.guard.requires
    if others or not tensors or not is_of_catalogue:
        return 0, bool, frozenset()
    last = max(item.position for item in plan.parameters)
    look = quick_checker(plan.guard.requires, plan.guard.parameters, plan.pick, last)
    return tensors[0], look, _USUAL
