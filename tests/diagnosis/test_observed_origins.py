"""Observations of where bad values came from, and where they have nothing to say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.evidence_types import BoundOrigin, Marks, NanHolder
from cudalens.core.graph_types import DIVIDES, FIRST_BAD, WRITES, ProvenanceStep
from cudalens.core.report import Evidence
from cudalens.core.report_types import LineRef, Observation, Offenders, SourceSpan
from cudalens.diagnosis.candidates import Trial
from cudalens.diagnosis.observed_origins import came_from, computed, format_number, item, length
from tests.hint_evidence import labels, lookup, with_offenders


def line(number: int, text: str) -> LineRef:
    return LineRef(cell=1, line=number, text=text)


def step(op: str | None, number: int, text: str, **facts: Any) -> ProvenanceStep:
    return ProvenanceStep(op=op, source=line(number, text), **facts)


def seen(observe: Any, evidence: Evidence) -> list[Observation]:
    return list(observe(evidence, Trial()))


def texts(observe: Any, evidence: Evidence) -> list[str]:
    return [it.text for it in seen(observe, evidence)]


def marks(observe: Any, evidence: Evidence) -> list[str]:
    return [source.mark for it in seen(observe, evidence) for source in it.sources]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (7, "7"),
        (255.0, "255"),
        (-1.0, "-1"),
        (1 / 3, "0.3333"),
        (1e15, "1e+15"),
        (-2.5, "-2.5"),
        ("nan", "nan"),
        (1.000001, "1.000001"),
        (1.00000012, "1.00000012"),
        (9999.9999, "9999.9999"),
        (10000.9999, "1e+04"),
    ],
)
def test_a_number_for_reading(number: Any, text: str) -> None:
    assert format_number(number) == text


# --- the lines that made the values ---------------------------------------------------------------


def test_the_line_that_wrote_the_values_with_their_number() -> None:
    writer = step("aten::fill_", 4, "y[rows] = 255", note=f"{WRITES} 255", count=2)
    evidence = labels([255, 0, 255], 3, provenance=(writer,))
    assert texts(came_from, evidence) == ["line 4: y[rows] = 255 (2 values)"]
    assert marks(came_from, evidence) == ["255 is made here (2 values)"]
    (found,) = seen(came_from, evidence)
    assert found.facts == {"op": "aten::fill_", "values": ("255",), "count": 2}


def test_the_counts_of_one_line_add_up_where_all_are_known() -> None:
    known = step("aten::fill_", 4, "y[rows] = 255", note=f"{WRITES} 255", count=2)
    unknown = step("aten::fill_", 4, "y[rows] = 255", note=f"{WRITES} 255")
    both = labels([255, 0, 255], 3, provenance=(known, known))
    assert texts(came_from, both) == ["line 4: y[rows] = 255 (4 values)"]
    one = labels([255, 0, 255], 3, provenance=(known, unknown))
    assert texts(came_from, one) == ["line 4: y[rows] = 255"]


def test_a_value_that_the_code_does_not_show_is_said() -> None:
    writer = step("aten::fill_", 4, "y[rows] = hole", note=f"{WRITES} 255")
    assert texts(came_from, labels([255], 3, provenance=(writer,))) == [
        "line 4: y[rows] = hole (writes 255)"
    ]


def test_two_values_of_one_line_are_bad_values() -> None:
    writers = [step("aten::fill_", 4, "put(y)", note=f"{WRITES} {it}") for it in (7, 9)]
    evidence = labels([7, 9], 3, provenance=tuple(writers))
    assert texts(came_from, evidence) == ["line 4: put(y) (writes 7, 9)"]
    assert marks(came_from, evidence) == ["bad values are made here"]


def test_the_failing_line_is_not_named_again() -> None:
    writer = step("aten::fill_", 1, "y.fill_(9)", note=f"{WRITES} 9")
    assert texts(came_from, labels([9], 3, provenance=(writer,))) == []


def test_three_lines_at_most() -> None:
    writers = [step("aten::fill_", at, f"y[{at}] = 9", note=f"{WRITES} 9") for at in range(2, 6)]
    found = seen(came_from, labels([9, 9, 9, 9], 3, provenance=tuple(writers)))
    assert [it.sources[0].line for it in found] == [2, 3, 4]  # the newest


def test_values_from_python_come_in() -> None:
    loaded = step("torch.tensor", 4, "y = torch.tensor(rows)")
    assert marks(came_from, labels([9], 3, provenance=(loaded,))) == ["9 comes in here"]
    assert marks(came_from, labels([8, 9], 3, provenance=(loaded,))) == ["bad values come in here"]
    both = tuple(
        replace(loaded, op=op, note=FIRST_BAD) for op in ("torch.tensor", "torch.Tensor.view")
    )
    assert marks(came_from, labels([9], 3, provenance=both)) == ["9 comes from here"]


def test_a_line_that_divides_is_marked_so() -> None:
    divided = step("torch.Tensor.div", 4, "p = a / b", note=DIVIDES)
    assert marks(came_from, labels([9], 3, provenance=(divided,))) == [DIVIDES]
    plain = step("torch.Tensor.div", 4, "p = a / b")
    assert marks(came_from, labels([9], 3, provenance=(plain,))) == ["9 comes from here"]


def test_a_parameter_that_is_nan_was_made_by_no_later_line() -> None:
    later = step("torch.Tensor.exp", 4, "p = w.exp()")
    nan = Offenders(count=1, total=4)
    evidence = labels([9], 3, provenance=(later,))
    assert len(texts(came_from, evidence)) == 1
    for is_read, count in ((True, 1), (False, 0)):
        holder = NanHolder(name="w", nan=nan, is_read=is_read)
        evidence = labels([9], 3, provenance=(later,), nan_holder=holder)
        assert len(texts(came_from, evidence)) == count


def test_every_line_that_wrote_nan_to_a_parameter_is_named() -> None:
    nan, lines = Offenders(count=2, total=4), (line(4, "w[1] = nan"), line(3, "w[0] = nan"))
    holder = NanHolder(name="w", nan=nan, is_read=False, written=lines)
    evidence = labels([9], 3, nan_holder=holder)
    assert texts(came_from, evidence) == ["line 4: w[1] = nan", "line 3: w[0] = nan"]
    assert marks(came_from, evidence) == ["nan is written to w here"] * 2
    assert texts(came_from, labels([9], 3, nan_holder=replace(holder, written=()))) == []
    read, later = replace(holder, is_read=True), step("torch.Tensor.exp", 4, "w[1] = nan")
    evidence = labels([9], 3, nan_holder=read, provenance=(later,))
    assert texts(came_from, evidence) == ["line 4: w[1] = nan", "line 3: w[0] = nan"]


def test_the_last_change_of_a_parameter_that_is_nan() -> None:
    nan = Offenders(count=1, total=4)
    holder = NanHolder(name="w", nan=nan, is_read=False, changed=line(3, "opt.step()"))
    assert marks(came_from, labels([9], 3, nan_holder=holder)) == ["w is last changed here"]
    at_failure = replace(holder, changed=line(1, "here"))
    assert marks(came_from, labels([9], 3, nan_holder=at_failure)) == []


# --- Python and NumPy -----------------------------------------------------------------------------


def test_lines_of_python_that_computed_the_values() -> None:
    lines = (line(1, "here"), line(3, "a = b + 1"))
    evidence = labels([9, 9], 3, marks=Marks(computed=lines))
    assert texts(computed, evidence) == ["line 3: a = b + 1"]
    assert marks(computed, evidence) == ["9 comes from here"]
    evidence = labels([8, 9], 3, marks=Marks(computed=lines))
    assert marks(computed, evidence) == ["bad values come from here"]


def test_all_bad_values_are_one_though_few_are_listed() -> None:
    evidence = labels([9] * 30, 3, marks=Marks(computed=(line(3, "a = b + 1"),)))
    assert marks(computed, evidence) == ["bad values come from here"]
    evidence = labels([9] * 30, 3, marks=Marks(computed=(line(3, "a = b + 1"),), value=9))
    assert marks(computed, evidence) == ["9 comes from here"]
    evidence = labels([9], 3, marks=Marks(computed=(line(3, "a = b + 1"),), value=9.0))
    assert marks(computed, evidence) == ["9 comes from here"]


def test_what_a_call_made_nan_of_was_an_infinity() -> None:
    evidence = labels([9], 3, marks=Marks(computed=(line(3, "a = b / c"),)))
    assert evidence.violation is not None
    assert marks(computed, evidence) == ["9 comes from here"]
    made = replace(evidence.violation, is_nonfinite=True, argument="")
    assert marks(computed, replace(evidence, violation=made)) == ["inf comes from here"]


# --- the length of the ids ------------------------------------------------------------------------


def test_the_line_that_set_the_length() -> None:
    def origin(number: int, *, is_set: bool = True) -> Marks:
        at = SourceSpan(cell=1, line=number, text="ids = rand(2, 9)")
        return Marks(length=BoundOrigin(at=at, expression="rand(2, 9)", is_set=is_set))

    def beyond(**facts: Any) -> Evidence:
        evidence = lookup([7, 8], 5, **facts)
        assert evidence.violation is not None
        offenders = replace(evidence.violation.offenders, max=8)
        return replace(evidence, violation=replace(evidence.violation, offenders=offenders))

    evidence = beyond(marks=origin(3))
    assert texts(length, evidence) == ["length 9, set in line 3: rand(2, 9)"]
    assert marks(length, evidence) == ["length 9 is set here"]
    assert texts(length, beyond(marks=origin(1))) == []
    assert texts(length, beyond(marks=origin(3, is_set=False))) == []
    assert texts(length, beyond()) == []


# --- the item of a batch --------------------------------------------------------------------------


def test_the_item_of_a_data_set() -> None:
    batch = step(None, 3, "for x, y in loader:", note="batch 2 of loader, item 17")
    evidence = labels([9], 3, provenance=(step("torch.stack", 4, "s"), batch))
    (found,) = seen(item, evidence)
    assert found.text == "batch 2 of loader, item 17"
    assert found.sources[0].line == 3
    assert evidence.violation is not None
    (bad,) = evidence.violation.offenders.first
    places = tuple(replace(bad, sample=at) for at in (4, 0, 4, None))
    (found,) = seen(item, with_offenders(evidence, first=places))
    assert found.facts == {"samples": (4, 0)}
    assert texts(item, labels([9], 3, provenance=(step(None, 3, "for"),))) == []
    assert texts(item, labels([9], 3)) == []
