"""Look again at a call that no single change makes succeed: what a guard says of the changed one.

Float labels that count from 1 need a cast, and then meet the bound: both are said, and tried
together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cudalens.core.limits import Limits
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, OpName
from cudalens.diagnosis.candidates import Refusal, Trial
from cudalens.diagnosis.hints import find_hints
from cudalens.diagnosis.origins import change_of


def second_look(evidence: Evidence, trial: Trial, limits: Limits) -> tuple[Hint, ...]:
    """Return what the rules say of the first changed call that a guard refused, and their fixes."""
    for refusal in tuple(trial.refusals):
        changed = change_of(evidence.call_text or "", refusal.fix)
        if changed is not None:
            after = _after(evidence, refusal, changed[1])
            return tuple(_said(find_hints(after, limits), changed[1], trial))
    return ()


def _after(evidence: Evidence, refusal: Refusal, expression: str) -> Evidence:
    """Return the evidence that the guard's finding would have, had the fix been written."""
    violation = refusal.violation
    fact = replace(refusal.fact, expression=expression)
    rest = tuple(item for item in evidence.tensors if item.argument != violation.argument)
    return replace(
        evidence,
        error=None,
        violation=violation,
        op=OpName(name=violation.op, overload=violation.overload, api=evidence.op.api),
        call_text=refusal.fix,
        source=None,
        tensors=(fact, *rest),
        scalars=refusal.scalars,
    )


def _said(hints: tuple[Hint, ...], expression: str, trial: Trial) -> Iterator[Hint]:
    for hint in hints:
        text = f"with {expression} the call goes on, and {hint.text}"
        if hint.fix is None:
            yield replace(hint, text=text)
        elif trial(hint.fix).succeeds:
            yield replace(hint, text=text, tried=True)
