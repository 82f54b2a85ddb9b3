"""Guards of the margin losses, where the CUDA kernels check less than those of the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Violation
from cudalens.guards._base import guard
from cudalens.guards._dims import NARROWED
from cudalens.guards._ranges import extremes, lies_within, out_of_range
from cudalens.guards.losses import PER_CLASS, classes_of


@guard(
    "aten::multi_margin_loss",
    records=("multi_margin_loss",),
    frequency="rare",
)
def multi_margin_loss_target_in_range(self: Tensor, target: Tensor) -> Violation | None:
    """Every target is a class, in [0, classes - 1]; no value is ignored.

    The kernel compares 32 bits of it: a target such as 2**32 passes there as class 0, and is
    refused here as on the CPU.

    Source:   MultiMarginLoss.cu:34, torch 2.13.0
    Cost:     one reduction over the targets, one copy of two numbers
    Passes:   aten.multi_margin_loss(zeros(2, 3), tensor([0, 2]))
    Violates: aten.multi_margin_loss(zeros(2, 3), tensor([0, 3]))
    """
    classes = _multi_margin_classes(self, target)
    if classes is None or lies_within(target, 0, classes - 1):
        return None
    compared = target.to(torch.int32)
    is_narrowed = bool(((compared >= 0) & (compared < classes)).all())
    return _unknown_class(
        target,
        classes,
        device_text=None if is_narrowed else assert_text("multi_margin_loss"),
        why=NARROWED if is_narrowed else PER_CLASS,
        is_silent=False,
    )


@guard("aten::multi_margin_loss_backward", frequency="rare", is_silent=True)
def multi_margin_loss_backward_target_in_range(self: Tensor, target: Tensor) -> Violation | None:
    """Every target still is a class, in [0, classes - 1]: this kernel does not look.

    Source:   MultiMarginLoss.cu, MultiMarginLoss_backward_kernel, torch 2.13.0: no assertion
    Cost:     one reduction over the targets, one copy of two numbers
    Passes:   aten.multi_margin_loss_backward(ones(()), zeros(2, 3), tensor([0, 2]), 1, 1)
    Violates: aten.multi_margin_loss_backward(ones(()), zeros(2, 3), tensor([0, 3]), 1, 1)
    """
    classes = _multi_margin_classes(self, target)
    if classes is None or lies_within(target, 0, classes - 1):
        return None
    return _unknown_class(
        target,
        classes,
        device_text=None,
        is_silent=True,
    )


def _multi_margin_classes(scores: Tensor, target: Tensor) -> int | None:
    """Return the number of classes of a call that torch takes."""
    if target.dtype != torch.int64 or target.device != scores.device:
        return None
    if scores.dim() > 2 or target.dim() > 1:
        return None
    samples = scores.size(0) if scores.dim() == 2 else 1
    classes = scores.size(-1) if scores.dim() else 1
    return classes if classes and target.numel() == samples else None


def _unknown_class(
    target: Tensor,
    classes: int,
    *,
    device_text: str | None,
    is_silent: bool,
    why: str = PER_CLASS,
) -> Violation:
    return out_of_range(
        target,
        argument="target",
        low=0,
        high=classes - 1,
        place=classes_of(classes),
        why=why,
        device_text=device_text,
        related="self",
        size=classes,
        is_silent=is_silent,
    )


@guard(
    "aten::multilabel_margin_loss_forward",
    "aten::multilabel_margin_loss_backward",
    frequency="rare",
    is_silent=True,
)
def multilabel_margin_loss_target_in_range(self: Tensor, target: Tensor) -> Violation | None:
    """Every target before the first negative one of its row is a class, in [0, classes - 1].

    Source:   MultiLabelMarginCriterion.cu, torch 2.13.0: no assertion, the CPU raises
    Cost:     one reduction over the targets, one copy of two numbers
    Passes:   aten.multilabel_margin_loss_forward(zeros(3), tensor([2, -1, 0]), 1)
    Violates: aten.multilabel_margin_loss_forward(zeros(3), tensor([3, -1, 0]), 1)
    """
    if target.dtype != torch.int64 or target.device != self.device or self.dim() > 2:
        return None
    if target.shape != self.shape or target.numel() == 0:
        return None
    classes = self.size(-1) if self.dim() else 1
    if extremes(target)[1] < classes:
        return None
    # The kernel stops at the first negative target of a row, whatever stands behind it.
    rows = target if target.dim() else target.reshape(1)
    is_read = ((rows < 0).cumsum(-1) == 0).reshape(target.shape)
    bad = (target >= classes) & is_read
    if not bool(bad.any()):
        return None
    return out_of_range(
        target,
        argument="target",
        low=0,
        high=classes - 1,
        place=classes_of(classes),
        why="Each target picks one of the scores; CUDA reads and writes beyond them unchecked.",
        device_text=None,
        also=((-1, "end of the row"),),
        bad=bad,
        related="self",
        size=classes,
        is_silent=True,
    )
