"""The parts of a report, built once from its facts.  HTML, text and Markdown only lay them out.

No view parses a finished sentence: what is bold, red or code is decided here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from cudalens.core._python import parse_expression
from cudalens.core.next_steps import NOTEBOOK, SCRIPT
from cudalens.core.report import (
    Hint,
    LineRef,
    Report,
    SourceSpan,
    format_count,
    is_of_cell,
)
from cudalens.core.report_types import format_shape
from cudalens.render import words
from cudalens.render.code import (
    MAX_LINE_LENGTH,
    Block,
    LineMark,
    code_blocks,
    unplaced_tensors,
    where_of,
)
from cudalens.render.words import clip, one_line

Look = Literal["plain", "code", "bad", "badcode"]
Tone = Literal["bad", "warn", "likely"]
SHOWN_TENSORS = 4
"""How many tensors of the call without a place in its line are shown; a table has all."""
LONG = 72
"""The length of a headline that does not fit in two lines beside the status."""
LABEL_ROOM = 22
"""How many columns a label may extend beyond the end of a folded line."""
SHORT = 12
"""The second line shows all values of a tensor with up to this many."""
_MAX_FACTS = 5
_EDIT_AND_READING = 2
_MAX_COMPARED = 1000
"""The length of code and fix beyond which no changes are marked."""
_TOKENS = re.compile(r"\w+|\s+|.")
_CODE = re.compile(r"`([^`]+)`")
_ALIKE = 0.4
"""The similarity below which a fix is new code, without marked changes."""


class Span(NamedTuple):
    """A run of words with one style."""

    text: str
    look: Look = "plain"


Spans = tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of CUDA after the failure."""

    text: str
    tone: Literal["ok", "bad", "plain"]
    is_rehearsal: bool = False


@dataclass(frozen=True, kw_only=True)
class Action:
    """The one action: code that was tried, a hint that was not, or a step outside the code."""

    label: Literal["try", "hint", "next"]
    code: str = ""
    place: str = ""
    """The line that the code belongs to."""
    beside: Literal["in", "before", "after"] = "in"
    """Where the code belongs relative to the place."""
    changed: tuple[tuple[int, int], ...] = ()
    """The runs of characters in the code that differ from the user's line."""
    reason: str = ""

    @property
    def line(self) -> str:
        """The action as the last line of a traceback."""
        place = f" {self.beside} {self.place}" if self.code and self.place else ""
        return f"{self.label}: {self.code or self.reason}{place}"


@dataclass(frozen=True, kw_only=True)
class Screen:
    """The parts that every view shows before a drawer is opened."""

    tone: Tone
    sign: str
    headline: Spans
    status: Status | None
    facts: tuple[Spans, ...]
    """Values, earlier calls, place: the second line."""
    action: Action | None
    blocks: tuple[Block, ...]
    loose: tuple[tuple[str, str, bool], ...]
    """Name and type of the call's tensors without a label on a drawn line, and whether one is at
    fault."""
    notes: tuple[str, ...] = ()
    """Other events in the block, and facts that could not be collected."""

    @property
    def is_long(self) -> bool:
        """True for a headline of several lines, as PyTorch's messages often have."""
        return len(plain(self.headline)) > LONG


def plain(spans: Spans) -> str:
    """Return the text without styles."""
    return "".join(span.text for span in spans)


def spans_of(text: str) -> Spans:
    """Return a sentence as spans, with parts in backticks as code."""
    parts = _CODE.split(one_line(text))
    looks: tuple[Look, Look] = ("plain", "code")
    return tuple(Span(part, looks[at % 2]) for at, part in enumerate(parts) if part)


