"""Guards of max_unpool: the bounds of one plane."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, ones, tensor

from tests.cpu_guards import assert_said, said_id
from tests.verdicts import ask

aten = torch.ops.aten


def unpooled(indices: Tensor, pooled: Tensor, sizes: list[int]) -> Any:
    rest = ([2] * len(sizes), [0] * len(sizes)) if len(sizes) == 3 else ()
    op = aten.max_unpool3d.default if len(sizes) == 3 else aten.max_unpool2d.default
    return next(iter(dict(ask(op, pooled, indices, sizes, *rest)).values()), None)


@pytest.mark.parametrize(
    ("last", "pooled", "sizes", "said"),
    [
        (5, ones(1, 1, 2), [2, 3], None),
        (
            6,
            ones(1, 1, 2),
            [2, 3],
            {
                "headline": "{argument}[0, 0, 1] = 6 is outside the 6 elements of a plane of 2 × 3",
                "bounds.text": "0 … 5",
                "line": "MaxUnpooling.cu:48",
            },
        ),
        (-1, ones(1, 1, 2), [2, 3], {"at": [(0, 0, 1)]}),
        (23, ones(1, 1, 1, 2), [2, 3, 4], None),
        (24, ones(1, 1, 1, 2), [2, 3, 4], {"size": 24, "line": "MaxUnpooling.cu:70"}),
        (6, ones(1, 1, 2), [2, 0], None),
    ],
    ids=said_id,
)
def test_a_position_in_a_plane(
    last: int, pooled: Tensor, sizes: list[int], said: dict[str, Any] | None
) -> None:
    assert_said(unpooled(tensor([0, last]).view(pooled.shape), pooled, sizes), said)


def test_what_torch_refuses_is_not_judged() -> None:
    index = tensor([[[9]]])
    assert unpooled(index, ones(1, 1, 1), [2, 3]) is not None
    assert unpooled(index.int(), ones(1, 1, 1), [2, 3]) is None
    assert unpooled(index, ones(1, 1, 2), [2, 3]) is None
    assert unpooled(index, ones(1, 1), [2, 3]) is None


def test_only_the_kernel_of_planes_cuts_indices_to_32_bits() -> None:
    wide = tensor([2**32])
    assert unpooled(wide.view(1, 1, 1), ones(1, 1, 1), [2, 3]).device_text is None
    assert unpooled(wide.view(1, 1, 1, 1), ones(1, 1, 1, 1), [2, 3, 4]).device_text is not None
