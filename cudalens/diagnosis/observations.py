"""Observers: the proven facts about a failure beyond its headline, one line each.  No advice.

An observer takes the evidence and the variables of the user's line, and yields observations.  The
templates for findings of guards are here, those for exceptions in ``observed_errors.py``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby
from math import prod

from cudalens.core.api_names import stem_of
from cudalens.core.evidence_types import Binding
from cudalens.core.limits import Limits
from cudalens.core.report import Evidence
from cudalens.core.report_types import (
    LineRef,
    Number,
    Observation,
    Offenders,
    OtherModule,
    format_count,
    syntax,
)
from cudalens.core.torch_functions import Trait, functions
from cudalens.diagnosis.candidates import Trial
from cudalens.diagnosis.hints._reading import filled_side, ids_of
from cudalens.diagnosis.hints._roles import LOOKUP_OPS, Role, bad_values, fault, role_of
from cudalens.diagnosis.hints.labels import head_of
from cudalens.diagnosis.observed_errors import marked, observe_error
from cudalens.diagnosis.observed_nonfinite import discarded, short_input
from cudalens.diagnosis.observed_origins import came_from, computed, format_number, item, length
from cudalens.diagnosis.user_code import code_of, is_failing_line, list_of, parsed, place, shortened

Observer = Callable[[Evidence, Trial], Iterable[Observation]]
_NOUNS: dict[Role | None, str] = {"label": "labels", "one_hot": "labels", "token": "ids"}
_NOUNS["segment"] = "ids"
_UNITS: dict[Role | None, str] = {"label": "class", "one_hot": "class", "token": "row"}
_ALL: tuple[Role, ...] = ("label", "one_hot", "token", "position", "index", "segment")
_MAX_RUNS = 4
_SHARED = 2
_MAX_LINES = 3
_LISTED = re.compile(r"indices\[(\d+)\]")
_INTEGER_MAKERS = {
    "argmax": "positions of the largest",
    "argmin": "positions of the smallest",
    "argsort": "positions in the order of size",
    "bucketize": "the number of an interval, one more than there are borders",
    "floor": "a number rounded down",
    "floor_divide": "a quotient rounded down",
    "nonzero": "positions",
    "round": "a rounded number",
    "searchsorted": "the number of an interval, one more than there are borders",
    "topk": "positions of the largest",
    **dict.fromkeys(functions(Trait.COMPARES), "the truth of a comparison, 0 or 1"),
}
"""What the integers are that a function makes."""


def observe(evidence: Evidence, trial: Trial, limits: Limits) -> tuple[Observation, ...]:
    """Return the proven facts about a failure, in the order of the report.

    An observer that fails leaves one line in ``limits``, and the others still run.

    Example:
        >>> [item.text for item in observe(evidence, trial, limits)]
        ['3 of 32 labels are 10, all others 1 … 9', '10 classes, set in line 2: nn.Linear(64, 10)']
    """
    observers = OF_FINDING if evidence.violation is not None else (observe_error,)
    seen: list[Observation] = []
    for observer in observers:
        name = f"observation {observer.__name__}"
        seen += limits.attempt(name, partial(_listed, observer, evidence, trial), tuple)
    return tuple(seen)


def _listed(observer: Observer, evidence: Evidence, trial: Trial) -> tuple[Observation, ...]:
    return tuple(observer(evidence, trial))


# --- the values -----------------------------------------------------------------------------------


def values(evidence: Evidence, trial: Trial) -> Iterator[Observation]:
    """Yield how many values are bad, how many are ``ignore_index``, and the range of the others."""
    at_fault, role = fault(evidence), role_of(evidence)
    if at_fault is None or at_fault[1].dtype == "bool":
        return
    violation, fact = at_fault
    if violation.is_nonfinite or fact.summary.nan or (violation.is_silent and role is None):
        return
    noun = _NOUNS.get(role) or ("labels" if violation.unit == "class" else "values")
    column, offenders = evidence.dataset_column, violation.offenders
    size = violation.size or 0
    # The whole dataset column is better evidence than one batch of it.
    if column is not None and column.count and role is not None:
        bad = sorted(it for it in column.distinct or bad_values(evidence) if not 0 <= it < size)
        text = _numbers(bad) if column.distinct else f"outside, such as {list_of(bad[:3])}"
        if column.bad_count <= len(column.rows):
            text += f" (item {list_of(column.rows)})"
        of = f"{noun} of {column.place}"
        yield Observation(
            kind="values",
            text=_share(column.bad_count, column.count, of, text, column.others),
            facts={
                "count": column.bad_count,
                "total": column.count,
                "values": tuple(bad),
                "others": column.others,
                "dataset": column.name,
                "rows": column.rows,
            },
        )
        return
    low, high = fact.summary.min, fact.summary.max
    # A finding about a single number, such as a sum: only equal values can be summarized.
    if offenders.total < 2 and prod(fact.shape) > 1 and low is not None and low == high:
        text = f"all {prod(fact.shape)} values are {format_number(low)}"
        yield Observation(kind="values", text=text, facts={"values": (low,)})
    if offenders.total < 2:
        return
    # The bad values in words: one value, a list of integers, or the first and last listed.
    one, listed = evidence.marks.value, [item.value for item in offenders.first]
    if one is None and len(listed) == offenders.count and len(set(listed)) == 1:
        one = listed[0]
    bad_integers = sorted(bad_values(evidence)) if role is not None else []
    is_known = fact.summary.unique is not None or offenders.count == len(listed)
    if one is not None:
        text = format_number(one)
    elif bad_integers and is_known:
        text = _numbers(bad_integers)
    else:
        ends = list(dict.fromkeys(map(format_number, [*listed[:1], *listed[-1:]])))
        whole = ", ".join(map(format_number, listed))
        is_short = len(listed) == offenders.count <= _MAX_LINES
        text = whole if is_short else f"outside, such as {' and '.join(ends)}"
    copies = _copies(evidence, offenders)
    count, total = offenders.count // copies, offenders.total // copies
    if offenders.others is None and not offenders.allowed:
        text = f"all {total} {noun} are {text}" if total > 1 else f"the one value is {text}"
    else:
        more = _allowed(evidence)
        text = _share(count, total, noun, text, _as_typed(offenders.others), more)
    text += f" (expand shows each {copies} times)" if copies > 1 else ""
    yield Observation(
        kind="values",
        text=text,
        facts={
            "count": count,
            "total": total,
            "values": tuple(bad_integers) or tuple(dict.fromkeys(listed)),
            "others": offenders.others,
            "allowed": offenders.allowed,
        },
    )


def _copies(evidence: Evidence, offenders: Offenders) -> int:
    """Return how often ``expand`` repeats each value, 1 if not all equally often."""
    copies = evidence.marks.copies
    is_whole = not (offenders.count % copies or offenders.total % copies or offenders.allowed)
    return copies if copies > 1 and is_whole else 1


def _allowed(evidence: Evidence) -> str:
    """Return the count of values allowed outside the bound: ``8 are -100 (allowed)``."""
    violation = evidence.violation
    if violation is None or not (count := violation.offenders.allowed):
        return ""
    which = list_of(violation.bounds.also_allowed)
    word = "ignored" if evidence.scalar("ignore_index") == which else "allowed"
    return f"{count} {'is' if count == 1 else 'are'} {which} ({word})"


def _share(count: int, total: int, noun: str, bad: str, others: str | None, more: str = "") -> str:
    """Return ``1 of 64 labels is 9, 8 are -100 (ignored), all others 0 … 6``."""
    rest = f"all others {others}" if others else ""
    verb = "is" if count == 1 else "are"
    return ", ".join(filter(None, (f"{count} of {total} {noun} {verb} {bad}", more, rest)))


def _as_typed(ends: str | None) -> str | None:
    """Return an interval, with integers for whole floats: ``0 … 1``."""
    if ends is None:
        return None
    try:
        return " … ".join(format_number(float(end)) for end in ends.split(" … "))
    except ValueError:
        return ends


def _numbers(items: Iterable[int]) -> str:
    """Return numbers as text, runs as ranges: ``-4 … -1, 15 … 18``, ``3, 5``."""
    ordered = sorted(items)
    runs = [
        [value for _, value in run]
        for _, run in groupby(enumerate(ordered), key=lambda item: item[1] - item[0])
    ]
    if len(runs) > _MAX_RUNS or (len(runs) > 1 and len(ordered) <= _MAX_RUNS):
        return list_of(ordered)
    return ", ".join(f"{run[0]} … {run[-1]}" if len(run) > 2 else list_of(run) for run in runs)


def earlier(evidence: Evidence, trial: Trial) -> Iterator[Observation]:
    """Yield the range of earlier calls of the line, and the modules with another bound."""
    seen = evidence.seen_before
    if seen is None or seen.min is None or seen.max is None:
        return
    calls = "an earlier call" if seen.calls == 1 else f"{seen.calls} earlier calls"
    text = f"{calls} of the line had {_interval(seen.min, seen.max)}"
    facts = {"calls": seen.calls, "min": seen.min, "max": seen.max}
    yield Observation(kind="earlier", text=text, facts=facts)
    if evidence.phase == "backward" and evidence.module_path:
        text = "backward runs the checkpointed forward again, with all that the first run counted"
        yield Observation(kind="earlier", text=text)
    for other in seen.other_modules[:_MAX_LINES]:
        yield Observation(kind="earlier", text=_of_module(evidence, other), facts=vars(other))


def _of_module(evidence: Evidence, other: OtherModule) -> str:
    """Return the values of another module: ``stores.0 has 8 places and took 0 … 3 in 4 calls``."""
    calls = format_count(other.calls, "call")
    unit = _UNITS.get(role_of(evidence), "place")
    has = f"has {format_count(other.size, unit)} and " if other.size is not None else ""
    name = dict(evidence.module_names).get(other.module, other.module)
    return f"{name} {has}took {_interval(other.min, other.max)} in {calls}"


def _interval(low: Number, high: Number) -> str:
    low_text, high_text = format_number(low), format_number(high)
    return low_text if low_text == high_text else f"{low_text} … {high_text}"


# --- where the bound was set ----------------------------------------------------------------------


def bound(evidence: Evidence, trial: Trial) -> Iterator[Observation]:
    """Yield the line that chose the size, and the line that made the object of that size."""
    violation, origin = evidence.violation, evidence.bound
    if violation is None or not violation.size or violation.is_nonfinite:
        return
    unit = _UNITS.get(role_of(evidence)) or violation.unit or "place"
    many = format_count(violation.size, unit)
    column = evidence.dataset_column
    # The dataset and the model's config may state the number of classes themselves.
    if column is not None and column.classes and role_of(evidence) == "label":
        text = f"{column.name} names {column.classes} classes"
        yield Observation(kind="bound", text=text, facts={"classes": column.classes})
    if head_of(evidence) == "classes":
        text = f"the model has num_labels={violation.size}"
        yield Observation(kind="bound", text=text, facts={"num_labels": violation.size})
    layer = _layer_of_bound(evidence, trial)
    if origin is None:
        yield from () if layer is None else _bound_of_layer(evidence, layer, many)
        return
    # The line that chose the number, and the line that made the object of that size.
    if is_failing_line(origin.at, evidence):
        return
    facts = {"size": violation.size, "unit": unit}
    facts |= {"holder": origin.holder, "expression": origin.expression}
    code, verb = shortened(origin.expression), _verb(origin.expression, is_set=origin.is_set)
    text = f"{many}, {verb} in {place(origin.at, evidence)}: {code}"
    sources = [marked(origin.at, f"{_are(many)} {verb} here")]
    if not origin.is_set and verb == "set":
        fact = evidence.tensor(violation.related or "self")
        holder = origin.holder or (fact.expression if fact is not None else None)
        if holder is None:
            return
        text = f"{many}, those of {holder}, made in {place(origin.at, evidence)}: {code}"
        sources = [marked(origin.at, f"{holder} is made here ({many})")]
    if origin.made is not None and (what := origin.holder):
        code = origin.made_by or origin.made.text or ""
        text += f" ({what} is made in {place(origin.made, evidence)}: {shortened(code)})"
        sources.append(marked(origin.made, f"{what} is made here"))
    text += _beside(layer)
    yield Observation(kind="bound", text=text, facts=facts, sources=tuple(sources))


def _verb(code: str, *, is_set: bool = True) -> str:
    """Return the verb: code sets a size, or reads that of a tensor from another line.

    Args:
        is_set: false if a name in the code got the number elsewhere.
    """
    node: ast.AST | None = parsed(code.rpartition(" = ")[2])
    if not is_set and not isinstance(node, ast.Call):
        return "read"
    node = node.value if isinstance(node, ast.Subscript) else node
    function = node.func if isinstance(node, ast.Call) else node
    is_read = isinstance(function, ast.Attribute) and function.attr in ("shape", "size")
    return "read" if is_read else "set"


def _bound_of_layer(evidence: Evidence, layer: Binding, many: str) -> Iterator[Observation]:
    """Yield the line that made a layer whose size came from elsewhere, as from a config."""
    text, sources, beside = f"{many}, those of {layer.name}", [], _beside(layer)
    if is_failing_line(layer.at, evidence) or not (layer.value or beside):
        return
    if layer.value:
        text += f", made in {place(layer.at, evidence)}: {code_of(layer)}"
        sources = [marked(layer.at, f"{layer.name} is made here ({many})")]
    facts = {"holder": layer.name, "expression": layer.value}
    yield Observation(kind="bound", text=text + beside, facts=facts, sources=tuple(sources))


def _beside(layer: Binding | None) -> str:
    """Return what else must change with the size: a shared weight, an equal size."""
    if layer is not None and layer.tied:
        return f", and its weight is that of {layer.tied} too"
    beside = layer is not None and layer.beside
    return f", and {beside} has the same size" if beside else ""


def _layer_of_bound(evidence: Evidence, trial: Trial) -> Binding | None:
    """Return the embedding that was read, or the layer that computed the scores.

    A layer whose line shows another size is discarded.
    """
    violation, made = evidence.violation, None
    if violation is None:
        return None
    if evidence.op.name in LOOKUP_OPS:
        made = trial.layer(evidence.module_path) if evidence.module_path else None
    else:
        # The nearest parameter in the graph belongs to the layer that computed the scores.
        near = next((it for it in evidence.graph.nodes if it.role == "parameter"), None)
        if near is not None and near.module_path and (near.shape or ())[:1] == (violation.size,):
            made = trial.layer(near.module_path, near.shape)
    return made if made is not None and _may_have_size(made, violation.size) else None


def _may_have_size(made: Binding, size: int | None) -> bool:
    """Return whether a layer's line may have made this size: it has no other number there."""
    tree, kind = syntax(made.value), (made.called or "").rpartition(".")[2]
    at = 0 if kind.startswith("Embedding") else 1
    if not isinstance(tree, ast.Call) or len(tree.args) <= at:
        return True
    number = tree.args[at]
    return not isinstance(number, ast.Constant) or number.value == size


