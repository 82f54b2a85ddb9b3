"""Pictures of values: where the bad ones lie in a tensor, and how all of them are spread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import TypeAlias

from markupsafe import Markup

from cudalens.core.report import Bounds, OffenderMap, Offenders, Report, TensorFact
from cudalens.render import words
from cudalens.render.svg import coordinate, element, paint, picture, text_width, words_at
from cudalens.render.words import clip

WIDTH = 420.0
BAR_HEIGHT = 84.0
HISTOGRAM_HEIGHT = 72.0
MAX_CELL = 20.0
MAX_GRID = 200.0
"""Pixels that the rows of a grid take at most."""
MAX_BAR = 44.0
_LEFT = 8.0
_HEADROOM = 22.0
_ROOM = 0.15
_MARGIN = 76.0


def value_map_svg(report: Report) -> Markup:
    """Draw where the bad values lie: bars by position for one dimension, else a grid.

    Empty when the report has no map.
    """
    offenders = report.offenders
    grid = offenders.map if offenders else None
    if offenders is None or grid is None or grid.rows < 1 or grid.columns < 1:
        return Markup("")
    title = value_map_title(report)
    if grid.columns == 1:
        # A column vector has its values by position as well as any other vector.
        grid = replace(grid, rows=1, columns=grid.rows)
    if grid.rows == 1:
        return _bars(grid, report.bounds or Bounds(), title, offenders)
    is_flat = bool(offenders.first) and len(offenders.first[0].position) == 2
    return _cells(grid, title, _shared(grid, offenders, "cell"), is_flat=is_flat)


def value_map_title(report: Report) -> str:
    """Return the picture's name: whose values, how many, what is allowed."""
    name = report.expression or report.argument or ""
    total = f"{report.offenders.total} values by position" if report.offenders else "values"
    allowed = words.format_bounds(report)
    return ", ".join(filter(None, (name, total))) + (f"; allowed {allowed}" if allowed else "")


def histogram_svg(
    fact: TensorFact, bounds: Bounds | None = None, offenders: Offenders | None = None
) -> Markup:
    """Draw how the finite values of a tensor are spread, with the allowed interval as a band.

    A bar that reaches over a bound is drawn as two where ``offenders`` says how many of its values
    are bad; else it is red only when its whole interval is outside.  Empty without a histogram.
    """
    edges = [words.finite(edge) for edge in fact.summary.histogram.edges]
    counts = fact.summary.histogram.counts
    if not counts or len(edges) != len(counts) + 1 or None in edges:
        return Markup("")
    ends = [edge for edge in edges if edge is not None]
    low, high = ends[0], ends[-1]
    if not low < high or max(counts) <= 0:
        return Markup("")
    limits = _between_values(fact, limits_of(bounds))
    base = HISTOGRAM_HEIGHT + _HEADROOM

    def across(value: float) -> float:
        return _LEFT + (min(max(value, low), high) - low) * (WIDTH - 2 * _LEFT) / (high - low)

    drawn = []
    if band := [across(end) for end in _allowed(limits, low, high)]:
        size = {"width": band[1] - band[0], "height": base - 4}
        drawn.append(element("rect", x=band[0], y=4, **size, **paint(fill="oksoft")))
        drawn.append(words_at(band[0] + 4, 15, "allowed", tone="ok", size=11))
    for left, right, count, is_bad in _split_bins(ends, counts, limits, bounds, offenders):
        if count:
            height = max(HISTOGRAM_HEIGHT * count / max(counts), 2.0)
            width, top = max(across(right) - across(left) - 1, 1), base - height
            drawn += _bar(across(left), top, width, height, (top - 6, 3) if is_bad else None)
    for limit in limits:
        if limit is not None and low <= limit <= high:
            drawn.append(_dashed(across(limit), 4, across(limit), base))
    first, last = words.format_number(low), words.format_number(high)
    drawn += _axis_ends(first, last, base + 15, WIDTH - _LEFT)
    title = f"{words.tensor_name(fact)}: how its values are spread, {first} to {last}"
    return picture(WIDTH, base + 22, title, *drawn)


