"""Placing of a small directed graph: boxes in rows, the lines between them, labels beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import NamedTuple, TypeAlias

import networkx as nx
from markupsafe import Markup

from cudalens.render.svg import element, paint, text_width

GAP_X = 22.0
GAP_Y = 36.0
_DUMMY_WIDTH = 10.0
_SWEEPS = 8
_LIGHT = 0.02


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Centres of the boxes, the corners that each edge passes, and the size of the whole."""

    width: float
    height: float
    centres: dict[str, tuple[float, float]]
    routes: dict[tuple[str, str], tuple[tuple[float, float], ...]]
    """The points on each edge between its two boxes: one per row that it only passes."""

    def mirrored(self) -> Layout:
        """Return the same with left and right exchanged."""

        def flip(point: Point) -> Point:
            return self.width - point[0], point[1]

        return Layout(
            width=self.width,
            height=self.height,
            centres={key: flip(point) for key, point in self.centres.items()},
            routes={edge: tuple(map(flip, points)) for edge, points in self.routes.items()},
        )


def place(
    sizes: Mapping[str, tuple[float, float]],
    edges: Sequence[tuple[str, str]],
    light: Collection[str] = (),
) -> Layout:
    """Place boxes of the given widths and heights; ``edges`` must have no cycle.

    A box stands in the row just above the first box that uses it, so that inputs stay by their op.
    ``light`` boxes give way to the others, so that side inputs do not bend the main line.
    """
    rows, chains = _rows(list(sizes), edges)
    widths = {key: size[0] for key, size in sizes.items()}
    links = [pair for chain in chains.values() for pair in pairwise(chain)]
    rows = _ordered(rows, links)
    weights = dict.fromkeys(light, _LIGHT)
    xs = _positions(rows, links, widths, weights)
    row_height = max((height for _, height in sizes.values()), default=0.0)
    left = min((xs[key] - widths.get(key, _DUMMY_WIDTH) / 2 for key in xs), default=0.0)
    right = max((xs[key] + widths.get(key, _DUMMY_WIDTH) / 2 for key in xs), default=0.0)
    pitch = row_height + GAP_Y
    ys = {key: at * pitch + row_height / 2 for at, row in enumerate(rows) for key in row}
    points = {key: (xs[key] - left, ys[key]) for key in xs}
    return Layout(
        width=right - left,
        height=max(len(rows) * pitch - GAP_Y, 0.0),
        centres={key: points[key] for key in sizes},
        routes={edge: tuple(points[key] for key in chain[1:-1]) for edge, chain in chains.items()},
    )


def _rows(
    keys: Sequence[str], edges: Sequence[tuple[str, str]]
) -> tuple[list[list[str]], dict[tuple[str, str], list[str]]]:
    graph = nx.DiGraph()
    graph.add_nodes_from(keys)
    graph.add_edges_from((dst, src) for src, dst in edges)
    order = {key: at for at, key in enumerate(keys)}
    generations = [sorted(row, key=order.__getitem__) for row in nx.topological_generations(graph)]
    rows: list[list[str]] = generations[::-1]
    level = {key: at for at, row in enumerate(rows) for key in row}
    chains: dict[tuple[str, str], list[str]] = {}
    for number, (src, dst) in enumerate(edges):
        # A long edge gets an invisible stop in every row between, so that it passes beside boxes.
        stops = [f"\0{number}.{at}" for at in range(level[src] + 1, level[dst])]
        for at, stop in enumerate(stops, start=level[src] + 1):
            rows[at].append(stop)
        chains[src, dst] = [src, *stops, dst]
    return rows, chains


def _ordered(rows: list[list[str]], links: Sequence[tuple[str, str]]) -> list[list[str]]:
    above, below = _neighbours(links)
    best, fewest = rows, _crossings(rows, links)
    current = [list(row) for row in rows]
    for sweep in range(_SWEEPS):
        downward = sweep % 2 == 0
        span = range(1, len(rows)) if downward else range(len(rows) - 2, -1, -1)
        for at in span:
            fixed = current[at - 1] if downward else current[at + 1]
            where = {key: spot for spot, key in enumerate(fixed)}
            near = above if downward else below
            means = {key: _mean(near, where, key, spot) for spot, key in enumerate(current[at])}
            current[at].sort(key=means.__getitem__)
        count = _crossings(current, links)
        if count < fewest:
            best, fewest = [list(row) for row in current], count
    return best


