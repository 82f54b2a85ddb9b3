"""Forward, backward, optimizer, or none of them: from the frames that were running."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cudalens import DeviceAssertError
from tests.blocks import report_of

WEIGHT = nn.Parameter(torch.ones(3))


def step() -> None:
    WEIGHT.grad = torch.ones(3)
    optimizer = torch.optim.SGD([WEIGHT], lr=1.0)
    optimizer.param_groups[0]["lr"] = "fast"
    optimizer.step()


class Sam(torch.optim.SGD):
    """An optimizer of the user's, with a method of its own beside the closure."""

    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        self.climb(closure() if closure is not None else None)

    def climb(self, loss: Any) -> None:
        torch.ones(2) + torch.ones(3)


def adds() -> object:
    return WEIGHT.sum() + torch.ones(4) + torch.ones(5)


def runs_module() -> object:
    return nn.Linear(3, 3)(torch.ones(2, 4))


class Closure:
    def __call__(self) -> object:
        return adds()


def ids() -> torch.Tensor:
    return torch.tensor([1, 3], device="cuda")


@pytest.mark.parametrize(
    ("call", "phase"),
    [
        (lambda: nn.Linear(3, 3)(torch.ones(2, 4)), "forward"),
        (lambda: torch.ones(2, 3) @ torch.ones(2, 3), "forward"),
        (lambda: (WEIGHT * 2).backward(), "backward"),
        (lambda: torch.autograd.grad(WEIGHT.sum(), torch.ones(2)), "backward"),
        (step, "optimizer"),
        (lambda: torch.optim.LBFGS([WEIGHT]).step(adds), "forward"),
        (lambda: torch.optim.Adam([WEIGHT]).step(partial(adds)), "forward"),
        (lambda: torch.optim.Adam([WEIGHT]).step(Closure()), "forward"),
        (lambda: torch.optim.Adam([WEIGHT]).step(runs_module), "forward"),
        (lambda: torch.optim.Adam([WEIGHT]).step(lambda: adds().backward()), "forward"),
        (lambda: torch.optim.Adam([WEIGHT]).step((WEIGHT * 2).backward), "backward"),
        (lambda: Sam([WEIGHT]).step(adds), "forward"),
        (lambda: Sam([WEIGHT]).step(closure=WEIGHT.sum), "optimizer"),
        (lambda: torch.optim.SGD([], lr=1.0), "unknown"),
        (lambda: nn.MultiheadAttention(10, 3), "unknown"),
        (lambda: nn.Linear(3, 3).load_state_dict({}), "unknown"),
    ],
)
def test_the_phase_is_what_was_running(call: Callable[[], object], phase: str) -> None:
    assert report_of(call, Exception).phase == phase


@pytest.mark.parametrize(
    ("kind", "closure", "phase"),
    [
        (torch.optim.Adam, lambda: torch.ones(3, device="cuda")[ids()], "forward"),
        (torch.optim.Adam, lambda: F.one_hot(ids(), 3), "forward"),
        (Sam, lambda: torch.ones(3, device="cuda")[ids()], "forward"),
    ],
)
@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("fast", [False, True])
def test_a_finding_in_what_a_step_calls_is_of_the_forward_pass(
    kind: Any, closure: Callable[[], object], phase: str, *, fast: bool
) -> None:
    parameter = nn.Parameter(torch.ones(3, device="cuda"))
    report = report_of(lambda: kind([parameter]).step(closure), DeviceAssertError, fast=fast)
    assert report.phase == phase
