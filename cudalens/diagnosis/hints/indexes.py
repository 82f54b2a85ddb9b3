"""Causes of indices beyond a dimension: damaged numbers, other counting, lengths, edges."""

from __future__ import annotations

import ast
import re

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, TensorFact
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._reading import (
    EXACT,
    LOST_NUMBERS,
    Ids,
    cast_source,
    ids_rule,
    shifted_source,
    wrapped_bits,
)
from cudalens.diagnosis.hints._roles import bad_values, fault, role_of
from cudalens.diagnosis.user_code import in_library, rewritten

_CTC = ("aten::_ctc_loss", "aten::_cudnn_ctc_loss")
_QUANTILES = ("quantile", "nanquantile")
_LENGTH = re.compile(r"(^|[^a-z])(len|lens|length|lengths)([^a-z]|$)")


# --- damaged numbers -----------------------------------------------------------------------------


@rule(priority=5)
def nan_cast_to_integer(evidence: Evidence) -> Hint | None:
    """NaN or an infinity was cast to an integer type."""
    lost = bad_values(evidence) & LOST_NUMBERS
    if role_of(evidence) is None or not lost:
        return None
    source = cast_source(evidence)
    text = f"{min(lost)} is the integer that NaN or infinity is cast to"
    if source and source.summary.nan:
        return Hint(text=f"{text}: {source.expression} contains NaN before the cast")
    more = "" if evidence.has_nan_watch else f"; {evidence.steps.nan} at the first of them"
    return Hint(text=f"{text}{more}")


@rule(priority=8)
def float_ids(evidence: Evidence) -> Hint | None:
    """Ids went through a floating-point type that cannot hold them, or are no ids at all."""
    source = cast_source(evidence)
    if source is None or role_of(evidence) is None or bad_values(evidence) & LOST_NUMBERS:
        return None
    low, high = source.summary.min, source.summary.max
    limit = EXACT.get(source.dtype)
    is_whole = all(isinstance(end, (int, float)) and end == int(end) for end in (low, high))
    if is_whole and limit:
        text = f"{source.expression} is {source.dtype}, which has whole numbers only up to "
        return Hint(text=f"{text}{limit}: keep ids in int64")
    return Hint(
        text=f"{source.expression} is {source.dtype} and runs from {low} to {high}: cast to "
        "integers, these are not ids"
    )


@rule(priority=8)
def shift_on_the_line(evidence: Evidence) -> Hint | None:
    """The line itself adds to ids that lie within the bound."""
    source, at_fault = shifted_source(evidence), fault(evidence)
    if at_fault is None or source is None or role_of(evidence) in (None, "position", "box"):
        return None
    node = at_fault[1].node
    # What a variable adds was meant, by another amount perhaps.
    by_number = isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant)
    return Hint(
        text=f"{source.expression} runs from {source.summary.min} to {source.summary.max} and "
        f"fits; {at_fault[1].expression} does not",
        fix=rewritten(evidence, at_fault[1], source.expression or "") if by_number else None,
    )


@rule(priority=14)
def wrapped(evidence: Evidence) -> Hint | None:
    """Numbers beyond the range of a narrow integer type became others."""
    bits, bad = wrapped_bits(evidence), bad_values(evidence)
    if bits is None:
        return None
    if max(bad) >= 0:
        was = " and ".join(f"{value - 256} became {value}" for value in sorted(bad, reverse=True))
        text = f"uint8 has no negative numbers, so {was}: make the labels int64 before they can "
        text += "become negative"
        return Hint(text=text)
    listed = at_fault[0].offenders.first if (at_fault := fault(evidence)) else ()
    first = next((item.value for item in listed if isinstance(item.value, int)), min(bad))
    return Hint(
        text=f"int{bits} ends at {(1 << bits - 1) - 1}: {first} is what {first + (1 << bits)} "
        "becomes in it; keep these numbers in int64"
    )


# --- counting -------------------------------------------------------------------------------------


@rule(priority=4)
def quantile_levels(evidence: Evidence) -> Hint | None:
    """A level of a quantile is outside 0 … 1; CUDA reads the sorted values at its rank."""
    at_fault = fault(evidence)
    if at_fault is None or (evidence.op.api or "").rpartition(".")[2] not in _QUANTILES:
        return None
    last = (at_fault[0].size or 0) - 1
    ranks = sorted(bad_values(evidence))
    if last < 1 or not ranks:
        return None
    wrong = "below 0" if ranks[0] < 0 else "above 1"
    text = f"a level q {wrong}: q runs from 0 to 1, the rank q * {last} from 0 to {last}"
    return Hint(text=text)


@ids_rule("token", "index", priority=24)
def one_based_ids(evidence: Evidence, ids: Ids) -> Hint | None:
    """Ids run from 1 to the number of rows."""
    if not ids.counts_from_one:
        return None
    if in_library(evidence, "transformers") or is_length(ids.named):
        return None
    if evidence.scalar("padding_idx") == "0" or _meets_blank(evidence):
        return None
    if ids.role == "token":
        # Either succeeds: row 0 may be meant for padding.
        text = f"the ids run from 1 to {ids.high}: subtract 1, or make a table of {ids.high + 1} "
        return Hint(text=text + "rows")
    return Hint(
        text=f"the numbers run from 1 to {ids.high}: they look 1-based",
        fix=rewritten(evidence, ids.named, "{x} - 1"),
    )


def _meets_blank(evidence: Evidence) -> bool:
    return evidence.op.name in _CTC and evidence.scalar("blank") == "0"


# --- one value picked in each row -----------------------------------------------------------------


def is_length(fact: TensorFact | None) -> bool:
    """Return whether the user calls a tensor a length, as in ``batch["seq_len"]``."""
    name = fact.expression if fact is not None else None
    return bool(name and name.isprintable() and _LENGTH.search(name.lower()))
