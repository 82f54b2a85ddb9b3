"""The graph around the failure as a strip: data flows from left to right, branches in lanes below.

Arrows are edges of the recorded graph.  For an error before any node was made, the boxes are
recorded calls.  An arrow then needs two calls on one line, and a result with the shape of the next
input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, takewhile
from typing import NamedTuple

import networkx as nx

from cudalens.core.graph_types import CHANGED
from cudalens.core.report import GraphNode, HistoryEntry, Report
from cudalens.core.report_types import format_shape
from cudalens.render import words
from cudalens.render.fold import Box, Types, fold, is_view, node_name
from cudalens.render.words import elide, one_line

MAX_BOXES = 9
"""How many boxes the main lane has; the middle of a longer one is left out."""
MAX_WIDTH = 890
"""Width of the narrowest common pane, which the main lane fits, in pixels."""
_SPACE, _GAP = 22, 110
MAX_LANES = 4
_TITLE = 26
_TELLS_LITTLE = 2


@dataclass(frozen=True, kw_only=True)
class Node:
    """One box of the strip, and its position."""

    title: str
    small: str = ""
    shape: str = ""
    look: str = ""
    """``fail``, ``badin``, ``writer``, ``leaf``, ``gap`` for boxes left out, or nothing."""
    lane: int = 1
    column: int = 1
    has_arrow: bool = False
    """True if the box to its left feeds it."""
    joins: bool = False
    """True if it feeds the main lane's box in the next column."""
    starts_above: bool = False
    """True if the main lane's box in the previous column feeds it."""

    @property
    def is_bad(self) -> bool:
        """True for the failing box."""
        return self.look == "fail"


@dataclass(frozen=True, kw_only=True)
class Strip:
    """The boxes in reading order, and the number of nodes in the whole graph."""

    nodes: tuple[Node, ...]
    note: str = ""


class GraphRow(NamedTuple):
    """One node of the graph as text, for the table below the strip."""

    name: str
    role: str
    shape: str
    module: str
    source: str
    feeds: str


ROLES = {"parameter": "parameter", "leaf": "input", "bad_input": "bad input", "failed": "failed"}
"""Words for the role of a node; a node that only passes data on has none."""


def graph_rows(report: Report) -> tuple[GraphRow, ...]:
    """Return every node with its successors, in the report's order."""
    graph = report.graph
    names = {node.id: node_name(node) for node in graph.nodes}
    feeds: dict[str, list[str]] = {}
    for edge in graph.edges:
        if edge.dst in names:
            feeds.setdefault(edge.src, []).append(f"{names[edge.dst]} (input {edge.input})")
    return tuple(
        GraphRow(
            name=node_name(node),
            role=ROLES.get(node.role, ""),
            shape=words.format_dtype(node.dtype or "") + format_shape(node.shape),
            module=one_line(node.module_path or ""),
            source=words.format_line(node.source),
            feeds=", ".join(feeds.get(node.id, ())),
        )
        for node in graph.nodes
    )


def strip(report: Report) -> Strip | None:
    """Return the strip of a report, ``None`` if it would show too little."""
    drawn = _of_graph(report) if report.graph.nodes else None
    if drawn is None or len(drawn.nodes) <= _TELLS_LITTLE:
        of_calls = _of_calls(report)
        drawn = of_calls if of_calls is not None else drawn
    return drawn if drawn is not None and len(drawn.nodes) > _TELLS_LITTLE else None


# --- from the graph of autograd -------------------------------------------------------------------


