"""A shell over the rehearsal device, with a table and an index that lies outside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cudalens import simulate
from tests.shells import run, shell_with_cudalens

SETUP = """\
import torch, torch.nn.functional as F
table = torch.zeros(5, 2, device="cuda")
ids = torch.tensor([1, 7, 2], device="cuda")"""
BAD = "F.embedding(ids, table)"


@pytest.fixture
def shell(sim: simulate.Simulation) -> Iterator[Any]:
    """A shell in which :data:`BAD` is stopped; its next cell is the third."""
    with shell_with_cudalens() as opened:
        run(opened, SETUP)
        yield opened
