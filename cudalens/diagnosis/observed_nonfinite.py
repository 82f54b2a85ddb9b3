"""Observers of NaN and infinity: facts about how they were made."""

from __future__ import annotations

from collections.abc import Iterator

from cudalens.core.report import Evidence
from cudalens.core.report_types import Observation, format_count
from cudalens.diagnosis.candidates import Trial
from cudalens.diagnosis.hints.nonfinite import made


def discarded(evidence: Evidence, trial: Trial) -> Iterator[Observation]:
    """Yield that ``where`` discards a value, but not its NaN gradient."""
    violation = evidence.violation
    if violation is None or not violation.is_discarded:
        return
    name = made(evidence).partition("Backward")[0].lower()
    text = f"where() discards the result of {name} there, but 0 times its infinite slope is nan"
    yield Observation(kind="pattern", text=text, facts={"op": name})


def short_input(evidence: Evidence, trial: Trial) -> Iterator[Observation]:
    """Yield the item with more labels than ``ctc_loss`` can align with its time steps."""
    short = evidence.marks.short_input
    if short is None:
        return
    labels, needed = format_count(short.labels, "label"), short.labels + short.repeats
    alike = f", {short.repeats} of them equal to the one before" if short.repeats else ""
    text = f"too few steps for {short.items} of {short.total} items: item {short.item} has "
    text += f"{labels}{alike}, which takes {needed} steps, and its input length is {short.steps}"
    facts = {"item": short.item, "needed": needed, "steps": short.steps}
    yield Observation(kind="pattern", text=text, facts=facts)
