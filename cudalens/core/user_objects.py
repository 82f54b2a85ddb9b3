"""Type checks of the user's objects that neither run the user's code nor import torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor, nn


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor by its type; its ``__class__`` is not read."""
    return is_of(value, "torch", "Tensor")


def is_module(value: object) -> TypeGuard[nn.Module]:
    """Return whether a value is a module by its type; its ``__class__`` is not read."""
    return is_of(value, "torch.nn.modules.module", "Module")


def is_of(value: object, module: str, name: str) -> bool:
    """Return whether a value is an instance of a class, which is named by its module."""
    kind = loaded(module, name)
    # Not issubclass(): an abstract class would call the metaclasses of all its subclasses.
    return isinstance(kind, type) and type.__subclasscheck__(kind, type(value))


def loaded(module: str, name: str) -> object:
    """Return a variable of a module, ``None`` if the module is not loaded, and so not in use."""
    found = sys.modules.get(module)
    return None if found is None else vars(found).get(name)
