"""The tabs below: values, tensors, history, causes, replay, call stack, environment."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipywidgets
from markupsafe import Markup, escape

from cudalens.model import HistoryEntry, Report
from cudalens.render import words
from cudalens.render.html import draw_part, history_entries
from cudalens.render.lens import rows
from cudalens.render.lens.parts import button, line, markup, stack

_TEXT_LIMIT = 20_000


def tabs(report: Report, facts: dict[str, Any]) -> ipywidgets.Tab:
    """Give the tabs that this report has something for, in the order of the questions."""
    shown = list(_tabs(report, facts))
    widget = ipywidgets.Tab([child for _, child in shown], selected_index=0)
    widget.titles = [title for title, _ in shown]
    return widget


def _tabs(report: Report, facts: dict[str, Any]) -> Iterator[tuple[str, ipywidgets.Widget]]:
    found = report.offenders
    if found and (found.first or facts["map"]):
        yield "Values", _values(report, facts)
    if report.tensors:
        yield f"Tensors {len(report.tensors)}", _part("tab_tensors", facts)
    if report.history:
        yield f"History {len(report.history)}", _history(report, facts)
    if report.hints or report.provenance or report.limits:
        yield "Why", _part("tab_why", facts)
    if facts["replay"] or facts["cuda"]:
        yield "Replay on CPU", _part("tab_replay", facts)
    if report.frames:
        yield f"Call stack {len(report.frames)}", _part("tab_stack", facts)
    yield "Environment", _environment(report, facts)


def _part(name: str, facts: dict[str, Any]) -> ipywidgets.HTML:
    return markup(draw_part(f"{name}.html.j2", facts))


def _values(report: Report, facts: dict[str, Any]) -> ipywidgets.Widget:
    whole = _part("tab_values", facts)
    labels = rows.row_labels(report)
    if not labels:
        return whole
    slider = ipywidgets.SelectionSlider(
        options=[(label, at) for at, label in enumerate(labels)],
        value=rows.first_bad_row(report),
        description="row",
        continuous_update=False,
    )
    shown = markup()

    def show(change: dict[str, Any]) -> None:
        at = change["new"]
        shown.value = draw_part(
            "lens_row.html.j2",
            {
                **facts,
                "row_title": rows.row_title(report, at),
                "row": rows.row_svg(report, at),
                "row_offenders": rows.row_offenders(report, at),
            },
        )

    slider.observe(show, "value")
    show({"new": slider.value})
    return stack(whole, line(slider, name="cl-tools"), shown)


def _history(report: Report, facts: dict[str, Any]) -> ipywidgets.Widget:
    entries = history_entries(report)
    shown = _part("tab_history", facts)
    wanted = ipywidgets.Text(
        description="filter", placeholder="op, shape, line or module", continuous_update=True
    )
    count = markup("", "cl-status")

    def show(change: dict[str, Any]) -> None:
        text = change["new"].strip().casefold()
        kept = tuple(item for item in entries if text in _searched(item[1]))
        shown.value = draw_part("tab_history.html.j2", {**facts, "entries": kept})
        count.value = f"{len(kept)} of {len(entries)} ops" if text else ""

    wanted.observe(show, "value")
    return stack(line(wanted, count, name="cl-tools"), shown)


def _searched(entry: HistoryEntry) -> str:
    parts = (entry.op, entry.shapes, words.spot(entry.source), entry.module_path, entry.phase)
    return " ".join(filter(None, parts)).casefold()


def _environment(report: Report, facts: dict[str, Any]) -> ipywidgets.Widget:
    status = markup("", "cl-status")

    def saver(suffix: str) -> ipywidgets.Button:
        def save() -> None:
            try:
                told = f"saved as {save_beside(report, suffix)}"
            except OSError as error:
                told = f"not saved: {error}"
            status.value = f'<span role="status">{escape(told)}</span>'

        label = suffix.removeprefix(".").upper()
        return button(f"Save {label}", f"write this report to a {label} file", save)

    text = Markup(escape(report.to_text()[:_TEXT_LIMIT]))
    return stack(
        _part("tab_environment", facts),
        line(saver(".html"), saver(".json"), status, name="cl-tools"),
        _part("lens_text", {**facts, "text_lines": text}),
    )


def save_beside(report: Report, suffix: str) -> Path:
    """Write the report into the working directory under a name that is still free."""
    for number in itertools.count(1):
        path = Path(f"cudalens_report_{number}{suffix}")
        if not path.exists():
            break
    return report.save(path)
