"""The report for a terminal: what was wrong first, then where, why and what to do."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from cudalens.core.report import LineRef, Report
from cudalens.render import words
from cudalens.render.code import code_rows, unplaced_tensors
from cudalens.render.words import clip, headline_parts, one_line

MIN_WIDTH = 30
MAX_VALUE_LENGTH = 2000
_LABEL = 8
_SHOWN_OFFENDERS = 6
_SHOWN_TENSORS = 12
_SHOWN_FRAMES = 6
_SHOWN_STEPS = 8
_SHOWN_OPS = 5

_STYLES = {
    "bad": "bold red",
    "warn": "bold yellow",
    "ok": "green",
    "plain": "default",
    "call": "bold",
    "tensor": "underline",
    "rule": "dim",
    "label": "cyan",
    "badlabel": "red",
}


def render(report: Report, *, width: int = 100, color: bool = False) -> str:
    """Draw ``report`` as text of at most ``width`` columns, with ANSI colours on request.

    The result depends on the arguments alone: not on the terminal, the clock or the environment.
    """
    report = words.with_module_names(report)
    page = _TextPage(max(width, MIN_WIDTH), color=color)
    _verdict(page, report)
    _code(page, report)
    _causes(page, report)
    _second_opinions(page, report)
    _surroundings(page, report)
    return page.text()


def console_into_memory(width: int, *, color: bool) -> Console:
    """Return a console whose file is a string in memory; it guesses and marks up nothing."""
    return Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        force_jupyter=False,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


def written_to(console: Console) -> str:
    """Return what was written to a console in memory."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class _TextPage:
    """Lines gathered so far, wrapped with hanging indents."""

    def __init__(self, width: int, *, color: bool) -> None:
        self.width = width
        self._console = console_into_memory(width, color=color)

    def text(self) -> str:
        return written_to(self._console).rstrip("\n") + "\n"

    def hang(self, lead: Text, body: Text, indent: int) -> None:
        """Write ``body`` after ``lead``, wrapped under itself."""
        body.overflow = "fold"
        lead.pad_right(indent - lead.cell_len)
        for line in body.wrap(self._console, max(self.width - indent, 10)):
            self.line(Text.assemble(lead, line))
            lead = Text(" " * indent)

    def item(self, label: str, body: str | Text, style: str = "") -> None:
        """Write one labelled fact; an empty one is left out."""
        text = Text(clip(body, MAX_VALUE_LENGTH)) if isinstance(body, str) else body
        if not text.plain.strip():
            return
        lead = Text.assemble("  ", (label, style or "bold blue"))
        self.hang(lead, text, _LABEL + 2)

    def column(self, label: str, bodies: Sequence[str]) -> None:
        """Write facts below each other, the label by the first."""
        for at, body in enumerate(bodies):
            self.item("" if at else label, body)

    def items(self, label: str, items: Sequence[str], between: str, *, indent: int) -> None:
        """Write short facts in a row, breaking between them where they do not fit."""
        texts = [clip(item, MAX_VALUE_LENGTH) for item in items]
        texts[:-1] = [text + between.rstrip(" ·") for text in texts[:-1]]
        gap = between if between.startswith(" ") else " "
        lines = texts[:1]
        for text in texts[1:]:
            if cell_len(lines[-1] + gap + text) > self.width - indent:
                lines.append(text)
            else:
                lines[-1] += gap + text
        lead = Text.assemble("  ", (label, "bold blue"))
        for line in lines:
            self.hang(lead, Text(line), indent)
            lead = Text()

    def line(self, row: Text) -> None:
        row.rstrip()
        self._console.print(row, soft_wrap=True)


def _verdict(page: _TextPage, report: Report) -> None:
    style = _STYLES[words.tone(report)]
    head, rest = headline_parts(report)
    title = Text.assemble((head, style), (clip(rest, MAX_VALUE_LENGTH), "bold"))
    page.hang(Text(f"{words.sign(report)} ", style=style), title, 2)
    path = words.format_op_path(report.op)
    if report.argument:
        path += f"{', ' if path else ''}argument {words.format_argument(report)}"
    module = one_line(report.module_path or "")
    counts = words.bad_count(report), words.earlier_calls(report)
    parts = [words.ranks_line(report), *counts, path, module]
    # A phase alone says nothing: no op is known that could have one.
    phase = report.phase if any(parts) and report.phase != "unknown" else ""
    facts = [fact for fact in (*parts, phase, words.certainty(report)) if fact]
    if facts:
        page.items("", facts, " · ", indent=2)


