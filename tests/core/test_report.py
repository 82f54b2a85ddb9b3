"""A report in its forms, and read back from the JSON that it was written to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cudalens import Report
from cudalens.core.report import from_plain
from cudalens.core.report_types import Bounds, Observation, Offender, TensorFact
from tests.builders import host_error, make_report, nonfinite, segmentation


@pytest.mark.parametrize("make", [make_report, host_error, nonfinite, segmentation])
def test_every_form_says_the_headline(make: Callable[[], Report], tmp_path: Path) -> None:
    report = make()
    forms = {"txt": report.to_text(), "md": report.to_markdown(), "html": report.to_html()}
    for suffix, text in {**forms, "json": report.to_json()}.items():
        path = report.save(tmp_path / f"a.{suffix}")
        assert path.read_text(encoding="utf-8").strip() == text.strip()
    first = report.headline.split()[0].strip("`")
    assert all(first in text for text in forms.values())
    with pytest.raises(ValueError, match="docx"):
        report.save(tmp_path / "a.docx")


@pytest.mark.parametrize("make", [make_report, host_error, nonfinite, segmentation])
def test_what_was_written_is_read_back(make: Callable[[], Report]) -> None:
    report = make()
    assert Report.from_dict(json.loads(report.to_json())).to_json() == report.to_json()


def test_facts_of_an_observation_come_back_frozen() -> None:
    facts = {"values": (1, (2, 3)), "name": "y"}
    seen = Observation(kind="values", text="two", facts=facts)
    report = Report.from_dict(replace(make_report(), observations=(seen,)).to_dict())
    assert dict(report.observations[0].facts) == facts


@pytest.mark.parametrize(
    ("kind", "data", "wanted"),
    [
        (Offender, {"position": [1, 2], "value": "nan"}, Offender(position=(1, 2), value="nan")),
        (Bounds, {"min": 0, "max": None}, Bounds(min=0, max=None)),
        (
            TensorFact,
            {"argument": None, "expression": "x"},
            TensorFact(argument=None, expression="x"),
        ),
    ],
)
def test_plain_data_becomes_facts(kind: Any, data: dict[str, Any], wanted: object) -> None:
    assert from_plain(kind, data) == wanted


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("headline",), 3, "headline"),
        (("tensors",), "x", "no list"),
        (("prevented",), 1, "prevented"),
        (("kind",), "odd", "kind"),
        (("schema_version",), 99, "99"),
    ],
)
def test_a_value_of_another_type_is_refused(
    path: tuple[str, ...], value: object, words: str
) -> None:
    data = json.loads(make_report().to_json())
    data[path[0]] = value
    with pytest.raises(ValueError, match=words):
        Report.from_dict(data)
