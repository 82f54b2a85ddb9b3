"""Pictures of values in the tensor's geometry, as small PNG files without text.

A picture is drawn only if it says more than the sentence: an image with bad pixels, a matrix, a
vector of labels by class.  Its colours are visible on white and on dark pages, because a page that
drops scripts and styles does not reveal its theme.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from cudalens.core.report import Offenders, Plane, Report, TensorFact
from cudalens.render import words
from cudalens.render.screen import SHORT

HEIGHT, WIDTH = 128, 260
"""Largest height and width of a picture, in pixels."""
MAX_PLANES = 2
"""How many planes are on the first screen; the live view shows all."""
MAX_SCALE = 6
MAX_BARS = 32
_WORDS = 270
"""Width of the caption below a narrow picture, in pixels."""
_BAR_WIDTH, _BAR_GAP, _BAR_HEIGHT = 14, 3, 72
_FIRST, _LAST = (196, 214, 240), (58, 104, 178)
BAD, PARTLY, ALLOWED = (212, 56, 46), (240, 150, 140), (150, 156, 164)
_LEVELS = 10
INDEX = {**{str(at): at + 1 for at in range(_LEVELS)}, "x": 11, "/": 12, "-": 13}
"""The palette index of each sign of a plane."""
PALETTE: tuple[tuple[int, ...], ...] = (
    (0, 0, 0),
    *(
        tuple(round(a + (b - a) * at / (_LEVELS - 1)) for a, b in zip(_FIRST, _LAST, strict=True))
        for at in range(_LEVELS)
    ),
    *(BAD, PARTLY, ALLOWED),
)
"""Background, good values from smallest to largest, bad values, some bad values, allowed values."""
_SOME_BAD = 2


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture: its image data, its size, and its text alternative."""

    data: str
    width: int
    height: int
    title: str
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The pictures of a report, and their legend."""

    pictures: tuple[Picture, ...]
    title: str
    """Name and size of the tensor, and the scale if a cell stands for several values."""
    legend: tuple[tuple[str, str], ...]
    """Pairs of colour and meaning."""

    @property
    def width(self) -> int:
        """Width of all pictures side by side, in pixels."""
        pictures = sum(max(item.width, len(item.caption) * 6) + 16 for item in self.pictures)
        legend = sum(len(text) + 4 for _, text in self.legend)
        return max(pictures, min(int(max(len(self.title), legend) * 6.4), _WORDS))


def figure(report: Report) -> Figure | None:
    """Return the figure of a report, ``None`` if it would add nothing to the sentence."""
    offenders = report.offenders
    if offenders is None or not offenders.count or offenders.total <= SHORT:
        return None
    if offenders.planes and offenders.count >= _SOME_BAD:
        return _planes(report, offenders)
    fact = next((fact for fact in report.tensors if words.is_at_fault(report, fact)), None)
    return _classes(report, fact) if fact is not None else None


# --- an image stays an image ----------------------------------------------------------------------


def _planes(report: Report, offenders: Offenders) -> Figure | None:
    planes = [plane for plane in offenders.planes if plane.rows and plane.rows[0]][:MAX_PLANES]
    if not planes:
        return None
    # Tensors of a backward node are gradients, which have no name.
    unnamed = "gradients" if report.phase == "backward" else "values"
    typed = next((fact.expression for fact in report.tensors if fact.bad_at is not None), None)
    own = report.expression or typed or report.argument or unnamed
    name = words.clip(words.one_line(own), 24)
    size = f"{planes[0].size[0]} × {planes[0].size[1]}"
    pictures = tuple(
        plane_picture(plane, name, width=WIDTH // len(planes) if len(planes) > 1 else WIDTH)
        for plane in planes
    )
    signs = {sign for plane in planes for line in plane.rows for sign in line}
    values = {item.value for item in offenders.first}
    value = f"{words.format_number(values.pop())}: " if len(values) == 1 else ""
    legend = [(css(BAD), f"{value}bad")] if "x" in signs else []
    legend += [(css(PARTLY), "some bad")] if "/" in signs else []
    legend += [(css(_LAST), f"good{f' {offenders.others}' if offenders.others else ''}")]
    allowed = report.bounds.also_allowed if report.bounds else ()
    legend += [(css(ALLOWED), f"{', '.join(map(str, allowed))} allowed")] if "-" in signs else []
    down, across = _cell_size(planes[0])
    scale = f", a cell is {down} × {across} values" if (down, across) != (1, 1) else ""
    return Figure(pictures=pictures, title=f"{name}  {size}{scale}", legend=tuple(legend))


def plane_picture(plane: Plane, name: str, *, width: int = WIDTH) -> Picture:
    """Return a plane as a picture with the tensor's proportions, as far as pixels allow."""
    rows, columns = len(plane.rows), max(map(len, plane.rows))
    # A cell of 8 × 16 values is drawn twice as wide as high.
    tall, wide = _cell_size(plane)
    least = min(tall, wide)
    down, across = (max(min(round(side / least), 4), 1) for side in (tall, wide))
    scale = max(min(HEIGHT // (rows * down), width // (columns * across), MAX_SCALE), 1)
    down, across = (
        max(min(side * scale, room // count), 1)
        for side, room, count in ((down, HEIGHT, rows), (across, max(width, columns), columns))
    )
    pixels = [
        [INDEX.get(sign, 0) for sign in line.ljust(columns) for _ in range(across)]
        for line in plane.rows
        for _ in range(down)
    ]
    index = f"[{', '.join(map(str, plane.index))}]" if plane.index else ""
    size = f"{plane.size[0]} × {plane.size[1]}"
    return Picture(
        data=_png(pixels),
        width=columns * across,
        height=rows * down,
        title=f"{name}{index}, {size}: where the bad values are",
        caption=index,
    )


def _cell_size(plane: Plane) -> tuple[int, int]:
    """Return the rows and columns of values in one cell."""
    down = -(-plane.size[0] // max(len(plane.rows), 1))
    return down, -(-plane.size[1] // max(*map(len, plane.rows), 1))


# --- labels by class ------------------------------------------------------------------------------


def _classes(report: Report, fact: TensorFact) -> Figure | None:
    """Return a bar chart of the values of an integer tensor, with red bars out of bounds."""
    counts = value_counts(fact)
    low, high = words.limits_of(report.bounds)
    if counts is None or len(counts) < _SOME_BAD or (low is None and high is None):
        return None
    most = max(count for _, count in counts)
    bars, bad = [], []
    allowed = report.bounds.also_allowed if report.bounds else ()
    for value, count in counts:
        is_bad = (low is not None and value < low) or (high is not None and value > high)
        is_marked = value in allowed
        colour = INDEX["-"] if is_marked else INDEX["x"] if is_bad else _LEVELS
        # A rare value has a bar that is still visible.
        tall = max(round(_BAR_HEIGHT * count / most), 2) if count else 0
        bars.append((tall, colour))
        if count and is_bad and not is_marked:
            bad.append(value)
    pixels = [
        [
            colour if at < _BAR_WIDTH and _BAR_HEIGHT - y <= tall else 0
            for tall, colour in bars
            for at in range(_BAR_WIDTH + _BAR_GAP)
        ]
        for y in range(_BAR_HEIGHT)
    ]
    first, last = counts[0][0], counts[-1][0]
    typed = next((item for item in report.tensors if item.bad_at is not None), fact)
    name = words.clip(words.one_line(report.expression or words.tensor_name(typed)), 24)
    told = ", ".join(f"{value}: {count}" for value, count in counts)
    legend = [(css(BAD), f"{', '.join(map(str, bad))}: no class here")] if bad else []
    return Figure(
        pictures=(
            Picture(
                data=_png(pixels),
                width=len(bars) * (_BAR_WIDTH + _BAR_GAP),
                height=_BAR_HEIGHT,
                title=f"how often each value of {name} occurs: {told}",
            ),
        ),
        title=f"{name} from {first} to {last}, up to {most} each",
        legend=tuple(legend),
    )


def value_counts(fact: TensorFact) -> list[tuple[int, int]] | None:
    """Return the count of each integer, ``None`` if a bin has several integers."""
    counts, edges = fact.summary.histogram.counts, fact.summary.histogram.edges
    low, high = fact.summary.min, fact.summary.max
    if "int" not in fact.dtype or not isinstance(low, int) or not isinstance(high, int):
        return None
    if not edges or high - low + 1 != len(counts) or len(counts) > MAX_BARS:
        return None
    return [(low + at, count) for at, count in enumerate(counts)]


# --- PNG ------------------------------------------------------------------------------------------


def _png(rows: Sequence[Sequence[int]]) -> str:
    """Return palette indices as a PNG data URL; index 0 is transparent."""
    # Each row begins with the number of its filter, 0 for none.
    raw = b"".join(b"\0" + bytes(row) for row in rows)
    # Eight bits for each pixel, and colour type 3: it is an index into the palette.
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    parts = (
        (b"IHDR", header),
        (b"PLTE", bytes(part for colour in PALETTE for part in colour)),
        (b"tRNS", b"\0"),
        (b"IDAT", zlib.compress(raw, 9)),
        (b"IEND", b""),
    )
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in parts
    )
    return "data:image/png;base64," + base64.b64encode(data).decode()


def css(colour: Sequence[int]) -> str:
    """Return a colour in CSS notation."""
    return "#{:02x}{:02x}{:02x}".format(*colour)
