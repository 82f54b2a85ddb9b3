"""Observers of NaN and infinity: what is proven of their making beyond the headline."""

from __future__ import annotations

from collections.abc import Iterator

from cudalens.core.report import Evidence
from cudalens.core.report_types import Observation
from cudalens.diagnosis.candidates import Trial
from cudalens.diagnosis.hints.nonfinite import made


def discarded(evidence: Evidence, trial: Trial) -> Iterator[Observation]:
    """Yield that ``where`` discards a value whose gradient is NaN all the same."""
    violation = evidence.violation
    if violation is None or not violation.is_discarded:
        return
    name = made(evidence).partition("Backward")[0].lower()
    text = f"where() discards the result of {name} there, but 0 times its infinite slope is nan"
    yield Observation(kind="pattern", text=text, facts={"op": name})
