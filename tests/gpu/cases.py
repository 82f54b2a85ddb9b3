"""The code that makes each reachable assertion of the inventory fire, one short text a record.

The texts are run with the device under test as torch's default device: CUDA, the rehearsal device,
or the CPU with guards that act there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = ["CASES", "NOT_TRIGGERED", "Case", "is_too_old", "namespace"]


@dataclass(frozen=True)
class Case:
    """One record of the inventory and a call that breaks its condition."""

    record: str
    code: str
    may_print: tuple[str, ...] = ()
    """Other records whose kernel the same call may take, by the GPU's generation."""
    capability: tuple[int, int] = (0, 0)
    """The oldest compute capability that has the kernel."""
    asserts_since: tuple[int, int] = (0, 0)
    """The oldest torch release whose kernel is known to assert; older ones run on with garbage."""
    reaches_guard_on_cpu: bool = True
    """False where only CUDA calls the guarded op: the CPU kernel checks nothing, never run it."""


def namespace() -> dict[str, Any]:
    import torch

    return {
        "torch": torch,
        "F": torch.nn.functional,
        "aten": torch.ops.aten,
        "tensor": torch.tensor,
        "zeros": torch.zeros,
        "ones": torch.ones,
        "nan": math.nan,
    }


def is_too_old(case: Case, torch_version: str) -> bool:
    major, minor = torch_version.split(".")[:2]
    return (int(major), int(minor)) < case.asserts_since


_MANY = "tensor([0] * 16 + [5])"

