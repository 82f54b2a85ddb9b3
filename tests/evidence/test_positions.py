"""Where a bad value lies in the user's own tensor when the op was given another shape of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cudalens.core.report import Report
from cudalens.evidence.tensors import same_spot
from cudalens.render.words import headline, headline_parts
from tests.blocks import report_of

pytestmark = pytest.mark.usefixtures("sim")


def labels(*shape: int) -> Tensor:
    """Zeros, but 11 in the last place but one."""
    found = torch.zeros(shape, dtype=torch.long)
    found.view(-1)[-2] = 11
    return found.to("cuda")


@pytest.mark.parametrize(
    ("shape", "own"),
    [((2, 6), "y[1, 4] = 11"), ((1, 2, 2, 3), "y[0, 1, 1, 1] = 11"), ((6, 2), "y[5, 0] = 11")],
)
def test_the_headline_points_into_the_users_tensor(shape: tuple[int, ...], own: str) -> None:
    """cross_entropy gives its op ``[N, 1, L]``: the JSON names that place, the headline his."""
    y = labels(*shape)
    scores = torch.zeros(shape[0], 11, *shape[1:], device="cuda")
    report = report_of(lambda: F.cross_entropy(scores, y))
    assert headline_parts(report)[0] == own
    assert report.offenders is not None and len(report.offenders.first[0].position) == 3
    assert report.expression is None
    (fact,) = (item for item in report.tensors if item.expression == "y")
    assert fact.bad_at is not None and y[fact.bad_at] == 11
    assert Report.from_dict(report.to_dict()) == report


def test_a_tensor_of_the_same_shape_needs_no_translation() -> None:
    scores, y = torch.zeros(6, 3, device="cuda"), labels(6)
    report = report_of(lambda: F.cross_entropy(scores, y))
    assert headline_parts(report)[0] == "y[4] = 11"
    assert all(fact.bad_at is None for fact in report.tensors)


def test_an_op_without_a_name_for_it_still_points_into_the_users_tensor() -> None:
    y = labels(2, 3)
    report = report_of(lambda: F.one_hot(y, 5))
    assert headline(report).startswith("y[1, 1] = 11 is outside ")


@pytest.mark.parametrize(
    ("own", "found"),
    [
        (torch.arange(6).view(2, 3), (1, 1)),
        (torch.arange(6).view(3, 2).t().contiguous().view(2, 3), None),
        (torch.arange(7), None),
        (torch.arange(6).view(2, 3).int(), None),
        (torch.arange(6).view(1, 6, 1), None),
    ],
)
def test_only_the_same_values_tell_the_place(own: Tensor, found: tuple[int, ...] | None) -> None:
    """Another order, number or dtype of values is another tensor; the same shape needs nothing."""
    assert same_spot(own, torch.arange(6).view(1, 6, 1), (0, 4, 0)) == found
