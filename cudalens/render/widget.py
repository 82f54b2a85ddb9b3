"""The interactive parts of a report while its kernel lives: search among its calls, and saving.

The static report has everything else, drawers included, and needs no kernel.  So this view adds a
row below it and replaces nothing: where it is dead, nothing of the report is missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ipywidgets
from markupsafe import escape

from cudalens.core.report import HistoryEntry, Report, format_count
from cudalens.render import words
from cudalens.render.html import Ops, history_entries, history_table, render_fragment, style_sheet

MAX_FOUND = 40
_SUFFIXES = {"Markdown": ".md", "HTML": ".html", "JSON": ".json"}
_LAYOUT = {"width": "auto", "height": "26px"}


def build(report: Report) -> ipywidgets.Widget:
    """Return the whole report as one widget: the static one, and below it what is interactive."""
    return ipywidgets.VBox([_markup(render_fragment(report)), live(report)])


def live(report: Report) -> ipywidgets.Widget:
    """Return the interactive row alone, for a page that shows the static report above it."""
    report = words.with_module_names(report)
    status = _markup()

    def tell(text: str) -> None:
        status.value = f'<span role="status">{escape(text)}</span>'

    parts: list[ipywidgets.Widget] = []
    found = _markup()
    if report.history:
        parts.append(_search(report, found, tell))
    parts += [_button(name, partial(_save, report, end, tell)) for name, end in _SUFFIXES.items()]
    # The ipywidgets default scrolls what overflows, which cuts focus rings.
    bar = ipywidgets.HBox(
        [*parts, status], layout=ipywidgets.Layout(flex_flow="row wrap", overflow="visible")
    )
    bar.add_class("cl-live-bar")
    view = ipywidgets.VBox([bar, found], layout=ipywidgets.Layout(overflow="visible"))
    for name in ("cudalens", "cl-live"):
        view.add_class(name)
    return view


def _markup(html: str = "") -> ipywidgets.HTML:
    return ipywidgets.HTML(html, layout=ipywidgets.Layout(margin="0"))


def _button(name: str, pressed: Callable[[], None]) -> ipywidgets.Button:
    tip = f"save the report as {name} in the notebook's folder"
    button = ipywidgets.Button(
        description=f"Save {name}", tooltip=tip, layout=ipywidgets.Layout(**_LAYOUT)
    )
    button.on_click(lambda _: pressed())
    return button


def _search(report: Report, found: ipywidgets.HTML, tell: Callable[[str], None]) -> ipywidgets.Text:
    entries = history_entries(report)
    calls = format_count(len(report.history), "call")
    field = ipywidgets.Text(
        placeholder=f"search {calls}: name, shape, line or module",
        continuous_update=True,
        layout=ipywidgets.Layout(width="340px"),
    )
    # The style sheet of the report above holds in this output too, but not on every page.
    link = f"<style>{style_sheet()}</style>"

    def show(change: dict[str, Any]) -> None:
        text = change["new"].strip().casefold()
        matches = [item for item in entries if text in _searched(item.entry)]
        found.value = _table(report, matches, link) if text else ""
        tell(f"{len(matches)} of {len(entries)}" if text else "")

    field.observe(show, "value")
    return field


def _table(report: Report, matches: list[Ops], link: str) -> str:
    table = history_table(report, matches[:MAX_FOUND])
    return f'{link}<div class="cl-panel">{table}</div>'


def _searched(entry: HistoryEntry) -> str:
    where = words.format_line(entry.source)
    parts = (entry.op, entry.shapes, where, entry.module_path, entry.phase)
    return " ".join(filter(None, parts)).casefold()


def _save(report: Report, suffix: str, tell: Callable[[str], None]) -> None:
    try:
        tell(f"saved as {save_beside(report, suffix)}")
    except OSError as error:
        tell(f"not saved: {error}")


def save_beside(report: Report, suffix: str) -> Path:
    """Write the report into the working directory under a name that is still free."""
    paths = (Path(f"cudalens_report_{number}{suffix}") for number in itertools.count(1))
    return report.save(next(path for path in paths if not path.exists()))
