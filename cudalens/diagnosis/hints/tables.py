"""Causes of ids without a row: tokens, padding, positions, segments, boxes of document models."""

from __future__ import annotations

import ast
import re
from itertools import groupby

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, TensorFact
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._reading import Ids, ids_of, ids_rule, shifting_step
from cudalens.diagnosis.hints._roles import INTEGERS, is_run, is_vocabulary, table_name
from cudalens.diagnosis.user_code import (
    called_name,
    in_library,
    list_of,
    parsed,
    rewritten,
    with_keyword,
)

_JUST_BEYOND = 64
"""Tokens are added by the handful; ids further out belong to another vocabulary."""
_IGNORED = -100
_LANGUAGE = 1000
_RESIZE = "model.resize_token_embeddings(len(tokenizer))"
_LABELS_KEY = re.compile(r"""\[["']labels["']\]$|\.labels$""")


@ids_rule("token", priority=12)
def ignored_label_as_id(evidence: Evidence, ids: Ids) -> Hint | None:
    """Labels with -100, the number that losses ignore, are looked up as token ids."""
    if not ids.only_bad(_IGNORED):
        return None
    place = f"{evidence.module_path or ''} {ids.fact.expression or ''}"
    what = "decoder ids" if "decoder" in place else "ids"
    return Hint(
        text=f"-100 is the value that losses ignore, not an id: these {what} were made from "
        "labels; replace it with the padding id",
        fix=_padded(evidence, ids, _IGNORED),
    )


@ids_rule("token", priority=12)
def padding_of_minus_one(evidence: Evidence, ids: Ids) -> Hint | None:
    """The sequences are padded with -1, which is no row of the table."""
    if not ids.only_bad(-1) or shifting_step(evidence):
        return None
    if _made_of_labels(evidence, ids):
        return Hint(
            text="the decoder ids are made from the labels, and -1 is kept: use -100, which the "
            "loss ignores and the model replaces with its padding id",
            fix=rewritten(evidence, ids.named, f"{{x}}.masked_fill({{x}} == -1, {_IGNORED})"),
        )
    return Hint(
        text="the table has no row -1: if it pads the sequences, use a padding id that has a row",
        fix=_padded(evidence, ids, -1),
    )


def _made_of_labels(evidence: Evidence, ids: Ids) -> bool:
    """Return whether a library's decoder shifted the user's ``labels=`` to get these ids."""
    name = ids.named.expression if ids.named is not None else None
    is_decoder = "decoder" in (evidence.module_path or "")
    if name is None or ids.fact.expression or not is_decoder:
        return False
    if not in_library(evidence, "transformers"):
        return False
    tree, given = parsed(evidence.call_text or ""), parsed(name)
    if not isinstance(tree, ast.Call) or given is None:
        return False
    names = {item.arg for item in tree.keywords if ast.dump(item.value) == ast.dump(given)}
    # A batch that is spread in the call names it by its key.
    return names == {"labels"} or (not names and bool(_LABELS_KEY.search(name)))


def _padded(evidence: Evidence, ids: Ids, mark: int) -> str:
    index = evidence.scalar("padding_idx") or "-1"
    is_row = index.isdecimal() and int(index) < ids.size
    pad = index if is_row else _padding_id(evidence)
    fix = rewritten(evidence, ids.named, f"{{x}}.masked_fill({{x}} == {mark}, {pad})")
    return fix or f"ids = ids.masked_fill(ids == {mark}, {pad})"


def _padding_id(evidence: Evidence) -> str:
    """Return the user's expression for the padding id, where the table has none."""
    name = (called_name(evidence) or "").removesuffix(".forward")
    is_decoder = "decoder" in (evidence.module_path or "")
    if is_decoder and name.isidentifier() and in_library(evidence, "transformers"):
        # A model that makes decoder ids of labels has to have one.
        return f"{name}.config.pad_token_id"
    return "tokenizer.pad_token_id" if is_vocabulary(evidence) else "pad_id"


def _tokens_beyond(evidence: Evidence) -> Ids | None:
    ids = ids_of(evidence, "token")
    return ids if ids is not None and ids.is_above else None


