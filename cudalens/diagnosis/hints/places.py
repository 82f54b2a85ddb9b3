"""Hints where no rule knows a cause: which values are there, and where both sides are from.

A size is asked for only where the values are a count without gaps over everything that was seen.
"""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections.abc import Iterable
from itertools import groupby

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, Violation
from cudalens.diagnosis.hints._base import LAST, rule
from cudalens.diagnosis.hints._reading import (
    Ids,
    came_from,
    fills_row_ends,
    ids_of,
    ids_rule,
    is_made,
    numel,
    runs_from_one,
    shifting_step,
)
from cudalens.diagnosis.hints._roles import Role, fault
from cudalens.diagnosis.hints.labels import head_of
from cudalens.diagnosis.user_code import list_of

_NOUNS: dict[Role, str] = {"label": "labels", "token": "ids"}
_ALONG = ("aten::gather", "aten::index_select", "aten::take_along_dim")
"""Ops that are told along which dimension the numbers count."""
_MAX_RUNS = 4
_EVEN = 0.5
"""Probability of one half."""
_PLACES: dict[Role, str] = {"label": "outputs", "one_hot": "columns", "token": "rows"}
_ALL: tuple[Role, ...] = ("label", "one_hot", "token", "position", "index", "edge")


@ids_rule(*(role for role in _ALL if role != "position"), priority=LAST)
def too_few_places(evidence: Evidence, ids: Ids) -> Hint | None:
    """The values count from 0 without a gap, and need more places than there are."""
    if not ids.is_above or not ids.is_count or ids.size < 2 or fills_row_ends(ids):
        return None
    if ids.role in ("label", "one_hot") and (ids.is_computed or is_made(evidence)):
        return None  # a line computes one too many, and no data has such a class
    if runs_from_one(ids.fact.summary.unique, ids.size, numel(ids.fact)):
        return None  # this batch counts from 1, and another one from 0
    noun, column = _NOUNS.get(ids.role, "numbers"), evidence.dataset_column
    of = f" of {column.name}" if column is not None and column.count else ""
    dim = "" if ids.violation.dim is None else f" in dimension {ids.violation.dim}"
    if ids.role not in _PLACES or ids.is_computed:
        # Data that is indexed gets no larger, and what is computed may be one too many: which of
        # the two is right nobody knows.
        places = _PLACES.get(ids.role, "places")
        text = f"the {noun}{of} run from 0 to {ids.high} without a gap, there are {ids.size} "
        text += places
        came = came_from(evidence)
        return Hint(text=f"{text}{dim}; {came}" if came else text + dim)
    return Hint(
        text=f"the {noun}{of} run from 0 to {ids.high} without a gap: they need {ids.high + 1} "
        f"{_PLACES[ids.role]}, there are {ids.size}"
        + _settings(evidence, ids.high + 1)
        + _unused_mark(evidence, ids)
        + _named_classes(evidence, ids, "; ")
    )


@rule(priority=LAST)
def what_is_there(evidence: Evidence) -> Hint | None:
    """The bad values among the others, those of earlier calls, and where they came from."""
    at_fault, ids = fault(evidence), ids_of(evidence, *_ALL)
    if (
        at_fault is None
        or at_fault[1].summary.nan
        or at_fault[0].is_nonfinite
        or at_fault[0].is_silent
    ):
        return None
    if ids is None and "float" not in at_fault[1].dtype:
        return None
    violation = at_fault[0]
    # Of a parameter that a distribution refused the report's own lines say all of it.
    is_said = ids is None and evidence.has_run_kernels
    parts = [_shifted(ids) or ("" if is_said else _values(evidence, violation, ids))]
    parts.append(_earlier(evidence))
    if evidence.phase == "backward" and evidence.module_path and evidence.seen_before is not None:
        parts.append(
            "backward runs a checkpointed forward again: what the first run counted goes on"
        )
    # A 0 is as likely not to be seen as to be seen where there are few values.
    calls = 1 + (evidence.seen_before.calls if evidence.seen_before is not None else 0)
    may_count = (
        ids is not None
        and ids.may_count_from_one
        and ids.low == 1
        and (ids.size / (ids.size + 1)) ** (numel(ids.fact) * calls) < _EVEN
    )
    is_kept = evidence.scalar("padding_idx") == "0"
    if may_count and not is_kept and not shifting_step(evidence):
        parts.append("none is 0: if they count from 1, subtract 1")
    parts.append(_named_classes(evidence, ids))
    parts += [_in_other_dimension(evidence, ids) if ids is not None else "", came_from(evidence)]
    if head_of(evidence) == "classes":
        parts.append(f"the model has num_labels={violation.size}")
    # The layer or line that set the bound is added where it is known.
    text = "; ".join(filter(None, parts))
    return None if is_said and not text else Hint(text=text)


def _named_classes(evidence: Evidence, ids: Ids | None, before: str = "") -> str:
    column = evidence.dataset_column
    if column is None or not column.classes or ids is None or ids.role != "label":
        return ""
    return f"{before}{column.name} names {column.classes} classes"