def _code(page: _TextPage, report: Report) -> None:
    place = words.format_place(report.source)
    if place:
        page.line(Text(f"  {place}", style="dim"))
    rows = code_rows(report, context=False, dedent=False)
    gutter = max((len(str(row.number)) for row in rows if row.number), default=1) + 4
    room = page.width - gutter - 3
    if any(cell_len(row.text) > room for row in rows):
        is_wide = any(len(row.text) < cell_len(row.text) for row in rows)
        rows = code_rows(report, context=False, fold=room // (1 + is_wide), label_room=0)
    for row in rows:
        number = str(row.number) if row.number else ""
        drawn = Text.assemble((f"{number:>{gutter}} │ ", "dim"))
        for piece in row.pieces:
            drawn.append(piece.text, style=_STYLES[piece.tone])
        drawn.truncate(page.width, overflow="ellipsis")
        page.line(drawn)
    names = unplaced_tensors(report)
    page.items("with", _first(names, _SHOWN_TENSORS, len(names)), " · ", indent=_LABEL + 2)


def _first(texts: Sequence[str], limit: int, total: int) -> list[str]:
    """Return the first of some texts, and how many more there are."""
    shown = list(texts[:limit])
    return [*shown, f"{total - len(shown)} more"] if total > len(shown) else shown


def _causes(page: _TextPage, report: Report) -> None:
    offenders = report.offenders
    if offenders is not None and len(offenders.first) > 1:
        listed = [
            f"{words.bad_place(report, item)} = {words.format_number(item.value)}"
            + (words.format_inputs(item) if item is offenders.first[0] else "")
            for item in offenders.first
        ]
        listed = _first(listed, _SHOWN_OFFENDERS, offenders.count)
        page.items("bad", listed, ", ", indent=_LABEL + 2)
    page.item("why", one_line(report.explanation))
    ranks = [f"{item.name}: {' · '.join(words.rank_facts(item))}" for item in report.ranks]
    page.column("ranks", ranks)
    for at, hint in enumerate(report.hints):
        text = clip(one_line(hint.text), MAX_VALUE_LENGTH)
        if hint.fix:
            fix = clip(one_line(hint.fix), MAX_VALUE_LENGTH)
            text += f" ({words.TRIED})" if hint.tried else ""
            page.item("or" if at else "try", Text.assemble((fix, "bold"), "   ", text))
        else:
            page.item("hint", text)
    page.item("forward", words.format_line(report.forward_source))
    _way(page, report)


def _way(page: _TextPage, report: Report) -> None:
    steps = [words.format_step(item) for item in words.way(report)]
    shown = _first(steps, _SHOWN_STEPS, len(steps))
    page.column("from", [*shown[:1], *(f"← {text}" for text in shown[1:])])
    callers = [frame for frame in report.frames if frame.is_user][:-1]
    lines = [
        f"{words.format_place(LineRef(cell=frame.cell, file=frame.file, line=frame.line))} "
        f"in {frame.function}: {frame.text.strip()}"
        for frame in callers[-_SHOWN_FRAMES:]
    ]
    page.column("called", list(map(one_line, lines)))


def _second_opinions(page: _TextPage, report: Report) -> None:
    page.item("CPU", words.replay_line(report))
    state = words.context_state(report)
    style = _STYLES[state.tone] if state and state.tone != "plain" else ""
    page.item("CUDA", words.cuda_line(report), style)
    if not report.prevented and report.source is None:
        ops = [
            (entry.op, entry.shapes, words.format_line(entry.source))
            for entry in report.history[-_SHOWN_OPS:]
        ]
        page.column("ops", [one_line(" ".join(filter(None, facts))) for facts in ops])


def _surroundings(page: _TextPage, report: Report) -> None:
    if report.environment.simulated:
        page.item("note", words.REHEARSAL)
    if report.environment.rank is not None and not report.ranks:
        page.item("rank", str(report.environment.rank))
    for limit in report.limits:
        page.item("unknown", one_line(limit), "dim")
