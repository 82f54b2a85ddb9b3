"""The report as HTML: a fragment for a notebook's output, and a self-contained page.

Neither needs a script.  Without styles and pictures, the answer, the action, the marked code and
the tables of facts are still readable, in order.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jinja2
from markupsafe import Markup, escape

from cudalens.core.report import HistoryEntry, Report, TensorFact
from cudalens.core.report_types import format_shape
from cudalens.render import figures, markdown, screen, strip, words
from cudalens.render.code import Block, Row
from cudalens.render.colours import PALETTES
from cudalens.render.inline import inlined
from cudalens.render.words import clip, visible

MAX_BYTES = 200_000
WIDE, LEAST = 112, 48
"""The column at which the failing line is folded: without a picture, and beside a wide one."""
_NAME = 22
"""How many characters of a name are shown below its line, where labels are not aligned."""
_FAR = 78
"""The column beyond which a label is invisible in a narrow pane."""
_PANE, _COLUMN = 860, 7.7
"""Width of the narrowest common pane without margins, and of one character of code, in pixels."""
_SAMPLE = "dataset item"
_TENSOR_HEADS = (
    *("tensor", "argument", "shape", "dtype", "device", "stride", "grad", "bad"),
    *("min", "max", "mean", "nan", "inf", "distinct"),
)
_OPEN_GRAPH = ("host_error", "autograd_error", "nonfinite")
_STATIC = Path(__file__).with_name("static")


@dataclass(frozen=True, kw_only=True)
class _Limits:
    """Limits of the drawn lists and texts; the JSON form is always complete."""

    history: int
    rows: int
    text: int


_FRAGMENT = _Limits(history=50, rows=40, text=1500)
_PAGE = _Limits(history=200, rows=80, text=3000)
_SMALL = _Limits(history=40, rows=20, text=300)
_TINY = _Limits(history=8, rows=6, text=60)


class Drawer(NamedTuple):
    """One drawer: its label, the number of its items, its template block."""

    label: str
    things: int | None
    name: str
    is_open: bool = False


def render_fragment(report: Report) -> str:
    """Draw ``report`` for a notebook's output cell; its styles touch nothing else on the page."""

    report = words.with_module_names(report)
    strip_of = strip.strip(report)

    def draw(limits: _Limits) -> str:
        return inlined(_drawn(report, strip_of, limits), style_sheet())

    return _fitting(draw, _FRAGMENT)


def render_page(report: Report) -> str:
    """Draw ``report`` as one self-contained HTML file of less than 200 kB."""

    report = words.with_module_names(report)
    strip_of = strip.strip(report)

    def draw(limits: _Limits) -> str:
        body = Markup(_drawn(report, strip_of, limits).strip())
        facts = {"body": body, "style": style_sheet(), "palettes": PALETTES}
        title = screen.plain(screen.build(report).headline)
        return _environment(limits).get_template("page.html.j2").render(facts, title=title)

    return _fitting(draw, _PAGE)


class Ops(NamedTuple):
    """A run of equal ops: their number, and the latest one."""

    times: int
    entry: HistoryEntry
    is_failed: bool = False


def history_entries(report: Report) -> tuple[Ops, ...]:
    """Return the failed op and the recorded ops before it, latest first, with runs merged."""
    # Calls of one kind differ in their numbers alone.
    runs = groupby(report.history, key=lambda entry: replace(entry, seq=0))
    equal = [list(run) for _, run in runs]
    entries = [Ops(len(run), run[-1]) for run in equal]
    if report.history and report.op.name and report.phase != "unknown":
        entries.append(Ops(1, _failed_entry(report), is_failed=True))
    return tuple(entries[::-1])


def _failed_entry(report: Report) -> HistoryEntry:
    source = report.source.ref if report.source else None
    arguments = [words.format_tensor_type(fact) for fact in report.tensors if fact.argument]
    return HistoryEntry(
        seq=report.history[-1].seq + 1,
        op=words.format_op(report.op),
        shapes=", ".join(arguments),
        source=source,
        module_path=report.module_path,
        phase=report.phase,
    )


def history_table(report: Report, entries: Sequence[Ops]) -> Markup:
    """Draw the table of history entries."""
    facts = {"report": report, "entries": entries, "limits": _FRAGMENT}
    return _block("history", facts, _FRAGMENT)


def short_path(file: str) -> str:
    """Return the last parts of a path: ``nn/functional.py``."""
    return "/".join(file.replace("\\", "/").split("/")[-2:])


@cache
def style_sheet() -> Markup:
    """Return the style sheet of every view; all its rules are scoped under ``.cudalens``."""
    template = _environment(_PAGE).get_template("style.css.j2")
    lines = template.render(palettes=PALETTES).splitlines()
    return Markup("\n").join(Markup(line.strip()) for line in lines if line.strip())


def _fitting(draw: Callable[[_Limits], str], limits: _Limits) -> str:
    for tried in (limits, _SMALL, _TINY):
        page = draw(tried)
        if len(page.encode()) < MAX_BYTES:
            break
    return page


