"""Causes of indices that pick one value a row: lengths used as positions, marks given to gather."""

from __future__ import annotations

import ast
import re

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, TensorFact
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._reading import Ids, ids_of
from cudalens.diagnosis.user_code import last_name, list_of, parsed, rewritten

_LENGTH = re.compile(r"(^|[^a-z])(len|lens|length|lengths)([^a-z]|$)")
_GATHERS = frozenset({"aten::gather", "aten::take_along_dim"})
_MARKS = frozenset({-1, -100})


def is_length(fact: TensorFact | None) -> bool:
    """Return whether the user calls a tensor a length, as in ``lengths`` or
    ``batch["seq_len"]``.
    """
    name = fact.expression if fact is not None else None
    return bool(name and name.isprintable() and _LENGTH.search(name.lower()))


@rule(priority=13)
def length_as_position(evidence: Evidence) -> Hint | None:
    """The length of a sequence is used as the position of its last element."""
    ids = ids_of(evidence, "index")
    if ids is None or not ids.is_above or not ids.only_bad(ids.size) or not _picks(evidence, ids):
        return None
    is_empty = ids.low is None or ids.low < 1
    empty = "; a length of 0 has no last element" if is_empty else ""
    return Hint(
        text=f"a length of {ids.size} ends at position {ids.size - 1}{empty}",
        fix=None if is_empty else rewritten(evidence, ids.named, "{x} - 1"),
    )


def _picks(evidence: Evidence, ids: Ids) -> bool:
    is_read = evidence.op.name in ("aten::index", "aten::index_select", *_GATHERS)
    return is_read and is_length(ids.named)


@rule(priority=20)
def mark_in_gather(evidence: Evidence) -> Hint | None:
    """Labels with -1 or -100, which a loss may leave out, are indices of a gather."""
    ids = ids_of(evidence, "index", "action")
    if ids is None or evidence.op.name not in _GATHERS or not ids.bad <= _MARKS:
        return None
    return Hint(
        text=f"gather takes no index below 0 ({list_of(ids.bad)}): where it marks what to leave "
        "out, gather at a harmless index and set the result to 0",
        fix=_masked(evidence, ids),
    )


def _masked(evidence: Evidence, ids: Ids) -> str | None:
    """Return the gather of harmless indices, with zeros where the mark was."""
    index = ids.fact.expression
    call = rewritten(evidence, ids.fact, "{x}.clamp(min=0)")
    tree = parsed(evidence.call_text or "")
    if call is None or not isinstance(tree, ast.Call) or last_name(tree.func) != "gather":
        return None
    fix = f"{call} * ({index} >= 0)"
    return fix if parsed(fix) is not None else None