_Limits: TypeAlias = tuple[float | None, float | None]
_Bin: TypeAlias = tuple[float, float, int, bool]


def _between_values(fact: TensorFact, limits: _Limits) -> _Limits:
    """Put the bounds of whole numbers between the last allowed one and the first that is not."""
    if "int" not in fact.dtype:
        return limits
    low, high = limits
    return (None if low is None else low - 0.5, None if high is None else high + 0.5)


def _split_bins(
    edges: Sequence[float],
    counts: Sequence[int],
    limits: _Limits,
    bounds: Bounds | None,
    offenders: Offenders | None,
) -> Iterator[_Bin]:
    """Return the bars: ends, count, and whether it is bad, with those over a bound in two parts."""
    bins = [(*ends, count) for ends, count in zip(pairwise(edges), counts, strict=True)]
    last = len(bins) - 1
    for at, (left, right, count) in enumerate(bins):
        cuts = [x for x in limits if x is not None and left < x < right]
        cut = cuts[0] if len(cuts) == 1 else None
        bad = None if cut is None else _bad_between(offenders, bounds, left, right, at == last)
        if cut is None or not bad or bad > count:
            yield left, right, count, _is_outside(left, right, limits)
        elif cut == limits[1]:
            yield left, cut, count - bad, False
            yield cut, right, bad, True
        else:
            yield left, cut, bad, True
            yield cut, right, count - bad, False


def _bad_between(
    offenders: Offenders | None, bounds: Bounds | None, left: float, right: float, is_last: bool
) -> int | None:
    """Count the bad values of a bar, ``None`` when not all of them are known."""
    if offenders is None or bounds is None or offenders.count != len(offenders.first):
        return None
    low, high = limits_of(bounds)
    values = [words.finite(item.value) for item in offenders.first]
    return sum(
        (low is not None and value < low) or (high is not None and value > high)
        for value in values
        if value is not None and (left <= value < right or (is_last and value == right))
    )


def _allowed(limits: _Limits, low: float, high: float) -> list[float]:
    start = low if limits[0] is None else max(low, limits[0])
    end = high if limits[1] is None else min(high, limits[1])
    return [start, end] if start < end and limits != (None, None) else []


def limits_of(bounds: Bounds | None) -> _Limits:
    """Return the least and the largest allowed value, where there is such a bound."""
    return (words.finite(bounds.min), words.finite(bounds.max)) if bounds else (None, None)


def _is_outside(left: float, right: float, limits: _Limits) -> bool:
    low, high = limits
    return (low is not None and right <= low) or (high is not None and left >= high)


def _bars(grid: OffenderMap, bounds: Bounds, title: str, offenders: Offenders) -> Markup:
    limits = limits_of(bounds)
    lows = [words.finite(value) for value in grid.low]
    highs = [words.finite(value) for value in grid.high]
    low, high = axis_span(lows, highs, limits)
    total = max(offenders.total, grid.columns)
    right = WIDTH - _LEFT - (_MARGIN if limits != (None, None) else 0)
    step = min((right - _LEFT) / total, MAX_BAR)
    right = _LEFT + step * total
    base = BAR_HEIGHT + _HEADROOM

    def down(value: float) -> float:
        return _HEADROOM + BAR_HEIGHT * (high - min(max(value, low), high)) / (high - low)

    drawn = []
    zero = down(max(low, 0.0) if high > 0 else high)
    starts = bar_starts(total, grid.columns)
    for at in range(min(grid.columns, len(lows), len(highs), len(grid.bad))):
        x, room = _LEFT + starts[at] * step, (starts[at + 1] - starts[at]) * step
        width = max(room - min(4.0, room / 5), 1)
        ends = lows[at], highs[at]
        # NaN and the infinities have no height: the bar fills the picture.
        top, bottom = _HEADROOM, base
        if ends[0] is not None and ends[1] is not None:
            top, bottom = min(down(ends[1]), zero), max(down(ends[0]), zero)
        height = max(bottom - top, 2.0)
        cross = max(bottom - height - 7, 5), min(4.0, max(width / 2, 2))
        drawn += _bar(x, bottom - height, width, height, cross if grid.bad[at] > 0 else None)
        if ends[1] is not None and ends[1] > high:
            drawn.append(_cut(x, width, _HEADROOM + 9))
        if ends[0] is not None and ends[0] < low:
            drawn.append(_cut(x, width, base - 9))
    for name, limit in zip(("min", "max"), limits, strict=True):
        if limit is not None and (name == "max" or limit > low):
            text = f"{name} {words.format_number(getattr(bounds, name))}"
            y = down(limit)
            drawn.append(_dashed(_LEFT, y, right + 2, y))
            drawn.append(words_at(right + 7, y + 4, clip(text, 13), tone="bad", size=11))
    drawn += _axis_ends("position 0", str(total - 1) if total > 1 else "", base + 15, right)
    width = right + _LEFT + (_MARGIN if limits != (None, None) else 0)
    note = "; ".join(
        filter(None, (_shared(grid, offenders, "bar"), beyond(lows, highs, low, high)))
    )
    if note:
        drawn.append(words_at(_LEFT, base + 30, note, tone="muted", size=11))
        width = max(width, _LEFT + text_width(note, 11))
    return picture(width, base + (37 if note else 22), title, *drawn)


