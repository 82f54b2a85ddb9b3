"""The words of a report of NaN: its maker, the place where it came to matter, and the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cudalens.core.graph_types import FIRST_NAN, ProvenanceStep
from cudalens.core.report import Evidence
from cudalens.core.report_types import LineRef, TensorSummary, Violation
from cudalens.evidence import nonfinite
from tests.builders import make_report

LINE = LineRef(line=4, text="y = x.log()", cell=2)


def arrival(sink: str = "loss", **more: Any) -> Any:
    step = SimpleNamespace(name="torch.sum", site=None)
    facts = {"maker": None, "has_nan": True, "tensor": None, "text": "it gives up", "way": ()}
    return SimpleNamespace(sink=sink, step=step, arguments=None, **{**facts, **more})


def maker(kind: str, name: str = "torch.log", *, has_nan: bool = True) -> Any:
    step = SimpleNamespace(name=name, site=None)
    return SimpleNamespace(kind=kind, step=step, has_nan=has_nan, violation=None, case=None)


@pytest.mark.parametrize(
    ("note", "source", "text"),
    [
        (FIRST_NAN, LINE, f"NaN is made here in {LINE.format()}"),
        ("inf comes in here", LINE, f"inf comes in here in {LINE.format()}"),
        ("inf comes in here", None, "inf comes in here"),
        (None, None, ""),
    ],
)
def test_an_observation_has_its_mark_and_its_place(
    note: str | None, source: LineRef | None, text: str
) -> None:
    step = ProvenanceStep(op="torch.log", source=source, note=note)
    seen = nonfinite._observation("maker", step)
    assert (seen.text, dict(seen.facts)) == (text, {"op": "torch.log"})
    assert [(item.line, item.text, item.mark) for item in seen.sources] == (
        [(4, "y = x.log()", text.removesuffix(f" in {LINE.format()}"))] if source else []
    )


@pytest.mark.parametrize(
    ("made", "note"),
    [
        (maker("made"), FIRST_NAN),
        (maker("made", has_nan=False), "inf is made here"),
        (maker("entered"), "NaN comes in here"),
        (maker("asked"), "NaN is made here"),
        (None, "inf is made here"),
    ],
)
def test_the_first_step_says_how_the_values_came(made: Any, note: str) -> None:
    step = nonfinite._first_step(make_report(), made)
    assert step.note == note
    assert step.source is not None


@pytest.mark.parametrize(
    ("sink", "facts", "text"),
    [
        ("loss", {}, "NaN is in the loss in "),
        ("loss", {"has_nan": False}, "inf is in the loss in "),
        ("gradient", {}, "NaN reaches the gradient of a leaf in "),
        ("parameter", {}, "NaN reaches the parameter in "),
        ("read", {}, "NaN is read by the host in "),
        ("result", {}, "NaN is in the result of the cell"),
        ("scaler", {}, "it gives up in "),
        ("guard", {}, "NaN reaches torch.sum in "),
    ],
)
def test_where_the_values_came_to_matter(sink: str, facts: dict[str, Any], text: str) -> None:
    sentence = nonfinite._sentence(arrival(sink, **facts), LINE)
    assert sentence.startswith(text)
    assert (LINE.format() in sentence) is (sink != "result")
    assert " in In" not in nonfinite._sentence(arrival(sink, **facts), None)


@pytest.mark.parametrize(
    ("given", "headline"),
    [
        (arrival("loss"), "the loss is nan"),
        (arrival("read"), "the value is nan"),
        (arrival("gradient", has_nan=False), "a gradient is an infinity"),
        (arrival(maker=maker("asked", "torch.full")), "torch.full was given nan as a number"),
        (arrival(maker=maker("entered")), "nan was there already where torch.log wrote"),
    ],
)
def test_values_whose_maker_was_not_looked_at(given: Any, headline: str) -> None:
    violation = nonfinite._of_unseen(given)
    assert (violation.headline, violation.is_nonfinite) == (headline, True)
    assert violation.op == (given.maker.step.name if given.maker else "torch.sum")


def test_a_parameter_has_its_name_in_the_headline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "_name", lambda tensor: "net.weight")
    given = Violation(headline="{input:self} is nan", argument="self")
    for tensor, wanted in (
        (nn.Parameter(torch.ones(1)), "net.weight is nan"),
        (torch.ones(1), "{input:self} is nan"),
        (nn.Parameter(torch.ones(1)) * 2, "{input:self} is nan"),
        (None, "{input:self} is nan"),
    ):
        assert nonfinite._with_name(given, tensor).headline == wanted
    assert nonfinite._with_name(given, nn.Parameter(torch.ones(1)), "x").headline == given.headline


def test_a_later_call_of_a_line_has_no_values_of_the_earlier_one() -> None:
    later = Violation(headline="later")
    before = Evidence(tensors=make_report().tensors, provenance=(ProvenanceStep(op="torch.log"),))
    found = nonfinite._with_values(before, later)
    assert [item.summary for item in found.tensors] == [TensorSummary()] * len(before.tensors)
    assert (found.violation, found.provenance) == (later, ())
