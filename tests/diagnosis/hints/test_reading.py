"""The integers at fault as the rules ask about them: how they count, and what damaged them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cudalens.core.evidence_types import DatasetColumn
from cudalens.core.graph_types import WRITES
from cudalens.core.report import Evidence
from cudalens.core.report_types import SeenBefore
from cudalens.diagnosis.hints._reading import (
    Ids,
    adding_line,
    copies_of,
    filled_side,
    fills_row_ends,
    ids_of,
    is_made_by_sum,
    is_shifted,
    is_written,
    numel,
    runs_from_one,
    whole_column,
)
from tests.hint_evidence import behind, hints_of, indexed, labels, lookup, step, tensor


def ids(evidence: Evidence) -> Ids:
    found = ids_of(evidence, "label", "token", "index", "position")
    assert found is not None
    return found


# --- how they count -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distinct", "size", "count", "runs"),
    [
        ((1, 2, 3, 4, 5), 5, None, True),
        ((1, 2, 3, 4), 4, None, False),
        ((1, 2, 3, 4), 4, 14, True),
        ((1, 2, 3, 4), 4, 13, False),
        ((0, 1, 2, 3, 4, 5), 5, 99, False),
        ((1, 2, 3, 4), 5, 99, False),
        ((1, 2, 3, 4, 5, 6), 5, 99, False),
        ((*range(1, 20), 21), 21, 999, True),
        ((*range(1, 9), 10), 10, 999, True),
        ((1, 2, 3, 4, 6, 7, 8, 9, 10, 12), 12, 999, False),
        ((), 0, 0, False),
        (None, 5, 99, False),
    ],
)
def test_values_that_cover_1_to_the_size(
    distinct: tuple[int, ...] | None, size: int, count: int | None, runs: bool
) -> None:
    assert runs_from_one(distinct, size, count) is runs


def test_the_ends_of_all_values_that_were_seen() -> None:
    found = ids(labels([1, 4, -100, 10], 10))
    assert (found.low, found.high, found.distinct, found.kinds) == (1, 10, (1, 4, 10), 3)
    assert found.count is None
    assert (found.size, found.bad, found.bad_share) == (10, {10}, 0.25)
    assert ids(labels([1, 4, 10], 10)).count == 3
    earlier = SeenBefore(calls=2, min=0, max=12)
    found = ids(labels([1, 4, 10], 10, seen_before=earlier))
    assert (found.low, found.high, found.distinct) == (0, 12, (0, 1, 4, 10, 12))


@pytest.mark.parametrize(
    ("earlier", "words"),
    [
        (None, "the 3 labels"),
        (SeenBefore(calls=2, min=0, max=12), "the labels of this and 2 earlier calls"),
        (SeenBefore(calls=1, min=0, max=12), "the labels of this and an earlier call"),
        (SeenBefore(calls=2), "the 3 labels"),
    ],
)
def test_earlier_calls_are_said_where_their_values_were_read(
    earlier: SeenBefore | None, words: str
) -> None:
    """Nobody reads the values of a call on the CPU that was right: it is only counted."""
    assert ids(labels([1, 4, 10], 10, seen_before=earlier)).every("labels") == words
    assert ids(labels([10], 10)).every("labels") == "the labels"


@pytest.mark.parametrize(("note", "of"), [("batch 2 of loader", " of this batch"), (None, "")])
def test_what_a_loader_gave_is_of_a_batch(note: str | None, of: str) -> None:
    given = behind(labels([1, 4, 10], 10), step(None, None, note))
    assert ids(given).every("labels") == f"the 3 labels{of}"


def test_of_a_part_of_a_vector_all_values_are_known() -> None:
    """What earlier calls had is in it too."""
    whole = tensor(None, "y", [0, 1, 4, 10, 3])
    earlier = SeenBefore(calls=2, min=-1, max=12)
    facts = {"name": "y[batch]", "others": (whole,), "seen_before": earlier}
    found = ids(labels([1, 4, 10], 10, **facts))
    assert (found.low, found.high, found.distinct) == (0, 10, (0, 1, 3, 4, 10))
    assert (found.count, found.is_whole, found.may_have_zero) == (5, True, False)
    many = replace(whole, summary=replace(whole.summary, unique=None))
    found = ids(labels([1, 4, 10], 10, **{**facts, "others": (many,)}))
    assert (found.low, found.high, found.distinct) == (-1, 12, (-1, 1, 4, 10, 12))
    assert (found.count, found.is_whole, found.may_have_zero) == (3, False, True)
    matrix = replace(whole, shape=(1, 5))
    assert not ids(labels([1, 4, 10], 10, **{**facts, "others": (matrix,)})).is_whole
    same = tensor(None, "y", [1, 4, 10])
    assert not ids(labels([1, 4, 10], 10, **{**facts, "others": (same,)})).is_whole
    assert ids(labels([1, 4, 10], 10, **{**facts, "name": "y.to(d)[batch].long()"})).is_whole
    assert ids(labels([1, 4, 10], 10, **{**facts, "name": "y.data[batch]"})).is_whole
    assert not ids(labels([1, 4, 10], 10, **{**facts, "name": "y.float()[batch]"})).is_whole


@pytest.mark.parametrize(
    ("text", "op", "is_it"),
    [
        ("y = y + 1", "aten::add", True),
        ("y = 1 + y", "aten::add", True),
        ("y = 1 + y", "torch.Tensor.__radd__", True),
        ("y += 1", "torch.Tensor.__iadd__", True),
        ("y = a.b[0].to(device).view(-1) + 1", "aten::add", True),
        ("y = y + 2", "aten::add", False),
        ("y = y - 1", "aten::add", False),
        ("y = y % 10 + 1", "aten::add", False),
        ("y = f(y) + 1", "aten::add", False),
        ("y = y.round() + 1", "aten::add", False),
        ("y = y + 1", "aten::mul", False),
    ],
)
def test_the_line_that_added_just_this_number(text: str, op: str, is_it: bool) -> None:
    found = adding_line(behind(labels([10], 10), step(op, text, f"{WRITES} 10")), 1)
    assert (found is not None and found.text == text) is is_it


def test_other_roles_are_not_read() -> None:
    assert ids_of(labels([10], 10), "token") is None
    assert ids_of(Evidence(), "label") is None


def test_numbers_that_a_cast_of_nan_made_are_no_ids() -> None:
    assert ids_of(labels([1, 10, -(1 << 63)], 10), "label") is None
    assert ids_of(labels([1, 10, 1 - (1 << 63)], 10), "label") is not None


def test_the_shape_that_ids_had_before_they_were_flattened() -> None:
    def shape(name: str) -> tuple[int, ...]:
        whole = tensor(None, "ids", [1, 2, 3, 4, 5, 9], (2, 3))
        values = [4, 5, 9] if "[" in name else [1, 2, 3, 4, 5, 9]
        return ids(lookup(values, 5, name=name, others=(whole,))).shape

    assert shape("ids.view(-1)") == (2, 3)
    assert shape("ids[1]") == (3,)


def test_values_above_the_end_alone() -> None:
    assert ids(labels([0, 10, 11], 10)).is_above
    assert not ids(labels([0, 10, -1], 10)).is_above
    below = SeenBefore(calls=1, min=-1, max=3)
    assert not ids(labels([0, 10], 10, seen_before=below)).is_above


def test_numbers_that_may_count_from_one() -> None:
    assert ids(lookup([1, 2, 5], 5)).may_count_from_one
    assert not ids(lookup([0, 2, 5], 5)).may_count_from_one
    assert not ids(lookup([1, 2, 6], 5)).may_count_from_one
    assert not ids(lookup([1, 2, 5], 5, name="row * 2")).may_count_from_one
    sorted_ones = behind(lookup([1, 2, 5], 5), step("torch.argsort", "ids = x.argsort()"))
    assert not ids(sorted_ones).may_count_from_one
    whole = tensor(None, "batch", [0, 1, 2, 5], (2, 2))
    assert not ids(lookup([1, 2, 5], 5, name="batch[0]", others=(whole,))).may_count_from_one
    # The other ends of edges number the same nodes.
    ends = tensor(None, "dst", [0, 2, 1])
    assert not ids(lookup([1, 2, 5], 5, others=(ends,))).may_count_from_one


def test_a_zero_that_may_stand_beside_a_mark() -> None:
    beside = SeenBefore(calls=1, min=-100, max=3)
    assert ids(labels([1, 2, 5], 5, seen_before=beside)).may_have_zero
    plain = SeenBefore(calls=1, min=1, max=3)
    assert not ids(labels([1, 2, 5], 5, seen_before=plain)).may_have_zero


@pytest.mark.parametrize(
    ("low", "distinct", "has_zero"),
    [(0, None, True), (0, (0, 4), True), (-1, (-1, 0, 4), True), (-1, None, False),
     (-1, (-1, 4), False), (1, (1, 4), False), (1, None, False)],
)  # fmt: skip
def test_a_zero_in_the_tensor_beside_these(
    low: int, distinct: tuple[int, ...] | None, has_zero: bool
) -> None:
    """As the other ends of edges, whose distinct values are not listed where they are many."""
    other = tensor("input", "ends", [1, 2, 4])
    other = replace(other, summary=replace(other.summary, min=low, unique=distinct))
    assert ids(labels([1, 2, 5], 5, others=(other,))).may_have_zero is has_zero
    floats = replace(other, dtype="float32")
    assert not ids(labels([1, 2, 5], 5, others=(floats,))).may_have_zero


def test_a_count_from_zero_without_a_gap() -> None:
    assert ids(labels([0, 1, 2, 3], 3)).is_count
    assert not ids(labels([0, 1, 3], 3)).is_count
    assert not ids(labels([1, 2, 3], 3)).is_count
    assert not ids(labels([-1, 0, 2, 3], 3)).is_count
    assert not ids(labels([0, 1, 2] * 40 + [3], 3)).is_count


def test_fewer_numbers_than_places_with_gaps() -> None:
    assert ids(labels([0, 5, 9] * 10, 5)).has_gaps
    assert not ids(labels([0, 5, 9], 5)).has_gaps
    assert not ids(labels([0, 1, 2, 3, 4, 9] * 10, 5)).has_gaps
    assert not ids(labels([0, 5, 9, -100] * 10, 5)).has_gaps  # how many are labels is not known
    assert [ids(labels([0, 5, top] * 10, 5)).has_gaps for top in (1023, 1024)] == [True, False]


# --- the ends of rows -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "side"),
    [
        ([[1, 9, 9], [1, 2, 9]], "end"),
        ([[9, 9, 1], [9, 2, 1]], "start"),
        ([[1, 2, 9], [1, 2, 9]], None),
        ([[9, 9, 9], [1, 2, 9]], "end"),
        ([[9, 9, 9], [1, 2, 3]], None),
        ([[1, 9, 9], [9, 2, 1]], None),
        ([[9, 1, 9], [1, 2, 9]], None),
        ([[1, 8, 9], [1, 2, 9]], None),
    ],
)
def test_a_number_that_fills_the_ends_of_rows(rows: list[list[int]], side: str | None) -> None:
    found = ids(lookup([it for row in rows for it in row], 5, shape=(2, 3)))
    assert filled_side(found) == side
    assert fills_row_ends(found) is (side is not None)


def test_one_row_or_a_tensor_of_three_dimensions_has_no_ends() -> None:
    assert filled_side(ids(lookup([1, 9, 9], 5))) is None
    assert filled_side(ids(lookup([1, 9, 9, 9] * 2, 5, shape=(2, 2, 2)))) is None
    assert filled_side(ids(lookup([1, 9, 9, 1, 2, 9], 5, shape=(2, 1, 3)))) == "end"


# --- damaged numbers ------------------------------------------------------------------------------


def test_ids_that_the_line_shifts() -> None:
    def shifts(name: str, *values: float, dtype: str = "int64") -> bool:
        before = tensor(None, "y", list(values), dtype=dtype)
        return is_shifted(labels([1, 10], 10, name=name, others=(before,)))

    assert shifts("y + 1", 0, 9)
    assert shifts("y - k", 0, 9)
    assert not shifts("y * 2", 0, 9)
    assert not shifts("y + 1", 0, 10)
    assert not shifts("y + 1", 0.0, 9.0, dtype="float32")
    assert not shifts("y + 1", -1, 9)
    assert not shifts("1 + y", 0, 9)
    assert not is_shifted(Evidence())


def test_ids_that_the_line_shifts_have_no_reading_but_as_positions_and_boxes() -> None:
    y = tensor(None, "y", [0, 4])
    read = [it.rule for it in hints_of(lookup([1, 5], 5, name="y + 1", path="seg", others=(y,)))]
    boxes = lookup([1, 500], 5, name="y + 1", path="x_position_embeddings", others=(y,))
    assert read == [] and [it.rule for it in hints_of(boxes)] == ["boxes_in_pixels"]


def test_a_recorded_sum_that_made_them() -> None:
    evidence = behind(
        indexed("at"), step("aten::view", "at = b.view(-1)"), step("aten::add", "b = a + 1")
    )
    assert is_made_by_sum(evidence)
    # What was computed before the sum is not known to have been within the bound.
    product = step("aten::mul", "a = c * 2")
    assert is_made_by_sum(behind(evidence, product))
    assert not is_made_by_sum(behind(indexed("at"), step("aten::add", "b = a + d"), product))
    assert is_made_by_sum(behind(indexed("at"), step("torch.Tensor.__rsub__", "b = 3 - a")))
    assert is_made_by_sum(behind(indexed("at"), step("torch.Tensor.__isub__", "b -= 1", line=3)))
    assert not is_made_by_sum(behind(indexed("at"), product))
    assert not is_made_by_sum(indexed("at"))


@pytest.mark.parametrize(
    ("op", "text", "note", "is_it"),
    [
        ("aten::index_put_", "y[m] = hole", f"{WRITES} -1", True),
        ("aten::index_put_", "y[m] = hole", f"{WRITES} -10", False),
        ("aten::masked_fill", "y = y.masked_fill(m, -1)", None, True),
        ("aten::masked_fill", "y = y.masked_fill(m, value=-1)", None, True),
        ("aten::masked_fill", "y = y.masked_fill(m, 1)", None, False),
        ("aten::masked_fill", "y = f(y, -1)", None, False),
        ("aten::add", "y = y.masked_fill(m, -1)", None, False),
    ],
)
def test_a_line_that_writes_just_this_number(
    op: str, text: str, note: str | None, is_it: bool
) -> None:
    assert is_written(behind(labels([-1], 3), step(op, text, note)), -1) is is_it


# --- sizes and expressions ------------------------------------------------------------------------


def test_copies_that_expand_shows() -> None:
    fact = tensor("x", "x", [1, 2, 3] * 4, (4, 3))
    assert (numel(fact), copies_of(fact)) == (12, 1)
    assert copies_of(replace(fact, stride=(0, 1))) == 4
    assert copies_of(replace(fact, stride=(0, 0))) == 12
    assert copies_of(replace(fact, stride=(3, 1))) == 1


@pytest.mark.parametrize(
    ("ends", "is_whole"),
    [((1, 4), True), ((0, 4), False), ((1, 6), False), ((-100, 5), True), ((None, None), True)],
)
def test_a_column_that_earlier_calls_contradict_is_not_the_whole(
    ends: tuple[int | None, int | None], is_whole: bool
) -> None:
    seen = SeenBefore(calls=1, min=ends[0], max=ends[1])
    column = DatasetColumn(name="ds", count=20, low=1, high=5, kinds=5, distinct=(1, 2, 3, 4, 5))
    given = labels([1, 2, 3, 4, 5], 5, seen_before=seen, dataset_column=column)
    assert (whole_column(given) is not None) is is_whole


def test_the_share_of_bad_values_is_that_of_the_column() -> None:
    column = DatasetColumn(name="ds", count=20, low=1, high=5, bad_count=2)
    assert ids(labels([1, 2, 3, 4, 5], 5)).bad_share == 1 / 5
    found = ids(labels([1, 2, 3, 4, 5], 5, dataset_column=column))
    assert (found.bad_share, found.every("labels")) == (2 / 20, "the labels of ds")


@pytest.mark.parametrize("may_be_changed", [False, True])
def test_an_attribute_whose_items_the_dataset_may_change_is_not_what_it_gives(
    may_be_changed: bool,
) -> None:
    column = DatasetColumn(name="ds", count=20, low=1, high=5, may_be_changed=may_be_changed)
    given = labels([1, 2, 3, 4, 5], 5, dataset_column=column)
    assert (whole_column(given) is None) is may_be_changed
    ids = ids_of(given, "label")
    assert ids is not None
    assert (ids.named is None) is may_be_changed
