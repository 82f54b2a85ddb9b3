"""What has no guard, and why: the records of the inventory, and ops that are wrong in silence."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

UNGUARDABLE: Mapping[str, str] = MappingProxyType(
    {
        "ctc_loss_capture": "asserts only while a CUDA graph is captured, and no value can be "
        "read then; outside a capture torch reads the same lengths on the host",
        "nccl_nan_check": "NCCL process groups launch it themselves, no op is dispatched; off "
        "unless TORCH_NCCL_NAN_CHECK=1 asks for it",
        "nvshmem_splits": "one kernel runs on all GPUs of a group at once: a check that stopped "
        "one rank would leave the others waiting",
        "inductor_indirect": "part of generated Triton code, which dispatches no op: explained "
        "after the fact from the assert's own text, or run with eager mode forced",
    }
)
"""Records without a guard, each with the reason why nothing can be checked before the launch."""

LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        "aten::max_pool2d_with_indices_backward": "a window that covers only padding has an "
        "index outside the plane, and its gradient is rightly dropped",
        "aten::max_pool3d_with_indices_backward": "as aten::max_pool2d_with_indices_backward",
        "aten::add.Tensor": "dense plus sparse calls aten::index_add_, whose guard sees the "
        "indices; a guard here would slow every addition",
        "aten::addmm": "the library that multiplies sparse matrices trusts their indices, which "
        "torch leaves unchecked and says so (torch.sparse.check_sparse_tensor_invariants); a "
        "guard here would slow every product",
        "aten::_padded_dense_to_jagged_forward": "the kernel cuts rows that are too long and "
        "fills up short ones: no offset leads outside the memory",
        "aten::searchsorted.Tensor": "a sorter is checked on the host",
        "aten::bincount": "negative numbers are found on the host",
        "aten::histc": "an element outside the range is in no bin, as documented",
        "aten::binomial": "CUDA and the CPU draw the same: nothing for a probability below 0, "
        "all for one above 1",
        "aten::floor_divide": "integers divided by 0 give any number on CUDA, where the CPU "
        "raises; programs divide first and drop such elements afterwards",
        "aten::remainder.Tensor": "as aten::floor_divide",
        "aten::fmod.Tensor": "as aten::floor_divide",
        "aten::div.Tensor_mode": "as aten::floor_divide",
        "aten::binary_cross_entropy_backward": "arithmetic alone: the forward op has been checked, "
        "and no value leads outside the memory",
    }
)
"""Ops that read bad values in silence or pass them on, each with the reason for no guard."""
