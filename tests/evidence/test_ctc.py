"""Which items of a batch have more labels than ctc_loss can place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudalens.core.evidence_types import ShortInput
from cudalens.evidence.ctc import short_input
from tests.hostcells import SETUP, run_cell

ROWS = torch.tensor([[1, 2, 3, 0], [7, 7, 7, 7], [5, 6, 0, 0]])


def short(targets: Any, steps: Any, lengths: Any) -> ShortInput | None:
    return short_input({"targets": targets, "input_lengths": steps, "target_lengths": lengths})


def test_equal_labels_in_a_row_need_a_blank_between_them() -> None:
    assert short(ROWS, torch.tensor([7, 7, 7]), torch.tensor([3, 4, 2])) is None
    found = short(ROWS, torch.tensor([[6], [6], [6]]), torch.tensor([3, 4, 2]))
    assert found == ShortInput(item=1, steps=6, labels=4, repeats=3, items=1, total=3)


def test_labels_beyond_the_target_length_do_not_count() -> None:
    assert short(ROWS, [3, 1, 2], (3, 1, 2)) is None
    found = short(ROWS, [2, 1, 1], (3, 1, 2))
    assert found == ShortInput(item=0, steps=2, labels=3, repeats=0, items=2, total=3)


def test_targets_in_one_row() -> None:
    row = torch.tensor([1, 2, 7, 7])
    assert short(row, [2, 3], [2, 2]) is None
    assert short(row, [2, 2], [2, 2]) == ShortInput(1, 2, 2, 1, 1, 2)
    assert short(row, [1], [2]) == ShortInput(0, 1, 2, 0, 1, 1)  # the rest belongs to none


@pytest.mark.parametrize(
    ("targets", "steps", "lengths"),
    [
        (ROWS, [1, 1], [3, 4, 2]),
        (ROWS, [], []),
        (ROWS[:2], [1, 1, 1], [3, 4, 2]),
        (ROWS, [1, 1], [3, 4]),
        (ROWS, [1, 1, 1], [3, 4.0, 2]),
        (torch.tensor([1, 2, 3]), [1, 1], [3, -1]),
        (torch.tensor([1, 2]), [1, 1], [2, 2]),
        (None, [1], [2]),
        (ROWS, None, [1, 1, 1]),
    ],
)
def test_nothing_where_the_lengths_do_not_belong_to_the_targets(
    targets: Any, steps: Any, lengths: Any
) -> None:
    assert short(targets, steps, lengths) is None


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("steps", [6, 7])
def test_an_infinite_loss_names_the_item(steps: int) -> None:
    """One step more, and there is a way to the labels."""
    code = f"""\
{SETUP}p = torch.zeros({steps}, 2, 9, requires_grad=True, device="cuda")
y = torch.tensor([[1, 2, 3, 4], [7, 7, 7, 7]]).cuda()
loss = F.ctc_loss(p.log_softmax(2), y, torch.full((2,), {steps}), torch.full((2,), 4))
loss.backward()
"""
    outcome = run_cell(code, fast=False, nan=True)
    if steps == 7:
        assert outcome.error is None
        return
    assert outcome.shown.limits == ()
    assert "too few steps for 1 of 2 items: item 1 has 4 labels, 3 of them equal to the one " in (
        " ".join(item.text for item in outcome.shown.observations)
    )
