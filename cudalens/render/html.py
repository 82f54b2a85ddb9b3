"""The report as HTML: a fragment for a notebook's output, and a page that stands alone.

Neither needs a script.  A reader whose front end drops styles and pictures still gets the verdict,
the code, the facts in tables and their order.
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
from cudalens.render import figures, graph, words
from cudalens.render.code import code_rows, unplaced_tensors
from cudalens.render.inline import inlined
from cudalens.render.svg import PALETTES
from cudalens.render.words import clip, headline, visible

MAX_BYTES = 200_000
_SAMPLE = "dataset item"
_TENSOR_HEADS = (
    *("tensor", "argument", "shape", "dtype", "device", "stride", "grad", "bad"),
    *("min", "max", "mean", "nan", "inf", "distinct"),
)
WIDE, NARROW = 70, 37
"""Columns after which the failing line is folded, in a wide pane and in a narrow one."""
_STATIC = Path(__file__).with_name("static")


@dataclass(frozen=True, kw_only=True)
class _Limits:
    """Limits of the lists and texts that are drawn; the JSON form always has the whole."""

    history: int
    rows: int
    text: int


_FRAGMENT = _Limits(history=50, rows=40, text=1500)
_PAGE = _Limits(history=200, rows=80, text=3000)
_SMALL = _Limits(history=40, rows=20, text=300)
_TINY = _Limits(history=8, rows=6, text=60)


class Tab(NamedTuple):
    """One tab: its name, how many things it lists, and the block that draws it."""

    label: str
    things: int | None
    part: str


def render_fragment(report: Report) -> str:
    """Draw ``report`` for a notebook's output cell; its styles touch nothing else on the page."""

    def draw(limits: _Limits) -> str:
        return inlined(_drawn("fragment.html.j2", report, limits), style_sheet())

    return _fitting(draw, _FRAGMENT)


def render_page(report: Report) -> str:
    """Draw ``report`` as one self-contained HTML file of less than 200 kB."""
    return _fitting(partial(_drawn, "page.html.j2", report), _PAGE)


def draw_part(name: str, facts: dict[str, Any]) -> Markup:
    """Draw one of the blocks of ``parts.html.j2``, from the facts that :func:`facts_of` gave."""
    environment = _environment(facts["limits"])
    macros = environment.get_template("macros.html.j2").make_module(facts)
    parts = environment.get_template("parts.html.j2")
    drawn = parts.blocks[name](parts.new_context({**facts, "ui": macros}))
    return Markup("".join(drawn).strip("\n"))


class Ops(NamedTuple):
    """Equal ops in a row: how many, the latest with its place in the report, and its line."""

    times: int
    at: int | None
    entry: HistoryEntry
    is_failed: bool = False


def history_entries(report: Report) -> tuple[Ops, ...]:
    """Return the failed op and the recorded ones before it, latest first, equal ones as one."""
    runs = groupby(enumerate(report.history), key=lambda item: replace(item[1], seq=0))
    equal = [list(run) for _, run in runs]
    entries = [Ops(len(run), *run[-1]) for run in equal]
    if report.history and report.op.name and report.phase != "unknown":
        entries.append(Ops(1, None, _failed_entry(report), is_failed=True))
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


def short_path(file: str) -> str:
    """Return the end of a path, where a reader looks: ``nn/functional.py``."""
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


def _drawn(template: str, report: Report, limits: _Limits) -> str:
    facts = facts_of(report, limits)
    if template == "fragment.html.j2" and facts["narrow"]:
        # Nobody says how wide an untrusted page is, nor hides one of two there.
        facts |= {"rows": facts["narrow"], "narrow": ()}
    facts["part"] = partial(draw_part, facts=facts)
    return _environment(limits).get_template(template).render(facts)


@cache
def _environment(limits: _Limits) -> jinja2.Environment:
    def finalize(value: object) -> object:
        if value is None:
            return ""
        # Markup comes from our own macros and pictures; all else is somebody's text.
        is_text = isinstance(value, str) and not isinstance(value, Markup)
        return clip(visible(str(value)), limits.text) if is_text else value

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_STATIC),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(words=words, figures=figures, graphs=graph)
    environment.filters.update(short_path=short_path, whole=_whole)
    environment.filters["coded"] = partial(_coded, limits.text)
    return environment