def _of_graph(report: Report) -> Strip | None:
    report = _at_own_layer(report)
    boxes, edges = fold(report.graph)
    links = nx.DiGraph()
    sides = _of_parameters(boxes, edges)
    # Parameters are left to the table: they would crowd out the data flow.
    links.add_nodes_from(key for key in boxes if key not in sides)
    links.add_edges_from(pair for pair in edges if not set(pair) & sides)
    focus = next((key for key in links if boxes[key].role == "failed"), None)
    if focus is None:
        return None
    types = words.module_types(report)
    whole = _whole_module(report, boxes[focus], types)
    if whole:
        links = _joined(links, boxes, focus, whole)
    # One main lane through the failure. Everything else joins it from lanes below.
    main = _main_path(links, boxes, focus)
    lanes = _branches(links, main)
    # Shift the main lane right if a branch is longer than the boxes before its end.
    shift = max((len(chain) - main.index(end) for chain, end, _ in lanes), default=0)
    shift = max(shift, 0)
    drawn = {key: _node(report, boxes[key], types) for key in main}
    if whole:
        drawn[focus] = replace(drawn[focus], title=elide(f"{types[whole]} {whole}", _TITLE))
    for at, key in enumerate(main[1:], 1):
        drawn[key] = replace(drawn[key], has_arrow=links.has_edge(main[at - 1], key))
    fitting = _fitting(list(drawn.values()))
    column = {main[place]: at + shift for at, (place, _) in enumerate(fitting, 1) if place >= 0}
    nodes = [replace(node, column=at + shift) for at, (_, node) in enumerate(fitting, 1)]
    taken: list[tuple[int, range]] = []
    for chain, end, start in lanes:
        if end not in column or (len(chain) >= column[end]):
            continue
        places = range(column[end] - len(chain), column[end])
        lane = _free_lane(taken, places)
        taken.append((lane, places))
        for at, key in enumerate(chain):
            place = places[at]
            begins = at == 0 and start is not None and column.get(start) == place - 1
            nodes.append(
                replace(
                    _node(report, boxes[key], types),
                    lane=lane,
                    column=place,
                    has_arrow=at > 0,
                    joins=at == len(chain) - 1,
                    starts_above=begins,
                )
            )
    return Strip(nodes=tuple(nodes))


def _free_lane(taken: Sequence[tuple[int, range]], places: range) -> int:
    """Return the first lane below the main one that is free in these columns and beside them."""
    near = range(places.start - 1, places.stop + 1)
    full = {lane for lane, own in taken if own.start < near.stop and near.start < own.stop}
    return next(lane for lane in range(2, len(taken) + 3) if lane not in full)


def _whole_module(report: Report, box: Box, types: Types) -> str:
    """Return the path of the failed module, if it is a single call and calls no other module.

    For a larger module, the failing op says more.
    """
    path = one_line(box.members[-1].module_path or "")
    entries = [entry for entry in report.history if entry.module_path]
    inner = [entry for entry in entries if one_line(entry.module_path or "").startswith(f"{path}.")]
    lines = {words.format_place(e.source) for e in entries if one_line(e.module_path or "") == path}
    return path if path in types and len(lines) == 1 and not inner else ""


def _joined(links: nx.DiGraph, boxes: dict[str, Box], focus: str, path: str) -> nx.DiGraph:
    """Fold the ops that a module ran before it failed into its box, unless that makes a cycle."""
    own = [key for key in nx.ancestors(links, focus) if boxes[key].module == path]
    joined = links
    for key in own:
        joined = nx.contracted_nodes(joined, focus, key, self_loops=False)
    return joined if nx.is_directed_acyclic_graph(joined) else links


def _of_parameters(boxes: dict[str, Box], edges: Sequence[tuple[str, str]]) -> set[str]:
    """Return the parameters and their views, which only the table shows."""
    sides = {key for key, box in boxes.items() if box.role == "parameter"}
    for key, box in boxes.items():
        feeding = {src for src, dst in edges if dst == key}
        if feeding and feeding <= sides and all(map(is_view, box.members)):
            sides.add(key)
    return sides


def _at_own_layer(report: Report) -> Report:
    """Move a failing backward node to its forward call, through which the data flows."""
    graph = report.graph
    focus = next((node for node in graph.nodes if node.id == graph.focus), None)
    if focus is None or report.phase != "backward":
        return report
    # The node's other inputs are gradients, which flow backwards.
    nodes = [node for node in graph.nodes if node.name != "gradient" or node.role != "leaf"]
    twins = [node for node in nodes if node.name == focus.name and node.id != focus.id]
    line = report.forward_source.line if report.forward_source else None
    near = [node for node in twins if node.source and node.source.line == line]
    # With several nodes of that name, take the only near one, if any.
    twin = (near or twins)[0] if len(near or twins) == 1 else None
    edges = graph.edges
    if twin is not None:
        failed = replace(twin, role="failed")
        nodes = [failed if node is twin else node for node in nodes if node.id != focus.id]
        edges = tuple(edge for edge in edges if focus.id not in (edge.src, edge.dst))
        graph = replace(graph, focus=twin.id)
    return replace(report, graph=replace(graph, nodes=tuple(nodes), edges=edges))