def _are(many: str) -> str:
    return f"{many} {'is' if many.startswith('1 ') else 'are'}"


# --- marks and regularities -----------------------------------------------------------------------


def pattern(evidence: Evidence, trial: Trial) -> Iterator[Observation]:
    """Yield what all bad values have in common; every one of them was read."""
    marks, violation = evidence.marks, evidence.violation
    if violation is None:
        return
    say = partial(Observation, kind="pattern")
    # Each mark is optional. They are listed in the order of how much they explain.
    for constant in marks.constants:
        at = f", set in {place(constant.line, evidence)}" if constant.line is not None else ""
        mark = f"{constant.name} is {constant.value}"
        source = (marked(constant.line, mark),) if constant.line is not None else ()
        facts = {"name": constant.name, "value": constant.value}
        yield say(text=f"{constant.value} is {constant.name}{at}", facts=facts, sources=source)
    if marks.zero_at is not None:
        text = f"{marks.zero_at} is 0 at the bad values, and nowhere else"
        yield say(text=text, facts={"name": marks.zero_at})
    if marks.aliases:
        text = f"{' and '.join(marks.aliases)} of the batch are one tensor"
        yield say(text=text, facts={"keys": marks.aliases})
    if (held := marks.in_slice) is not None:
        at_fault = fault(evidence)
        name = held.name or (at_fault and at_fault[1].expression) or "the tensor"
        what = "nan" if held.is_nan else "bad"
        part = f"[{':, ' * held.dim}{held.at}]"
        text = f"all {held.many} {what} values of {name} are in {part}"
        if held.is_full:
            text = f"{name}{part} is {what} throughout ({held.many} values), the rest nowhere"
        facts = {"name": name, "dim": held.dim, "index": held.at, "count": held.many}
        yield say(text=text, facts=facts)
    size = violation.size
    if size is not None and (marks.is_size or bad_values(evidence) == {size}):
        unit = _UNITS.get(role_of(evidence)) or violation.unit or "place"
        text = f"{size} is the number of {_plural(unit)}, one past the last (0 … {size - 1})"
        yield say(text=text, facts={"size": size})
    ids = ids_of(evidence, *_ALL)
    if ids is not None and (side := filled_side(ids)) is not None:
        yield say(text=f"the bad values are only at the {side} of rows", facts={"side": side})
    if (made := _made_by(evidence)) is not None:
        text, facts, line = made
        source = (marked(line, text),) if line is not None else ()
        yield say(text=text, facts=facts, sources=source)
    for constant_text in marks.vanished:
        text = f"{constant_text} in {violation.dtype or 'this dtype'}"
        yield say(text=text, facts={"constant": constant_text, "dtype": violation.dtype})


