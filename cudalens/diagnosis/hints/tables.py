"""Causes of ids without a row: tokens, padding, positions, segments, boxes of document models."""

from __future__ import annotations

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.hints._reading import (
    Ids,
    filled_side,
    fills_row_ends,
    ids_rule,
    is_made_by_sum,
    is_written,
)
from cudalens.diagnosis.hints._roles import is_run, is_vocabulary, table_name
from cudalens.diagnosis.user_code import (
    called_name,
    in_transformers,
    list_of,
    rewritten,
)

_JUST_BEYOND = 64
"""Tokens are added by the handful; ids further out belong to another vocabulary."""
_IGNORED = -100
_MAX_OFFSET = 2
"""Positions that begin further on go on from an earlier part of the text."""
_SIDES = {"x": "x", "y": "y", "h": "height", "w": "width"}
"""Contents of the tables of boxes, by the first letter of their names."""


# --- tokens ---------------------------------------------------------------------------------------


@ids_rule("token")
def mark_as_id(evidence: Evidence, ids: Ids) -> Hint | None:
    """The sequences are padded with -100, which losses ignore, or -1: no row of the table."""
    if ids.bad == {_IGNORED}:
        place = f"{evidence.module_path or ''} {ids.fact.expression or ''}"
        made = ". These decoder ids were made from labels" if "decoder" in place else ""
        text = (
            f"-100 is the value that losses ignore, not an id{made}: replace it with the padding "
        )
        text += "id"
        if names := evidence.marks.aliases:
            # With the padding id in their place the loss would count the padding, silently.
            text = f"-100 was written to {' and '.join(names)}, which are one tensor: make the "
            return Hint(rule="ignored_label_as_id", text=text + "labels a copy with clone()")
        fix = _replaced(evidence, ids, evidence.scalar("padding_idx"))
        return Hint(rule="ignored_label_as_id", text=text, fix=fix)
    if ids.bad != {-1} or is_made_by_sum(evidence):
        return None
    text = "the table has no row -1: if it pads the sequences, use a padding id that has a row"
    is_padding = fills_row_ends(ids) or is_written(evidence, -1)
    number = evidence.scalar("padding_idx") if is_padding else None
    fix = _replaced(evidence, ids, number)
    return Hint(rule="padding_of_minus_one", text=text, fix=fix)


def _replaced(evidence: Evidence, ids: Ids, number: str | None) -> str | None:
    """Return the call with another number in place of the bad one, if that has a row."""
    if number is None or not 0 <= int(number) < ids.size:
        return None
    (bad,) = ids.bad
    return rewritten(evidence, ids.named, f"{{x}}.masked_fill({{x}} == {bad}, {number})")


@ids_rule("token")
def unknown_tokens(evidence: Evidence, ids: Ids) -> Hint | None:
    """Ids beyond the table of a library's model, or of a tokenizer that the code reads."""
    tokens, pad = evidence.call_context.tokenizer_length, evidence.call_context.pad_token_id
    is_library, is_near = in_transformers(evidence), ids.high - ids.size < _JUST_BEYOND
    if not ids.is_above or not (is_library or tokens) or not is_vocabulary(evidence):
        return None
    length = f" (the tokenizer has {tokens})" if tokens else ""
    side = filled_side(ids)
    if ids.bad == {pad or -1} or side is not None:
        is_it = (
            f"is only at the {side} of rows: it is a padding id" if side else "is the padding id"
        )
        text = f"{ids.high} {is_it}, and the table of {ids.size} rows has no row for it"
        cure = f": {_more_rows(evidence, ids)}" if is_near and is_library else ""
        return Hint(rule="padding_beyond_table", text=text + cure)
    if ids.is_computed:
        return None  # a line made these numbers, and no tokenizer
    has_all = tokens is not None and tokens > ids.high
    if not is_near or not (is_library or has_all):
        return None
    text = f"the invalid ids ({list_of(ids.bad)}) are just beyond the {ids.size} rows{length}. "
    # A tokenizer's vocab_size leaves added tokens out; its length does not.
    cure = "len(tokenizer) rows are enough"
    cure = f"If tokens were added, {_more_rows(evidence, ids)}" if is_library else cure
    return Hint(rule="added_tokens", text=text + cure)


def _more_rows(evidence: Evidence, ids: Ids) -> str:
    """Return how a model of transformers gets more rows: as many as its tokenizer has tokens.

    Where no tokenizer of the library is known to have them all, as many as the ids need.
    """
    tokens = evidence.call_context.tokenizer_length
    if tokens is not None and tokens > ids.high:
        return "call model.resize_token_embeddings(len(tokenizer))"
    return f"give it at least {ids.high + 1} rows with model.resize_token_embeddings"


# --- positions ------------------------------------------------------------------------------------


def _counted_offset(evidence: Evidence, ids: Ids) -> int:
    """Return the offset where ``max_position_embeddings`` counts it: in RoBERTa, not in BART.

    RoBERTa's positions begin behind the padding id; BART adds two rows to those of its config.
    """
    padding = evidence.scalar("padding_idx") or "-1"
    if padding.isdecimal() and ids.low is not None and ids.low in (int(padding), int(padding) + 1):
        return int(padding) + 1
    is_roberta = evidence.op.name == "aten::gather" and ids.low in (1, 2)
    return 2 if is_roberta else 0