def _is_padding(evidence: Evidence, ids: Ids) -> bool:
    """Return whether the only bad id fills the ends of the rows, all on the same side."""
    if len(ids.bad) != 1:
        return False
    if evidence.call_context.pad_token_id == next(iter(ids.bad)):
        return True
    if not ids.all_listed or len(ids.fact.shape) != 2:
        return False
    length = ids.fact.shape[1]
    rows = [
        [item.position[1] for item in items]
        for _, items in groupby(ids.offenders, key=lambda item: item.position[0])
    ]
    right = all(row == list(range(length - len(row), length)) for row in rows)
    left = all(row == list(range(len(row))) for row in rows)
    # A single id at the end of each row may be an added end token as well.
    return (right or left) and max(len(row) for row in rows) > 1


@rule(priority=14)
def padding_beyond_table(evidence: Evidence) -> Hint | None:
    """The padding id has no row in the table."""
    ids = _tokens_beyond(evidence)
    if ids is None or not _is_padding(evidence, ids):
        return None
    pad = ids.high
    text = f"{pad} stands only at the ends of the rows: it is a padding id, and the table of "
    text += f"{ids.size} rows has no row for it"
    if not is_vocabulary(evidence):
        return Hint(text=text, fix=_table(evidence, f"{pad + 1}, dim, padding_idx={pad}"))
    if pad - ids.size < _JUST_BEYOND:
        return Hint(text=text, fix=_resized(evidence, ids))
    return Hint(text=text, fix="tokenizer.pad_token = tokenizer.eos_token")


@rule(priority=16)
def added_tokens(evidence: Evidence) -> Hint | None:
    """Tokens were added to the tokenizer, and the model's table was not made larger."""
    ids = _tokens_beyond(evidence)
    if ids is None or not is_vocabulary(evidence) or _is_padding(evidence, ids):
        return None
    if ids.high - ids.size >= _JUST_BEYOND:
        return None
    if ids.counts_from_one and not in_library(evidence, "transformers"):
        return None
    known = evidence.call_context.tokenizer_length
    length = f" (the tokenizer has {known})" if known else ""
    is_library = in_library(evidence, "transformers")
    why = "the table was not resized" if is_library else "the table was not made larger"
    return Hint(
        text=f"the invalid ids ({list_of(ids.bad)}) are just beyond the {ids.size} rows{length}: "
        f"it looks as if tokens were added and {why}",
        fix=_resized(evidence, ids),
    )


def _resized(evidence: Evidence, ids: Ids) -> str:
    if not in_library(evidence, "transformers"):
        # A tokenizer's vocab_size leaves added tokens out; its length does not.
        has_tokenizer = "transformers" in evidence.libraries
        rows = "len(tokenizer)" if has_tokenizer else ids.high + 1
        return _table(evidence, f"{rows}, dim")
    name = called_name(evidence)
    model = name.removesuffix(".generate").removesuffix(".forward") if name else "model"
    return _RESIZE.replace("model", model if ids.named else "model")


def _table(evidence: Evidence, settings: str) -> str:
    is_bag = (evidence.op.name or "").startswith("aten::_embedding_bag")
    return f"nn.{'EmbeddingBag' if is_bag else 'Embedding'}({settings})"


@rule(priority=18)
def other_vocabulary(evidence: Evidence) -> Hint | None:
    """The ids come from a tokenizer with a larger vocabulary than the model's."""
    ids = _tokens_beyond(evidence)
    if ids is None or not is_vocabulary(evidence) or _is_padding(evidence, ids):
        return None
    if ids.high - ids.size < _JUST_BEYOND:
        return None
    known = evidence.call_context.tokenizer_length
    length = f", the tokenizer has {known} entries" if known else ""
    return Hint(
        text=f"ids go up to {ids.high} in a table of {ids.size} rows{length}: they look like "
        "ids of a different tokenizer than the model's",
        fix=f"assert len(tokenizer) <= {ids.size}  # load both under the same name",
    )


@rule(priority=45)
def table_too_small(evidence: Evidence) -> Hint | None:
    """The table has fewer rows than the largest id needs."""
    ids = _tokens_beyond(evidence)
    if ids is None or is_vocabulary(evidence) or _is_padding(evidence, ids):
        return None
    is_padded = evidence.scalar("padding_idx") == "0"
    if ids.counts_from_one and not is_padded:
        return None
    may_start_at_one = ids.may_count_from_one and ids.low == 1 and not is_padded
    base = "; if the ids count from 1, subtract 1" if may_start_at_one else ""
    is_large = ids.size >= _LANGUAGE and ids.high - ids.size < _JUST_BEYOND
    added = f"; for tokens added to a tokenizer: {_RESIZE}" if is_large else ""
    return Hint(
        text=f"ids up to {ids.high} need {ids.high + 1} rows, the table has {ids.size}"
        f"{base}{added}",
        fix=_table(evidence, f"{ids.high + 1}, dim"),
    )


