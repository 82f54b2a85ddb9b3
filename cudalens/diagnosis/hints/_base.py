"""The framework of the cause rules: evidence in, at most one hint out.

One rule is one small pure function that looks at an :class:`~cudalens.core.report.Evidence` and
returns a :class:`~cudalens.core.report_types.Hint` only when the evidence carries the cause.  A
false hint is worse than none.  Rules are tried in the order of ``priority``, surest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint

Rule = Callable[[Evidence], "Hint | None"]


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


def matching(evidence: Evidence, troubles: list[str]) -> Iterator[Hint]:
    """Return the hints of all rules that fire, each under its rule's name.

    A rule that fails leaves one line in ``troubles``, and the others are asked all the same.
    """
    for entry in table():
        try:
            hint = entry.apply(evidence)
        except Exception as trouble:
            troubles.append(f"hint {entry.name} failed: {type(trouble).__name__}: {trouble}")
            continue
        if hint is not None:
            yield replace(hint, rule=entry.name)
