"""The tabs below the code and the graph, with the rows of the tensor at fault."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
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


def row_labels(report: Report) -> tuple[str, ...]:
    """Return the name of each row of the map, empty when there is only one or none to look into.

    A map has at most 32 rows: where the tensor has more, one row of it stands for several.
    """
    grid, shape = _grid(report), _shape(report)
    if grid is None or grid.rows < _DIMENSIONS or len(shape) <= _DIMENSIONS:
        return ()
    return tuple(
        f"{start}" if stop == start + 1 else f"{start}–{stop - 1}"
        for start, stop in _spans(shape[0], grid.rows)
    )


def first_bad_row(report: Report) -> int:
    """Return the number of the first row of the map with a bad value."""
    grid = _grid(report)
    sums = [sum(_row(grid, at).bad) for at in range(grid.rows)] if grid else []
    return next((at for at, count in enumerate(sums) if count), 0)


def row_title(report: Report, at: int) -> str:
    """Return the name of row ``at`` with what is wrong in it."""
    grid = _grid(report)
    bad = sum(_row(grid, at).bad) if grid else 0
    name = one_line(report.expression or report.argument or "values")
    told = "no bad value" if not bad else f"{bad} bad"
    return f"{name}[{row_labels(report)[at]}]: {told}"


def row_svg(report: Report, at: int) -> Markup:
    """Draw the values of row ``at`` by position, each bar from the least to the greatest."""
    grid, shape = _grid(report), _shape(report)
    if grid is None:
        return Markup("")
    start, stop = _spans(shape[0], grid.rows)[at]
    total = (stop - start) * math.prod(shape[1:])
    line = _row(grid, at)
    found = Offenders(count=sum(line.bad), total=total, map=line)
    return value_map_svg(replace(report, offenders=found))


def _grid(report: Report) -> OffenderMap | None:
    return report.offenders.map if report.offenders else None


def _shape(report: Report) -> tuple[int, ...]:
    return next((fact.shape for fact in report.tensors if words.is_at_fault(report, fact)), ())


def _row(grid: OffenderMap, at: int) -> OffenderMap:
    part = slice(at * grid.columns, (at + 1) * grid.columns)
    return OffenderMap(
        rows=1,
        columns=grid.columns,
        bad=grid.bad[part],
        low=grid.low[part],
        high=grid.high[part],
    )


def _spans(size: int, parts: int) -> list[tuple[int, int]]:
    # As torch.tensor_split cuts: the first ``size % parts`` parts are one longer.
    sizes = [size // parts + (at < size % parts) for at in range(parts)]
    ends = list(accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


_TEXT_LIMIT = 20_000


def tabs(report: Report, facts: dict[str, Any]) -> ipywidgets.Tab:
    """Return the tabs that this report has something for, in the order of the questions."""
    shown = facts["tabs"]
    children = [_content(tab.part, report, facts) for tab in shown]
    widget = ipywidgets.Tab(children, selected_index=0)
    widget.titles = [
        tab.label if tab.things is None else f"{tab.label} {tab.things}" for tab in shown
    ]
    return widget


def _content(part: str, report: Report, facts: dict[str, Any]) -> ipywidgets.Widget:
    if part == "values":
        return _values(report, facts)
    if part == "history":
        return _history(report, facts)
    if part == "environment":
        return _environment(report, facts)
    return markup(draw_part(part, facts))


def _values(report: Report, facts: dict[str, Any]) -> ipywidgets.Widget:
    whole = markup(draw_part("values", facts))
    labels = row_labels(report)
    if not labels:
        return whole
    slider = ipywidgets.SelectionSlider(
        options=[(label, at) for at, label in enumerate(labels)],
        value=first_bad_row(report),
        description="row",
        continuous_update=False,
    )
    shown = markup()

    def show(change: dict[str, Any]) -> None:
        at = change["new"]
        shown.value = draw_part(
            "lens_row",
            {
                **facts,
                "row_title": row_title(report, at),
                "row": row_svg(report, at),
            },
        )

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
        kept = tuple(item for item in entries if text in _searched(item.entry))
        shown.value = draw_part("history", {**facts, "entries": kept})
        count.value = f"{len(kept)} of {len(entries)} ops" if text else ""

    wanted.observe(show, "value")
    return stack(line(wanted, count, name="cl-tools"), shown)


def _searched(entry: HistoryEntry) -> str:
    parts = (
        entry.op,
        entry.shapes,
        words.format_line(entry.source),
        entry.module_path,
        entry.phase,
    )
    return " ".join(filter(None, parts)).casefold()


def _environment(report: Report, facts: dict[str, Any]) -> ipywidgets.Widget:
    text = Markup(escape(report.to_text()[:_TEXT_LIMIT]))
    return stack(
        markup(draw_part("environment", facts)),
        markup(draw_part("lens_text", {**facts, "text_lines": text})),
    )
