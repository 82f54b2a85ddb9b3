"""The lists of the command line: the catalogue of guards, and several reports, one each.

Blocks of text in place of a table's columns, so that nothing is cut off at any width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from cudalens.core.report import Report
from cudalens.render import words
from cudalens.render.text import console_into_memory, written_to

_KINDS = {
    "user": "a guard of your own",
    "very common": "a very common error",
    "common": "a common error",
    "rare": "a rare error",
}
"""Words for the frequency of a guard; the list has this order."""
_WARNING = "a warning: CUDA asserts nothing"


def matching(rows: Iterable[Mapping[str, Any]], wanted: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the rows of the catalogue in which each of the words stands, in capitals or not."""
    return [
        row
        for row in rows
        if all(word.casefold() in str(list(row.values())).casefold() for word in wanted)
    ]


def guard_list(rows: Iterable[Mapping[str, Any]], *, width: int, color: bool) -> str:
    """Draw rows of the catalogue: API names, conditions, ops."""
    console = console_into_memory(max(width, 20), color=color)
    for row in sorted(rows, key=lambda row: (row["silent"], list(_KINDS).index(row["frequency"]))):
        # The overloads of an op share its guard: .out, .Tensor and the like.
        ops = dict.fromkeys(op.removeprefix("aten::").partition(".")[0] for op in row["op"])
        kind = _WARNING if row["silent"] else _KINDS[row["frequency"]]
        head = Text(", ".join(row["api"]), style="bold")
        console.print(Text.assemble(head, ("  ", ""), (kind, "dim")))
        console.print(Padding(Text(row["precondition"]), (0, 0, 0, 2)))
        facts = filter(None, (", ".join(ops), row["source"]))
        console.print(Padding(Text(" · ".join(facts), style="dim"), (0, 0, 1, 2)))
    return _text(console)


def report_list(reports: Iterable[tuple[str, Report]], *, width: int, color: bool) -> str:
    """Draw several reports by the files that hold them: what each is about, and where it was."""
    console = console_into_memory(max(width, 20), color=color)
    for name, report in reports:
        rank = report.environment.rank
        facts = (
            words.KINDS.get(report.kind, report.kind),
            words.format_place(report.source),
            "" if rank is None else f"rank {rank}",
            words.certainty(report),
        )
        console.print(Text(words.one_line(name), style="bold"))
        head = f"{'⚠' if report.kind == 'silent' else '✗'} {words.one_line(report.headline)}"
        console.print(Padding(Text(head), (0, 0, 0, 2)))
        console.print(Padding(Text(" · ".join(filter(None, facts)), style="dim"), (0, 0, 0, 4)))
    return _text(console)


def _text(console: Console) -> str:
    lines = written_to(console).rstrip().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def markdown(text: str, *, width: int, color: bool) -> str:
    """Return a page of the documentation as a terminal shows it."""
    from rich.markdown import Markdown  # it and its parser take longer to load than all else here

    console = console_into_memory(width, color=color)
    console.print(Markdown(text))
    return written_to(console)
