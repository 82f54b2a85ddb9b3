"""The pane of the autograd graph: picture, controls, details of the chosen node, table twin."""

from __future__ import annotations

from typing import Any

import ipywidgets

from cudalens.core.report import Report
from cudalens.render.html import draw_part
from cudalens.render.lens.details import details
from cudalens.render.lens.keys import Keys
from cudalens.render.lens.parts import button, line, markup, stack
from cudalens.render.lens.picture import Picture
from cudalens.render.lens.selection import Selection

_NOTHING = ("…", "")


class GraphPane:
    """Shows the graph, follows the selection, and unfolds and folds on request."""

    def __init__(
        self, report: Report, facts: dict[str, Any], keys: Keys, selection: Selection
    ) -> None:
        self._report = report
        self._facts = facts
        self._selection = selection
        self._picture = Picture(report, keys)
        self._shown = markup(self._draw())
        self._details = markup("", "cl-details")
        self._chooser = ipywidgets.Dropdown(
            options=[_NOTHING, *keys.choices()], description="Look at", value=""
        )
        self._chooser.layout.width = "auto"
        self._chooser.observe(self._named, "value")
        self._buttons = {
            "grow": button("+1 hop", "draw one more hop from the failure node by node", self.grow),
            "open": button("Unfold", "draw the chosen box node by node", self.open),
            "close": button("Fold", "draw the module of the node as one box", self.close),
            "back": button("Back", "undo the last step", self.back),
        }
        selection.follow(self._follow)
        self._enable()
        self.view = self._build()

    def grow(self) -> None:
        """Draw the nodes one hop further from the failure one by one."""
        self._redraw(self._picture.grow())

    def open(self, keys: tuple[str, ...] = ()) -> None:
        """Draw the nodes of a box one by one: of the chosen one when none is named."""
        self._redraw(self._picture.open(keys or self._selection.chosen))

    def close(self, keys: tuple[str, ...] = ()) -> None:
        """Draw the module of a node as one box: of the chosen one when none is named."""
        self._redraw(self._picture.close(keys or self._selection.chosen))

    def back(self) -> None:
        """Undo the last unfolding or folding, else clear the selection."""
        if self._picture.has_past:
            self._redraw(self._picture.back())
        else:
            self._selection.choose(())

    def _build(self) -> ipywidgets.VBox | None:
        draw = draw_part
        heading = markup(draw("lens_heading.html.j2", self._facts))
        has_graph = bool(self._report.graph.nodes)
        folds = has_graph and self._picture.has_folds
        tools = line(self._chooser, *(self._buttons.values() if folds else ()), name="cl-tools")
        if len(self._chooser.options) == 1:
            return None
        if not has_graph:
            return stack(tools, self._details, name="cl-pane cl-bare")
        twin = markup(draw("graph_table.html.j2", self._facts))
        return stack(heading, tools, self._shown, self._details, twin, name="cl-pane")

    def _draw(self) -> str:
        graph = self._picture.svg()
        return draw_part("lens_graph.html.j2", {**self._facts, "graph": graph})

    def _redraw(self, changed: bool) -> None:
        if changed:
            self._shown.value = self._draw()
            self._enable()

    def _enable(self) -> None:
        chosen = self._selection.chosen
        self._buttons["back"].disabled = not self._picture.has_past
        self._buttons["grow"].disabled = not self._picture.has_folds
        self._buttons["open"].disabled = not self._picture.can_open(chosen)
        self._buttons["close"].disabled = not self._picture.can_close(chosen)

    def _named(self, change: dict[str, Any]) -> None:
        # A choice by name says one key; the same box chosen in the picture may stand for more.
        if change["new"] not in self._selection.chosen:
            self._selection.choose((change["new"],) if change["new"] else ())

    def _follow(self, chosen: tuple[str, ...]) -> None:
        values = {key for _, key in self._chooser.options}
        self._chooser.value = next((key for key in chosen if key in values), "")
        told = {**self._facts, "chosen": details(self._report, chosen)}
        self._details.value = draw_part("lens_details.html.j2", told)
        self._enable()
