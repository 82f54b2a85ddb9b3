"""Prefix module paths with the variable that holds the model: ``net.0``, not ``0``."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence, Set
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor

from cudalens.core.evidence_types import OwnerModule
from cudalens.core.report_types import OtherModule
from cudalens.source.locate import CallSite
from cudalens.source.module_path import paths_below, spelled
from cudalens.source.running_call import RunningCall, class_name
from cudalens.source.safe_eval import instance_dict, registered
from cudalens.source.stack import namespaces

_MAX_ITEMS = 256
"""How many items of a list are searched."""


def module_names(
    module_path: str | None,
    others: Iterable[str | None],
    recorder: Any,
    frames: Sequence[FrameType],
    stack: Sequence[object],
    *,
    running: str | None,
) -> tuple[tuple[str, str], ...]:
    """Return module paths with the variable in front, if that is proven.

    All recorded modules of a path must have one root, which a single variable of the user's holds.

    Args:
        module_path: the path in the failure.
        others: the paths in the history and the graph.
        frames: the stack of the failure.
        stack: the modules that run on it, outermost first.
        running: the path of the module on that stack; any other path in the failure belongs to a
            recorded call.
    """
    roots: dict[str, set[int]] = {} if recorder is None else recorder.snapshot().module_roots()
    if running and stack:
        roots.setdefault(running, set()).add(id(stack[0]))
    variables = _variables(frames, {root for held in roots.values() for root in held})
    names = {}
    for path in filter(None, (module_path, *others)):
        held = {variables.get(root) for root in roots.get(path, ())}
        if len(held) == 1 and (name := held.pop()):
            names[path] = f"{name}.{path}"
    return tuple(names.items())


def owner_modules(
    values: Mapping[str, Tensor],
    frames: Sequence[FrameType],
    stack: Sequence[object],
    site: CallSite,
    line: RunningCall | None,
) -> tuple[OwnerModule, ...]:
    """Return the module of each argument without an expression on the line, if one is proven.

    It is the innermost running module with the tensor as a parameter or buffer.  If the user's line
    calls this module, it has that name, else its path below the model's variable.

    Args:
        stack: the modules that run, outermost first.
        line: the call on the user's line.
    """
    named = {item.key for item in site.names}
    owners = []
    for key, tensor in values.items():
        for module in reversed(stack) if key not in named else ():
            stored = {**registered(module, "_parameters"), **registered(module, "_buffers")}
            name = next((name for name, item in stored.items() if item is tensor), None)
            text = name and _text_of(module, frames, stack[0], line)
            if name and text:
                kind = class_name(type(module)) or type(module).__name__
                owners.append(
                    OwnerModule(
                        argument=key, text=text, kind=kind.removeprefix("torch."), attribute=name
                    )
                )
                break
    return tuple(owners)


def other_modules(
    seen: Iterable[tuple[object, int, Any, Any]],
    stack: Sequence[object],
    related: Tensor | None,
    size: int | None,
    dim: int,
    frames: Sequence[FrameType],
) -> tuple[OtherModule, ...]:
    """Return the modules that ran the failing line before, with another bound.

    Args:
        seen: the modules, with calls, smallest and largest value.
        stack: the modules that run, outermost first.
        related: the failing module's tensor that sets the bound: ``size`` in dimension ``dim``.
    """
    stores = [(it, _tensors_of(it)) for it in reversed(stack)]
    held = (
        (type(it), name) for it, own in stores for name, value in own.items() if value is related
    )
    kind, name = next(held, (None, ""))
    others = []
    for module, calls, low, high in seen if kind is not None else ():
        tensor = _tensors_of(module).get(name) if type(module) is kind else None
        shape = tuple(getattr(tensor, "shape", ()))
        path = _path_of(module, frames) if dim < len(shape) and shape[dim] != size else None
        if path is not None:
            bound = {"module": path, "calls": calls, "min": low, "max": high, "size": shape[dim]}
            others.append(OtherModule(**bound))
    return tuple(others)


def _tensors_of(module: object) -> dict[str, object]:
    """Return the tensors stored as attributes of a module."""
    own = {**instance_dict(module), **registered(module, "_parameters")}
    own.update(registered(module, "_buffers"))
    return {str(name): value for name, value in own.items() if isinstance(value, Tensor)}


def _path_of(module: object, frames: Sequence[FrameType]) -> str | None:
    """Return a module's path from a variable of the user's: ``stores.0``."""
    for scope in namespaces(frames):
        for name, value in list(scope.items()):
            if name == "self" or name.startswith("_"):
                continue
            if value is module:
                return name
            if issubclass(type(value), torch.nn.Module):
                path = paths_below(value, wanted={id(module)}).get(id(module))
                if path is not None:
                    return f"{name}.{path}"
            if type(value) in (list, tuple):
                items = enumerate(cast("list[object]", value)[:_MAX_ITEMS])
                at = next((at for at, it in items if it is module), None)
                if at is not None:
                    return f"{name}.{at}"
    return None


def _text_of(
    module: object, frames: Sequence[FrameType], root: object, line: RunningCall | None
) -> str | None:
    """Return the user's expression for a running module, from their line, else its path."""
    function = getattr(line and line.node, "func", None)
    if line is not None and function is not None and line.value(function) is module:
        return ast.unparse(function)
    variable = _variables(frames, {id(root)}).get(id(root))
    path = paths_below(root, wanted={id(root), id(module)}).get(id(module))
    return None if variable is None or path is None else spelled(variable, path)


def _variables(frames: Sequence[FrameType], wanted: Set[int]) -> Mapping[int, str]:
    """Return, by ``id``, the only variable name of each module that the user's variables hold."""
    variables: dict[int, set[str]] = {}
    for scope in namespaces(frames) if wanted else ():
        for name, value in list(scope.items()):
            # By type(): an object of the user's may override `__class__`.  A shell
            # keeps its results under names with an underscore.
            is_own = id(value) in wanted and name != "self" and not name.startswith("_")
            if is_own and issubclass(type(value), torch.nn.Module):
                variables.setdefault(id(value), set()).add(name)
    return {key: names.pop() for key, names in variables.items() if len(names) == 1}