def build(report: Report, *, fold: int = 110, label_room: int = LABEL_ROOM) -> Screen:
    """Return the parts of a report.

    Args:
        report: with the module names of :func:`words.with_module_names`.
        fold: the column after which the failing line is folded.
        label_room: how many columns a label may extend beyond the fold.
    """
    tone: Tone = "warn" if report.kind == "silent" else "bad"
    if report.certainty == "likely":
        tone = "likely"
    hot = report.forward_source or _suspected(report) or report.source
    return Screen(
        tone=tone,
        sign={"bad": "✗", "warn": "⚠", "likely": "?"}[tone],
        headline=_headline(report),
        status=_status(report),
        facts=tuple(_facts(report)),
        action=action_of(report),
        blocks=code_blocks(report, line_marks(report), hot, fold=fold, label_room=label_room),
        loose=tuple(
            (words.tensor_name(fact), words.tensor_label(report, fact), is_bad)
            for fact in unplaced_tensors(report)
            for is_bad in (words.is_at_fault(report, fact),)
        ),
        notes=(*_observed(report, ("others",)), *map(one_line, report.limits)),
    )


def _suspected(report: Report) -> SourceSpan | None:
    """Return the line of the only call that fits an assert, if another line met the error."""
    line = next(
        (at for it in report.observations if it.kind == "suspect" for at in it.sources), None
    )
    here = report.source
    if line is None or here is None or where_of(line) != where_of(here) or line.line == here.line:
        return None
    return replace(
        here, line=line.line, end_line=line.line, column=None, end_column=None, text=line.text
    )


def _headline(report: Report) -> Spans:
    line = one_line(report.headline)
    if not line.strip():
        kind = words.KINDS.get(report.kind, report.kind)
        return (Span(f"{kind}: nothing more could be established"),)
    spans = spans_of(line)
    if element := _bad_element(report):
        spans = (Span(element, "badcode"), *spans_of(line[len(element) :]))
    if report.certainty == "likely" and not line.casefold().startswith("likely"):
        spans = (Span("Likely: "), *spans)
    return spans


def _bad_element(report: Report) -> str:
    """Return the first bad value as the headline starts: ``y[17] = 10``."""
    first = next(iter(report.offenders.first), None) if report.offenders else None
    name = report.expression or report.argument
    if first is None or not name:
        return ""
    values = dict.fromkeys((str(first.value), words.format_number(first.value)))
    places = dict.fromkeys((words.bad_place(report, first), format_shape(first.position)))
    names = dict.fromkeys((name, *filter(None, (fact.expression for fact in report.tensors))))
    # The longest match: `= 1` is a prefix of `= 10`.
    fitting = [
        element
        for own in names
        for place in places
        for value in values
        for element in (one_line(f"{own}{place if place != '[]' else ''} = {value}"),)
        if report.headline.startswith(element)
        and not report.headline[len(element) : len(element) + 1].isalnum()
    ]
    return max(fitting, key=len, default="")


def _status(report: Report) -> Status | None:
    is_rehearsal = report.environment.simulated
    if report.context_usable is False:
        return Status(text="CUDA is lost", tone="bad", is_rehearsal=is_rehearsal)
    if report.kind == "silent":
        return Status(text="silent: the result is wrong", tone="plain", is_rehearsal=is_rehearsal)
    if report.deferred:
        text = "found after the launch, which ran with values in bounds"
        return Status(text=text, tone="ok", is_rehearsal=is_rehearsal)
    if report.context_usable is None:
        if not report.prevented:
            return None
        return Status(text="found before the launch", tone="plain", is_rehearsal=is_rehearsal)
    if report.environment.device is None and not is_rehearsal:
        return None  # CUDA was not involved
    return Status(text="CUDA is fine", tone="ok", is_rehearsal=is_rehearsal)


def _facts(report: Report) -> Iterator[Spans]:
    """Yield the facts of the second line: the values, earlier calls, the place."""
    short = _all_values(report)
    kinds = {item.kind for item in report.observations}
    texts = [words.ranks_line(report)]
    if report.source is None:
        texts.append(words.format_op_path(report.op))
    if report.environment.rank is not None and not report.ranks:
        texts.append(f"rank {report.environment.rank}")
    if not short:
        texts.append(words.bad_count(report))
    texts += _observed(report, _FIRST)
    if "earlier" not in kinds:
        texts.append(words.earlier_calls(report))
    texts += _observed(report, _THEN)
    allowed = words.format_bounds(report)
    # A size in an observation implies 0 … size - 1, but not negative indices.
    is_by_size = bool(kinds & {"bound", "pattern"}) and words.limits_of(report.bounds)[0] == 0
    if allowed and not words.says_bounds(report) and not is_by_size:
        texts.append(f"allowed {allowed}")
    if short:
        yield short
    yield from map(spans_of, list(filter(None, texts))[:_MAX_FACTS])
    if place := words.format_place(report.source):
        phase = f", {report.phase}" if report.phase in ("backward", "optimizer") else ""
        yield (Span(place + phase),)
    if report.certainty == "unknown":
        yield (Span("cause not established"),)