def shifted(evidence: Evidence, trial: Trial) -> Iterator[Observation]:
    """Yield the range of the values that a line adds a number to, and the range that would fit."""
    if (sums := evidence.marks.added) is not None and not is_failing_line(sums.line, evidence):
        name = sums.name if sums.column is None else f"{sums.name}[:, {sums.column}]"
        what = f"{sums.number} to {name}, which is {_interval(sums.low, sums.high)}: at most "
        what += f"{sums.fits} fits"
        text = f"{place(sums.line, evidence)} adds {what}"
        facts = {"name": name, "max": sums.high, "fits": sums.fits, "added": sums.number}
        mark = marked(sums.line, f"adds {what}")
        yield Observation(kind="pattern", text=text, facts=facts, sources=(mark,))
        return
    ids = ids_of(evidence, *_ALL)
    node = ids.fact.node if ids is not None else None
    if ids is None or ids.low is None or not isinstance(node, ast.BinOp):
        return
    by = node.right.value if isinstance(node.right, ast.Constant) else None
    if not isinstance(by, int) or not isinstance(node.op, ast.Add | ast.Sub):
        return
    by = by if isinstance(node.op, ast.Add) else -by
    low = ids.violation.bounds.min
    low = low if isinstance(low, int) else 0
    name, ends = ast.unparse(node.left), (ids.low - by, ids.high - by)
    text = f"{name} is {_interval(*ends)}, {low - by} … {ids.size - 1 - by} fits"
    yield Observation(
        kind="pattern", text=text, facts={"name": name, "min": ends[0], "max": ends[1]}
    )