def bar_starts(total: int, parts: int) -> list[int]:
    """Return where each part of ``total`` positions begins, and the end; as tensor_split cuts."""
    size, longer = divmod(total, parts)
    return [at * size + min(at, longer) for at in range(parts + 1)]


def _cut(x: float, width: float, y: float) -> Markup:
    """Draw the mark of a bar that goes on beyond the picture."""
    wide = coordinate(width + 2)
    path = "".join(f"M{coordinate(x - 1)} {coordinate(y + off)}l{wide} -4" for off in (0, 4))
    return element("path", d=path, stroke_width=2, **paint(stroke="canvas"))


def beyond(lows: list[float | None], highs: list[float | None], low: float, high: float) -> str:
    """Say how far the values go that the picture cuts."""
    most = max((value for value in highs if value is not None), default=high)
    least = min((value for value in lows if value is not None), default=low)
    ends = [words.format_number(most)] if most > high else []
    ends += [words.format_number(least)] if least < low else []
    return f"cut bars go on to {' and '.join(ends)}" if ends else ""


def _shared(grid: OffenderMap, offenders: Offenders, name: str) -> str:
    """Say how many bad values there are where fewer bars or cells can show them."""
    marked = sum(bad > 0 for bad in grid.bad)
    if offenders.count <= marked:
        return ""
    if not marked:
        return f"{offenders.count} bad values"
    return f"{offenders.count} bad values in {marked} {name}{'s' if marked > 1 else ''}"


def axis_span(
    lows: list[float | None], highs: list[float | None], limits: _Limits
) -> tuple[float, float]:
    """Choose the axis: the allowed interval and a little beyond, however far the worst value is."""
    seen = [value for value in (*lows, *highs) if value is not None] or [0.0]
    low = min(seen) if limits[0] is None else limits[0]
    high = max(seen) if limits[1] is None else limits[1]
    low, high = min(low, high), max(low, high)
    room = (high - low) * _ROOM or 1.0
    bottom = low - room if min(seen) < low else min(low, 0.0) if low >= 0 else low
    top = high + room if max(seen) > high else high
    return (bottom, top) if bottom < top else (bottom - 1.0, top + 1.0)


def _bar(
    x: float, y: float, width: float, height: float, cross: tuple[float, float] | None
) -> list[Markup]:
    """Draw a bar; above a bad one stands a cross, at a height and of a size."""
    looks = paint(fill="bad" if cross else "bar")
    bar = element("rect", x=x, y=y, width=width, height=height, **looks)
    return [bar, _cross(x + width / 2, *cross)] if cross else [bar]


