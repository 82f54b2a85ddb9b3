"""Guards inside compiled code: a pass over the graphs that inductor is about to compile.

The pass wraps each index of a reading or writing op in ``cudalens::in_bounds``, which clamps it
into the bounds and queues a deferred check.  Op, argument, bounds and line are arguments of that
call, so code from inductor's cache reports the same as newly compiled code.

Ops that inductor calls as torch kernels pass the dispatcher, and are guarded there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.fx import Node, map_arg

from cudalens.core import _compiler, _torch
from cudalens.core._python import raise_if_outside
from cudalens.core.limits import failure_line
from cudalens.core.torch_functions import Trait, functions
from cudalens.core.version import __version__
from cudalens.guards import GUARDS
from cudalens.guards._base import full_name, schema_parameters
from cudalens.guards.deferred import PastCalls
from cudalens.guards.engine import INDEX_DTYPES, Within, in_bounds
from cudalens.guards.pending import PENDING
from cudalens.guards.plans import guarded_op, required_of

_BY_SHAPES = "aten::_unsafe_index"
"""Reads at indices that the compiler has computed from shapes, as in ``interpolate``."""
_ALIKE = functions(Trait.WHOLE | Trait.VIEW, without=Trait.CAST | Trait.MOVES) | {"clone"}
_SAME_VALUES = frozenset(f"aten::{name}" for name in _ALIKE)
"""Ops whose result contains exactly the values of their first argument."""
_UNKNOWN_SIZE = 1 << 13
"""Stands in for a data-dependent size."""
_SCHEMA = "in_bounds(Tensor index, SymInt size, str meaning) -> Tensor"
_read = lru_cache(256)(json.loads)

_installed: list[CompiledGuards] = []
"""The installed ones; the last one gets the findings of compiled code.