def _neighbours(
    links: Sequence[tuple[str, str]],
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    above, below = defaultdict(list), defaultdict(list)
    for src, dst in links:
        above[dst].append(src)
        below[src].append(dst)
    return above, below


def _mean(near: Mapping[str, list[str]], where: Mapping[str, float], key: str, own: float) -> float:
    spots = [where[other] for other in near.get(key, ()) if other in where]
    return sum(spots) / len(spots) if spots else own


def _crossings(rows: Sequence[Sequence[str]], links: Sequence[tuple[str, str]]) -> int:
    spot = {key: at for row in rows for at, key in enumerate(row)}
    level = {key: at for at, row in enumerate(rows) for key in row}
    between: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for src, dst in links:
        between[level[src]].append((spot[src], spot[dst]))
    return sum(
        (a[0] - b[0]) * (a[1] - b[1]) < 0
        for pairs in between.values()
        for a, b in combinations(pairs, 2)
    )


def _positions(
    rows: Sequence[Sequence[str]],
    links: Sequence[tuple[str, str]],
    widths: Mapping[str, float],
    weights: Mapping[str, float],
) -> dict[str, float]:
    heavy = [(src, dst) for src, dst in links if src not in weights]
    above, below = _neighbours(heavy)[0], _neighbours(links)[1]
    xs: dict[str, float] = {}
    for row in rows:
        xs.update(zip(row, _spread(row, [0.0] * len(row), widths, weights), strict=True))
    for sweep in range(_SWEEPS):
        downward = sweep % 2 == 1
        near = above if downward else below
        for row in rows if downward else reversed(rows):
            wanted = [_mean(near, xs, key, xs[key]) for key in row]
            xs.update(zip(row, _spread(row, wanted, widths, weights), strict=True))
    return xs


def _spread(
    row: Sequence[str],
    wanted: Sequence[float],
    widths: Mapping[str, float],
    weights: Mapping[str, float],
) -> list[float]:
    """Move boxes as little as possible from ``wanted`` until none touches the next one.

    Isotonic regression: with the distances taken out, places must not decrease along the row.
    """
    offsets = [0.0]
    for one, other in pairwise(row):
        pair = widths.get(one, _DUMMY_WIDTH) + widths.get(other, _DUMMY_WIDTH)
        offsets.append(offsets[-1] + pair / 2 + GAP_X)
    blocks: list[tuple[float, float, int]] = []  # weighted sum, weight and count of what was joined
    for key, want, offset in zip(row, wanted, offsets, strict=True):
        weight = weights.get(key, 1.0)
        block = ((want - offset) * weight, weight, 1)
        while blocks and blocks[-1][0] / blocks[-1][1] > block[0] / block[1]:
            last = blocks.pop()
            block = (last[0] + block[0], last[1] + block[1], last[2] + block[2])
        blocks.append(block)
    places = [total / weight for total, weight, count in blocks for _ in range(count)]
    return [spot + offset for spot, offset in zip(places, offsets, strict=True)]


ARROW = 7.0
LABEL_SIZE = 11
_SAMPLES = 12
_ASIDE = 7.0
_DROPS = (15.0, 27.0)
_ABOVE, _BELOW = 9.0, 3.0
_BAND = 20.0

Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One edge: the points that it passes, and how far down each stretch it turns, 0 to 1."""

    points: tuple[Point, ...]
    bend: float
    is_bad: bool

    def draw(self) -> Markup:
        """Draw the line with its arrow head below the last point."""
        tone = "bad" if self.is_bad else "muted"
        path = "M{:.1f} {:.1f}".format(*self.points[0])
        for _, one, other, (x, y) in self._curves():
            path += f"C{one[0]:.1f} {one[1]:.1f} {other[0]:.1f} {other[1]:.1f} {x:.1f} {y:.1f}"
        x, y = self.points[-1]
        head = f"{x - 4.5:.1f},{y:.1f} {x + 4.5:.1f},{y:.1f} {x:.1f},{y + ARROW:.1f}"
        width = 2 if self.is_bad else 1.4
        line = element("path", d=path, stroke_width=width, **paint(stroke=tone))
        return line + element("polygon", points=head, **paint(fill=tone))

    def samples(self) -> Iterator[Point]:
        """Return points along the line, close enough that no word fits between two."""
        for start, one, other, end in self._curves():
            for step in range(_SAMPLES + 1):
                t = step / _SAMPLES
                parts = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
                along = list(zip(parts, (start, one, other, end), strict=True))
                yield sum(p * at[0] for p, at in along), sum(p * at[1] for p, at in along)

    def _curves(self) -> Iterator[tuple[Point, Point, Point, Point]]:
        for (x0, y0), (x1, y1) in pairwise(self.points):
            middle = y0 + (y1 - y0) * self.bend
            yield (x0, y0), (x0, middle), (x1, middle), (x1, y1)


class LabelSpot(NamedTuple):
    """Position of a label."""

    x: float
    y: float
    anchor: str


class Labels:
    """Finds room for one label after another, off the lines and off each other."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._taken: dict[int, list[Point]] = defaultdict(list)
        for line in lines:
            for point in line.samples():
                self._take(point)

    def place(self, start: Point, text: str, *, left: bool) -> LabelSpot:
        """Return the clearest spot below the box whose lower middle is ``start``.

        ``left`` says on which side the label stands when both are clear.
        """
        width = text_width(text, LABEL_SIZE)
        tried: list[tuple[int, int, tuple[float, float], LabelSpot]] = []
        for drop, is_left in product(_DROPS, (left, not left)):
            near = start[0] - _ASIDE if is_left else start[0] + _ASIDE
            ends = (near - width, near) if is_left else (near, near + width)
            spot = LabelSpot(x=near, y=start[1] + drop, anchor="end" if is_left else "start")
            tried.append((self._hits(ends, spot.y), len(tried), ends, spot))
        _, _, (first, last), spot = min(tried, key=lambda item: item[:2])
        for part in range(9):
            self._take((first + (last - first) * part / 8, spot.y - 4))
        return spot

    def _take(self, point: Point) -> None:
        self._taken[int(point[1] // _BAND)].append(point)

    def _hits(self, ends: tuple[float, float], y: float) -> int:
        top, bottom = y - _ABOVE, y + _BELOW
        near = range(int(top // _BAND), int(bottom // _BAND) + 1)
        return sum(
            ends[0] - 2 < px < ends[1] + 2 and top < py < bottom
            for band in near
            for px, py in self._taken.get(band, ())
        )
