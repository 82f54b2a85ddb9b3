"""Readings of ids without a row: tokens, padding, positions, segments, boxes."""

from __future__ import annotations

import pytest

from cudalens.core.evidence_types import CallContext, Marks
from cudalens.core.report import Evidence
from cudalens.diagnosis.hints.tables import (
    boxes_off_page,
    mark_as_id,
    segment_ids,
    unknown_tokens,
)
from tests.hint_evidence import (
    Cause,
    bert,
    boxes,
    check_cause,
    tensor,
)

ID_ROWS = [5, 6, 7, 8, 100, 5, 6, 7, 8, 100]
WORDS, PLACES = "word_embeddings", "position_embeddings"


def prompted(*lengths: int) -> Evidence:
    """Return 20 positions for a table of 16, beside tokens of the user's of some lengths."""
    tokens = [tensor(None, "ids", [5] * length, (1, length)) for length in lengths]
    path = "transformer.wpe"
    return bert([*range(20)], 16, "wpe", path=path, name=None, shape=(1, 20), others=(*tokens,))


CAUSES: dict[str, Cause] = {
    "ignored_as_id": Cause(
        bert(
            [5, 6, -100, 5, -100, -100],
            100,
            "embed_tokens",
            path="model.decoder.embed_tokens",
            name="labels",
            shape=(2, 3),
            padding=1,
            call="model(input_ids=ids, decoder_input_ids=labels)",
        ),
        rule="ignored_label_as_id",
        fix="model(input_ids=ids, decoder_input_ids=labels.masked_fill(labels == -100, 1))",
        says=(
            "-100",
            "decoder",
        ),
    ),
    "minus_one_padding": Cause(
        bert([5, 6, -1, 5, -1, -1], 100, "embed_tokens", shape=(2, 3)),
        rule="padding_of_minus_one",
        says=("-1",),
    ),
    "added_tokens": Cause(
        bert([5, 100, 7, 8], 100, "word_embeddings", shape=(2, 2)),
        rule="added_tokens",
        says=("100",),
    ),
    "padding": Cause(
        bert([5, 6, 7, 100, 100, 5, 6, 7, 8, 100], 100, "word_embeddings", shape=(2, 5)),
        rule="padding_beyond_table",
        says=("100", "end of rows", "at least 101 rows with model.resize_token_embeddings"),
    ),
    "positions": Cause(
        bert([*range(20)], 16, "wpe", path="transformer.wpe", name=None, shape=(1, 20)),
        rule="positions_beyond_table",
        says=(
            "20",
            "16",
        ),
    ),
    "position_offset": Cause(
        bert([*range(2, 34)], 32, "position_embeddings", name=None, shape=(1, 32), padding=1),
        rule="positions_with_offset",
        says=(
            "32",
            "30",
            "2",
        ),
    ),
    "generation": Cause(
        bert(
            [16, 16],
            16,
            "wpe",
            path="transformer.wpe",
            name=None,
            shape=(2, 1),
            call="gpt.generate(ids, max_new_tokens=30)",
            others=(tensor(None, "ids", [5, 6, 7, 8] * 2, (2, 4)),),
        ),
        rule="positions_beyond_table",
        says=(
            "17",
            "16",
        ),
    ),
    "positions with a learned prompt": Cause(
        prompted(15),
        rule="positions_beyond_table",
        says=("20 positions, the table 16: ids brings 15 of them, and with the others at most 11",),
    ),
    "positions with a learned prompt beyond the table": Cause(
        prompted(2),
        rule="positions_beyond_table",
        says=("ids brings 2 of them, and with the others at most 0 fit",),
    ),
    "positions of two kinds of tokens": Cause(
        prompted(15, 14), rule="positions_beyond_table", says=("give it at most 16 tokens",)
    ),
    "positions of all tokens": Cause(
        prompted(15, 20), rule="positions_beyond_table", says=("give it at most 16 tokens",)
    ),
    "a token of a loop": Cause(
        bert([16, 16], 16, "wpe", path="transformer.wpe", name=None, shape=(2, 1)),
        rule="positions_beyond_table",
        says=("this token is number 17 of the sequence, the table has 16",),
    ),
    "boxes_pixels": Cause(
        boxes([50, 1500], "x_position_embeddings", [9, 9, 50, 50, 9, 9, 1500, 9]),
        rule="boxes_in_pixels",
        says=(
            "1500",
            "1023",
        ),
    ),
    "boxes_negative": Cause(
        boxes([9, -5], "x_position_embeddings", [9, 9, 50, 50, -5, 9, 50, 50]),
        rule="boxes_negative",
        says=("x = -5",),
    ),
    "boxes_inverted": Cause(
        boxes([40, -5], "w_position_embeddings", [9, 9, 49, 50, 9, 9, 4, 50]),
        rule="boxes_negative",
        says=("width = -5",),
    ),
    "segments": Cause(
        bert(
            [0, 1, 2, 2],
            2,
            "token_type_embeddings",
            name="seg",
            shape=(1, 4),
            call="model(input_ids=ids, token_type_ids=seg)",
        ),
        rule="segment_ids",
        says=(
            "2",
            "0 … 1",
        ),
    ),
}
NEIGHBOURS: dict[str, Cause] = {
    "labels that are the ids themselves": Cause(
        bert([5, -100, 7], 100, WORDS, padding=1, marks=Marks(aliases=("input_ids", "labels"))),
        rule="ignored_label_as_id",
        says=("-100 was written to input_ids and labels, which are one tensor", "clone()"),
    ),
    "a tokenizer that has the id": Cause(
        bert([5, 100, 7], 100, WORDS, call_context=CallContext(tokenizer_length=101)),
        rule="added_tokens",
        says=("If tokens were added, call model.resize_token_embeddings(len(tokenizer))",),
    ),
    "a tokenizer without the id": Cause(
        bert([5, 100, 7], 100, WORDS, call_context=CallContext(tokenizer_length=100)),
        rule="added_tokens",
        says=("give it at least 101 rows with model.resize_token_embeddings",),
    ),
    "63 beyond": Cause(bert([5, 163, 7], 100, WORDS), rule="added_tokens"),
    "one end token a row": Cause(bert(ID_ROWS, 100, WORDS, shape=(2, 5)), rule="added_tokens"),
    "the tokenizer's padding id": Cause(
        bert(ID_ROWS, 100, WORDS, shape=(2, 5), call_context=CallContext(pad_token_id=100)),
        rule="padding_beyond_table",
    ),
    "too long even without the offset": Cause(
        bert([*range(2, 35)], 32, PLACES, name=None, shape=(1, 33), padding=1),
        rule="positions_beyond_table",
    ),
    "pixels": Cause(
        boxes([9, 1126], "x_position_embeddings", [9, 9, 1126, 9]), rule="boxes_in_pixels"
    ),
    "height negative": Cause(
        boxes([9, -1], "h_position_embeddings", [9, 9, 9, 8]), rule="boxes_negative"
    ),
    "y negative": Cause(
        boxes([9, -1], "y_position_embeddings", [9, -1, 9, 8]), rule="boxes_negative"
    ),
    "one segment": Cause(bert([1, 1], 1, "token_type_embeddings", name="seg"), rule="segment_ids"),
}
"""One step away from another cause."""


