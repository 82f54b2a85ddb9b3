"""Positions of the guards' arguments in a call, and the calls that need no further look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from cudalens.core._python import MoreStack, raise_if_outside
from cudalens.guards import GUARDS
from cudalens.guards._base import OF_USER, ArgumentSlot, Check, Guard, schema_parameters
from cudalens.guards.engine import Between, Within, fulfils


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
    listed: int | None
    """The place of a list of tensors."""


def usual_call(op: Any) -> UsualCall:
    """Return the usual call of an op."""
    kinds = [str(item.type) for item in op._schema.arguments]
    if "Tensor" not in kinds:
        return UsualCall(frozenset(), None)
    if _INDICES not in kinds:
        return UsualCall(PLAIN, None)
    return UsualCall(PLAIN | {list}, kinds.index(_INDICES))


# --- what usual calls must fulfil -----------------------------------------------------------------


_MOST_FORMS = 256
_meta = attrgetter("shape", "dtype")
_is_deterministic = torch.are_deterministic_algorithms_enabled


class Intervals:
    """The intervals that the values in usual calls of an op must be in, by the form of a call.

    Guards require something by the shapes and dtypes of tensors, by numbers and by the dispatch
    keys, so calls of one form differ in nothing but the values, which are read in each.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._plans = plans
        self._known: dict[Any, Sequence[tuple[int, int | None, Within | Between]] | None] = {}
        """``None`` where the guards have to be asked each time."""

    # Every call of a guarded op passes here, so speed comes before form.
    def contain(self, keys: int, args: tuple[Any, ...]) -> bool:
        """Read the values of a call; return whether all are good and no guard must be asked.

        Args:
            keys: the dispatch keys of the call, which name layouts and kinds of devices.
        """
        try:
            parts: list[Any] = [keys, _is_deterministic()]
            for value in args:
                kind = value.__class__
                if kind is Tensor or kind is Parameter:
                    parts += value.shape, value.dtype
                elif kind is list:
                    parts.append(tuple([None if item is None else _meta(item) for item in value]))
                else:
                    parts.append(value)
            form = tuple(parts)
            try:
                needs = self._known[form]
            except KeyError:
                needs = self._required(args)
                if len(self._known) >= _MOST_FORMS:
                    self._known.clear()
                self._known[form] = needs
            if needs is None:
                return False
            for place, item, need in needs:
                tensor = args[place]
                if not fulfils(need, tensor if item is None else tensor[item]):
                    return False
            return True
        except Exception as failure:  # the guards look again, with more room
            with MoreStack():
                raise_if_outside(failure)
            return False

    def _required(
        self, args: tuple[Any, ...]
    ) -> Sequence[tuple[int, int | None, Within | Between]] | None:
        found: list[tuple[int, int | None, Within | Between]] = []
        for plan in self._plans:
            if plan.guard.frequency == OF_USER or plan.last >= len(args):
                return None
            need: Any = plan.guard.requires(*plan.pick(args))
            several = need if type(need) is list else () if need is None else (need,)
            for one in several:
                if type(one) not in (Within, Between):
                    return None
                position = plan.parameters[plan.places[one.argument]].position
                if type(one) is Between:
                    found.append((position, None, one))
                    continue
                if one.mask is not None:
                    return None
                if len(several) > 1 and not args[position][one.item].is_cpu:
                    return None  # on a device they share one copy
                # Nothing that is kept may refer to a tensor.
                kept = replace(one, skip_if=None, asserts=None, narrows=False)
                found.append((position, one.item, kept))
        # A guard that requires nothing may have seen that torch refuses the call.
        return found or None
