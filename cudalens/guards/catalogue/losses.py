"""Guards of the losses: negative log likelihood, so cross entropy, margins, CTC and binary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cudalens.guards._base import guard
from cudalens.guards._ranges import FLOATS
from cudalens.guards.engine import UNIT_INTERVAL, Between, Need, Within

_NO_REDUCTION = 0
_MAX_UINT8 = 255
_CLASS_DTYPES = (torch.int64, torch.uint8)


@guard(
    "aten::nll_loss_forward",
    "aten::nll_loss2d_forward",
    records=("nll_loss_forward_reduced", "nll_loss_forward_none", "nll_loss2d_forward"),
    frequency="very common",
)
def nll_loss_target_in_range(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Need:
    """Every target, also that of a pixel, is in [0, classes - 1] or equal to ignore_index.

    Source:   Loss.cu:179, :200 and :244 (none; 1-D; 2-D input), NLLLoss2d.cu:75 (none) and :108
              (4-D input), torch 2.13.0
    Cost:     one reduction over the targets, one copy of two numbers
    Passes:   aten.nll_loss_forward(zeros(3, 3), tensor([0, 2, -100]), None, 1, -100)
    Violates: aten.nll_loss_forward(zeros(3, 3), tensor([0, 3, -100]), None, 1, -100)
    """
    if not _is_nll_loss(self, target, weight):
        return None
    return _class(target, self, ignore_index, _nll_key("forward", self, target, reduction))


@guard(
    "aten::nll_loss_backward",
    "aten::nll_loss2d_backward",
    records=(
        *("nll_loss_backward_reduced", "nll_loss_backward_none"),
        *("nll_loss2d_backward_reduced", "nll_loss2d_backward_none"),
    ),
)
def nll_loss_backward_target_in_range(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Need:
    """Every target, also that of a pixel, still is in [0, classes - 1] or equal to ignore_index.

    Source:   Loss.cu:428, :447 and :476 (none; 1-D; 2-D input), NLLLoss2d.cu:162 (none) and :199
              (4-D input), torch 2.13.0
    Cost:     one reduction over the targets, one copy of two numbers
    Passes:   aten.nll_loss_backward(ones(()), zeros(1, 3), tensor([2]), None, 1, -100, ones(()))
    Violates: aten.nll_loss_backward(ones(()), zeros(1, 3), tensor([3]), None, 1, -100, ones(()))
    """
    if not _is_nll_loss(self, target, weight):
        return None
    if self.dim() == 1 and target.dim() and target.shape != self.shape:  # refused here alone
        return None
    need = _class(target, self, ignore_index, _nll_key("backward", self, target, reduction))
    need.is_replay_safe = reduction != _NO_REDUCTION
    return need


def _is_nll_loss(scores: Tensor, target: Tensor, weight: Tensor | None) -> bool:
    """Return whether torch takes this call; one that it refuses reaches no kernel."""
    if target.device != scores.device or target.dtype not in _CLASS_DTYPES:
        return False
    rank = scores.dim()
    if rank == 4:
        is_taken = target.dtype == torch.int64
        is_taken &= target.shape == (scores.size(0), *scores.shape[2:])
    elif rank == 2:
        is_taken = target.shape == scores.shape[:1]
    else:
        is_taken = rank == 1 and target.dim() <= 1 and target.numel() == 1
    if not is_taken or weight is None:
        return is_taken
    classes = scores.size(min(rank - 1, 1))
    return weight.dim() == 1 and weight.numel() == classes and weight.dtype == scores.dtype


def _nll_key(direction: str, scores: Tensor, target: Tensor, reduction: int) -> str:
    """Return the assertion of the kernel that runs."""
    is_none = reduction == _NO_REDUCTION
    if scores.dim() == 4:
        return f"nll_loss2d_{direction}{'_none' if is_none else ''}"
    batch = "none" if is_none else "2d"
    key = f"nll_loss_{direction}_{'1d' if scores.dim() == 1 else batch}"
    # Compiled for uint8 the kernels test the upper bound alone.
    return f"{key}_uint8" if target.dtype == torch.uint8 else key


PER_CLASS = "Each target must be one of the class numbers."


def _class(target: Tensor, scores: Tensor, ignored: int, key: str) -> Within:
    dim = min(scores.dim() - 1, 1)
    last = scores.size(dim) - 1
    need = Within("target", 0, last, of="self", dim=dim, unit="class", why=PER_CLASS, asserts=key)
    # No uint8 target is equal to -100, not even 156.
    if target.dtype == torch.int64 or 0 <= ignored <= _MAX_UINT8:
        need.also_allowed, need.also_allowed_name, need.masks_first = ignored, "ignore_index", True
    return need


# --- margin losses, where the CUDA kernels check less than those of the CPU -----------------------


@guard("aten::multi_margin_loss", records=("multi_margin_loss",))
def multi_margin_loss_target_in_range(self: Tensor, target: Tensor) -> Need:
    """Every target is a class, in [0, classes - 1]; no value is ignored.

    The kernel compares 32 bits of it: a target such as 2**32 passes there as class 0, and is
    refused here as on the CPU.

    Source:   MultiMarginLoss.cu:34, torch 2.13.0
    Cost:     one reduction over the targets, one copy of two numbers
    Passes:   aten.multi_margin_loss(zeros(2, 3), tensor([0, 2]))
    Violates: aten.multi_margin_loss(zeros(2, 3), tensor([0, 3]))
    """
    return _margin_class(self, target, asserts="multi_margin_loss")


@guard("aten::multi_margin_loss_backward", is_silent=True)
def multi_margin_loss_backward_target_in_range(self: Tensor, target: Tensor) -> Need:
    """Every target still is a class, in [0, classes - 1]: this kernel does not look.

    Source:   MultiMarginLoss.cu, MultiMarginLoss_backward_kernel, torch 2.13.0: no assertion
    Cost:     one reduction over the targets, one copy of two numbers
    Passes:   aten.multi_margin_loss_backward(ones(()), zeros(2, 3), tensor([0, 2]), 1, 1)
    Violates: aten.multi_margin_loss_backward(ones(()), zeros(2, 3), tensor([0, 3]), 1, 1)
    """
    return _margin_class(self, target)


def _margin_class(scores: Tensor, target: Tensor, *, asserts: str | None = None) -> Need:
    if target.dtype != torch.int64 or target.device != scores.device:
        return None
    if scores.dim() > 2 or target.dim() > 1:
        return None
    samples = scores.size(0) if scores.dim() == 2 else 1
    classes = scores.size(-1) if scores.dim() else 1
    if not classes or target.numel() != samples:
        return None
    need = Within("target", 0, classes - 1, of="self", unit="class", why=PER_CLASS)
    need.asserts, need.narrows = asserts, asserts is not None
    return need


@guard(
    "aten::multilabel_margin_loss_forward",
    "aten::multilabel_margin_loss_backward",
    is_silent=True,
    waits=True,
)
def multilabel_margin_loss_target_in_range(self: Tensor, target: Tensor) -> Need:
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

    def is_read() -> Tensor:
        # The kernel stops at the first negative target of a row, whatever follows.
        rows = target if target.dim() else target.reshape(1)
        return ((rows < 0).cumsum(-1) == 0).reshape(target.shape)

    why = "Each target is a class index. CUDA reads and writes past the scores unchecked."
    last = (self.size(-1) if self.dim() else 1) - 1
    need = Within(
        "target", 0, last, of="self", unit="class", why=why, upper_bound_only=True, mask=is_read
    )
    need.also_allowed, need.also_allowed_name = -1, "end of the row"
    return need


# --- CTC ------------------------------------------------------------------------------------------


_Lengths = Tensor | Sequence[int]


@guard(
    "aten::_ctc_loss",
    "aten::_cudnn_ctc_loss",
    "aten::_ctc_loss_backward",
    is_silent=True,
    waits=True,
)
def ctc_loss_labels_in_alphabet(
    log_probs: Tensor, targets: Tensor, input_lengths: _Lengths, target_lengths: _Lengths
) -> Need:
    """Every label within its target length is in the alphabet: it is in [0, classes - 1].

    Source:   LossCTC.cu, ctc_loss_log_alpha_gpu_kernel, torch 2.13.0: no assertion, none on the CPU
    Cost:     one reduction over the labels, one copy of two numbers
    Passes:   aten._ctc_loss(zeros(3, 1, 4), tensor([[3, 9]]), [3], [1])
    Violates: aten._ctc_loss(zeros(3, 1, 4), tensor([[4, 9]]), [3], [1])
    """
    classes = log_probs.size(-1) if log_probs.dim() == 3 else 0
    if classes == 0 or targets.dtype not in (torch.int64, torch.int32) or targets.numel() == 0:
        return None
    why = "Each label is an index into one step of log_probs. The kernels read past its end."
    need = Within("targets", 0, classes - 1, of="log_probs", dim=2, unit="class", why=why)
    need.place = f"the alphabet of {classes} in {{related}}"
    need.mask = lambda: _labels_read(targets, log_probs.size(1), input_lengths, target_lengths)
    need.masks_first, need.is_replay_safe = True, False
    return need


def _labels_read(
    targets: Tensor, samples: int, input_lengths: _Lengths, target_lengths: _Lengths
) -> Tensor | None:
    """Return bool[shape of targets], true where a kernel reads; padding and empty inputs are not.

    ``None`` where torch refuses the lengths on the host, or where they do not fit.
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
    # Concatenated targets: every label belongs to the sample whose part it is in.
    ends = lengths.cumsum(0)
    owner = torch.searchsorted(ends, torch.arange(targets.numel(), device=device), right=True)
    is_inside = owner < samples
    return is_inside & (steps > 0)[owner.clamp_(max=samples - 1)]


