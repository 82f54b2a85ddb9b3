"""A report as a figure of matplotlib: for a paper, a slide or a chat.

Values with the bad ones marked, their bound, and the autograd graph around the failure.
matplotlib is imported by this module alone, which nothing imports to show a report.
"""

from __future__ import annotations

from io import BytesIO
from itertools import pairwise
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from cudalens.core.report import Bounds, OffenderMap, Report
from cudalens.render import figures, words
from cudalens.render.graph import BOX_HEIGHT, MARGIN, Placed, placed
from cudalens.render.svg import LIGHT

_DPI = 96
_WIDTH = 6.4
_VALUES_HEIGHT = 2.4
_HEAD = 0.8


class ReportFigure(Figure):
    """Figure that a notebook shows as a picture, also where pyplot has not been imported."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def figure(report: Report) -> Figure:
    """Draw values and graph below each other, under the headline; what is not known is left out."""
    report = words.with_module_names(report)
    grid = report.offenders.map if report.offenders else None
    graph = placed(report.graph, prevented=report.prevented, types=words.module_types(report))
    heights = [_VALUES_HEIGHT] if grid is not None and grid.bad else []
    width = _WIDTH
    if graph is not None:
        heights.append((graph.layout.height + 2 * MARGIN) / _DPI + 0.3)
        width = max(width, (graph.layout.width + 2 * MARGIN) / _DPI)
    drawn = ReportFigure(figsize=(width, sum(heights) + _HEAD), dpi=_DPI, layout="constrained")
    drawn.patch.set_facecolor("white")
    title = fill(words.headline(report).replace("`", ""), int(width * 11))
    drawn.suptitle(_plain(title), fontsize=11, fontweight="bold", color=LIGHT["bad"])
    if not heights:
        return drawn
    axes = drawn.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    if grid is not None and grid.bad:
        _values(axes[0], report, grid)
    if graph is not None:
        _graph(axes[-1], graph)
    return drawn


def _plain(text: str) -> str:
    """Return text that matplotlib does not read as mathematics."""
    return text.replace("$", r"\$")


def _values(axes: Any, report: Report, grid: OffenderMap) -> None:
    axes.set_title(_plain(figures.value_map_title(report)), fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    if 1 in (grid.rows, grid.columns):
        _bars(axes, report, grid)
        return
    bad = [grid.bad[at : at + grid.columns] for at in range(0, len(grid.bad), grid.columns)]
    edges = [[at - 0.5 for at in range(size + 1)] for size in (grid.columns, grid.rows)]
    axes.pcolormesh(
        *edges,
        [[count > 0 for count in row] for row in bad],
        cmap=_colours(LIGHT["linksoft"], LIGHT["bad"]),
        vmin=0,
        vmax=1,
        edgecolors=LIGHT["line"],
        linewidth=0.4,
    )
    spots = [(x, y) for y, row in enumerate(bad) for x, n in enumerate(row) if n]
    if spots:
        axes.plot(*zip(*spots, strict=True), "x", color="white", markersize=4)
    axes.invert_yaxis()
    is_flat = bool(report.offenders and report.offenders.first) and (
        len(report.offenders.first[0].position) == 2  # type: ignore[union-attr]
    )
    axes.set_xlabel("dim 1" if is_flat else "other dims", fontsize=8)
    axes.set_ylabel("dim 0", fontsize=8)
    if not _is_whole(report, grid):
        axes.set_xticks([])
        axes.set_yticks([])


def _is_whole(report: Report, grid: OffenderMap) -> bool:
    return report.offenders is not None and report.offenders.total == grid.rows * grid.columns


def _colours(*names: str) -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap(names)


def _bars(axes: Any, report: Report, grid: OffenderMap) -> None:
    assert report.offenders is not None
    bounds = report.bounds or Bounds()
    limits = figures.limits_of(bounds)
    lows, highs = (list(map(words.finite, values)) for values in (grid.low, grid.high))
    low, high = figures.axis_span(lows, highs, limits)
    # A value far outside is cut, so that the others can still be told apart.
    seen = [value for value in (*lows, *highs) if value is not None]
    if seen and max(seen) - min(seen) <= 2 * (high - low):
        low, high = min(low, *seen), max(high, *seen)
    starts = figures.bar_starts(max(report.offenders.total, len(grid.bad)), len(grid.bad))
    for at, bad in enumerate(grid.bad):
        top = high if highs[at] is None else min(highs[at] or 0.0, high)
        bottom = min(0.0 if low <= 0.0 <= high else low, low if lows[at] is None else lows[at] or 0)
        bottom = max(bottom, low)
        middle, width = (starts[at] + starts[at + 1] - 1) / 2, (starts[at + 1] - starts[at]) * 0.8
        colour = LIGHT["bad" if bad else "bar"]
        axes.bar(middle, top - bottom, width, bottom=bottom, color=colour)
        if bad:
            axes.plot(middle, top + (high - low) * 0.04, "x", color=LIGHT["bad"], markersize=5)
    for name, limit in zip(("min", "max"), limits, strict=True):
        if limit is not None and low <= limit <= high:
            axes.axhline(limit, color=LIGHT["bad"], linestyle="--", linewidth=1)
            number = words.format_number(getattr(bounds, name))
            near = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
            sides = ("axes fraction", "data")
            looks = {"fontsize": 8, "color": LIGHT["bad"], "annotation_clip": False}
            axes.annotate(f"{name} {number}", (1, limit), xycoords=sides, **near, **looks)
    note = figures.beyond(lows, highs, low, high)
    axes.set_xlabel("position" + (f" ({note})" if note else ""), fontsize=8)
    axes.set_ylim(low, high + (high - low) * 0.1)
    axes.spines[["top", "right"]].set_visible(False)


def _graph(axes: Any, graph: Placed) -> None:
    layout = graph.layout
    axes.set_title("Autograd graph", fontsize=9, loc="left")
    axes.set_xlim(0, layout.width + 2 * MARGIN)
    axes.set_ylim(layout.height + 2 * MARGIN, 0)
    axes.set_aspect("equal")
    axes.axis("off")
    half = BOX_HEIGHT / 2
    for (src, dst), stops in layout.routes.items():
        one, other = graph.spots[src], graph.spots[dst]
        colour = LIGHT["bad" if one.box.role == "bad_input" else "muted"]
        way = [(one.x, one.y + half), *((x + MARGIN, y + MARGIN) for x, y in stops)]
        for start, end in pairwise(way):
            axes.plot(*zip(start, end, strict=True), color=colour, linewidth=1)
        arrow: dict[str, Any] = {
            "arrowstyle": "-|>",
            "mutation_scale": 9,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        axes.add_patch(
            FancyArrowPatch(way[-1], (other.x, other.y - half), color=colour, linewidth=1, **arrow)
        )
    for key, spot in graph.spots.items():
        is_bad = spot.box.role in ("failed", "bad_input")
        corner = (spot.x - spot.width / 2, spot.y - half)
        style = "round,pad=0,rounding_size=" + ("19" if spot.box.role == "bad_input" else "5")
        looks: dict[str, Any] = {"facecolor": LIGHT["badsoft" if is_bad else "raised"], "zorder": 2}
        looks["edgecolor"] = LIGHT["bad" if is_bad else "muted"]
        looks["linestyle"] = "--" if spot.box.role == "failed" else "-"
        axes.add_patch(FancyBboxPatch(corner, spot.width, BOX_HEIGHT, boxstyle=style, **looks))
        title, detail = map(_plain, graph.texts[key])
        middle = {"ha": "center", "va": "center", "color": LIGHT["bad" if is_bad else "text"]}
        axes.text(spot.x, spot.y - (7 if detail else 0), title, fontsize=8, **middle, zorder=3)
        axes.text(spot.x, spot.y + 9, detail, fontsize=7, **middle, zorder=3)
