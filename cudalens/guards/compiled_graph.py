"""The pass over a graph that inductor is about to compile: it puts the guards in.

An op that reads or writes by index is given what ``cudalens::in_bounds`` makes of the index, which
has the values looked at later; the call says what they mean.

Not here: that op, and how the pass is installed (``compiled.py``).
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from cudalens.core import _compiler
from cudalens.guards import GUARDS
from cudalens.guards._base import OF_USER, schema_parameters
from cudalens.guards.engine import INDEX_DTYPES, Within

Frames = tuple[tuple[str, int, str], ...]


# --- what is looked at ----------------------------------------------------------------------------


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
"""Ops whose result holds the values of their first argument, each at least once."""
_UNKNOWN_SIZE = 1 << 13
"""In place of a size that only the run of the graph knows."""


@dataclass(frozen=True)
class CompiledCheck:
    """Requirement of an index, as it travels in the compiled code."""

    op: str
    overload: str
    argument: str
    related: str
    dim: int
    wraps: bool
    """Negative values count from the end."""
    item: int | None = None
    """Place in a list of indices."""
    backward: bool = False
    frames: Frames = ()
    """File, line and function of the user's call, outermost first."""


@dataclass(frozen=True)
class _Found:
    """An index in a graph."""

    node: Any
    index: Any
    source: Any
    check: CompiledCheck


def _indices(graph: Any) -> Iterator[_Found]:
    """Yield each integer index of a graph that a kernel of inductor's will use."""
    for node in graph.nodes:
        if node.op != "call_function" or _schema_name(node) not in _OPS:
            continue
        arguments = {
            item.name: item.of(node.args, node.kwargs) for item in schema_parameters(node.target)
        }
        for need in _requirements(node.target, arguments):
            index = arguments[need.argument]
            index = index if need.item is None else index[need.item]
            if _is_index(index):
                yield _Found(node, index, arguments[str(need.of)], _check(node, need))


def _requirements(op: Any, arguments: Mapping[str, Any]) -> Iterator[Within]:
    """Yield what the guards of an op require of a dimension's indices."""
    stand_ins = {name: _stand_in(value) for name, value in arguments.items()}
    for entry in GUARDS.get(op, ()):
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


def _check(node: Any, need: Within) -> CompiledCheck:
    return CompiledCheck(
        op=node.target._schema.name,
        overload=node.target._overloadname,
        argument=need.argument,
        related=str(need.of),
        dim=int(need.dim or 0),
        wraps=need.low < 0,
        item=need.item,
        backward=_is_of_backward(node.meta),
        frames=_frames(node.meta.get("stack_trace") or ""),
    )


def _is_of_backward(meta: Mapping[str, Any]) -> bool:
    """Return whether a node is of a backward pass; torch 2.11 marks it by the tag alone."""
    return bool(meta.get("autograd_backward")) or meta.get("partitioner_tag") == "is_backward"


def _frames(trace: str) -> Frames:
    """Return the user's calls of a node's stack trace, as the compiler noted it."""
    found = re.findall(r'^\s*File "(.+)", line (\d+), in (.+)$', trace, flags=re.MULTILINE)
    return tuple((file, int(line), function) for file, line, function in found)


def _value(node: Any) -> Any:
    return node.meta["val"]


def _is_index(node: Any) -> bool:
    """Return whether a node is an integer tensor that surely has elements.

    The graph of one element of an attention mask, in which nothing can be reduced, holds only
    indices without dimensions; elsewhere the compiler reads those on the host.
    """
    value = getattr(node, "meta", {}).get("val")
    if not isinstance(value, Tensor) or value.dtype not in INDEX_DTYPES or not value.dim():
        return False
    # The size of nonzero's result is not known yet: no reduction may be made of it.
    return not any(_compiler.is_data_dependent(size) or size == 0 for size in value.shape)


# --- the pass -------------------------------------------------------------------------------------


def guard_graph(graph: Any, devices: frozenset[str]) -> None:
    """Have each index of a graph looked at, and brought into bounds."""
    made: dict[Any, Any] = {}
    replaced = []
    for found in list(_indices(graph)):
        if _value(found.index).device.type in devices:
            with graph.inserting_before(found.node):
                bounds = _bounds(graph, found)
                if (found.index, bounds) not in made:  # one of the same bounds is enough
                    made[found.index, bounds] = _in_bounds(graph, found, bounds)
            replaced.append((found, made[found.index, bounds]))
    # Nothing can fail any more.
    for found, index in replaced:
        _replace(found, index)


def _in_bounds(graph: Any, found: _Found, bounds: tuple[Any, Any]) -> Any:
    index, views = found.index, []
    # A view has the same values: looked at before it is spread, an index stays a view.
    while _schema_name(index) in _SAME_VALUES:
        views.append(index)
        index = index.args[0]
    arguments = (index, *bounds, json.dumps(asdict(found.check)))
    safe = _call(graph, torch.ops.cudalens.in_bounds.default, *arguments)
    for view in reversed(views):
        safe = _call(graph, view.target, safe, *view.args[1:], **view.kwargs)
    return safe


def _bounds(graph: Any, found: _Found) -> tuple[Any, Any]:
    """Return the bounds of an index: numbers, or nodes where the size may change."""
    value, dim = _value(found.source), found.check.dim
    size = value.shape[dim] if value.dim() else 1
    if isinstance(size, int):
        return -size if found.check.wraps else 0, size - 1
    size = _call(graph, torch.ops.aten.sym_size.int, found.source, dim)
    low = _call(graph, operator.neg, size) if found.check.wraps else 0
    return low, _call(graph, operator.sub, size, 1)


def _call(graph: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    node = graph.call_function(target, args, kwargs)
    values, options = torch.fx.map_arg((args, kwargs), _value)
    node.meta["val"] = target(*values, **options)
    return node


def _schema_name(node: Any) -> str:
    return getattr(getattr(node.target, "_schema", None), "name", "")


def _replace(found: _Found, index: Any) -> None:
    """Let the op take the index that is in bounds."""
    node, check = found.node, found.check
    slot = next(item for item in schema_parameters(node.target) if item.name == check.argument)
    if check.item is not None:
        arguments = list(slot.of(node.args, node.kwargs))
        arguments[check.item] = index
        index = arguments
    if slot.position < len(node.args):
        node.update_arg(slot.position, index)
    else:
        node.update_kwarg(check.argument, index)
