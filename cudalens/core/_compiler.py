"""The seam to torch's compiler: a pass over its graphs, and what tells them apart in its caches.

Nothing here loads the compiler, which takes a second.  Not here: the other private names of torch
(``_torch.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

from cudalens.core._python import replace_attribute
from cudalens.core.late_import import when_imported

COMPILER = "torch._dynamo"
TRACE_RULES = "torch._dynamo.trace_rules"
COMPILER_CONFIG = "torch._inductor.config"
"""Imported, it has the compiler loaded, which takes a second."""
_HOOK = "post_grad_custom_pre_pass"


def rewrite_compiled_graphs(
    config: Any, rewrite: Callable[[Any], None], identity: Callable[[], object | None]
) -> Callable[[], None]:
    """Have each graph that inductor compiles in this process rewritten, forward and backward.

    What the user sets belongs to a context (a thread, a cell), and a default would be copied into
    each: so this stands where an environment variable would, and lets the user's own pass, that of
    the moment, run first.

    Args:
        config: the loaded module :data:`COMPILER_CONFIG`.
        identity: returns what inductor's caches tell the rewritten code by; ``None`` keeps the
            graph that is being compiled out of them.

    Returns:
        a function that undoes it.

    Raises:
        NotImplementedError: this torch has no such hook.
    """
    entry: Any = getattr(config, "_config", {}).get(_HOOK)
    if not hasattr(entry, "env_value_force") or not hasattr(entry, "user_override"):
        msg = f"this torch has no {_HOOK}"
        raise NotImplementedError(msg)
    from torch._inductor import custom_graph_pass

    def others() -> list[Any]:
        override = entry.user_override
        override = override.get() if hasattr(override, "get") else override
        passes = override if isinstance(override, list | tuple) else [override]
        return [item for item in passes if callable(item) and not isinstance(item, RewritePass)]

    # torch 2.11 tells no pass whether a graph is for inference.
    aware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)

    class RewritePass(aware or custom_graph_pass.CustomGraphPass):  # type: ignore[misc]
        def __call__(self, graph: Any, is_inference: bool = False) -> None:
            for item in others():
                item(graph, *([is_inference] if aware and isinstance(item, aware) else []))
            # Else somebody has kept it beyond its time.
            if entry.env_value_force is made and not _is_for_another_process():
                rewrite(graph)

        def uuid(self) -> object | None:
            parts = [item.uuid() if hasattr(item, "uuid") else None for item in others()]
            if entry.env_value_force is made:
                parts.append(identity())
            return None if None in parts else tuple(parts)

    made = RewritePass()
    return replace_attribute(entry, "env_value_force", made)


def _is_for_another_process() -> bool:
    """Return whether code is compiled ahead of time: where it will run, nobody knows our op."""
    from torch._inductor.virtualized import V

    return bool(getattr(V, "aot_compilation", False))


def leave_out_own_frames() -> Callable[[], None]:
    """Have the compiler trace nothing of this package, whose code runs below compiled functions.

    Returns:
        a function that undoes it.
    """
    undo: list[Callable[[], object]] = []

    def enter(rules: Any) -> None:
        rules.add(__name__.partition(".")[0])
        undo.extend((rules._recompile_re, partial(rules.SKIP_DIRS.remove, rules.SKIP_DIRS[-1])))

    undo.append(when_loaded(TRACE_RULES, enter))

    def leave() -> None:
        while undo:
            undo.pop()()

    return leave


def when_loaded(name: str, enter: Callable[[Any], None]) -> Callable[[], None]:
    """Call a function with a module: now, or once it is imported.

    Returns:
        a function that waits no longer.
    """
    module = sys.modules.get(name)
    if module is None:
        return when_imported(name, enter)
    enter(module)
    return lambda: None


def forget_compiled_code() -> None:
    """Have every compiled function compiled once more at its next call."""
    compiler = sys.modules.get(COMPILER)
    if compiler is not None and hasattr(compiler, "reset_code_caches"):
        compiler.reset_code_caches()


def code_being_compiled() -> list[CodeType] | None:
    """Return the code objects of the graph that is being compiled; ``None`` where not known."""
    guards = sys.modules.get("torch._guards")
    context = None if guards is None else guards.TracingContext.try_get()
    return getattr(context, "traced_code", None) or None


def is_data_dependent(size: Any) -> bool:
    """Return whether a size in a graph that is being compiled depends on values: nonzero's."""
    if isinstance(size, int):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))