_FIRST = ("values", "earlier", "pattern", "item")
_THEN = ("maker", "sink", "graph", "write", "shape", "dtype", "device", "argument", "bound")
"""The kinds of observations, in the order of the second line."""


def _observed(report: Report, kinds: Sequence[str]) -> list[str]:
    """Return the observations of some kinds that are not marks beside the code."""
    return [
        item.text
        for kind in kinds
        for item in report.observations
        if item.kind == kind and (kind == "values" or not any(at.mark for at in item.sources))
    ]


def _all_values(report: Report) -> Spans:
    """Return all values of a short vector, the bad ones red; empty for any other tensor."""
    offenders = report.offenders
    grid = offenders.map if offenders else None
    name = report.expression or report.argument
    if offenders is None or grid is None or not name or not 1 < offenders.total <= SHORT:
        return ()
    if grid.rows != 1 or grid.columns != offenders.total or len(grid.bad) != grid.columns:
        return ()
    spans = [Span(one_line(name), "code"), Span(" = ")]
    for at, (value, bad) in enumerate(zip(grid.low, grid.bad, strict=False)):
        spans += [Span(", ")] if at else []
        spans.append(Span(words.format_number(value), "badcode" if bad else "plain"))
    return tuple(spans)


# --- marks ----------------------------------------------------------------------------------------


def line_marks(report: Report) -> list[LineMark]:
    """Return the marks beside lines of code: each writer, the origin of the bound, the failure."""
    marks: list[LineMark] = []
    kinds = set()
    for item in report.observations:
        for place in item.sources:
            if place.line is not None and place.mark:
                kinds.add(item.kind)
                marks.append(_mark(place, place.mark))
    here = report.source
    # A label that changed after its forward call is the mistake, whatever made its values.
    is_changed = report.kind == "device_assert" and report.phase == "backward"
    if is_changed or not kinds & {"came_from", "write", "maker", "graph"}:
        marked = {(mark.where, mark.line) for mark in marks}
        marks += [
            _mark(step.source, one_line(step.note or "the values pass through here"))
            for step in words.way(report)
            if (step.source is not None and step.source.line is not None)
            and (step.note or not words.is_beginning(step))
            and (where_of(step.source), step.source.line) not in marked
        ]
    is_elsewhere = report.bound_source is not None and (
        here is None or not _is_within(report.bound_source.ref, here)
    )
    if report.bound_source is not None and is_elsewhere and "bound" not in kinds:
        marks.append(_mark(report.bound_source.ref, "the size is set here"))
    before = report.forward_source or _suspected(report)
    if before is not None and here is not None and before.line != here.line:
        is_marked = any((mark.where, mark.line) == (where_of(here), here.line) for mark in marks)
        if not is_marked:
            marks.append(_mark(here.ref, "noticed here"))
    return sorted(dict.fromkeys(marks), key=lambda mark: mark.line)


def _is_within(ref: LineRef, here: SourceSpan) -> bool:
    """Return whether a line is in the failing statement, whose labels have the sizes already."""
    first = here.line or 0
    return where_of(ref) == where_of(here) and first <= (ref.line or 0) <= (here.end_line or first)


def _mark(ref: LineRef, said: str) -> LineMark:
    return LineMark(where_of(ref), ref.line or 0, ref.text or "", clip(one_line(said), 90))


# --- the one action -------------------------------------------------------------------------------


def action_of(report: Report) -> Action | None:
    """Return the one action, ``None`` if nothing is proven to help."""
    edit = next((hint for hint in report.hints if hint.fix), None)
    reading = next((hint for hint in report.hints if not hint.fix), None)
    if report.context_usable is False and not (edit and edit.tried):
        return Action(label="next", reason=_next_step(report, reading))
    if edit is not None:
        return _edit(report, edit, reading)
    if reading is not None:
        place = "" if reading.at is None else _place(report, reading.at)
        return Action(label="hint", place=place, reason=_sentence(report, reading.text))
    return None