def _main_path(links: nx.DiGraph, boxes: dict[str, Box], focus: str) -> list[str]:
    """Return the longest path of computed data to the failing box, and on from it."""
    before = links.subgraph({*nx.ancestors(links, focus), focus})
    after = links.subgraph({*nx.descendants(links, focus), focus})
    # A bad input gets a lane of its own, unless it was computed or is the only one.
    inputs = list(links.predecessors(focus))
    ways = [
        key
        for key in before.nodes
        if boxes[key].role != "bad_input" or links.in_degree(key) > 0 or inputs == [key]
    ]
    to_focus = _longest_to(before.subgraph(ways), focus)
    # The longest path from a box is the longest one to it in the reversed graph.
    from_focus = _longest_to(after.reverse(copy=False), focus)[::-1]
    return [*to_focus, *from_focus[1:]]


def _longest_to(links: nx.DiGraph, end: str) -> list[str]:
    """Return the longest path of an acyclic graph that ends at a box."""
    best: dict[str, list[str]] = {}
    for key in nx.topological_sort(links):
        ways = [best[src] for src in links.predecessors(key) if src in best]
        best[key] = [*max(ways, key=len, default=[]), key]
    return best[end]


def _branches(links: nx.DiGraph, main: Sequence[str]) -> list[tuple[list[str], str, str | None]]:
    """Return the other chains into the main lane, each with the box it feeds and its source."""
    used = set(main)
    found: list[tuple[list[str], str, str | None]] = []
    for end in reversed(main):
        for src in links.predecessors(end):
            if src in used or len(found) >= MAX_LANES - 1:
                continue
            chain, key = [src], src
            used.add(src)
            while True:
                more = [one for one in links.predecessors(key) if one not in used]
                start = next((one for one in links.predecessors(key) if one in main), None)
                if len(more) != 1 or len(chain) >= MAX_BOXES - 1:
                    break
                key = more[0]
                used.add(key)
                chain.insert(0, key)
            found.append((chain, end, start))
    return found


def _fitting(lane: Sequence[Node]) -> list[tuple[int, Node]]:
    """Drop the middle of a lane that is too long, but not its first box and the failure.

    Returns:
        The boxes with their positions in ``lane``, or -1 for a gap.
    """
    fail = next((at for at, node in enumerate(lane) if node.is_bad), len(lane) - 1)
    kept = [0, fail] if fail else [0]
    # By importance: the box before the failure, then its own input, then the box after.
    for at in (fail - 1, fail - 2, fail + 1, *range(fail - 3, 0, -1), *range(fail + 2, len(lane))):
        if not 0 < at < len(lane) or at in kept:
            continue
        wider = sorted([*kept, at])
        is_whole = len(wider) == len(lane)
        if len(wider) > MAX_BOXES or _width(lane, wider) + (0 if is_whole else _GAP) > MAX_WIDTH:
            break
        kept = wider
    found: list[tuple[int, Node]] = []
    for at, following in pairwise([*sorted(kept), len(lane)]):
        found.append((at, lane[at]))
        if missing := following - at - 1:
            found.append((-1, Node(title=f"… {missing} more", look="gap", has_arrow=True)))
    return found


def _width(lane: Sequence[Node], kept: Sequence[int]) -> float:
    """Return the width of boxes in a row, in pixels, from the usual width of a letter."""
    boxes = (lane[at] for at in kept)
    return sum(
        max(7.1 * len(box.title), 6.2 * len(box.small), 7 * len(box.shape) - 18) + 18 + _SPACE
        for box in boxes
    )


def _node(report: Report, box: Box, types: Types) -> Node:
    first = box.main[0]
    line = first.source.line if first.source else None
    small = f"line {line}" if line else ""
    look = {"failed": "fail", "bad_input": "badin", "leaf": "leaf"}.get(box.role, "")
    if box.role == "failed":
        small = "likely here" if report.certainty == "likely" else "fails here"
        small = "backward fails here" if report.phase == "backward" else small
        small = "not launched" if report.prevented else small
        small = "wrong result" if report.kind == "silent" else small
    elif _is_writer(report, first):
        look, small = "writer", f"changes it, line {line}"
    elif box.role == "bad_input":
        small = "bad input"
    if first.value is not None:
        small = f"value {words.format_number(first.value)}"
    # A view after an op may belong to the next call, which reshapes its input.
    own = [node for node in box.members if node.op == box.main[-1].op]
    last = own[-1] if box.role in ("upstream", "downstream") else box.members[-1]
    # Several inputs in one box show a shape only if all have the same.
    shapes = {_shape(report, node) for node in (box.members if box.is_side else (last,))}
    shape = shapes.pop() if len(shapes) == 1 else ""
    return Node(title=box.title(types), small=small, shape=shape, look=look)


