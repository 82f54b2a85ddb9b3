"""The autograd neighbourhood as a picture, and its twin as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from markupsafe import Markup

from cudalens.core.report import AutogradNeighbourhood, GraphNode
from cudalens.render import words
from cudalens.render.fold import Box, Types, fold, is_statement, node_name
from cudalens.render.layout import ARROW, LABEL_SIZE, Labels, Layout, Line, place
from cudalens.render.svg import element, paint, picture, text_width, words_at
from cudalens.render.words import clip_left, one_line

BOX_HEIGHT = 40.0
MIN_BOX_WIDTH = 92.0
MARGIN = 14.0
LEGEND_HEIGHT = 26.0
_CHARACTER = 6.7
# How far down a side input turns: below the shapes that are written under its neighbours.
_LOW = 0.85
_TELLS_LITTLE = 3
"""Boxes of a graph that only repeats what hangs under the line of code."""
_BAD = ("failed", "bad_input")
_LEGEND = {
    "parameter": "parameter",
    "leaf": "input",
    "bad_input": "bad input",
    "failed": "failed op",
}

ROLES = {**_LEGEND, "failed": "failed"}
"""Words for the role of a node; one that only passes data on has none."""


Attributes: TypeAlias = Callable[[Sequence[GraphNode]], Mapping[str, str | None]]
"""Gives the attributes of the element that stands for some nodes."""


class GraphRow(NamedTuple):
    """One node of the graph as text, for the table beside the picture."""

    name: str
    role: str
    shape: str
    module: str
    source: str
    feeds: str


@dataclass(frozen=True, kw_only=True)
class PlacedBox:
    """A box, its centre and its width."""

    box: Box
    x: float
    y: float
    width: float


def _ids(nodes: Sequence[GraphNode]) -> Mapping[str, str | None]:
    return {"data_node": " ".join(node.id for node in nodes)}


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A folded graph with the texts of each box and where it stands."""

    boxes: dict[str, Box]
    texts: dict[str, tuple[str, str]]
    layout: Layout
    spots: dict[str, PlacedBox]


def placed(graph: AutogradNeighbourhood, *, prevented: bool, types: Types) -> Placed | None:
    """Place the boxes of a graph, data flowing down; ``None`` where they would tell little."""
    boxes, edges = fold(graph) if graph.nodes else ({}, [])
    if len(boxes) <= _TELLS_LITTLE:
        return None
    texts = {
        key: (box.title(types), box.detail(types, prevented=prevented))
        for key, box in boxes.items()
    }
    sizes = {key: (_width(*pair, boxes[key]), BOX_HEIGHT) for key, pair in texts.items()}
    layout = place(sizes, edges, light=[key for key, box in boxes.items() if box.is_side])
    bad = [layout.centres[key][0] for key, box in boxes.items() if box.role == "bad_input"]
    if bad and min(bad) > layout.width / 2:
        # A narrow page cuts a picture at its right: what is bad stands at the left.
        layout = layout.mirrored()
    spots = {
        key: PlacedBox(box=boxes[key], x=x + MARGIN, y=y + MARGIN, width=sizes[key][0])
        for key, (x, y) in layout.centres.items()
    }
    return Placed(boxes=boxes, texts=texts, layout=layout, spots=spots)


def graph_svg(
    graph: AutogradNeighbourhood,
    *,
    prevented: bool = False,
    attributes: Attributes = _ids,
    types: Types = MappingProxyType({}),
) -> Markup:
    """Draw the graph around the failure, data flowing down; empty where it would tell little.

    ``attributes`` says what the element of a box carries besides its look.
    """
    drawing = placed(graph, prevented=prevented, types=types)
    if drawing is None:
        return Markup("")
    boxes, texts, layout, spots = drawing.boxes, drawing.texts, drawing.layout, drawing.spots
    edges = list(layout.routes)
    # A statement at fault says so itself, and is no input.
    plain = [
        box for box in boxes.values() if not (box.role == "bad_input" and is_statement(box.main[0]))
    ]
    roles = [role for role in _LEGEND if any(box.role == role for box in plain)]
    legend, legend_width = _legend(roles, layout.height + 2 * MARGIN)
    width = max(layout.width + 2 * MARGIN, legend_width + MARGIN)
    height = layout.height + 2 * MARGIN + (LEGEND_HEIGHT if roles else 0)
    drawn = [_box(spot, *texts[key], attributes(spot.box.members)) for key, spot in spots.items()]
    shift = (width - layout.width - 2 * MARGIN) / 2
    drawn = [*_edges(layout, spots, edges), *drawn]
    body = element("g", *drawn, transform=f"translate({shift:.1f} 0)")
    return picture(width, height, graph_title(graph), body, *legend)


