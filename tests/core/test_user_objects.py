"""Kinds of objects by their types: nothing of an object is asked."""

from __future__ import annotations

from abc import ABCMeta
from collections import UserDict

import torch
from torch import nn

from cudalens.core.user_objects import is_module, is_of, is_tensor, loaded
from tests.probes import Untouchable
from tests.processes import python


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


def test_no_metaclass_of_the_user_is_asked() -> None:
    """An abstract class asks those of all its subclasses, unless only the bases are read."""
    asked = []

    class Curious(ABCMeta):
        def __subclasscheck__(cls, subclass: type) -> bool:
            asked.append(subclass)
            return True

    class Mine(UserDict, metaclass=Curious):  # type: ignore[type-arg]
        pass

    assert is_of(UserDict(), "collections", "UserDict")
    assert not is_of(1.5, "collections", "UserDict")
    assert asked == []


def test_what_is_not_loaded_is_not_in_use() -> None:
    """Nothing is imported to find out."""
    assert loaded("torch", "no_such_name") is None
    assert not is_of(1, "no.such.module", "int")
    code = "from cudalens.core.user_objects import is_tensor; import sys; "
    code += "print(is_tensor(1), 'torch' in sys.modules)"
    assert python("-c", code, fresh=True).stdout.split() == ["False", "False"]
