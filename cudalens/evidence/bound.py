"""Where the size behind a bound was chosen.

From the tensor with the size, the search follows the recorded calls back to the first one without
an input of that size: a factory, a slice, a layer.  From there it follows the source to the line
that chose the number.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple
from weakref import ref

from torch import Tensor, nn

from cudalens.core._torch import base_of, meta_of
from cudalens.core.evidence_types import BoundOrigin
from cudalens.core.torch_functions import Trait, functions
from cudalens.diagnosis.user_code import last_name
from cudalens.evidence.call_stack import tensors_and_modules
from cudalens.evidence.program import (
    Program,
    Spot,
    is_empty_container,
    shape_argument,
    size_argument,
    takes_sizes,
)
from cudalens.recorder.calls import Recorded
from cudalens.recorder.history import Snapshot
from cudalens.recorder.sites import entries_of
from cudalens.recorder.tensor_refs import Ref
from cudalens.source.module_path import container_of, module_at, spelled, tensors_below
from cudalens.source.running_node import Running, running
from cudalens.source.stack import namespaces, place_of

_MAX_STEPS = 24
_SIZED_BY_WEIGHT = functions(Trait.SIZED_BY_WEIGHT)


class _Size(NamedTuple):
    """A size of a tensor, and its dimension if known."""

    tensor: Ref
    dim: int | None


class _Way(NamedTuple):
    """Where the recorded calls that passed a size on began."""

    end: _Size
    """The first tensor: made by ``setter``, or by no recorded call."""
    setter: Recorded | None = None
    """The call that introduced the size: none of its inputs has it."""


def bound_origin(
    tensor: Tensor | None,
    *,
    size: int,
    dim: int | None,
    snapshot: Snapshot | None,
    frames: Sequence[FrameType],
    line: Running | None,
) -> BoundOrigin | None:
    """Return where a size was chosen, ``None`` if that is not proven.

    Args:
        tensor: the tensor with the size, ``None`` if the size was passed as a number.
        dim: its dimension, if known.
        snapshot: the recorded calls, ``None`` without a recorder.
        frames: the stack of the failure, outermost first.
        line: the user's running line.
    """
    program = Program.of(frames)
    if tensor is None:
        return _of_number(line, size, program)
    if dim is None:
        dims = [at for at, it in enumerate(tensor.shape) if it == size]
        dim = dims[0] if len(dims) == 1 else None
    way = _Way(_Size(ref(_shown_whole(tensor)), dim))
    if snapshot is not None:
        way = _way_of_size(way.end, size, snapshot)
    end = way.end.tensor()
    holder = _Holder() if end is None else _holder(end, frames)
    made = None
    if snapshot is not None:
        made = _made_in(way, snapshot, program)
    if made is None and way.setter is None:
        made = _in_source(holder, size, way.end.dim, program)
    if made is None:
        return None
    number, key = size_argument(made.node, way.end.dim), None
    if number is None and way.end.dim is not None:
        number, key = shape_argument(made.node), way.end.dim
    chosen: Spot | None = made
    if number is not None:
        chosen = program.chosen(Spot(made.file, number), made, size, key=key)
    if chosen is None:
        return None
    # A call that computes its size has chosen it, which only the recording shows.
    is_computed = way.setter is not None and not takes_sizes(made.node)
    if isinstance(made.node, ast.Call) and way.setter is not None:
        # A constructor or library function that computes the size is not the user's line.
        is_computed &= last_name(made.node.func) == way.setter.api.stem
    is_taken = number is None and not is_computed and isinstance(made.node, ast.Call)
    is_set = not (chosen.is_read or is_taken)
    chosen = chosen if is_set else made
    is_other = (chosen.file, chosen.line) != (made.file, made.line)
    return BoundOrigin(
        at=program.span(chosen),
        expression=program.text(chosen),
        holder=holder.text,
        made=program.line(made) if is_other else None,
        made_by=program.text(made) if is_other else None,
        is_set=is_set,
    )


# --- recorded calls -------------------------------------------------------------------------------


def _shown_whole(tensor: Tensor) -> Tensor:
    """Return the base of a view with all of its elements; other tensors unchanged.

    Before torch 2.9, an index that starts with a colon makes such a view, which no mode sees.
    """
    base = base_of(tensor)
    if base is None:
        return tensor
    whole, shown = meta_of(base), meta_of(tensor)
    is_whole = (whole.shape, whole.stride) == (shown.shape, shown.stride)
    return base if is_whole else tensor


def _way_of_size(start: _Size, size: int, snapshot: Snapshot) -> _Way:
    """Follow the calls that passed a size on back to the one that introduced it."""
    at, before = start, None
    for _ in range(_MAX_STEPS):
        call = snapshot.maker(at.tensor, before)
        if call is None or call.reads is None:
            break
        before = call.seq
        if any(item is at.tensor for item in call.inputs):
            continue  # the call returned its input
        holders = _holders(call, at, size, snapshot)
        if holders is None or len(holders) > 1:
            # Several inputs have the size, or a freed one may have had it.
            return _Way(start)
        if not holders:
            return _Way(at, call)
        at = holders[0]
    return _Way(at)


def _holders(call: Recorded, at: _Size, size: int, snapshot: Snapshot) -> list[_Size] | None:
    """Return the inputs of a call that the size may come from, ``None`` if one is unknown."""
    shapes = {id(it): (it, snapshot.meta_of(it)[0]) for it in call.inputs}
    if any(shape is None for _, shape in shapes.values()):
        return None
    if call.api.stem.startswith("new_"):
        return []  # `new_zeros` and the like take only dtype and device from it
    own = snapshot.meta_of(at.tensor)[0]
    if call.api.stem in _SIZED_BY_WEIGHT and len(call.inputs) > 1 and own is not None:
        weight = call.inputs[1]
        of_weight = 1 if call.api.stem == "embedding" else 0
        place = len(own) - 1
        if call.api.stem.startswith("conv"):
            place = len(own) - int(call.api.stem[4]) - 1
        if at.dim is not None and at.dim % len(own) == place:
            return [_Size(weight, of_weight)]
    holders = []
    for item, shape in shapes.values():
        dims = [place for place, it in enumerate(shape) if it == size]
        if dims:
            is_same = own is not None and len(shape) == len(own) and at.dim in dims
            holders.append(_Size(item, at.dim if is_same else dims[0] if len(dims) == 1 else None))
    return holders


def _made_in(way: _Way, snapshot: Snapshot, program: Program) -> Spot | None:
    """Return the user's call that set the size; for a layer, the one that filled its weight."""
    call = way.setter
    if call is None:
        writes = snapshot.writes_to(way.end.tensor)
        # A layer initializes its parameters in its constructor.
        is_parameter = isinstance(way.end.tensor(), nn.Parameter)
        is_first = bool(writes) and writes[0][1].before == 0
        call = writes[0][0] if is_first and is_parameter else None
    entries = [] if call is None else entries_of(call.site)
    if call is None or not entries:
        return None
    made = program.running(running(place_of(entries[-1])))
    if made is None or way.setter is not None:
        return made
    # For a model older than the recording, the first recorded write is an optimizer step or a later
    # ``nn.init.normal_``.
    is_first = call.reads is not None and isinstance(made.node, ast.Call)
    name = last_name(made.node.func) or "" if isinstance(made.node, ast.Call) else ""
    return made if is_first and not name.endswith("_") else None


