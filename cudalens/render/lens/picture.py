"""The state of the graph picture: what the reader unfolded, folded, and how to go back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from markupsafe import Markup

from cudalens.core.report import GraphNode, Report
from cudalens.render.fold import DEFAULT_FOLDING, Box, Folding, fold, is_within
from cudalens.render.graph import graph_svg
from cudalens.render.lens.keys import Keys


class Picture:
    """A graph picture that can be unfolded, folded and put back step by step."""

    def __init__(self, report: Report, keys: Keys) -> None:
        self._report = report
        self._keys = keys
        self._folding = DEFAULT_FOLDING
        self._past: list[Folding] = []

    def svg(self) -> Markup:
        """Draw the graph as it is folded now."""
        return graph_svg(
            self._report.graph,
            prevented=self._report.prevented,
            folding=self._folding,
            attributes=self._keys.box,
        )

    @property
    def has_past(self) -> bool:
        """Whether there is a step to go back."""
        return bool(self._past)

    @property
    def has_folds(self) -> bool:
        """Whether any box stands for several nodes."""
        return any(len(box.members) > 1 for box in self._boxes(self._folding).values())

    def grow(self) -> bool:
        """Draw the nodes one hop further from the failure one by one; tell whether any was."""
        count = len(self._boxes(self._folding))
        for near in range(self._folding.near + 1, len(self._report.graph.nodes) + 1):
            grown = replace(self._folding, near=near, closed=frozenset())
            if len(self._boxes(grown)) > count:
                return self._step(grown)
        return False

    def can_open(self, keys: Iterable[str]) -> bool:
        """Return whether any of these nodes is drawn in a box with others."""
        return bool(self._folded(keys))

    def can_close(self, keys: Iterable[str]) -> bool:
        """Return whether a module around the first of these nodes can be drawn as one box."""
        return self._closed(keys) is not None

    def open(self, keys: Iterable[str]) -> bool:
        """Draw the nodes of these keys one by one; tell whether they were folded."""
        inside = self._folded(keys)
        if not inside:
            return False
        shut = {m for m in self._folding.closed if any(is_within(node, m) for node in inside)}
        opened = self._folding.opened | {node.id for node in inside}
        return self._step(replace(self._folding, opened=opened, closed=self._folding.closed - shut))

    def close(self, keys: Iterable[str]) -> bool:
        """Fold the module of the first of these nodes, or the next larger one; tell if any."""
        folded = self._closed(keys)
        return folded is not None and self._step(folded)

    def back(self) -> bool:
        """Undo the last step; tell whether there was one."""
        if not self._past:
            return False
        self._folding = self._past.pop()
        return True

    def _folded(self, keys: Iterable[str]) -> list[GraphNode]:
        wanted = {node.id for node in self._nodes(keys)}
        boxes = self._boxes(self._folding).values()
        return [
            node
            for box in boxes
            if len(box.members) > 1
            for node in box.members
            if wanted & {member.id for member in box.members}
        ]

    def _closed(self, keys: Iterable[str]) -> Folding | None:
        node = next(iter(self._nodes(keys)), None)
        module = (node.module_path or "") if node else ""
        count = len(self._boxes(self._folding))
        while module:
            out = {n.id for n in self._report.graph.nodes if is_within(n, module)}
            folded = replace(
                self._folding,
                opened=self._folding.opened - out,
                closed=self._folding.closed | {module},
            )
            if len(self._boxes(folded)) < count:
                return folded
            module = module.rpartition(".")[0]
        return None

    def _step(self, folding: Folding) -> bool:
        self._past.append(self._folding)
        self._folding = folding
        return True

    def _boxes(self, folding: Folding) -> dict[str, Box]:
        return fold(self._report.graph, folding)[0]

    def _nodes(self, keys: Iterable[str]) -> list[GraphNode]:
        nodes = self._report.graph.nodes
        return [nodes[int(key[1:])] for key in keys if key[0] == "n"]
