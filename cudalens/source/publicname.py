"""The name under which torch offers a function or class to its users."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

_FUNCTION_HOMES = (
    "torch",
    "torch.nn.functional",
    "torch.special",
    "torch.linalg",
    "torch.fft",
    "torch.autograd",
)


def is_tensor_method(name: str) -> bool:
    """Tell whether tensors have an attribute of this name."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", object)
    return any(name in vars(base) for base in tensor.__mro__[:-1])


def below_module(module: str, names: Sequence[str]) -> str | None:
    """Name what is reached from a module, ``None`` where that says little."""
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names or (package != "torch" and len(names) > 1):
        return None
    return ".".join([module, *names])


def of_value(value: Any) -> str | None:
    """Name a function or class of torch by where it is offered."""
    if issubclass(type(value), type):
        return class_name(value)
    if type(value) not in (FunctionType, BuiltinFunctionType):
        return None
    module = value.__module__
    if module is not None and module.partition(".")[0] != "torch":
        return None
    for home in _FUNCTION_HOMES:
        offered = vars(sys.modules[home]) if home in sys.modules else {}
        for name, item in offered.items():
            if item is value and not name.startswith("_"):
                return f"{home}.{name}"
    return None


def class_name(kind: type) -> str | None:
    """Give the shortest public name of a class of torch, ``None`` for other classes."""
    module = str(vars(kind).get("__module__", ""))
    parts = module.split(".")
    if parts[0] != "torch":
        return None
    for count in range(1, len(parts)):
        package = ".".join(parts[:count])
        if vars(sys.modules[package]).get(kind.__name__) is kind:
            return f"{package}.{kind.__name__}"
    return f"{module}.{kind.__name__}"
