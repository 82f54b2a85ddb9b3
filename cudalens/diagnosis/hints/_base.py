"""The framework of the cause rules: evidence in, at most one hint out.

One rule is one small pure function that looks at an :class:`~cudalens.core.report.Evidence` and
returns a :class:`~cudalens.core.report_types.Hint` only when the evidence carries the cause.  A
false hint is worse than none.  Rules are tried in the order of ``priority``, surest first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from cudalens.core.limits import Limits
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint

Rule = Callable[[Evidence], "Hint | None"]
MAX_HINTS = 4
LAST = 99
"""The priority of a rule that speaks only where every other one is silent."""


@dataclass(frozen=True, kw_only=True)
class RuleEntry:
    """One rule of the table."""

    name: str
    priority: int
    apply: Rule


_rules: list[RuleEntry] = []


def rule(*, priority: int = 50) -> Callable[[Rule], Rule]:
    """Enter the decorated function into the table; lower priorities come first."""

    def enter(apply: Rule) -> Rule:
        name = getattr(apply, "__name__", repr(apply))
        _rules.append(RuleEntry(name=name, priority=priority, apply=apply))
        return apply

    return enter


def table() -> tuple[RuleEntry, ...]:
    """Return all rules in the order in which they are tried."""
    return tuple(sorted(_rules, key=lambda entry: (entry.priority, entry.name)))


def find_hints(evidence: Evidence, limits: Limits) -> tuple[Hint, ...]:
    """Return the hints of all rules that fire, surest first, each under its name or its rule's.

    A rule that fails leaves one line in ``limits``, and the others are asked all the same.
    """
    hints: list[Hint] = []
    for entry in table():
        if entry.priority == LAST and hints:
            break
        hint = limits.attempt(f"hint {entry.name}", partial(entry.apply, evidence))
        if hint is not None:
            hints.append(replace(hint, rule=hint.rule or entry.name))
    return tuple(hints[:MAX_HINTS])
