"""The recorded calls behind a torch exception.

A write to a saved tensor, a freed graph, a detached graph, a lost batch dimension.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from torch import Tensor

from cudalens.core.evidence_types import (
    EarlierShape,
    FreedGraph,
    GraphCut,
    InPlaceChange,
    LostDimension,
    Regrouped,
)
from cudalens.core.graph_types import AutogradNeighbourhood
from cudalens.core.report_types import LineRef
from cudalens.core.user_objects import is_module, is_tensor
from cudalens.evidence.call_stack import held_name, tensors_and_modules
from cudalens.evidence.failure import FailureContext
from cudalens.evidence.freed_graph import FREED, MODIFIED, freed_graph, is_shared, stale_lines
from cudalens.evidence.recorded_way import (
    earlier_shape,
    frozen_parameters,
    graph_cut,
    lost_dimension,
    number_cut,
    regrouped,
)
from cudalens.evidence.value_facts import named_tensors
from cudalens.recorder.calls import Recorded
from cudalens.recorder.saved_tensor import find_modified
from cudalens.source.files import is_user_file
from cudalens.source.module_path import spelled, tensors_below
from cudalens.source.stack import namespaces

_NAMED = 4
"""How many frozen parameters are looked up by name in the user's variables."""
_SHAPE = re.compile(r"modified by an inplace operation: \[[\w.]+ \[([\d, ]*)\]\]")
_OF_NUMBER = re.compile(r"^'(?:float|int)' object has no attribute 'backward'")
_WITHOUT_GRAPH = re.compile(r"^element (\d+) of tensors does not require grad")
_OF_SHAPES = re.compile(r"\bsizes?\b|\bshapes?\b|[Dd]imension|\b\dD\b|must match|batch_size")
_ROWS = re.compile(r"^Expected input batch_size \((\d+)\) to match target batch_size \((\d+)\)")


def change_or_freed(
    failure: FailureContext,
) -> tuple[InPlaceChange | None, FreedGraph | None]:
    """Return the write to a saved tensor, or the backward pass that freed it."""
    message, recorder, limits = failure.message, failure.recorder, failure.limits
    values, node, trace = failure.values, failure.call.node, failure.trace
    here = failure.site.source
    find = partial(freed_graph, values, recorder, trace, here)
    if MODIFIED in message:
        write = limits.attempt("writer", lambda: find_modified(recorder.snapshot(), message, node))
        if write is None:
            limits.add(recorder.beyond_ring("the op that modified the tensor in place"))
            return None, None
        step, call = write
        lines = partial(stale_lines, values, recorder.snapshot(), trace, here, call)
        way = partial(find, node, call)
        changed = replace(
            step,
            name=_parameter_name(call, failure),
            is_shared=limits.attempt("other names", partial(is_shared, call), bool),
            stale=limits.attempt("lines to run again", lines, tuple),
        )
        return changed, None if node is None else limits.attempt("way to the change", way)
    if FREED not in message:
        return None, None
    freed = None if node is None else limits.attempt("freed graph", partial(find, node))
    if freed is None:
        limits.add(recorder.beyond_ring("the op whose saved tensors were freed"))
    return None, freed


def _parameter_name(write: Recorded, failure: FailureContext) -> str | None:
    """Return the user's name for the only parameter that a call wrote to and backward needs."""
    match = _SHAPE.search(failure.message)
    if match is None:
        return None
    shape = tuple(int(size) for size in re.findall(r"\d+", match[1]))
    # Autograd saves the weight of a linear layer transposed.
    shapes = (shape, shape[::-1])
    living = [item.tensor() for item in write.written]
    ids = {
        id(item)
        for item in living
        if is_tensor(item) and item.is_leaf and tuple(item.shape) in shapes
    }
    names: dict[int, str] = {}
    for name, value in tensors_and_modules(namespaces(failure.frames)):
        if is_module(value) and not name.startswith("_"):
            for path, item in tensors_below(value, ["_parameters"]):
                if id(item) in ids:
                    names.setdefault(id(item), spelled(name, path))
    return next(iter(names.values())) if len(ids) == len(names) == 1 else None