A module global, because a compiled graph outlives its guards, or comes from a cache on disk: it can
only call an op by name.
"""


class CompiledGuards:
    """The guards inside compiled code.

    Installing them makes functions compiled without them recompile at their next call, and removing
    them those compiled with them.

    Args:
        past: makes the checks, and prints a line about code that is compiled without guards.
        devices: device types to act on.
    """

    def __init__(self, past: PastCalls, devices: frozenset[str]) -> None:
        self.past, self._devices = past, devices

    def install(self) -> Callable[[], None]:
        """Add the pass, now or once the compiler is imported; return what removes it."""
        _define_op()
        undo = _compiler.rewrite_compiled_graphs(
            self._devices, self._rewrite, _identity, self.past.complain
        )
        _installed.append(self)
        _compiler.forget_compiled_code()

        def remove() -> None:
            undo()
            _installed.remove(self)
            _compiler.forget_compiled_code()

        return remove

    def _rewrite(self, graph: Any, device: str) -> None:
        try:
            _guard_graph(graph, device)
        except Exception as failure:  # a guard that fails must never stop a compilation
            raise_if_outside(failure)
            self.past.complain(failure_line("guards of a compiled graph", failure))


def _identity() -> object:
    """Return a cache key for guarded code: the source lines are constants in it.

    Equal graphs may come from different lines, so the key contains the code objects' positions.
    """
    codes = _compiler.code_being_compiled()
    if codes is None:
        return uuid4().hex  # unique, so never found in the cache
    lines = [(code.co_filename, code.co_firstlineno, code.co_linetable) for code in codes]
    return __version__, _SCHEMA, lines


# --- the pass -------------------------------------------------------------------------------------


def _guard_graph(graph: Any, device: str) -> None:
    """Wrap each index of a graph on a device type in a check that clamps it."""
    safe: dict[Any, Any] = {}
    replaced = []
    for node in list(graph.nodes):
        op: Any = node.target
        if op not in GUARDS or _schema_name(node) == _BY_SHAPES or not _compiler.has_kernel(op):
            continue
        slots = {item.name: item for item in schema_parameters(op)}
        required = required_of(guarded_op(op).plans, *map_arg((node.args, node.kwargs), _stand_in))
        for one in required.deferred:
            need, wraps, index = one.need, one.low < 0, one.tensor_of(node.args, node.kwargs)
            if not isinstance(need, Within) or need.of is None or need.dim is None:
                continue
            if not _is_index(index, device):
                continue
            source: Any = slots[need.of].of(node.args, node.kwargs)
            size = _value(source).shape[need.dim] if _value(source).dim() else 1
            with graph.inserting_before(node):
                if isinstance(size, torch.SymInt):  # dynamic: read when the graph runs
                    size = _call(graph, torch.ops.aten.sym_size.int, source, need.dim)
                if (index, size, wraps) not in safe:  # one check for equal bounds
                    meaning = _meaning(node, need, wraps)
                    safe[index, size, wraps] = _in_bounds(graph, index, size, meaning)
            replaced.append((node, one, safe[index, size, wraps]))
    # Replace last: a failure above leaves the graph as it was.
    for node, one, index in replaced:
        node.args, node.kwargs = one.slot.put(node.args, node.kwargs, index, one.item)


def _stand_in(node: Node) -> Any:
    """Return a meta tensor or number for a node, with example sizes for symbolic ones."""
    value = _value(node)
    # Indices are broadcast, so an index of unknown size gets one element, which fits the others.
    is_index = isinstance(value, Tensor) and value.dtype in INDEX_DTYPES
    unknown = 1 if is_index else _UNKNOWN_SIZE

    def number(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        return unknown if _compiler.is_data_dependent(size) else size.node.hint

    if not isinstance(value, Tensor):
        return number(value)
    sizes, strides = map(number, value.shape), map(number, value.stride())
    return torch.empty_strided([*sizes], [*strides], dtype=value.dtype, device="meta")


def _is_index(node: Any, device: str) -> bool:
    """Return whether a node is an integer tensor on a device that surely has elements.

    Not 0-d tensors: in the graph of an attention mask they stand for one element, where no
    reduction is possible, and in other graphs the compiler reads them on the host.
    """
    value = _value(node)
    if value.dtype not in INDEX_DTYPES or not value.dim() or value.device.type != device:
        return False
    # A data-dependent size, as that of `nonzero`, may be 0, which `aminmax` rejects.
    return not any(_compiler.is_data_dependent(size) or size == 0 for size in value.shape)


def _meaning(node: Node, need: Within, wraps: bool) -> str:
    """Return op, requirement and source lines of a check as JSON, a constant in compiled code."""
    # torch 2.11 marks backward nodes with the tag only.
    is_tagged = node.meta.get("partitioner_tag") == "is_backward"
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'^\s*File "(.+)", line (\d+), in (.+)$', trace, flags=re.MULTILINE)
    fields = ("argument", "item", "of", "dim", "why")
    return json.dumps(
        {
            "op": full_name(node.target),
            "need": {name: getattr(need, name) for name in fields},
            "wraps": wraps,
            "backward": is_tagged or bool(node.meta.get("autograd_backward")),
            "frames": [(file, int(line), function) for file, line, function in frames],
        }
    )


def _in_bounds(graph: Any, index: Any, size: Any, meaning: str) -> Any:
    views = []
    # Check the source of a view instead: it has the same values, and the view stays a view.
    while _schema_name(index) in _SAME_VALUES:
        views.append(index)
        index = index.args[0]
    safe = _call(graph, torch.ops.cudalens.in_bounds.default, index, size, meaning)
    for view in reversed(views):
        safe = _call(graph, view.target, safe, *view.args[1:], **view.kwargs)
    return safe


def _call(graph: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    node = graph.call_function(target, args, kwargs)
    values, options = map_arg((args, kwargs), _value)
    # Later passes read shape and dtype of a node there.
    node.meta["val"] = target(*values, **options)
    return node


def _value(node: Node) -> Any:
    return node.meta["val"]


def _schema_name(node: Node) -> str:
    return getattr(getattr(node.target, "_schema", None), "name", "")


# --- the op ---------------------------------------------------------------------------------------


def _checked(index: Tensor, size: int, meaning: str) -> Tensor:
    """Queue the check of an index, and return a clamped copy; no host sync.

    Without installed guards, as in code that outlives them, the copy is unchanged.
    """
    past = _installed[-1].past if _installed else None
    if past is None or not index.numel() or not past.can_check(index.device):
        # A copy, because an op without aliases in its schema must not return its argument.
        # Contiguous, as its meta kernel says.
        return index.clone(memory_format=torch.contiguous_format)
    check = _read(meaning)
    need = Within(low=-size if check["wraps"] else 0, high=size - 1, **check["need"])
    op, in_backward, traced = _torch.op_of(check["op"]), check["backward"], check["frames"]
    guard = GUARDS[op][0]
    PENDING.note(index, past.check(op, guard, need, in_backward=in_backward, traced=traced))
    safe = in_bounds(need, index.contiguous())
    return safe.clone() if safe is index else safe


@cache
def _define_op() -> Any:
    """Define ``cudalens::in_bounds`` once for the process: compiled code may outlive the guards."""
    # The cache keeps the library alive: torch removes its op when it is freed.
    library = torch.library.Library("cudalens", "DEF")
    library.define(_SCHEMA)
    library.impl("in_bounds", _checked, "CompositeExplicitAutograd")
    library.impl("in_bounds", lambda index, *_: index.new_empty(index.shape), "Meta")
    return library
