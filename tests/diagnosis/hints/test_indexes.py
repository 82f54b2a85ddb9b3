"""Readings of indices: damaged numbers, other counting, lengths."""

from __future__ import annotations

import math

import pytest

from cudalens.diagnosis.hints.indexes import (
    is_length,
    nan_cast_to_integer,
    one_based_ids,
)
from tests.hint_evidence import (
    TRANSFORMERS,
    Cause,
    cast,
    check_cause,
    ctc,
    hints_of,
    indexed,
    lookup,
    out_of_range,
    tensor,
)

CAUSES: dict[str, Cause] = {
    "no_blank": Cause(
        out_of_range(
            "aten::_ctc_loss", "targets", [1, 2, 3, 4], 4, expression="t", scalars={"blank": "0"}
        ),
        rule="no_class_for_blank",
        says=("label 4 needs 5 classes",),
    ),
    "one_based_ids": Cause(
        lookup([1, 2, 3, 4, 5], 5, name="movie", path="movies"),
        rule="one_based_ids",
        says=(
            "1 to 5",
            "a table of 6 rows",
        ),
    ),
    "nan_cast": Cause(
        cast([0, -(1 << 63)], 10, tensor(None, "x", [0.25, math.nan])),
        rule="nan_cast_to_integer",
        says=("-9223372036854775808",),
    ),
}
NEIGHBOURS: dict[str, Cause] = {
    "labels from behind the blank": Cause(ctc([1, 2, 3, 4, 5], "0"), rule="no_class_for_blank"),
    "the blank among the labels": Cause(ctc([0, 2, 3, 4, 5], "0"), rule="observations"),
    "the blank last": Cause(ctc([1, 2, 3, 4, 5], "4"), rule="one_based_ids"),
    "an index from 1": Cause(indexed("at"), rule="one_based_ids", says=("or make 6 rows",)),
}
"""One step away from another cause."""


@pytest.mark.parametrize("cause", (rows := {**CAUSES, **NEIGHBOURS}).values(), ids=rows)
def test_the_cause_and_no_other_is_said(cause: Cause) -> None:
    check_cause(cause)


@pytest.mark.parametrize(("padding", "is_said"), [(-1, True), (1, True), (0, False)])
def test_row_0_that_is_for_padding_is_not_missed(padding: int, is_said: bool) -> None:
    evidence = lookup([1, 2, 3, 4, 5], 5, name="movie", path="movies", padding=padding)
    assert ("one_based_ids" in [hint.rule for hint in hints_of(evidence)]) is is_said


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("batch['Seq_Len']", True),
        ("lengths", True),
        ("x.lens", True),
        ("length - 1", True),
        ("silent", False),
        ("lent", False),
        ("le\nn", False),
        (None, False),
    ],
)
def test_what_the_user_calls_a_length(name: str | None, is_one: bool) -> None:
    assert is_length(tensor("index", name, [1, 2])) is is_one
    assert not is_length(None)


@pytest.mark.parametrize(("name", "is_said"), [("at", True), ("lengths", False)])
def test_a_length_is_one_more_than_the_last_place(name: str, is_said: bool) -> None:
    assert (one_based_ids(indexed(name)) is not None) is is_said


def test_ids_of_a_library_are_not_counted_from_one() -> None:
    ids = lookup([1, 2, 3, 4, 5], 5, name="movie")
    assert one_based_ids(ids) is not None
    assert one_based_ids(lookup([1, 2, 3, 4, 5], 5, name="movie", library=TRANSFORMERS)) is None


def test_of_two_numbers_that_a_cast_made_the_smaller_is_named() -> None:
    hint = nan_cast_to_integer(lookup([-(1 << 63), (1 << 63) - 1], 10))
    assert hint is not None
    assert hint.text == "-9223372036854775808 is the integer that NaN or infinity is cast to"
    assert nan_cast_to_integer(lookup([-(1 << 62), 3], 10)) is None
