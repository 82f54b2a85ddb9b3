"""What is said of arguments of the wrong kind: a gradient that is not there."""

from __future__ import annotations

import pytest

from cudalens.core.evidence_types import OddArgument, RefusedArguments
from cudalens.core.report import ErrorFacts, Evidence
from cudalens.diagnosis.host_errors import explain_host_error


@pytest.mark.parametrize(
    ("names", "is_said"),
    [(["w.grad"], True), (["k", "net.w.grad"], True), (["gradient"], False), ([], False)],
)
def test_a_gradient_that_is_none(names: list[str], is_said: bool) -> None:
    odd = tuple(OddArgument(name=name, type_name="NoneType", words="None") for name in names)
    error = ErrorFacts(
        type_name="AttributeError", message="'NoneType' object has no attribute 'zero_'"
    )
    evidence = Evidence(error=error, refused_arguments=RefusedArguments(odd_arguments=odd))
    rules = [hint.rule for hint in explain_host_error(evidence, error).hints]
    assert rules == ["no_gradient"] * is_said
