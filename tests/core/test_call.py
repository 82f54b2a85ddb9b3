"""The name under which torch documents a function that was called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudalens.core.call import public_name


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.cuda.CUDAGraph.replay, "torch.cuda.CUDAGraph.replay"),
        (torch.cuda.Event.synchronize, "torch.cuda.Event.synchronize"),
        (torch.amp.GradScaler.scale, "torch.amp.GradScaler.scale"),
        (torch.Generator.manual_seed, "torch.Generator.manual_seed"),
        (torch.Generator().seed, "torch.Generator.seed"),
        (torch.manual_seed, "torch.manual_seed"),
        (torch.nn.utils.clip_grad_norm_, "torch.nn.utils.clip_grad_norm_"),
        (torch.cuda.synchronize, "torch.cuda.synchronize"),
        (torch.sigmoid, "torch.sigmoid"),
        (torch.Tensor.sigmoid, "torch.Tensor.sigmoid"),
        (torch.nn.utils.rnn.pad_sequence, "torch.nn.utils.rnn.pad_sequence"),
        (torch.ops.aten.sin.default, "aten::sin"),
        (torch.ops.aten.add.Tensor, "aten::add.Tensor"),
        (torch.ops.aten.add, "aten::add"),
        (torch.mm, "torch.mm"),
        (torch.dsmm, "torch.dsmm"),
        (torch.linalg.inv, "torch.linalg.inv"),
        (torch.Tensor.shape.__get__, "torch.Tensor.shape"),
        (torch.Tensor.data.__set__, "torch.Tensor.data"),
        (torch.Tensor.grad.__delete__, "torch.Tensor.grad"),
        (len, "builtins.len"),
    ],
)
def test_a_function_has_the_name_that_a_user_writes(function: Any, name: str) -> None:
    """Not the file of torch's that defines it."""
    assert public_name(function) == name
