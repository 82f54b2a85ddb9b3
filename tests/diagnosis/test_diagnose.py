"""The headline in two sets of names, and what is said of a device that nobody used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudalens
from cudalens.core.report import Evidence, Offender, Offenders, OpName, TensorFact, Violation
from cudalens.diagnosis.diagnose import diagnose, format_message
from cudalens.render.screen import build
from tests.builders import make_report, spelled

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
