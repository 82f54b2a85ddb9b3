"""The headline in two sets of names, and what is said of a device that nobody used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudalens
from cudalens.core.report import Evidence, Offender, Offenders, OpName, TensorFact, Violation
from cudalens.diagnosis.diagnose import diagnose, format_message
from cudalens.render.words import context_state
from tests.builders import make_report

LONG = "self.embedding_tables[name].weight_of_all"
"""One character more than a name may have."""


OUTSIDE = "{argument}[17] = 10 is outside the 10 classes of {related}"
IN_SCHEMA = "[17] = 10 is outside the 10 classes of input"
IN_SELF = IN_SCHEMA.replace("input", "self")


def finding(template: str = OUTSIDE, **more: Any) -> Violation:
    return Violation(
        headline=template,
        argument="target",
        related="self",
        offenders=Offenders(count=1, total=32, first=(Offender(position=(17,), value=10),)),
        **more,
    )


def fact(argument: str | None, expression: str | None, **more: Any) -> TensorFact:
    return TensorFact(argument=argument, expression=expression, shape=(32,), **more)


@pytest.mark.parametrize(
    ("facts", "own"),
    [
        ((), "target[17] = 10 is outside the 10 classes of input"),
        ([("target", "y")], f"y{IN_SCHEMA}"),
        ([("target", "y - 1")], "(y - 1)[17] = 10 is outside the 10 classes of input"),
        ([("target", "b['y']")], "b['y'][17] = 10 is outside the 10 classes of input"),
        ([("target", "net(x)")], "net(x)[17] = 10 is outside the 10 classes of input"),
        ([("target", LONG)], "target[17] = 10 is outside the 10 classes of input"),
        ([("target", LONG[1:])], f"{LONG[1:]}[17] = 10 is outside the 10 classes of input"),
        ([("target", "d['{related}']")], f"d['{{related}}']{IN_SCHEMA}"),
        ([("input", "z")], "target[17] = 10 is outside the 10 classes of z"),
        ([("self", "p"), ("input", "z")], "target[17] = 10 is outside the 10 classes of p"),
        ([("input", "z * 2")], "target[17] = 10 is outside the 10 classes of (z * 2)"),
        ([(None, "y"), (None, "z")], "target[17] = 10 is outside the 10 classes of input"),
    ],
)
def test_the_headline_has_the_users_expressions_where_they_are_proven(
    facts: list[tuple[str | None, str]], own: str
) -> None:
    """And the schema's names in the form that tools read, whatever is known."""
    evidence = Evidence(
        violation=finding(),
        op=OpName(name="aten::nll_loss_forward", api="torch.nn.functional.cross_entropy"),
        tensors=tuple(fact(*item) for item in facts),
    )
    report = diagnose(evidence)
    assert report.headline == "target[17] = 10 is outside the 10 classes of input"
    assert report.headline_own == own
    assert format_message(report).startswith(own)


@pytest.mark.parametrize(
    ("violation", "tensors", "headline", "own"),
    [
        # The op got the user's tensor reshaped; its own place stays in the schema's headline.
        (finding(), [fact(None, "y", bad_at=(1, 1))], f"target{IN_SELF}", f"y[1, 1]{IN_SELF[4:]}"),
        # ``indices[1]`` is one of several; the others' names are not taken for its.
        (finding(OUTSIDE.replace("}[", "}[1][", 1), list_position=1),
         [fact("target[0]", "rows"), fact("target[1]", "columns")], f"target[1]{IN_SELF}",
         f"columns{IN_SELF}"),
        # A template of a user's guard names the argument alone, or nothing at all.
        (finding("{argument} sums to 3"), [fact("target", "y")], "target sums to 3", "y sums to 3"),
        (finding("row {9} is bad"), [fact("target", "y")], "row {9} is bad", "row {9} is bad"),
    ],
)  # fmt: skip
def test_a_template_is_filled_by_what_is_known_of_the_tensor(
    violation: Violation, tensors: list[TensorFact], headline: str, own: str
) -> None:
    """Its name, its place in a list, and the place of the bad value in it."""
    report = diagnose(Evidence(violation=violation, tensors=tuple(tensors)))
    assert (report.headline, report.headline_own) == (headline, own)


def test_the_exception_names_one_thing_by_one_name() -> None:
    """Issue 17, item 22: the user's expression comes first, the schema's name after it."""
    lines = format_message(make_report(module_path="head")).splitlines()
    assert lines[0].startswith("y[17] = 10 is outside the 10 classes of logits (allowed ")
    assert ", argument y (target) in module head" in lines[1]
    assert ", argument target\n" in format_message(make_report(expression=None))
    assert ", argument" not in format_message(make_report(expression=None, argument=None))


def test_cuda_is_not_called_fine_where_nobody_used_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 17, item 29: a host error of tensors in host memory says nothing of a device."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError), cudalens.check() as session:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert session.report is not None
    assert session.report.to_dict()["context_usable"] is None
    assert context_state(session.report) is None
