"""The code view: the failing line with each tensor's type under its name, and marks at lines.

The rows are data that text, HTML and Markdown all draw, so that they cannot disagree.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal, NamedTuple

from rich.cells import cell_len

from cudalens.core.report import LineRef, Report, SourceSpan, TensorFact
from cudalens.render import words
from cudalens.render.words import visible

PieceTone = Literal["plain", "call", "tensor", "bad", "rule", "label", "badlabel"]
TAB = "    "
MAX_LABELS = 10
MAX_LINE_LENGTH = 240
MAX_STATEMENT = 8
"""How many lines of the failing statement are drawn."""
MAX_MARKED = 8
_OPENING, _CLOSING = ("(", "[", "{"), (")", "]", "}")
_WITHIN_TEXT = 1000
"""Larger than any nesting depth of brackets."""
_RANK = {"plain": 0, "call": 1, "tensor": 2, "bad": 3}
Where = tuple[int | None, str | None]
"""The cell or file of a line; both for a cell whose number is ambiguous."""


class LineMark(NamedTuple):
    """The words beside a line, and the text of the line if known."""

    where: Where
    line: int
    text: str
    said: str


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of characters with one style."""

    text: str
    tone: PieceTone = "plain"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One drawn line: a numbered source line, a line of labels under it, or a gap."""

    number: int | None = None
    pieces: tuple[Piece, ...] = ()
    marks: tuple[str, ...] = ()
    is_hot: bool = False
    """True for a row of the failing statement."""
    is_gap: bool = False
    is_label: bool = False
    names: tuple[tuple[str, str, bool], ...] = ()
    """For narrow pages, in the first row of labels: name, type, and whether it is at fault."""

    @property
    def text(self) -> str:
        """Return the row as plain text."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, kw_only=True)
class Block:
    """The drawn lines of one cell or file."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A marked run of a source line, in characters of the drawn line, with its hanging label."""

    start: int
    end: int
    tone: PieceTone
    label: str | None = None
    name: str = ""
    is_named: bool = field(default=False)
    """True if the label contains the name, because the run shows a container of the tensor."""


def code_blocks(
    report: Report, marks: Sequence[LineMark], hot: SourceSpan | None, *, fold: int, label_room: int
) -> tuple[Block, ...]:
    """Return the failing statement and every marked line, by cell or file.

    Args:
        marks: the words beside lines.
        hot: the failing statement.
        fold: the column after which a line of the failing statement is folded.
        label_room: how many columns a label may extend beyond the fold.
    """
    own = where_of(hot)
    places: dict[Where, dict[int, str]] = {}
    if hot is not None:
        places[own] = dict(_statement(report, hot))
    for mark in marks[:MAX_MARKED]:
        text = _text_of(report, mark.where, mark.line) or mark.text
        if text or mark.line in places.get(mark.where, {}):  # a mark needs a line of code
            places.setdefault(mark.where, {}).setdefault(mark.line, text)
    blocks: list[Block] = []
    for where, lines in places.items():
        said: dict[int, list[str]] = {}
        for mark in marks[:MAX_MARKED]:
            if mark.where == where and mark.said not in said.get(mark.line, ()):
                said.setdefault(mark.line, []).append(mark.said)
        is_own = where == own
        rows = _rows(report, lines, said, hot if is_own else None, (fold, label_room))
        title = words.place_name(*where) if len(places) > 1 else ""
        if blocks and title in (block.title for block in blocks):
            title += ", another"
        blocks.append(Block(title=title, rows=tuple(rows)))
    return tuple(blocks)


def where_of(place: SourceSpan | LineRef | None) -> Where:
    """Return the cell or file of a place."""
    return (None, None) if place is None else (place.cell, place.file)


def _statement(report: Report, hot: SourceSpan) -> Iterator[tuple[int, str]]:
    """Return the lines of the failing statement, and the one before it."""
    first = hot.line or 0
    last = max(hot.end_line or first, first)
    lines = {line.line: line.text for line in hot.context}
    if first not in lines:
        yield first, _text_of(report, where_of(hot), first) or hot.text or ""
        return
    spans = {fact.span[0] for fact in report.tensors if fact.span}
    whole = [number for number in range(first, last + 1) if number in lines]
    if len(whole) > MAX_STATEMENT:
        whole = [number for number in whole if number in spans or number == first][:MAX_STATEMENT]
    before = lines.get(first - 1, "")
    is_alike = _indent(before) == _indent(lines[first]) is not None
    if len(whole) == 1 and is_alike and not before.startswith("%%"):
        yield first - 1, before
    for number in whole:
        yield number, lines[number]


