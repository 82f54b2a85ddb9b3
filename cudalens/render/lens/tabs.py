"""The tabs below the code and the graph, with the rows of the tensor at fault."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ipywidgets
from markupsafe import Markup, escape

from cudalens.core.report import HistoryEntry, OffenderMap, Offenders, Report
from cudalens.render import words
from cudalens.render.figures import value_map_svg
from cudalens.render.html import draw_part, history_entries
from cudalens.render.lens.parts import line, markup, stack
from cudalens.render.words import one_line

_DIMENSIONS = 2


def map_rows(report: Report) -> list[tuple[str, Offenders]]:
    """Return name and bad values of each row of the map, none where it has no rows to look into.

    A map has at most 32 rows: where the tensor has more, one row of it stands for several.
    """
    grid = report.offenders.map if report.offenders else None
    shape = next((fact.shape for fact in report.tensors if words.is_at_fault(report, fact)), ())
    if grid is None or grid.rows < _DIMENSIONS or len(shape) <= _DIMENSIONS:
        return []
    rows, start = [], 0
    for at in range(grid.rows):
        # As torch.tensor_split cuts: the first ``size % parts`` parts are one longer.
        stop = start + shape[0] // grid.rows + (at < shape[0] % grid.rows)
        part = slice(at * grid.columns, (at + 1) * grid.columns)
        values = {name: getattr(grid, name)[part] for name in ("bad", "low", "high")}
        row = OffenderMap(rows=1, columns=grid.columns, **values)
        total = (stop - start) * math.prod(shape[1:])
        label = f"{start}" if stop == start + 1 else f"{start}–{stop - 1}"
        rows.append((label, Offenders(count=sum(row.bad), total=total, map=row)))
        start = stop
    return rows


_TEXT_LIMIT = 20_000


def tabs(report: Report, facts: dict[str, Any]) -> ipywidgets.Tab:
    """Return the tabs that this report has something for, in the order of the questions."""
    shown = facts["tabs"]
    children = [_content(tab.part, report, facts) for tab in shown]
    titles = [tab.label if tab.things is None else f"{tab.label} {tab.things}" for tab in shown]
    view = ipywidgets.Tab(children, selected_index=0)
    for at, title in enumerate(titles):
        view.set_title(at, title)  # ipywidgets 7 takes no list of titles
    return view


def _content(part: str, report: Report, facts: dict[str, Any]) -> ipywidgets.Widget:
    own = {"values": _values, "history": _history, "environment": _environment}.get(part)
    return markup(draw_part(part, facts)) if own is None else own(report, facts)


def _values(report: Report, facts: dict[str, Any]) -> ipywidgets.Widget:
    whole = markup(draw_part("values", facts))
    rows = map_rows(report)
    if not rows:
        return whole
    slider = ipywidgets.SelectionSlider(
        options=[(label, at) for at, (label, _) in enumerate(rows)],
        value=next((at for at, (_, offenders) in enumerate(rows) if offenders.count), 0),
        description="row",
        continuous_update=False,
    )
    shown = markup()

    def show(change: dict[str, Any]) -> None:
        label, offenders = rows[change["new"]]
        count = f"{offenders.count} bad" if offenders.count else "no bad value"
        title = f"{one_line(report.expression or report.argument or 'values')}[{label}]: {count}"
        row = value_map_svg(replace(report, offenders=offenders))
        shown.value = draw_part("lens_row", {**facts, "row_title": title, "row": row})

    slider.observe(show, "value")
    show({"new": slider.value})
    return stack(whole, line(slider, name="cl-tools"), shown)


def _history(report: Report, facts: dict[str, Any]) -> ipywidgets.Widget:
    entries = history_entries(report)
    shown = markup(draw_part("history", facts))
    wanted = ipywidgets.Text(
        description="filter", placeholder="op, shape, line or module", continuous_update=True
    )
    count = markup("", "cl-status")

    def show(change: dict[str, Any]) -> None:
        text = change["new"].strip().casefold()
        matches = tuple(item for item in entries if text in _searched(item.entry))
        shown.value = draw_part("history", {**facts, "entries": matches})
        count.value = f"{len(matches)} of {len(entries)} ops" if text else ""

    wanted.observe(show, "value")
    return stack(line(wanted, count, name="cl-tools"), shown)


def _searched(entry: HistoryEntry) -> str:
    where = words.format_line(entry.source)
    parts = (entry.op, entry.shapes, where, entry.module_path, entry.phase)
    return " ".join(filter(None, parts)).casefold()


def _environment(report: Report, facts: dict[str, Any]) -> ipywidgets.Widget:
    text = Markup(escape(report.to_text()[:_TEXT_LIMIT]))
    return stack(
        markup(draw_part("environment", facts)),
        markup(draw_part("lens_text", {**facts, "text_lines": text})),
    )
