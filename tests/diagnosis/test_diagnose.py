"""The headline in two sets of names, and what is said of a device that nobody used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudalens
from cudalens.core.report import (
    ErrorFacts,
    Evidence,
    Offender,
    Offenders,
    OpName,
    SourceSpan,
    TensorFact,
    Violation,
)
from cudalens.core.report_types import Hint
from cudalens.diagnosis.diagnose import (
    _argument_changed,
    _is_of_a_part,
    _offenders,
    diagnose,
    format_message,
)
from cudalens.diagnosis.user_code import Change, Fix
from cudalens.render.screen import build
from tests.builders import fact, make_report, spelled

LONG = "self.embedding_tables[name].weight_of_all"
"""One character more than a name may have."""


OUTSIDE = "{argument}[17] = 10 is outside the 10 classes of {related}"
IN_SCHEMA = "[17] = 10 is outside the 10 classes of input"
UNNAMED = "[17] = 10 is outside the 10 classes"


def finding(template: str = OUTSIDE, *, argument: str = "target", **more: Any) -> Violation:
    return Violation(
        headline=template,
        argument=argument,
        related="self",
        offenders=Offenders(count=1, total=32, first=(Offender(position=(17,), value=10),)),
        **more,
    )


@pytest.mark.parametrize(
    "row",
    [
        ((), f"target{UNNAMED}"),
        ([("target", "y")], f"y{UNNAMED}"),
        ([("target", "y - 1")], f"(y - 1){UNNAMED}"),
        ([("target", "b['y']")], f"b['y']{UNNAMED}"),
        ([("target", "net(x)")], f"net(x){UNNAMED}"),
        ([("target", LONG)], f"target{UNNAMED}"),
        ([("target", LONG[1:])], f"{LONG[1:]}{UNNAMED}"),
        ([("target", "d['{related}']")], f"d['{{related}}']{UNNAMED}"),
        ([("input", "z")], "target[17] = 10 is outside the 10 classes of z"),
        ([("self", "p"), ("input", "z")], "target[17] = 10 is outside the 10 classes of p"),
        ([("input", "z * 2")], "target[17] = 10 is outside the 10 classes of (z * 2)"),
        ([(None, "y"), (None, "z")], f"target{UNNAMED}"),
        # The op got the user's tensor reshaped; its own place stays in the schema's headline.
        ([(None, "y", (1, 1))], f"y[1, 1]{UNNAMED[4:]}"),
        # ``indices[1]`` is one of several; the others' names are not taken for its.
        ([("target[0]", "rows"), ("target[1]", "columns")], f"columns{UNNAMED}",
         f"target[1]{IN_SCHEMA}", finding(OUTSIDE.replace("}[", "}[1][", 1), list_position=1)),
        # Of indices that nobody named, the dimension says which it is.
        ([("indices[1]", None)], f"index{UNNAMED}", f"indices[1]{IN_SCHEMA}",
         finding(OUTSIDE.replace("}[", "}[1][", 1), list_position=1, argument="indices")),
        # A template of a user's guard names the argument alone, or nothing at all.
        ([("target", "y")], "y sums to 3", "target sums to 3", finding("{argument} sums to 3")),
        ([("target", "y")], "row {9} is bad", "row {9} is bad", finding("row {9} is bad")),
    ],
)  # fmt: skip
def test_the_headline_has_the_users_expressions_where_they_are_proven(row: tuple[Any, ...]) -> None:
    """And the schema's names in the form that tools read, whatever is known of the tensor."""
    facts, own, headline, violation = (*row, f"target{IN_SCHEMA}", finding())[:4]
    evidence = Evidence(
        violation=violation,
        op=OpName(name="aten::nll_loss_forward", api="torch.nn.functional.cross_entropy"),
        tensors=tuple(
            TensorFact(
                shape=(32,),
                argument=argument,
                expression=spelled(text),
                bad_at=place[0] if place else None,
            )
            for argument, text, *place in facts
        ),
    )
    report = diagnose(evidence)
    assert (report.headline_schema, report.headline) == (headline, own)
    assert format_message(report).startswith(own)


def test_the_exception_names_one_thing_by_one_name() -> None:
    """The user's expression comes first, the schema's name after it."""
    lines = format_message(make_report(module_path="head")).splitlines()
    assert lines[0].startswith("y[17] = 10 is outside the 10 classes of logits (allowed ")
    assert ", argument y (target) in module head" in lines[1]
    assert ", argument target\n" in format_message(make_report(expression=None))
    assert ", argument" not in format_message(make_report(expression=None, argument=None))


def test_cuda_is_not_called_fine_where_nobody_used_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host error of tensors in host memory says nothing of a device."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError), cudalens.check() as session:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert session.report is not None
    assert session.report.to_dict()["context_usable"] is None
    assert build(session.report).status is None


def edit(*changes: Change, tried: bool | None = True) -> Hint:
    return Hint(text="words", fix=Fix("f(y)", list(changes)), tried=tried)


