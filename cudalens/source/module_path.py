"""Place in the model: the path of the module that was running.

Modules are read from their dictionaries and none of their methods is called, so a module with a
broken ``__getattr__`` or a ``named_modules`` of its own does no harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from cudalens.core.user_objects import is_module
from cudalens.source.safe_eval import registered
from cudalens.source.stack import Place

_MAX_MODULES = 200_000


class ModulePath(NamedTuple):
    """The path below the outermost running module, and the class of the innermost one."""

    path: str | None = None
    type_name: str | None = None


def running_modules(places: Sequence[Place]) -> list[object]:
    """Return the modules whose methods are on the stack, outermost first, repeats in a row once."""
    modules: list[object] = []
    for place in places:
        if place.code.co_argcount == 0 or place.code.co_varnames[0] != "self":
            continue
        owner = place.variables.get("self")
        if is_module(owner) and not (modules and modules[-1] is owner):
            modules.append(owner)
    return modules


def module_path(places: Sequence[Place]) -> ModulePath:
    """Return the path of the innermost running module below the outermost one.

    The path is ``None`` when both are the same.  For a module that is not below the outermost
    one, it is the path of the nearest enclosing module that has one.
    """
    stack = running_modules(places)
    if not stack:
        return ModulePath()
    paths = paths_below(stack[0], wanted={id(module) for module in stack})
    path = next(paths[id(module)] for module in reversed(stack) if id(module) in paths)
    return ModulePath(path or None, type(stack[-1]).__name__)


def paths_below(root: object, wanted: Set[int] | None = None) -> dict[int, str]:
    """Return the paths of modules below ``root`` by ``id``, in the order of ``named_modules``."""
    paths: dict[int, str] = {}
    for path, module in modules_below(root):
        if wanted is None or id(module) in wanted:
            paths[id(module)] = path
        if wanted is not None and len(paths) == len(wanted):
            break
    return paths


def modules_below(root: object) -> Iterator[tuple[str, object]]:
    """Yield a module and its parts with their paths, each once, as ``named_modules`` does."""
    seen: set[int] = set()
    waiting = [("", root)]
    while waiting and len(seen) < _MAX_MODULES:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        children = [
            (f"{path}.{name}" if path else name, child)
            for name, child in registered(module, "_modules").items()
            if child is not None
        ]
        waiting.extend(reversed(children))  # the last is popped first


def tensors_below(
    root: object, kinds: Sequence[str] = ("_parameters", "_buffers")
) -> Iterator[tuple[str, object]]:
    """Yield the parameters and buffers of a module and its parts, with their paths."""
    for path, module in modules_below(root):
        for name, tensor in (pair for it in kinds for pair in registered(module, it).items()):
            if tensor is not None:  # ``bias=False``
                yield (f"{path}.{name}" if path else name), tensor


def module_at(root: object, path: str) -> object:
    """Return the module at a path below ``root``, ``None`` where there is none."""
    module = root
    for step in path.split(".") if path else ():
        module = registered(module, "_modules").get(step)
    return module


def spelled(root: str, path: str) -> str:
    """Return a path below a variable as code: ``net[2].weight``."""
    steps = path.split(".") if path else ()
    return root + "".join(f"[{it}]" if it.isdecimal() else f".{it}" for it in steps)


def container_of(path: str) -> tuple[str, list[int]]:
    """Return the path of an attribute, and the positions below it that a path ends with.

    ``("net.parts", [0, 1])`` for ``net.parts.0.1``.
    """
    steps, positions = path.split(".") if path else [], list[int]()
    while steps and steps[-1].isdecimal():
        positions.insert(0, int(steps.pop()))
    return ".".join(steps), positions
