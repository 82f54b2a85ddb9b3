"""Readings of ids without a row: tokens, padding, positions, segments, boxes."""

from __future__ import annotations

from typing import Any

import pytest

from cudalens.core.evidence_types import CallContext, Marks
from cudalens.core.report import Evidence
from cudalens.diagnosis.hints.tables import (
    boxes_off_page,
    mark_as_id,
    positions_beyond_table,
    segment_ids,
    unknown_tokens,
)
from tests.hint_evidence import (
    TRANSFORMERS,
    WRITTEN,
    Cause,
    behind,
    bert,
    boxes,
    check_cause,
    gathered,
    lookup,
    step,
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
    "positions with one token": Cause(
        prompted(1), rule="positions_beyond_table", says=("give it at most 16 tokens",)
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


def test_a_box_that_the_line_moves_off_the_page_is_outside_all_the_same() -> None:
    before = tensor(None, "x", [9, 0])
    moved = lookup([8, -1], 1024, name="x - 1", path="x_position_embeddings", others=(before,))
    assert boxes_off_page(moved) is not None
    assert unknown_tokens(lookup([8, -1], 1024, name="x - 1", others=(before,))) is None


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


# --- positions ------------------------------------------------------------------------------------


def positions(low: int, high: int, rows: int, **facts: Any) -> str:
    """Return what is said of one row of consecutive positions."""
    shape = (1, high - low + 1)
    given = {"name": None, "shape": shape, "path": "transformer.wpe", **facts}
    hint = positions_beyond_table(bert([*range(low, high + 1)], rows, "wpe", **given))
    return "" if hint is None else f"{hint.rule}: {hint.text}"


@pytest.mark.parametrize(
    ("low", "padding", "offset"),
    [(0, -1, None), (1, 1, 2), (2, 1, 2), (2, 0, None), (1, 0, 1), (2, 5, None), (2, -1, None)],
)
def test_positions_behind_the_padding_id_are_counted_in_the_table(
    low: int, padding: int, offset: int | None
) -> None:
    """RoBERTa's begin with the id that follows; BART adds two rows of its own."""
    text = positions(low, 32, 32, padding=padding)
    start = f"positions_with_offset: positions start at {offset} here, so 32 rows are enough for "
    assert text.startswith(start) is (offset is not None)


@pytest.mark.parametrize(("low", "offset"), [(0, None), (1, 2), (2, 2), (3, None)])
def test_positions_that_are_gathered_from_1_or_2_have_an_offset(
    low: int, offset: int | None
) -> None:
    ids, line = [*range(low, 33)], (tensor(None, "ids", [5] * 40, (1, 40)),)
    facts = {"library": TRANSFORMERS, "module_type": "BertEmbeddings", "shape": (1, len(ids))}
    hint = positions_beyond_table(gathered(ids, 32, call="model(ids)", line=line, **facts))
    is_counted = hint is not None and hint.rule == "positions_with_offset"
    assert is_counted is (offset is not None)
    if is_counted:
        assert hint is not None and hint.text == (
            "positions start at 2 here, so 32 rows are enough for 30 tokens, not 31: "
            "max_position_embeddings must be the length + 2, or the tokenizer's max_length 30"
        )


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0, 16, "17 positions, the table 16"),
        (1, 16, "16 positions, the table 15"),
        (2, 17, "16 positions, the table 14"),
    ],
)
def test_a_sequence_is_counted_from_its_first_position(low: int, high: int, words: str) -> None:
    assert words in positions(low, high, 16)


def test_positions_that_go_on_from_an_earlier_part_are_not_counted() -> None:
    assert positions(2, 18, 16)
    assert not positions(3, 18, 16)


def test_a_row_with_a_gap_is_no_sequence() -> None:
    given = {"name": None, "path": "transformer.wpe"}
    for values, is_one in (([0, 1, 2, 3], True), ([0, 1, 3, 3], False)):
        evidence = bert(values, 3, "wpe", shape=(1, 4), **given)
        assert (positions_beyond_table(evidence) is not None) is is_one


@pytest.mark.parametrize(
    ("call", "library", "words"),
    [
        ("gpt.generate(ids)", TRANSFORMERS, "generation reached position 20, the table has 16: "
         "prompt and new tokens together may have at most 16 (max_length=16)"),
        ("gpt(ids)", TRANSFORMERS, "give it at most 16 tokens (max_length=16 in the tokenizer), or "
         "the model a longer table"),
        ("gpt(ids)", None, "cut the input to 16 before all embeddings (in generation, keep the "
         "last ones), or enlarge the table"),
    ],
    ids=["generation", "library", "own"],
)  # fmt: skip
def test_what_helps_against_too_many_positions(call: str, library: str | None, words: str) -> None:
    assert positions(0, 19, 16, call=call, library=library).endswith(words)


