"""Which value a distribution of torch's refused: its own check is asked again, element by element.

``torch.distributions`` says that a parameter or a sample holds invalid values, and prints all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core.report import Evidence
from cudalens.core.report_types import OpName, Violation
from cudalens.evidence.call_stack import locate
from cudalens.evidence.tensors import tensor_facts
from cudalens.guards._numbers import exact_offenders
from cudalens.guards._ranges import spelled
from cudalens.source.files import torch_path

CHECKED = "distribution.checked"
"""The observation that a distribution has read the values, so that kernels have run."""
_COMPLAINT = "but found invalid values:"
_CHECKS = "distributions/distribution.py"


def with_refused_parameter(evidence: Evidence, entries: Sequence[TracebackType]) -> Evidence | None:
    """Add the bad values of a parameter or sample that a distribution did not take.

    Returns:
        ``None`` for any other exception, and for a condition on whole matrices.
    """
    if evidence.error is None or _COMPLAINT not in evidence.error.message or not entries:
        return None
    frame = entries[-1].tb_frame
    names = frame.f_locals
    if torch_path(frame.f_code.co_filename) != _CHECKS or "value" not in names:
        return None
    owner, name = names.get("self"), names.get("param", "value")
    constraint = _elementwise(names.get("constraint", names.get("support")))
    given, value = _given(entries, owner, name), names["value"]
    tensor = given if isinstance(given, Tensor) else value
    with _torch.plain_torch(), _torch.no_dispatch_modes():
        found = _finding(tensor, value, constraint, name, type(owner).__name__)
    if found is None:
        return None
    site = locate(entries, {name: tensor})
    is_torchs = type(owner).__module__.startswith("torch.")
    return replace(
        evidence,
        violation=found,
        op=OpName(api=f"torch.distributions.{type(owner).__name__}" if is_torchs else None),
        tensors=tensor_facts({name: tensor}, site, name),
        facts=(*evidence.facts, (CHECKED, "yes")),
    )


def _given(entries: Sequence[TracebackType], owner: object, name: str) -> object:
    """Give what the user passed: a distribution may normalise it before it looks."""
    for entry in entries:
        variables = entry.tb_frame.f_locals
        if variables.get("self") is owner and variables.get(name) is not None:
            return variables[name]
    return None


def _elementwise(constraint: Any) -> Any:
    """Give the condition on one element behind one on rows of them."""
    while hasattr(constraint, "base_constraint"):
        constraint = constraint.base_constraint
    if isinstance(constraint, type(torch.distributions.constraints.simplex)):
        return torch.distributions.constraints.nonnegative  # what is left out is the sum of a row
    return constraint


def _finding(
    tensor: Tensor, value: Tensor, constraint: Any, name: str, kind: str
) -> Violation | None:
    """Describe the elements of ``tensor`` that break a condition; ``None`` where none does.

    Args:
        tensor: what the distribution was given.
        value: what it made of that, and looked at.
    """
    valid = constraint.check(tensor)
    bad = ~valid if valid.shape == tensor.shape else tensor.isnan()
    problem = f"does not satisfy {constraint!r}"
    if not bool(bad.any()):
        if value.shape != tensor.shape or not bool((bad := value.isnan()).any()):
            return None
        problem = f"becomes NaN in {kind}"
    offenders = exact_offenders(tensor, bad)
    if offenders.first[0].value == "nan":
        count, total = int(tensor.isnan().count_nonzero()), tensor.numel()
        problem = "is not a number" + (f"; {count} of {total} values are NaN" if total > 1 else "")
    return Violation(
        argument=name,
        headline=f"{spelled(name, offenders)} {problem}",
        explanation=f"{kind} looks at its parameters when it is made, and at each sample that it "
        "is asked about.",
        offenders=offenders,
        is_index=False,
    )