CASES: tuple[Case, ...] = (
    Case("index_get", "zeros(4, 3)[:, tensor([0, 3])]"),
    Case("index_put", "x = zeros(3)\nx[tensor([0, 3])] = ones(2)"),
    Case("index_put_sort", "zeros(3).index_put_((tensor([0, 3]),), ones(2), accumulate=True)"),
    Case("index_fill", "zeros(3, 4).index_fill_(1, tensor([0, 4]), 1.0)"),
    Case("index_copy", "zeros(3, 2).index_copy_(0, tensor([0, 3]), ones(2, 2))"),
    Case("take", "torch.take(zeros(2, 3), tensor([0, 6]))"),
    Case("put", "zeros(2, 3).put_(tensor([0, 6]), ones(2))"),
    Case("masked_scatter", "zeros(3).masked_scatter_(tensor([True, True, True]), ones(2))"),
    Case("gather_rows_fast", f"F.embedding({_MANY}, zeros(5, 4))", may_print=("gather_scatter",)),
    Case(
        "scatter_add_rows_fast",
        "zeros(5, 4).scatter_add_(0, tensor([[0], [5]]).expand(2, 4), ones(2, 4))",
        may_print=("gather_scatter", "scatter_add_tma"),
    ),
    Case(
        "scatter_add_tma",
        "zeros(5, 256).scatter_add_(0, tensor([[0], [5]]).expand(2, 256), ones(2, 256))",
        may_print=("scatter_add_rows_fast", "gather_scatter"),
        capability=(9, 0),
    ),
    Case("index_add_small", "zeros(5, 3).index_add_(0, tensor([0, 5]), ones(2, 3))"),
    Case("index_add_large", f"zeros(5, 3).index_add_(0, {_MANY}, ones(17, 3))"),
    Case(
        "add_dense_sparse",
        "zeros(3) + torch.sparse_coo_tensor(tensor([[0, 3]]), ones(2), (3,), "
        "check_invariants=False)",
        may_print=("index_add_small", "index_add_large"),
        reaches_guard_on_cpu=False,
    ),
    Case("index_select_small", "zeros(5, 3).index_select(0, tensor([0, 5]))"),
    Case(
        "index_select_sparse",
        "torch.sparse_coo_tensor(tensor([[0, 1]]), ones(2), (3,), check_invariants=False)"
        ".index_select(0, tensor([0, 3]))",
    ),
    Case("gather_scatter", "zeros(2, 3).gather(1, tensor([[0, 3], [0, 0]]))"),
    Case("scatter_value", "zeros(2, 3).scatter_(1, tensor([[0, 3]]), 1.0)"),
    Case(
        "embedding_renorm",
        "aten.embedding_renorm_(ones(3, 2), tensor([0, 3]), 1.0, 2.0)",
        asserts_since=(2, 13),
    ),
    Case("embedding_bag_index", "F.embedding_bag(tensor([0, 3]), zeros(3, 2), tensor([0, 1]))"),
    Case(
        "embedding_bag_offsets", "F.embedding_bag(tensor([0, 2]), zeros(3, 2), tensor([0, 2, 1]))"
    ),
    Case("nll_loss_forward_reduced", "F.cross_entropy(zeros(3, 4), tensor([0, 4, 1]))"),
    Case(
        "nll_loss_forward_none", 'F.cross_entropy(zeros(3, 4), tensor([0, 4, 1]), reduction="none")'
    ),
    Case(
        "nll_loss_backward_reduced",
        "aten.nll_loss_backward(ones(()), zeros(2, 3), tensor([0, 3]), None, 1, -100, ones(()))",
    ),
    Case(
        "nll_loss_backward_none",
        "aten.nll_loss_backward(ones(2), zeros(2, 3), tensor([0, 3]), None, 0, -100, ones(()))",
    ),
    Case("nll_loss2d_forward", "F.cross_entropy(zeros(1, 3, 1, 2), tensor([[[3, 0]]]))"),
    Case(
        "nll_loss2d_backward_reduced",
        "aten.nll_loss2d_backward(ones(()), zeros(1, 3, 1, 1), tensor([[[3]]]), None, 1, "
        "-100, ones(()))",
    ),
    Case(
        "nll_loss2d_backward_none",
        "aten.nll_loss2d_backward(ones(1, 1, 1), zeros(1, 3, 1, 1), tensor([[[3]]]), None, "
        "0, -100, ones(()))",
    ),
    Case("bce_input", "F.binary_cross_entropy(tensor([0.0, 1.5]), tensor([0.0, 1.0]))"),
    Case("bce_target", "F.binary_cross_entropy(tensor([0.5, 0.5]), tensor([0.0, 1.5]))"),
    Case("multi_margin_loss", "F.multi_margin_loss(zeros(2, 3), tensor([0, 3]))"),
    Case("multinomial_renorm", "torch.multinomial(tensor([[-0.5, 1.0]]), 2, replacement=True)"),
    Case("multinomial_sum", "torch.multinomial(tensor([[0.0, 0.0]]), 2, replacement=True)"),
    Case("multinomial_fast", "torch.multinomial(tensor([nan, 1.0]), 1)"),
    Case("bernoulli_tensor", "torch.bernoulli(tensor([0.0, 1.5]))"),
    Case("poisson", "torch.poisson(tensor([1.0, -1.0]))"),
    Case("repeat_interleave_size", "zeros(3).repeat_interleave(tensor([2, 0, 1]), output_size=4)"),
    Case(
        "repeat_interleave_negative",
        "zeros(3).repeat_interleave(tensor([2, -1, 2]), output_size=3)",
    ),
    Case("max_unpool2d", "aten.max_unpool2d(ones(1, 1, 2), tensor([[[0, 4]]]), [2, 2])"),
    Case(
        "max_unpool3d",
        "aten.max_unpool3d(ones(1, 1, 1, 1), tensor([[[[8]]]]), [2, 2, 2], [2, 2, 2], [0, 0, 0])",
    ),
    Case("assert_async", 'torch._assert_async(tensor(0), "lengths must match")'),
    Case(
        "segment_reduce_nd", 'aten.segment_reduce(zeros(3, 2), "sum", offsets=tensor([0, 2, 1, 3]))'
    ),
    Case(
        "segment_reduce_1d_mean",
        'aten.segment_reduce(zeros(3), "mean", offsets=tensor([0, 2, 1, 3]))',
    ),
    Case(
        "sparse_compressed_invariants",
        "aten._validate_compressed_sparse_indices(True, tensor([0, 2, 3]), "
        "tensor([0, 4, 1]), 2, 4, 3)",
    ),
    Case(
        "grouped_mm_offsets",
        "aten._grouped_mm(zeros(32, 16).bfloat16(), zeros(2, 16, 16).bfloat16().mT, "
        "tensor([16, 48], dtype=torch.int32))",
        capability=(9, 0),
    ),
    Case(
        "grouped_mm_alignment",
        "aten._grouped_mm(zeros(16, 32).bfloat16(), zeros(32, 16).bfloat16(), "
        "tensor([9, 32], dtype=torch.int32))",
        capability=(9, 0),
    ),
    Case(
        "nested_index_put",
        "torch._assert_async(tensor(False), "
        '"Some indices in the ragged dimension are out of bounds!")',
        may_print=("assert_async",),
    ),
)

NOT_TRIGGERED: Mapping[str, str] = MappingProxyType(
    {
        "scatter_add_cutedsl": "belongs to an optional package of compiled kernels",
        "fractional_max_pool2d_backward": "the forward pass makes the positions; no guard looks",
        "fractional_max_pool3d_backward": "the forward pass makes the positions; no guard looks",
        "ctc_loss_capture": "asserts only while a CUDA graph is captured; no guard acts there",
        "scaled_grouped_mm_mx": "needs compute capability 10.0",
        "nccl_nan_check": "launched by NCCL process groups, not by an op",
        "nvshmem_splits": "needs NVSHMEM and several GPUs",
        "inductor_indirect": "needs Triton and a C compiler; among the faults where they are",
    }
)
"""Records without a trigger, each with the reason."""