def _edit(report: Report, edit: Hint, reading: Hint | None) -> Action:
    code = one_line(edit.fix or "")
    at = edit.at or report.source
    base = "" if at is None else (at.text or "")
    if edit.at is None and report.source is not None:
        base = _call_text(report.source)
    texts = [edit.text]
    if reading is not None and len(report.hints) == _EDIT_AND_READING:
        texts = [reading.text, edit.text]
    reason = " ".join(filter(None, (_sentence(report, text) for text in texts)))
    return Action(
        label="try" if edit.tried else "hint",
        code=code,
        place=_place(report, at),
        beside=_beside(edit),
        changed=_changed(base, code),
        reason=f"{reason} {_outcome(report, edit)}".strip(),
    )


def _beside(edit: Hint) -> Literal["in", "before", "after"]:
    """Return where an edit belongs: before the failing line, after a maker, or in its place."""
    try:
        parse_expression(edit.fix or "")
    except (SyntaxError, ValueError):
        if not edit.tried:
            return "in"  # it replaces the in-place change
        return "before" if edit.at is None else "after"
    return "in"


def _outcome(report: Report, edit: Hint) -> str:
    if not edit.tried:
        return "Not tested."
    ends = "values and gradients are finite" if report.kind == "nonfinite" else "it runs"
    # A fix for one batch or iteration may be wrong for the next.
    is_batch = any(item.kind == "item" for item in report.observations)
    of_call = " of this call" if report.seen_before is not None else ""
    return f"Tested on copies{' of this batch' if is_batch else of_call}: {ends}."


def _next_step(report: Report, reading: Hint | None) -> str:
    is_script = report.source is not None and not is_of_cell(report.source, report.frames)
    steps = SCRIPT if is_script else NOTEBOOK
    if report.certainty == "proven":
        text = f"{steps.restart} to use the GPU again"
        return " ".join(
            [_sentence(report, text), *([_sentence(report, reading.text)] if reading else [])]
        )
    return _sentence(report, words.step_after_loss(report, steps))


def _sentence(report: Report, text: str) -> str:
    """Return a text with a capital letter, unless it starts with code, and a full stop."""
    text = one_line(text).strip()
    said, _, rest = text.partition(": ")
    text = rest if rest and " " in said and report.headline.startswith(said) else text
    if not text:
        return ""
    word = text[:80].split(" ", 1)[0]
    is_word = word.isalpha() and word.islower() and (len(word) > 1 or word == "a")
    if is_word and report.source is not None:
        # A variable's name keeps its case.
        lines = "\n".join(line.text[:MAX_LINE_LENGTH] for line in report.source.context[:40])
        is_word = re.search(rf"\b{word}\b", lines) is None
    text = text[0].upper() + text[1:] if is_word else text
    return text if text[-1] in ".!?…" else f"{text}."


def _place(report: Report, at: SourceSpan | None) -> str:
    """Return ``line 6`` for the failing cell, or a place with its cell."""
    if at is None or at.line is None:
        return ""
    here = report.source
    is_same = here is not None and where_of(here) == where_of(at)
    return f"line {at.line}" if is_same else words.format_place(at)


def _call_text(source: SourceSpan) -> str:
    """Return the failing call as typed, on one line."""
    lines = {line.line: line.text for line in source.context}
    first, last = source.line or 0, source.end_line or source.line or 0
    if source.column is None or source.end_column is None or first not in lines:
        return source.text or ""
    texts = [lines.get(number, "") for number in range(first, last + 1)]
    texts[-1] = texts[-1][: source.end_column]
    texts[0] = texts[0][source.column :]
    return " ".join(text.strip() for text in texts)