def facts_of(report: Report, limits: _Limits = _FRAGMENT) -> dict[str, Any]:
    """Return what the templates draw of ``report``, by name."""
    report = words.with_module_names(report)
    rows, loose = code_rows(report, fold=WIDE), unplaced_tensors(report)
    narrow = code_rows(report, fold=NARROW)
    value_map = figures.value_map_svg(report)
    faulty = next((fact for fact in report.tensors if words.is_at_fault(report, fact)), None)
    histogram = faulty and figures.histogram_svg(faulty, report.bounds, report.offenders)
    return {
        "report": report,
        "found": report.offenders,
        "entries": history_entries(report),
        # The static views link nothing; the interactive one puts its own function in this place.
        "keyed": lambda kind, at: Markup(""),
        "tabs": _tabs(report, value_map),
        "told": rows or loose or report.explanation or words.way(report) or report.forward_source,
        "limits": limits,
        "style": style_sheet(),
        "palettes": PALETTES,
        "group": _group(report),
        "subline": _subline(report),
        "rows": rows,
        "narrow": narrow if narrow != rows else (),
        "loose": loose,
        "tensor_table": _table(
            _TENSOR_HEADS, [_tensor_cells(report, fact) for fact in report.tensors]
        ),
        "bad_table": _bad_table(report),
        "map": value_map,
        "faulty": faulty,
        "histogram": histogram,
        "graph": graph.graph_svg(
            report.graph, prevented=report.prevented, types=words.module_types(report)
        ),
    }


def _coded(limit: int, text: str) -> Markup:
    """Return a sentence; parts in backticks become code."""
    cleaned = str(escape(clip(visible(text), limit)))
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", cleaned))


def _whole(report: Report) -> Markup:
    """Return a rank's report as text; the JSON form has it whole."""
    return Markup.escape(replace(report, ranks=()).to_text(width=WIDE + 30))


def _tabs(report: Report, value_map: Markup) -> tuple[Tab, ...]:
    """Return the tabs that this report has something for, in the order of the questions."""
    offenders = report.offenders
    tabs = (
        (report.ranks, Tab("Ranks", len(report.ranks), "ranks")),
        (offenders and (offenders.first or value_map), Tab("Values", None, "values")),
        (report.tensors, Tab("Tensors", len(report.tensors), "tensors")),
        (report.history, Tab("History", len(report.history), "history")),
        (report.hints[1:] or report.limits, Tab("Why", None, "why")),
        (words.replay_line(report) or report.device_text, Tab("Replay on CPU", None, "replay")),
        (report.frames, Tab("Call stack", len(report.frames), "stack")),
        (True, Tab("Environment", None, "environment")),
    )
    return tuple(tab for has_facts, tab in tabs if has_facts)


_Table: TypeAlias = tuple[list[str], list[list[str]]]


def _table(heads: Iterable[str], rows: Sequence[Mapping[str, str]]) -> _Table:
    """Return the heads and rows of a table, without columns that nobody filled."""
    columns = [head for head in heads if any(row.get(head) for row in rows)]
    return columns, [[row.get(head) or "–" for head in columns] for row in rows]


def _bad_table(report: Report) -> _Table:
    """Return the table of bad values, with their inputs and their dataset indices where known."""
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
        "shape": words.format_shape(fact.shape),
        "dtype": fact.dtype,
        "device": fact.device,
        "stride": words.format_shape(fact.stride),
        "grad": fact.grad_fn or ("leaf" if fact.requires_grad else ""),
        "bad": str(offenders.count) if offenders and offenders.count else "",
        **{key: words.format_number(value) for key, value in counted.items() if value is not None},
        "distinct": ", ".join(map(str, summary.unique or ())),
    }


def _subline(report: Report) -> tuple[tuple[str, str], ...]:
    """Return the facts under the headline, each with its look."""
    facts = (
        ("plain", words.ranks_line(report)),
        ("plain", words.bad_count(report)),
        ("plain", words.earlier_calls(report)),
        ("code", words.format_op_path(report.op)),
        ("argument", words.format_argument(report)),
        ("plain", words.format_place(report.source)),
        ("code", report.module_path or ""),
        ("plain", report.phase if report.phase != "unknown" else ""),
        ("plain", words.certainty(report)),
    )
    return tuple((look, text) for look, text in facts if text)


def _group(report: Report) -> str:
    # Only one tab of a report is open at a time, whatever other reports the notebook shows.  The
    # clock stays out, or the same failure would never give the same output twice.
    content = (
        report.kind,
        headline(report),
        words.format_place(report.source),
        words.format_op_path(report.op),
        report.timing.recorded_ops,
    )
    return f"cl-{hashlib.sha256(repr(content).encode()).hexdigest()[:12]}"
