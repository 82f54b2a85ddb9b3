"""Causes of indices beyond a dimension: damaged numbers, other counting, lengths."""

from __future__ import annotations

import re

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, TensorFact
from cudalens.diagnosis.hints._reading import LOST_NUMBERS, Ids, ids_rule
from cudalens.diagnosis.hints._roles import bad_values, role_of
from cudalens.diagnosis.user_code import in_transformers

_CTC = ("aten::_ctc_loss", "aten::_cudnn_ctc_loss")
_LENGTH = re.compile(r"(^|[^a-z])(len|lens|length|lengths)([^a-z]|$)")


# --- damaged numbers -----------------------------------------------------------------------------


def nan_cast_to_integer(evidence: Evidence) -> Hint | None:
    """NaN or an infinity was cast to an integer type."""
    lost = bad_values(evidence) & LOST_NUMBERS
    if role_of(evidence) is None or not lost:
        return None
    return Hint(text=f"{min(lost)} is the integer that NaN or infinity is cast to")


# --- counting -------------------------------------------------------------------------------------


@ids_rule("token", "index")
def one_based_ids(evidence: Evidence, ids: Ids) -> Hint | None:
    """Ids run from 1 to the number of rows."""
    if not ids.counts_from_one:
        return None
    if in_transformers(evidence) or is_length(ids.named):
        return None
    if evidence.scalar("padding_idx") == "0":
        return None
    # No code: either succeeds, and row 0 may be meant for padding.
    what, rows = ("ids", "make a table of") if ids.role == "token" else ("numbers", "make")
    text = f"{ids.every(what)} run from 1 to {ids.high}: subtract 1, or {rows} {ids.high + 1} rows"
    return Hint(text=text)


@ids_rule("index")
def no_class_for_blank(evidence: Evidence, ids: Ids) -> Hint | None:
    """Labels of a CTC loss run from 1 to the number of classes: one of these is the blank."""
    if evidence.op.name not in _CTC or evidence.scalar("blank") != "0":
        return None
    if ids.bad != {ids.size} or ids.low is None or ids.low < 1:
        return None
    return Hint(
        text=f"class 0 is the blank, so that {ids.size} classes are labels 1 … {ids.size - 1}: "
        f"label {ids.size} needs {ids.size + 1} classes"
    )


# --- one value picked in each row -----------------------------------------------------------------


def is_length(fact: TensorFact | None) -> bool:
    """Return whether the user calls a tensor a length, as in ``batch["seq_len"]``."""
    name = fact.expression if fact is not None else None
    return bool(name and name.isprintable() and _LENGTH.search(name.lower()))