# --- binary cross entropy: the input and the target are probabilities -----------------------------


_LOGARITHMS = "The loss takes the logarithms of the input and of one minus it."
_SHARES = "A target of this loss is a probability: 0 and 1 for the two classes."
# They are the same in every call.
_INPUT = Between("self", 0, 1, bounds=UNIT_INTERVAL, why=_LOGARITHMS, asserts="bce_input")
_TARGET = Between("target", 0, 1, bounds=UNIT_INTERVAL, why=_SHARES, asserts="bce_target")


@guard("aten::binary_cross_entropy", records=("bce_input",), frequency="very common")
def binary_cross_entropy_input_in_unit_interval(self: Tensor, target: Tensor) -> Need:
    """Every element of the input is in [0, 1]; NaN does not.

    Source:   Loss.cu:89, torch 2.13.0
    Cost:     one reduction over the input, one copy of two numbers
    Passes:   aten.binary_cross_entropy(tensor([0.0, 1.0]), tensor([0.0, 1.0]))
    Violates: aten.binary_cross_entropy(tensor([0.0, 1.5]), tensor([0.0, 1.0]))
    """
    return _INPUT if _is_binary_cross_entropy(self, target) else None


@guard("aten::binary_cross_entropy", records=("bce_target",), frequency="common")
def binary_cross_entropy_target_in_unit_interval(self: Tensor, target: Tensor) -> Need:
    """Every element of the target is in [0, 1]; NaN does not.

    Source:   Loss.cu:90, torch 2.13.0
    Cost:     one reduction over the target, one copy of two numbers
    Passes:   aten.binary_cross_entropy(tensor([0.5, 0.5]), tensor([0.0, 1.0]))
    Violates: aten.binary_cross_entropy(tensor([0.5, 0.5]), tensor([-0.5, 1.0]))
    """
    return _TARGET if _is_binary_cross_entropy(self, target) else None


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