def graph_title(graph: AutogradNeighbourhood) -> str:
    """Return the picture's name: how many nodes, of how many, around which one."""
    focus = next((node for node in graph.nodes if node.id == graph.focus), None)
    near = f" around {node_name(focus)}" if focus else ""
    shown, total = len(graph.nodes), graph.total_nodes
    whole = f" of {total}" if total is not None and total > shown else ""
    return f"Autograd graph{near}: {shown}{whole} nodes"


def graph_rows(graph: AutogradNeighbourhood) -> tuple[GraphRow, ...]:
    """Return every node with where its result goes, in the report's order."""
    names = {node.id: node_name(node) for node in graph.nodes}
    feeds: dict[str, list[str]] = {}
    for edge in graph.edges:
        if edge.dst in names:
            feeds.setdefault(edge.src, []).append(f"{names[edge.dst]} (input {edge.input})")
    return tuple(
        GraphRow(
            name=node_name(node),
            role=ROLES.get(node.role, ""),
            shape=words.format_dtype(node.dtype or "") + words.format_shape(node.shape),
            module=one_line(node.module_path or ""),
            source=words.format_line(node.source),
            feeds=", ".join(feeds.get(node.id, ())),
        )
        for node in graph.nodes
    )


def _width(title: str, detail: str, box: Box) -> float:
    # System fonts stay below this mean width of a character at 12 and 11 pixels; bold is wider.
    wider = 1.3 if box.role in _BAD else 0.3
    text = max(len(title) * (_CHARACTER + wider), len(detail) * (_CHARACTER - 0.6))
    return max(text + (34 if box.role in ("parameter", "leaf", "bad_input") else 22), MIN_BOX_WIDTH)


def _outline(role: str, x: float, y: float, width: float, height: float) -> Markup:
    """Draw the shape that tells a role without colour."""
    left, top, right, bottom = x - width / 2, y - height / 2, x + width / 2, y + height / 2
    if role in ("parameter", "leaf"):
        slant = height / 3
        corners = [(left + slant, top), (right, top), (right - slant, bottom), (left, bottom)]
        if role == "parameter":
            corners = [(left, y), (left + slant, top), (right - slant, top), (right, y)]
            corners += [(right - slant, bottom), (left + slant, bottom)]
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in corners)
        return element("polygon", points=points, **paint(fill="canvas", stroke="muted"))
    bad = role in _BAD
    looks = paint(fill="badsoft" if bad else "raised", stroke="bad" if bad else "muted")
    return element(
        "rect",
        x=left,
        y=top,
        width=width,
        height=height,
        rx=height / 2 if role == "bad_input" else 6,
        stroke_width=2 if bad else 1,
        stroke_dasharray="5 3" if role == "failed" else None,
        **looks,
    )


def _box(spot: PlacedBox, title: str, detail: str, attributes: Mapping[str, str | None]) -> Markup:
    role = spot.box.role
    tone, quiet, weight = ("bad", "bad", "600") if role in _BAD else ("text", "muted", "500")
    up = 3.0 if detail else -4.0
    lines = [
        words_at(spot.x, spot.y - up, title, tone=tone, text_anchor="middle", font_weight=weight)
    ]
    if detail:
        lines.append(
            words_at(spot.x, spot.y + 12, detail, tone=quiet, size=11, text_anchor="middle")
        )
    outline = _outline(role, spot.x, spot.y, spot.width, BOX_HEIGHT)
    return element("g", outline, *lines, class_=f"cl-node cl-node-{role}", **attributes)


