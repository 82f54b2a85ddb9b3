"""Guards of the losses: bounds, wording, what is ignored, backward passes, threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import tensor

from cudalens.guards import GUARDS
from tests.cpu_guards import Collector, Stopped, positions
from tests.guards.test_catalogue import Ops
from tests.releases import here

aten = torch.ops.aten


def test_headline_names_value_position_and_classes(guards: Collector) -> None:
    """The finding of the standard mistake reads exactly as the interface says."""
    target = torch.zeros(32, dtype=torch.int64)
    target[17] = 10
    found = guards.look(lambda: F.cross_entropy(torch.zeros(32, 10), target))
    assert found is not None
    text = found.headline.format(argument="target", related="input")
    assert text == "target[17] = 10 is outside the 10 classes of input"
    assert (found.bounds.min, found.bounds.max) == (0, 9)
    assert found.bounds.also_allowed == (-100,)
    assert found.bounds.text == "0 … 9 or -100 (ignore_index)"
    assert (found.argument, found.related, found.size, found.dim) == ("target", "self", 10, 1)
    assert (found.offenders.count, found.offenders.total) == (1, 32)
    assert found.is_index and not found.is_silent


def test_ignored_class_is_not_allowed_twice(guards: Collector) -> None:
    """An ignore_index that is a class adds nothing to the bounds."""
    found = guards.look(lambda: F.nll_loss(torch.zeros(2, 3), tensor([0, 3]), ignore_index=1))
    assert found is not None
    assert (found.bounds.also_allowed, found.bounds.text) == ((), "0 … 2")


def test_ignored_targets_cost_no_second_reduction() -> None:
    """With ignored targets among good ones there is one reduction, as without them."""
    target = tensor([0, -100, 2]).repeat(100)
    with Ops() as ops:
        entry = GUARDS[aten.nll_loss_forward.default][0]
        assert entry.check(torch.zeros(300, 3), target, None, 1, -100) is None
    assert ops.counts["aminmax"] == 1
    assert not {"any", "all", "amin", "amax"} & set(ops.counts)


@pytest.mark.parametrize(
    ("target", "ignored", "bad"),
    [([0, 2], -100, []), ([0, 156], -100, [(1,)]), ([0, 255], 255, []), ([3, 255], 255, [(0,)])],
)
def test_uint8_targets_compare_as_numbers(
    guards: Collector, target: list[int], ignored: int, bad: list[Any]
) -> None:
    """-100 is never equal to a uint8 target, not even to 156, and is not offered as allowed."""
    labels = tensor(target, dtype=torch.uint8)
    found = guards.look(lambda: F.nll_loss(torch.zeros(2, 3), labels, ignore_index=ignored))
    assert (positions(found) if found else []) == bad
    if found:
        assert found.bounds.also_allowed == ((255,) if ignored == 255 else ())
        assert found.device_text is not None and "`t < n_classes`" in found.device_text


@pytest.mark.parametrize(
    ("scores", "target", "headline"),
    [
        (torch.zeros(3), tensor(3), "{argument} = 3 is outside the 3 classes of {related}"),
        (torch.zeros(3), tensor([3]), "{argument}[0] = 3 is outside the 3 classes of {related}"),
        (torch.zeros(1), tensor(1), "{argument} = 1 is outside the 1 class of {related}"),
        (torch.zeros(3), tensor(2), None),
    ],
)
def test_single_samples(
    guards: Collector, scores: torch.Tensor, target: torch.Tensor, headline: str | None
) -> None:
    """Input without a batch is checked, its target with and without a dimension."""
    found = guards.look(lambda: F.nll_loss(scores, target))
    assert (found.headline if found else None) == headline
    if found:
        assert found.dim == 0


def test_pixels_are_found_row_by_row(guards: Collector) -> None:
    """A void label in a mask is found at its pixel; ignoring it is silent."""
    mask = torch.zeros(2, 4, 5, dtype=torch.int64)
    mask[1, 2, 3] = mask[1, 3, 0] = 255
    logits = torch.zeros(2, 21, 4, 5)
    found = guards.look(lambda: F.cross_entropy(logits, mask))
    assert found is not None
    assert positions(found) == [(1, 2, 3), (1, 3, 0)]
    assert found.offenders.total == 40
    assert guards.look(lambda: F.cross_entropy(logits, mask, ignore_index=255)) is None


def test_weights_and_smoothing_change_nothing(guards: Collector) -> None:
    """Class weights and label smoothing neither cause a finding nor hide one."""
    scores, weight = torch.zeros(2, 3), torch.ones(3)
    for target, is_bad in ((tensor([0, 2]), False), (tensor([0, 3]), True)):
        for options in ({"weight": weight}, {"weight": weight, "label_smoothing": 0.1}):
            found = guards.look(lambda t=target, o=options: F.cross_entropy(scores, t, **o))
            assert (found is not None) == is_bad


def test_probability_targets_are_not_checked(guards: Collector) -> None:
    """Targets that are distributions do not meet the assertion."""
    assert guards.look(lambda: F.cross_entropy(torch.zeros(2, 3), torch.full((2, 3), 9.0))) is None


@pytest.mark.parametrize(
    ("shape", "reduction", "line"),
    [
        ((4, 3), "mean", "Loss.cu:476: nll_loss_backward_reduce_cuda_kernel_2d"),
        ((4, 3), "none", "Loss.cu:428: nll_loss_backward_no_reduce_cuda_kernel"),
        ((2, 3, 2, 2), "mean", "NLLLoss2d.cu:199: nll_loss2d_backward_kernel"),
        ((2, 3, 2, 2), "none", "NLLLoss2d.cu:162: nll_loss2d_backward_no_reduce_kernel"),
    ],
)
def test_target_changed_before_backward(
    guards: Collector, shape: tuple[int, ...], reduction: str, line: str
) -> None:
    """A target overwritten behind autograd's back is found in the backward pass."""
    logits = torch.zeros(shape, requires_grad=True)
    target = torch.zeros((shape[0], *shape[2:]), dtype=torch.int64)
    loss = F.cross_entropy(logits, target, reduction=reduction).sum()
    target.data.reshape(-1)[1] = 3
    found = guards.look(loss.backward)
    assert found is not None
    assert "backward" in found.guard and "backward" in guards.found[0][0]
    assert found.offenders.count == 1
    assert found.is_replay_safe == (reduction != "none")
    assert found.device_text is not None and found.device_text.startswith(here(line))


