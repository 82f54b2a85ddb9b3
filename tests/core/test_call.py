"""The name under which torch documents a function that was called."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from cudalens.core.call import THREAD, ApiCall, NodeMark, function_name, public_name


class Own:
    """An object of the user's whose name is not to be asked for."""

    __name__ = "odd"

    def __call__(self) -> None:
        raise AssertionError


def test_an_object_of_the_users_has_the_name_of_its_class() -> None:
    assert public_name(Own()) == f"{__name__}.Own"
    assert function_name(Own()) == "Own"
    assert function_name(torch.add) == "add"
    assert function_name(partial(torch.add)) == "partial"


def test_a_call_is_known_by_its_name_and_lets_go_of_its_tensors() -> None:
    call = ApiCall(func=torch.add, args=(1,), kwargs={"alpha": 2})
    assert call.name == "torch.add"
    call.release()
    assert (call.args, call.kwargs) == ((), {})


def test_a_node_is_marked_without_keeping_it() -> None:
    node = (torch.ones(1, requires_grad=True) * 2).grad_fn
    assert NodeMark.of(node) == NodeMark(node.name(), node._sequence_nr())  # type: ignore[union-attr]
    assert NodeMark.of(None) is None


def test_each_thread_has_a_call_of_its_own() -> None:
    with ThreadPoolExecutor(1) as thread:
        theirs = thread.submit(lambda: THREAD.running).result()
    assert theirs is not THREAD.running
    assert (theirs.call, theirs.extremes) == (None, ())


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