# --- positions ------------------------------------------------------------------------------------


def _offset(evidence: Evidence, ids: Ids) -> int:
    """Return how many rows stand before that of the first token: 2 in RoBERTa and BART."""
    counted = _counted_offset(evidence, ids)
    if counted:
        return counted
    return ids.low if ids.low in (1, 2) and ids.fact.shape[-1] > 1 else 0


def _counted_offset(evidence: Evidence, ids: Ids) -> int:
    """Return the offset where ``max_position_embeddings`` counts it: in RoBERTa, not in BART.

    RoBERTa's positions begin behind the padding id; BART adds two rows to those of its config.
    """
    padding = evidence.scalar("padding_idx") or "-1"
    if padding.isdecimal() and ids.low is not None and ids.low in (int(padding), int(padding) + 1):
        return int(padding) + 1
    is_roberta = evidence.op.name == "aten::gather" and ids.low in (1, 2)
    return 2 if is_roberta else 0


def _positions(evidence: Evidence) -> Ids | None:
    ids = ids_of(evidence, "position")
    if ids is None or not ids.is_above or not ids.fact.shape:
        return None
    # A step of generation looks up one position at a time.
    return ids if is_run(ids.fact) or ids.fact.shape[-1] == 1 else None


@rule(priority=11)
def positions_with_offset(evidence: Evidence) -> Hint | None:
    """Positions start behind the padding id, so the table needs more rows than the sequence has."""
    ids = _positions(evidence)
    if ids is None:
        return None
    offset = _counted_offset(evidence, ids)
    length = ids.high + 1 - offset
    if offset == 0 or length > ids.size:
        return None
    return Hint(
        text=f"positions start at {offset} here, so {ids.size} rows hold {ids.size - offset} "
        f"tokens and not {length}: max_position_embeddings must be the length + {offset}",
        fix=f"max_position_embeddings={length + offset}  # or max_length={ids.size - offset}",
    )


@rule(priority=12)
def positions_beyond_table(evidence: Evidence) -> Hint | None:
    """The sequence is longer than the table of positions."""
    ids = _positions(evidence)
    if ids is None:
        return None
    offset = _offset(evidence, ids)
    length, room = ids.high + 1 - offset, ids.size - offset
    if _counted_offset(evidence, ids) and length <= ids.size:
        return None
    text = f"the sequence has {length} positions, the table {room}"
    if (called_name(evidence) or "").endswith("generate"):
        prompt = _prompt(evidence, length)
        fix = with_keyword(evidence, ("generate",), "max_new_tokens", str(max(1, room - prompt)))
        note = f"prompt and new tokens together may have at most {room}"
        text = f"generation reached position {length}, the table has {room}: {note}"
        return Hint(text=text, fix=fix or f"max_length={room}")
    if in_library(evidence, "transformers"):
        fix = f"tokenizer(text, truncation=True, max_length={room})"
        return Hint(text=f"{text}: truncate the input", fix=fix)
    name = _sequence(evidence, length)
    return Hint(
        text=f"{text}: cut the input or enlarge the table",
        fix=f"{name} = {name}[:, :{room}]  # before all embeddings",
    )


def _sequence(evidence: Evidence, length: int) -> str:
    """Return the user's name for the batch of sequences of this length on their line."""
    found = [
        item
        for item in evidence.tensors
        if item.expression
        and item.dtype in INTEGERS
        and len(item.shape) == 2
        and item.shape[1] == length
    ]
    name = found[0].expression if len(found) == 1 else None
    return name if name and name.isidentifier() else "ids"


def _prompt(evidence: Evidence, length: int) -> int:
    tokens = [
        item.shape[1]
        for item in evidence.tensors
        if item.expression and item.dtype in INTEGERS and len(item.shape) == 2
    ]
    return tokens[0] if len(tokens) == 1 and tokens[0] < length else 0


