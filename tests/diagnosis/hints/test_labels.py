"""Readings of labels: class numbers outside the classes, in losses and one-hot codes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cudalens.core.report_types import SeenBefore
from cudalens.diagnosis.hints.labels import (
    binary_labels_one_output,
    head_of,
    mark_not_ignored,
    mask_of_0_and_255,
    one_based_labels,
    relabel,
)
from tests.hint_evidence import (
    MASK,
    ONE_TO_TEN,
    TRANSFORMERS,
    WRITTEN,
    Cause,
    bert,
    check_cause,
    labels,
    one_hot,
    step,
)

CAUSES: dict[str, Cause] = {
    "one_based_labels": Cause(
        labels(ONE_TO_TEN, 10),
        rule="one_based_labels",
        fix="F.cross_entropy(z, y - 1)",
        says=("1 to 10",),
    ),
    "other_numbers": Cause(labels([10, 20, 30, 10], 3), rule="relabel"),
    "other_numbers_of_many": Cause(
        labels([0, 1, 2, 4, 7] * 9, 6),
        rule="relabel",
        says=(
            "labels are 5 different numbers: 7, 0, 1, 2 and 1 more",
            "0 … 5",
        ),
    ),
    "other_numbers_of_four": Cause(
        labels([0, 1, 4, 7] * 9, 6),
        rule="relabel",
        says=("labels are 4 different numbers: 0, 1, 4, 7. The",),
    ),
    "four_labels_from_one": Cause(
        labels([1, 2, 3, 4] * 9, 3),
        rule="relabel",
        says=(
            "the 36 labels are 4 different numbers, 1 … 4, and none is 0. "
            "The 3 outputs are numbered 0 … 2",
        ),
    ),
    "four_labels_where_0_may_be_missing_by_chance": Cause(
        labels([1, 2, 3, 4], 3), rule="observations"
    ),
    "binary_labels_one_output": Cause(
        labels([0, 1, 1, 0], 1), rule="binary_labels_one_output", says=("0 and 1",)
    ),
    "minus_one": Cause(
        labels([3, -1, 2, -1], 10),
        rule="mark_not_ignored",
        says=(
            "if -1 marks labels",
            "-100",
            "Subtracting 1 from a label 0 gives -1 as well",
        ),
    ),
    "minus_one_beside_ignored_labels": Cause(
        labels([0, -1, 3, -100, -1, 2], 4),
        rule="mark_not_ignored",
        says=("if -1 marks labels to leave out, make it -100, which other labels are. ",),
    ),
    "minus_one_beside_no_ignored_labels": Cause(
        labels([0, -1, 3, -1, 2], 5),
        rule="mark_not_ignored",
        says=("leave out, use ignore_index=-1 (the loss ignores -100). ",),
    ),
    "minus_one_written": Cause(
        labels([3, -1, 2, -1], 10, provenance=(WRITTEN,)),
        rule="mark_not_ignored",
        fix="F.cross_entropy(z, y, ignore_index=-1)",
        says=(
            "-1",
            "-100",
        ),
    ),
    "minus_one_filled": Cause(
        labels(
            [3, -1, 2, -1],
            10,
            provenance=(step("torch.Tensor.masked_fill", "y = y.masked_fill(far, value=-1)"),),
        ),
        rule="mark_not_ignored",
        fix="F.cross_entropy(z, y, ignore_index=-1)",
    ),
    "minus_one_computed": Cause(
        labels(
            [3, -1, 2, -1],
            10,
            provenance=(step("torch.where", "y = torch.where(far, y - 1, y)", line=3),),
        ),
        rule="mark_not_ignored",
        says=("if -1 marks labels",),
    ),
    "scale": Cause(labels([-2, 0, 2, 1, -1], 5), rule="relabel", fix="F.cross_entropy(z, y + 2)"),
    "minus_100": Cause(
        # The call has chosen another number to ignore, which other batches may need.
        labels([3, -100, 2, -100], 10, ignore=255),
        rule="mark_not_ignored",
        fix="F.cross_entropy(z, y.masked_fill(y == -100, 255))",
        says=(
            "-100",
            "255",
        ),
    ),
    "void_255": Cause(
        labels([0, 3, 20, 255] * 8, 21, name="mask", shape=MASK),
        rule="mark_not_ignored",
        fix="F.cross_entropy(z, mask, ignore_index=255)",
        says=(
            "255",
            "-100",
        ),
    ),
    "mask_0_255": Cause(
        labels([0, 255] * 16, 2, name="mask", shape=MASK),
        rule="mask_of_0_and_255",
        fix="F.cross_entropy(z, (mask == 255).long())",
        says=("0 and 255",),
    ),
    "mask_of_one_class": Cause(
        labels(
            [0, 255] * 16, 2, name="mask", shape=MASK, seen_before=SeenBefore(calls=3, min=0, max=0)
        ),
        rule="mask_of_0_and_255",
        fix="F.cross_entropy(z, (mask == 255).long())",
    ),
    "mask_with_class_1_before": Cause(
        labels(
            [0, 255] * 16, 2, name="mask", shape=MASK, seen_before=SeenBefore(calls=3, min=0, max=1)
        ),
        rule="mark_not_ignored",
        fix="F.cross_entropy(z, mask, ignore_index=255)",
    ),
    "uint8_labels": Cause(
        labels([1, 2, 255], 10, dtype="uint8"),
        rule="mark_not_ignored",
        says=(
            "if 255 marks elements",
            "In uint8 a -1 becomes 255 too",
        ),
    ),
    "one_hot_mark": Cause(
        one_hot([0, -1, 3], "F.one_hot(y, 4)"), rule="mark_not_ignored", says=("-1",)
    ),
}
NEIGHBOURS: dict[str, Cause] = {
    "u8 mask": Cause(labels([0, 255, 255], 3, dtype="uint8"), rule="mask_of_0_and_255"),
    "not a sum": Cause(
        labels(ONE_TO_TEN, 10, provenance=(step("aten::mul.Tensor", "y = y * n"),)),
        rule="one_based_labels",
        fix="F.cross_entropy(z, y - 1)",
    ),
    "a line before has added 1": Cause(
        labels(
            ONE_TO_TEN,
            10,
            provenance=(
                step("aten::add.Tensor", "y = y + 1"),
                step("aten::_to_copy", "y = y.cuda()", line=2),
            ),
        ),
        rule="one_based_labels",
        says=("line 4 adds 1 (y = y + 1), and the 10 classes are numbered 0 … 9",),
    ),
    "a line before has added another number": Cause(
        labels(ONE_TO_TEN, 10, provenance=(step("aten::add.Tensor", "y = y + 2"),)),
        rule="one_based_labels",
        fix="F.cross_entropy(z, y - 1)",
    ),
    "read by another line": Cause(
        labels(ONE_TO_TEN, 10, provenance=(step("torch.from_numpy", "y = torch.from_numpy(a)"),)),
        rule="one_based_labels",
        fix="F.cross_entropy(z, y - 1)",
    ),
    "ignored ones beside 1 to C": Cause(
        labels([*ONE_TO_TEN, -100], 10), rule="one_based_labels", fix="F.cross_entropy(z, y - 1)"
    ),
}
"""One step away from another cause."""


@pytest.mark.parametrize("cause", (rows := {**CAUSES, **NEIGHBOURS}).values(), ids=rows)
def test_the_cause_and_no_other_is_said(cause: Cause) -> None:
    check_cause(cause)


@pytest.mark.parametrize(
    ("values", "seen", "says"),
    [
        ([10, 20, 30], None, "the 3 labels are 3 different numbers: 10, 20, 30. "),
        ([10, 20, 30], (10, 20), "the labels of this call are 3 different numbers: 10, 20, 30. "),
        ([10, 20], (10, 30), None),  # whether they had 20 too, or others, is not known
    ],
)
def test_of_earlier_calls_the_ends_alone_are_known(
    values: list[int], seen: tuple[int, int] | None, says: str | None
) -> None:
    earlier = None if seen is None else SeenBefore(calls=2, min=seen[0], max=seen[1])
    hint = relabel(labels(values, 3, seen_before=earlier))
    assert (hint is not None) is (says is not None)
    assert hint is None or hint.text.startswith(str(says))


@pytest.mark.parametrize(
    ("values", "classes", "fix"),
    [
        ([5, 6, 7], 3, "y - 5"),
        ([-2, -1, 0], 3, "y + 2"),
        ([-1, 0, 1], 3, None),  # -1 may be a mark
        ([3, 4, 5], 3, "y - 3"),
        ([2, 3, 4], 3, None),  # as are those of which one is within
        ([7], 1, None),
    ],
)
def test_a_run_of_other_numbers_is_shifted(
    values: list[int], classes: int, fix: str | None
) -> None:
    hint = relabel(labels(values * 9, classes))
    assert (hint.fix if hint else None) == (fix and f"F.cross_entropy(z, {fix})")


@pytest.mark.parametrize(
    ("values", "classes", "end"),
    [
        ([-1, 1], 2, "If the two classes are coded -1 and 1, use (labels + 1) // 2"),
        ([-1, 1], 3, "Subtracting 1 from a label 0 gives -1 as well"),
        ([-1, 0, 1], 2, "Subtracting 1 from a label 0 gives -1 as well"),
        ([-1, 0, 1], 3, "and use ignore_index=-1 if it marks labels to leave out"),
    ],
)
def test_what_a_label_of_minus_one_may_be(values: list[int], classes: int, end: str) -> None:
    hint = mark_not_ignored(labels(values, classes))
    assert hint is not None and hint.text.endswith(end)


def test_a_mark_beside_labels_that_are_ignored() -> None:
    hint = mark_not_ignored(labels([-1, 1, 5, -100], 10))
    assert hint is not None
    assert "leave out, make it -100, which other labels are. " in hint.text
    hint = mark_not_ignored(labels([-1, 1, 5], 10))
    assert hint is not None
    assert "leave out, use ignore_index=-1 (the loss ignores -100). " in hint.text


@pytest.mark.parametrize(
    ("values", "is_said"), [([0, 1], True), ([1, 1], True), ([-1, 1], False), ([0, 2], False)]
)
def test_two_labels_and_one_column(values: list[int], is_said: bool) -> None:
    assert (binary_labels_one_output(labels(values, 1)) is not None) is is_said
    assert binary_labels_one_output(labels([0, 2], 2)) is None


@pytest.mark.parametrize(
    ("values", "classes", "is_said"), [([1], 1, False), ([1, 2], 2, True), ([0, 1, 2], 2, False)]
)
def test_one_class_has_no_number_to_begin_with(
    values: list[int], classes: int, is_said: bool
) -> None:
    assert (one_based_labels(labels(values * 9, classes)) is not None) is is_said


@pytest.mark.parametrize(("classes", "is_said"), [(1, False), (254, True), (255, False)])
def test_255_may_be_the_class_behind_the_last(classes: int, is_said: bool) -> None:
    given = labels([0, 3, 255, 0], classes, dtype="uint8")
    assert (mark_not_ignored(given) is not None) is is_said


@pytest.mark.parametrize(
    ("values", "is_said"),
    [([0, 1, 11], True), ([0, 1, 12], False), ([0, 11], False), ([1, 2, 11], False)],
)
def test_labels_with_gaps_up_to_twice_the_outputs(values: list[int], is_said: bool) -> None:
    assert (relabel(labels(values * 9, 6)) is not None) is is_said


@pytest.mark.parametrize(
    ("model", "head"),
    [
        ("GPT2LMHeadModel", "tokens"),
        ("T5ForConditionalGeneration", "tokens"),
        ("BertForSequenceClassification", "classes"),
        ("ViTForImageClassification", "classes"),
        ("BertModel", None),
        ("BertForQuestionAnswering", None),
    ],
)
def test_what_the_head_of_a_model_scores(model: str, head: str | None) -> None:
    evidence = replace(bert([5, 100], 100, "word_embeddings"), module_type=model)
    assert head_of(evidence) == head
    assert head_of(replace(evidence, frames=())) is None


@pytest.mark.parametrize(("number", "is_named"), [(5, True), (4, False)])
def test_the_line_that_shifted_labels_is_named(number: int, is_named: bool) -> None:
    added = step("aten::add.Tensor", f"y = y + {number}")
    hint = relabel(labels([5, 6, 7] * 9, 3, provenance=(added,)))
    text = "line 4 adds 5 (y = y + 5), and the 3 outputs are numbered 0 … 2"
    assert hint is not None and (hint.text == text) is is_named
    assert (hint.fix is None) is is_named


@pytest.mark.parametrize(
    ("model", "is_told"), [("GPT2LMHeadModel", False), ("BertForSequenceClassification", True)]
)
def test_tokens_keep_their_numbers(model: str, is_told: bool) -> None:
    """A model that scores tokens has its vocabulary from elsewhere."""
    for rule, values in ((relabel, [10, 20, 30]), (one_based_labels, [1, 2, 3] * 9)):
        given = labels(values, 3, library=TRANSFORMERS, module_type=model)
        assert (rule(given) is not None) is is_told


def test_a_mark_that_no_argument_ignores_is_written_over_by_nothing() -> None:
    hint = mark_not_ignored(labels([3, -1, 2, -1], 10, provenance=(WRITTEN,), scalars={}))
    assert hint is not None and hint.fix is None
    assert hint.text == "-1 usually marks labels to leave out. This loss ignores nothing"


@pytest.mark.parametrize(
    ("classes", "end"), [(1, None), (2, "The class numbers are 0 and 1"), (3, "numbered 0 … 2")]
)
def test_a_black_and_white_image_has_two_classes(classes: int, end: str | None) -> None:
    batch = step(None, None, "batch 2 of loader")
    hint = mask_of_0_and_255(labels([0, 255], classes, dtype="uint8", provenance=(batch,)))
    assert (hint is None) is (end is None)
    start = "the mask of this batch has only 0 and 255, like an image. "
    assert hint is None or (hint.text.startswith(start) and hint.text.endswith(str(end)))