def _cells(grid: OffenderMap, title: str, note: str, *, is_flat: bool) -> Markup:
    wide = max(min(MAX_CELL, (WIDTH - 60) // grid.columns), 1.0)
    high = max(min(MAX_CELL, MAX_GRID // grid.rows), 1.0)
    left, top = 44.0, 20.0
    width, height = grid.columns * wide, grid.rows * high
    runs = [(left + x * wide, top + y * high, count) for y, x, count in _bad_runs(grid)]
    marks: dict[str, str | float | None] = {"d": _marks(runs, wide, high), "stroke_width": 1.6}
    drawn = [
        element("rect", x=left, y=top, width=width, height=height, **paint(fill="linksoft")),
        element("path", d=_lines(grid, left, top, wide, high), **paint(stroke="line")),
        element("path", d=_runs(runs, wide, high), **paint(fill="bad")),
        element("path", **marks, **paint(stroke="canvas")),
        words_at(left, top - 7, "dim 1 →" if is_flat else "other dims →", tone="muted", size=11),
        words_at(left - 7, top + 11, "dim 0", tone="muted", size=11, text_anchor="end"),
        words_at(left - 7, top + 24, "↓", tone="muted", size=11, text_anchor="end"),
    ]
    if note:
        drawn.append(words_at(left, top + height + 15, note, tone="muted", size=11))
    across = max(left + width + 8, 160, left + text_width(note, 11) + 8)
    return picture(across, top + height + (24 if note else 8), title, *drawn)


_Runs: TypeAlias = list[tuple[float, float, int]]
"""Start and length of each run of bad cells in a row."""


def _bad_runs(grid: OffenderMap) -> Iterator[tuple[int, int, int]]:
    """Return row, first column and length of each run of bad cells in a row.

    One path for a run keeps the picture of a wholly bad tensor small.
    """
    shown = grid.bad[: grid.rows * grid.columns]
    cells = [divmod(at, grid.columns) for at, bad in enumerate(shown) if bad > 0]
    for _, run in groupby(enumerate(cells), key=lambda item: (item[1][0], item[1][1] - item[0])):
        spots = [cell for _, cell in run]
        yield *spots[0], len(spots)


def _runs(runs: _Runs, wide: float, high: float) -> str:
    path = ""
    for x, y, count in runs:
        across, down = coordinate(count * wide), coordinate(high)
        path += f"M{coordinate(x)} {coordinate(y)}h{across}v{down}h-{across}z"
    return path


def _lines(grid: OffenderMap, left: float, top: float, wide: float, high: float) -> str:
    width, height = coordinate(grid.columns * wide), coordinate(grid.rows * high)
    across = [coordinate(left + at * wide) for at in range(grid.columns + 1)]
    down = [coordinate(top + at * high) for at in range(grid.rows + 1)]
    standing = "".join(f"M{x} {coordinate(top)}v{height}" for x in across)
    return standing + "".join(f"M{coordinate(left)} {y}h{width}" for y in down)


def _marks(runs: _Runs, wide: float, high: float) -> str:
    """Cross each bad cell, so that it is told without its colour."""
    size = min(wide, high) * 0.4
    arm = coordinate(size)
    path, cross = "", f"l{arm} {arm}m0-{arm}l-{arm} {arm}"
    for x, y, count in runs:
        first = f"M{coordinate(x + (wide - size) / 2)} {coordinate(y + (high - size) / 2)}"
        path += first + f"m{coordinate(wide)}-{arm}".join([cross] * count)
    return path


def _cross(x: float, y: float, arm: float) -> Markup:
    side = coordinate(2 * arm)
    path = f"M{coordinate(x - arm)} {coordinate(y - arm)}l{side} {side}m0-{side}l-{side} {side}"
    return element("path", d=path, stroke_width=1.6, **paint(stroke="bad"))


def _dashed(x0: float, y0: float, x1: float, y1: float) -> Markup:
    looks = paint(stroke="bad")
    return element("line", x1=x0, y1=y0, x2=x1, y2=y1, stroke_dasharray="4 3", **looks)


def _axis_ends(left: str, right: str, y: float, end: float) -> list[Markup]:
    return [
        words_at(_LEFT, y, left, tone="muted", size=11),
        words_at(end, y, right, tone="muted", size=11, text_anchor="end"),
    ]
