"""The interactive parts of a report while its kernel lives: a row below the static report.

One chooses a tensor and sees its shape, values and each slice with bad ones; or a node of the
autograd graph, and walks from it to what it was given and to what it feeds.  One searches the
recorded calls, and saves the report.  The static report needs no kernel and this row replaces
nothing of it: where it is dead, nothing of the report is missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ipywidgets
from markupsafe import escape

from cudalens.core.report import GraphNode, HistoryEntry, Report, format_count
from cudalens.render import words
from cudalens.render.figures import plane_picture
from cudalens.render.html import (
    history_entries,
    history_table,
    render_fragment,
    style_sheet,
    tensor_facts,
    tensor_line,
)
from cudalens.render.strip import GraphRow, graph_rows

MAX_FOUND = 40
MAX_LISTED = 80
NOTHING = ("", "")
"""Choice of neither a tensor nor a node."""
MAX_NEIGHBOURS = 12
_SUFFIXES = {"Markdown": ".md", "HTML": ".html", "JSON": ".json"}
_LAYOUT = {"width": "auto"}
_FIELD = {"flex": "1 1 170px", "width": "auto", "max_width": "250px"}
"""A list and a search field share what room a pane has: the row takes one line of it."""


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
    chosen = ipywidgets.VBox([], layout=ipywidgets.Layout(overflow="visible"))
    found = _markup()
    if report.tensors or report.graph.nodes:
        parts.append(_Inspector(report, chosen).choice)
    if report.history:
        parts.append(_search(report, found, tell))
    parts.append(_markup("<span>save</span>"))
    parts += [_button(name, partial(_save, report, end, tell)) for name, end in _SUFFIXES.items()]
    # The ipywidgets default scrolls what overflows, which cuts focus rings.
    bar = ipywidgets.HBox(
        [*parts, status], layout=ipywidgets.Layout(flex_flow="row wrap", overflow="visible")
    )
    bar.add_class("cl-live-bar")
    view = ipywidgets.VBox([bar, chosen, found], layout=ipywidgets.Layout(overflow="visible"))
    for name in ("cudalens", "cl-live"):
        view.add_class(name)
    return view


def _markup(html: str = "") -> ipywidgets.HTML:
    return ipywidgets.HTML(html, layout=ipywidgets.Layout(margin="0"))


def _button(name: str, pressed: Callable[[], None]) -> ipywidgets.Button:
    tip = f"save the report as {name} in the notebook's folder"
    button = ipywidgets.Button(description=name, tooltip=tip, layout=ipywidgets.Layout(**_LAYOUT))
    button.on_click(lambda _: pressed())
    return button


class _Inspector:
    """A list of the tensors and nodes of a report, and what is known of the chosen one."""

    def __init__(self, report: Report, shown: ipywidgets.VBox) -> None:
        self._report = report
        self._shown = shown
        self._nodes = {node.id: node for node in report.graph.nodes[:MAX_LISTED]}
        self._rows = dict(
            zip((node.id for node in report.graph.nodes), graph_rows(report), strict=True)
        )
        tensors = [
            (f"tensor  {tensor_line(report, fact)}", ("tensor", str(at)))
            for at, fact in enumerate(report.tensors[:MAX_LISTED])
        ]
        nodes = [(f"node  {self._name(key)}", ("node", key)) for key in self._nodes]
        self.choice = ipywidgets.Dropdown(
            options=[("look at a tensor or a node", NOTHING), *tensors, *nodes],
            layout=ipywidgets.Layout(**_FIELD),
        )
        self.choice.observe(self._show, "value")

    def _name(self, key: str) -> str:
        row, place = self._rows[key], words.format_place(self._nodes[key].source)
        return "  ".join(filter(None, (row.name, row.shape, place)))

    def _show(self, change: dict[str, Any]) -> None:
        kind, key = change["new"]
        views = {"tensor": self._tensor, "node": self._node}
        self._shown.children = views[kind](key) if kind else ()

    def _tensor(self, key: str) -> tuple[ipywidgets.Widget, ...]:
        fact = self._report.tensors[int(key)]
        facts = _markup(_list(tensor_facts(self._report, fact)))
        offenders = self._report.offenders
        is_bad = words.is_at_fault(self._report, fact) or fact.bad_at is not None
        if offenders is None or not offenders.planes or not is_bad:
            return (facts,)
        picture = _markup()
        planes = offenders.planes
        name = words.tensor_name(fact)

        def draw(change: dict[str, Any]) -> None:
            drawn = plane_picture(planes[change["new"]], name)
            size = f'width="{drawn.width}" height="{drawn.height}"'
            image = f'<img src="{drawn.data}" {size} alt="{escape(drawn.title)}">'
            picture.value = (
                f'<div class="cl-panel cl-fig">{image}<p>{escape(drawn.title)}</p></div>'
            )

        options = [(f"{name}[{', '.join(map(str, it.index))}]", at) for at, it in enumerate(planes)]
        slider = ipywidgets.SelectionSlider(
            options=options, layout=ipywidgets.Layout(width="340px", max_width="100%")
        )
        slider.observe(draw, "value")
        # An observer hears only of changes, so draw the first slice here.
        draw({"new": 0})
        return (facts, *([slider] if len(planes) > 1 else []), picture)

    def _node(self, key: str) -> tuple[ipywidgets.Widget, ...]:
        edges = self._report.graph.edges
        before = [edge.src for edge in edges if edge.dst == key]
        after = [edge.dst for edge in edges if edge.src == key]
        facts = _markup(_list(_node_facts(self._nodes[key], self._rows[key])))
        ends = (self._ends("given", before), self._ends("feeds", after))
        return (facts, *(end for end in ends if end is not None))

    def _ends(self, label: str, keys: list[str]) -> ipywidgets.Widget | None:
        """Return a row of buttons that lead to neighbours."""
        buttons = []
        # A node may be two inputs of another, as in `x * x`.
        for key in dict.fromkeys(key for key in keys if key in self._nodes):
            name = self._name(key)
            button = ipywidgets.Button(
                description=words.clip(name, 44),
                tooltip=f"{label}: {name}",
                layout=ipywidgets.Layout(**_LAYOUT),
            )
            button.on_click(partial(self._go, key))
            buttons.append(button)
        if not buttons:
            return None
        row = [_markup(f"<span>{label}</span>"), *buttons[:MAX_NEIGHBOURS]]
        ends = ipywidgets.HBox(
            row, layout=ipywidgets.Layout(flex_flow="row wrap", overflow="visible")
        )
        ends.add_class("cl-live-ends")
        return ends

    def _go(self, key: str, _: object) -> None:
        self.choice.value = ("node", key)


def _node_facts(node: GraphNode, row: GraphRow) -> list[tuple[str, str]]:
    text = words.one_line(node.source.text or "") if node.source else ""
    facts = [
        *(("node", node.name), ("role", row.role), ("operator", node.op or "")),
        *(("shape", row.shape), ("device", node.device or ""), ("module", row.module)),
        ("line", ": ".join(filter(None, (row.source, text)))),
        ("value", "" if node.value is None else words.format_number(node.value)),
    ]
    return [(name, words.one_line(text)) for name, text in facts if text]


def _list(facts: list[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(n)}</dt><dd><code>{escape(t)}</code></dd>" for n, t in facts)
    return _panel(f"<dl>{items}</dl>")


def _panel(html: str) -> str:
    # The style sheet of the report above holds in this output too, but not on every page.
    return f'<style>{style_sheet()}</style><div class="cl-panel">{html}</div>'


def _search(report: Report, found: ipywidgets.HTML, tell: Callable[[str], None]) -> ipywidgets.Text:
    entries = history_entries(report)
    calls = format_count(len(report.history), "call")
    field = ipywidgets.Text(
        placeholder=f"search {calls}: name, shape, line or module",
        continuous_update=True,
        layout=ipywidgets.Layout(**_FIELD),
    )

    def show(change: dict[str, Any]) -> None:
        text = change["new"].strip().casefold()
        matches = [item for item in entries if text in _searched(item.entry)]
        found.value = _panel(history_table(report, matches[:MAX_FOUND])) if text else ""
        tell(f"{len(matches)} of {len(entries)}" if text else "")

    field.observe(show, "value")
    return field


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
