"""The report for a terminal: what was wrong first, then where, why and what to do."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from cudalens.core.report import Report
from cudalens.render import words
from cudalens.render.code import code_rows, crop, unplaced_tensors
from cudalens.render.headline import headline_parts
from cudalens.render.words import clip, one_line

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
    page = _Page(max(width, MIN_WIDTH), color=color)
    _verdict(page, report)
    _code(page, report)
    _causes(page, report)
    _second_opinions(page, report)
    _surroundings(page, report)
    return page.text()


class _Page:
    """Lines gathered so far, wrapped with hanging indents."""

    def __init__(self, width: int, *, color: bool) -> None:
        self.width = width
        self._out = io.StringIO()
        self._console = Console(
            file=self._out,
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

    def text(self) -> str:
        return self._out.getvalue().rstrip("\n") + "\n"

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

    def items(self, label: str, items: Sequence[str], between: str, *, indent: int) -> None:
        """Write short facts in a row, breaking between them where they do not fit."""
        lines: list[str] = []
        for at, item in enumerate(items):
            text = clip(item, MAX_VALUE_LENGTH) + (
                between.rstrip(" ·") if at + 1 < len(items) else ""
            )
            gap = between if between.startswith(" ") else " "
            if not lines:
                lines = [text]
            elif cell_len(lines[-1] + gap + text) > self.width - indent:
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


def _verdict(page: _Page, report: Report) -> None:
    style = _STYLES[words.tone(report)]
    head, rest = headline_parts(report)
    title = Text.assemble((head, style), (clip(rest, MAX_VALUE_LENGTH), "bold"))
    page.hang(Text(f"{words.sign(report)} ", style=style), title, 2)
    path = words.format_op_path(report.op)
    if report.argument:
        path += f"{', ' if path else ''}argument {words.format_argument(report)}"
    known = [words.bad_count(report), path, one_line(report.module_path or "")]
    # A phase alone says nothing: no op is known that could have one.
    phase = report.phase if any(known) and report.phase != "unknown" else ""
    facts = [fact for fact in (*known, phase, words.certainty(report)) if fact]
    if facts:
        page.items("", facts, " · ", indent=2)


def _code(page: _Page, report: Report) -> None:
    place = words.format_place(report.source)
    if place:
        page.line(Text(f"  {place}", style="dim"))
    rows = code_rows(report, context=False, dedent=False)
    gutter = max((len(str(row.number)) for row in rows if row.number), default=1) + 4
    room = page.width - gutter - 3
    if any(cell_len(row.text) > room for row in rows):
        rows = code_rows(report, context=False)
    kept = crop(rows, room)
    for row in kept:
        number = str(row.number) if row.number else ""
        drawn = Text.assemble((f"{number:>{gutter}} │ ", "dim"))
        for piece in row.pieces:
            drawn.append(piece.text, style=_STYLES[piece.tone])
        page.line(drawn)
    _tensors(page, report, all_hung=len(kept) == len(rows))


def _tensors(page: _Page, report: Report, *, all_hung: bool) -> None:
    if all_hung:
        names = unplaced_tensors(report)
    else:
        names = tuple(
            f"{words.tensor_name(fact)} {words.tensor_label(report, fact, device=False)}"
            for fact in report.tensors
        )
    shown = list(names[:_SHOWN_TENSORS])
    if len(names) > len(shown):
        shown.append(f"{len(names) - len(shown)} more")
    page.items("with", shown, " · ", indent=_LABEL + 2)


def _causes(page: _Page, report: Report) -> None:
    found = report.offenders
    if found is not None and len(found.first) > 1:
        listed = [
            f"{words.format_shape(item.position)} = {words.format_number(item.value)}"
            for item in found.first[:_SHOWN_OFFENDERS]
        ]
        if found.count > len(listed):
            listed.append(f"{found.count - len(listed)} more")
        page.items("bad", listed, ", ", indent=_LABEL + 2)
    page.item("why", one_line(report.explanation))
    for at, hint in enumerate(report.hints):
        text = clip(one_line(hint.text), MAX_VALUE_LENGTH)
        if hint.fix:
            fix = clip(one_line(hint.fix), MAX_VALUE_LENGTH)
            page.item("or" if at else "try", Text.assemble((fix, "bold"), "   ", text))
        else:
            page.item("hint", text)
    if report.forward_source is not None:
        where = words.format_place(report.forward_source)
        text = one_line(report.forward_source.text or "")
        page.item("forward", " ".join(filter(None, (where, text))))
    _way(page, report)


def _way(page: _Page, report: Report) -> None:
    steps = [words.format_step(item) for item in words.way(report)]
    for at, text in enumerate(steps[:_SHOWN_STEPS]):
        page.item("" if at else "from", f"← {text}" if at else text)
    if len(steps) > _SHOWN_STEPS:
        page.item("", f"← {len(steps) - _SHOWN_STEPS} more")
    callers = [frame for frame in report.frames if frame.is_user]
    for at, frame in enumerate(callers[:-1][-_SHOWN_FRAMES:]):
        cell = f"In [{frame.cell}]" if frame.cell is not None else _base_name(frame.file)
        text = f"{cell} line {frame.line} in {frame.function}: {frame.text.strip()}"
        page.item("" if at else "called", one_line(text))


def _base_name(file: str) -> str:
    return file.replace("\\", "/").rsplit("/", 1)[-1]


def _second_opinions(page: _Page, report: Report) -> None:
    page.item("CPU", words.replay_line(report))
    state = words.context_state(report)
    style = _STYLES[state.tone] if state and state.tone != "plain" else ""
    page.item("CUDA", words.cuda_line(report), style)
    if not report.prevented and report.source is None:
        for at, entry in enumerate(report.history[-_SHOWN_OPS:]):
            where = words.format_line(entry.source)
            text = " ".join(filter(None, (entry.op, entry.shapes, where)))
            page.item("" if at else "ops", one_line(text))


def _surroundings(page: _Page, report: Report) -> None:
    if report.environment.simulated:
        page.item("note", words.REHEARSAL)
    if report.environment.rank is not None:
        page.item("rank", str(report.environment.rank))
    for limit in report.limits:
        page.item("unknown", one_line(limit), "dim")
