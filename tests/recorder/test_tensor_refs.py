"""Tensors among arguments and results, found without asking subclasses of containers."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch

from cudalens.recorder.tensor_refs import is_ref, tensor_values, tensors_in

X, Y = torch.ones(1), torch.zeros(1)


class Hostile(list[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("it was asked")


def ids(values: Any) -> list[int]:
    return [id(item) for item in tensors_in(values)]


def test_tensors_in_lists_and_dicts() -> None:
    assert ids([X, 1, None, [Y, 2], (X,), {"a": Y, "b": 1}]) == list(map(id, (X, Y, X, Y)))
    assert ids([Hostile([X])]) == [id(X)]
    assert ids([[(X, Y), [Y]]]) == [id(X), id(Y), id(Y)]
    assert ids([[[[X]]]]) == []
    assert len(ids([[[X] * 65]])) == 64


def test_tensors_by_their_arguments() -> None:
    found = tensor_values({"self": X, "indices": [None, Y], "dim": 1, "more": Hostile([X])})
    assert {key: id(item) for key, item in found.items()} == {
        "self": id(X),
        "indices[1]": id(Y),
        "more[0]": id(X),
    }


def test_references() -> None:
    assert is_ref(ref(X))
    assert not is_ref(X)


class HostileTuple(tuple[Any, ...]):
    __slots__ = ()

    def __iter__(self) -> Any:
        raise AssertionError("it was asked")


def test_the_tensors_of_a_tuple_are_arguments_too() -> None:
    found = tensor_values({"tensors": (1, Y), "more": HostileTuple((None, X)), "a": {"b": X}})
    assert {key: id(item) for key, item in found.items()} == {
        "tensors[1]": id(Y),
        "more[1]": id(X),
    }
