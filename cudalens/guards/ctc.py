"""Guards of the connectionist temporal classification loss: no kernel looks at its labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cudalens.core.report_types import Violation
from cudalens.guards._base import guard
from cudalens.guards._ranges import lies_within, out_of_range

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
