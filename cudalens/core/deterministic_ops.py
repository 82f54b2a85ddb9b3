"""Ops that torch refuses on the host under deterministic algorithms: CUDA has no such kernel.

The rehearsal device raises as CUDA does; the guards stay silent, as nothing would be launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

Arguments = Mapping[str, object]
_NO_REDUCTION: Final = 0
"""``at::Reduction::None``, as a loss's kernel is given it."""


def _multiplies_a_source(arguments: Arguments) -> bool:
    return "src" in arguments and arguments.get("reduce") == "multiply"


def _multiplies_onto_self(arguments: Arguments) -> bool:
    # Without self its places are filled first, by a kernel that is launched and asserts.
    return arguments.get("reduce") == "prod" and bool(arguments.get("include_self", True))


def _reduces(arguments: Arguments) -> bool:
    return arguments.get("reduction") != _NO_REDUCTION


_REFUSED: Final[Mapping[str, tuple[str, Callable[[Arguments], bool] | None]]] = {
    "adaptive_max_pool2d_backward": ("adaptive_max_pool2d_backward_cuda", None),
    "adaptive_max_pool3d_backward": ("adaptive_max_pool3d_backward_cuda", None),
    "_ctc_loss_backward": ("ctc_loss_backward_gpu", None),
    "fractional_max_pool2d_backward": ("fractional_max_pool2d_backward_cuda", None),
    "fractional_max_pool3d_backward": ("fractional_max_pool3d_backward_cuda", None),
    "index_reduce": ("index_reduce_cuda", None),
    "max_unpool2d": ("max_unpooling2d_forward_out", None),
    "max_unpool3d": ("max_unpooling3d_forward_out", None),
    "nll_loss2d_backward": ("nll_loss2d_backward_out_cuda_template", None),
    "nll_loss2d_forward": ("nll_loss2d_forward_out_cuda_template", _reduces),
    "put": ("put_", None),
    "scatter": ("scatter_reduce_cuda_kernel", _multiplies_a_source),
    "scatter_reduce": ("scatter_reduce_cuda_prod_", _multiplies_onto_self),
}
"""By op without its trailing underscore: the name in torch's message, and when if not always.

Source: the calls of ``alertNotDeterministic`` in ATen/native/cuda, torch 2.13.0
"""


def kernel_without_determinism(op: str, arguments: Arguments) -> str | None:
    """Name the kernel that deterministic algorithms forbid, as torch's message does.

    Args:
        op: as ``aten::put_`` or ``aten::scatter.reduce``.
        arguments: of the op, by schema name.

    Returns:
        ``None`` for an op that has a deterministic kernel on CUDA, or needs none.
    """
    namespace, _, name = op.partition("::")
    kernel, is_refused = _REFUSED.get(name.partition(".")[0].rstrip("_"), (None, None))
    if namespace != "aten" or (is_refused is not None and not is_refused(arguments)):
        return None
    return kernel