@pytest.mark.parametrize("cause", (rows := {**CAUSES, **NEIGHBOURS}).values(), ids=rows)
def test_the_cause_and_no_other_is_said(cause: Cause) -> None:
    check_cause(cause)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (1125, None),  # boxes that were scaled may still leave the page
        (1126, "a box has x = 1126, the table ends at 1023: these look like pixels."),
        (-1, "a box begins at x = -1, outside the page"),
    ],
)
def test_boxes_off_the_page(bad: int, says: str | None) -> None:
    hint = boxes_off_page(boxes([9, bad], "x_position_embeddings", [9, 9, bad, 9]))
    assert (hint is not None) is (says is not None)
    assert hint is None or hint.text.startswith(str(says))


def test_boxes_on_both_sides_of_a_page_have_no_one_cause() -> None:
    corners = [9, 9, -1, 9, 2000, 9, 9, 9]
    assert boxes_off_page(boxes([-1, 2000], "x_position_embeddings", corners)) is None


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("w_position_embeddings", "width = -1: x1 is less than x0"),
        ("h_position_embeddings", "height = -1: y1 is less than y0"),
    ],
)
def test_a_box_that_ends_before_it_begins(table: str, says: str) -> None:
    hint = boxes_off_page(boxes([9, -1], table, [9, 9, 8, 8]))
    assert hint is not None and says in hint.text


@pytest.mark.parametrize(("bad", "is_near"), [(163, True), (164, False)])
def test_tokens_are_added_by_the_handful(bad: int, is_near: bool) -> None:
    assert (unknown_tokens(bert([5, bad, 7], 100, WORDS)) is not None) is is_near


@pytest.mark.parametrize(
    ("values", "rows", "is_library", "end", "fix"),
    [
        ([0, 1], 1, True, "set them to 0", None),
        ([0, 2], 2, True, "segments 0 … 1. Left out, they are all 0", None),
        ([0, 2], 2, False, "segments 0 … 1", None),
        ([1, 2], 2, True, "segments 0 … 1. They look 1-based. Left out, they are all 0", "seg - 1"),
    ],
)
def test_segments_number_the_texts_from_0(
    values: list[int], rows: int, is_library: bool, end: str, fix: str | None
) -> None:
    facts = {"name": "seg", "call": "model(seg)"} | ({} if is_library else {"library": None})
    hint = segment_ids(bert(values, rows, "token_type_embeddings", **facts))
    assert hint is not None and hint.text.endswith(end)
    assert hint.fix == (fix and f"model({fix})")


@pytest.mark.parametrize(
    ("padding", "is_fixed"), [(-1, False), (0, True), (99, True), (100, False)]
)
def test_a_padding_id_that_has_a_row_takes_the_place(padding: int, is_fixed: bool) -> None:
    hint = mark_as_id(bert([5, -100], 100, WORDS, padding=padding, call="model(ids)"))
    assert hint is not None
    fix = f"model(ids.masked_fill(ids == -100, {padding}))" if is_fixed else None
    assert hint.fix == fix
