"""The words of a report of NaN: its maker, the place where it came to matter, and the way."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cudalens.core.graph_types import FIRST_NAN, ProvenanceStep
from cudalens.core.report import Evidence
from cudalens.core.report_types import LineRef, TensorSummary, Violation
from cudalens.evidence import nonfinite
from cudalens.guards.process import PROCESS
from cudalens.recorder.sites import Site
from tests.builders import make_report

LINE = LineRef(line=4, text="y = x.log()", cell=2)


def arrival(sink: str = "loss", **more: Any) -> Any:
    step = SimpleNamespace(name="torch.sum", site=None)
    facts = {"maker": None, "has_nan": True, "tensor": None, "text": "it gives up", "way": ()}
    facts["is_alone"] = True
    return SimpleNamespace(sink=sink, step=step, arguments=None, **{**facts, **more})


def maker(kind: str, name: str = "torch.log", *, has_nan: bool = True, **more: Any) -> Any:
    step = SimpleNamespace(name=name, site=None)
    facts = {"violation": None, "case": None, **more}
    return SimpleNamespace(kind=kind, step=step, has_nan=has_nan, **facts)


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


BACKWARD = {"argument": "gradient", "phase": "backward"}


@pytest.mark.parametrize(
    ("made", "facts", "note"),
    [
        (maker("made"), {}, FIRST_NAN),
        (maker("made", has_nan=False), {}, "inf is made here"),
        (maker("entered"), {}, "NaN comes in here"),
        (maker("entered", has_nan=False), BACKWARD, "the gradient of the result is inf"),
        (maker("entered"), {**BACKWARD, "phase": "optimizer"}, "NaN comes in here"),
        (maker("entered"), {**BACKWARD, "argument": "self"}, "NaN comes in here"),
        (maker("asked"), {}, "NaN is made here"),
        (None, {}, "inf is made here"),
    ],
)
def test_the_first_step_says_how_the_values_came(
    made: Any, facts: dict[str, Any], note: str
) -> None:
    report = make_report(**facts)
    assert report.source is not None
    step = nonfinite._first_step(report, made)
    assert (step.note, step.source) == (note, report.source.ref)
    forward = replace(report.source, line=77)
    step = nonfinite._first_step(replace(report, forward_source=forward), made)
    assert step.source == forward.ref


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
        ("result", {"has_nan": False}, "inf is in the result of the cell"),
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


def frames_of_backward(monkeypatch: pytest.MonkeyPatch, frames: list[Any]) -> None:
    known = {True: frames, False: []}
    monkeypatch.setattr(
        nonfinite, "calling_frames", lambda *, in_backward=False: known[in_backward]
    )


def test_the_name_of_a_parameter_in_the_running_code(monkeypatch: pytest.MonkeyPatch) -> None:
    net, scale = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    frames_of_backward(monkeypatch, [sys._getframe()])
    # From Python 3.12 on the variable of a comprehension is one of this function.
    names = [*map(nonfinite._name, (net.weight, scale, torch.ones(1), None))]
    assert names == ["net.weight", "scale", None, None]


def test_a_later_call_of_a_line_has_no_values_of_the_earlier_one() -> None:
    later = Violation(headline="later")
    before = Evidence(tensors=make_report().tensors, provenance=(ProvenanceStep(op="torch.log"),))
    found = nonfinite._with_values(before, later)
    assert [item.summary for item in found.tensors] == [TensorSummary()] * len(before.tensors)
    assert (found.violation, found.provenance) == (later, ())


CONDITION = torch.ones(1)


def with_condition(*given: Any) -> tuple[Evidence, None]:
    assert given[3] is CONDITION
    return Evidence(violation=given[0]), None


def test_a_call_is_described_once_for_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = [SimpleNamespace(f_code=at, f_lasti=0) for at in range(9)]
    frames_of_backward(monkeypatch, stack)
    monkeypatch.setattr(nonfinite, "evidence_of_call", with_condition)
    monkeypatch.setattr(nonfinite, "_MAX_CASES", 4)
    reports = nonfinite.NonFiniteReports()

    def note(op: str = "log", argument: str = "") -> Any:
        return reports.note({}, Violation(headline="bad", op=op, argument=argument), CONDITION)

    cases = [note(), note("exp"), note("log", "self")]
    stack[0].f_lasti = 5  # farther out than is looked at
    assert [note(), note("exp"), note("log", "self")] == cases
    stack[-1].f_lasti = 5
    cases.append(note())
    assert len(set(map(id, cases))) == 4
    assert (note(), note("exp")) == (cases[-1], None)


def test_a_call_that_cannot_be_described_leaves_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(PROCESS, "internal_error", said.append)
    monkeypatch.setattr(nonfinite, "evidence_of_call", lambda *_: 1 / 0)
    assert nonfinite.NonFiniteReports().note({}, Violation(headline="bad")) is None
    assert said == ["evidence unavailable: ZeroDivisionError: division by zero"]


def test_a_call_is_stopped_with_the_condition_of_its_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(nonfinite, "evidence_of_call", lambda *of: given.extend(of))
    error = nonfinite.NonFiniteReports().stop({}, Violation(headline="bad"), CONDITION)
    assert str(error).startswith("bad")
    assert given[3] is CONDITION


def test_the_report_of_a_later_call_has_its_own_violation_and_no_values() -> None:
    first, later = Violation(headline="first"), Violation(headline="later")
    tensors = make_report().tensors
    evidence = Evidence(violation=first, tensors=tensors)
    case = nonfinite.Case(
        violation=first, evidence=evidence, report=make_report(headline="first", tensors=tensors)
    )
    for violation, values in ((first, [it.summary for it in tensors]), (later, [TensorSummary()])):
        given = arrival(maker=maker("made", case=case))
        report = nonfinite._report_of_arrival(given, violation, 0.0)
        assert report.headline == violation.headline
        assert {*map(repr, (it.summary for it in report.tensors))} == {*map(repr, values)}


def test_without_notes_the_place_of_the_call_is_told() -> None:
    site = Site("backward", None)
    makers: list[Any] = [None, maker("entered", ""), maker("made")]
    for made, in_sink in zip(makers, (True, True, False), strict=True):
        given = arrival(maker=made)
        (given if in_sink else made).step.site = site
        found = nonfinite._evidence_of_site(given, Violation(headline="bad", op="log"), 0.0, None)
        assert (found.phase, found.op.name) == ("backward", "log")
        assert (found.prevented, found.context_usable) == (False, True)
