"""Arguments of an API call by the names that the function gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cudalens.recorder.arguments import named_arguments, overload_of, parameters_of

X = torch.ones(2)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "names"),
    [
        (F.linear, (X, X), {}, ["input", "weight"]),
        (F.cross_entropy, (X, X), {"reduction": "sum"}, ["input", "target", "reduction"]),
        (torch.mul, (X, 2), {}, ["self", "other"]),
        (Tensor.index_select, (X, 0, X), {}, ["self", "dim", "index"]),
        (torch.ops.aten.mm.default, (X, X), {}, ["self", "mat2"]),
        (torch.ops.aten.mul, (X, 2), None, ["self", "other"]),  # of several overloads
        (torch.mul, (object(), 2), {}, ["self", "other"]),  # one that is not known
        (torch.max, (X, X), {}, ["self", "other"]),
        (torch.max, (X, 0), {}, ["self", "dim"]),
        (torch.layer_norm, (X, [2], X), {}, ["input", "normalized_shape", "weight"]),
        (torch.layer_norm, (X, [2], None), {}, ["input", "normalized_shape", "weight"]),
        (Tensor.__eq__, (X, 2), {}, ["self", "other"]),
        (lambda *args: None, (X, 1), {}, ["args", "1"]),
        (object(), (X, 1), {}, ["0", "1"]),
    ],
)
def test_names_of_the_signature_else_of_the_op_else_places(
    func: Any, args: Any, kwargs: Any, names: list[str]
) -> None:
    assert list(named_arguments(func, args, kwargs)) == names


@pytest.mark.parametrize(
    ("func", "names"),
    [
        (F.relu, ["input", "inplace"]),
        (torch.ops.aten.mm.default, ["self", "mat2"]),
        (torch.ops.aten.mul, None),
        (torch.mul, None),
    ],
)
def test_parameters_that_do_not_depend_on_the_call(func: Any, names: Any) -> None:
    assert parameters_of(func) == names
    given = ["a", "b"] if names is None else names
    assert list(named_arguments(func, (X, X), {}, given)) == given


def test_the_overload_of_an_op() -> None:
    assert overload_of(torch.ops.aten.mm.default) is torch.ops.aten.mm.default
    assert overload_of(torch.ops.aten.one_hot) is torch.ops.aten.one_hot.default  # the only one
    assert overload_of(torch.ops.aten.mul) is None  # several
    assert overload_of(torch.mul) is None
