"""The seam to torch's compiler: a pass over its graphs, and their keys in its caches.

Installing the hooks does not import the compiler, which takes a second.  The other private names of
torch are in ``_torch.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from cudalens.core.late_import import when_loaded

COMPILER = "torch._dynamo"
TRACE_RULES = "torch._dynamo.trace_rules"
INDUCTOR = "torch._inductor.compile_fx"


def rewrite_compiled_graphs(
    devices: frozenset[str],
    rewrite: Callable[[Any, str], None],
    identity: Callable[[], object],
    complain: Callable[[str], None],
) -> Callable[[], None]:
    """Rewrite each graph that inductor compiles in this process, forward and backward.

    The pass is registered with the backend of a device type, which all threads share.  The
    backend's own pass runs first.

    Args:
        devices: device types.
        rewrite: called with a graph and the type of a device that it has tensors on.
        identity: returns the part of inductor's cache key that stands for the rewritten code.
        complain: called with one line if this torch has no such passes.

    Returns:
        a function that removes the passes.
    """

    def enter(_: object) -> Callable[[], object]:
        from torch._inductor.codegen import common

        passes: Any = getattr(common, "custom_backend_passes", None)
        if passes is None:
            complain("compiled code is not guarded: this torch has no passes of a backend")
            return lambda: None
        # Registering the backends fills ``passes``, whose devices are read below.
        common.init_backend_registration()
        from torch._inductor.custom_graph_pass import CustomGraphModulePass
        from torch._inductor.virtualized import V

        class RewritePass(CustomGraphModulePass):
            def __init__(self, device: str) -> None:
                self.device, self.before = device, passes[device]

            def __call__(self, module: Any) -> None:
                if self.before is not None:
                    self.before(module)
                # Code compiled ahead of time runs in processes that do not register our op.
                if not getattr(V, "aot_compilation", False):
                    rewrite(module.graph, self.device)

            def uuid(self) -> object:
                # Part of inductor's cache key: code for other guards must not be reused.
                return self.before and self.before.uuid(), identity()

        ours = {device: RewritePass(device) for device in devices & passes.keys()}
        passes.update(ours)

        def leave() -> None:
            # A pass that other code has registered since stays.
            passes.update(
                {name: item.before for name, item in ours.items() if passes[name] is item}
            )

        return leave

    return when_loaded(INDUCTOR, enter)


def leave_out_own_frames() -> Callable[[], None]:
    """Keep the compiler from tracing this package, whose code runs below compiled functions.

    Returns:
        a function that lets it trace the package again.
    """

    def enter(rules: Any) -> Callable[[], object]:
        rules.add(__name__.partition(".")[0])  # it appends the package's folder
        skipped = rules.SKIP_DIRS[-1]

        def leave() -> None:
            rules.SKIP_DIRS.remove(skipped)
            rules._recompile_re()

        return leave

    return when_loaded(TRACE_RULES, enter)


def forget_compiled_code() -> None:
    """Clear the compiler's caches: each compiled function is compiled again at its next call."""
    compiler = sys.modules.get(COMPILER)
    if compiler is not None and hasattr(compiler, "reset_code_caches"):
        compiler.reset_code_caches()


def code_being_compiled() -> list[CodeType] | None:
    """Return the code objects of the graph that is being compiled, ``None`` if unknown."""
    guards = sys.modules.get("torch._guards")
    context = None if guards is None else guards.TracingContext.try_get()
    return getattr(context, "traced_code", None) or None


def has_kernel(op: Any) -> bool:
    """Return whether inductor generates kernels for an op instead of calling torch's own."""
    from torch._inductor.lowering import fallbacks, lowerings

    return op in lowerings and op not in fallbacks


def is_data_dependent(size: Any) -> bool:
    """Return whether a symbolic size depends on tensor values, as that of ``nonzero`` does."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))
