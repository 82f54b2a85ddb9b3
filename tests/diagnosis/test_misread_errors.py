"""Cells that end with an exception of torch's which was once misread."""

from __future__ import annotations

import pytest

from cudalens import simulate
from tests.misread import Cell, cells, check


@pytest.mark.parametrize("cell", cells("errors"), ids=lambda cell: cell[0])
def test_an_error_is_not_misread(cell: Cell, sim: simulate.Simulation) -> None:
    check(cell, sim)
