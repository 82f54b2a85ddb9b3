"""What the tests of the rehearsal device share."""

from __future__ import annotations

import subprocess
import textwrap

import torch
from torch import Tensor

from tests.processes import python

CUDA = torch.device("cuda", 0)
SAME_DEVICE = "Expected all tensors to be on the same device, but "
ASSERTED = "device-side assert triggered"


def on_cuda(*shape: int) -> Tensor:
    return torch.randn(*shape).to(CUDA)


def same(device: Tensor, host: Tensor, tolerance: float = 1e-5) -> bool:
    assert device.is_cuda
    return torch.allclose(device.cpu(), host, atol=tolerance, rtol=tolerance)


def run_python(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own and return what it printed."""
    return python("-c", textwrap.dedent(source), timeout=120, **environment)