def _plural(unit: str) -> str:
    return format_count(2, unit).partition(" ")[2]


def _made_by(evidence: Evidence) -> tuple[str, dict[str, object], LineRef | None] | None:
    """Return what the integers are, if the call that made them shows it."""
    step = evidence.marks.maker
    name = stem_of(step.op or "").strip("_") if step is not None else ""
    if step is None or name not in _INTEGER_MAKERS or role_of(evidence) is None:
        return None
    where = f" in {place(step.source, evidence)}" if step.source is not None else ""
    text = f"{name}{where} gives {_INTEGER_MAKERS[name]}"
    return text, {"function": name}, step.source


# --- places in another dimension ------------------------------------------------------------------


def other_dimension(evidence: Evidence, trial: Trial) -> Iterator[Observation]:
    """Yield the only other dimension of the tensor that is large enough for the values."""
    ids, violation = ids_of(evidence, "index"), evidence.violation
    along = ("aten::gather", "aten::index_select", "aten::take_along_dim")
    if ids is None or violation is None or evidence.op.name not in along or not ids.is_above:
        return
    target, own = evidence.tensor(violation.related or "self"), violation.dim
    if target is None or own is None or (len(ids.fact.shape) > 1 and ids.fact.shape[own] == 1):
        return  # one value for each row, so the number of rows fits by chance
    dims = [at for at, size in enumerate(target.shape) if at != own and size == ids.high + 1]
    if len(dims) == 1:
        places = format_count(ids.size, "place")
        text = f"dimension {own} has {places}, dimension {dims[0]} has {ids.high + 1}"
        yield Observation(kind="pattern", text=text, facts={"dim": own, "other_dim": dims[0]})


