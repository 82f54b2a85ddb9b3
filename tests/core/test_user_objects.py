"""Kinds of objects by their types: nothing of an object is asked."""

from __future__ import annotations

import torch
from torch import nn

from cudalens.core.user_objects import is_module, is_tensor
from tests.probes import Untouchable


class Claims:
    """Says that it is a tensor."""

    @property
    def __class__(self) -> type:
        return torch.Tensor


def test_tensors_and_modules_by_their_types() -> None:
    assert is_tensor(torch.ones(1))
    assert is_tensor(nn.Parameter(torch.ones(1)))
    assert is_module(nn.ReLU())
    for value in (Claims(), Untouchable(), None, torch.Tensor, nn.ReLU):
        assert not is_tensor(value)
        assert not is_module(value)
