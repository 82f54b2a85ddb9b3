"""Role of the bad integers: indices of classes, tokens, positions or nodes; exactly one each.

One role for each finding keeps the rules of two causes from speaking about the same values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from cudalens.core.report import Evidence
from cudalens.core.report_types import TensorFact, Violation
from cudalens.diagnosis.user_code import in_transformers, is_name

Role = Literal["label", "one_hot", "token", "position", "box", "segment", "index"]

LABEL_OPS = frozenset(
    {"aten::nll_loss_forward", "aten::nll_loss2d_forward", "aten::multi_margin_loss"}
    | {"aten::nll_loss_backward", "aten::nll_loss2d_backward"}
    # A refusal of the host has the name of the function.
    | {"torch.nn.functional.cross_entropy", "torch.nn.functional.nll_loss"}
)
LOOKUP_OPS = frozenset(
    {"aten::embedding", "aten::embedding_renorm", "aten::embedding_renorm_"}
    | {"aten::_embedding_bag", "aten::_embedding_bag_forward_only"}
    | {"aten::embedding_dense_backward"}
)
INTEGERS = frozenset({"uint8", "int8", "int16", "int32", "int64"})

_BOX_TABLE = re.compile(r"^[xyhw]_position_embeddings$")
_SEGMENT = re.compile(r"token_type|segment|(^|_)seg(_|$)")
_POSITION = re.compile(r"(?<!com)(?<!dis)position|(^|[._])pos(_|$|emb|enc|ids)|^wpe$")
_VOCABULARY = re.compile(r"word_emb|^wte$|tok(en)?s?_?(emb|$)|embed_(tok|in$)|^shared$|input_ids")
_LABEL_WORD = re.compile(r"label|target|mask|(^|\W)(y|gt)(\W|$)")
_WORDS: dict[Role, re.Pattern[str]] = {
    "label": _LABEL_WORD,
    "one_hot": _LABEL_WORD,
    "box": re.compile(r"bbox|(^|\W)box(es)?(\W|$)"),
}


def fault(evidence: Evidence) -> tuple[Violation, TensorFact] | None:
    """Return the finding with the tensor at fault."""
    violation = evidence.violation
    if violation is None:
        return None
    position = violation.list_position
    key = violation.argument if position is None else f"{violation.argument}[{position}]"
    fact = evidence.tensor(key)
    return None if fact is None else (violation, fact)


def bad_values(evidence: Evidence) -> frozenset[int]:
    """Return the bad integers: all where the distinct values are known, else the listed ones."""
    at_fault = fault(evidence)
    if at_fault is None:
        return frozenset()
    violation, fact = at_fault
    low, high = violation.bounds.min, violation.bounds.max
    unique = fact.summary.unique
    if unique is not None and isinstance(low, int) and isinstance(high, int):
        allowed = violation.bounds.also_allowed
        return frozenset(v for v in unique if not low <= v <= high and v not in allowed)
    listed = violation.offenders.first
    return frozenset(item.value for item in listed if isinstance(item.value, int))


def role_of(evidence: Evidence) -> Role | None:
    """Say what the integers at fault number, ``None`` when they are no index."""
    at_fault = fault(evidence)
    if at_fault is None or at_fault[1].dtype not in INTEGERS:
        return None
    violation, fact = at_fault
    if violation.size is None or not isinstance(violation.bounds.max, int):
        return None
    name = evidence.op.name or ""
    if name.endswith("_backward"):
        return None  # they were in range in the forward call: no counting mistake
    if name in LABEL_OPS:
        return "label" if violation.argument == "target" else None
    if name in LOOKUP_OPS:
        return _role_in_table(evidence, fact) if violation.argument == "indices" else None
    if not violation.is_index:
        return None
    if (evidence.op.api or "").endswith(".one_hot"):
        return "one_hot"
    writes_ones = evidence.scalar("value") in ("1", "1.0", "True")
    if writes_ones and name in ("aten::scatter", "aten::scatter_"):
        return "one_hot"
    return "position" if _gathers_positions(evidence, fact) else "index"


def _gathers_positions(evidence: Evidence, fact: TensorFact) -> bool:
    """Return whether a library reads at position ids: a buffer, or a table of positions."""
    if fact.expression is not None or not is_run(fact):
        return False
    if evidence.op.name == "aten::index":
        related = evidence.violation.related if evidence.violation else None
        tables = (item.text for item in evidence.owners if item.argument == related)
        return any(_POSITION.search(text.rpartition(".")[2]) for text in tables)
    if evidence.op.name != "aten::gather":
        return False
    is_embedding = (evidence.module_type or "").endswith("Embeddings")
    is_inside = is_embedding and in_transformers(evidence)
    return is_inside or evidence.call_context.library_name("index") == "position_ids"


def _role_in_table(evidence: Evidence, fact: TensorFact) -> Role:
    name = table_name(evidence)
    kind = (evidence.module_type or "").lower()
    variable = evidence.call_context.library_name("indices") or fact.expression or ""
    if _BOX_TABLE.match(name):
        return "box"
    # The table's own name tells most; then its class, unless it holds tables of both kinds; the
    # name of the ids comes last.
    for text in (name, kind if _VOCABULARY.search(kind) is None else "", variable.lower()):
        if _SEGMENT.search(text):
            return "segment"
        if _POSITION.search(text):
            return "position"
        if _VOCABULARY.search(text):
            return "token"
    return "token"


def table_name(evidence: Evidence) -> str:
    """Return the last part of the module's path: the name under which the model holds the table."""
    return (evidence.module_path or "").rpartition(".")[2].lower()