def other_indices(evidence: Evidence, trial: Trial) -> Iterator[Observation]:
    """Yield the other index tensors of a subscript with values out of range.

    The guard stops at the first.
    """
    violation = evidence.violation
    target = evidence.tensor("self")
    listed = [(_LISTED.fullmatch(it.argument or ""), it) for it in evidence.tensors]
    indices = {int(match[1]): fact for match, fact in listed if match is not None}
    # A boolean mask indexes as many dimensions as it has.
    if violation is None or target is None or any("int" not in it.dtype for it in indices.values()):
        return
    for dim, fact in indices.items():
        low, high = fact.summary.min, fact.summary.max
        if dim == violation.list_position or dim >= len(target.shape) or not fact.expression:
            continue
        size = target.shape[dim]
        if isinstance(low, int) and isinstance(high, int) and (high >= size or low < -size):
            places = format_count(size, "place")
            text = f"{fact.expression} is {_interval(low, high)}, dimension {dim} has {places}"
            facts = {"name": fact.expression, "min": low, "max": high, "dim": dim, "size": size}
            yield Observation(kind="values", text=text, facts=facts)


def within_library(evidence: Evidence, trial: Trial) -> Iterator[Observation]:
    """Yield the range of the user's tensor that contains the bad values of a library's index."""
    at_fault, violation = fault(evidence), evidence.violation
    if at_fault is None or violation is None or not violation.size or at_fault[1].expression:
        return
    if role_of(evidence) == "position":
        return  # positions counted by the library: an equal id means something else
    bad = bad_values(evidence)
    for fact in evidence.tensors:
        unique, low, high = fact.summary.unique, fact.summary.min, fact.summary.max
        # A single value may be in it by chance.
        shared = {*(unique or ())} & bad
        if not fact.expression or fact is at_fault[1] or len(shared) < _SHARED:
            continue
        is_same = (low, high) == (at_fault[1].summary.min, at_fault[1].summary.max)
        if isinstance(low, int) and isinstance(high, int) and not is_same:
            text = f"{fact.expression} is {_interval(low, high)}"
            facts = {"name": fact.expression, "min": low, "max": high}
            yield Observation(kind="values", text=text, facts=facts)


OF_FINDING: tuple[Observer, ...] = (
    values,
    other_indices,
    within_library,
    earlier,
    came_from,
    computed,
    length,
    item,
    bound,
    pattern,
    discarded,
    short_input,
    other_dimension,
    shifted,
)
"""The observers for findings of guards, in the order of the report."""
