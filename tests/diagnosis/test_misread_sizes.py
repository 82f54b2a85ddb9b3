"""Cells in which a guard finds a value whose bound, or whose neighbours, were once misread."""

from __future__ import annotations

import pytest

from cudalens import simulate
from tests.misread import Cell, cells, check


@pytest.mark.parametrize("cell", cells("sizes"), ids=lambda cell: cell[0])
def test_a_bound_is_not_misread(cell: Cell, sim: simulate.Simulation) -> None:
    check(cell, sim)