@ids_rule("position")
def positions_beyond_table(evidence: Evidence, ids: Ids) -> Hint | None:
    """The sequence is longer than the table of positions, or its positions begin further on."""
    if not ids.is_above or not ids.fact.shape:
        return None
    # Where a counter goes on, the sequence is shorter than its last position says.
    first = ids.fact.summary.min
    is_start = isinstance(first, int) and first <= _MAX_OFFSET and ids.low in (None, first)
    is_counted = is_run(ids.fact) and is_start
    # A step of generation looks up one position at a time.
    if not is_counted and (ids.fact.shape[-1] != 1 or not in_transformers(evidence)):
        return None
    offset = _counted_offset(evidence, ids)
    length = ids.high + 1 - offset
    if offset and length <= ids.size:
        text = f"positions start at {offset} here, so {ids.size} rows are enough for "
        text += f"{ids.size - offset} tokens, not {length}: max_position_embeddings must be the "
        text += f"length + {offset}, or the tokenizer's max_length {ids.size - offset}"
        return Hint(rule="positions_with_offset", text=text)
    offset = offset or (ids.low if ids.low in (1, 2) and ids.fact.shape[-1] > 1 else 0)
    length, room = ids.high + 1 - offset, ids.size - offset
    if (called_name(evidence) or "").endswith("generate"):
        note = f"prompt and new tokens together may have at most {room} (max_length={room})"
        return Hint(text=f"generation reached position {length}, the table has {room}: {note}")
    cure = f"cut the input to {room} before all embeddings (in generation, keep the last ones), or "
    cure += "enlarge the table"
    if in_transformers(evidence):
        cure = f"give it at most {room} tokens (max_length={room} in the tokenizer), or the model "
        cure += "a longer table"
    if ids.fact.shape[-1] == 1 and length > 1:
        # The call has one token: what came before it is in a cache, which cannot be cut here.
        return Hint(
            text=f"this token is number {length} of the sequence, the table has {room}: end the "
            f"loop when prompt and new tokens are {room}"
        )
    given = _given(evidence, ids, length)
    if given:
        name, count = given
        fitting = max(room - (length - count), 0)
        cure = f"{name} brings {count} of them, and with the others at most {fitting} fit"
    return Hint(text=f"the sequence has {length} positions, the table {room}: {cure}")


def _given(evidence: Evidence, ids: Ids, length: int) -> tuple[str, int] | None:
    """Return the user's tokens that are fewer than the positions, and their number.

    A prompt that is learned, or a cache, takes the others: to cut at the table's size is no cure.
    """
    if ids.fact.expression:
        return None
    named = [fact for fact in evidence.tensors if fact.expression and fact.shape]
    if any(length in fact.shape for fact in named):
        return None
    tokens = [fact for fact in named if fact.dtype == "int64" and 1 < fact.shape[-1] < length]
    if len({fact.shape[-1] for fact in tokens}) != 1:
        return None
    return tokens[0].expression or "", tokens[0].shape[-1]


# --- boxes and segments ---------------------------------------------------------------------------


@ids_rule("box")
def boxes_off_page(evidence: Evidence, ids: Ids) -> Hint | None:
    """Boxes are in pixels, begin outside the page, or end before they begin."""
    side, low = _SIDES.get(table_name(evidence)[:1], "coordinate"), min(ids.bad)
    if ids.is_above and ids.high < ids.size + ids.size // 10:
        return None  # boxes that were scaled may still leave the page
    if ids.is_above:
        text = f"a box has {side} = {ids.high}, the table ends at {ids.size - 1}: these look like "
        text += "pixels. Scale them by the page's width and height, so that a page goes from 0 to "
        return Hint(rule="boxes_in_pixels", text=text + "1000")
    if max(ids.bad) >= 0:
        return None
    if side in ("x", "y"):
        return Hint(rule="boxes_negative", text=f"a box begins at {side} = {low}, outside the page")
    first, last = ("x0", "x1") if side == "width" else ("y0", "y1")
    text = f"a box has {side} = {low}: {last} is less than {first}. Boxes are written x0, y0, x1, "
    return Hint(rule="boxes_negative", text=f"{text}y1, not as a corner with width and height")


@ids_rule("segment")
def segment_ids(evidence: Evidence, ids: Ids) -> Hint | None:
    """Segment ids number the sentences from 0, and a model may know one segment only."""
    bad = list_of(ids.bad)
    if ids.size == 1:
        return Hint(
            text=f"the segment ids contain {bad}, but this model has only one segment: leave "
            "token_type_ids out, or set them to 0"
        )
    # Each text begins with segment 0: where it is missing, few values are enough.
    one_based = ids.may_count_from_one and ids.distinct == tuple(range(1, ids.size + 1))
    base = ". They look 1-based" if one_based else ""
    rest = ". Left out, they are all 0" if in_transformers(evidence) else ""
    return Hint(
        text=f"the segment ids contain {bad}. The model has segments 0 … {ids.size - 1}"
        f"{base}{rest}",
        fix=rewritten(evidence, ids.named, "{x} - 1") if one_based else None,
    )