@pytest.mark.parametrize(
    ("scores", "reduction", "line"),
    [
        (torch.zeros(3), "mean", "Loss.cu:200: nll_loss_forward_reduce_cuda_kernel_1d"),
        (torch.zeros(3), "none", "Loss.cu:200: nll_loss_forward_reduce_cuda_kernel_1d"),
        (torch.zeros(1, 3), "sum", "Loss.cu:244: nll_loss_forward_reduce_cuda_kernel_2d"),
        (torch.zeros(1, 3), "none", "Loss.cu:179: nll_loss_forward_no_reduce_cuda_kernel"),
        (torch.zeros(1, 3, 1, 1), "mean", "NLLLoss2d.cu:108: nll_loss2d_forward_kernel"),
        (torch.zeros(1, 3, 1, 1), "none", "NLLLoss2d.cu:75: nll_loss2d_forward_no_reduce_kernel"),
    ],
)
def test_device_text_follows_the_kernel(
    guards: Collector, scores: torch.Tensor, reduction: str, line: str
) -> None:
    """Shape and reduction decide which kernel would have asserted."""
    target = torch.full(() if scores.dim() == 1 else (1, *scores.shape[2:]), 3)
    found = guards.look(lambda: F.nll_loss(scores, target, reduction=reduction))
    assert found is not None and found.device_text is not None
    assert found.device_text.startswith(here(line))


def test_each_thread_gets_its_own_error(guards: Collector) -> None:
    """Threads that fail at once each get the error of their own call."""
    raised: dict[int, str] = {}

    def fail(label: int) -> None:
        try:
            F.cross_entropy(torch.zeros(2, 3), tensor([0, label]))
        except Stopped as error:
            raised[label] = str(error)

    threads = [threading.Thread(target=fail, args=(label,)) for label in range(10, 18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(raised) == list(range(10, 18))
    assert all(f"[1] = {label} is" in text for label, text in raised.items())


# --- margins -------------------------------------------------------------------------------------


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


# --- binary cross entropy -------------------------------------------------------------------------


def test_value_just_above_one_is_not_called_one(guards: Collector) -> None:
    """A value that rounding would hide is shown with the digits that tell it apart."""
    values = tensor([0.5, 1.0]).nextafter(tensor(2.0))
    found = guards.look(lambda: F.binary_cross_entropy(values, torch.ones(2)))
    assert found is not None
    assert found.headline == "{argument}[1] = 1.0000001 is outside the interval 0 … 1"


def test_input_is_reported_before_target(guards: Collector) -> None:
    """Where both are bad, the one that the kernel meets first is named."""
    found = guards.look(lambda: F.binary_cross_entropy(tensor([2.0]), tensor([2.0])))
    assert found is not None and found.argument == "self"


def test_shapes_that_agree_once_squeezed(guards: Collector) -> None:
    """The op itself takes (3, 1) with (3,), so that bad values there are found too."""
    values = tensor([[0.5], [2.0], [0.5]])
    found = guards.look(lambda: aten.binary_cross_entropy(values, torch.ones(3)))
    assert found is not None and positions(found) == [(1, 0)]


def test_logits_and_backward_have_no_bounds(guards: Collector) -> None:
    """Logits may be any number, and the backward kernel checks nothing."""
    wild = tensor([9.0, -9.0])
    assert guards.look(lambda: F.binary_cross_entropy_with_logits(wild, wild)) is None
    call = lambda: aten.binary_cross_entropy_backward(torch.ones(()), wild, wild)
    assert guards.look(call) is None