def _changed(base: str, code: str) -> tuple[tuple[int, int], ...]:
    """Return the runs of ``code`` that differ from ``base``."""
    if len(base) + len(code) > _MAX_COMPARED:
        return ()
    old, new = _TOKENS.findall(base), _TOKENS.findall(code)
    if difflib.SequenceMatcher(None, old, new, autojunk=False).ratio() < _ALIKE:
        return ()
    # Strip the common prefix and suffix: `.float()` is new in `net(x.float())`, not the last `)`.
    head = _common(old, new)
    tail = _common(old[head:][::-1], new[head:][::-1])
    middle = old[head : len(old) - tail], new[head : len(new) - tail]
    ends = [sum(map(len, new[:at])) for at in range(head, len(new) - tail + 1)]
    matcher = difflib.SequenceMatcher(None, *middle, autojunk=False)
    return tuple(
        (ends[start], ends[stop])
        for tag, _, _, start, stop in matcher.get_opcodes()
        if tag in ("insert", "replace") and stop > start
    )


def _common(old: Sequence[str], new: Sequence[str]) -> int:
    """Return the length of the common prefix, in tokens."""
    pairs = zip(old, new, strict=False)
    return next(
        (at for at, (one, other) in enumerate(pairs) if one != other), min(len(old), len(new))
    )


# --- what is said behind the drawers --------------------------------------------------------------


class Fact(NamedTuple):
    """A named fact of a list."""

    name: str
    text: str
    is_code: bool = False


def details(report: Report) -> tuple[Fact, ...]:
    """Return the facts for the drawers."""
    error = report.exception
    cuda = "CUDA would print" if report.prevented else "CUDA printed"
    argument = f", argument {report.argument}" if report.argument else ""
    ran = ", ".join(f"{name} {value}" for name, value in words.environment(report))
    if report.environment.simulated:
        ran += f"; {words.REHEARSAL}"
    calls = format_count(report.timing.checked_ops, "guarded call")
    facts = (
        Fact("exception", f"{error.type}: {error.message}" if error else "", True),
        Fact("finding", ", ".join(filter(None, (words.KINDS[report.kind], report.certainty)))),
        Fact("operator", words.format_op_path(report.op) + argument, True),
        Fact("module", report.module_path or "", True),
        Fact("phase", report.phase if report.phase != "unknown" else ""),
        Fact("allowed", words.format_bounds(report)),
        Fact("CPU", words.replay_line(report), True),
        Fact(cuda, (report.device_text or "").strip(), True),
        Fact("why", report.explanation),
        *(
            Fact("also", f"{hint.fix}  {hint.text}" if hint.fix else hint.text)
            for hint in _other_hints(report)
        ),
        Fact("ran on", ran),
        Fact("checked", f"{calls}, {format_count(report.timing.recorded_ops, 'op')} recorded"),
        *(Fact("unknown", text) for text in report.limits),
    )
    return tuple(Fact(n, one_line(text), code) for n, text, code in facts if text.strip(", "))


def _other_hints(report: Report) -> Sequence[Hint]:
    action = action_of(report)
    said = action.reason if action is not None else ""
    return [hint for hint in report.hints if _sentence(report, hint.text) not in said]


def origin(report: Report) -> tuple[str, ...]:
    """Return every observation with its lines, and the provenance of the bad values."""
    lines, said = [], set()
    for item in report.observations:
        marked = [place for place in item.sources if place.mark]
        said |= {(place.cell, place.file, place.line) for place in marked}
        # A line with its mark replaces the sentence.
        lines += [one_line(f"{words.format_line(place)}: {place.mark}") for place in marked] or [
            one_line(item.text)
        ]
    steps = [
        step
        for step in words.way(report)
        if step.source is None or (step.source.cell, step.source.file, step.source.line) not in said
    ]
    lines += map(words.format_step, steps)
    if report.forward_source is not None:
        lines.append(f"forward call: {words.format_line(report.forward_source)}")
    return tuple(dict.fromkeys(lines))


def callers(report: Report) -> tuple[str, ...]:
    """Return the user's lines that led to the failing one, outermost first."""
    frames = [frame for frame in report.frames if frame.is_user][:-1]
    refs = [LineRef(cell=item.cell, file=item.file, line=item.line) for item in frames]
    return tuple(
        one_line(f"{words.format_place(ref)} in {frame.function}: {frame.text.strip()}")
        for ref, frame in zip(refs, frames, strict=True)
    )
