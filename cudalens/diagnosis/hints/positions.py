"""Causes of positions beyond their table: long sequences, offsets, generation."""

from __future__ import annotations

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._reading import Ids, ids_of
from cudalens.diagnosis.hints._roles import INTEGERS, is_run
from cudalens.diagnosis.user_code import called_name, in_library, rewritten, with_keyword


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
    """Return the user's name for the batch of sequences of this length on his line."""
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
