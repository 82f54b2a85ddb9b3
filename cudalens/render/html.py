"""The report as HTML: a fragment for a notebook's output, and a page that stands alone.

Neither needs a script.  A reader whose front end drops styles and pictures still gets the verdict,
the code, the facts in tables and their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from cudalens.core.report import HistoryEntry, Report, TensorFact
from cudalens.render import figures, graph, words
from cudalens.render.calls import module_types, with_calls
from cudalens.render.code import code_rows, unplaced_tensors
from cudalens.render.fold import CALLS, fold
from cudalens.render.headline import headline, headline_parts
from cudalens.render.inline import inlined
from cudalens.render.svg import PALETTES
from cudalens.render.words import clip, visible

MAX_BYTES = 200_000
_SLIM = 3  # boxes of a graph that says little and makes room
WIDE, NARROW = 70, 37
"""Columns after which the failing line is folded, in a wide pane and in a narrow one."""
_STATIC = Path(__file__).with_name("static")


@dataclass(frozen=True, kw_only=True)
class _Limits:
    """How much of each list and text is drawn; the JSON form always has the whole."""

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


def facts_of(report: Report) -> dict[str, Any]:
    """Return what the templates draw of ``report`` in a notebook, by name."""
    return _facts(report, _FRAGMENT)


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
    found: list[Ops] = []
    for at, entry in enumerate(report.history):
        last = found[-1] if found else None
        if last is not None and replace(last.entry, seq=entry.seq) == entry:
            found[-1] = Ops(last.times + 1, at, entry)
        else:
            found.append(Ops(1, at, entry))
    if report.history and report.op.name and report.phase != "unknown":
        found.append(Ops(1, None, _failed_entry(report), is_failed=True))
    return tuple(found[::-1])


def _failed_entry(report: Report) -> HistoryEntry:
    source = report.source.ref if report.source else None
    given = [words.format_tensor_type(fact) for fact in report.tensors if fact.argument]
    return HistoryEntry(
        seq=report.history[-1].seq + 1,
        op=words.format_op(report.op),
        shapes=", ".join(given),
        source=source,
        module_path=report.module_path,
        phase=report.phase,
    )


def short_path(file: str) -> str:
    """Return the end of a path, where a reader looks: ``nn/functional.py``."""
    return "/".join(file.replace("\\", "/").split("/")[-2:])


def _unkeyed(kind: str | None, at: int | None) -> Markup:
    # The static views link nothing; the interactive one puts its own function in this place.
    return Markup("")


def style_sheet() -> str:
    """Return the style sheet of every view; all its rules are scoped under ``.cudalens``."""
    return str(_style_sheet())


@cache
def _style_sheet() -> Markup:
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
    facts = {**_facts(report, limits), "title": headline(report)}
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
    environment.filters.update(
        number=words.format_number,
        shape=words.format_shape,
        place=words.format_place,
        spot=words.format_line,
        short_path=short_path,
    )
    return environment


def _facts(report: Report, limits: _Limits) -> dict[str, Any]:
    report = with_calls(report)
    head, rest = headline_parts(report)
    heads, tensor_rows = _tensor_table(report)
    rows, loose = code_rows(report, device=True, fold=WIDE), unplaced_tensors(report)
    narrow = code_rows(report, device=True, fold=NARROW)
    value_map, replay = figures.value_map_svg(report), words.replay_line(report)
    return {
        "report": report,
        "found": report.offenders,
        "entries": history_entries(report),
        "keyed": _unkeyed,
        "tabs": tuple(_tabs(report, value_map, replay)),
        "told": rows or loose or report.explanation or report.provenance or report.forward_source,
        "limits": limits,
        "style": _style_sheet(),
        "palettes": PALETTES,
        "group": _group(report),
        "sign": words.sign(report),
        "tone": words.tone(report),
        "head": head,
        "rest": rest,
        "subline": _subline(report),
        "page": words.error_page(report),
        "state": words.context_state(report),
        "cuda": words.cuda_line(report),
        "replay": replay,
        "environment": words.environment(report),
        "certainty": words.certainty(report),
        "kind": words.KINDS.get(report.kind, report.kind),
        "bounds": words.format_bounds(report),
        "way": words.way(report),
        "rehearsal": words.REHEARSAL if report.environment.simulated else "",
        "rows": rows,
        "narrow": narrow if narrow != rows else (),
        "loose": loose,
        "tensor_heads": heads,
        "tensor_rows": tensor_rows,
        "map": value_map,
        **_pictures(report),
    }


def _pictures(report: Report) -> dict[str, Any]:
    accused = next((fact for fact in report.tensors if words.is_at_fault(report, fact)), None)
    return {
        "map_title": figures.value_map_title(report),
        "accused": accused,
        "histogram": figures.histogram_svg(accused, report.bounds, report.offenders)
        if accused
        else Markup(""),
        "graph": graph.graph_svg(
            report.graph, prevented=report.prevented, types=module_types(report)
        ),
        "is_slim": len(fold(report.graph)[0]) <= _SLIM,
        "graph_heading": "Calls up to the error, in the order they ran"
        if report.graph.focus == CALLS
        else "Autograd graph around the failure",
        "graph_title": graph.graph_title(report.graph),
        "graph_rows": graph.graph_rows(report.graph),
    }


def _tabs(report: Report, value_map: Markup, replay: str) -> Iterator[Tab]:
    """Return the tabs that this report has something for, in the order of the questions."""
    found = report.offenders
    if found and (found.first or value_map):
        yield Tab("Values", None, "values")
    if report.tensors:
        yield Tab("Tensors", len(report.tensors), "tensors")
    if report.history:
        yield Tab("History", len(report.history), "history")
    if report.hints[1:] or report.limits:
        yield Tab("Why", None, "why")
    if replay or report.device_text:
        yield Tab("Replay on CPU", None, "replay")
    if report.frames:
        yield Tab("Call stack", len(report.frames), "stack")
    yield Tab("Environment", None, "environment")


def _tensor_table(report: Report) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the heads and rows of the tensor table, without columns that nobody filled."""
    rows = [_tensor_cells(report, fact) for fact in report.tensors]
    heads = [head for head in rows[0] if any(row[head] for row in rows)] if rows else []
    return tuple(heads), tuple(tuple(row[head] or "–" for head in heads) for row in rows)


def _tensor_cells(report: Report, fact: TensorFact) -> dict[str, str]:
    summary = fact.summary
    found = report.offenders if words.is_at_fault(report, fact) else None
    counted = {"min": summary.min, "max": summary.max, "mean": summary.mean}
    counted |= {"nan": summary.nan, "inf": summary.inf}
    distinct = "" if summary.unique is None else ", ".join(map(str, summary.unique))
    return {
        "tensor": words.tensor_name(fact),
        "argument": fact.argument or "",
        "shape": words.format_shape(fact.shape),
        "dtype": fact.dtype,
        "device": fact.device,
        "stride": words.format_shape(fact.stride),
        "grad": fact.grad_fn or ("leaf" if fact.requires_grad else ""),
        "bad": str(found.count) if found and found.count else "",
        **{
            key: "" if value is None else words.format_number(value)
            for key, value in counted.items()
        },
        "distinct": distinct,
    }


def _subline(report: Report) -> tuple[tuple[str, str], ...]:
    """Return the facts under the headline, each with its look."""
    facts = (
        ("plain", words.bad_count(report)),
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
