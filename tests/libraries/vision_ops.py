"""torchvision's compiled ops for a torch that its wheel was not built for: in plain PyTorch.

The package index has torchvision for PyTorch's CUDA build alone; beside the CPU build it fails to
import, because its ops do not load.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from torch import Tensor

_kept: list[torch.library.Library] = []


def define_where_missing() -> None:
    """Define ``nms`` and ``roi_align`` if the installed torchvision cannot load its own."""
    is_built_for_it = "+cpu" in importlib.metadata.version("torchvision")
    if torch.version.cuda is not None or is_built_for_it or _kept:
        return
    library = torch.library.Library("torchvision", "DEF")
    _kept.append(library)
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, "
        "int pooled_width, int sampling_ratio, bool aligned) -> Tensor"
    )
    # No implicit composites: torchvision adds kernels for meta tensors of its own.
    for key in ("CompositeExplicitAutograd", "Autograd"):
        library.impl("nms", _nms, key)
        library.impl("roi_align", _roi_align, key)
    import torchvision

    torchvision.extension._has_ops = lambda: True  # which it asks before each call


def _nms(boxes: Tensor, scores: Tensor, limit: float) -> Tensor:
    from torchvision.ops import box_iou

    overlap = (box_iou(boxes, boxes) > limit).tolist()
    left = scores.argsort(descending=True).tolist()
    kept: list[int] = []
    for at in left:
        if not any(overlap[at][other] for other in kept):
            kept.append(at)
    return torch.tensor(kept, dtype=torch.int64, device=boxes.device)


def _roi_align(*args: Any) -> Tensor:
    from torchvision.ops.roi_align import _roi_align as in_python

    return in_python(*args)
