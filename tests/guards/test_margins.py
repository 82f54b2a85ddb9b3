"""Guards of the margin losses and of CTC, whose kernels check little or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import tensor

from tests.cpu_guards import Collector, guarded, positions

aten = torch.ops.aten


@pytest.fixture
def guards() -> Iterator[Collector]:
    with guarded() as collector:
        yield collector


# --- margins -------------------------------------------------------------------------------------


def test_multi_margin_targets(guards: Collector) -> None:
    """Classes pass, one beyond stops, and -100 means nothing here."""
    scores = torch.zeros(3, 4)
    assert guards.look(lambda: F.multi_margin_loss(scores, tensor([0, 3, 1]))) is None
    for label in (4, -1, -100):
        found = guards.look(lambda x=label: F.multi_margin_loss(scores, tensor([0, x, 1])))
        assert found is not None and not found.is_silent
        assert positions(found) == [(1,)]


@pytest.mark.parametrize("target", [tensor(3), tensor([3])])
def test_multi_margin_scores_of_one_sample(guards: Collector, target: torch.Tensor) -> None:
    """Without a dimension of samples there is one; more labels than samples are refused."""
    assert guards.look(lambda: F.multi_margin_loss(torch.zeros(4), target)) is None
    found = guards.look(lambda: F.multi_margin_loss(torch.zeros(3), target))
    assert found is not None
    assert found.bounds.text == "0 … 2"
    refused = guards.unguarded(lambda: F.multi_margin_loss(torch.zeros(3), tensor([0, 3])))
    assert isinstance(refused, RuntimeError)
    assert guards.found == []


@pytest.mark.parametrize(("steps", "lengths"), [(3, 2), (2, 3), (1, 2), (2, 1)])
def test_ctc_lengths_that_are_not_one_for_each_sample(
    guards: Collector, steps: int, lengths: int
) -> None:
    """Torch refuses them on the host; the guard has nothing to say, and does not fail."""
    scores = torch.zeros(5, 2, 4).log_softmax(2)
    given = tensor([5] * steps), tensor([2] * lengths)
    refused = guards.unguarded(lambda: F.ctc_loss(scores, tensor([[9, 9]] * 2), *given))
    assert isinstance(refused, RuntimeError)
    assert guards.found == []
    assert guards.trouble == []


def test_multi_margin_target_of_33_bits_is_refused_as_on_the_cpu(guards: Collector) -> None:
    """A label that the kernel cuts to a class asserts nothing on CUDA; no text is quoted."""
    found = guards.look(lambda: F.multi_margin_loss(torch.zeros(2, 3), tensor([0, 2**32 + 1])))
    assert found is not None
    assert not found.is_silent and found.device_text is None
    assert "low 32 bits" in found.explanation
    assert found.offenders.first[0].value == 2**32 + 1


def test_multi_margin_backward_is_silent(guards: Collector) -> None:
    """The backward kernel looks at nothing, so that the finding is a silent one."""
    scores = torch.rand(2, 3, requires_grad=True)
    target = tensor([0, 1])
    loss = F.multi_margin_loss(scores, target)
    target.data[1] = 3
    found = guards.look(loss.backward)
    assert found is not None and found.is_silent and found.device_text is None


@pytest.mark.parametrize(
    ("target", "bad"),
    [
        ([[2, 0, -1], [-1, 9, 9]], []),
        ([[3, 0, -1], [-1, 9, 9]], [(0, 0)]),
        ([[0, 1, 3], [3, -1, 3]], [(0, 2), (1, 0)]),
        ([[-2, 3, 3], [-1, -1, -1]], []),
    ],
)
def test_multilabel_targets_end_at_a_negative_one(
    guards: Collector, target: list[list[int]], bad: list[Any]
) -> None:
    """Only what stands before the first negative target of a row is read by the kernel."""
    call = lambda: aten.multilabel_margin_loss_forward(torch.zeros(2, 3), tensor(target), 1)
    guards.unguarded(call)  # the CPU kernel itself refuses some rows that CUDA takes
    found = [violation for _, violation in guards.found]
    assert [item for violation in found for item in positions(violation)] == bad
    assert all(violation.is_silent for violation in found)


# --- connectionist temporal classification -------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "input_lengths", "target_lengths", "bad"),
    [
        ([[1, 3, -1], [2, 9, 9]], [5, 5], [2, 1], []),
        ([[1, 4, -1], [2, 9, 9]], [5, 5], [2, 1], [(0, 1)]),
        ([[1, 4, -1], [2, 9, 9]], [5, 5], [3, 2], [(0, 1), (0, 2), (1, 1)]),
        ([[1, 4, -1], [2, 9, 9]], [0, 5], [3, 1], []),
        ([1, 3, 2], [5, 5], [2, 1], []),
        ([1, 3, 4], [5, 5], [2, 1], [(2,)]),
        ([9, 9, 1], [0, 5], [2, 1], []),
        ([9, 9, 4], [0, 5], [2, 1], [(2,)]),
    ],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_ctc_labels_that_are_read(
    guards: Collector,
    targets: Any,
    input_lengths: list[int],
    target_lengths: list[int],
    bad: list[Any],
    as_tensor: bool,
) -> None:
    """Labels within their length count; padding and samples without input do not."""
    scores = torch.zeros(5, 2, 4).log_softmax(-1)
    steps: Any = tensor(input_lengths) if as_tensor else input_lengths
    lengths: Any = tensor(target_lengths) if as_tensor else target_lengths
    op = aten._ctc_loss.Tensor if as_tensor else aten._ctc_loss.default
    found = guards.look(lambda: op(scores, tensor(targets), steps, lengths))
    assert (positions(found) if found else []) == bad
    if found:
        assert found.is_silent and not found.is_replay_safe and found.device_text is None
        assert found.bounds.text == "0 … 3"


def test_ctc_loss_of_the_library_is_reached(guards: Collector) -> None:
    """F.ctc_loss meets the guard, and so does its backward pass."""
    scores = torch.zeros(5, 1, 4).log_softmax(-1).requires_grad_()
    targets = tensor([[1, 2]])
    call = lambda: F.ctc_loss(scores, targets, tensor([5]), tensor([2]))
    loss = call()
    targets.data[0, 1] = 4
    found = guards.look(call)
    assert found is not None and guards.found[0][0] == "aten::_ctc_loss"
    found = guards.look(loss.backward)
    assert found is not None and guards.found[0][0].startswith("aten::_ctc_loss_backward")
