"""Pictures of values: an image stays an image, allowed values are not red, a cell is no lie."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from cudalens.core.report import (
    Bounds,
    Histogram,
    Offender,
    Offenders,
    Plane,
    Report,
    TensorSummary,
)
from cudalens.core.tensor_values import find_offenders
from cudalens.render.figures import (
    MAX_BARS,
    PALETTE,
    Figure,
    Picture,
    css,
    figure,
    plane_picture,
    value_counts,
)
from tests.builders import LABELS, fact, make_report, offenders

BAD, PARTLY, ALLOWED = 11, 12, 13


def pixels(picture: Picture) -> list[list[int]]:
    """Return the palette's indices of an image's pixels."""
    data = base64.b64decode(picture.data.partition(",")[2])
    at, body = 8, b""
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            body += data[at + 8 : at + 8 + size]
        at += size + 12
    raw = zlib.decompress(body)
    step = picture.width + 1
    return [list(raw[row * step + 1 : (row + 1) * step]) for row in range(picture.height)]


def of(values: Any, low: float, high: float, also: tuple[int, ...] = ()) -> Report:
    bad = (values < low) | (values > high)
    for value in also:
        bad &= values != value
    found = find_offenders(values, bad, also)
    bounds = Bounds(min=low, max=high, also_allowed=also)
    return make_report(offenders=found, bounds=bounds)


def shares(picture: Picture) -> dict[int, float]:
    flat = [index for row in pixels(picture) for index in row]
    return {index: flat.count(index) / len(flat) for index in set(flat)}


def test_a_border_of_two_pixels_is_a_border() -> None:
    """6 % bad are 6 % red, in the geometry of the mask."""
    masks = torch.zeros(2, 64, 64, dtype=torch.long)
    masks[:, :2] = masks[:, :, :2] = 255
    drawn = figure(of(masks, 0, 2))
    assert drawn is not None and len(drawn.pictures) == 2
    assert shares(drawn.pictures[0])[BAD] == pytest.approx(float((masks[0] == 255).double().mean()))
    assert [picture.caption for picture in drawn.pictures] == ["[0]", "[1]"]
    assert drawn.title.endswith("  64 × 64")


def test_a_cell_of_several_values_is_red_only_if_all_are() -> None:
    """Of 784 columns a cell holds 13: where some are bad it is paler, and the scale is named."""
    values = torch.zeros(16, 784)
    values[:, 700] = 2.0
    values[3, 13:26] = 2.0
    drawn = figure(of(values, 0, 1))
    assert drawn is not None
    (picture,) = drawn.pictures
    found = shares(picture)
    assert found[PARTLY] > 0 and found[BAD] == pytest.approx(1 / 16 / 61, 0.1)
    assert "a cell is 1 × 13 values" in drawn.title


def test_allowed_values_are_not_red() -> None:
    values = torch.zeros(8, 8, dtype=torch.long)
    values[0], values[1, :2] = -100, 9
    drawn = figure(of(values, 0, 6, (-100,)))
    assert drawn is not None
    assert shares(drawn.pictures[0])[ALLOWED] == pytest.approx(1 / 8)
    assert shares(drawn.pictures[0])[BAD] == pytest.approx(2 / 64)
    assert "-100 allowed" in [text for _, text in drawn.legend]


@pytest.mark.parametrize("shape", [(2, 40, 300, 300), (3, 5000, 2), (20, 20), (1, 70, 70)])
def test_a_picture_is_at_most_130_pixels_high(shape: tuple[int, ...]) -> None:
    values = torch.zeros(shape)
    values.view(-1)[:2] = 9
    drawn = figure(of(values, 0, 1))
    assert drawn is not None
    for picture in drawn.pictures:
        assert picture.height <= 130 and picture.width <= 264
        assert len(pixels(picture)) == picture.height


def test_labels_are_a_bar_for_each_class() -> None:
    drawn = figure(make_report())
    assert drawn is not None
    (picture,) = drawn.pictures
    base = pixels(picture)[-1]
    assert base.count(BAD) == base.count(10) / 9
    assert "10: 3" in picture.title


@pytest.mark.parametrize(
    "report",
    [
        make_report(offenders=None),
        make_report(offenders=offenders(8, 1, first=[((1,), 64)])),
        of(torch.tensor([[0.0] * 8] * 8).index_fill(0, torch.tensor([0]), 0), 0, 1),
        make_report(
            bounds=None, tensors=(fact("target", "int64[32]", "y", summary=TensorSummary()),)
        ),
    ],
    ids=["no values", "few values", "none bad", "no histogram"],
)
def test_what_a_sentence_says_has_no_picture(report: Report) -> None:
    assert figure(report) is None


@pytest.mark.parametrize(
    ("total", "count", "is_drawn"), [(12, 2, False), (13, 2, True), (13, 1, False)]
)
def test_few_values_and_one_bad_pixel_need_no_picture(
    total: int, count: int, is_drawn: bool
) -> None:
    report = image("x0x0")
    assert report.offenders is not None
    found = replace(report.offenders, total=total, count=count)
    assert (figure(replace(report, offenders=found)) is not None) is is_drawn


def test_a_histogram_of_wide_bins_is_no_bar_for_each_class() -> None:
    summary = TensorSummary(
        min=-100, max=9, histogram=Histogram(edges=(0.0,) * 25, counts=(1,) * 24)
    )
    report = make_report(tensors=(fact("target", "int64[32]", "y", summary=summary),))
    assert figure(report) is None
    assert LABELS and figure(replace(report, offenders=Offenders(total=99, count=1))) is None


# --- names, legends and widths -------------------------------------------------------------------


def image(*rows: str, **parts: Any) -> Report:
    """Return a report with one plane, whose cells are given by their signs."""
    plane = Plane(index=(), rows=rows, size=(len(rows), len(rows[0])))
    first = tuple(Offender(position=(at,), value=value) for at, value in enumerate((7, 7)))
    found = {"planes": (plane,), "first": first, **parts.pop("found", {})}
    facts = {"bounds": None, "tensors": (), "expression": None, "argument": None, **parts}
    return make_report(offenders=Offenders(total=40, count=2, **found), **facts)


def legend(report: Report) -> list[str]:
    drawn = figure(report)
    assert drawn is not None
    return [text for _, text in drawn.legend]


def test_the_legend_names_what_is_drawn() -> None:
    assert legend(image("00", "x0")) == ["7: bad", "good"]
    assert legend(image("00", "/0", found={"others": "0 … 3"})) == ["some bad", "good 0 … 3"]
    different = tuple(Offender(position=(at,), value=at) for at in (7, 8))
    assert legend(image("00", "x/", found={"first": different})) == ["bad", "some bad", "good"]
    allowed = Bounds(min=0, max=3, also_allowed=(-1, -2))
    assert legend(image("0-", bounds=allowed)) == ["good", "-1, -2 allowed"]
    assert legend(image("00", bounds=allowed)) == ["good"]


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"expression": "y", "argument": "target"}, "y"),
        ({"argument": "target"}, "target"),
        ({"argument": "target", "tensors": (fact("x", "f[4]", "z", bad_at=(0,)),)}, "z"),
        ({"argument": "target", "tensors": (fact("x", "f[4]", "z"),)}, "target"),
        ({"phase": "forward"}, "values"),
        ({"phase": "backward"}, "gradients"),
        ({"expression": "a" * 25}, "a" * 23 + "…"),
    ],
)
def test_a_picture_is_named_as_the_user_names_the_tensor(parts: Any, name: str) -> None:
    drawn = figure(image("00", "x0", **parts))
    assert drawn is not None and drawn.title == f"{name}  2 × 2"
    assert drawn.pictures[0].title == f"{name}, 2 × 2: where the bad values are"


def test_planes_share_the_width_and_at_most_two_are_drawn() -> None:
    planes = [Plane(index=(at,), rows=("0x" * 40,), size=(1, 80)) for at in range(3)]
    empty = Plane(index=(9,), rows=(), size=(0, 80))
    for count, width in ((1, 240), (2, 80), (3, 80)):
        drawn = figure(image("0", found={"planes": (empty, *planes[:count])}))
        assert drawn is not None
        assert [picture.width for picture in drawn.pictures] == [width] * min(count, 2)
    assert figure(image("0", found={"planes": (empty,)})) is None


@pytest.mark.parametrize(
    ("size", "rows", "pixels"),
    [
        ((2, 2), ("00", "x0"), (12, 12)),
        ((16, 16), ("00", "x0"), (12, 12)),
        ((8, 32), ("00", "x0"), (48, 12)),
        ((8, 800), ("00", "x0"), (48, 12)),
        ((32, 8), ("00", "x0"), (12, 48)),
        ((200, 1), ("0",) * 200, (1, 200)),
        ((1, 300), ("0" * 300,), (300, 1)),
    ],
)
def test_a_cell_has_the_form_of_the_values_that_it_stands_for(
    size: tuple[int, int], rows: tuple[str, ...], pixels: tuple[int, int]
) -> None:
    made = plane_picture(Plane(index=(), rows=rows, size=size), "y")
    assert (made.width, made.height) == pixels
    assert made.caption == ""


def test_a_picture_below_the_words_is_as_wide_as_they_are() -> None:
    def width(title: str = "", legend: int = 0, caption: int = 0) -> int:
        made = Picture(data="", width=100, height=9, title="", caption="c" * caption)
        return Figure(pictures=(made,), title=title, legend=((("", "w" * legend),) * 2)).width

    assert width() == 116
    assert width(caption=20) == 136
    assert width("t" * 18) == 116
    assert width("t" * 19) == 121
    assert width(legend=8) == 153
    assert width("t" * 99) == 270
    assert width("t" * 99, caption=60) == 376


def test_what_is_drawn_of_nothing_is_transparent() -> None:
    """A viewer reads the palette and its one transparent colour from chunks with checksums."""
    data = base64.b64decode(plane_picture(Plane(rows=("0x",), size=(1, 2)), "y").data[22:])
    at, found = 8, {}
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        found[data[at + 4 : at + 8]] = data[at + 8 : at + 8 + size]
        check = struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0]
        assert check == zlib.crc32(data[at + 4 : at + 8 + size])
        at += size + 12
    assert found[b"tRNS"] == b"\0"
    assert found[b"PLTE"] == bytes(part for colour in PALETTE for part in colour)
    assert found[b"IHDR"] == struct.pack(">IIBBBBB", 12, 6, 8, 3, 0, 0, 0)
    assert css((0, 17, 255)) == "#0011ff"


# --- labels by class ------------------------------------------------------------------------------


def labels(*counts: int, low: int = 0, **parts: Any) -> Report:
    """Return a report on a vector whose values, from ``low`` on, occur so often."""
    edges = tuple(float(low + at) for at in range(len(counts) + 1))
    summary = TensorSummary(
        min=low, max=low + len(counts) - 1, histogram=Histogram(edges=edges, counts=counts)
    )
    y = fact("target", "int64[40]", "y", summary=summary)
    return make_report(
        offenders=Offenders(total=40, count=2), **{"tensors": (y,), "expression": None, **parts}
    )


@pytest.mark.parametrize(
    ("bounds", "red"),
    [
        (Bounds(min=0, max=1), "-1, 3: no class here"),
        (Bounds(max=1), "3: no class here"),
        (Bounds(min=0), "-1: no class here"),
        (Bounds(min=0, max=1, also_allowed=(-1,)), "3: no class here"),
        (Bounds(min=-1, max=3), None),
    ],
)
def test_only_values_that_occur_are_named_as_no_class(bounds: Bounds, red: str | None) -> None:
    """2 is out of bounds, too, and occurs nowhere."""
    drawn = figure(labels(1, 4, 8, 0, 2, low=-1, bounds=bounds))
    assert drawn is not None
    assert [text for _, text in drawn.legend] == ([] if red is None else [red])
    assert drawn.title == "y from -1 to 3, up to 8 each"
    (picture,) = drawn.pictures
    assert picture.title.endswith("each value of y occurs: -1: 1, 0: 4, 1: 8, 2: 0, 3: 2")


def test_a_bar_is_as_high_as_its_value_is_frequent() -> None:
    drawn = figure(labels(1000, 500, 1, 0, bounds=Bounds(min=0, max=0, also_allowed=(1,))))
    assert drawn is not None
    columns = [list(column) for column in zip(*pixels(drawn.pictures[0]), strict=True)]
    bars = [[index for index in columns[17 * at] if index] for at in range(4)]
    assert [(len(bar), {*bar}) for bar in bars] == (
        [(72, {10}), (36, {ALLOWED}), (2, {BAD}), (0, set())]
    )
    assert not any(columns[14])


def test_bars_need_two_values_and_a_bound() -> None:
    assert figure(labels(3, 2, bounds=Bounds(max=0))) is not None
    assert figure(labels(3, 2, bounds=Bounds())) is None
    assert figure(labels(3, bounds=Bounds(max=0))) is None


def test_values_are_counted_where_each_has_a_bin_of_its_own() -> None:
    def counts(size: int, **parts: Any) -> Any:
        report = labels(*(1,) * size)
        return value_counts(replace(report.tensors[0], **parts))

    assert counts(2) == [(0, 1), (1, 1)]
    assert len(counts(MAX_BARS)) == MAX_BARS
    assert counts(MAX_BARS + 1) is None
    assert counts(2, dtype="float32") is None
    summary = labels(1, 1).tensors[0].summary
    for other in (replace(summary, max=2), replace(summary, min=0.0), replace(summary, max=None)):
        assert counts(2, summary=other) is None
    assert counts(2, summary=replace(summary, histogram=Histogram(counts=(1, 1)))) is None
