"""What the tests of the simulated device share."""

from __future__ import annotations

import copy
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.processes import python

CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[2]
SAME_DEVICE = "Expected all tensors to be on the same device, but "
ASSERTED = "device-side assert triggered"


def on_cuda(*shape: int) -> Tensor:
    return torch.randn(*shape).to(CUDA)


def same(device: Tensor, host: Tensor, tolerance: float = 1e-5) -> bool:
    assert device.is_cuda
    return torch.allclose(device.cpu(), host, atol=tolerance, rtol=tolerance)


def trained(
    module: nn.Module, *inputs: Tensor, output: Callable[[Any], Tensor] = lambda y: y
) -> tuple[Tensor, list[Tensor]]:
    """Run one forward and backward pass; return the result and every gradient."""
    result = output(module(*inputs))
    result.square().mean().backward()
    return result.detach(), [p.grad for p in module.parameters() if p.grad is not None]


def assert_like_cpu(
    module: nn.Module, *inputs: Tensor, output: Callable[[Any], Tensor] = lambda y: y
) -> None:
    """Train one step on both devices and compare results and gradients."""
    host, host_grads = trained(copy.deepcopy(module), *inputs, output=output)
    moved = copy.deepcopy(module).to(CUDA)
    device, device_grads = trained(moved, *(x.to(CUDA) for x in inputs), output=output)
    assert same(device, host, 1e-4)
    assert len(device_grads) == len(host_grads) > 0
    assert all(same(d, h, 1e-4) for d, h in zip(device_grads, host_grads, strict=True))


def run_python(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own and return what it printed."""
    return python("-c", textwrap.dedent(source), timeout=120, **environment)
