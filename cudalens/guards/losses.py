"""Guards of the losses: negative log likelihood, so cross entropy, margins, CTC and binary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Bounds, Violation
from cudalens.guards._base import guard
from cudalens.guards._dims import NARROWED
from cudalens.guards._ranges import (
    FLOATS,
    bad_numbers,
    extremes,
    few,
    lies_between,
    lies_within,
    out_of_range,
    outside_mask,
)

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


PER_CLASS = "Each target is the number of a class, and there is no class with this number."


def classes_of(number: int) -> str:
    """Return ``the 10 classes of {related}``, to stand behind "is outside"."""
    return f"the {number} {'class' if number == 1 else 'classes'} of {{related}}"


# --- margin losses, where the CUDA kernels check less than those of the CPU -----------------------


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
    return _no_such_class(
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
    return _no_such_class(
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


def _no_such_class(
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


# --- CTC ------------------------------------------------------------------------------------------


_Lengths = Tensor | Sequence[int]


@guard(
    "aten::_ctc_loss",
    "aten::_cudnn_ctc_loss",
    "aten::_ctc_loss_backward",
    frequency="rare",
    is_silent=True,
)
def ctc_loss_labels_in_alphabet(
    log_probs: Tensor, targets: Tensor, input_lengths: _Lengths, target_lengths: _Lengths
) -> Violation | None:
    """Every label within its target length is in the alphabet: it lies in [0, classes - 1].

    Source:   LossCTC.cu, ctc_loss_log_alpha_gpu_kernel, torch 2.13.0: no assertion, none on the CPU
    Cost:     one reduction over the labels, one copy of two numbers
    Passes:   aten._ctc_loss(zeros(3, 1, 4), tensor([[3, 9]]), [3], [1])
    Violates: aten._ctc_loss(zeros(3, 1, 4), tensor([[4, 9]]), [3], [1])
    """
    classes = log_probs.size(-1) if log_probs.dim() == 3 else 0
    if classes == 0 or targets.dtype not in (torch.int64, torch.int32) or targets.numel() == 0:
        return None
    is_read = _labels_read(targets, log_probs.size(1), input_lengths, target_lengths)
    if is_read is None or lies_within(targets.masked_fill(~is_read, 0), 0, classes - 1):
        return None
    return out_of_range(
        targets,
        argument="targets",
        low=0,
        high=classes - 1,
        place=f"the alphabet of {classes} in {{related}}",
        why="Each label picks one of the probabilities of a step; the kernels read beyond them.",
        device_text=None,
        bad=((targets < 0) | (targets >= classes)) & is_read,
        related="log_probs",
        size=classes,
        dim=2,
        is_silent=True,
        is_replay_safe=False,
    )


def _labels_read(
    targets: Tensor, samples: int, input_lengths: _Lengths, target_lengths: _Lengths
) -> Tensor | None:
    """Return bool[shape of targets], true where a kernel reads; padding and empty inputs are not.

    ``None`` where torch refuses the lengths on the host, or where they do not tell.
    """
    device = targets.device
    steps = torch.as_tensor(input_lengths, device=device).reshape(-1)
    lengths = torch.as_tensor(target_lengths, device=device).reshape(-1)
    if not samples or steps.numel() != samples or lengths.numel() != samples:
        return None
    lengths = torch.where(steps > 0, lengths, 0) if targets.dim() == 2 else lengths
    if targets.dim() == 2 and targets.size(0) == samples:
        return torch.arange(targets.size(1), device=device) < lengths.unsqueeze(1)
    if targets.dim() != 1:
        return None
    # Concatenated targets: every label belongs to the sample whose part it lies in.
    ends = lengths.cumsum(0)
    owner = torch.searchsorted(ends, torch.arange(targets.numel(), device=device), right=True)
    is_inside = owner < samples
    return is_inside & (steps > 0)[owner.clamp_(max=samples - 1)]


# --- binary cross entropy: the input and the target are probabilities -----------------------------


_UNIT = Bounds(min=0.0, max=1.0, text="0 … 1")
_LOGARITHMS = "The loss takes the logarithms of the input and of one minus it."
_SHARES = "The target says which share of the loss each of the two classes has."


@guard("aten::binary_cross_entropy", records=("bce_input",), frequency="very common")
def binary_cross_entropy_input_in_unit_interval(self: Tensor, target: Tensor) -> Violation | None:
    """Every element of the input lies in [0, 1]; NaN does not.

    Source:   Loss.cu:89, torch 2.13.0
    Cost:     one reduction over the input, one copy of two numbers
    Passes:   aten.binary_cross_entropy(tensor([0.0, 1.0]), tensor([0.0, 1.0]))
    Violates: aten.binary_cross_entropy(tensor([0.0, 1.5]), tensor([0.0, 1.0]))
    """
    if not _is_binary_cross_entropy(self, target) or lies_between(self, 0, 1):
        return None
    return bad_numbers(
        self,
        outside_mask(self, 0, 1),
        argument="self",
        bounds=_UNIT,
        why=_LOGARITHMS,
        device_text=assert_text("bce_input"),
    )


@guard("aten::binary_cross_entropy", records=("bce_target",), frequency="common")
def binary_cross_entropy_target_in_unit_interval(self: Tensor, target: Tensor) -> Violation | None:
    """Every element of the target lies in [0, 1]; NaN does not.

    Source:   Loss.cu:90, torch 2.13.0
    Cost:     one reduction over the target, one copy of two numbers
    Passes:   aten.binary_cross_entropy(tensor([0.5, 0.5]), tensor([0.0, 1.0]))
    Violates: aten.binary_cross_entropy(tensor([0.5, 0.5]), tensor([-0.5, 1.0]))
    """
    if not _is_binary_cross_entropy(self, target) or lies_between(target, 0, 1):
        return None
    return bad_numbers(
        target,
        outside_mask(target, 0, 1),
        argument="target",
        bounds=_UNIT,
        why=_SHARES,
        device_text=assert_text("bce_target"),
    )


def _is_binary_cross_entropy(values: Tensor, target: Tensor) -> bool:
    """Return whether torch takes this call: equal dtypes, shapes that fit once squeezed."""
    if values.dtype != target.dtype or values.dtype not in FLOATS:
        return False
    if values.device != target.device or 0 in (values.numel(), target.numel()):
        return False
    pairs = zip(_squeezed(values.shape), _squeezed(target.shape), strict=False)
    return all(left == right for left, right in pairs)


def _squeezed(shape: Sequence[int]) -> list[int]:
    return [size for size in reversed(shape) if size != 1]
