"""One row of the tensor at fault: its values by position and the bad ones among them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

from markupsafe import Markup

from cudalens.core.report import Offender, OffenderMap, Offenders, Report
from cudalens.render import words
from cudalens.render.figures import value_map_svg
from cudalens.render.safe import one_line

_DIMENSIONS = 2


def row_labels(report: Report) -> tuple[str, ...]:
    """Return the name of each row of the map, empty when there is only one or none to look into.

    A map has at most 32 rows: where the tensor has more, one row of it stands for several.
    """
    grid, shape = _grid(report), _shape(report)
    if grid is None or grid.rows < _DIMENSIONS or len(shape) <= _DIMENSIONS:
        return ()
    return tuple(
        f"{start}" if stop == start + 1 else f"{start}–{stop - 1}"
        for start, stop in _spans(shape[0], grid.rows)
    )


def first_bad_row(report: Report) -> int:
    """Return the number of the first row of the map with a bad value."""
    grid = _grid(report)
    sums = [sum(_row(grid, at).bad) for at in range(grid.rows)] if grid else []
    return next((at for at, count in enumerate(sums) if count), 0)


def row_title(report: Report, at: int) -> str:
    """Return the name of row ``at`` with what is wrong in it."""
    grid = _grid(report)
    bad = sum(_row(grid, at).bad) if grid else 0
    name = one_line(report.expression or report.argument or "values")
    told = "no bad value" if not bad else f"{bad} bad"
    return f"{name}[{row_labels(report)[at]}]: {told}"


def row_svg(report: Report, at: int) -> Markup:
    """Draw the values of row ``at`` by position, each bar from the least to the greatest."""
    grid, shape = _grid(report), _shape(report)
    if grid is None:
        return Markup("")
    start, stop = _spans(shape[0], grid.rows)[at]
    total = (stop - start) * math.prod(shape[1:])
    line = _row(grid, at)
    found = Offenders(count=sum(line.bad), total=total, map=line)
    return value_map_svg(replace(report, offenders=found))


def row_offenders(report: Report, at: int) -> tuple[Offender, ...]:
    """Return those of the listed bad values that lie in row ``at``."""
    grid, shape = _grid(report), _shape(report)
    if grid is None or report.offenders is None:
        return ()
    start, stop = _spans(shape[0], grid.rows)[at]
    return tuple(item for item in report.offenders.first if start <= item.position[0] < stop)


def _grid(report: Report) -> OffenderMap | None:
    return report.offenders.map if report.offenders else None


def _shape(report: Report) -> tuple[int, ...]:
    return next((fact.shape for fact in report.tensors if words.is_at_fault(report, fact)), ())


def _row(grid: OffenderMap, at: int) -> OffenderMap:
    part = slice(at * grid.columns, (at + 1) * grid.columns)
    return OffenderMap(
        rows=1,
        columns=grid.columns,
        bad=grid.bad[part],
        low=grid.low[part],
        high=grid.high[part],
    )


def _spans(size: int, parts: int) -> list[tuple[int, int]]:
    # As torch.tensor_split cuts: the first ``size % parts`` parts are one longer.
    sizes = [size // parts + (at < size % parts) for at in range(parts)]
    ends = list(accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))
