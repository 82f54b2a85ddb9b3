"""Kinds of the user's objects, read without running the user's code, and without loading torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor, nn


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor by its type; what it says of its class is not asked."""
    return is_of(value, "torch", "Tensor")


def is_module(value: object) -> TypeGuard[nn.Module]:
    """Return whether a value is a module by its type; what it says of its class is not asked."""
    return is_of(value, "torch.nn.modules.module", "Module")


def is_of(value: object, module: str, name: str) -> bool:
    """Return whether a value is of a class of a module, or of one derived from it."""
    kind = loaded(module, name)
    # An abstract class would ask the metaclasses of all that are derived from it.
    return isinstance(kind, type) and type.__subclasscheck__(kind, type(value))


def loaded(module: str, name: str) -> object:
    """Return a variable of a module, ``None`` where the module is not loaded: nobody uses it."""
    found = sys.modules.get(module)
    return None if found is None else vars(found).get(name)