def _shape(report: Report, node: GraphNode) -> str:
    """Return the shape of a node's result, with its device if the graph has several."""
    devices = {it.device for it in report.graph.nodes if it.device}
    device = f" {one_line(node.device)}" if len(devices) > 1 and node.device else ""
    return format_shape(node.shape) + device


def _is_writer(report: Report, node: GraphNode) -> bool:
    """Return whether a node changed in place a tensor that backward needs."""
    if node.source is None:
        return False
    lines = [item.source for item in report.provenance if item.note == CHANGED]
    writes = [item for item in report.observations if item.kind == "write"]
    lines += [
        place for item in writes for place in item.sources if place.mark.startswith("changes")
    ]
    places = {(ref.cell, ref.file, ref.line) for ref in lines if ref is not None}
    return (node.source.cell, node.source.file, node.source.line) in places


# --- from the recorded calls ----------------------------------------------------------------------


def _of_calls(report: Report) -> Strip | None:
    """Return the last calls of the failing line before the one that failed."""
    here = report.source
    if here is None or not report.history or report.kind not in ("host_error", "nonfinite"):
        return None
    types = words.module_types(report)
    calls = [entry for entry in report.history if " -> " in entry.shapes or not entry.module_path]
    # A call outside modules is a box of its own.
    by_module = groupby(calls, key=lambda entry: (entry.module_path or entry.seq, entry.source))
    runs = [list(run) for _, run in by_module]
    if runs and report.kind == "nonfinite" and runs[-1][-1].op == report.op.api:
        runs = runs[:-1]  # the failing call itself, which is recorded if it has run
    # Calls before one of another line belong to an earlier iteration.
    of_line = [*takewhile(lambda run: _is_of_line(run[-1], here.line), reversed(runs))][::-1]
    if report.module_path is not None and of_line:
        # Calls inside the failing module are part of its box.
        *before, last = of_line
        of_line = before if last[-1].module_path == report.module_path else of_line
    title = _title(report.module_path, types) or words.format_api(report.op.api)
    if not of_line or not title:
        return None
    boxes: list[Node] = []
    given = _first_given(of_line[0][0])
    named = (fact for fact in report.tensors if fact.expression)
    source = next((fact for fact in named if format_shape(fact.shape) == given), None)
    if source is not None:
        name = words.tensor_name(source)
        boxes.append(Node(title=elide(name, _TITLE), small="input", shape=given, look="leaf"))
    previous = given if boxes else ""
    for run in of_line:
        name = _title(run[-1].module_path, types) or words.format_api(run[-1].op)
        made = _brackets(run[-1].shapes.rpartition(" -> ")[2])  # of the first result
        flows = bool(previous) and previous == _first_given(run[0])
        boxes.append(Node(title=elide(name, _TITLE), shape=made, has_arrow=flows))
        previous = made
    at_fault = next((fact for fact in report.tensors if words.is_at_fault(report, fact)), None)
    flows = at_fault is not None and format_shape(at_fault.shape) == previous
    small = "fails here"
    takes = [f for f in report.tensors if f.argument == "weight"]
    if report.op.api == "torch.nn.functional.linear" and takes:
        small = f"takes {takes[0].shape[-1]}"
    boxes.append(Node(title=elide(title, _TITLE), small=small, look="fail", has_arrow=flows))
    # Boxes without an arrow would look like inputs of the next one.
    start = next((at for at in range(len(boxes) - 1, 0, -1) if not boxes[at].has_arrow), 0)
    nodes = _fitting(boxes[start:])
    return Strip(
        nodes=tuple(replace(node, column=at) for at, (_, node) in enumerate(nodes, 1)),
        note="from the recorded calls of this line",
    )


def _is_of_line(entry: HistoryEntry, line: int | None) -> bool:
    return entry.source is None or entry.source.line == line


def _title(path: str | None, types: Types) -> str:
    """Return ``Conv2d net.0``, as far as known."""
    name = one_line(path or "")
    return f"{types[name]} {name}" if name in types else name


def _first_given(entry: HistoryEntry) -> str:
    return _brackets(entry.shapes.partition(" -> ")[0])


def _brackets(text: str) -> str:
    start = text.find("[")
    return text[start : text.find("]", start) + 1] if start >= 0 else ""