def _drawn(report: Report, drawn: strip.Strip | None, limits: _Limits) -> str:
    facts = _facts_of(report, drawn, limits)
    facts["panel"] = lambda name: _block(name, facts, limits)
    return _environment(limits).get_template("report.html.j2").render(facts)


def _block(name: str, facts: dict[str, Any], limits: _Limits) -> Markup:
    panels = _environment(limits).get_template("panels.html.j2")
    macros = _environment(limits).get_template("macros.html.j2").make_module(facts)
    drawn = panels.blocks[name](panels.new_context({**facts, "ui": macros}))
    return Markup("".join(drawn).strip())


@cache
def _environment(limits: _Limits) -> jinja2.Environment:
    def finalize(value: object) -> object:
        if value is None:
            return ""
        # Escape everything except Markup, which only our own macros make.
        is_text = isinstance(value, str) and not isinstance(value, Markup)
        return clip(visible(str(value)), limits.text) if is_text else value

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_STATIC),
        autoescape=True,
        # A misspelt name in a template is an error, where it would draw nothing.
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(words=words)
    environment.filters.update(short_path=short_path, whole=_whole)
    environment.filters["brief"] = partial(words.elide, limit=_NAME)
    environment.filters["coded"] = partial(_coded, limits.text)
    return environment


def _facts_of(report: Report, drawn: strip.Strip | None, limits: _Limits) -> dict[str, Any]:
    """Return the variables for the templates."""
    figure = figures.figure(report)
    fold = _fold(figure)
    # Beside a picture there is no room beyond the fold.
    parts = screen.build(report, fold=fold, label_room=0 if figure else screen.LABEL_ROOM)
    parts = _with_place_beside_code(report, parts)
    gutter = max(map(_gutter, parts.blocks), default=0)
    return {
        "report": report,
        "screen": parts,
        "figure": figure,
        "shown_tensors": screen.SHOWN_TENSORS,
        "page": words.page_link(report),
        "strip": drawn,
        "graph_rows": strip.graph_rows(report),
        "entries": history_entries(report),
        "limits": limits,
        "gutter": gutter,
        "is_far": any(
            row.is_label and gutter + len(row.text) > _FAR
            for block in parts.blocks
            for row in block.rows
        ),
        "number": partial(_number, gutter),
        "padding": partial(_padding, fold, gutter),
        "group": _group(report),
        "origin": screen.origin(report),
        "details": screen.details(report),
        "values_line": _values_line(report),
        "markdown": _Long(markdown.render_with(report, drawn)),
        "drawers": _drawers(report, drawn),
        "tensor_table": _table(
            _TENSOR_HEADS, [_tensor_cells(report, fact) for fact in report.tensors]
        ),
        "bad_table": _bad_table(report),
    }


def _with_place_beside_code(report: Report, parts: screen.Screen) -> screen.Screen:
    """Move a place that is the only fact beside the code, which saves a line."""
    said = [screen.plain(fact) for fact in parts.facts]
    is_alone = said == [words.format_place(report.source)] and words.page_link(report) is None
    if not is_alone or len(parts.blocks) != 1 or report.source is None:
        return parts
    title = words.place_name(report.source.cell, report.source.file)
    return replace(parts, facts=(), blocks=(replace(parts.blocks[0], title=title),))


def _fold(figure: figures.Figure | None) -> int:
    return WIDE if figure is None else max(int((_PANE - figure.width) / _COLUMN), LEAST)


class _Long(Markup):
    """Multi-line text that is escaped here, and not clipped."""

    def __new__(cls, text: str) -> _Long:
        return super().__new__(cls, escape(visible(text)))


def _gutter(block: Block) -> int:
    digits = max((len(str(row.number)) for row in block.rows if row.number), default=1)
    return len(block.title) + digits + (1 if block.title else 2)


def _number(gutter: int, block: Block, row: Row, is_first: bool) -> str:
    title = block.title if is_first else ""
    number = str(row.number) if row.number else ""
    return f"{title}{number:>{gutter - len(title)}}  "


def _padding(fold: int, gutter: int, block: Block, row: Row) -> str:
    """Return the padding that aligns the marks of a block.

    Beside a picture there may be no room: then marks are drawn below their lines.
    """
    marked = [other for other in block.rows if other.marks]
    beside = [other for other in marked if len(other.text) + _said(other) <= fold]
    if row not in beside:
        return f"\n{' ' * (gutter + 6)}"
    column = min(max(len(other.text) for other in beside), fold - max(map(_said, beside)))
    return " " * (max(column - len(row.text), 0) + 2)


def _said(row: Row) -> int:
    """Return how many columns the marks of a row take, with the padding."""
    # The font of a mark is narrower than that of the code.
    return sum(int(len(mark) * 0.9) + 6 for mark in row.marks)


def _coded(limit: int, text: str) -> Markup:
    """Return a sentence as HTML, with parts in backticks as code."""
    cleaned = str(escape(clip(visible(text), limit)))
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", cleaned))


