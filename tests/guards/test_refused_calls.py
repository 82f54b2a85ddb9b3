"""Calls that torch refuses on the host, whatever their values are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import ones, tensor

from cudalens.guards.refused_calls import is_refused

aten = torch.ops.aten
INDEX, THERE = tensor([0]), ones(3, device="meta")


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        (aten.gather.default, (ones(3), 0, INDEX), False),
        (aten.gather.default, (THERE, 0, INDEX), True),
        (aten.gather.default, (THERE, 0, INDEX.to("meta")), False),
        # A number without dimensions may stay on the host, but not on another device.
        (aten.add.Tensor, (THERE, tensor(1.0)), False),
        (aten.add.Tensor, (THERE, tensor([1.0])), True),
        (aten.add.Tensor, (ones(3), tensor(1.0, device="meta")), True),
        # So may what indexes, in a list.
        (aten.index.Tensor, (THERE, [INDEX]), False),
        (aten.index.Tensor, (ones(3), [INDEX.to("meta")]), True),
        # And the targets and lengths of a CTC loss.
        (aten._ctc_loss.Tensor, (THERE, ones(2, 2), INDEX, INDEX), False),
        (aten.nll_loss_forward.default, (THERE, INDEX, None, 1, -100), True),
    ],
)
def test_tensors_of_two_devices(op: Any, args: tuple[Any, ...], expected: bool) -> None:
    assert is_refused(op, args, {}) is expected


def test_keywords_count_like_other_arguments() -> None:
    assert is_refused(aten.gather.default, (THERE, 0), {"index": INDEX})
    assert not is_refused(aten.gather.default, (ones(3), 0), {"index": INDEX})


def test_a_mask_that_would_need_a_larger_tensor_in_place() -> None:
    wide, source = ones(2, 3) > 0, ones(6)
    assert is_refused(aten.masked_scatter_.default, (ones(3), wide, source), {})
    assert not is_refused(aten.masked_scatter_.default, (ones(2, 3), wide[0], source), {})
    assert not is_refused(aten.masked_scatter.default, (ones(3), wide, source), {})
