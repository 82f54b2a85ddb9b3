"""The reading of values that count from 0 and need more places than there are."""

from __future__ import annotations

import pytest

from tests.hint_evidence import (
    ONE_TO_TEN,
    Cause,
    check_cause,
    labels,
)

CAUSES: dict[str, Cause] = {
    "too_few_outputs": Cause(
        labels([0, 1, 2, 3] * 4, 3), rule="too_few_places", says=("they need 4 outputs",)
    ),
}
NEIGHBOURS: dict[str, Cause] = {
    "0": Cause(labels([0, *ONE_TO_TEN], 10), rule="too_few_places"),
}
"""One step away from another cause."""


@pytest.mark.parametrize("cause", (rows := {**CAUSES, **NEIGHBOURS}).values(), ids=rows)
def test_the_cause_and_no_other_is_said(cause: Cause) -> None:
    check_cause(cause)
