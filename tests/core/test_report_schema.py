"""The JSON Schema that the package ships is that of the reports it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from cudalens.core.report import Report
from cudalens.core.report_types import MarkedLine, Observation, RaisedException
from tests import builders, report_schema

VALIDATOR = report_schema.validator()


def test_the_shipped_schema_is_made_from_the_types() -> None:
    """Another one means: run ``python -m tests.report_schema``."""
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)
    assert report_schema.FILE.read_text(encoding="utf-8") == report_schema.text()


def test_every_key_is_described() -> None:
    for name, found in {"Report": VALIDATOR.schema, **VALIDATOR.schema["$defs"]}.items():
        keys = found["properties"]
        assert [key for key in keys if not keys[key].get("description")] == [], name


@pytest.mark.parametrize("name", builders.REPRESENTATIVE)
def test_every_kind_of_report_is_valid(name: str) -> None:
    VALIDATOR.validate(json.loads(builders.REPRESENTATIVE[name]().to_json()))


def changed(data: Any, at: tuple[Any, ...], value: object) -> Any:
    """A copy of plain data with one value replaced."""
    if not at:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[at[0]] = changed(data[at[0]], at[1:], value)
    return copy


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of each value, of a list's items that of the first."""
    yield at
    if isinstance(data, (dict, list)):
        items = data.items() if isinstance(data, dict) else enumerate(data[:1])
        for key, value in items:
            yield from places(value, (*at, key))


@pytest.mark.parametrize(
    "name", ["blank", *(pytest.param(n, marks=pytest.mark.all) for n in ("labels", "silent"))]
)
def test_whatever_is_valid_is_shown(name: str) -> None:
    """Each value in turn is missing, empty or odd, as far as the schema allows."""
    data = json.loads(builders.REPRESENTATIVE[name]().to_json())
    count = 0
    for at in places(data):
        for value in (None, [], "", -1, 10**30, "nan", "a\n\x1b[31mb"):
            odd = changed(data, at, value)
            if at and VALIDATOR.is_valid(odd):
                count += 1
                assert Report.from_dict(odd).to_text(width=60)
    assert count > 40


def test_a_spoilt_report_is_not_valid() -> None:
    data = json.loads(builders.make_report().to_json())
    assert VALIDATOR.is_valid(data)
    assert not VALIDATOR.is_valid({**data, "kind": "unheard_of"})
    assert not VALIDATOR.is_valid({**data, "extra": 1})
    assert not VALIDATOR.is_valid({key: value for key, value in data.items() if key != "op"})
    assert not VALIDATOR.is_valid({**data, "history": [{**data["history"][0], "seq": "one"}]})


def test_a_report_of_version_3_is_read_with_its_headline_in_the_users_names() -> None:
    old = json.loads(builders.make_report().to_json())
    old["headline"], old["headline_own"] = "target[17] = 10 is bad", "y[17] = 10 is bad"
    for key in ("headline_schema", "exception", "observations", "bound_source"):
        del old[key]
    inner = {**old, "schema_version": 3}
    ranks = [{"rank": 0, "process": 0, "outcome": "", "batch": "", "page": None, "report": inner}]
    report = Report.from_dict({**inner, "ranks": ranks})
    for item in (report, report.ranks[0].report):
        assert item is not None
        assert (item.headline, item.headline_schema) == (old["headline_own"], old["headline"])
        assert item.schema_version == 4
    VALIDATOR.validate(json.loads(report.to_json()))


def test_an_observation_is_read_as_it_was_written() -> None:
    facts = {"count": 3, "total": 32, "values": (10, 11), "of": "y"}
    mark = MarkedLine(line=4, text="y = z % 10 + 1", cell=2, mark="10 is made here")
    fact = Observation(kind="values", text="3 of 32 labels are 10", facts=facts, sources=(mark,))
    raised = RaisedException(type="DeviceIndexError", message="y[17] = 10")
    report = builders.make_report(observations=(fact,), exception=raised)
    data = json.loads(report.to_json())
    VALIDATOR.validate(data)
    assert data["observations"][0]["facts"]["values"] == [10, 11]
    assert data["observations"][0]["sources"][0]["mark"] == "10 is made here"
    assert Report.from_dict(data) == report
