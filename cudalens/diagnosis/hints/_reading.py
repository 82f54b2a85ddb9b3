"""The integers at fault, in the form in which the rules ask about them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from cudalens.core._python import parse
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, Offender, TensorFact
from cudalens.diagnosis.hints._base import Rule, rule
from cudalens.diagnosis.hints._roles import INTEGERS, Role, bad_values, fault, origin, role_of
from cudalens.diagnosis.user_code import parsed

GARBAGE = 1 << 48
"""No table has this many rows: an integer of this size was never an id."""
LOST_NUMBERS = frozenset({-(1 << 63), (1 << 63) - 1, -(1 << 31)})
"""What NaN and the infinities become when they are cast to an integer type."""
_BY_CHANCE = 0.05
_MANY = 5
"""When each of so many numbers but 0 occurs, it is no chance that 0 is the one left out."""
_NEARLY_ALL = 0.9
WRAPPED = {255: -1, 156: -100}
"""What negative marks become in uint8, which has no negative numbers."""


@dataclass(frozen=True, kw_only=True)
class Ids:
    """The integer tensor at fault and what its values look like."""

    role: Role
    fact: TensorFact
    named: TensorFact | None
    """The tensor that a fix can name: this one, or the one on the line that it was cut out of."""
    size: int
    """Classes, rows, or the length of the indexed dimension."""
    low: int | None
    """The smallest value, less those allowed besides the bound; ``None`` when not known."""
    high: int
    distinct: tuple[int, ...] | None
    """The distinct values when they are few, less those allowed besides the bound."""
    bad: frozenset[int]
    """The bad values; the listed ones where the tensor has too many different ones."""
    count: int | None
    """How many values there are, ``None`` where some are allowed besides the bound."""
    has_zero_around: bool
    """Whether a tensor that the values were cut out of holds a 0."""
    offenders: tuple[Offender, ...]
    all_listed: bool

    def only_bad(self, *values: int) -> bool:
        """Return whether there are bad values, and no others than these."""
        return bool(self.bad) and self.bad <= set(values)

    @property
    def is_above(self) -> bool:
        """Return whether all bad values lie beyond the end, and no other value below 0."""
        return min(self.bad) >= self.size and (self.low is None or self.low >= 0)

    @property
    def may_count_from_one(self) -> bool:
        """Return whether the largest value is the size and no 0 was seen, which may be chance."""
        is_one_beyond = self.low is not None and self.low >= 1 and self.high == self.size
        return is_one_beyond and not self.has_zero_around

    @property
    def counts_from_one(self) -> bool:
        """Return whether the values run from 1 to the size, and 0 is not missing by chance."""
        return self.may_count_from_one and runs_from_one(self.distinct, self.size, self.count)


def runs_from_one(distinct: tuple[int, ...] | None, size: int, count: int | None) -> bool:
    """Return whether values cover 1 … ``size`` so well that a 0 would have been seen.

    Args:
        distinct: the distinct values, ``None`` where there are too many to tell.
        size: how many numbers there are.
        count: how many values there are, ``None`` where some of them do not count.
    """
    if not distinct or distinct[0] != 1 or distinct[-1] != size:
        return False
    # With one number more than the size, all equally frequent, so probable is it to see no 0.
    is_long = count is not None and (size / (size + 1)) ** count <= _BY_CHANCE
    if len(distinct) == size:
        return is_long or size >= _MANY
    return is_long and len(distinct) >= _NEARLY_ALL * size


def ids_of(evidence: Evidence, *roles: Role) -> Ids | None:
    """Describe the ids at fault when their role is one of ``roles``.

    ``None`` for values that were garbled, cast or shifted on the line itself: they have rules of
    their own, and no counting mistake is to be sought in them.
    """
    found = fault(evidence)
    role = role_of(evidence)
    if found is None or role is None or role not in roles:
        return None
    if is_garbled(evidence) or is_wrapped(evidence) or cast_source(evidence):
        return None
    if role not in ("position", "box") and shifted_source(evidence):
        return None
    violation, fact = found
    allowed = set(violation.bounds.also_allowed)
    unique, low, high = fact.summary.unique, fact.summary.min, fact.summary.max
    distinct = None if unique is None else tuple(v for v in unique if v not in allowed)
    if distinct:
        low, high = distinct[0], distinct[-1]
    bad = bad_values(evidence)
    if not bad or not isinstance(high, int):
        return None
    named = origin(evidence, role)
    return Ids(
        role=role,
        fact=fact,
        named=named,
        size=violation.size or 0,
        low=low if isinstance(low, int) and low not in allowed else None,
        high=high,
        distinct=distinct,
        bad=bad,
        count=None if unique is None or allowed & set(unique) else numel(fact),
        has_zero_around=any(_holds_zero(item) for item in (named, *_cut_from(evidence, fact))),
        offenders=violation.offenders.first,
        all_listed=len(violation.offenders.first) == violation.offenders.count,
    )


def ids_rule(
    *roles: Role, priority: int
) -> Callable[[Callable[[Evidence, Ids], Hint | None]], Rule]:
    """Enter a rule that is asked only where the ids at fault have one of ``roles``."""

    def enter(apply: Callable[[Evidence, Ids], Hint | None]) -> Rule:
        @functools.wraps(apply)
        def applied(evidence: Evidence) -> Hint | None:
            ids = ids_of(evidence, *roles)
            return None if ids is None else apply(evidence, ids)

        return rule(priority=priority)(applied)

    return enter


# --- values that no counting mistake made --------------------------------------------------------


def is_garbled(evidence: Evidence) -> bool:
    """Return whether a bad value is far beyond any table, or what a lost float becomes."""
    return any(abs(value) >= GARBAGE or value in LOST_NUMBERS for value in bad_values(evidence))


def is_wrapped(evidence: Evidence) -> bool:
    """Return whether the bad values are what uint8 makes of -1 and -100, by the line's own tensors.

    Either the loss of single labels was given uint8, or arithmetic on a uint8 tensor made values
    that the tensor does not hold.
    """
    found, bad = fault(evidence), bad_values(evidence)
    if found is None or not bad or not bad <= set(WRAPPED):
        return False
    fact = found[1]
    if evidence.op.name == "aten::nll_loss_forward" and fact.dtype == "uint8":
        return fact.summary.unique != (0, 255)
    return any(
        item.dtype == "uint8" and not bad & set(item.summary.unique or bad)
        for item in within(evidence, fact)
    )


def cast_source(evidence: Evidence) -> TensorFact | None:
    """Return the floating-point tensor on the line whose cast the ids are, if it holds no ids.

    Only where the call says so: ``ids`` in ``emb(ids.long())``.
    """
    found = fault(evidence)
    node = parsed(found[1].expression or "") if found else None
    if found is None or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if node.func.attr not in ("long", "int", "to", "type"):
        return None
    for item in evidence.tensors:
        if "float" in item.dtype and item.expression and item.shape == found[1].shape:
            is_it = _same(parsed(item.expression), node.func.value)
            return item if is_it and _holds_no_ids(item) else None
    return None


_KEEPING = frozenset(
    {"clone", "contiguous", "cpu", "cuda", "detach", "expand", "flatten", "flip", "int", "long"}
    | {"permute", "ravel", "reshape", "squeeze", "t", "to", "transpose", "unsqueeze", "view"}
)
"""Methods that give the values of their tensor as they are."""
EXACT = {"float16": 2048, "bfloat16": 256}
"""The largest integers up to which a half-precision type holds every integer."""


def _holds_no_ids(fact: TensorFact) -> bool:
    ends = (fact.summary.min, fact.summary.max)
    if fact.summary.nan or fact.summary.inf:
        return True
    numbers = [end for end in ends if isinstance(end, (int, float))]
    limit = EXACT.get(fact.dtype)
    return any(end != int(end) or (limit and abs(end) > limit) for end in numbers)


def shifted_source(evidence: Evidence) -> TensorFact | None:
    """Return the tensor that lies within the bound itself, when the line adds to it: ``y + 1``."""
    found = fault(evidence)
    if found is None or found[1].expression is None:
        return None
    node = parsed(found[1].expression)
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub):
        return None
    for item in evidence.tensors:
        if item.expression and _same(parsed(item.expression), node.left):
            return item if _is_inside(item, evidence) else None
    return None


def _is_inside(fact: TensorFact, evidence: Evidence) -> bool:
    bounds = evidence.violation.bounds if evidence.violation else None
    ends = (fact.summary.min, fact.summary.max)
    if bounds is None or not isinstance(bounds.max, int) or "float" in fact.dtype:
        return False
    return all(isinstance(end, int) and 0 <= end <= bounds.max for end in ends)


def shifting_step(evidence: Evidence) -> str | None:
    """Return the recorded line whose sum or difference first took the values out of the bound."""
    first = next((step for step in reversed(evidence.provenance) if step.op), None)
    text = first.source.text if first is not None and first.source is not None else None
    name = "" if first is None else (first.op or "").removeprefix("aten::").split(".")[0]
    return text if text and name.rstrip("_") in ("add", "sub", "rsub") and _adds(text) else None


def _adds(line: str) -> bool:
    try:
        tree = parse(line)
    except (SyntaxError, ValueError):
        return False
    sums = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp | ast.AugAssign)]
    return any(isinstance(node.op, ast.Add | ast.Sub) for node in sums)


def numel(fact: TensorFact) -> int:
    """Return the number of elements."""
    count = 1
    for size in fact.shape:
        count *= size
    return count


def _holds_zero(fact: TensorFact | None) -> bool:
    if fact is None or fact.dtype not in INTEGERS:
        return False
    return fact.summary.min == 0 or 0 in (fact.summary.unique or ())


# --- expressions ---------------------------------------------------------------------------------


def within(evidence: Evidence, fact: TensorFact) -> Iterable[TensorFact]:
    """Return the other tensors of the line that stand inside the expression of ``fact``."""
    node = parsed(fact.expression or "")
    if node is None:
        return []
    parts = {ast.dump(item) for item in ast.walk(node) if item is not node}
    others = ((item, parsed(item.expression or "")) for item in evidence.tensors)
    return [item for item, inner in others if inner is not None and ast.dump(inner) in parts]


def _cut_from(evidence: Evidence, fact: TensorFact) -> Iterator[TensorFact]:
    """Return the line's tensors of which ``fact`` is a part, its values unchanged."""
    node = parsed(fact.expression or "")
    while node is not None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value if node.func.attr in _KEEPING else None
        else:
            node = node.value if isinstance(node, ast.Subscript | ast.Attribute) else None
        if node is not None:
            for item in evidence.tensors:
                if _same(parsed(item.expression or ""), node):
                    yield item


def _same(left: ast.expr | None, right: ast.expr) -> bool:
    return left is not None and ast.dump(left) == ast.dump(right)


# --- the floating-point numbers at fault, in the form in which th ---------------------------------


ROUNDING = 1e-2
"""So far from 0 and 1 the rounding errors of a sum or product go."""
HALVES = ("float16", "bfloat16")


def numbers_of(evidence: Evidence, *ops: str) -> tuple[str, TensorFact] | None:
    """Return the argument at fault and its tensor when it holds floating-point numbers."""
    found = fault(evidence)
    if found is None or evidence.op.name not in ops or "float" not in found[1].dtype:
        return None
    return found[0].argument, found[1]


def ends_of(fact: TensorFact) -> tuple[float, float] | None:
    """Return the smallest and the largest number, ``None`` unless all are finite."""
    low, high = fact.summary.min, fact.summary.max
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return None
    return None if fact.summary.nan or fact.summary.inf else (float(low), float(high))
