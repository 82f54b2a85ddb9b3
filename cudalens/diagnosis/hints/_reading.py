"""The integers at fault, in the form in which the rules ask about them."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from cudalens.core.api_names import stem_of
from cudalens.core.evidence_types import DatasetColumn
from cudalens.core.graph_types import WRITES
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, LineRef, Offender, TensorFact, Violation
from cudalens.core.torch_functions import Trait, functions, stems
from cudalens.diagnosis.hints._base import Reading
from cudalens.diagnosis.hints._makers import calls_on_line, is_numbered, maker_steps, makes_value
from cudalens.diagnosis.hints._roles import INTEGERS, Role, bad_values, fault, origin, role_of
from cudalens.diagnosis.user_code import last_name, statement_of

LOST_NUMBERS = frozenset({-(1 << 63), (1 << 63) - 1, -(1 << 31)})
"""Integers that NaN and the infinities become when they are cast."""
BY_CHANCE = 0.05
_MANY = 5
"""When each of so many numbers but 0 occurs, it is no chance that 0 is the one left out."""
_NEARLY_ALL = 0.9
_RARE = 0.1
"""A number that is less frequent than so many times an equal share is a stray one."""
MARKS = frozenset({-1, -100})
"""Usual marks of labels to leave out."""


@dataclass(frozen=True, kw_only=True)
class Ids:
    """The integers at fault, and what is known of all values that the line was given.

    ``low``, ``high``, ``distinct`` and ``count`` are of everything seen: of the dataset's column
    where that is known, else of this call, with the ends of earlier calls of the line.
    """

    role: Role
    fact: TensorFact
    shape: tuple[int, ...]
    """Its shape, or that of the tensor on the line that it was flattened from."""
    named: TensorFact | None
    """The tensor that a fix can name: this one, or the one on the line that it was cut out of.

    ``None`` where the dataset stores such values and may give others.
    """
    size: int
    """Classes, rows, or the length of the indexed dimension."""
    low: int | None
    """The smallest value, less those allowed besides the bound; ``None`` when not known."""
    high: int
    distinct: tuple[int, ...] | None
    """The distinct values when they are few, less those allowed besides the bound."""
    kinds: int | None
    """Number of distinct values, ``None`` where only their ends are known."""
    count: int | None
    """Number of values, ``None`` where some are allowed besides the bound."""
    bad: frozenset[int]
    """The bad values of this call; the listed ones where it has too many different ones."""
    bad_share: float
    """Which part of all values is bad."""
    may_have_zero: bool
    """True if a 0 may have been seen: in a tensor that these are a part of, beside a mark, or in an
    earlier call of which nothing is known."""
    is_computed: bool
    """True if the line computes the numbers, or a call that numbers things of its own."""
    is_whole: bool
    """True if all values of a data set are known, and not those of single calls alone."""
    violation: Violation
    looked_at: tuple[str, str]
    """How many values were looked at, and of what: ``("20", " of this batch")``."""

    def every(self, noun: str) -> str:
        """Return what was looked at: ``the 20 labels of this batch``, ``the labels of ds``."""
        many, of = self.looked_at
        return " ".join(filter(None, ("the", many, noun + of)))

    @property
    def is_above(self) -> bool:
        """Return whether all bad values lie beyond the end, and no other value below 0."""
        return min(self.bad) >= self.size and (self.low is None or self.low >= 0)

    @property
    def may_count_from_one(self) -> bool:
        """Return whether the largest value is the size and no 0 was seen, which may be chance.

        Only data counts: what a call computes, as the number of an interval, has its own reasons.
        """
        is_one_beyond = self.low is not None and self.low >= 1 and self.high == self.size
        return is_one_beyond and not self.may_have_zero and not self.is_computed

    @property
    def counts_from_one(self) -> bool:
        """Return whether the values run from 1 to the size, and 0 is not missing by chance."""
        return self.may_count_from_one and runs_from_one(self.distinct, self.size, self.count)

    @property
    def is_count(self) -> bool:
        """Return whether the values are a count from 0 without a gap, and no bad one is rare."""
        if self.low != 0 or self.kinds != self.high + 1:
            return False
        bad_kinds = self.high + 1 - self.size
        return self.bad_share >= _RARE * bad_kinds / self.kinds

    @property
    def has_gaps(self) -> bool:
        """Return whether no more numbers occur than there are places, and that is no chance.

        Each number up to the largest is taken to be as frequent as another.
        """
        # Beyond that, `comb` gives integers that are too large for a float.
        if self.distinct is None or self.count is None or self.high >= 1 << 10:
            return False
        every, kinds = self.high + 1, len(self.distinct)
        # At most so likely do all values lie in one of the sets of so many numbers.
        chance = math.comb(every, kinds) * (kinds / every) ** self.count
        return kinds <= self.size < every and chance <= BY_CHANCE


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
    is_long = count is not None and (size / (size + 1)) ** count <= BY_CHANCE
    if len(distinct) == size:
        return is_long or size >= _MANY
    return is_long and len(distinct) >= _NEARLY_ALL * size


def fills_row_ends(ids: Ids) -> bool:
    """Return whether the only bad number fills the ends of the rows, all on the same side."""
    return filled_side(ids) is not None


def filled_side(ids: Ids) -> str | None:
    """Return at which side of rows the only bad number stands alone: ``start`` or ``end``."""
    long = [size for size in ids.shape if size != 1]
    listed, length = ids.violation.offenders.first, (ids.shape or (1,))[-1]
    is_listed = len(listed) == ids.violation.offenders.count

    def place_of(item: Offender) -> int:
        return functools.reduce(
            lambda at, step: at * step[1] + step[0],
            zip(item.position, ids.fact.shape, strict=False),
            0,
        )

    if len(ids.bad) != 1 or not is_listed or len(long) != 2 or length == 1:
        return None
    rows = [
        [at % length for at in items]
        for _, items in groupby(map(place_of, listed), key=lambda at: at // length)
    ]
    # A single id at the end of each row may be an added end token as well, and what fills whole
    # rows is at no end.
    if max(map(len, rows)) < 2 or min(map(len, rows)) == length:
        return None
    if all(row == list(range(length - len(row), length)) for row in rows):
        return "end"
    return "start" if all(row == list(range(len(row))) for row in rows) else None


def ids_of(evidence: Evidence, *roles: Role) -> Ids | None:
    """Describe the ids at fault when their role is one of ``roles``.

    ``None`` for values that a cast of NaN made: no counting mistake is to be sought in them.
    """
    at_fault = fault(evidence)
    role = role_of(evidence)
    if at_fault is None or role is None or role not in roles:
        return None
    bad = bad_values(evidence)
    if bad & LOST_NUMBERS:
        return None
    violation, fact = at_fault
    named, share = origin(evidence, role), violation.offenders
    values = _all_values(evidence, violation, fact)
    if values is None or not bad:
        return None
    low, high, distinct, kinds, count = values
    column, earlier = whole_column(evidence), evidence.seen_before
    stored = evidence.dataset_column
    ends = () if earlier is None else (earlier.min, earlier.max)
    whole_vector = _vector_of(evidence, fact)
    is_whole = whole_vector is not None or column is not None
    # Beside a mark nobody knows which other values earlier calls had.
    is_open = bool({*ends} & {*violation.bounds.also_allowed}) or None in ends
    whole = [*_cut_from(evidence, fact)]
    # Both ends of edges number the same nodes: a 0 among the others counts too.
    alike = (item for item in evidence.tensors if item.shape == fact.shape)
    is_open |= any(_has_zero(item) for item in (named, *whole, *alike))
    shapes = (item.shape for item in whole if numel(item) == numel(fact))
    return Ids(
        role=role,
        fact=fact,
        shape=next(shapes, fact.shape) if len(fact.shape) == 1 else fact.shape,
        named=None if stored is not None and stored.may_be_changed else named,
        size=violation.size or 0,
        low=low,
        high=high,
        distinct=distinct,
        kinds=kinds,
        count=count,
        bad=bad,
        bad_share=column.bad_count / column.count
        if column is not None
        else share.count / max(share.total, 1),
        may_have_zero=is_open and not is_whole,
        # As in ``row * width + col``.
        is_computed=isinstance(fact.node, ast.BinOp) or is_numbered(evidence),
        is_whole=is_whole,
        violation=violation,
        looked_at=_looked_at(evidence, count, whole_vector),
    )


def whole_column(evidence: Evidence) -> DatasetColumn | None:
    """Return all values that a data set gives, unless earlier calls of the line had others.

    The column may have been written to since.
    """
    column, seen = evidence.dataset_column, evidence.seen_before
    if column is None or not column.count or column.may_be_changed:
        return None
    ends = () if seen is None else (seen.min, seen.max)
    allowed = evidence.violation.bounds.also_allowed if evidence.violation is not None else ()
    known = [end for end in ends if isinstance(end, int) and end not in allowed]
    return column if all(column.low <= end <= column.high for end in known) else None


def _looked_at(evidence: Evidence, count: int | None, whole: TensorFact | None) -> tuple[str, str]:
    """Return how many values were seen, and of what.  Another batch may have others.

    Of earlier calls only the ends are known, and not how many values they had.
    """
    column, earlier = whole_column(evidence), evidence.seen_before
    if column is not None:
        return "", f" of {column.place}"
    if whole is not None:
        return str(count or ""), f" of {whole.expression}"
    if earlier is not None and earlier.min is not None:
        calls = "an earlier call" if earlier.calls == 1 else f"{earlier.calls} earlier calls"
        return "", f" of this and {calls}"
    many = str(count) if count is not None and count > 1 else ""
    is_batch = any(step.op is None and step.note for step in evidence.provenance)
    return many, " of this batch" if is_batch else ""


_Known = tuple[int | None, int, tuple[int, ...] | None, int | None, int | None]


def _all_values(evidence: Evidence, violation: Violation, fact: TensorFact) -> _Known | None:
    """Return the ends, the distinct values, their number, and the number of all values seen."""
    column, earlier = whole_column(evidence), evidence.seen_before
    if column is not None:
        return column.low, column.high, column.distinct, column.kinds, column.count
    allowed = {*violation.bounds.also_allowed}
    if (whole := _vector_of(evidence, fact)) is not None:
        fact, earlier = whole, None
    unique, low, high = fact.summary.unique, fact.summary.min, fact.summary.max
    ends = [] if earlier is None else [earlier.min, earlier.max]
    seen = {end for end in ends if isinstance(end, int) and end not in allowed}
    distinct = None
    if unique is not None:
        distinct = tuple(sorted({v for v in unique if v not in allowed} | seen))
        low, high = (distinct[0], distinct[-1]) if distinct else (low, high)
    if not isinstance(high, int):
        return None
    is_known = isinstance(low, int) and low not in allowed
    count = None if unique is None or allowed & {*unique} else numel(fact) // copies_of(fact)
    return (
        min({low, *seen}) if is_known and isinstance(low, int) else None,
        max({high, *seen}),
        distinct,
        None if distinct is None else len(distinct),
        count,
    )


def copies_of(fact: TensorFact) -> int:
    """Return how often each element occurs in a tensor that ``expand`` made: its stride is 0."""
    sizes = zip(fact.shape, fact.stride or (), strict=False)
    return math.prod(size for size, stride in sizes if stride == 0 and size)


def ids_rule(*roles: Role) -> Callable[[Callable[[Evidence, Ids], Hint | None]], Reading]:
    """Make a reading of one that is asked only where the ids at fault have one of ``roles``.

    It is not asked of labels, ids and indices that fit before the line itself shifts them.
    """

    def enter(apply: Callable[[Evidence, Ids], Hint | None]) -> Reading:
        @functools.wraps(apply)
        def applied(evidence: Evidence) -> Hint | None:
            ids = ids_of(evidence, *roles)
            if ids is None or (ids.role not in ("position", "box") and is_shifted(evidence)):
                return None
            return apply(evidence, ids)

        return applied

    return enter


# --- values that no counting mistake made --------------------------------------------------------


_KEEPING = functions(Trait.WHOLE, without=Trait.CAST) | {"to", "int", "long"}
"""Methods that give the values of their tensor as they are."""


def is_shifted(evidence: Evidence) -> bool:
    """Return whether the line adds to a tensor that is within the bound itself: ``y + 1``."""
    at_fault = fault(evidence)
    if at_fault is None:
        return False
    node = at_fault[1].node
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub):
        return False
    item, high = next(iter(_on_line(evidence, [node.left])), None), at_fault[0].bounds.max
    if item is None or not isinstance(high, int):
        return False
    ends = (item.summary.min, item.summary.max)
    return all(isinstance(end, int) and 0 <= end <= high for end in ends)


_SUMS = stems(Trait.SUM)


def is_made_by_sum(evidence: Evidence) -> bool:
    """Return whether a recorded sum or difference took the values out of the bound."""
    oldest = [step for step in evidence.provenance if step.op][-1:]
    makers = (step for step in maker_steps(evidence) if makes_value(step, None))
    return any(stem_of(step.op or "").strip("_") in _SUMS for step in (*oldest, *makers))


def adding_line(evidence: Evidence, number: int) -> LineRef | None:
    """Return the line of the user's that added this number to what has the values at fault.

    Only where that is all it does: ``y = y + 1``, ``y += 1``, and not ``y = x % 10 + 1``.
    """
    for step in maker_steps(evidence):
        text = step.source.text if step.source is not None else None
        match statement_of(text):
            case ast.Assign(value=ast.BinOp(left, ast.Add(), ast.Constant(added))):
                pass
            case ast.Assign(value=ast.BinOp(ast.Constant(added), ast.Add(), left)):
                pass
            case ast.AugAssign(left, ast.Add(), ast.Constant(added)):
                pass
            case _:
                continue
        is_sum = stem_of(step.op or "").strip("_") in _SUMS
        if is_sum and added == number and _is_held(left):
            return step.source
    return None


def _is_held(node: ast.AST) -> bool:
    """Return whether an expression reads a variable as it is, or moves and cuts it."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Attribute) or node.func.attr not in _KEEPING:
                return False
            node = node.func
        node = node.value
    return isinstance(node, ast.Name)


