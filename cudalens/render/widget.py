"""The interactive view of a report: the lens.

It is made from the report alone, reads no tensor, and goes on working when the CUDA context is
gone.  Core ipywidgets carry it; a small browser module of ours adds zoom, keyboard and a click on
the picture where the front end runs it, and is missed nowhere else.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ipywidgets

from cudalens.core.report import Report
from cudalens.render import words
from cudalens.render.graph import graph_svg
from cudalens.render.html import draw_part, facts_of
from cudalens.render.lens.export import export_bar
from cudalens.render.lens.keys import Keys, Selection, rule, style
from cudalens.render.lens.parts import details, line, markup, shared, stack
from cudalens.render.lens.tabs import tabs

_STATIC = Path(__file__).with_name("static")


def build(report: Report, *, keep: Callable[[], None] | None = None) -> ipywidgets.Widget:
    """Return the interactive view of ``report``, a box of core ipywidgets.

    ``keep`` puts the static report in the place of this view, where the caller can.
    """
    facts = facts_of(report)
    report = facts["report"]
    # Two views of one report in a notebook must not mark each other's things.
    root = f"cl-lens-{uuid.uuid4().hex[:12]}"
    keys = Keys(report)
    selection = Selection(keys)
    facts["keyed"] = keys.attributes
    marks = markup(style(root, ()), "cl-silent")
    selection.follow(lambda chosen: setattr(marks, "value", style(root, chosen)))
    export, choices = export_bar(report, keep)
    head = line(markup(draw_part("head", facts)), export, name="cl-row-of-head")
    card = stack(
        stack(head, markup(draw_part("hint", facts)), choices, name="cl-top"),
        _panes(report, facts, keys, selection),
        tabs(report, facts),
        marks,
        _wire(keys, selection),
        _module(root),
        name="cl-card",
    )
    styles = shared(markup, draw_part("lens_style", facts), "cl-silent")
    return stack(styles, card, name=f"cudalens cl-is-{words.tone(report)} cl-lens {root}")


def _panes(
    report: Report, facts: dict[str, Any], keys: Keys, selection: Selection
) -> ipywidgets.Box:
    """Return the code, the graph where it tells more, and what is known of a chosen thing."""
    chosen = markup("", "cl-details")

    def show(picked: tuple[str, ...]) -> None:
        chosen.value = draw_part("lens_details", {**facts, "chosen": details(report, picked)})

    selection.follow(show)
    panes = []
    if any(facts[name] for name in ("rows", "loose")) or report.explanation:
        panes.append(stack(markup(draw_part("code", facts)), chosen, name="cl-pane"))
    if facts["graph"]:
        types = words.module_types(report)
        graph = graph_svg(
            report.graph, prevented=report.prevented, attributes=keys.box, types=types
        )
        drawn = [draw_part(name, {**facts, "graph": graph}) for name in _GRAPH]
        panes.append(stack(*map(markup, drawn), name="cl-pane"))
    return line(*panes, name="cl-panes")


_GRAPH = ("lens_heading", "lens_graph", "graph_table")


def _wire(keys: Keys, selection: Selection) -> ipywidgets.Text:
    """Return the hidden field into which the browser module writes what the user chose."""
    field = ipywidgets.Text(
        continuous_update=True, layout=shared(ipywidgets.Layout, display="none")
    )
    field.add_class("cl-wire")

    def heard(change: dict[str, Any]) -> None:
        # "number key key …": the number makes the same choice twice a change.
        number, *chosen = change["new"].split() or [""]
        if number.isdigit():
            selection.choose(keys.present(chosen))

    field.observe(heard, "value")
    return field


def _module(root: str) -> ipywidgets.Output:
    """Return the carrier of the browser module: a front end that runs no script shows nothing."""
    marks = rule(root).replace("\\", "\\\\").replace("'", "\\'")
    script = _script().replace("%RULE%", marks).replace("%ROOT%", root)
    data = {"text/html": f"<script>{script}</script>", "text/plain": ""}
    return ipywidgets.Output(
        outputs=({"output_type": "display_data", "data": data, "metadata": {}},),
        layout=shared(ipywidgets.Layout, display="none"),
    )


@cache
def _script() -> str:
    lines = (_STATIC / "lens.js").read_text(encoding="utf-8").splitlines()
    code = [line.strip() for line in lines if line.strip() and not line.strip().startswith("//")]
    return "\n".join(code)
