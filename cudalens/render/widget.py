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
from cudalens.render.html import draw_part, facts_of
from cudalens.render.lens.export import export_bar
from cudalens.render.lens.graphpane import GraphPane
from cudalens.render.lens.keys import Keys, Selection, rule, style
from cudalens.render.lens.parts import line, markup, shared, stack
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
    graph = GraphPane(report, facts, keys, selection)
    marks = markup(style(root, ()), "cl-silent")
    selection.follow(lambda chosen: setattr(marks, "value", style(root, chosen)))
    has_code = any(facts[name] for name in ("rows", "loose")) or report.explanation
    panes = line(
        stack(markup(draw_part("code", facts)), name="cl-pane") if has_code else None,
        graph.view,
        name="cl-panes",
    )
    card = stack(
        stack(markup(draw_part("head", facts)), export_bar(report, keep), name="cl-top"),
        panes,
        tabs(report, facts),
        marks,
        _wire(keys, selection, graph),
        _module(root),
        name="cl-card",
    )
    styles = shared(markup, draw_part("lens_style", facts), "cl-silent")
    return stack(styles, card, name=f"cudalens cl-is-{words.tone(report)} cl-lens {root}")


def _wire(keys: Keys, selection: Selection, graph: GraphPane) -> ipywidgets.Text:
    """Return the hidden field into which the browser module writes what the user did."""
    field = ipywidgets.Text(
        continuous_update=True, layout=shared(ipywidgets.Layout, display="none")
    )
    field.add_class("cl-wire")
    commands: dict[str, Callable[[tuple[str, ...]], None]] = {
        "select": selection.choose,
        "open": graph.open,
        "close": graph.close,
        "back": lambda _: graph.back(),
    }

    def heard(change: dict[str, Any]) -> None:
        # "number command key key …": the number makes the same command twice a change.
        said = change["new"].split()
        if said[1:2] and said[1] in commands:
            commands[said[1]](keys.known(said[2:]))

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
    kept = [line.strip() for line in lines if line.strip() and not line.strip().startswith("//")]
    return "\n".join(kept)