_FILLING = {name.rstrip("_") for name in stems(Trait.CONSTANT)}
"""Ops that write one number to many elements."""


def is_written(evidence: Evidence, number: int) -> bool:
    """Return whether a recorded line writes just this number: ``y[mask] = -1``, ``masked_fill``."""
    literal = ast.dump(ast.parse(str(number), mode="eval").body)
    for step in evidence.provenance:
        if step.note == f"{WRITES} {number}":
            return True
        calls = calls_on_line(step) if stem_of(step.op or "").rstrip("_") in _FILLING else []
        for call in calls:
            values = (*call.args, *(item.value for item in call.keywords))
            is_filling = (last_name(call.func) or "").rstrip("_") in _FILLING
            if is_filling and any(ast.dump(item) == literal for item in values):
                return True
    return False


def numel(fact: TensorFact) -> int:
    """Return the number of elements."""
    return math.prod(fact.shape)


def _has_zero(fact: TensorFact | None) -> bool:
    if fact is None or fact.dtype not in INTEGERS:
        return False
    return fact.summary.min == 0 or 0 in (fact.summary.unique or ())


# --- expressions ---------------------------------------------------------------------------------


def _cut_from(evidence: Evidence, fact: TensorFact) -> Iterable[TensorFact]:
    """Return the line's tensors of which ``fact`` is a part, its values unchanged."""
    node, whole = fact.node, []
    while node is not None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value if node.func.attr in _KEEPING else None
        else:
            node = node.value if isinstance(node, ast.Subscript | ast.Attribute) else None
        whole += [] if node is None else [node]
    return _on_line(evidence, whole)


def _vector_of(evidence: Evidence, fact: TensorFact) -> TensorFact | None:
    """Return the vector on the line that ``fact`` was cut out of: all of ``y`` for ``y[batch]``.

    Of a tensor with columns, those that were not cut out may be of other numbers.
    """
    longer = (it for it in _cut_from(evidence, fact) if numel(it) > numel(fact))
    whole = next((it for it in longer if len(it.shape) == 1), None)
    return whole if whole is not None and whole.summary.unique is not None else None


def _on_line(evidence: Evidence, nodes: Iterable[ast.AST]) -> list[TensorFact]:
    """Return the tensors of the line that one of these expressions reads."""
    read = {ast.dump(item) for item in nodes}
    expressions = ((item, item.node) for item in evidence.tensors)
    return [item for item, node in expressions if node is not None and ast.dump(node) in read]
