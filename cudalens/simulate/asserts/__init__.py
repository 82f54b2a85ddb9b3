"""The assert table of the simulated device: which values make which op assert on CUDA.

Texts and line numbers are those of torch 2.13.0. The table is written from the kernels' assertions
alone and knows nothing of the guards, so that each can be tested with the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cudalens.simulate.asserts import indexing, values  # noqa: F401  they enter their rules
from cudalens.simulate.asserts.rule import RULES, AssertHit, Repair, Rule

__all__ = ["ASSERTS", "NOT_SIMULATED", "AssertHit", "Repair", "Rule"]

ASSERTS: Mapping[str, Rule] = MappingProxyType(RULES)
"""Rules by full overload name, such as `aten::index.Tensor` or `aten::embedding`."""

_HOPPER = "runs on compute capability 9.0 or newer only; the simulated device is older"

NOT_SIMULATED: Mapping[str, str] = MappingProxyType(
    {
        "scatter_add_tma": _HOPPER,
        "scatter_add_cutedsl": "belongs to an optional package of compiled kernels",
        "ctc_loss_capture": "asserts only while a CUDA graph is captured",
        "grouped_mm_offsets": _HOPPER,
        "grouped_mm_alignment": _HOPPER,
        "scaled_grouped_mm_mx": "runs on compute capability 10.0 only and has no CPU kernel",
        "nccl_nan_check": "launched by NCCL process groups, not by an op",
        "nvshmem_splits": "needs NVSHMEM and several GPUs",
        "inductor_indirect": "part of generated Triton code, which cannot run without a GPU",
    }
)
"""Inventory records without a rule, each with the reason."""