@pytest.mark.parametrize(
    ("hints", "argument"),
    [
        ([edit(Change("y", "{x} - 1"))], "target"),
        ([edit(Change("z", "{x}.T"))], "input"),
        ([edit(Change("q", "{x}.T"))], None),
        ([edit(Change("", "{x}.T"))], "self"),
        ([edit(Change("y", "{x} - 1"), Change("z", "{x} - 1"))], "target"),
        ([edit(Change("y", "{x} - 1"), Change("z", "{x}.T"))], None),
        ([edit(Change("y", "{x} - 1")), edit(Change("z", "{x}.T"))], None),
        ([edit(Change("y", "{x} - 1")), edit(Change("z", "{x}.T"), tried=None)], "target"),
        ([Hint(text="words", fix="f(y - 1)", tried=True)], None),
        ([], None),
    ],
)
@pytest.mark.parametrize("nonfinite", [False, True])
def test_the_argument_that_the_change_alters(
    hints: list[Hint], argument: str | None, nonfinite: bool
) -> None:
    known = (fact("target", "int64[2]", "y"), fact("input", "float32[2]", "z"))
    violation = Violation(headline="", is_nonfinite=True) if nonfinite else None
    found = _argument_changed(Evidence(tensors=known, violation=violation), tuple(hints))
    assert found == (None if nonfinite else argument)


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({"is_index": True}, "DeviceIndexError"), ({"is_index": False}, "DeviceValueError"),
        ({"is_nonfinite": True}, "NonFiniteError"), ({"is_silent": True}, "SilentFindingWarning"),
    ],
)  # fmt: skip
def test_the_exception_of_a_finding_is_what_is_raised(facts: dict[str, bool], kind: str) -> None:
    raised = diagnose(Evidence(violation=finding(**facts))).exception
    assert raised is not None
    assert raised.type == kind
    assert raised.message.startswith("target[17] = 10 is outside")


def test_the_exception_of_an_error_is_its_first_line() -> None:
    error = ErrorFacts(type_name="RuntimeError", message="  one\ntwo")
    raised = diagnose(Evidence(error=error)).exception
    assert raised is not None
    assert (raised.type, raised.message) == ("RuntimeError", "one")
    assert diagnose(Evidence()).exception is None


def test_inputs_of_a_bad_element_have_the_users_names() -> None:
    first = Offender(position=(0,), value="nan", inputs=(("self", 0), ("other", 1)))
    violation = Violation(headline="", offenders=Offenders(count=1, total=1, first=(first,)))
    known = (fact("self", "float32[1]", "x"),)
    found = _offenders(Evidence(violation=violation, tensors=known))
    assert found is not None
    assert found.first[0].inputs == (("x", 0), ("other", 1))
    assert _offenders(Evidence()) is None


@pytest.mark.parametrize(
    ("facts", "more", "words"),
    [
        ({"device_text": "Assertion"}, {}, "the value was found before the launch."),
        ({"device_text": "Assertion"}, {"deferred": True}, "values in bounds in its place, so"),
        ({"device_text": None, "guard": "g"}, {}, "The guard g stopped the op before its launch."),
        ({"device_text": None}, {"deferred": True}, "with the bad values replaced by valid ones"),
        ({"is_silent": True}, {}, "No assert fires for this on CUDA"),
        ({"is_nonfinite": True}, {}, "Why."),
    ],
)
def test_what_became_of_the_values(facts: Any, more: Any, words: str) -> None:
    violation = finding(explanation="Why.", **facts)
    text = diagnose(Evidence(violation=violation, **more)).explanation
    assert text.startswith("Why.")
    assert text.endswith(words) or words in text


@pytest.mark.parametrize(
    ("code", "own", "indexes", "is_part"),
    [
        ("x[0, i] = y", None, ("i",), True),
        ("x[0, i] += y", None, ("i",), True),
        ("x[:, None, i] = y", None, ("i",), True),
        ("x[:, 0] = y", None, (), True),
        ("x[i, k] = y", None, ("i",), True),
        ("x[i, k] = y", None, ("i", "k"), False),
        ("x[:, i] = y", None, ("i",), False),
        ("x[:, i + 1] = y", None, (), False),
        ("x[i] = y", None, ("i",), False),
        ("x[0, i] = y", "x", ("i",), False),
        ("y = x[0, i]", None, ("i",), False),
    ],
)
def test_a_subscript_of_a_part_of_a_tensor(
    code: str, own: str | None, indexes: tuple[str, ...], is_part: bool
) -> None:
    """The op of ``x[0, i]`` is given ``x[0]``: its dimensions are others than those of x."""
    tensors = (fact("self", "float32[4]", own), *(fact(None, "int64[2]", it) for it in indexes))
    evidence = Evidence(source=SourceSpan(cell=1, line=1, text=code), tensors=tensors)
    assert _is_of_a_part(evidence) is is_part
