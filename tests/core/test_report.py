"""A report in its forms, and read back from the JSON that it was written to."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import ipywidgets
import pytest

from cudalens import Report
from cudalens.core.next_steps import NOTEBOOK, SCRIPT
from cudalens.core.report import Evidence, RankResult, from_plain, is_of_cell
from cudalens.core.report_types import (
    Bounds,
    Frame,
    Observation,
    Offender,
    Plane,
    SourceSpan,
    TensorFact,
)
from tests.builders import host_error, make_report, nonfinite, segmentation
from tests.hint_evidence import syntax_of


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


@pytest.mark.parametrize(("size", "is_read"), [([2, 3], True), ([2], False), ([2, 3, 4], False)])
def test_a_pair_has_two_values(size: list[int], is_read: bool) -> None:
    with nullcontext() if is_read else pytest.raises(ValueError):
        assert from_plain(Plane, {"size": size}).size == (2, 3)


def test_a_number_that_is_not_finite_is_a_text_of_a_float_alone() -> None:
    data = json.loads(make_report().to_json())
    for value in ("inf", "-inf", "nan", 2, 2.5, None):
        data["timing"]["diagnose_s"] = value
        assert Report.from_dict(data).timing.diagnose_s == value
    for key, value in (("diagnose_s", "odd"), ("diagnose_s", True), ("checked_ops", "nan")):
        data = json.loads(make_report().to_json())
        data["timing"][key] = value
        with pytest.raises(ValueError, match=key):
            Report.from_dict(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "it contains no cudalens report: schema_version is missing"),
        ({}, "it contains no cudalens report: schema_version is missing"),
        ({"schema_version": "4"}, "it contains no cudalens report: schema_version is missing"),
        ({"schema_version": 0}, "schema_version 0 cannot be read: this release reads 1 to 4"),
        (
            {"schema_version": 5},
            "schema_version 5 cannot be read: this release reads 1 to 4; a newer release of "
            "cudalens wrote it",
        ),
    ],
)
def test_what_is_no_report_of_a_known_version(data: Any, words: str) -> None:
    with pytest.raises(ValueError, match="schema_version") as caught:
        Report.from_dict(data)
    assert str(caught.value) == words


def test_a_version_without_the_users_names_has_the_schemas() -> None:
    data = json.loads(make_report().to_json())
    data["schema_version"], data["headline"] = 1, "target[17] = 10 is bad"
    del data["headline_own"]
    report = Report.from_dict(data)
    assert (report.headline, report.headline_schema) == (data["headline"], data["headline"])


def test_a_file_of_another_kind_is_named_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="suffix") as caught:
        make_report().save(tmp_path / "a.DOCX")
    assert str(caught.value) == (
        "cannot save a report as 'a.DOCX': use the suffix .html, .json, .md, .txt, .png, .svg "
        "or .pdf"
    )
    assert make_report().save(tmp_path / "a.JSON").read_text() == make_report().to_json()


def test_a_notebook_is_given_a_text_and_a_page() -> None:
    report = make_report()
    shown = report._repr_mimebundle_()
    assert [*shown] == ["text/plain", "text/html"]
    assert shown["text/plain"] == report.to_text()
    assert "<html" not in shown["text/html"] and "<html" in report.to_html()
    assert repr(report) == f"<cudalens Report device_assert: {report.headline}>"
    assert isinstance(report.widget(), ipywidgets.Widget)


def test_a_text_has_84_columns_and_no_colours_unless_they_are_asked_for() -> None:
    report = make_report()
    assert report.to_text() == report.to_text(width=84, color=False)
    assert "\x1b[" not in report.to_text()
    assert "\x1b[" in report.to_text(color=True)
    assert report.to_json() == report.to_json(indent=2)
    assert "\n" not in report.to_json(indent=None)


@pytest.mark.parametrize(
    ("rank", "process", "name"),
    [(0, None, "rank 0"), (2, 1, "rank 2"), (None, 3, "process 3"), (None, None, "process 0")],
)
def test_the_name_of_a_rank(rank: int | None, process: int | None, name: str) -> None:
    assert RankResult(rank=rank, process=process).name == name


def test_what_evidence_is_asked_for() -> None:
    x, y = TensorFact(argument="self", expression="x"), TensorFact(argument="self")
    evidence = Evidence(tensors=(x, y), scalars=(("dim", "1"),), call=syntax_of("f(x)"))
    assert evidence.tensor("self") is x
    assert evidence.tensor("other") is None
    assert (evidence.scalar("dim"), evidence.scalar("k")) == ("1", None)
    assert (evidence.call_text, Evidence().call_text) == ("f(x)", None)
    assert (evidence.steps, Evidence(is_script=True).steps) == (NOTEBOOK, SCRIPT)
    assert evidence.is_checked and not evidence.has_nan_watch


def test_a_place_in_a_cell_or_below_one() -> None:
    file, cell = Frame(file="a.py", line=1, function="f"), SourceSpan(cell=3, line=1)
    in_cell = Frame(file="", line=1, function="f", cell=0)
    assert is_of_cell(cell, ()) and is_of_cell(None, (file, in_cell))
    assert not is_of_cell(None, ()) and not is_of_cell(SourceSpan(file="a.py"), (file,))


def test_a_report_of_which_nothing_is_known() -> None:
    report = Report(headline="h")
    assert (report.schema_version, report.kind, report.certainty) == (4, "device_assert", "unknown")
    assert (report.headline_schema, report.headline_own) == ("h", "h")
    assert (report.prevented, report.context_usable, report.phase) == (False, None, "unknown")
    assert (report.replay.outcome, report.synchronization.waits) == ("unavailable", None)
    own = Report(headline="y is bad", headline_schema="target is bad")
    assert (own.headline_schema, own.headline_own) == ("target is bad", "y is bad")