@ids_rule("position", priority=20)
def positions_given(evidence: Evidence, ids: Ids) -> Hint | None:
    """Positions were given that do not count from 0, such as those of a longer text."""
    if not ids.is_above or _positions(evidence) is not None:
        return None
    if not ids.fact.shape:
        return None
    return Hint(
        text=f"positions go up to {ids.high} in a table of {ids.size} rows, and do not count the "
        "tokens of a row from 0",
        fix=rewritten(evidence, ids.named, "{x} - {x}.amin(-1, keepdim=True)"),
    )


# --- boxes and segments ---------------------------------------------------------------------------


_PAGE = 1000
"""Coordinates of LayoutLM are thousandths of the page, in tables of 1024 rows."""
_SIDES = {
    "x_position_embeddings": "x",
    "y_position_embeddings": "y",
    "h_position_embeddings": "height",
    "w_position_embeddings": "width",
}


def _boxes(evidence: Evidence) -> tuple[Ids, TensorFact | None, str] | None:
    """Return the coordinates at fault, the tensor of boxes on the line, and what they are."""
    ids = ids_of(evidence, "box")
    if ids is None:
        return None
    boxes = [
        item
        for item in evidence.tensors
        if item.expression and item.dtype in INTEGERS and item.shape[-1:] == (4,)
    ]
    box = boxes[0] if len(boxes) == 1 else None
    return ids, box, _SIDES.get(table_name(evidence), "coordinate")


@rule(priority=10)
def boxes_in_pixels(evidence: Evidence) -> Hint | None:
    """Boxes are in pixels; the model wants thousandths of the page."""
    found = _boxes(evidence)
    if found is None or not found[0].is_above:
        return None
    ids, box, side = found
    size = "torch.tensor([width, height, width, height], device={x}.device)"
    fix = rewritten(evidence, box, f"({{x}} * {_PAGE} / {size}).long()")
    return Hint(
        text=f"a box has {side} = {ids.high}, the table ends at {ids.size - 1}: these look like "
        f"pixels; scale them by the page size, so that a page goes from 0 to {_PAGE}",
        fix=fix or f"x * {_PAGE} // page_width, y * {_PAGE} // page_height",
    )


@rule(priority=10)
def boxes_negative(evidence: Evidence) -> Hint | None:
    """A box begins outside the page."""
    found = _boxes(evidence)
    if found is None or found[2] not in ("x", "y") or max(found[0].bad) >= 0:
        return None
    fix = rewritten(evidence, found[1], f"{{x}}.clamp(0, {_PAGE})")
    return Hint(
        text=f"a box begins at {found[2]} = {min(found[0].bad)}, outside the page",
        fix=fix or f"bbox = bbox.clamp(0, {_PAGE})",
    )


@rule(priority=10)
def boxes_inverted(evidence: Evidence) -> Hint | None:
    """A box ends before it begins, so that its width or height is negative."""
    found = _boxes(evidence)
    if found is None or found[2] not in ("width", "height") or max(found[0].bad) >= 0:
        return None
    ids, box, side = found
    first, last = ("x0", "x1") if side == "width" else ("y0", "y1")
    ends = "{x}[..., :2], {x}[..., 2:]"
    fix = rewritten(
        evidence, box, f"torch.cat([torch.minimum({ends}), torch.maximum({ends})], dim=-1)"
    )
    return Hint(
        text=f"a box has {side} = {min(ids.bad)}: {last} lies before {first}; boxes are written "
        "x0, y0, x1, y1, not as a corner with width and height",
        fix=fix or f"{first}, {last} = min({first}, {last}), max({first}, {last})",
    )


@ids_rule("segment", priority=12)
def segment_ids(evidence: Evidence, ids: Ids) -> Hint | None:
    """Segment ids number the sentences from 0, and a model may know one segment only."""
    bad = list_of(ids.bad)
    if ids.size == 1:
        return Hint(
            text=f"the segment ids hold {bad}, but this model has only one segment: leave "
            "token_type_ids out, or set them to 0",
            fix=rewritten(evidence, ids.named, "torch.zeros_like({x})"),
        )
    # Each text begins with segment 0: where it is missing, few values are enough.
    one_based = ids.may_count_from_one and ids.distinct == tuple(range(1, ids.size + 1))
    fix = "{x} - 1" if one_based else f"{{x}}.clamp(0, {ids.size - 1})"
    base = "; they look 1-based" if one_based else ""
    return Hint(
        text=f"the segment ids hold {bad}, the model has segments 0 … {ids.size - 1}{base}",
        fix=rewritten(evidence, ids.named, fix),
    )