def _text_of(report: Report, where: Where, line: int) -> str:
    """Return a line from the report, with its indentation."""
    spans = [span for span in (report.source, report.forward_source) if span is not None]
    found = (
        item.text
        for span in spans
        if where_of(span) == where
        for item in span.context
        if item.line == line
    )
    return next(found, "")


def _rows(
    report: Report,
    lines: Mapping[int, str],
    said: Mapping[int, Sequence[str]],
    hot: SourceSpan | None,
    widths: tuple[int, int],
) -> Iterator[Row]:
    fold, label_room = widths
    drawn = [text for text in map(_drawn, lines.values()) if text.strip()]
    indent = min((len(text) - len(text.lstrip(" ")) for text in drawn), default=0)
    previous: int | None = None
    for number, source in sorted(lines.items()):
        if previous is not None and number > previous + 1:
            yield Row(is_gap=True)
        previous = number
        is_hot = hot is not None and _is_hot(hot, number)
        is_own = _has_columns(report, source, number, hot)
        runs = _runs(report, source, number, indent, hot) if is_own and is_hot else []
        text = _drawn(source)[indent:]
        marks = tuple(said.get(number, ()))
        if not is_hot:
            text = words.clip(text, fold)
        shown: int | None = number or None
        for part, own in _folded(text, runs, fold if is_hot else MAX_LINE_LENGTH, label_room):
            yield Row(number=shown, pieces=_pieces(part, own), marks=marks, is_hot=is_hot)
            shown, marks = None, ()
            for row in _hanging(part, own, fold + label_room):
                yield replace(row, is_hot=True)


def _has_columns(report: Report, text: str, number: int, hot: SourceSpan | None) -> bool:
    """Return whether the spans of the tensors fit this text."""
    source = report.source
    if source is None or hot is None or where_of(hot) != where_of(source):
        return False
    return any(item.line == number and item.text == text for item in source.context)


