"""Cells in which a guard finds a value whose origin was once misread."""

from __future__ import annotations

import pytest

from cudalens import simulate
from tests.misread import Cell, cells, check


@pytest.mark.parametrize("cell", cells("values"), ids=lambda cell: cell[0])
def test_the_origin_of_a_value_is_not_misread(cell: Cell, sim: simulate.Simulation) -> None:
    check(cell, sim)
