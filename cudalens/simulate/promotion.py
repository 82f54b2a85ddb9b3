"""Turn a Python number that stands where a schema says Tensor into a tensor that promotes alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from cudalens.simulate.opfacts import OpFacts

_MASKS: Final = frozenset({"condition", "mask"})


def _partner(facts: OpFacts, host: Sequence[Any]) -> Tensor | None:
    """Return the operand that decides the dtype: one with dimensions wins over a 0-dim one."""
    tensors = [
        value
        for argument, value in zip(facts.arguments, host, strict=True)
        if isinstance(value, Tensor) and argument.name not in _MASKS
    ]
    return max(tensors, key=lambda t: t.dim() > 0, default=None)


def _float_dtype(other: Tensor) -> torch.dtype:
    if not other.dtype.is_floating_point and not other.dtype.is_complex:
        return torch.get_default_dtype()
    if other.dim() > 0:
        return torch.float64
    return other.dtype if other.dtype.is_floating_point else other.dtype.to_real()


def _complex_dtype(other: Tensor) -> torch.dtype:
    if other.dtype.is_complex:
        return torch.complex128 if other.dim() > 0 else other.dtype
    if other.dtype.is_floating_point:
        return other.dtype.to_complex()
    return torch.get_default_dtype().to_complex()


def number_tensor(value: complex, facts: OpFacts, host: Sequence[Any]) -> Tensor:
    """Return the 0-dim CPU tensor for a number, with the dtype that leaves promotion unchanged."""
    other = _partner(facts, host)
    if isinstance(value, bool) or other is None:
        return torch.tensor(value)
    if isinstance(value, int):
        return torch.tensor(value, dtype=torch.int64 if other.dtype is torch.bool else other.dtype)
    if isinstance(value, float):
        return torch.tensor(value, dtype=_float_dtype(other))
    return torch.tensor(value, dtype=_complex_dtype(other))
