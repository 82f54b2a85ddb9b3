"""The tabs below the code and the graph, with the rows of the tensor at fault."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import ipywidgets
from markupsafe import Markup, escape

from cudalens.core.report import HistoryEntry, Offender, OffenderMap, Offenders, Report
from cudalens.render import words
from cudalens.render.figures import value_map_svg
from cudalens.render.html import draw_part, history_entries
from cudalens.render.lens.parts import button, line, markup, stack
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


def row_offenders(report: Report, at: int) -> tuple[Offender, ...]:
    """Return those of the listed bad values that lie in row ``at``."""
    grid, shape = _grid(report), _shape(report)
    if grid is None or report.offenders is None:
        return ()
    start, stop = _spans(shape[0], grid.rows)[at]
    return tuple(item for item in report.offenders.first if start <= item.position[0] < stop)


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


Keep: TypeAlias = Callable[[], None] | None

_TEXT_LIMIT = 20_000
_KEEP = "Keep in notebook"
_KEEP_TIP = "put the static report in the place of this view: it needs no kernel when reopened"
# Read only where the view is still there, which is where no output answers to its name any more.
_NOT_KEPT = "not kept: this page was loaded after the cell ran; run it again, or save the HTML"


def tabs(report: Report, facts: dict[str, Any], keep: Keep) -> ipywidgets.Widget:
    """Return the tabs that this report has something for, in the order of the questions."""
    saver = _Saver(report, keep)
    shown = facts["tabs"]
    children = [_content(tab.part, report, facts, saver) for tab in shown]
    widget = ipywidgets.Tab(children, selected_index=0)
    widget.titles = [
        tab.label if tab.things is None else f"{tab.label} {tab.things}" for tab in shown
    ]
    if keep is None:
        return widget

    def kept() -> None:
        widget.selected_index = len(shown) - 1  # where it is told if nothing came of it
        saver.keep()

    corner = line(button(_KEEP, _KEEP_TIP, kept), name="cl-tools cl-keep")
    return stack(corner, widget, name="cl-tabbed")


def _content(part: str, report: Report, facts: dict[str, Any], saver: _Saver) -> ipywidgets.Widget:
    if part == "values":
        return _values(report, facts)
    if part == "history":
        return _history(report, facts)
    if part == "environment":
        return _environment(report, facts, saver)
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
                "row_offenders": row_offenders(report, at),
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
        kept = tuple(item for item in entries if text in _searched(item[1]))
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


def _environment(report: Report, facts: dict[str, Any], saver: _Saver) -> ipywidgets.Widget:
    text = Markup(escape(report.to_text()[:_TEXT_LIMIT]))
    return stack(
        markup(draw_part("environment", facts)),
        line(*saver.buttons(), saver.status, name="cl-tools"),
        markup(draw_part("lens_text", {**facts, "text_lines": text})),
    )


class _Saver:
    """Keeps the report beyond the life of the kernel, and says what came of it."""

    def __init__(self, report: Report, keep: Keep) -> None:
        self._report = report
        self._keep = keep
        self.status = markup("", "cl-status")

    def buttons(self) -> Iterator[ipywidgets.Button]:
        """Return one button for each way that there is."""
        if self._keep is not None:
            yield button(_KEEP, _KEEP_TIP, self.keep)
        for suffix in (".html", ".json"):
            label = suffix.removeprefix(".").upper()
            save = partial(self._save, suffix)
            yield button(f"Save {label}", f"write this report to a {label} file", save)

    def keep(self) -> None:
        """Put the static report in the place of the view."""
        if self._keep is not None:
            self._keep()
            self._tell(_NOT_KEPT)

    def _save(self, suffix: str) -> None:
        try:
            told = f"saved as {save_beside(self._report, suffix)}"
        except OSError as error:
            told = f"not saved: {error}"
        self._tell(told)

    def _tell(self, text: str) -> None:
        self.status.value = f'<span role="status">{escape(text)}</span>'


def save_beside(report: Report, suffix: str) -> Path:
    """Write the report into the working directory under a name that is still free."""
    for number in itertools.count(1):
        path = Path(f"cudalens_report_{number}{suffix}")
        if not path.exists():
            break
    return report.save(path)
