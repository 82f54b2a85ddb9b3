"""The pane of the autograd graph: picture, controls, details of the chosen node, table twin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import ipywidgets

from cudalens.core.report import GraphNode, Report
from cudalens.render.calls import module_types
from cudalens.render.fold import DEFAULT_FOLDING, Box, Folding, fold, is_within
from cudalens.render.graph import graph_svg
from cudalens.render.html import draw_part
from cudalens.render.lens.keys import Keys, Selection
from cudalens.render.lens.parts import button, details, line, markup, shared, stack

_NOTHING = ("…", "")


class GraphPane:
    """Shows the graph, follows the selection, and unfolds and folds on request."""

    def __init__(
        self, report: Report, facts: dict[str, Any], keys: Keys, selection: Selection
    ) -> None:
        self._report = report
        self._facts = facts
        self._keys = keys
        self._selection = selection
        self._folding = DEFAULT_FOLDING
        self._past: list[Folding] = []
        self._shown = markup(self._draw())
        self._details = markup("", "cl-details")
        self._chooser = ipywidgets.Dropdown(
            options=[_NOTHING, *keys.choices()],
            description="Look at",
            value="",
            layout=shared(ipywidgets.Layout, width="auto"),
        )
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
        self._take(self._grown())

    def open(self, keys: tuple[str, ...] = ()) -> None:
        """Draw the nodes of a box one by one: of the chosen one when none is named."""
        self._take(self._opened(keys or self._selection.chosen))

    def close(self, keys: tuple[str, ...] = ()) -> None:
        """Draw the module of a node as one box: of the chosen one when none is named."""
        self._take(self._closed(keys or self._selection.chosen))

    def back(self) -> None:
        """Undo the last unfolding or folding, else clear the selection."""
        if self._past:
            self._folding = self._past.pop()
            self._redraw()
        else:
            self._selection.choose(())

    def _build(self) -> ipywidgets.VBox | None:
        heading = markup(draw_part("lens_heading", self._facts))
        has_graph = bool(self._report.graph.nodes)
        folds = has_graph and self._has_folds()
        tools = line(self._chooser, *(self._buttons.values() if folds else ()), name="cl-tools")
        if len(self._chooser.options) == 1:
            return None
        if not has_graph:
            return stack(self._details, name="cl-pane cl-bare")
        twin = markup(draw_part("graph_table", self._facts))
        name = "cl-pane cl-slim" if self._facts["is_slim"] else "cl-pane"
        return stack(heading, tools, self._shown, self._details, twin, name=name)

    def _draw(self) -> str:
        graph = graph_svg(
            self._report.graph,
            prevented=self._report.prevented,
            folding=self._folding,
            attributes=self._keys.box,
            types=module_types(self._report),
        )
        return draw_part("lens_graph", {**self._facts, "graph": graph})

    def _take(self, folding: Folding | None) -> None:
        if folding is not None:
            self._past.append(self._folding)
            self._folding = folding
            self._redraw()

    def _redraw(self) -> None:
        self._shown.value = self._draw()
        self._enable()

    def _enable(self) -> None:
        chosen = self._selection.chosen
        self._buttons["back"].disabled = not self._past
        self._buttons["grow"].disabled = not self._has_folds()
        self._buttons["open"].disabled = self._opened(chosen) is None
        self._buttons["close"].disabled = self._closed(chosen) is None

    def _named(self, change: dict[str, Any]) -> None:
        # A choice by name says one key; the same box chosen in the picture may stand for more.
        if change["new"] not in self._selection.chosen:
            self._selection.choose((change["new"],) if change["new"] else ())

    def _follow(self, chosen: tuple[str, ...]) -> None:
        values = {key for _, key in self._chooser.options}
        self._chooser.value = next((key for key in chosen if key in values), "")
        told = {**self._facts, "chosen": details(self._report, chosen)}
        self._details.value = draw_part("lens_details", told)
        self._enable()

    def _has_folds(self) -> bool:
        """Return whether any box stands for several nodes."""
        return any(len(box.members) > 1 for box in self._boxes(self._folding).values())

    def _grown(self) -> Folding | None:
        """Return the folding with the nodes one hop further from the failure one by one."""
        count = len(self._boxes(self._folding))
        for near in range(self._folding.near + 1, len(self._report.graph.nodes) + 1):
            grown = replace(self._folding, near=near, closed=frozenset())
            if len(self._boxes(grown)) > count:
                return grown
        return None

    def _opened(self, keys: Iterable[str]) -> Folding | None:
        """Return the folding with the nodes of these keys one by one, where they are folded."""
        wanted = {node.id for node in self._nodes(keys)}
        inside = [
            node
            for box in self._boxes(self._folding).values()
            if len(box.members) > 1 and wanted & {member.id for member in box.members}
            for node in box.members
        ]
        if not inside:
            return None
        shut = {m for m in self._folding.closed if any(is_within(node, m) for node in inside)}
        opened = self._folding.opened | {node.id for node in inside}
        return replace(self._folding, opened=opened, closed=self._folding.closed - shut)

    def _closed(self, keys: Iterable[str]) -> Folding | None:
        """Return the folding with the module of the first of these nodes, or a larger one, shut."""
        node = next(iter(self._nodes(keys)), None)
        module = (node.module_path or "") if node else ""
        count = len(self._boxes(self._folding))
        while module:
            out = {n.id for n in self._report.graph.nodes if is_within(n, module)}
            opened, shut = self._folding.opened - out, self._folding.closed | {module}
            folded = replace(self._folding, opened=opened, closed=shut)
            if len(self._boxes(folded)) < count:
                return folded
            module = module.rpartition(".")[0]
        return None

    def _boxes(self, folding: Folding) -> dict[str, Box]:
        return fold(self._report.graph, folding)[0]

    def _nodes(self, keys: Iterable[str]) -> list[GraphNode]:
        nodes = self._report.graph.nodes
        return [nodes[int(key[1:])] for key in keys if key[0] == "n"]
