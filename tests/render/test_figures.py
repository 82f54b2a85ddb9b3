"""Pictures of values: an image stays an image, allowed values are not red, a cell is no lie."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from cudalens.core.report import Bounds, Histogram, Offenders, Report, TensorSummary
from cudalens.core.tensor_values import find_offenders
from cudalens.render.figures import Picture, figure
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


def test_a_histogram_of_wide_bins_is_no_bar_for_each_class() -> None:
    summary = TensorSummary(
        min=-100, max=9, histogram=Histogram(edges=(0.0,) * 25, counts=(1,) * 24)
    )
    report = make_report(tensors=(fact("target", "int64[32]", "y", summary=summary),))
    assert figure(report) is None
    assert LABELS and figure(replace(report, offenders=Offenders(total=99, count=1))) is None
