"""The demo's cell: it fails as it is to, is caught, and leaves a page."""

from __future__ import annotations

from pathlib import Path

import pytest

import cudalens
from cudalens.session import demo

pytestmark = pytest.mark.usefixtures("sim")


def test_the_cell_is_caught_in_the_line_of_its_loss(tmp_path: Path) -> None:
    page = tmp_path / "new" / "report.html"
    report = demo.run(page)
    assert (report.kind, report.prevented) == ("device_assert", True)
    assert report.headline_schema == "target[9] = 10 is outside the 10 classes of input"
    assert report.source is not None
    lines = demo.CELL.splitlines()
    assert report.source.line == lines.index("loss = F.cross_entropy(logits, y)") + 1
    assert (report.source.cell, report.source.text) == (1, "loss = F.cross_entropy(logits, y)")
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert cudalens.last_report() is report


def test_the_numbers_of_the_demo_are_the_same_each_time(tmp_path: Path) -> None:
    texts = [demo.run(tmp_path / "a.html").to_text() for _ in range(2)]
    assert texts[0] == texts[1]


def test_where_no_page_can_be_made_nothing_runs(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OSError, match="file"):
        demo.run(file / "below" / "report.html")


def test_a_demo_that_goes_unnoticed_is_a_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "CELL", "x = torch.ones(2, device='cuda')\n")
    with pytest.raises(RuntimeError, match="nothing guards cross_entropy here"):
        demo.run(tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
