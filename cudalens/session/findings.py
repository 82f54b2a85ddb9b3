"""The findings of one checked block: what became of each, and which one is shown.

Reports are made elsewhere: of a finding in ``evidence/finding.py``, of an error in ``exit.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cudalens.core.report import Report, is_of_cell
from cudalens.core.report_types import Observation, format_count
from cudalens.source.files import running_shell
from cudalens.source.locate import CallSite

MAX_FINDINGS = 20
"""How many findings of a block are kept whole; further ones are counted."""
_MAX_NAMED = 5

_Entry = tuple[str, str]


class _Series:
    """Findings of one kind: the first few whole, and the counts of headlines."""

    def __init__(self) -> None:
        self.first: tuple[Report, ...] = ()
        self.count = 0
        self.entries: Counter[_Entry] = Counter()
        self.last: Report | None = None

    def add(self, report: Report) -> None:
        # A headline contains values, so a loop could make any number of entries.
        if len(self.entries) <= MAX_FINDINGS or _entry(report) in self.entries:
            self.entries[_entry(report)] += 1
        self.count, self.last = self.count + 1, report
        if len(self.first) < MAX_FINDINGS:
            self.first = (*self.first, report)

    @property
    def kept(self) -> tuple[Report, ...]:
        """The findings that are kept whole, last one first."""
        last = () if self.last is None else (self.last,)
        return (*last, *reversed(self.first))

    def has(self, report: Report) -> bool:
        """Return whether this report object is kept."""
        return any(item is report for item in self.kept)

    def besides(self, shown: Report) -> tuple[int, Counter[_Entry]]:
        """Return the count without ``shown``, and the count of each headline."""
        if not self.has(shown):
            return self.count, self.entries
        return self.count - 1, self.entries - Counter([_entry(shown)])


class Findings:
    """The findings of one block: the raised ones, and the silent ones, one for each line."""

    def __init__(self) -> None:
        self.raised = _Series()
        self.silent = _Series()
        self._silent_calls: set[object] = set()
        self._silent_lines: set[object] = set()

    def add(self, report: Report) -> None:
        """Add a finding."""
        if report.kind != "silent":
            self.raised.add(report)
            return
        call = (report.op, report.source, report.argument)
        forward = report.forward_source
        # The backward op gets the same bad values as its forward call, which is reported already.
        is_told = forward is not None and (forward.ref, report.argument) in self._silent_lines
        if call not in self._silent_calls and not is_told:
            self._silent_calls.add(call)
            if report.source is not None:
                self._silent_lines.add((report.source.ref, report.argument))
            self.silent.add(report)

    def has(self, report: Report) -> bool:
        """Return whether this report object was recorded: one that is kept, or the last."""
        return self.raised.has(report)

    def fired(self) -> str:
        """Return how many calls were stopped, in words."""
        count = self.raised.count
        return f"{format_count(count, 'call')} {'was' if count == 1 else 'were'} stopped"

    def others(self, shown: Report, *, has_ended: bool = False) -> str:
        """Count and list what was found besides ``shown``; empty when nothing.

        Args:
            has_ended: True if ``shown`` is the error that ended the block: the others did not.
        """
        parts = []
        for series in (self.raised, self.silent):
            number, entries = series.besides(shown)
            if number:
                tail = " did not end it" if has_ended and series is self.raised else ""
                listed = _listed(entries, shown.kind)
                parts.append(f"{number} more in this {_place_of(shown)}{tail}: {listed}.")
        return " ".join(parts)


def _place_of(report: Report) -> str:
    is_cell = running_shell() is not None or is_of_cell(report.source, report.frames)
    return "cell" if is_cell else "block"


def _entry(report: Report) -> _Entry:
    return report.kind, report.headline.rstrip(".")


def _listed(entries: Counter[_Entry], kind: str) -> str:
    """List the first few with their counts, and their kinds where these differ from ``kind``."""
    lines = []
    for (other, headline), times in list(entries.items())[:_MAX_NAMED]:
        sort = other.replace("_", " ").replace("cuda", "CUDA")
        named = headline if other == kind else f"{sort}: {headline}"
        lines.append(named if times == 1 else f"{named} ({times} times)")
    return "; ".join(lines)


@dataclass(frozen=True, kw_only=True)
class SwallowedFinding:
    """What became of a finding that did not leave its block.

    An except clause or ``contextlib.suppress`` has caught it, or ``%%capture`` or ``%run`` has
    shown it.  The text does not say which, because they cannot be distinguished.
    """

    is_of_thread: bool = False
    """True if it was made in another thread than the block's."""
    was_shown: bool = False
    """True if the shell has shown it: code that the shell ran inside the block stopped at it."""
    other: str | None = None
    """The kind of the exception that left the block in its place."""
    was_raised_while_handled: bool = False
    """True if that exception was raised while the finding was being handled."""

    def sentence(self, place: str) -> str:
        """Return the sentence, without a capital letter and a full stop.

        Args:
            place: what to call the block, such as ``cell``.
        """
        then = f", and {self.other} was raised later" if self.other else ""
        if self.was_shown:
            how = "as %run, %%capture and a failing display do"
            return f"IPython printed this error while the {place} ran, {how}{then}"
        if self.is_of_thread:
            then = then.removesuffix(" later")
            return f"this error was raised in another thread and did not leave the {place}{then}"
        if self.was_raised_while_handled:
            return f"{self.other} was raised while this error was being handled"
        return f"this error did not leave the {place}{then}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a block: what was found, and which of it is shown."""

    finding: Report | None = None
    """The finding that ended the block; if no exception did, the first one raised."""
    error: Report | None = None
    """The report of an exception that left the block and is no finding."""
    silent: Report | None = None
    """The first silent finding."""
    earlier: Report | None = None
    """The failure of an earlier block that had ended the device's context."""
    swallowed: SwallowedFinding | None = None
    """What became of ``finding``, if it did not leave the block."""
    site: CallSite | None = None
    """The user's line, if only the exception's traceback has it."""

    @property
    def shown(self) -> Report | None:
        """The report of the block, without notes; ``None`` when nothing is wrong."""
        return self.error or self.finding or self.silent

    @property
    def is_reminder(self) -> bool:
        """True if the report is that of the earlier block."""
        return self.shown is not None and self.shown is self.error is self.earlier

    def report(self, findings: Findings, limits: Iterable[str] = ()) -> Report:
        """Return the shown report, completed with what is known only at the end of the block.

        Args:
            findings: the findings of the block.
            limits: the internal failures of the check.
        """
        shown = self.shown
        assert shown is not None
        all_limits = tuple(dict.fromkeys((*shown.limits, *limits)))
        if self.is_reminder:
            return replace(shown, limits=all_limits)
        # The explanation gets what became of the finding, and what else was found.
        site = self.site or CallSite()
        parts = [shown.explanation]
        if self.swallowed is not None:
            sentence = self.swallowed.sentence(_place_of(shown))
            parts.append(f"{sentence[0].upper()}{sentence[1:]}. {findings.fired()}.")
        has_ended = self.swallowed is None and self.silent is not shown
        others = findings.others(shown, has_ended=has_ended)
        parts.append(others)
        is_lost = self.error is not None and self.error.context_usable is False
        explanation = " ".join(filter(None, parts))
        # Nothing new is known at the end: the report stays as it is.
        is_said = (explanation, all_limits) == (shown.explanation, shown.limits)
        if is_said and self.site is None and not is_lost:
            return shown
        observations = shown.observations
        if others:
            line = Observation(kind="others", text=others.removesuffix("."))
            observations = (*observations, line)
        return replace(
            shown,
            explanation=explanation,
            observations=observations,
            context_usable=False if is_lost else shown.context_usable,
            source=shown.source or site.source,
            frames=site.frames or shown.frames,
            op=replace(shown.op, api=shown.op.api or site.api),
            limits=all_limits,
        )
