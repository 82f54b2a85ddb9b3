"""What torch refuses on the host never meets the kernel: no guard speaks up before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import ones, tensor, zeros

from tests.cpu_guards import guarded, positions

aten = torch.ops.aten


@pytest.mark.parametrize(
    "call",
    [
        lambda i: aten.max_unpool2d(ones(1, 1, 2), i.view(1, 1, 3), [2, 2]),
        lambda i: aten.max_unpool3d(
            ones(1, 1, 1, 2), i.view(1, 1, 1, 3), [2, 2, 2], [2, 2, 2], [0, 0, 0]
        ),
        lambda i: aten.adaptive_max_pool2d_backward(ones(1, 1, 1), zeros(1, 2, 2), i.view(1, 1, 3)),
        lambda i: aten.adaptive_max_pool3d_backward(
            ones(1, 1, 1, 1), zeros(1, 2, 2, 2), i.view(1, 1, 1, 3)
        ),
    ],
)
def test_positions_of_another_shape_are_torch_s_to_refuse(call: Any) -> None:
    """More positions than values: torch's own error comes, whatever the positions are."""
    with guarded() as guards:
        error = guards.unguarded(lambda: call(tensor([0, 99, 1])))
    assert guards.found == []
    assert isinstance(error, (RuntimeError, IndexError))


@pytest.mark.parametrize(
    ("offsets", "position", "interval"),
    [
        ([0, 4], (1,), "0 … 3"),
        ([9, 4, 2], (1,), "0 … 3"),
        ([0, 2, 1], (2,), "2 … 3"),
        ([0, 3, 4], (2,), "3 … 3"),
    ],
)
def test_an_offset_is_bounded_by_the_one_before_it(
    offsets: list[int], position: tuple[int, ...], interval: str
) -> None:
    """The headline names the offset before, and 0 before the second: the first counts as 0."""
    with guarded() as guards:
        found = guards.look(
            lambda: aten._embedding_bag(zeros(3, 2), tensor([0, 1, 2]), tensor(offsets))
        )
    assert found is not None
    assert positions(found)[0] == position
    assert f"is outside {interval}: from the offset before it" in found.headline
