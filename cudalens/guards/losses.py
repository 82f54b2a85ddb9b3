"""Guards of the classification losses: negative log likelihood, so cross entropy, and margins."""

from __future__ import annotations

import torch
from torch import Tensor

from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Violation
from cudalens.guards._base import guard
from cudalens.guards._ranges import extremes, few, lies_within, out_of_range

_NO_REDUCTION = 0


@guard(
    "aten::nll_loss_forward",
    records=("nll_loss_forward_reduced", "nll_loss_forward_none"),
    frequency="very common",
)
def nll_loss_target_in_range(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Violation | None:
    """Every target is a class, in [0, classes - 1], or equal to ignore_index.

    Source:   Loss.cu:179, :200 and :244 (none; 1-D; 2-D input), torch 2.13.0
    Cost:     one reduction over the targets, one copy of two numbers
    Passes:   aten.nll_loss_forward(zeros(3, 3), tensor([0, 2, -100]), None, 1, -100)
    Violates: aten.nll_loss_forward(zeros(3, 3), tensor([0, 3, -100]), None, 1, -100)
    """
    if not _is_nll_loss(self, target, weight) or _are_classes(target, self.size(-1), ignore_index):
        return None
    return _unknown_class(
        target,
        self,
        ignore_index,
        dim=self.dim() - 1,
        device_text=_nll_text(f"nll_loss_forward_{_kernel(self, reduction)}", target),
    )


@guard(
    "aten::nll_loss_backward",
    records=("nll_loss_backward_reduced", "nll_loss_backward_none"),
    frequency="rare",
)
def nll_loss_backward_target_in_range(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Violation | None:
    """Every target still is a class, in [0, classes - 1], or equal to ignore_index.

    Source:   Loss.cu:428, :447 and :476 (none; 1-D; 2-D input), torch 2.13.0
    Cost:     one reduction over the targets, one copy of two numbers
    Passes:   aten.nll_loss_backward(ones(()), zeros(1, 3), tensor([2]), None, 1, -100, ones(()))
    Violates: aten.nll_loss_backward(ones(()), zeros(1, 3), tensor([3]), None, 1, -100, ones(()))
    """
    if not _is_nll_loss(self, target, weight) or _are_classes(target, self.size(-1), ignore_index):
        return None
    if target.dim() and target.shape != self.shape[:1]:  # refused here, though not in forward
        return None
    return _unknown_class(
        target,
        self,
        ignore_index,
        dim=self.dim() - 1,
        device_text=_nll_text(f"nll_loss_backward_{_kernel(self, reduction)}", target),
        is_replay_safe=reduction != _NO_REDUCTION,
    )


@guard("aten::nll_loss2d_forward", records=("nll_loss2d_forward",), frequency="very common")
def nll_loss2d_target_in_range(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Violation | None:
    """Every pixel's target is a class, in [0, classes - 1], or equal to ignore_index.

    Source:   NLLLoss2d.cu:75 (none) and :108, torch 2.13.0
    Cost:     one reduction over the targets, one copy of two numbers
    Passes:   aten.nll_loss2d_forward(zeros(1, 3, 1, 2), tensor([[[2, -100]]]), None, 1, -100)
    Violates: aten.nll_loss2d_forward(zeros(1, 3, 1, 2), tensor([[[3, -100]]]), None, 1, -100)
    """
    if not _is_nll_loss2d(self, target, weight) or _are_classes(target, self.size(1), ignore_index):
        return None
    return _unknown_class(
        target,
        self,
        ignore_index,
        dim=1,
        device_text=assert_text(
            f"nll_loss2d_forward{'_none' if reduction == _NO_REDUCTION else ''}"
        ),
    )


@guard(
    "aten::nll_loss2d_backward",
    records=("nll_loss2d_backward_reduced", "nll_loss2d_backward_none"),
    frequency="rare",
)
def nll_loss2d_backward_target_in_range(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Violation | None:
    """Every pixel's target still is a class, in [0, classes - 1], or equal to ignore_index.

    Source:   NLLLoss2d.cu:162 (none) and :199, torch 2.13.0
    Cost:     one reduction over the targets, one copy of two numbers
    Passes:   aten.nll_loss2d_backward(ones(()), zeros(1, 3, 1, 1), tensor([[[2]]]), None, 1, 9,
              ones(()))
    Violates: aten.nll_loss2d_backward(ones(()), zeros(1, 3, 1, 1), tensor([[[3]]]), None, 1, 9,
              ones(()))
    """
    if not _is_nll_loss2d(self, target, weight) or _are_classes(target, self.size(1), ignore_index):
        return None
    return _unknown_class(
        target,
        self,
        ignore_index,
        dim=1,
        device_text=assert_text(
            f"nll_loss2d_backward{'_none' if reduction == _NO_REDUCTION else ''}"
        ),
        is_replay_safe=reduction != _NO_REDUCTION,
    )


def _is_nll_loss(scores: Tensor, target: Tensor, weight: Tensor | None) -> bool:
    """Return whether torch takes this call; what it refuses on the host never meets the kernel."""
    if target.dtype not in (torch.int64, torch.uint8) or target.device != scores.device:
        return False
    is_single = scores.dim() == 1 and target.dim() <= 1 and target.numel() == 1
    is_batch = scores.dim() == 2 and target.shape == scores.shape[:1]
    return (is_single or is_batch) and _is_weight(weight, scores, scores.size(-1))


def _is_nll_loss2d(scores: Tensor, target: Tensor, weight: Tensor | None) -> bool:
    if target.dtype != torch.int64 or target.device != scores.device or scores.dim() != 4:
        return False
    fits = target.shape == (scores.size(0), *scores.shape[2:])
    return fits and _is_weight(weight, scores, scores.size(1))


def _is_weight(weight: Tensor | None, scores: Tensor, classes: int) -> bool:
    if weight is None:
        return True
    return weight.dim() == 1 and weight.numel() == classes and weight.dtype == scores.dtype


def _unknown_class(
    target: Tensor,
    scores: Tensor,
    ignored: int,
    *,
    dim: int,
    device_text: str,
    is_replay_safe: bool = True,
) -> Violation:
    classes = scores.size(dim)
    # uint8 targets are compared as int64: -100 must not become 156.
    wide = target.to(torch.int64)
    return out_of_range(
        target,
        argument="target",
        low=0,
        high=classes - 1,
        place=classes_of(classes),
        why=PER_CLASS,
        device_text=device_text,
        also=((ignored, "ignore_index"),) if _needs_mask(target, classes, ignored) else (),
        bad=((wide < 0) | (wide >= classes)) & (wide != ignored),
        related="self",
        size=classes,
        dim=dim,
        is_replay_safe=is_replay_safe,
    )


def _are_classes(target: Tensor, classes: int, ignored: int) -> bool:
    if target.numel() == 0:
        return True
    if (values := few(target)) is not None:
        values.discard(ignored)
        return not values or (min(values) >= 0 and max(values) < classes)
    if not _needs_mask(target, classes, ignored):
        return lies_within(target, 0, classes - 1)
    if classes == 0:
        low, high = extremes(target)
        return bool(low == high == ignored)
    # Ignored targets become class 0 first, so that one reduction answers for the others.
    return lies_within(target.masked_fill(target == ignored, 0), 0, classes - 1)


def _needs_mask(target: Tensor, classes: int, ignored: int) -> bool:
    """Return whether a target may equal ``ignore_index`` without being a class."""
    if 0 <= ignored < classes:
        return False
    if target.dtype == torch.int64:
        return True
    limits = torch.iinfo(target.dtype)
    return limits.min <= ignored <= limits.max


def _kernel(scores: Tensor, reduction: int) -> str:
    """Return which of the kernels for an input of one or two dimensions runs."""
    if scores.dim() == 1:
        return "1d"
    return "none" if reduction == _NO_REDUCTION else "2d"


def _nll_text(key: str, target: Tensor) -> str:
    # Compiled for uint8 the kernels test the upper bound alone.
    return assert_text(f"{key}_uint8" if target.dtype == torch.uint8 else key)


# --- the words that the guards of class targets share ---------------------------------------------


PER_CLASS = "Each target picks one of the scores, one a class, and no class has this number."


def classes_of(number: int) -> str:
    """Return ``the 10 classes of {related}``, to stand behind "is outside"."""
    return f"the {number} {'class' if number == 1 else 'classes'} of {{related}}"