def _values(evidence: Evidence, violation: Violation, ids: Ids | None) -> str:
    """Say how many values are bad, and what the others are: ``255 in 64 of 256 values``."""
    column, offenders = evidence.dataset_column, violation.offenders
    noun = _NOUNS.get(ids.role, "values") if ids is not None else "values"
    if ids is not None and column is not None and column.count:
        values = sorted(v for v in column.distinct or ids.bad if not 0 <= v < ids.size)
        rows = f" (item {list_of(column.rows)})" if column.bad_count <= len(column.rows) else ""
        bad = _numbers(values) if column.distinct else f"outside, such as {list_of(values[:3])}"
        of, bad = f"{column.count} {noun} of {column.name}", f"{bad}{rows}"
        return _share(column.bad_count, of, bad, column.others)
    if offenders.total < 2:
        return ""
    if ids is not None:
        is_listed = ids.distinct is not None or offenders.count == len(offenders.first)
        bad = _numbers(ids.bad) if is_listed else f"such as {list_of(sorted(ids.bad)[:3])}"
    else:
        ends = [str(item.value) for item in (offenders.first[:1] + offenders.first[-1:])]
        bad = " and ".join(dict.fromkeys(ends))
        bad = bad if offenders.count <= 2 else f"such as {bad}"
    bad += ", only at the ends of the rows" if ids is not None and fills_row_ends(ids) else ""
    bad = f"outside, {bad}" if bad.startswith("such") else bad
    if offenders.others is None:
        return f"all {offenders.total} {noun} are {bad}"
    return _share(offenders.count, f"{offenders.total} {noun}", bad, offenders.others)


def _numbers(values: Iterable[int]) -> str:
    """Return numbers for reading: ``-4 … -1, 15 … 18``, ``3, 5``."""
    ordered = sorted(values)
    runs = [[*run] for _, run in groupby(ordered, key=lambda it: it - bisect_left(ordered, it))]
    if len(runs) > _MAX_RUNS or (len(runs) > 1 and len(ordered) <= _MAX_RUNS):
        return list_of(ordered)
    texts = (f"{run[0]} … {run[-1]}" if len(run) > 2 else list_of(run) for run in runs)
    return ", ".join(texts)


def _share(count: int, of: str, bad: str, others: str | None) -> str:
    rest = f", all others are {others}" if others else ""
    return f"{count} of {of} {'is' if count == 1 else 'are'} {bad}{rest}"


def _shifted(ids: Ids | None) -> str:
    """Say what may stand before ``+ 7`` on the line, where the line adds a number."""
    node = ids.fact.node if ids is not None else None
    if ids is None or ids.low is None or not isinstance(node, ast.BinOp):
        return ""
    by = node.right.value if isinstance(node.right, ast.Constant) else None
    if not isinstance(by, int) or not isinstance(node.op, ast.Add | ast.Sub):
        return ""
    by = by if isinstance(node.op, ast.Add) else -by
    low = ids.violation.bounds.min
    low = low if isinstance(low, int) else 0
    return (
        f"{ast.unparse(node.left)} runs from {ids.low - by} to {ids.high - by}, there are places "
        f"for {low - by} … {ids.size - 1 - by}"
    )


def _earlier(evidence: Evidence) -> str:
    """Say what earlier calls of the line were given."""
    seen = evidence.seen_before
    if seen is None or seen.min is None or seen.max is None:
        return ""
    calls = "an earlier call" if seen.calls == 1 else f"{seen.calls} earlier calls"
    low, high = (f"{it:.4g}" if isinstance(it, float) else it for it in (seen.min, seen.max))
    return f"{calls} of the line had {low if low == high else f'{low} … {high}'}"


def _in_other_dimension(evidence: Evidence, ids: Ids) -> str:
    """Say which other dimension of the tensor has just so many places."""
    target, own = evidence.tensor(ids.violation.related or "self"), ids.violation.dim
    if target is None or own is None or evidence.op.name not in _ALONG or not ids.is_above:
        return ""
    if len(ids.fact.shape) > 1 and ids.fact.shape[own] == 1:
        return ""  # one number a row: there are as many rows by chance
    sizes = [*enumerate(target.shape)]
    del sizes[own]
    dims = [dim for dim, size in sizes if size == ids.high + 1]
    return f"dimension {dims[0]} has {ids.high + 1} places" if len(dims) == 1 else ""


def _unused_mark(evidence: Evidence, ids: Ids) -> str:
    """Say which number the last label may be, where the loss ignores one that no label has."""
    ignored, seen = evidence.scalar("ignore_index"), ids.fact.summary.unique
    if ids.role != "label" or ignored in (None, "-100") or seen is None or ids.bad != {ids.high}:
        return ""
    if ignored in map(str, seen):
        return ""
    return (
        f"; if {ids.high} marks labels to leave out, ignore_index must be {ids.high}, not {ignored}"
    )


def _settings(evidence: Evidence, classes: int) -> str:
    """Name the setting that a model of transformers takes its number of outputs from."""
    # Only these heads are as wide as num_labels says.
    return f": num_labels={classes}" if head_of(evidence) == "classes" else ""
