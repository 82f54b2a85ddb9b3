"""A report as a matplotlib figure, for a paper, a slide or a chat.

The values with the bad ones marked, and the strip of calls around the failure.  Only this module
imports matplotlib, and showing a report does not import it.
"""

from __future__ import annotations

from io import BytesIO
from textwrap import fill
from typing import Any

from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from cudalens.core.report import OffenderMap, Plane, Report
from cudalens.render import figures, screen, words
from cudalens.render.colours import LIGHT
from cudalens.render.strip import Strip, strip

_DPI = 96
_WIDTH = 6.4
_VALUES_HEIGHT = 2.4
_HEAD = 0.8
_LANE = 0.8
_COLUMN = 1.6
"""Size of a lane and of a column of the strip, in inches."""


class ReportFigure(Figure):
    """A figure that a notebook shows as a picture even if pyplot was not imported."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def figure(report: Report) -> Figure:
    """Draw the headline, the values and the strip, as far as they are known."""
    report = words.with_module_names(report)
    offenders = report.offenders
    planes = offenders.planes if offenders else ()
    grid = offenders.map if offenders and offenders.map and offenders.map.bad else None
    drawn_strip = strip(report)
    heights = [_VALUES_HEIGHT] if planes or grid else []
    width = _WIDTH
    if drawn_strip is not None:
        heights.append(_LANE * max(node.lane for node in drawn_strip.nodes) + 0.2)
        width = max(width, _COLUMN * max(node.column for node in drawn_strip.nodes))
    drawn = ReportFigure(figsize=(width, sum(heights) + _HEAD), dpi=_DPI, layout="constrained")
    drawn.patch.set_facecolor("white")
    title = fill(screen.plain(screen.build(report).headline), int(width * 11))
    drawn.suptitle(_plain(title), fontsize=11, fontweight="bold", color=LIGHT["bad"])
    if not heights:
        return drawn
    axes = drawn.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    if planes:
        _image(axes[0], report, planes[0])
    elif grid is not None:
        _bars(axes[0], report, grid)
    if drawn_strip is not None:
        _strip(axes[-1], drawn_strip)
    return drawn


def _plain(text: str) -> str:
    """Escape text that matplotlib would read as mathematics."""
    return text.replace("$", r"\$")


def _name(report: Report) -> str:
    name = report.expression or report.argument or "values"
    total = report.offenders.total if report.offenders else 0
    allowed = words.format_bounds(report)
    return f"{name}, {total} values" + (f"; allowed {allowed}" if allowed else "")


def _image(axes: Any, report: Report, plane: Plane) -> None:
    """Draw a plane in the tensor's geometry: good values blue, bad ones red."""
    # Without the background, which is the first colour of the palette.
    levels = [[figures.INDEX[sign] - 1 for sign in line] for line in plane.rows]
    colours = ListedColormap([figures.css(colour) for colour in figures.PALETTE[1:]])
    index = f"[{', '.join(map(str, plane.index))}]" if plane.index else ""
    # Ticks are at the centres of values, and rows are counted from the top.
    extent = (-0.5, plane.size[1] - 0.5, plane.size[0] - 0.5, -0.5)
    axes.imshow(
        levels,
        cmap=colours,
        vmin=0,
        vmax=len(figures.PALETTE) - 2,
        extent=extent,
        interpolation="nearest",
    )
    axes.set_title(_plain(f"{_name(report)}{' at ' + index if index else ''}"), fontsize=9)
    axes.tick_params(labelsize=8)


def _bars(axes: Any, report: Report, grid: OffenderMap) -> None:
    """Draw a vector by position, with a bar from the smallest to the largest value of each part."""
    axes.set_title(_plain(_name(report)), fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    lows, highs = (list(map(words.finite, values)) for values in (grid.low, grid.high))
    seen = [value for value in (*lows, *highs, 0.0) if value is not None]
    ends = min(seen), max(seen)
    for at, bad in enumerate(grid.bad):
        top = ends[1] if highs[at] is None else max(highs[at] or 0.0, 0.0)
        bottom = ends[0] if lows[at] is None else min(lows[at] or 0.0, 0.0)
        colour = LIGHT["bad" if bad else "bar"]
        axes.bar(at, top - bottom, 0.8, bottom=bottom, color=colour)
        if bad:
            axes.plot(at, top + (ends[1] - ends[0]) * 0.04, "x", color=LIGHT["bad"], markersize=5)
    for name, limit in zip(("min", "max"), words.limits_of(report.bounds), strict=True):
        if limit is not None and ends[0] <= limit <= ends[1]:
            axes.axhline(limit, color=LIGHT["bad"], linestyle="--", linewidth=1)
            near = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
            looks = {"fontsize": 8, "color": LIGHT["bad"], "annotation_clip": False}
            text = f"{name} {limit:g}"
            axes.annotate(text, (1, limit), xycoords=("axes fraction", "data"), **near, **looks)
    axes.set_xlabel("position", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _strip(axes: Any, drawn: Strip) -> None:
    columns = max(node.column for node in drawn.nodes)
    lanes = max(node.lane for node in drawn.nodes)
    axes.set_xlim(0.4, columns + 0.6)
    # Downwards, so that the first lane is on top.
    axes.set_ylim(lanes + 0.6, 0.5)
    axes.axis("off")
    half = 0.38
    arrow: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "shrinkA": 0, "shrinkB": 0}
    for node in drawn.nodes:
        ends = [(node.column - 1 + half, node.column - half, node.lane)] if node.has_arrow else []
        start = (node.column + half, node.lane)
        if node.joins:
            ends.append((node.column + half, node.column + 1 - half, 1))
        for left, right, lane in ends:
            begin = start if node.joins and lane == 1 and node.lane != 1 else (left, lane)
            axes.add_patch(
                FancyArrowPatch(begin, (right, lane), color=LIGHT["muted"], linewidth=1, **arrow)
            )
        is_red = node.look in ("fail", "badin")
        looks: dict[str, Any] = {"facecolor": LIGHT["badsoft" if is_red else "raised"]}
        looks["edgecolor"] = LIGHT["bad" if is_red else "muted"]
        looks["linestyle"] = "--" if node.is_bad else "-"
        box = FancyBboxPatch(
            (node.column - half, node.lane - 0.28),
            2 * half,
            0.56,
            boxstyle="round,pad=0,rounding_size=0.06",
            zorder=2,
            **looks,
        )
        axes.add_patch(box)
        colour = LIGHT["bad" if is_red else "text"]
        middle: dict[str, Any] = {"ha": "center", "va": "center", "color": colour, "zorder": 3}
        title = words.elide(node.title, 17)
        axes.text(node.column, node.lane - 0.09, _plain(title), fontsize=7.5, **middle)
        small = node.small or node.shape
        axes.text(node.column, node.lane + 0.13, _plain(small), fontsize=7, **middle)
        if node.small and node.shape:
            axes.text(node.column, node.lane + 0.39, node.shape, fontsize=7, ha="center")
