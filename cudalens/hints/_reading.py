"""What the rules ask of the evidence: the ids at fault, what kind of table they index, their name.

Every kind of id belongs to exactly one role, so that the rules of two causes cannot both speak.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from cudalens.facts import TensorFact, Violation
from cudalens.model import Evidence

Role = Literal[
    "label", "one_hot", "token", "position", "box", "segment", "edge", "action", "index"
]

LABEL_OPS = frozenset(
    {
        "aten::nll_loss_forward",
        "aten::nll_loss_backward",
        "aten::nll_loss2d_forward",
        "aten::nll_loss2d_backward",
        "aten::multi_margin_loss",
    }
)
LOOKUP_OPS = frozenset(
    {
        "aten::embedding",
        "aten::embedding_renorm_",
        "aten::embedding_renorm",
        "aten::_embedding_bag",
        "aten::_embedding_bag_forward_only",
        "aten::embedding_dense_backward",
    }
)
GARBAGE = 1 << 48
"""No table has this many rows: an id of this size was never an id."""
LOST_NUMBERS = frozenset({-(1 << 63), (1 << 63) - 1, -(1 << 31)})
"""What NaN and the infinities become when they are cast to an integer type."""

_INTEGERS = frozenset({"uint8", "int8", "int16", "int32", "int64"})
_BOX_TABLE = re.compile(r"^[xyhw]_position_embeddings$")
_SEGMENT = re.compile(r"token_type|segment|(^|_)seg(_|$)")
_POSITION = re.compile(r"position|(^|_)pos(_|$|itions?|emb|enc|ids)|^wpe$|arange\(")
_BOX = re.compile(r"bbox|(^|_)boxes?(_|$)")
_TOKEN_TABLE = re.compile(
    r"word_emb|^wte$|embed_tokens|^shared$|tok(en)?_?emb|embed_in$|word_lut|vocab|input_ids|token"
)
_WORDS: dict[Role, re.Pattern[str]] = {
    "label": re.compile(r"label|target|mask|(^|\W)(y|gt)(\W|$)"),
    "one_hot": re.compile(r"label|target|mask|(^|\W)(y|gt)(\W|$)"),
    "box": _BOX,
    "edge": re.compile(r"(^|[^a-z])edges?([^a-z]|$)"),
    "action": re.compile(r"(^|[^a-z])acts?(ions?)?([^a-z]|$)"),
}


@dataclass(frozen=True, kw_only=True)
class Ids:
    """The integer tensor at fault and what its values look like."""

    role: Role
    fact: TensorFact
    named: TensorFact | None
    """The tensor that the fix can name: this one, or the one on the line that it was made of."""
    size: int
    """Classes, rows, or the length of the indexed dimension."""
    low: int | None
    """The smallest value that is not allowed besides the bound; ``None`` when not known."""
    high: int
    distinct: tuple[int, ...] | None
    """The distinct values, when there are few, less those allowed besides the bound."""
    bad: frozenset[int]
    """The bad values; the listed ones where the tensor has too many values."""

    def only_bad(self, *values: int) -> bool:
        """Tell whether there are bad values, and no others than these."""
        return bool(self.bad) and self.bad <= set(values)

    @property
    def is_above(self) -> bool:
        """Tell whether all bad values lie beyond the end."""
        return min(self.bad) >= self.size

    @property
    def numel(self) -> int:
        """Give the number of elements."""
        count = 1
        for size in self.fact.shape:
            count *= size
        return count

    @property
    def counts_from_one(self) -> bool:
        """Tell whether the values start at 1, end at the size, and are enough to say so."""
        if self.low is None or self.low < 1 or self.high != self.size:
            return False
        return self.low == 1 or self.numel >= self.size


def fault(evidence: Evidence) -> tuple[Violation, TensorFact] | None:
    """Give the finding with the tensor at fault."""
    violation = evidence.violation
    if violation is None:
        return None
    position = violation.list_position
    key = violation.argument if position is None else f"{violation.argument}[{position}]"
    fact = evidence.tensor(key)
    return None if fact is None else (violation, fact)


def bad_values(evidence: Evidence) -> frozenset[int]:
    """Give the bad integers: all where the distinct values are known, else the listed ones."""
    found = fault(evidence)
    if found is None:
        return frozenset()
    violation, fact = found
    low, high = violation.bounds.min, violation.bounds.max
    unique = fact.summary.unique
    if unique is not None and isinstance(low, int) and isinstance(high, int):
        allowed = violation.bounds.also_allowed
        return frozenset(v for v in unique if not low <= v <= high and v not in allowed)
    listed = violation.offenders.first
    return frozenset(item.value for item in listed if isinstance(item.value, int))


def ids_of(evidence: Evidence, *roles: Role) -> Ids | None:
    """Describe the ids at fault when their role is one of ``roles``.

    ``None`` for values that no counting mistake explains: garbage, casts and shifts, which have
    rules of their own.
    """
    found = fault(evidence)
    if found is None or found[0].size is None:
        return None
    violation, fact = found
    role = role_of(evidence)
    bad = bad_values(evidence)
    if role not in roles or not bad or is_garbled(bad) or derived(evidence):
        return None
    allowed = set(violation.bounds.also_allowed)
    unique = fact.summary.unique
    distinct = None if unique is None else tuple(v for v in unique if v not in allowed)
    low, high = fact.summary.min, fact.summary.max
    if distinct:
        low, high = distinct[0], distinct[-1]
    if not isinstance(high, int):
        return None
    return Ids(
        role=role,
        fact=fact,
        named=origin(evidence, role),
        size=violation.size if violation.size is not None else 0,
        low=low if isinstance(low, int) and low not in allowed else None,
        high=high,
        distinct=distinct,
        bad=bad,
    )


def is_garbled(bad: Iterable[int]) -> bool:
    """Tell whether a value is far beyond any table, or what a lost float becomes."""
    return any(abs(value) >= GARBAGE or value in LOST_NUMBERS for value in bad)


def derived(evidence: Evidence) -> bool:
    """Tell whether the line or the recording shows the arithmetic that made the values bad."""
    return evidence.fact("ids.derived") is not None or _provenance_shift(evidence)


def _provenance_shift(evidence: Evidence) -> bool:
    return shift_step(evidence) is not None


def shift_step(evidence: Evidence) -> str | None:
    """Give the recorded line that first took the values out of the bound by adding a number."""
    for step in reversed(evidence.provenance):
        name = (step.op or "").removeprefix("aten::").split(".")[0].rstrip("_")
        text = step.source.text if step.source else None
        if name in ("add", "sub", "rsub") and text and re.search(r"[+-]=?\s*\w", text):
            return text
    return None


# --- role ----------------------------------------------------------------------------------------


def role_of(evidence: Evidence) -> Role | None:
    """Say what the ids at fault number, ``None`` when it is no index."""
    found = fault(evidence)
    if found is None or found[0].bounds.max is None or found[1].dtype not in _INTEGERS:
        return None
    name = evidence.op.name or ""
    violation, fact = found
    if name in LABEL_OPS:
        return "label" if violation.argument == "target" else None
    if name in LOOKUP_OPS:
        return _table_role(evidence, fact) if violation.argument == "indices" else None
    if violation.size is None or not violation.is_index:
        return None
    if is_one_hot(evidence):
        return "one_hot"
    if _gathers_positions(evidence, fact):
        return "position"
    for role in ("edge", "action"):
        if speaks_of(evidence, role):  # type: ignore[arg-type]
            return role  # type: ignore[return-value]
    return "index"


def is_one_hot(evidence: Evidence) -> bool:
    """Tell whether ones are written at the indices: ``one_hot``, or ``scatter_`` of the value 1."""
    if (evidence.op.api or "").endswith(".one_hot"):
        return True
    name = evidence.op.name in ("aten::scatter", "aten::scatter_")
    return name and evidence.scalar("value") in ("1", "1.0", "True")


def table_name(evidence: Evidence) -> str:
    """Give the last part of the module's path, the name under which the model holds the table."""
    return (evidence.module_path or "").rpartition(".")[2].lower()