def _edges(
    layout: Layout, spots: dict[str, PlacedBox], edges: list[tuple[str, str]]
) -> list[Markup]:
    ends = _ports(layout, spots, edges)
    crowded = {
        dst for src, dst in edges if spots[src].box.is_side and ends[src, dst] > spots[dst].x
    }
    lines = {edge: _line(layout, spots, edge, ends[edge]) for edge in edges}
    labels = Labels(list(lines.values()))
    nodes = [node for spot in spots.values() for node in spot.box.members]
    is_mixed = len({node.device for node in nodes if node.device}) > 1
    labelled: set[str] = set()
    drawn = [line.draw() for line in lines.values()]
    for edge, line in lines.items():
        src, after = spots[edge[0]], line.points[1][0]
        if edge[0] not in labelled:
            labelled.add(edge[0])
            # On the outer side of a bend, and away from parameters, there is most room.
            left = after > src.x + 1 or (edge[1] in crowded and after > src.x - 1)
            drawn.append(_edge_label(src, labels, left=left, is_mixed=is_mixed))
    return drawn


def _line(layout: Layout, spots: dict[str, PlacedBox], edge: tuple[str, str], end: float) -> Line:
    src, dst = (spots[key] for key in edge)
    points = [(src.x, src.y + BOX_HEIGHT / 2)]
    for x, y in layout.routes[edge]:
        points += [(x + MARGIN, y + MARGIN + side * BOX_HEIGHT / 2) for side in (-1, 1)]
    points.append((end, dst.y - BOX_HEIGHT / 2 - ARROW))
    bend = _LOW if src.box.is_side else 0.5
    return Line(points=tuple(points), bend=bend, is_bad=src.box.role == "bad_input")


def _ports(
    layout: Layout, spots: dict[str, PlacedBox], edges: list[tuple[str, str]]
) -> dict[tuple[str, str], float]:
    """Choose where each edge meets its target: data in the middle, parameters at the corners."""
    ends: dict[tuple[str, str], float] = {}
    for key, spot in spots.items():
        arriving = [edge for edge in edges if edge[1] == key]
        stops = {edge: layout.routes[edge] or (layout.centres[edge[0]],) for edge in arriving}
        start = {edge: stops[edge][-1][0] + MARGIN for edge in arriving}
        arriving.sort(key=start.__getitem__)
        data = [edge for edge in arriving if not spots[edge[0]].box.is_side]
        room = min(26.0, (spot.width - 60) / max(len(data), 1))
        for at, edge in enumerate(data):
            ends[edge] = spot.x + (at - (len(data) - 1) / 2) * room
        corners = {True: spot.width / 2 - 14, False: spot.width / 2 - 14}
        for edge in arriving:
            if edge not in ends:
                off = start[edge] - spot.x
                right = off > 1
                straight = not data and abs(off) < spot.width / 2 - 14
                ends[edge] = spot.x + (off if straight else corners[right] * (1 if right else -1))
                corners[right] -= 12
    return ends


def _edge_label(src: PlacedBox, labels: Labels, *, left: bool, is_mixed: bool) -> Markup:
    """Write the shape next to an edge, with the device where the graph has several."""
    box, last = src.box, src.box.members[-1]
    # A folded or a parameter box contains its shapes.
    is_shown = box.role == "parameter" or (box.role == "leaf" and len(box.members) > 1)
    shape = "" if is_shown else words.format_shape(last.shape)
    shape = " ".join(filter(None, (shape, last.device if is_mixed else None)))
    if not shape:
        return Markup("")
    text = clip_left(shape, 30)
    spot = labels.place((src.x, src.y + BOX_HEIGHT / 2), text, left=left)
    tone = "bad" if box.role == "bad_input" else "muted"
    # Where a line has to pass behind the words, it leaves room around them.
    halo = {"stroke_width": "3", "paint_order": "stroke", "stroke_linejoin": "round"}
    looks = {**paint(fill=tone, stroke="canvas"), **halo, "text_anchor": spot.anchor}
    return element("text", text, x=spot.x, y=spot.y, font_size=LABEL_SIZE, **looks)


def _legend(roles: list[str], top: float) -> tuple[list[Markup], float]:
    drawn, x = [], MARGIN
    for role in roles:
        drawn.append(_outline(role, x + 13, top + 8, 26, 14))
        drawn.append(words_at(x + 32, top + 12, _LEGEND[role], tone="muted", size=11))
        x += 48 + text_width(_LEGEND[role], 11)
    return drawn, x
