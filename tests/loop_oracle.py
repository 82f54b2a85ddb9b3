"""What a plain Python loop over the elements finds, to hold against a guard's finding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st

from cudalens.core.report_types import Violation
from tests.cpu_guards import strided, transposed

Position = tuple[int, ...]
parity = settings(max_examples=40, deadline=None, derandomize=True, database=None)
ARRANGEMENTS = st.sampled_from([lambda x: x, transposed, strided])
FEW = st.integers(1, 4)


def labels(classes: int, *others: int) -> st.SearchStrategy[int]:
    """Mostly classes, at times one beyond, and numbers of 32 bits and more."""
    wild = (classes, classes + 1, -1, -100, 255, 2**31, 2**32 + 1, -(2**33), *others)
    return st.one_of(*[st.integers(0, max(classes - 1, 0))] * 6, st.sampled_from(wild))


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
