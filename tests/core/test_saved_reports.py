"""Reports of blocks that failed: read back, rendered again, and saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from cudalens import Report
from tests.blocks import cuda, overwritten, report_of
from tests.report_schema import validator

pytestmark = pytest.mark.usefixtures("sim")


def bad_labels() -> None:
    labels = cuda(0, 3) + 1
    F.cross_entropy(torch.nn.Linear(3, 4).cuda()(torch.ones(2, 3, device="cuda")), labels)


REPORTS = (partial(report_of, bad_labels), partial(report_of, overwritten), Report)


@pytest.mark.parametrize("make", REPORTS)
def test_a_report_read_back_renders_the_same(make: Callable[[], Report]) -> None:
    report = make()
    again = Report.from_dict(json.loads(report.to_json()))
    assert again == report
    assert Report.from_dict(report.to_dict()) == report
    assert again.to_text() == report.to_text()
    assert again.to_html() == report.to_html()
    assert again._repr_mimebundle_() == report._repr_mimebundle_()


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (0, "schema_version 0 cannot be read: this release reads 1 to 4"),
        (5, "schema_version 5 cannot be read: this release reads 1 to 4; a newer release"),
        (None, "contains no cudalens report: schema_version is missing"),
        ("3", "schema_version"),
    ],
)
def test_another_schema_version_is_refused(version: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Report.from_dict({**Report().to_dict(), "schema_version": version})


@pytest.mark.parametrize("make", REPORTS)
def test_a_report_of_schema_version_1_is_read_and_rendered(make: Callable[[], Report]) -> None:
    """What it could not hold is null; its headline stands for the one in the user's names."""
    old = make().to_dict()
    headline = old["headline"]
    del old["headline"], old["deferred"]
    for item in (old["offenders"] or {"first": []})["first"]:
        del item["sample"]
    for hint in old["hints"]:
        del hint["tried"], hint["at"]
    report = Report.from_dict({**old, "schema_version": 1})
    assert report.headline == report.headline_schema == headline
    validator().validate(report.to_dict())
    assert headline in report.to_text(width=200).splitlines()[0]
    assert Report.from_dict(report.to_dict()) == report
    assert report.to_html() and report.to_json()


@pytest.mark.parametrize("suffix", [".html", ".json", ".txt", ".HTML"])
def test_save_by_suffix(suffix: str, tmp_path: Path) -> None:
    report = report_of(bad_labels)
    path = report.save(tmp_path / f"report{suffix}")
    text = path.read_text("utf-8")
    wanted = {".html": report.to_html(), ".json": report.to_json(), ".txt": report.to_text()}
    assert text == wanted[suffix.lower()]


def test_save_refuses_another_suffix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.html"):
        Report().save(tmp_path / "report.docx")
