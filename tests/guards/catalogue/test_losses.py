"""Guards of the losses: bounds, wording, what is ignored, backward passes, threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import full, ones, tensor, zeros

from cudalens.guards.catalogue.losses import _labels_read
from tests.cpu_guards import Collector, Stopped, assert_said, said_id
from tests.verdicts import ask

aten = torch.ops.aten
SCORES, WEIGHT = zeros(2, 3), ones(3)
MASK = zeros(2, 4, 5, dtype=torch.int64)
MASK[1, 2, 3] = MASK[1, 3, 0] = 255
OF_3 = "is outside the 3 classes of {related}"
WILD = tensor([9.0, -9.0])
ABOVE_1 = tensor([0.5, 1.0]).nextafter(tensor(2.0))


def of_pixels(**options: Any) -> torch.Tensor:
    return F.cross_entropy(zeros(2, 21, 4, 5), MASK, **options)


def uint8(*target: int, ignored: int = -100) -> torch.Tensor:
    return F.nll_loss(SCORES, tensor(target, dtype=torch.uint8), ignore_index=ignored)


SAID: list[tuple[Callable[[], Any], dict[str, Any] | None]] = [
    # The standard mistake reads exactly as the interface says.
    (
        lambda: F.cross_entropy(zeros(32, 10), zeros(32).long().index_fill(0, tensor(17), 10)),
        {
            "headline": "{argument}[17] = 10 is outside the 10 classes of {related}",
            **{"argument": "target", "related": "self", "size": 10, "dim": 1},
            **{"bounds.min": 0, "bounds.max": 9, "bounds.also_allowed": (-100,)},
            "bounds.text": "0 … 9 or -100 (ignore_index)",
            **{"offenders.count": 1, "offenders.total": 32, "is_index": True, "is_silent": False},
        },
    ),
    # An ignore_index that is a class adds nothing to the bounds.
    (
        lambda: F.nll_loss(SCORES, tensor([0, 3]), ignore_index=1),
        {"bounds.also_allowed": (), "bounds.text": "0 … 2"},
    ),
    # -100 is never equal to a uint8 target, not even to 156, and is not offered as allowed.
    (lambda: uint8(0, 2), None),
    (
        lambda: uint8(0, 156),
        {"at": [(1,)], "bounds.also_allowed": (), "prints": "`t < n_classes`"},
    ),
    (lambda: uint8(0, 255, ignored=255), None),
    (
        lambda: uint8(3, 255, ignored=255),
        {"at": [(0,)], "bounds.also_allowed": (255,), "prints": "`t < n_classes`"},
    ),
    # Input without a batch is checked, its target with and without a dimension.
    (lambda: F.nll_loss(zeros(3), tensor(3)), {"headline": f"{{argument}} = 3 {OF_3}", "dim": 0}),
    (
        lambda: F.nll_loss(zeros(3), tensor([3])),
        {"headline": f"{{argument}}[0] = 3 {OF_3}", "dim": 0},
    ),
    (
        lambda: F.nll_loss(zeros(1), tensor(1)),
        {"headline": "{argument} = 1 is outside the 1 class of {related}", "dim": 0},
    ),
    (lambda: F.nll_loss(zeros(3), tensor(2)), None),
    (lambda: F.nll_loss(zeros(3), tensor(3), reduction="none"), {"line": "Loss.cu:200"}),
    # A void label in a mask is found at its pixel; ignoring it is silent.
    (of_pixels, {"at": [(1, 2, 3), (1, 3, 0)], "offenders.total": 40}),
    (lambda: of_pixels(ignore_index=255), None),
    (lambda: F.cross_entropy(zeros(1, 9, 1, 2), full((1, 1, 2), 8)), None),
    # Class weights and label smoothing neither cause a finding nor hide one.
    *(
        (lambda y=y, o=o: F.cross_entropy(SCORES, tensor([0, y]), WEIGHT, **o), said)
        for o in ({}, {"label_smoothing": 0.1})
        for y, said in ((2, None), (3, {}))
    ),
    # Targets that are distributions do not meet the assertion.
    (lambda: F.cross_entropy(SCORES, full((2, 3), 9.0)), None),
    # Scores without a dimension of samples are those of one sample.
    *(
        (lambda n=n, y=y: F.multi_margin_loss(zeros(n), tensor(y)), said)
        for y in (3, [3])
        for n, said in ((4, None), (3, {"bounds.text": "0 … 2"}))
    ),
    # A value that rounding would hide is shown with the digits that tell it apart.
    (
        lambda: F.binary_cross_entropy(ABOVE_1, ones(2)),
        {"headline": "{argument}[1] = 1.0000001 is outside the interval 0 … 1"},
    ),
    # Where both are bad, the one that the kernel meets first is named.
    (lambda: F.binary_cross_entropy(tensor([2.0]), tensor([2.0])), {"argument": "self"}),
    # The op itself takes (3, 1) with (3,), so that bad values there are found too.
    (
        lambda: aten.binary_cross_entropy(tensor([[0.5], [2.0], [0.5]]), ones(3)),
        {"at": [(1, 0)]},
    ),
    # Logits may be any number, and the backward kernel checks nothing.
    (lambda: F.binary_cross_entropy_with_logits(WILD, WILD), None),
    (lambda: aten.binary_cross_entropy_backward(ones(()), WILD, WILD), None),
]


@pytest.mark.parametrize(("call", "said"), SAID, ids=said_id)
def test_what_is_said(guards: Collector, call: Any, said: dict[str, Any] | None) -> None:
    assert_said(guards.look(call), said)


@pytest.mark.parametrize("labels", [[3], [3, 0, 0]])
def test_a_target_of_another_length_is_left_to_torch(guards: Collector, labels: list[int]) -> None:
    with pytest.raises(RuntimeError, match="target"):
        guards.look(lambda: F.multi_margin_loss(SCORES, tensor(labels)))
    assert guards.found == []


@pytest.mark.parametrize(
    ("shape", "reduction", "line"),
    [
        ((4, 3), "mean", "Loss.cu:476: nll_loss_backward_reduce_cuda_kernel_2d"),
        ((4, 3), "none", "Loss.cu:428: nll_loss_backward_no_reduce_cuda_kernel"),
        ((2, 3, 2, 2), "mean", "NLLLoss2d.cu:202: nll_loss2d_backward_kernel"),
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
    is_safe = reduction != "none"
    assert_said(found, {"offenders.count": 1, "is_replay_safe": is_safe, "line": line})
    assert found is not None and "backward" in found.guard and "backward" in guards.found[0][0]


def test_each_thread_gets_its_own_error(guards: Collector) -> None:
    """Threads that fail at once each get the error of their own call."""

    def fail(label: int) -> str:
        with pytest.raises(Stopped) as caught:
            F.cross_entropy(torch.zeros(2, 3), tensor([0, label]))
        return str(caught.value)

    labels = range(10, 18)
    with ThreadPoolExecutor(len(labels)) as pool:
        said = pool.map(fail, labels)
    assert all(f"[1] = {label} is" in text for label, text in zip(labels, said, strict=True))


def test_ctc_loss_of_the_library_is_reached(guards: Collector) -> None:
    """F.ctc_loss meets the guard, and so does its backward pass."""
    scores = torch.zeros(5, 1, 4).log_softmax(-1).requires_grad_()
    targets = tensor([[1, 2]])
    call = lambda: F.ctc_loss(scores, targets, tensor([5]), tensor([2]))
    loss = call()
    targets.data[0, 1] = 4
    found = guards.look(call)
    words = "{argument}[0, 1] = 4 is outside the alphabet of 4 in {related}"
    assert_said(found, {"headline": words, "is_replay_safe": False})
    assert guards.found[0][0] == "aten::_ctc_loss"
    found = guards.look(loss.backward)
    assert found is not None and guards.found[0][0].startswith("aten::_ctc_loss_backward")


@pytest.mark.parametrize(
    ("shape", "steps", "lengths", "read"),
    [
        # A row for each sample: its first labels are read, and the padding is not.
        ((2, 3), [5, 5], [1, 3], [[1, 0, 0], [1, 1, 1]]),
        ((2, 3), [0, 5], [1, 3], [[0, 0, 0], [1, 1, 1]]),
        ((2, 3), [5, 5], [0, 2], [[0, 0, 0], [1, 1, 0]]),
        # One after the other: each label is of the sample in whose part it is.
        ((5,), [5, 5], [2, 2], [1, 1, 1, 1, 0]),
        ((5,), [0, 5], [2, 3], [0, 0, 1, 1, 1]),
        ((5,), [5, 0], [2, 3], [1, 1, 0, 0, 0]),
        ((3,), [5, 5], [0, 3], [1, 1, 1]),
        # Torch refuses other lengths, and other shapes.
        ((2, 3), [5], [1, 3], None),
        ((2, 3), [5, 5], [1], None),
        ((3, 3), [5, 5], [1, 3], None),
        ((2, 3, 1), [5, 5], [1, 3], None),
    ],
)
@pytest.mark.parametrize("given", [list, tensor])
def test_which_labels_the_kernel_of_ctc_loss_reads(
    shape: tuple[int, ...], steps: list[int], lengths: list[int], read: Any, given: Any
) -> None:
    found = _labels_read(torch.zeros(shape, dtype=torch.int64), 2, given(steps), given(lengths))
    assert (None if found is None else found.int().tolist()) == read


def test_without_a_sample_ctc_loss_reads_no_label() -> None:
    assert _labels_read(torch.zeros(0, dtype=torch.int64), 0, [], []) is None


BAD, LABELS = tensor([0, 9]), zeros(2, 2, 2).long().fill_(9)
NLL, NLL2D = aten.nll_loss_forward.default, aten.nll_loss2d_forward.default
ROWS = tensor([[9, -1, 0], [0, -1, -1]])
MARGIN, LABEL_MARGIN = aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default
BCE, HALF = aten.binary_cross_entropy.default, full((2, 3), 0.5)
CTC, STEPS = aten._ctc_loss.default, zeros(3, 1, 4)
REFUSED: list[tuple[Any, tuple[Any, ...], list[tuple[Any, ...]]]] = [
    # Each with calls next to it that torch refuses, or that launch nothing.
    (
        NLL,
        (SCORES, BAD, None, 1, -100),
        [
            (SCORES, BAD.int(), None, 1, -100),
            (SCORES, BAD.to("meta"), None, 1, -100),
            (SCORES, tensor([0, 9, 0]), None, 1, -100),
            (SCORES, BAD[:, None], None, 1, -100),
            (SCORES[None], BAD, None, 1, -100),
            (SCORES, BAD, ones(2), 1, -100),
            (SCORES, BAD, ones(1, 3), 1, -100),
            (SCORES, BAD, WEIGHT.double(), 1, -100),
            (SCORES, tensor([9, 9]), None, 1, 9),
        ],
    ),
    (NLL, (SCORES, BAD, WEIGHT, 1, -100), []),
    (
        NLL,
        (zeros(3), tensor([9]), WEIGHT, 1, -100),
        [(zeros(3), BAD, None, 1, -100), (zeros(3), tensor([[9]]), None, 1, -100)],
    ),
    (
        NLL2D,
        (zeros(2, 3, 2, 2), LABELS, WEIGHT, 1, -100),
        [
            (zeros(2, 3, 2, 2), LABELS.byte(), None, 1, -100),
            (zeros(2, 3, 2, 2), LABELS[:1], None, 1, -100),
            (zeros(2, 3, 2, 1), LABELS, None, 1, -100),
            (zeros(2, 3, 2, 2), LABELS, ones(2), 1, -100),
        ],
    ),
    (
        aten.nll_loss_backward.default,
        (ones(()), zeros(1), tensor([9]), None, 1, -100, ones(())),
        [
            (ones(()), zeros(3), tensor([9]), None, 1, -100, ones(())),
            (ones(()), zeros(2, 3), tensor([9]), None, 1, -100, ones(())),
        ],
    ),
    (
        aten.nll_loss_backward.default,
        (ones(()), zeros(3), tensor(9), None, 1, -100, ones(())),
        [(ones(()), zeros(3), tensor(9), None, 1, 9, ones(()))],
    ),
    (
        MARGIN,
        (SCORES, BAD),
        [
            (SCORES, BAD.int()),
            (SCORES, BAD.to("meta")),
            (SCORES[..., None], BAD),
            (SCORES, BAD[None]),
            (zeros(2, 0), BAD),
        ],
    ),
    (MARGIN, (zeros(()), tensor(1)), [(zeros(()), tensor(0))]),
    (
        aten.multi_margin_loss_backward.default,
        (ones(()), SCORES, BAD, 1, 1),
        [(ones(()), SCORES, BAD.int(), 1, 1), (ones(()), SCORES, tensor([0]), 1, 1)],
    ),
    (
        LABEL_MARGIN,
        (SCORES, ROWS, 1),
        [
            (SCORES, ROWS.int(), 1),
            (SCORES, ROWS.to("meta"), 1),
            (SCORES[None], ROWS[None], 1),
            (SCORES[:1], ROWS, 1),
            (SCORES, ROWS[:, :2], 1),
            (zeros(0, 3), ROWS[:0], 1),
        ],
    ),
    (LABEL_MARGIN, (zeros(()), tensor(1), 1), [(zeros(()), tensor(it), 1) for it in (0, -1)]),
    (
        CTC,
        (STEPS, tensor([[9]]).int(), [3], [1]),
        [
            (zeros(3, 1), tensor([[9]]), [3], [1]),
            (zeros(3, 1, 0), tensor([[9]]), [3], [1]),
            (STEPS, tensor([[9]]).short(), [3], [1]),
            (STEPS, tensor([[9]])[:0], [3], [1]),
        ],
    ),
    (
        BCE,
        (HALF, HALF * 3),
        [
            (HALF, HALF.double() * 3),
            (HALF.long(), HALF.long() + 3),
            (HALF, (HALF * 3).to("meta")),
            (HALF, HALF[:, :2] * 3),
            (HALF[:0], HALF * 3),
            (HALF, HALF[:0] * 3),
        ],
    ),
    (
        BCE,
        (HALF * 3, HALF),
        [(HALF[:, :2] * 3, HALF), (HALF[:0] * 3, HALF), (HALF[0] * 3, HALF[:0])],
    ),
]


@pytest.mark.parametrize(("op", "launched", "others"), REFUSED)
def test_what_torch_refuses_or_does_not_launch_is_not_judged(
    op: Any, launched: tuple[Any, ...], others: list[tuple[Any, ...]]
) -> None:
    assert ask(op, *launched)
    assert [ask(op, *other) for other in others] == [[] for _ in others]
