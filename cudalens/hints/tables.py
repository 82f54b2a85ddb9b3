"""Causes of ids beyond a lookup table: tokens, padding, positions, page coordinates, segments."""

from __future__ import annotations

from itertools import groupby

from cudalens.facts import Hint
from cudalens.hints._base import rule
from cudalens.hints._fixes import called, list_of, rewritten, with_keyword
from cudalens.hints._reading import Ids, ids_of, shifting_step
from cudalens.hints._roles import INTEGERS, in_library, is_run, is_vocabulary
from cudalens.model import Evidence

_JUST_BEYOND = 64
"""Tokens are added by the handful; ids further out belong to another vocabulary."""
_IGNORED = -100
_LANGUAGE = 1000
_RESIZE = "model.resize_token_embeddings(len(tokenizer))"
_PAGE = 1000


# --- tokens --------------------------------------------------------------------------------------


@rule(priority=12)
def ignored_label_as_id(evidence: Evidence) -> Hint | None:
    """Labels with -100, the number that losses ignore, are looked up as token ids."""
    ids = ids_of(evidence, "token")
    if ids is None or not ids.only_bad(_IGNORED):
        return None
    place = f"{evidence.module_path or ''} {ids.fact.expression or ''}"
    what = "decoder ids" if "decoder" in place else "ids"
    return Hint(
        text=f"-100 is what losses ignore, and no id: these {what} were made of labels; put the "
        "padding id in its place",
        fix=_padded(evidence, ids, _IGNORED),
    )


@rule(priority=12)
def padding_of_minus_one(evidence: Evidence) -> Hint | None:
    """The sequences are padded with -1, which is no row of the table."""
    ids = ids_of(evidence, "token")
    if ids is None or not ids.only_bad(-1) or shifting_step(evidence):
        return None
    return Hint(
        text="-1 is no row of a table: if it pads the sequences, use a padding id that has a row",
        fix=_padded(evidence, ids, -1),
    )


def _padded(evidence: Evidence, ids: Ids, mark: int) -> str:
    index = evidence.scalar("padding_idx") or "-1"
    is_row = index.isdecimal() and int(index) < ids.size
    pad = index if is_row else ("tokenizer.pad_token_id" if is_vocabulary(evidence) else "pad_id")
    fix = rewritten(evidence, ids.named, f"{{x}}.masked_fill({{x}} == {mark}, {pad})")
    return fix or f"ids = ids.masked_fill(ids == {mark}, {pad})"


def _tokens_beyond(evidence: Evidence) -> Ids | None:
    ids = ids_of(evidence, "token")
    return ids if ids is not None and ids.is_above else None


def _is_padding(evidence: Evidence, ids: Ids) -> bool:
    """Tell whether the only bad id fills the ends of the rows, all on the same side."""
    if len(ids.bad) != 1:
        return False
    if evidence.fact("tokenizer.pad_token_id") == str(next(iter(ids.bad))):
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
    text = f"{pad} only fills the ends of the rows: a padding id for which the table with "
    text += f"{ids.size} rows has none"
    if not is_vocabulary(evidence):
        return Hint(text=text, fix=f"nn.Embedding({pad + 1}, dim, padding_idx={pad})")
    if pad - ids.size < _JUST_BEYOND:
        return Hint(text=text, fix=_resized(evidence, ids))
    return Hint(text=text, fix="tokenizer.pad_token = tokenizer.eos_token")


@rule(priority=16)
def added_tokens(evidence: Evidence) -> Hint | None:
    """Tokens were added to the tokenizer, and the model's table was not made larger."""
    ids = _tokens_beyond(evidence)
    if ids is None or not is_vocabulary(evidence) or _is_padding(evidence, ids):
        return None
    if ids.high - ids.size >= _JUST_BEYOND or ids.covers_one_to_size:
        return None
    known = evidence.fact("tokenizer.length")
    length = f" (the tokenizer has {known})" if known else ""
    is_library = in_library(evidence, "transformers")
    why = "the table was not resized" if is_library else "the table was not made larger"
    return Hint(
        text=f"the bad ids ({list_of(ids.bad)}) lie just beyond the {ids.size} rows{length}: it "
        f"looks as if tokens were added and {why}",
        fix=_resized(evidence, ids),
    )