def _whole(report: Report) -> Markup:
    """Return a rank's report as text."""
    return Markup.escape(replace(report, ranks=()).to_text(width=100))


def _drawers(report: Report, drawn: strip.Strip | None) -> tuple[Drawer, ...]:
    """Return the drawers that are not empty for this report."""
    offenders = report.offenders
    has_graph = drawn is not None or bool(report.graph.nodes)
    is_open = drawn is not None and report.kind in _OPEN_GRAPH
    drawers = (
        (report.ranks, Drawer("Ranks", len(report.ranks), "ranks")),
        (has_graph, Drawer("Graph", None, "graph", is_open)),
        (offenders and offenders.first, Drawer("Values", None, "values")),
        (screen.origin(report), Drawer("Origin", None, "origin")),
        (report.tensors, Drawer("Tensors", len(report.tensors), "tensors")),
        (report.history, Drawer("History", len(report.history), "history")),
        (report.frames, Drawer("Call stack", len(report.frames), "stack")),
        (True, Drawer("Details", None, "details")),
        (True, Drawer("Share", None, "share")),
    )
    return tuple(drawer for has_facts, drawer in drawers if has_facts)


def _values_line(report: Report) -> str:
    offenders = report.offenders
    if offenders is None:
        return ""
    shown = len(offenders.first)
    first = f"the first {shown} of " if offenders.count > shown else ""
    allowed = words.format_bounds(report)
    others = f"; all others {offenders.others}" if offenders.others else ""
    marked = f"; {offenders.allowed} more are allowed" if offenders.allowed else ""
    bounds = f"; allowed: {allowed}" if allowed else ""
    return f"{first}{offenders.count} bad of {offenders.total}{others}{marked}{bounds}"


_Table: TypeAlias = tuple[list[str], list[list[str]]]


def _table(heads: Iterable[str], rows: Sequence[Mapping[str, str]]) -> _Table:
    """Return the heads and rows of a table, without empty columns."""
    columns = [head for head in heads if any(row.get(head) for row in rows)]
    return columns, [[row.get(head) or "–" for head in columns] for row in rows]


def _bad_table(report: Report) -> _Table:
    """Return the table of bad values, with inputs and dataset indices if known."""
    first = report.offenders.first if report.offenders else ()
    rows = [
        {
            "position": words.bad_place(report, item),
            "value": words.format_number(item.value),
            _SAMPLE: "" if item.sample is None else str(item.sample),
        }
        | {f"from {words.one_line(name)}": words.format_number(it) for name, it in item.inputs}
        for item in first
    ]
    inputs = dict.fromkeys(head for row in rows for head in list(row)[3:])
    return _table(("position", "value", *inputs, _SAMPLE), rows)


def _tensor_cells(report: Report, fact: TensorFact) -> dict[str, str]:
    summary = fact.summary
    offenders = report.offenders if words.is_at_fault(report, fact) else None
    counted = {name: getattr(summary, name) for name in ("min", "max", "mean", "nan", "inf")}
    return {
        "tensor": words.tensor_name(fact),
        "argument": fact.argument or "",
        "shape": format_shape(fact.shape),
        "dtype": fact.dtype,
        "device": fact.device,
        "stride": format_shape(fact.stride),
        "grad": fact.grad_fn or ("leaf" if fact.requires_grad else ""),
        "bad": str(offenders.count) if offenders and offenders.count else "",
        **{key: words.format_number(value) for key, value in counted.items() if value is not None},
        "distinct": ", ".join(map(str, summary.unique or ())),
    }


def tensor_line(report: Report, fact: TensorFact) -> str:
    """Return name and type of a tensor: ``y  i64[32], 3 bad``."""
    return f"{words.tensor_name(fact)}  {words.tensor_label(report, fact)}"


def tensor_facts(report: Report, fact: TensorFact) -> list[tuple[str, str]]:
    """Return the facts about one tensor: type, memory, values, the first bad ones."""
    facts = [(name, text) for name, text in _tensor_cells(report, fact).items() if text]
    counts = figures.value_counts(fact)
    if counts is not None:
        told = [f"{value}: {count}" for value, count in counts if count]
        facts.append(("how often", ", ".join(told)))
    offenders = report.offenders
    if offenders is not None and (words.is_at_fault(report, fact) or fact.bad_at is not None):
        bad = [
            f"{words.bad_place(report, item)} = {words.format_number(item.value)}"
            for item in offenders.first
        ]
        facts.append(("bad values", ", ".join(bad)))
        facts.append(("allowed", words.format_bounds(report)))
    return [(name, words.one_line(text)) for name, text in facts if text]


def _group(report: Report) -> str:
    # One drawer of a report is open at a time, independent of other reports in the notebook.  The
    # clock stays out, or the same failure would never give the same output twice.
    content = (
        report.kind,
        report.headline,
        words.format_place(report.source),
        words.format_op_path(report.op),
        report.timing.recorded_ops,
    )
    return f"cl-{hashlib.sha256(repr(content).encode()).hexdigest()[:12]}"