def _table_role(evidence: Evidence, fact: TensorFact) -> Role:
    expression = (fact.expression or "").lower()
    kind = (evidence.module_type or "").lower()
    name = table_name(evidence)
    if _BOX_TABLE.match(name):
        return "box"
    # The table's own name tells most; then its class; the user's name for the ids comes last.
    for text in (name, kind if kind != "embedding" else "", expression):
        if _SEGMENT.search(text):
            return "segment"
        if _POSITION.search(text):
            return "position"
        if _TOKEN_TABLE.search(text):
            return "token"
    return "token"


def is_vocabulary(evidence: Evidence) -> bool:
    """Tell whether the table is one of a language model's tokens."""
    found = fault(evidence)
    expression = (found[1].expression or "").lower() if found else ""
    return bool(
        _TOKEN_TABLE.search(table_name(evidence))
        or _TOKEN_TABLE.search(expression)
        or in_library(evidence, "transformers")
    )


def _gathers_positions(evidence: Evidence, fact: TensorFact) -> bool:
    """Tell whether a library reads a buffer at position ids, as RoBERTa does for token types."""
    if evidence.op.name != "aten::gather" or not is_run(fact):
        return False
    variable = evidence.fact("library.index") or ""
    kind = evidence.module_type or ""
    is_inside = in_library(evidence, "transformers") and kind.endswith("Embeddings")
    return fact.expression is None and (variable == "position_ids" or is_inside)


