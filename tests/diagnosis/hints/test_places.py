"""The reading of values that count from 0 and need more places than there are."""

from __future__ import annotations

import pytest

from cudalens.core.report_types import SeenBefore
from cudalens.diagnosis.hints.places import too_few_places
from tests.hint_evidence import (
    ONE_TO_TEN,
    Cause,
    check_cause,
    labels,
)

CAUSES: dict[str, Cause] = {
    "too_few_outputs": Cause(
        labels([0, 1, 2, 3] * 4, 3),
        rule="too_few_places",
        says=(
            "if each is a class, they need 4 outputs, there are 3",
            "If 0 marks labels to leave out, subtract 1",
        ),
    ),
    "too_few_outputs_with_0_or_without": Cause(
        labels([0, 1, 2, 3, 4] * 4, 3),
        rule="too_few_places",
        says=("without a gap: they need 5 outputs, there are 3",),
    ),
    "ignored_0": Cause(
        labels([0, 1, 2, 3] * 4, 3, scalars={"ignore_index": "0"}),
        rule="too_few_places",
        says=("but for the ignored 0 the labels run from 1 to 3 without a gap, and the 3 outputs",),
    ),
}
NEIGHBOURS: dict[str, Cause] = {
    "0": Cause(labels([0, *ONE_TO_TEN], 10), rule="too_few_places"),
}
"""One step away from another cause."""


@pytest.mark.parametrize("cause", (rows := {**CAUSES, **NEIGHBOURS}).values(), ids=rows)
def test_the_cause_and_no_other_is_said(cause: Cause) -> None:
    check_cause(cause)


@pytest.mark.parametrize(("most", "is_told"), [(2, False), (3, True), (4, True), (None, False)])
def test_earlier_calls_within_the_bound_leave_both_sides_open(
    most: int | None, is_told: bool
) -> None:
    """Another data set may number things of its own; without values a call that came back fits."""
    seen = SeenBefore(calls=3, min=0, max=most)
    hint = too_few_places(labels([0, 1, 2, 3] * 4, 3, seen_before=seen))
    assert (hint is not None) is is_told


@pytest.mark.parametrize(("places", "is_told"), [(1, False), (2, True)])
def test_one_place_counts_nothing(places: int, is_told: bool) -> None:
    hint = too_few_places(labels([*range(places + 1)] * 4, places))
    assert (hint is not None) is is_told


@pytest.mark.parametrize(("least", "is_told"), [(0, True), (1, False)])
def test_a_batch_that_counts_from_one_beside_another_leaves_both_open(
    least: int, is_told: bool
) -> None:
    """One from 0 has numbered something else."""
    batch = [*range(least, 6)] * 9
    seen = SeenBefore(calls=3, min=0, max=5)
    assert (too_few_places(labels(batch, 5, seen_before=seen)) is not None) is is_told
