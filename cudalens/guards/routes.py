"""Keep torch on the road that it takes when nobody is watching.

Under any dispatch mode ``ctc_loss`` takes its lengths as tensors, and then refuses those on the
host, which is where the manual wants them.  Without a mode torch reads them into lists; while a
checked block is open, so do we.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudalens.core import _torch


def _ctc_loss(
    keyset: Any,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *rest: Any,
    **options: Any,
) -> Any:
    return torch.ops.aten.ctc_loss.IntList(
        log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), *rest, **options
    )


def install() -> list[Any]:
    """Register the routes; give the libraries to destroy."""
    return _torch.register_kernels({"aten::ctc_loss.Tensor": _ctc_loss}, "AutogradCUDA")
