"""The rehearsal device for the tests of this folder."""

from __future__ import annotations

import pytest
import torch

from cudalens.simulate import Simulation


@pytest.fixture
def seeded(sim: Simulation) -> None:
    """Run every test on the device, with the same random numbers."""
    torch.manual_seed(0)
