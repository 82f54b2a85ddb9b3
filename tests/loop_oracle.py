"""What a plain Python loop over the elements finds, to hold against a guard's finding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator
from typing import Any, Self

import torch
from hypothesis import settings
from hypothesis import strategies as st

from cudalens.core.report_types import Violation
from cudalens.guards import GUARDS
from cudalens.guards._base import schema_parameters
from tests.cpu_guards import ASKED, FOUND, counted, strided, transposed

Position = tuple[int, ...]
parity = settings(max_examples=40, deadline=None, derandomize=True, database=None)
ARRANGEMENTS = st.sampled_from([lambda x: x, transposed, strided])
FEW = st.integers(1, 4)


COMPARED: set[str] = set()
"""The guards that some test holds against a loop."""


class compared(ContextDecorator):
    """Around the comparison of guards with a loop: a third of the calls violate each of them.

    And some do not.
    """

    def __init__(self, *guards: str) -> None:
        self.guards = guards
        COMPARED.update(guards)

    def __str__(self) -> str:
        return " and ".join(self.guards)

    def __enter__(self) -> Self:
        self.before = {name: (ASKED[name], FOUND[name]) for name in self.guards}
        return self

    def __exit__(self, kind: Any, *rest: object) -> None:
        if kind is not None:
            return
        for name, (asked, found) in self.before.items():
            calls, violating = ASKED[name] - asked, FOUND[name] - found
            assert calls <= 3 * violating < 3 * calls, f"{name}: {violating} of {calls} calls"


def ask(op: Any, *args: Any, **kwargs: Any) -> Violation | None:
    """Return the one finding of the guards of a call, or none; the call is not made."""
    places = {item.name: item for item in schema_parameters(op)}
    found = [
        counted(entry.name, entry.check)(
            *(places[name].of(args, kwargs) for name in entry.parameters)
        )
        for entry in GUARDS[op]
    ]
    told = [item for item in found if item is not None]
    assert len(told) <= 1
    return told[0] if told else None


@st.composite
def mixed(draw: st.DrawFn, count: int, good: Any, bad: Any) -> list[Any]:
    """Draw values; of four lists that are not empty, three have at least one of the bad."""
    values = draw(st.lists(good, min_size=count, max_size=count))
    if values and draw(st.sampled_from([True, True, True, False])):
        for at in draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3)):
            values[at] = draw(bad)
    return values


def labels(classes: int, *others: int, count: int) -> st.SearchStrategy[list[int]]:
    """Draw classes, and among them some beyond and numbers of 32 bits and more."""
    wild = (classes, classes + 1, -1, -100, 255, 2**31, 2**32 + 1, -(2**33))
    good = st.one_of(*[st.integers(0, max(classes - 1, 0))] * 6, st.sampled_from(others or (0,)))
    return mixed(count, good, st.sampled_from(wild))


def elements(tensor: torch.Tensor) -> Iterator[tuple[Position, Any]]:
    """Return every element with its position, in row-major order, one by one."""

    def walk(value: Any, position: Position) -> Iterator[tuple[Position, Any]]:
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield from walk(item, (*position, index))
        else:
            yield position, value

    yield from walk(tensor.tolist(), ())


def loop(tensor: torch.Tensor, is_good: Callable[[Any], bool]) -> list[tuple[Position, Any]]:
    """Return the bad elements as a plain loop finds them."""
    return [(position, value) for position, value in elements(tensor) if not is_good(value)]


def same_number(shown: Any, value: Any, dtype: torch.dtype) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return isinstance(shown, str) and shown == str(value)
    return bool(torch.tensor(shown, dtype=dtype).item() == value)


def agree(found: Violation | None, tensor: torch.Tensor, bad: list[tuple[Position, Any]]) -> None:
    """Assert that a finding lists exactly the elements that the loop found, or that none did."""
    assert (found is not None) == bool(bad)
    if found is None:
        return
    assert found.offenders.count == len(bad)
    assert found.offenders.total == tensor.numel()
    assert [item.position for item in found.offenders.first] == [place for place, _ in bad[:20]]
    for item, (_, value) in zip(found.offenders.first, bad, strict=False):
        assert same_number(item.value, value, tensor.dtype)
