"""What fills the device, by the names of the user's variables."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from cudalens.evidence.memory import largest

pytestmark = pytest.mark.usefixtures("sim")


def held(table: Tensor, net: nn.Module, adam: object, batch: object, host: Tensor) -> object:
    """Return what is said of the largest parameters."""
    return largest([sys._getframe()])[:4]


def test_the_largest_holders_are_named_and_shared_memory_counts_once() -> None:
    net = nn.Linear(64, 64, device="cuda")
    net(torch.ones(2, 64, device="cuda")).sum().backward()
    adam = torch.optim.Adam(net.parameters())
    adam.step()
    table = torch.zeros(256, 128, device="cuda")
    batch = {"a": torch.ones(1024, device="cuda"), "b": table[1:], "n": 3}
    assert held(table, net, adam, batch, torch.zeros(1 << 20)) == (
        "table: 128.00 KiB, float32 (256, 128)",
        "net: 32.50 KiB, parameters and gradients of Linear",
        "adam: 32.50 KiB, state of Adam",
        "batch: 4.00 KiB in 3 items",
    )
