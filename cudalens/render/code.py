"""The code view: source lines with each tensor's type hanging under its expression.

The rows are data that text, HTML and widget all draw, so that the three cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

from rich.cells import cell_len

from cudalens.core._python import without_comment
from cudalens.core.report import CodeLine, ProvenanceStep, Report, SourceSpan, TensorFact
from cudalens.core.report_types import CHANGED
from cudalens.render import words
from cudalens.render.words import one_line, visible

PieceTone = Literal["plain", "call", "tensor", "bad", "rule", "label", "badlabel"]
TAB = "    "
MAX_LINES = 24
MAX_BEFORE = 8
MAX_LABELS = 10
MAX_LINE_LENGTH = 240
_CHANGED = "changed in place"
_BESIDE = 3
"""Columns that the narrowest pane has beyond those in which code is folded."""
_RANK = {"plain": 0, "call": 1, "tensor": 2, "bad": 3}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of characters of one look."""

    text: str
    tone: PieceTone = "plain"
    tensor: int | None = field(default=None, compare=False)
    """Which of the report's tensors it names or labels."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One drawn line: a numbered source line, or a line of labels (no number) under it."""

    number: int | None
    pieces: tuple[Piece, ...]
    is_hot: bool = False
    """True if it belongs to the failing statement."""

    @property
    def text(self) -> str:
        """Return the row without its looks."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A marked run of a source line, in characters of the drawn line, with its hanging label."""

    start: int
    end: int
    tone: PieceTone
    label: str | None = None
    name: str | None = None
    """Owner of the label, where the run shows a container and not the tensor."""
    tensor: int | None = field(default=None, compare=False)


def code_rows(
    report: Report,
    *,
    context: bool = True,
    dedent: bool = True,
    fold: int | None = None,
    label_room: int = 22,
) -> tuple[Row, ...]:
    """Return the code around the failure, labels included.

    ``context`` adds the lines outside the failing statement, ``dedent`` leaves out the indentation
    that all lines share, and after ``fold`` columns a line of the failing statement goes on in the
    next row; labels may be ``label_room`` columns wider, and a line whose labels are too wide for
    the narrowest pane has them on the left of its expressions.
    """
    source = report.source
    if source is None:
        return ()
    lines = _with_changes(report, _lines(source, context=context))
    indent = _common_indent(line.text for line in lines) if dedent else 0
    end = None if fold is None else fold + min(label_room, _BESIDE)
    rows: list[Row] = []
    previous: int | None = None
    for line in lines:
        hot = _is_hot(source, line.line)
        # Without context the text is the stripped statement: its columns are not the source's.
        marks = _marks(report, line, indent) if source.context else []
        text = _drawn(line.text)[indent:]
        number = line.line or None
        if rows and number and previous and number > previous + 1:
            rows.append(Row(number=None, pieces=(Piece(text="⋮", tone="rule"),)))
        previous = number
        has_caret = hot and line.line == source.line
        has_caret = has_caret and not any(_hung(report, other) for other in lines)
        for part, own in _folded(text, marks, fold if hot or not source.line else None, label_room):
            rows.append(Row(number=number, pieces=_pieces(part, own), is_hot=hot))
            rows.extend(replace(row, is_hot=hot) for row in _hanging(part, own, end))
            if has_caret:
                rows.extend(replace(row, is_hot=hot) for row in _caret_row(part, own))
            number = None
    return tuple(rows)


_NARROWEST = 8
"""Columns of a part at least: a line number may leave no room beside it."""


