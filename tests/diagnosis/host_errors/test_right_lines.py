"""Lines much like those that torch refuses, where nothing is wrong."""

from __future__ import annotations

import pytest

from tests.host_errors import CASES, SETUP, Case, ident
from tests.hostcells import run_cell

pytestmark = pytest.mark.usefixtures("sim")


@pytest.mark.parametrize("case", CASES, ids=ident)
def test_the_neighbour_is_silent(case: Case) -> None:
    """The same line done right gives no report."""
    outcome = run_cell(f"{SETUP}{case.setup}\n{case.good}")
    assert (outcome.error, outcome.report) == (None, None)
