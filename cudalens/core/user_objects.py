"""Kinds of the user's objects, read without running the user's code."""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor, nn


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor by its type; what it says of its class is not asked."""
    return issubclass(type(value), Tensor)


def is_module(value: object) -> TypeGuard[nn.Module]:
    """Return whether a value is a module by its type; what it says of its class is not asked."""
    return issubclass(type(value), nn.Module)
