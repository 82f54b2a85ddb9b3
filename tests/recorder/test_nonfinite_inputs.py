"""Which of several inputs that are not finite a bad value of the result came from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cudalens.recorder.calls import Api
from cudalens.recorder.nonfinite_inputs import at_fault
from cudalens.recorder.nonfinite_marks import Maker, NonFiniteTensor, Step

STEP = Step("torch.log", None)


def mark(tensor: Tensor, kind: Any = "entered") -> NonFiniteTensor:
    return NonFiniteTensor(ref(tensor), 0, Maker(kind, STEP, has_nan=True), has_nan=True)


def bad(shape: Sequence[int], at: tuple[int, ...]) -> Tensor:
    made = torch.ones(*shape)
    made[at] = math.nan
    return made


def found(func: Any, args: Sequence[Any], inputs: Sequence[Tensor]) -> int:
    """Return which of the inputs is at fault for the first bad value of a call."""
    result = func(*args)
    marks = [mark(item) for item in inputs]
    return marks.index(at_fault(Api(func), args, result, ~torch.isfinite(result), marks))


A, B = bad((2, 3), (1, 2)), bad((2, 3), (0, 1))
LEFT, RIGHT = bad((2, 3), (1, 0)), bad((3, 4), (0, 2))
FIRST, WEIGHT = bad((2, 3), (0, 0)), bad((4, 3), (3, 1))
COLUMN = bad((3,), (1,))
BATCHED = bad((2, 2, 3), (1, 0, 0))
WIDER, SECOND = bad((1, 2, 2, 3), (0, 1, 1, 0)), bad((2, 3, 4), (0, 0, 2))


@pytest.mark.parametrize(
    ("func", "args", "inputs", "which"),
    [
        (torch.add, (A, B), (A, B), 1), (torch.add, (A, B), (B, A), 0),
        (torch.add, (A, bad((3,), (2,))), (A,), 0), (torch.add, (COLUMN, A), (A, COLUMN), 1),
        (torch.mm, (LEFT, RIGHT), (LEFT, RIGHT), 1),
        (torch.mm, (LEFT, torch.ones(3, 4)), (LEFT, RIGHT), 0),
        (torch.bmm, (BATCHED, torch.ones(2, 3, 1)), (BATCHED, RIGHT), 0),
        (torch.matmul, (BATCHED, RIGHT), (BATCHED, RIGHT), 1),
        (torch.matmul, (WIDER, SECOND), (WIDER, SECOND), 1),
        (torch.mv, (LEFT, COLUMN), (LEFT, COLUMN), 1),  # of one dimension
        (F.linear, (LEFT, WEIGHT), (LEFT, WEIGHT), 1),
        (F.linear, (FIRST, WEIGHT), (WEIGHT, FIRST), 1),
    ],
)  # fmt: skip
def test_the_input_at_the_place_of_the_bad_value(
    func: Any, args: Any, inputs: Any, which: int
) -> None:
    assert found(func, args, inputs) == which


PARTS = [torch.ones(2), bad((3,), (2,)), bad((1,), (0,))]
ROWS = [torch.ones(2), bad((2,), (1,)), bad((2,), (0,))]
TALL = [bad((3, 1), (2, 0)), bad((3, 1), (0, 0))]
WIDE = [bad((2, 2), (1, 1)), bad((2, 1), (0, 0))]


@pytest.mark.parametrize(
    ("func", "args", "inputs", "which"),
    [
        (torch.cat, (PARTS,), PARTS[1:], 0), (torch.cat, (PARTS,), PARTS[:0:-1], 1),
        (torch.stack, (ROWS,), ROWS[:0:-1], 1), (torch.stack, (ROWS, 1), ROWS[1:], 1),
        (torch.stack, (ROWS, -1), ROWS[1:], 1), (torch.cat, (WIDE, 1), WIDE, 1),
        (torch.cat, (WIDE, -1), WIDE, 1), (torch.concat, (TALL, 1), TALL, 1),
        (torch.concatenate, (TALL, 1), TALL, 1),
    ],
)  # fmt: skip
def test_the_part_that_a_bad_value_was_joined_from(
    func: Any, args: Any, inputs: Any, which: int
) -> None:
    assert found(func, args, inputs) == which


def test_without_places_what_a_call_has_made_comes_first() -> None:
    entered, asked, made = mark(A), mark(B, "asked"), mark(A, "made")
    result = torch.tensor(math.nan)
    api, is_bad = Api(torch.sum), torch.tensor([True])
    assert at_fault(api, (A,), result, is_bad, [entered, asked, made]) is made
    assert at_fault(api, (A,), result, is_bad, [asked, entered]) is asked
    assert at_fault(api, (A,), result, is_bad, [entered]) is entered


def test_an_input_that_is_gone_is_not_read() -> None:
    gone, made = mark(torch.ones(1)), mark(A, "made")
    result = A + 1
    assert at_fault(Api(torch.add), (A, 1), result, result.isnan(), [gone, made]) is made
