"""The pass over a graph that inductor is about to compile: it puts the guards in.

An op that reads or writes by index is given what ``cudalens::in_bounds`` makes of the index, which
has the values looked at later; the call says what they mean.

Not here: that op, and how the pass is installed (``compiled.py``).
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cudalens.core import _compiler
from cudalens.guards import GUARDS
from cudalens.guards._base import OF_USER, ArgumentSlot, full_name, schema_parameters
from cudalens.guards.engine import INDEX_DTYPES, Within

_OPS = frozenset(
    f"aten::{name}"
    for name in (
        *("gather", "index_select", "scatter", "scatter_add", "scatter_reduce", "embedding"),
        *("index", "index_put", "_unsafe_index_put"),
    )
)
"""Guarded ops that inductor writes kernels for; it leaves the others to torch's own.

Not ``_unsafe_index``, with which the compiler reads by what it computed from shapes, as
``interpolate`` does."""
_SAME_VALUES = frozenset(
    f"aten::{name}"
    for name in ("expand", "unsqueeze", "squeeze", "view", "reshape", "permute", "clone", "alias")
)
"""Ops whose result has the values of their first argument, each at least once."""
_UNKNOWN_SIZE = 1 << 13
"""In place of a size that only the run of the graph knows."""


def guard_graph(graph: Any, devices: frozenset[str]) -> None:
    """Have each index of a graph looked at, and brought into bounds."""
    safe: dict[Any, Any] = {}
    replaced = []
    for node in list(graph.nodes):
        for need in _requirements(node):
            slot = _slot(node, need.argument)
            index = slot.of(node.args, node.kwargs)
            index = index if need.item is None else index[need.item]
            if not _is_index(index) or _value(index).device.type not in devices:
                continue
            with graph.inserting_before(node):
                bounds = _bounds(graph, node, need)
                if (index, bounds) not in safe:  # one of the same bounds is enough
                    safe[index, bounds] = _in_bounds(graph, index, bounds, _meaning(node, need))
            replaced.append((node, slot, need.item, safe[index, bounds]))
    # Nothing can fail any more.
    for node, slot, item, index in replaced:
        node.args, node.kwargs = slot.put(node.args, node.kwargs, index, item)


def _requirements(node: Any) -> Iterator[Within]:
    """Yield what guards require of the integer indices of an op that gets a kernel."""
    if node.op != "call_function" or _schema_name(node) not in _OPS:
        return
    slots = schema_parameters(node.target)
    stand_ins = {slot.name: _stand_in(slot.of(node.args, node.kwargs)) for slot in slots}
    for entry in GUARDS.get(node.target, ()):
        if entry.frequency != OF_USER:
            need = entry.requires(*(stand_ins[name] for name in entry.parameters))
            for item in need if isinstance(need, list) else [need]:
                if isinstance(item, Within) and item.of is not None and item.dim is not None:
                    yield item


def _stand_in(value: Any, unknown: int = _UNKNOWN_SIZE) -> Any:
    """Return an argument with the sizes of the compiler's example in place of nodes."""
    if isinstance(value, (list, tuple)):
        # Indices broadcast: of one element, one of unknown size fits the others.
        return [_stand_in(item, unknown=1) for item in value]
    value = _value(value) if isinstance(value, torch.fx.Node) else value
    if isinstance(value, Tensor):
        sizes, strides = (
            [_stand_in(number, unknown) for number in numbers]
            for numbers in (value.shape, value.stride())
        )
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt):
        return unknown if _compiler.is_data_dependent(value) else value.node.hint
    return value


def _is_index(node: Any) -> bool:
    """Return whether a node is an integer tensor that surely has elements.

    The graph of one element of an attention mask, in which nothing can be reduced, has only
    indices without dimensions; elsewhere the compiler reads those on the host.
    """
    value = getattr(node, "meta", {}).get("val")
    if not isinstance(value, Tensor) or value.dtype not in INDEX_DTYPES or not value.dim():
        return False
    # The size of nonzero's result is not known yet: no reduction may be made of it.
    return not any(_compiler.is_data_dependent(size) or size == 0 for size in value.shape)


def _meaning(node: Any, need: Within) -> str:
    """Return op, requirement and lines of a check, as they travel in the compiled code."""
    # torch 2.11 marks backward by the tag alone.
    is_tagged = node.meta.get("partitioner_tag") == "is_backward"
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'^\s*File "(.+)", line (\d+), in (.+)$', trace, flags=re.MULTILINE)
    fields = ("argument", "item", "of", "dim", "why")
    return json.dumps(
        {
            "op": full_name(node.target),
            "need": {name: getattr(need, name) for name in fields},
            "backward": is_tagged or bool(node.meta.get("autograd_backward")),
            "frames": [(file, int(line), function) for file, line, function in frames],
        }
    )


def _bounds(graph: Any, node: Any, need: Within) -> tuple[Any, Any]:
    """Return the bounds of an index: numbers, or nodes where the size may change."""
    source = _slot(node, str(need.of)).of(node.args, node.kwargs)
    value, wraps = _value(source), need.low < 0
    size = value.shape[need.dim] if value.dim() else 1
    if isinstance(size, int):
        return -size if wraps else 0, size - 1
    size = _call(graph, torch.ops.aten.sym_size.int, source, need.dim)
    low = _call(graph, operator.neg, size) if wraps else 0
    return low, _call(graph, operator.sub, size, 1)


def _in_bounds(graph: Any, index: Any, bounds: tuple[Any, Any], meaning: str) -> Any:
    views = []
    # A view has the same values: looked at before it is spread, an index stays a view.
    while _schema_name(index) in _SAME_VALUES:
        views.append(index)
        index = index.args[0]
    safe = _call(graph, torch.ops.cudalens.in_bounds.default, index, *bounds, meaning)
    for view in reversed(views):
        safe = _call(graph, view.target, safe, *view.args[1:], **view.kwargs)
    return safe


def _call(graph: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    node = graph.call_function(target, args, kwargs)
    values, options = torch.fx.map_arg((args, kwargs), _value)
    node.meta["val"] = target(*values, **options)
    return node


def _slot(node: Any, name: str) -> ArgumentSlot:
    return next(slot for slot in schema_parameters(node.target) if slot.name == name)


def _value(node: Any) -> Any:
    return node.meta["val"]


def _schema_name(node: Any) -> str:
    return getattr(getattr(node.target, "_schema", None), "name", "")