# --- what has the size, in the source -------------------------------------------------------------


class _Holder(NamedTuple):
    """The object with the size in the user's program."""

    text: str | None = None
    """The user's expression: ``net.head``."""
    layer: str = ""
    """The class of the torch layer, empty for a tensor outside torch layers."""
    owner: str | None = None
    """The user's class that it is an attribute of, ``None`` for a variable."""
    name: str = ""
    """The attribute or the variable."""


def _holder(tensor: Tensor, frames: Sequence[FrameType]) -> _Holder:
    """Return the layer of a tensor, or the tensor itself, with the user's name."""
    for name, value in tensors_and_modules(namespaces(frames)):
        if name.startswith("_"):
            continue
        if value is tensor:
            return _Holder(name, name=name)
        for path, item in tensors_below(value):
            if item is tensor:
                return _of_module(name, value, path)
    return _Holder()


def _of_module(name: str, root: object, path: str) -> _Holder:
    """Return the holder of the parameter or buffer at a path."""
    layer, module = "", path.rpartition(".")[0]
    kind = type(module_at(root, module))
    # A ParameterList is made empty, so its constructor has no size.
    is_container = kind.__module__ == "torch.nn.modules.container"
    if kind.__module__.startswith("torch.nn.modules.") and not is_container:
        layer, path = kind.__name__, module
    text = spelled(name, path)
    holder, _ = container_of(path)
    if not holder:
        return _Holder(text, layer, name=name)
    owner, _, attribute = holder.rpartition(".")
    return _Holder(text, layer, type(module_at(root, owner)).__name__, attribute)


def _in_source(holder: _Holder, size: int, dim: int | None, program: Program) -> Spot | None:
    """Return the call that made a layer or tensor before the recording began."""
    spots: list[Spot] = []
    for value in program.values_of(holder.owner, holder.name) if holder.name else ():
        if holder.layer:
            spots += program.layers(value, holder.layer, size)
            continue
        filled = [value]
        if is_empty_container(value.node):
            filled = [*program.appended(holder.owner, holder.name)]
        spots += [_sizing_part(it, dim) for it in filled]
    spots = list(dict.fromkeys(spots))
    is_one = len(spots) == 1 and isinstance(spots[0].node, ast.Call | ast.Subscript)
    return spots[0] if is_one else None


def _sizing_part(value: Spot, dim: int | None) -> Spot:
    """Return the part of an expression that sets the size, else the whole.

    A slice, or a call with the size: ``w[:5]`` in ``nn.Parameter(w[:5].clone())``.
    """
    node: ast.AST = value.node
    while isinstance(node, ast.Call) and size_argument(node, dim) is None:
        is_parameter = last_name(node.func) == "Parameter" and node.args
        node = node.args[0] if is_parameter else getattr(node.func, "value", node.func)
    is_slice = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
    return Spot(value.file, node) if isinstance(node, ast.Call) or is_slice else value


def _of_number(line: Running | None, size: int, program: Program) -> BoundOrigin | None:
    """Return where a number was chosen that is an argument of the running call."""
    call = None if line is None else program.running(line)
    number = None if call is None else size_argument(call.node, None)
    if call is None or number is None or isinstance(number, ast.Constant):
        return None
    chosen = program.chosen(Spot(call.file, number), call, size)
    if chosen is None or chosen._replace(is_read=False) == call:
        return None
    return BoundOrigin(
        at=program.span(chosen),
        expression=program.text(chosen),
        holder=ast.unparse(number),
        is_set=not chosen.is_read,
    )