def cut_of_graph(failure: FailureContext) -> GraphCut | None:
    """Return what detached the tensor or number that ``backward`` was called on."""
    if _OF_NUMBER.search(failure.message):
        names = [item.name for item in failure.found.refused_arguments.odd_arguments]
        return number_cut(names[0], failure.recorder.snapshot()) if names else None
    tensor = _without_graph(failure)
    return None if tensor is None else graph_cut(tensor, failure.recorder.snapshot())


def _without_graph(failure: FailureContext) -> Tensor | None:
    """Return the tensor without a graph that ``backward`` was called on."""
    match = _WITHOUT_GRAPH.search(failure.message)
    keys = ("self", *(f"{name}[{match[1]}]" for name in ("tensors", "outputs"))) if match else ()
    return next((failure.values[key] for key in keys if key in failure.values), None)


def frozen(failure: FailureContext) -> tuple[tuple[str, ...], LineRef | None]:
    """Name the parameters behind the tensor that ``backward`` was called on, if all are frozen.

    Also return the line that froze all of them.
    """
    tensor, recorder = _without_graph(failure), failure.recorder
    if tensor is None:
        return (), None
    found = frozen_parameters(tensor, recorder.snapshot())
    # The rest is only counted, because the lookup is slow in a large model.
    held = [held_name(item, failure.frames) for item in found[:_NAMED]]
    held += [failure.names.get(id(item)) for item in found[_NAMED:]]
    names = tuple(name or "a parameter" for name in held)
    reader = recorder.snapshot().reader
    lines = {reader.line(site) for site in recorder.frozen_at(found)}
    return names, lines.pop() if len(lines) == 1 else None


def lost_batch(failure: FailureContext) -> LostDimension | None:
    """Return the line that removed the batch dimension of size 1 from a tensor of the call."""
    if not _OF_SHAPES.search(failure.message.partition("\n")[0]):
        return None
    snapshot, node = failure.recorder.snapshot(), failure.call.node
    forward = None if node is None else snapshot.forward_call(node.sequence_nr)
    living = () if forward is None else (item() for item in forward.inputs)
    tensors = [*failure.values.values(), *(item for item in living if item is not None)]
    return lost_dimension(tensors, snapshot)


def other_shapes(failure: FailureContext) -> tuple[EarlierShape, ...]:
    """Return the variables of the line that had one other shape in all earlier calls.

    The last batch of a loader is often smaller.
    """
    snapshot = failure.recorder.snapshot()
    users = (it.f_code for it in reversed(failure.frames) if is_user_file(it.f_code.co_filename))
    code = next(users, None)
    every = (
        (name, it, earlier_shape(name, it, code, snapshot)) for name, it in named_tensors(failure)
    )
    return tuple(EarlierShape(name, tuple(it.shape), *found) for name, it, found in every if found)


def other_rows(failure: FailureContext) -> Regrouped | None:
    """Return the line that changed the number of rows, which the target still has."""
    match = _ROWS.search(failure.message)
    if match is None:
        return None
    found, wanted = int(match[1]), int(match[2])
    snapshot = failure.recorder.snapshot()
    inputs = (it for it in failure.values.values() if it.dim() and it.shape[0] == found)
    return next(filter(None, (regrouped(it, wanted, snapshot) for it in inputs)), None)


def with_marked_write(failure: FailureContext) -> AutogradNeighbourhood:
    """Mark the write's node in the graph, if its op and line are unique."""
    graph: AutogradNeighbourhood = failure.found.graph
    modified: InPlaceChange | None = failure.found.modified
    step = None if modified is None else modified.modified
    if step is None or step.op is None or step.source is None:
        return graph
    op, line = step.op, step.source
    writers = [item.id for item in graph.nodes if (item.op, item.source) == (op, line)]
    if len(writers) != 1:
        return graph
    marked = tuple(
        replace(item, role="bad_input", name=line.text or op) if item.id in writers else item
        for item in graph.nodes
    )
    return replace(graph, nodes=marked)