def _folded(
    text: str, runs: Sequence[_Run], width: int, label_room: int
) -> Iterator[tuple[str, list[_Run]]]:
    """Split a long line into parts with their runs; continuation parts are indented."""
    start, indent = 0, ""
    deeper = " " * min(len(text) - len(text.lstrip(" ")) + 4, width // 2)
    while True:
        stop = _fold_at(text, runs, start, max(width - len(indent), 8), label_room)
        shift = len(indent) - start
        own = [_cut(run, start, stop, shift) for run in runs if run.start < stop]
        yield indent + text[start:stop], [run for run in own if run.end > run.start]
        start, indent = stop, deeper
        if start >= len(text):
            return


def _fold_at(text: str, runs: Sequence[_Run], start: int, width: int, label_room: int) -> int:
    """Return where a part ends: after a comma, an opening bracket or a space, not inside a name."""
    labels = [run for run in runs if run.label and start < run.start < start + width]
    room = start + width + label_room
    beyond = [
        run.start
        for run in labels
        if run.start + len(run.label or "") + 2 > room and not _fits_left(text, run, labels, start)
    ]
    last = min([start + width, *beyond])
    if len(text) <= last:
        return len(text)
    first = start + len(text[start:]) - len(text[start:].lstrip(" ")) + 1
    for signs in (", ", "([{=", " .)]}"):
        for at in range(last, max(first, start + width // 4), -1):
            before, after = text[at - 1], text[at : at + 1]
            is_sign = text[at - 2 : at] == signs if signs == ", " else before in signs
            inside = any(r.start < at < r.end <= r.start + width for r in runs if r.label)
            # A part must not begin with a closing bracket or a comma.
            if is_sign and not inside and after not in ")]},":
                return at
    return last if last > first else start + width


def _fits_left(text: str, run: _Run, others: Iterable[_Run], start: int = 0) -> bool:
    """Return whether a label fits to the left of its name, up to the previous run."""
    begins = [cell_len(text[: it.start]) for it in others if it.start < run.start]
    # Columns of a terminal, not characters: a wide one takes two.
    left = cell_len(text[: run.start]) - cell_len(run.label or "") - 1
    return left > max([cell_len(text[:start]), *begins])


def _cut(run: _Run, start: int, stop: int, shift: int) -> _Run:
    first, end = max(run.start, start) + shift, min(run.end, stop) + shift
    # A label is drawn under the part in which its expression begins.
    label = run.label if start <= run.start < stop else None
    return replace(run, start=first, end=end, label=label)


def code_rows(code: str, first: int, width: int) -> list[str]:
    """Break a long line of code inside brackets, so that the rows are equivalent code.

    A row is longer if Python allows no break in it.

    Args:
        first: the width of the first row.
        width: the width of the other rows.
    """
    places, start, rows = [*_continuations(code), len(code)], 0, []
    while len(code) - start > first:
        ahead = [place for place in places if place > start]
        stop = max((place for place in ahead if place <= start + first), default=ahead[0])
        rows.append(code[start:stop].strip())
        start, first = stop, width
    rest = code[start:].strip()
    return [*rows, rest] if rest or not rows else rows


def _continuations(code: str) -> Iterator[int]:
    """Yield the columns where a line break does not change the meaning of a line of code."""
    depth = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            name = tokenize.tok_name[token.type]
            # So that `a.b` and `2*x` stay whole.
            is_apart = code[token.start[1] - 1 : token.start[1]] in (" ", *_OPENING)
            if depth > 0 and is_apart and token.string not in _CLOSING:
                yield token.start[1]
            depth += (token.string in _OPENING) - (token.string in _CLOSING)
            # Since Python 3.12, the parts of an f-string are tokens.
            depth += {"FSTRING_START": -_WITHIN_TEXT, "FSTRING_END": _WITHIN_TEXT}.get(name, 0)
    except (tokenize.TokenError, SyntaxError):
        return


def unplaced_tensors(report: Report) -> tuple[TensorFact, ...]:
    """Return the op's tensors without a label on a drawn line, the one at fault first."""
    placed: set[int] = set()
    for line in report.source.context if report.source else ():
        on_line = _on_line(report, line.text, line.line)
        hung = _hung(report, line.text, line.line)
        placed |= {id(fact) for fact in on_line if fact in hung or _is_inner(fact, on_line)}
    facts = [fact for fact in report.tensors if id(fact) not in placed]
    if any(fact.bad_at is not None for fact in report.tensors):
        # The op may get a tensor of the line in another shape.
        facts = [
            fact
            for fact in facts
            if fact.expression or fact.bad_at is not None or not words.is_at_fault(report, fact)
        ]
    drawn = [fact for fact in report.tensors if id(fact) in placed]
    if any(_is_form(fact, it) for fact in facts for it in drawn):
        return ()  # all are transposed or cast forms of tensors on the line
    return tuple(sorted(facts, key=lambda fact: not words.is_at_fault(report, fact)))


def _is_form(fact: TensorFact, other: TensorFact) -> bool:
    """Return whether a tensor may be a permuted or cast form of another one."""
    is_parameter = fact.requires_grad and fact.grad_fn is None
    is_same = (fact.shape, fact.dtype) == (other.shape, other.dtype)
    return not is_parameter and not is_same and sorted(fact.shape) == sorted(other.shape)


def _is_hot(hot: SourceSpan, line: int) -> bool:
    return hot.line is not None and hot.line <= line <= (hot.end_line or hot.line)


def _drawn(text: str) -> str:
    shown = visible(text[: MAX_LINE_LENGTH + 1])
    return words.clip(shown.replace("\n", " ").replace("\t", TAB), MAX_LINE_LENGTH)


def _indent(text: str) -> int | None:
    return len(text) - len(text.lstrip()) if text.strip() else None


def _hung(report: Report, text: str, number: int) -> list[TensorFact]:
    on_line = _on_line(report, text, number)
    return [fact for fact in on_line if not _is_inner(fact, on_line)][:MAX_LABELS]


def _on_line(report: Report, text: str, number: int) -> list[TensorFact]:
    # The tensor at fault first, so that a line with many tensors always shows it.
    length = min(len(text), MAX_LINE_LENGTH)
    on_line = [
        fact
        for fact in report.tensors
        if fact.span and fact.span[0] == number and 0 <= fact.span[1] < fact.span[2] <= length
    ]
    return sorted(on_line, key=lambda fact: not words.is_at_fault(report, fact))


def _is_inner(fact: TensorFact, others: Sequence[TensorFact]) -> bool:
    """Return whether an outer expression with the same label only moves or casts this tensor."""
    assert fact.span is not None
    return fact.argument is None and any(
        other.span is not None
        and other.argument is not None
        and other.span[:2] == fact.span[:2]
        and other.span[2] > fact.span[2]
        and (other.shape, other.dtype) == (fact.shape, fact.dtype)
        for other in others
    )


def _runs(
    report: Report, text: str, number: int, indent: int, hot: SourceSpan | None
) -> list[_Run]:
    def column(source_column: int) -> int:
        tabs = text[:source_column].count("\t")
        return max(source_column + tabs * (len(TAB) - 1) - indent, 0)

    runs = []
    for fact in _hung(report, text, number):
        assert fact.span is not None
        _, start, end = fact.span
        is_bad = words.is_at_fault(report, fact) or fact.bad_at is not None
        shown = text[start:end]
        name = words.tensor_name(fact)
        is_part = fact.expression is not None and fact.expression.startswith(f"{shown}[")
        runs.append(
            _Run(
                start=column(start),
                end=column(end),
                tone="bad" if is_bad else "tensor",
                label=words.tensor_label(report, fact),
                name=name,
                is_named=is_part,
            )
        )
    call = _call_span(hot, text, number)
    if call is not None:
        runs.append(_Run(start=column(call[0]), end=column(call[1]), tone="call"))
    return list(dict.fromkeys(runs))


def _call_span(source: SourceSpan | None, text: str, number: int) -> tuple[int, int] | None:
    if source is None or source.column is None or source.end_column is None:
        return None
    length = min(len(text), MAX_LINE_LENGTH)
    start, end = len(text) - len(text.lstrip()), length
    if number == source.line:
        start = source.column
    if number == (source.end_line or source.line):
        end = source.end_column
    is_inside = _is_hot(source, number) and 0 <= start < end <= length
    return (start, end) if is_inside else None


def _pieces(text: str, runs: Sequence[_Run]) -> tuple[Piece, ...]:
    looks: list[PieceTone] = ["plain"] * len(text)
    for run in runs:
        for at in range(run.start, min(run.end, len(text))):
            if _RANK[run.tone] > _RANK[looks[at]]:
                looks[at] = run.tone
    at = 0
    pieces = []
    for tone, letters in groupby(looks):
        start, at = at, at + len(list(letters))
        pieces.append(Piece(text=text[start:at], tone=tone))
    return tuple(pieces)


def _hanging(text: str, runs: Sequence[_Run], width: int) -> list[Row]:
    """Return the rows of labels, rightmost first; labels that fit share a row."""
    waiting = sorted((run for run in runs if run.label), key=lambda run: (-run.start, run.end))
    names = tuple((run.name, run.label or "", run.tone == "bad") for run in waiting[::-1])
    rows = []
    while waiting:
        starts = [run.start for run in waiting]
        shared = [_label(text, waiting[0], starts.count(waiting[0].start) > 1)]
        taken = 1
        end = cell_len(text[: waiting[0].start]) + 2 + cell_len(shared[0])
        is_left = end > width and _fits_left(text, waiting[0], waiting)
        while taken < len(waiting) and not is_left:
            run = waiting[taken]
            label = _label(text, run, starts.count(run.start) > 1)
            end = cell_len(text[: run.start]) + 2 + cell_len(label)
            if end + 1 > cell_len(text[: waiting[taken - 1].start]):
                break
            shared.append(label)
            taken += 1
        rows.append(_label_row(text, waiting[:taken], shared, waiting[taken:], is_left))
        waiting = waiting[taken:]
    return [replace(row, names=() if at else names) for at, row in enumerate(rows)]


def _label(text: str, run: _Run, is_shared: bool) -> str:
    # If two expressions begin in one column, the label needs the name.
    name = run.name if run.is_named else text[run.start : run.end] if is_shared else ""
    return f"{name}: {run.label}" if name else f"{run.label}"


def _label_row(
    text: str, runs: Sequence[_Run], labels: Sequence[str], waiting: Sequence[_Run], is_left: bool
) -> Row:
    pieces: list[Piece] = []
    drawn = 0

    def put(start: int, piece: Piece) -> None:
        nonlocal drawn
        pieces.append(Piece(text=" " * (start - drawn), tone="rule"))
        pieces.append(piece)
        drawn = start + cell_len(piece.text)

    begins = {run.start for run in waiting}
    first = runs[-1]
    start = cell_len(text[: first.start])
    label = labels[-1]
    tone: PieceTone = "badlabel" if first.tone == "bad" else "label"
    if is_left:
        for begin in sorted(begins):
            put(cell_len(text[:begin]), Piece(text="│", tone="rule"))
        put(start - cell_len(label) - 1, Piece(text=f"{label} ", tone=tone))
        put(start, Piece(text="┘", tone="rule"))
        return Row(pieces=tuple(pieces), is_label=True)
    for begin in sorted(begins - {run.start for run in runs}):
        put(cell_len(text[:begin]), Piece(text="│", tone="rule"))
    for run, said in zip(reversed(runs), reversed(labels), strict=True):
        sign = "├ " if run.start in begins else "└ "
        put(cell_len(text[: run.start]), Piece(text=sign, tone="rule"))
        tone = "badlabel" if run.tone == "bad" else "label"
        put(drawn, Piece(text=said, tone=tone))
    return Row(pieces=tuple(pieces), is_label=True)