def is_vocabulary(evidence: Evidence) -> bool:
    """Return whether the table is one of a language model's tokens."""
    at_fault = fault(evidence)
    expression = (at_fault[1].expression or "").lower() if at_fault else ""
    texts = (table_name(evidence), expression)
    return any(_VOCABULARY.search(text) for text in texts) or in_transformers(evidence)


def is_run(fact: TensorFact) -> bool:
    """Return whether the values are consecutive and no more than the last dimension holds."""
    low, high = fact.summary.min, fact.summary.max
    if not isinstance(low, int) or not isinstance(high, int) or not fact.shape:
        return False
    count, length, unique = high - low + 1, fact.shape[-1], fact.summary.unique
    if unique is not None:
        return len(unique) == count and count <= length
    return length < 2 * count <= 2 * length


# --- the user's name -----------------------------------------------------------------------------


def origin(evidence: Evidence, role: Role) -> TensorFact | None:
    """Return the tensor on the line that the bad ids are, or were cut out of without arithmetic."""
    at_fault = fault(evidence)
    if at_fault is None:
        return None
    fact, word = at_fault[1], _WORDS.get(role)
    if fact.expression is not None:
        return fact
    others = [
        item
        for item in evidence.tensors
        if item is not fact and item.expression and item.dtype in INTEGERS
    ]
    bad = bad_values(evidence)
    said = [it for it in others if word and word.search((it.expression or "").lower())]
    named = [item for item in said if _holds(item, fact, bad)]
    if named:
        return named[0] if len(named) == 1 else None
    ends = fact.summary.min, fact.summary.max
    alike = (item for item in others if (item.summary.min, item.summary.max) == ends)
    twins = [item for item in alike if _long(item.shape) == _long(fact.shape)]
    return twins[0] if len(twins) == 1 else None


def name_of(fact: TensorFact) -> str:
    """Return the user's name for a tensor, or what it is to the function."""
    role = "target" if fact.argument == "target" else "input"
    return fact.expression if is_name(fact.expression) and fact.expression else f"the {role}"


def _long(shape: tuple[int, ...]) -> list[int]:
    return sorted(size for size in shape if size != 1)


def _holds(item: TensorFact, fact: TensorFact, bad: Iterable[int]) -> bool:
    if item.summary.unique is not None:
        return set(bad) <= set(item.summary.unique)
    return item.summary.max == fact.summary.max or item.summary.min == fact.summary.min
