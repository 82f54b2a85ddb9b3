"""The tabs below: values, tensors, history, causes, replay, call stack, environment."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import ipywidgets
from markupsafe import Markup, escape

from cudalens.core.report import HistoryEntry, Report
from cudalens.render import words
from cudalens.render.html import draw_part, history_entries
from cudalens.render.lens import rows
from cudalens.render.lens.parts import button, line, markup, stack

Keep: TypeAlias = Callable[[], None] | None

_TEXT_LIMIT = 20_000
_KEEP = "Keep in notebook"
_KEEP_TIP = "put the static report in the place of this view: it needs no kernel when reopened"
# Read only where the view is still there, which is where no output answers to its name any more.
_NOT_KEPT = "not kept: this page was loaded after the cell ran; run it again, or save the HTML"


def tabs(report: Report, facts: dict[str, Any], keep: Keep) -> ipywidgets.Widget:
    """Return the tabs that this report has something for, in the order of the questions."""
    saver = _Saver(report, keep)
    shown = list(_tabs(report, facts, saver))
    widget = ipywidgets.Tab([child for _, child in shown], selected_index=0)
    widget.titles = [title for title, _ in shown]
    if keep is None:
        return widget

    def kept() -> None:
        widget.selected_index = len(shown) - 1  # where it is told if nothing came of it
        saver.keep()

    corner = line(button(_KEEP, _KEEP_TIP, kept), name="cl-tools cl-keep")
    return stack(corner, widget, name="cl-tabbed")


def _tabs(
    report: Report, facts: dict[str, Any], saver: _Saver
) -> Iterator[tuple[str, ipywidgets.Widget]]:
    found = report.offenders
    if found and (found.first or facts["map"]):
        yield "Values", _values(report, facts)
    if report.tensors:
        yield f"Tensors {len(report.tensors)}", _part("tab_tensors", facts)
    if report.history:
        yield f"History {len(report.history)}", _history(report, facts)
    if report.hints or report.provenance or report.limits:
        yield "Why", _part("tab_why", facts)
    if facts["replay"] or report.device_text:
        yield "Replay on CPU", _part("tab_replay", facts)
    if report.frames:
        yield f"Call stack {len(report.frames)}", _part("tab_stack", facts)
    yield "Environment", _environment(report, facts, saver)


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


def _environment(report: Report, facts: dict[str, Any], saver: _Saver) -> ipywidgets.Widget:
    text = Markup(escape(report.to_text()[:_TEXT_LIMIT]))
    return stack(
        _part("tab_environment", facts),
        line(*saver.buttons(), saver.status, name="cl-tools"),
        _part("lens_text", {**facts, "text_lines": text}),
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
