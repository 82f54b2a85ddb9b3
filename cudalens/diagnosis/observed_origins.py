"""Observers of the origin of bad values: the lines that made them, the batch, the item."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cudalens.core.api_names import stem_of
from cudalens.core.graph_types import DIVIDES, WRITES, ProvenanceStep
from cudalens.core.report import Evidence
from cudalens.core.report_types import (
    LineRef,
    Number,
    Observation,
    format_count,
)
from cudalens.diagnosis.candidates import Trial
from cudalens.diagnosis.hints._makers import FROM_PYTHON, maker_steps, makes_value
from cudalens.diagnosis.observed_errors import marked
from cudalens.diagnosis.user_code import is_failing_line, place

_MAX_LINES = 3


def format_number(value: Number) -> str:
    """Return a number as text: ``255`` for 255.0, ``0.3333`` for a third."""
    if not isinstance(value, float):
        return str(value)
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    text = f"{value:.4g}"
    is_other = abs(value) < 1e4 and float(text).is_integer()  # 1.000001 is not 1
    return f"{value:.9g}" if is_other else text


def came_from(evidence: Evidence, trial: Trial) -> Iterator[Observation]:
    """Yield every line that made or wrote the bad values, with their counts."""
    steps: dict[LineRef, list[ProvenanceStep]] = {}
    holder = evidence.nan_holder  # a parameter with NaN, which no call since has made
    # Steps by line, because one line may make and write values. The failing line is shown anyway.
    for step in maker_steps(evidence):
        is_held = holder is not None and not holder.is_read and not step.note
        if step.source is not None and not is_failing_line(step.source, evidence) and not is_held:
            steps.setdefault(step.source, []).append(step)
    for line, items in list(steps.items())[:_MAX_LINES]:
        notes = (it.note for it in items if it.note is not None)
        written = [it.removeprefix(WRITES).strip() for it in notes if it.startswith(WRITES)]
        # A written constant is the value itself. Computed values are named if all are equal.
        values = list(dict.fromkeys(written)) or [*map(format_number, _the_bad(evidence))]
        counts = [item.count for item in items]
        count = sum(filter(None, counts)) if all(counts) else None
        share = f" ({format_count(count, 'value')})" if count else ""
        text = f"{place(line, evidence)}: {line.text}"
        if any(value not in (line.text or "") for value in written):
            text += f" (writes {', '.join(values)})"
        text += share
        what = values[0] if len(values) == 1 else "bad values"
        steps_of_line = [it for it in evidence.provenance if it.source == line]
        comes = _comes(items, steps_of_line, _the_bad(evidence), is_many=len(values) != 1)
        mark = f"{what} {comes} here"
        if any(item.note == DIVIDES for item in steps_of_line):
            mark = DIVIDES
        yield Observation(
            kind="came_from",
            text=text,
            facts={"op": items[0].op, "values": tuple(values), "count": count},
            sources=(marked(line, mark + share),),
        )
    if holder is None:
        return
    # A NaN that was already in a parameter: show the lines that wrote it, not the reads.
    said = f"nan is written to {holder.name} here"
    lines = [(line, said) for line in holder.written if line not in steps][:_MAX_LINES]
    if holder.changed is not None and not is_failing_line(holder.changed, evidence):
        lines = [(holder.changed, f"{holder.name} is last changed here")]
    for line, mark in lines:
        text = f"{place(line, evidence)}: {line.text}"
        facts = {"values": ("nan",), "holder": holder.name}
        yield Observation(kind="came_from", text=text, facts=facts, sources=(marked(line, mark),))


def computed(evidence: Evidence, trial: Trial) -> Iterator[Observation]:
    """Yield the lines of Python or NumPy that computed the bad values."""
    bad = _the_bad(evidence)
    what = f"{format_number(bad[0])} comes" if bad else "bad values come"
    for line in evidence.marks.computed:
        if is_failing_line(line, evidence):
            continue
        text = f"{place(line, evidence)}: {line.text}"
        yield Observation(kind="came_from", text=text, sources=(marked(line, f"{what} from here"),))


def length(evidence: Evidence, trial: Trial) -> Iterator[Observation]:
    """Yield the line that chose the length of the user's ids."""
    origin, violation = evidence.marks.length, evidence.violation
    if origin is None or violation is None or is_failing_line(origin.at, evidence):
        return
    count = violation.offenders.max
    if origin.is_set and isinstance(count, int):
        text = f"length {count + 1}, set in {place(origin.at, evidence)}: {origin.expression}"
        mark = f"length {count + 1} is set here"
        yield Observation(kind="came_from", text=text, sources=(marked(origin.at, mark),))


def _comes(
    makers: Sequence[ProvenanceStep],
    steps: Sequence[ProvenanceStep],
    bad: Sequence[Number],
    *,
    is_many: bool,
) -> str:
    """Return whether the steps of a line made the bad values or passed them on, in words.

    Args:
        makers: the steps that may have made them.
    """
    value = bad[0] if bad else None
    if any(makes_value(item, value) for item in steps):
        return "are made" if is_many else "is made"
    come = "come" if is_many else "comes"
    is_from_python = all(stem_of(item.op or "") in FROM_PYTHON for item in makers)
    return f"{come} in" if is_from_python else f"{come} from"


def _the_bad(evidence: Evidence) -> Sequence[Number]:
    """Return the bad value if all are equal, else nothing."""
    violation = evidence.violation
    if violation is not None and violation.is_nonfinite and not violation.argument:
        return ["inf"]  # a call made NaN from an infinity, whose path this is
    listed = [item.value for item in violation.offenders.first] if violation is not None else []
    is_one = violation is not None and len(listed) == violation.offenders.count
    if evidence.marks.value is not None:
        return [evidence.marks.value]
    return listed[:1] if is_one and len(set(listed)) == 1 else []


def item(evidence: Evidence, trial: Trial) -> Iterator[Observation]:
    """Yield the batch, and the dataset item if proven."""
    step = next((it for it in evidence.provenance if it.op is None), None)
    if step is None or not step.note:
        return
    violation = evidence.violation
    samples = [it.sample for it in violation.offenders.first] if violation is not None else []
    sources = (marked(step.source, step.note),) if step.source is not None else ()
    facts = {"samples": tuple(dict.fromkeys(it for it in samples if it is not None))}
    yield Observation(kind="item", text=step.note, facts=facts, sources=sources)
