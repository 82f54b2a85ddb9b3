"""Forward, backward, optimizer, or none of them: from the frames that were running."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.blocks import report_of

WEIGHT = nn.Parameter(torch.ones(3))


def step() -> None:
    WEIGHT.grad = torch.ones(3)
    optimizer = torch.optim.SGD([WEIGHT], lr=1.0)
    optimizer.param_groups[0]["lr"] = "fast"
    optimizer.step()


@pytest.mark.parametrize(
    ("call", "phase"),
    [
        (lambda: nn.Linear(3, 3)(torch.ones(2, 4)), "forward"),
        (lambda: torch.ones(2, 3) @ torch.ones(2, 3), "forward"),
        (lambda: (WEIGHT * 2).backward(), "backward"),
        (lambda: torch.autograd.grad(WEIGHT.sum(), torch.ones(2)), "backward"),
        (step, "optimizer"),
        (lambda: torch.optim.SGD([], lr=1.0), "unknown"),
        (lambda: nn.MultiheadAttention(10, 3), "unknown"),
        (lambda: nn.Linear(3, 3).load_state_dict({}), "unknown"),
    ],
)
def test_the_phase_is_what_was_running(call: Callable[[], object], phase: str) -> None:
    assert report_of(call, Exception).phase == phase
