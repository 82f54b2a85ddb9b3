"""Weak references to the tensors among the arguments and results of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard
from weakref import ref

import torch
from torch import Tensor

from cudalens.core.user_objects import is_tensor

Ref = ref[Tensor]
"""A weak reference without callback.  Python makes one object for all of them to the same tensor,
so ``is`` compares the tensors of two calls, even after the tensor has been freed."""

NO_TENSORS = frozenset({int, float, bool, complex, str, type(None), torch.dtype, torch.device})
NO_TENSORS |= {slice, type(...), torch.layout, torch.memory_format, torch.Size}
"""Classes of arguments and results that contain no tensor."""
_MAX_LISTED = 64


def is_ref(value: object) -> TypeGuard[Ref]:
    """Return whether a value is a reference to a tensor."""
    return type(value) is ref


# By class and with the iterators of `list` and `tuple`: an object of the user's may claim another
# class, or iterate by code of its own, and recording must not run that code.
def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among some values, and in the lists, tuples and dicts among them."""
    tensors: list[Tensor] = []
    for value in values:
        kind = type(value)
        if issubclass(kind, Tensor):
            tensors.append(value)
        elif issubclass(kind, (list, tuple)):
            items = list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value)
            for item in items:
                if issubclass(type(item), Tensor):
                    tensors.append(item)
                elif type(item) in (list, tuple):
                    tensors += [part for part in item[:_MAX_LISTED] if is_tensor(part)]
        elif kind is dict:
            tensors += [item for item in value.values() if is_tensor(item)]
    return tensors


def tensor_values(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among the arguments, elements of lists as ``indices[1]``."""
    tensors: dict[str, Tensor] = {}
    for name, value in arguments.items():
        kind = type(value)
        if issubclass(kind, Tensor):
            tensors[name] = value
        elif issubclass(kind, (list, tuple)):
            items = list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value)
            for position, item in enumerate(items):
                if is_tensor(item):
                    tensors[f"{name}[{position}]"] = item
    return tensors