def _resized(evidence: Evidence, ids: Ids) -> str:
    if not in_library(evidence, "transformers"):
        # A tokenizer's vocab_size leaves added tokens out; its length does not.
        has_tokenizer = "transformers" in evidence.libraries
        return f"nn.Embedding({'len(tokenizer)' if has_tokenizer else ids.high + 1}, dim)"
    name = called(evidence)
    model = name.removesuffix(".generate").removesuffix(".forward") if name else "model"
    return _RESIZE.replace("model", model if ids.named else "model")


@rule(priority=18)
def other_vocabulary(evidence: Evidence) -> Hint | None:
    """The ids come from a tokenizer with a larger vocabulary than the model's."""
    ids = _tokens_beyond(evidence)
    if ids is None or not is_vocabulary(evidence) or _is_padding(evidence, ids):
        return None
    if ids.high - ids.size < _JUST_BEYOND:
        return None
    known = evidence.fact("tokenizer.length")
    length = f", the tokenizer has {known} entries" if known else ""
    return Hint(
        text=f"ids go up to {ids.high} in a table of {ids.size} rows{length}: they look like the "
        "ids of another tokenizer than the model's",
        fix=f"assert len(tokenizer) <= {ids.size}  # load both under the same name",
    )


@rule(priority=45)
def table_too_small(evidence: Evidence) -> Hint | None:
    """The table has fewer rows than the largest id needs."""
    ids = _tokens_beyond(evidence)
    if ids is None or is_vocabulary(evidence) or _is_padding(evidence, ids):
        return None
    if ids.covers_one_to_size and evidence.scalar("padding_idx") != "0":
        return None
    is_large = ids.size >= _LANGUAGE and ids.high - ids.size < _JUST_BEYOND
    added = f"; for tokens added to a tokenizer: {_RESIZE}" if is_large else ""
    return Hint(
        text=f"ids up to {ids.high} need {ids.high + 1} rows, the table has {ids.size}{added}",
        fix=f"nn.Embedding({ids.high + 1}, dim)",
    )


# --- positions -----------------------------------------------------------------------------------


def _offset(evidence: Evidence, ids: Ids) -> int:
    """Give how many rows stand before that of the first token: 2 in RoBERTa and BART."""
    padding = evidence.scalar("padding_idx") or "-1"
    if padding.isdecimal() and ids.low is not None and ids.low in (int(padding), int(padding) + 1):
        return int(padding) + 1
    is_roberta = evidence.op.name == "aten::gather" and ids.low in (1, 2)
    if is_roberta:
        return 2
    return ids.low if ids.low in (1, 2) and ids.fact.shape[-1] > 1 else 0


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
    offset = _offset(evidence, ids)
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
    if offset and length <= ids.size:
        return None
    text = f"the sequence has {length} positions, the table {room}"
    if (called(evidence) or "").endswith("generate"):
        prompt = _prompt(evidence, length)
        fix = with_keyword(evidence, ("generate",), "max_new_tokens", str(max(1, room - prompt)))
        note = f"prompt and new tokens together may have {room}"
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
    """Give the user's name for the batch of sequences of this length on his line."""
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


@rule(priority=20)
def positions_given(evidence: Evidence) -> Hint | None:
    """Positions were given that do not count from 0, such as those of a longer text."""
    ids = ids_of(evidence, "position")
    if ids is None or not ids.is_above or _positions(evidence) is not None:
        return None
    if not ids.fact.shape:
        return None
    return Hint(
        text=f"positions go up to {ids.high} in a table of {ids.size} rows, and do not count the "
        "tokens of a row from 0",
        fix=rewritten(evidence, ids.named, "{x} - {x}.amin(-1, keepdim=True)"),
    )