def _folded(
    text: str, marks: Sequence[Mark], width: int | None, label_room: int
) -> Iterator[tuple[str, list[Mark]]]:
    """Cut a long line into parts with the marks of each; those that go on are indented."""
    start, indent = 0, ""
    deeper = " " * min(len(text) - len(text.lstrip(" ")) + 4, (width or 0) // 2)
    while True:
        stop = (
            len(text)
            if width is None
            else _fold_at(text, marks, start, max(width - len(indent), _NARROWEST), label_room)
        )
        shift = len(indent) - start
        own = [_cut(mark, start, stop, shift) for mark in marks if mark.start < stop]
        yield indent + text[start:stop], [mark for mark in own if mark.end > mark.start]
        start, indent = stop, deeper
        if start >= len(text):
            return


def _fold_at(text: str, marks: Sequence[Mark], start: int, width: int, label_room: int) -> int:
    """Return where a part ends: after a comma, an opening bracket or a space, outside names."""
    labels = [mark for mark in marks if mark.label and start < mark.start < start + width]
    room = start + width + label_room
    beyond = [mark.start for mark in labels if mark.start + len(mark.label or "") + 2 > room]
    last = min([start + width, *beyond])
    if len(text) <= last:
        return len(text)
    first = start + len(text[start:]) - len(text[start:].lstrip(" ")) + 1
    for signs in (", ", "([{=", " .)]}"):
        for at in range(last, max(first, start + width // 4), -1):
            before, after = text[at - 1], text[at : at + 1]
            is_sign = text[at - 2 : at] == signs if signs == ", " else before in signs
            inside = any(m.start < at < m.end <= m.start + width for m in marks if m.label)
            if is_sign and not inside and after not in ")]},":
                return at
    return last if last > first else start + width


def _cut(mark: Mark, start: int, stop: int, shift: int) -> Mark:
    first, end = max(mark.start, start) + shift, min(mark.end, stop) + shift
    # A label hangs under the part in which its expression begins.
    label = mark.label if start <= mark.start < stop else None
    return replace(mark, start=first, end=end, label=label)


def unplaced_tensors(report: Report) -> tuple[str, ...]:
    """Return name and type of the tensors that no drawn line carries, in the report's order."""
    lines = report.source.context if report.source else ()
    hung = [id(fact) for line in lines for fact in _hung(report, line)]
    facts = [fact for fact in report.tensors if id(fact) not in hung]
    if any(fact.bad_at is not None for fact in report.tensors):
        # What the op was given in another shape has the same values.
        facts = [fact for fact in facts if fact.expression or not words.is_at_fault(report, fact)]
    return labelled_tensors(report, facts)


def labelled_tensors(report: Report, facts: Iterable[TensorFact]) -> tuple[str, ...]:
    """Return name and type of these tensors of a report."""
    return tuple(f"{words.tensor_name(fact)} {words.tensor_label(report, fact)}" for fact in facts)


def _lines(source: SourceSpan, *, context: bool) -> tuple[CodeLine, ...]:
    lines = source.context
    if not context:
        lines = tuple(line for line in lines if _is_hot(source, line.line))
    if not lines and source.text:
        return (CodeLine(line=source.line or 0, text=source.text),)
    # However much context was kept, the failing line is drawn with a few lines before it.
    failing = next((at for at, line in enumerate(lines) if line.line == source.line), 0)
    first = max(min(failing - MAX_BEFORE, len(lines) - MAX_LINES), 0)
    return lines[first : first + MAX_LINES]


def _with_changes(report: Report, lines: tuple[CodeLine, ...]) -> tuple[CodeLine, ...]:
    """Add the lines of the same text that changed what backward needs, where they are not shown."""
    shown = {line.line for line in lines}
    places = (item.source for item in _changes(report))
    # Their own indentation is not known: they stand where the shown lines begin.
    texts = [line.text for line in lines if line.text.strip()]
    indent = min((line[: len(line) - len(line.lstrip())] for line in texts), key=len, default="")
    added = [
        CodeLine(line=place.line, text=indent + place.text)
        for place in places
        if place is not None and place.line and place.text and place.line not in shown
    ]
    return tuple(sorted((*lines, *added), key=lambda line: line.line)) if added else lines


def _changes(report: Report) -> list[ProvenanceStep]:
    """Return the steps in the failing line's cell or file that changed what backward needs."""
    source = report.source
    return [
        item
        for item in report.provenance
        if item.note == CHANGED
        and source is not None
        and item.source is not None
        and (item.source.cell, item.source.file) == (source.cell, source.file)
    ]


def _is_hot(source: SourceSpan, line: int) -> bool:
    if source.line is None:
        return False
    return source.line <= line <= (source.end_line or source.line)


def _drawn(text: str) -> str:
    shown = visible(text[:MAX_LINE_LENGTH])
    return shown.replace("\n", " ").replace("\t", TAB)[:MAX_LINE_LENGTH]


def _common_indent(texts: Iterable[str]) -> int:
    drawn = map(_drawn, texts)
    return min((len(text) - len(text.lstrip(" ")) for text in drawn if text.strip()), default=0)


def _hung(report: Report, line: CodeLine) -> list[TensorFact]:
    # The tensor at fault first, so that a line with very many tensors never loses it.
    length = min(len(line.text), MAX_LINE_LENGTH)
    on_line = [
        fact
        for fact in report.tensors
        if fact.span and fact.span[0] == line.line and 0 <= fact.span[1] < fact.span[2] <= length
    ]
    on_line.sort(key=lambda fact: not words.is_at_fault(report, fact))
    return on_line[:MAX_LABELS]


def _marks(report: Report, line: CodeLine, indent: int) -> list[Mark]:
    def column(source_column: int) -> int:
        tabs = line.text[:source_column].count("\t")
        return max(source_column + tabs * (len(TAB) - 1) - indent, 0)

    marks = []
    for fact in _hung(report, line):
        assert fact.span is not None
        _, start, end = fact.span
        tone: PieceTone = "bad" if words.is_at_fault(report, fact) else "tensor"
        label = words.tensor_label(report, fact)
        at = next(at for at, other in enumerate(report.tensors) if other is fact)
        ends = {"start": column(start), "end": column(end)}
        name = _unpacked(fact.expression, line.text[start:end])
        marks.append(Mark(**ends, tone=tone, label=label, name=name, tensor=at))
    if any(item.source and item.source.line == line.line for item in _changes(report)):
        start = len(line.text) - len(line.text.lstrip())
        end = start + len(without_comment(line.text.strip()))
        marks.append(Mark(start=column(start), end=column(end), tone="bad", label=_CHANGED))
    call = _call_span(report.source, line)
    if call is not None:
        marks.append(Mark(start=column(call[0]), end=column(call[1]), tone="call"))
    return list(dict.fromkeys(marks))


def _unpacked(expression: str | None, text: str) -> str | None:
    """Name an element of what ``*args`` or ``**batch`` unpacks."""
    is_part = expression is not None and expression.startswith(f"{text}[")
    return one_line(expression) if is_part and expression is not None else None


def _call_span(source: SourceSpan | None, line: CodeLine) -> tuple[int, int] | None:
    if source is None or source.column is None or source.end_column is None:
        return None
    last = source.end_line or source.line
    length = min(len(line.text), MAX_LINE_LENGTH)
    start, end = len(line.text) - len(line.text.lstrip()), length
    if line.line == source.line:
        start = source.column
    if line.line == last:
        end = source.end_column
    is_inside = _is_hot(source, line.line) and 0 <= start < end <= length
    return (start, end) if is_inside else None


def _pieces(text: str, marks: Sequence[Mark]) -> tuple[Piece, ...]:
    looks: list[tuple[PieceTone, int | None]] = [("plain", None)] * len(text)
    for mark in marks:
        for at in range(mark.start, min(mark.end, len(text))):
            if _RANK[mark.tone] > _RANK[looks[at][0]]:
                looks[at] = (mark.tone, mark.tensor)
    at = 0
    pieces = []
    for (tone, tensor), run in groupby(looks):
        start, at = at, at + len(list(run))
        pieces.append(Piece(text=text[start:at], tone=tone, tensor=tensor))
    return tuple(pieces)


def _hanging(text: str, marks: Sequence[Mark], width: int | None) -> list[Row]:
    """Return a row for each label; all are left of their rules where one would pass ``width``."""
    labelled = sorted((m for m in marks if m.label), key=lambda m: (-m.start, m.end))
    starts = [cell_len(text[: m.start]) for m in labelled]
    sizes = [cell_len(m.label or "") + 2 for m in labelled]
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    is_left = (
        width is not None
        and any(end > width for end in ends)
        and all(size <= start for start, size in zip(starts, sizes, strict=True))
        # Labels that need a name, as where two begin in one column, are wider.
        and len(set(starts)) == len(starts)
        and not any(mark.name for mark in labelled)
    )
    draw = _label_on_left if is_left else _label_row
    labelled = labelled[::-1] if is_left else labelled
    return [
        draw(text, mark, {m.start for m in labelled[at + 1 :]}) for at, mark in enumerate(labelled)
    ]


def _label_row(text: str, mark: Mark, waiting: set[int]) -> Row:
    shares = mark.start in waiting
    signs = {**dict.fromkeys(waiting, "│"), mark.start: "├ " if shares else "└ "}
    # Where two expressions begin in one column, only the name tells which label is whose.
    name = mark.name or (text[mark.start : mark.end] if shares else "")
    label = _label(mark, f"{name}: {mark.label}" if name else f"{mark.label}")
    return Row(number=None, pieces=(*_rules(text, signs, 0), label))


def _label_on_left(text: str, mark: Mark, waiting: set[int]) -> Row:
    label = _label(mark, f"{mark.label} ")
    start = cell_len(text[: mark.start]) - cell_len(label.text)
    rules = _rules(text, {mark.start: "┘", **dict.fromkeys(waiting, "│")}, start + len(label.text))
    return Row(number=None, pieces=(Piece(text=" " * start, tone="rule"), label, *rules))


def _label(mark: Mark, text: str) -> Piece:
    tone: PieceTone = "badlabel" if mark.tone == "bad" else "label"
    return Piece(text=text, tone=tone, tensor=mark.tensor)


def _rules(text: str, signs: Mapping[int, str], drawn: int) -> list[Piece]:
    """Draw a sign under each of these characters; so many cells of the row are drawn already."""
    pieces = []
    for start, sign in sorted(signs.items()):
        cells = cell_len(text[:start])
        pieces.append(Piece(text=" " * (cells - drawn) + sign, tone="rule"))
        drawn = cells + 1
    return pieces


def _caret_row(text: str, marks: Sequence[Mark]) -> list[Row]:
    call = next((mark for mark in marks if mark.tone == "call"), None)
    if call is None:
        return []
    indent = " " * cell_len(text[: call.start])
    carets = "^" * max(cell_len(text[call.start : call.end]), 1)
    return [Row(number=None, pieces=(Piece(text=indent + carets, tone="badlabel"),))]
