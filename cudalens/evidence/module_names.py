"""The variable that holds the model, before the paths of its modules: ``net.0``, not ``0``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from types import FrameType, TracebackType
from typing import Any

import torch

from cudalens.evidence.call_stack import namespaces
from cudalens.source.module_path import running_modules
from cudalens.source.stack import frame_of, place_of


def module_names(
    module_path: str | None,
    others: Iterable[str | None],
    recorder: Any,
    entries: Sequence[FrameType | TracebackType],
    *,
    running: str | None,
) -> tuple[tuple[str, str], ...]:
    """Return each module path with the variable before it, where that is proven.

    All recorded modules of that path are below one, which one variable of the user's holds.

    Args:
        module_path: of the failure.
        others: paths of the history and of the graph.
        entries: the stack of the failure.
        running: the path of the module whose call is on that stack.  Of another path that the
            failure has, nobody knows what it is below.
    """
    roots: dict[str, set[int]] = {} if recorder is None else recorder.module_roots()
    stack = running_modules([place_of(item) for item in entries])
    if running and stack:
        roots.setdefault(running, set()).add(id(stack[0]))
    if module_path != running:
        roots.pop(module_path or "", None)
    variables = _variables(
        list(map(frame_of, entries)), {root for held in roots.values() for root in held}
    )
    found = {}
    for path in filter(None, (module_path, *others)):
        held = {variables.get(root) for root in roots.get(path, ())}
        if len(held) == 1 and (name := held.pop()):
            found[path] = f"{name}.{path}"
    return tuple(found.items())


def _variables(frames: Sequence[FrameType], wanted: Set[int]) -> Mapping[int, str]:
    """Return by ``id`` those of some modules that the user's variables of one name hold."""
    found: dict[int, set[str]] = {}
    for scope in namespaces(frames) if wanted else ():
        for name, value in list(scope.items()):
            # By its type: an object of the user's may answer anything to isinstance.  A shell
            # keeps its results under names with an underscore.
            is_own = id(value) in wanted and name != "self" and not name.startswith("_")
            if is_own and issubclass(type(value), torch.nn.Module):
                found.setdefault(id(value), set()).add(name)
    return {key: names.pop() for key, names in found.items() if len(names) == 1}
