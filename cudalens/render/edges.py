"""The lines of the graph picture, and where the shapes stand beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypeAlias

from markupsafe import Markup

from cudalens.render.svg import element, paint, text_width

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


@dataclass(frozen=True, kw_only=True)
class Spot:
    """Where a label stands."""

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

    def place(self, start: Point, text: str, *, left: bool) -> Spot:
        """Return the clearest spot below the box whose lower middle is ``start``.

        Args:
            start: where the edge leaves its box.
            text: the label.
            left: on which side it stands when both are clear.
        """
        width = text_width(text, LABEL_SIZE)
        tried: list[tuple[int, int, tuple[float, float], Spot]] = []
        for drop, is_left in product(_DROPS, (left, not left)):
            near = start[0] - _ASIDE if is_left else start[0] + _ASIDE
            ends = (near - width, near) if is_left else (near, near + width)
            spot = Spot(x=near, y=start[1] + drop, anchor="end" if is_left else "start")
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
