"""The report for a terminal: the answer first, the action last, next to the prompt."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from cudalens.core.report import Report
from cudalens.render import screen, words
from cudalens.render.code import Block, code_rows
from cudalens.render.screen import SHOWN_TENSORS, Action, Screen, Spans
from cudalens.render.words import clip

MIN_WIDTH = 30
MAX_VALUE_LENGTH = 2000
_LABEL = 6
_STYLES = {
    "bad": "bold red",
    "badcode": "bold red",
    "warn": "bold yellow",
    "likely": "bold yellow",
    "code": "bold",
    "plain": "",
    "ok": "green",
    "call": "bold",
    "tensor": "underline",
    "rule": "dim",
    "label": "cyan",
    "badlabel": "red",
}


def render(report: Report, *, width: int = 84, color: bool = False) -> str:
    """Draw ``report`` as text of at most ``width`` columns, optionally with ANSI colours.

    The result does not depend on the terminal, the clock or the environment.
    """
    report = words.with_module_names(report)
    width = max(width, MIN_WIDTH)
    # The gutter has the names of cells and files, and line numbers.
    blocks = screen.build(report).blocks
    titles = max((cell_len(block.title) for block in blocks), default=0)
    digits = _digits(blocks)
    gutter = max(titles + 1 + digits, digits + 4)
    parts = screen.build(report, fold=max(width - gutter - 3, 20), label_room=0)
    page = _TextPage(width, color=color)
    style = _STYLES[parts.tone]
    page.hang(Text(f"{parts.sign} ", style=style), _text(parts.headline), 2)
    page.items(parts.facts)
    _code(page, parts.blocks, gutter)
    if parts.loose:
        names = [f"{name} {kind}" for name, kind, _ in parts.loose[:SHOWN_TENSORS]]
        if len(parts.loose) > SHOWN_TENSORS:
            names.append(f"{len(parts.loose) - SHOWN_TENSORS} more")
        page.label("with", Text(" · ".join(names)))
    for item in report.ranks:
        page.label(item.name, Text(" · ".join(words.rank_facts(item))))
    for note in parts.notes:
        page.label("note", Text(note))
    _opinions(page, report, parts)
    if parts.action is not None:
        _action(page, parts.action)
    return page.text()


def console_into_memory(width: int, *, color: bool) -> Console:
    """Return a console that writes to memory, without terminal detection or markup."""
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
    """The lines so far, wrapped with hanging indents."""

    def __init__(self, width: int, *, color: bool) -> None:
        self.width = width
        self._console = console_into_memory(width, color=color)

    def text(self) -> str:
        return written_to(self._console).rstrip("\n") + "\n"

    def hang(self, lead: Text, body: Text, indent: int) -> None:
        """Write ``body`` after ``lead``, with a hanging indent."""
        body.overflow = "fold"
        body.truncate(MAX_VALUE_LENGTH, overflow="ellipsis")
        lead.pad_right(indent - lead.cell_len)
        for line in body.wrap(self._console, max(self.width - indent, 10)):
            self.line(Text.assemble(lead, line))
            lead = Text(" " * indent)

    def items(self, facts: Sequence[Spans]) -> None:
        """Write facts in a row, wrapped between words."""
        row = Text(" · ").join(map(_text, facts))
        if row.plain.strip():
            self.hang(Text("  "), row, 2)

    def label(self, name: str, body: Text, style: str = "bold blue") -> None:
        """Write one labelled fact, unless it is empty."""
        if body.plain.strip():
            self.hang(Text.assemble("  ", (name, style)), body, max(len(name) + 4, _LABEL + 2))

    def line(self, row: Text) -> None:
        row.rstrip()
        # The row is wrapped already, and rich must leave it as it is.
        self._console.print(row, soft_wrap=True)


def _text(spans: Spans) -> Text:
    return Text.assemble(*((span.text, _STYLES[span.look]) for span in spans))


def _digits(blocks: Sequence[Block]) -> int:
    numbers = [row.number for block in blocks for row in block.rows if row.number]
    return max((len(str(number)) for number in numbers), default=1)


def _code(page: _TextPage, blocks: Sequence[Block], gutter: int) -> None:
    digits = _digits(blocks)
    for block in blocks:
        codes = [cell_len(row.text) for row in block.rows if row.marks]
        column = max((size for size in codes if gutter + 3 + size < page.width - 20), default=0)
        title = block.title
        for row in block.rows:
            if row.is_gap:
                continue  # the numbers say so
            number = str(row.number) if row.number else ""
            lead = f"{set_cell_size(title, gutter - digits)}{number:>{digits}} │ "
            title = ""
            drawn = Text.assemble((lead, "dim"))
            for piece in row.pieces:
                drawn.append(piece.text, style=_STYLES[piece.tone])
            below: list[str] = []
            for said in row.marks:
                mark = f"◂ {said}"
                at = gutter + 3 + max(column, cell_len(row.text)) + 2
                if said is row.marks[0] and at + cell_len(mark) <= page.width:
                    drawn.pad_right(at - drawn.cell_len)
                    drawn.append(mark, style="bold")
                else:
                    below.append(mark)
            drawn.truncate(page.width, overflow="ellipsis")
            page.line(drawn)
            for mark in below:
                under = Text.assemble((" " * gutter + " │   ", "dim"), (mark, "bold"))
                under.truncate(page.width, overflow="ellipsis")
                page.line(under)


def _opinions(page: _TextPage, report: Report, parts: Screen) -> None:
    said = Text()
    if parts.status is not None:
        rehearsal = " (rehearsal)" if parts.status.is_rehearsal else ""
        said.append(parts.status.text, style=_STYLES[parts.status.tone])
        said.append(rehearsal)
    if report.replay.outcome == "raised":
        said.append(" · " if said.plain else "")
        said.append(f"the CPU says {clip(words.replay_line(report), MAX_VALUE_LENGTH)}")
    if said.plain:
        page.hang(Text("  "), said, 2)


def _action(page: _TextPage, action: Action) -> None:
    beside = "" if action.beside == "in" else f"{action.beside} "
    place = f"{beside}{action.place}: " if action.place else ""
    indent = _LABEL + 2
    lead = Text.assemble("  ", (action.label, "bold blue"))
    if action.code:
        room = max(page.width - indent, MIN_WIDTH - indent)
        rows = code_rows(action.code, room - cell_len(place), room)
        if place and cell_len(place + rows[0]) > room:
            rows = ["", *code_rows(action.code, room, room)]
        page.hang(lead, Text.assemble(place, ("\n".join(rows), "bold")), indent)
        lead, place = Text(), ""
    if action.reason:
        page.hang(lead, Text(place + action.reason), indent)