def is_run(fact: TensorFact) -> bool:
    """Tell whether the values are consecutive, as many as the last dimension is long."""
    low, high, shape = fact.summary.min, fact.summary.max, fact.shape
    if not isinstance(low, int) or not isinstance(high, int) or not shape:
        return False
    unique = fact.summary.unique
    is_dense = unique is None or len(unique) == high - low + 1
    return is_dense and high - low < shape[-1] + 1 and high - low + 1 >= shape[-1]


def speaks_of(evidence: Evidence, role: Role) -> bool:
    """Tell whether the words for the bad tensor, or for what it was made of, name the role."""
    return origin(evidence, role, by_word=True) is not None


def in_library(evidence: Evidence, name: str) -> bool:
    """Tell whether the op was reached through a library, below the user's line."""
    last = max((at for at, frame in enumerate(evidence.frames) if frame.is_user), default=-1)
    below = [frame.file.replace("\\", "/") for frame in evidence.frames[last + 1 :]]
    return any(f"/{name}/" in file for file in below)


# --- the user's name -----------------------------------------------------------------------------


def origin(evidence: Evidence, role: Role, *, by_word: bool = False) -> TensorFact | None:
    """Give the tensor on the line that the bad ids are, or were cut out of without arithmetic.

    Args:
        by_word: only a tensor whose expression names the role.
    """
    found = fault(evidence)
    if found is None:
        return None
    fact, word = found[1], _WORDS.get(role)
    is_said = bool(word and fact.expression and word.search(fact.expression.lower()))
    if fact.expression is not None and (is_said or not by_word):
        return fact
    others = [
        item
        for item in evidence.tensors
        if item is not fact and item.expression and item.dtype in _INTEGERS
    ]
    said = [
        item
        for item in others
        if word and word.search((item.expression or "").lower()) and _holds(item, fact, evidence)
    ]
    if len(said) == 1 and (fact.expression is None or by_word):
        return said[0]
    twins = [] if by_word else [item for item in others if _is_twin(item, fact)]
    return twins[0] if len(twins) == 1 else None


def _is_twin(item: TensorFact, fact: TensorFact) -> bool:
    same_range = (item.summary.min, item.summary.max) == (fact.summary.min, fact.summary.max)
    return same_range and sorted(_long(item.shape)) == sorted(_long(fact.shape))


def _long(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _holds(item: TensorFact, fact: TensorFact, evidence: Evidence) -> bool:
    if item.summary.unique is not None:
        return bad_values(evidence) <= set(item.summary.unique)
    return item.summary.max == fact.summary.max or item.summary.min == fact.summary.min