@pytest.mark.parametrize(("library", "is_told"), [(TRANSFORMERS, True), (None, False)])
def test_one_position_at_a_time_is_looked_up_by_a_library(
    library: str | None, is_told: bool
) -> None:
    evidence = bert([16], 16, "wpe", path="gpt.wpe", name=None, shape=(1, 1), library=library)
    assert (positions_beyond_table(evidence) is not None) is is_told


def test_only_tokens_of_the_user_are_brought_to_a_librarys_positions() -> None:
    def is_brought(name: str | None = None, value: float = 5) -> bool:
        tokens = tensor(None, "ids", [value] * 9, (1, 9))
        facts = {"path": "gpt.wpe", "name": name, "shape": (1, 20), "others": (tokens,)}
        hint = positions_beyond_table(bert([*range(10)] * 2, 8, "wpe", **facts))
        return hint is not None and "ids brings 9 of them" in hint.text

    assert is_brought()
    assert not is_brought(name="pos")
    assert not is_brought(value=0.5)


# --- padding and tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "shape", "padding", "is_padding"),
    [
        ([5, 6, -1, 5, -1, -1], (2, 3), 0, True),
        ([5, 6, 5, -1, 5, 6], (2, 3), 0, False),
    ],
)
def test_minus_one_is_padding_where_rows_end_with_it(
    values: list[int], shape: tuple[int, int], padding: int, is_padding: bool
) -> None:
    evidence = bert(values, 100, WORDS, shape=shape, padding=padding, call="model(ids)")
    hint = mark_as_id(evidence)
    assert hint is not None and hint.rule == "padding_of_minus_one"
    fix = "model(ids.masked_fill(ids == -1, 0))" if is_padding else None
    assert hint.fix == fix
    written = mark_as_id(behind(evidence, WRITTEN))
    assert written is not None and written.fix == "model(ids.masked_fill(ids == -1, 0))"
    assert mark_as_id(behind(evidence, step("aten::sub", "ids = y - 1"))) is None


def test_minus_one_beside_another_bad_id_is_no_padding() -> None:
    assert mark_as_id(bert([5, -1, 5], 100, WORDS)) is not None
    assert mark_as_id(bert([5, -1, -2], 100, WORDS)) is None
    assert mark_as_id(bert([5, -100, -1], 100, WORDS)) is None


@pytest.mark.parametrize(
    ("path", "name", "is_decoder"),
    [("model.decoder.embed", "ids", True), ("model.embed", "decoder_ids", True),
     ("model.encoder.embed", "ids", False)],
)  # fmt: skip
def test_ids_of_a_decoder_are_made_from_labels(path: str, name: str, is_decoder: bool) -> None:
    hint = mark_as_id(bert([5, -100], 100, WORDS, path=path, name=name))
    assert hint is not None
    made = ". These decoder ids were made from labels" if is_decoder else ""
    text = f"-100 is the value that losses ignore, not an id{made}: replace it with the padding id"
    assert hint.text == text


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (None, None), (100, None),
        (101, "just beyond the 100 rows (the tokenizer has 101). len(tokenizer) rows are enough"),
    ],
)  # fmt: skip
def test_ids_of_a_model_of_ones_own_are_told_by_a_tokenizer_that_has_them(
    tokens: int | None, words: str | None
) -> None:
    context = CallContext(tokenizer_length=tokens)
    hint = unknown_tokens(lookup([5, 100], 100, name="input_ids", call_context=context))
    assert (hint is not None) is (words is not None)
    assert hint is None or hint.text.endswith(str(words))


def test_ids_that_a_line_computes_are_no_tokens_of_a_tokenizer() -> None:
    assert unknown_tokens(bert([5, 100, 7], 100, WORDS)) is not None
    assert unknown_tokens(bert([5, 100, 7], 100, WORDS, name="ids + 1")) is None


@pytest.mark.parametrize(("near", "is_cured"), [(163, True), (164, False)])
def test_more_rows_help_a_padding_id_just_beyond_the_table(near: int, is_cured: bool) -> None:
    rows = [5, 6, near, near, 5, 6, 7, near]
    hint = unknown_tokens(bert(rows, 100, WORDS, shape=(2, 4)))
    assert hint is not None and hint.rule == "padding_beyond_table"
    assert ("resize_token_embeddings" in hint.text) is is_cured
