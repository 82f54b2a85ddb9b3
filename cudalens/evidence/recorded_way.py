"""The recorded calls behind a tensor: what cut it off its graph, or took its batch dimension.

No value is read: the calls have shapes, and the numbers of the autograd nodes that they made.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import CodeType
from weakref import ref

from torch import Tensor, nn

from cudalens.core._torch import no_dispatch_modes, plain_torch
from cudalens.core.evidence_types import GraphCut, LostDimension, Regrouped
from cudalens.core.report_types import LineRef
from cudalens.core.torch_functions import Trait, functions
from cudalens.diagnosis.user_code import last_name, statement_of
from cudalens.recorder.calls import FROM_PYTHON, Recorded
from cudalens.recorder.history import Snapshot
from cudalens.recorder.sites import RawSite, Site, entries_of, shared_sites
from cudalens.recorder.tensor_refs import Ref
from cudalens.source.locate import span_of_lines
from cudalens.source.running_node import FUNCTIONS, has_line, parsed_source, running
from cudalens.source.stack import StackEntry, place_of

_MAX_CALLS = 500
"""Calls that are looked at."""
_MAX_CUTS = 3
_NEVER_ALONE = ("no_grad", "detach", "data", "tensor")
"""Several lines of these: one of them, or a layer that is frozen, may be meant to cut."""
_CUTTING = functions(Trait.CUTS)
_NUMBERS = functions(Trait.NUMBER)
_OF_SIZE = ("new_", "bernoulli", "rand", "normal", "size")
"""Functions that give numbers of their own, in the shape of a tensor."""


def _walk(
    tensors: Iterable[Ref],
    snapshot: Snapshot,
    visit: Callable[[Ref, Recorded | None], Iterable[Ref]],
) -> None:
    """Go from tensors to the calls that made them, nearest first, and on to what those read.

    Args:
        visit: is given a tensor and its maker, and returns the inputs to go on with.  Data has no
            maker, and neither has what is older than the recording.
    """
    waiting: list[tuple[Ref, int | None]] = [(item, None) for item in tensors]
    seen: set[tuple[int, int]] = set()
    # The list grows while it is read, so the walk is breadth first.
    for tensor, before in waiting:
        call = snapshot.newest(tensor, before)
        key = (id(tensor), -1 if call is None else call.seq)
        if key in seen:
            continue
        seen.add(key)
        inputs = visit(tensor, call)
        if len(seen) == _MAX_CALLS:
            return
        waiting += [(item, call.seq) for item in inputs if call is not None]


def graph_cut(tensor: Tensor, snapshot: Snapshot) -> GraphCut | None:
    """Return the line that cut a tensor without a graph off the graph that it is made of.

    The op is ``no_grad`` where a function of floats recorded no node, and ``no_grad block`` where
    the line is that of a ``with torch.no_grad():`` around the call.  ``None`` where lines cut in
    different ways, and where a frozen parameter may be the reason, or a tensor that is gone and
    that no recorded call made.
    """
    cuts: dict[LineRef | None, str] = {}
    unclear: list[Ref] = []

    def visit(current: Ref, call: Recorded | None) -> list[Ref]:
        living = current()
        is_parameter = isinstance(living, nn.Parameter)
        if call is None or is_parameter:
            unclear.extend([current] * (is_parameter or living is None))
            return []
        graphs = [_is_of_graph(item, call.seq, snapshot) for item in call.inputs]
        stem = call.api.stem
        if any(graphs) and not (stem.startswith(_OF_SIZE) or stem.endswith("_like")):
            is_named = stem in _CUTTING or call.api.is_backward or not _is_float(current, snapshot)
            op = "tensor" if stem in FROM_PYTHON else stem if is_named else "no_grad"
            block = _block_without_grad(call.site) if op == "no_grad" else None
            cuts[block or snapshot.reader.line(call.site)] = f"{op} block" if block else op
            return []  # with a graph here, there is one behind it too
        return [item for item, has_graph in zip(call.inputs, graphs, strict=True) if not has_graph]

    with plain_torch(), no_dispatch_modes():
        _walk([ref(tensor)], snapshot, visit)
    lines = sorted(filter(None, cuts), key=lambda it: it.line or 0)
    if unclear or len(lines) < len(cuts) or not 0 < len(lines) <= _MAX_CUTS:
        return None
    op, *more = set(cuts.values())
    if more or (len(lines) > 1 and op in _NEVER_ALONE):
        return None
    return GraphCut(op=op, line=lines[-1], others=tuple(lines[:-1]))


def _block_without_grad(site: RawSite) -> LineRef | None:
    """Return the innermost ``with torch.no_grad():`` that a recorded call ran in, if one is seen.

    What a module or a function does in it is the same with gradients on: its line is not to be
    changed.  Of a function the callers are not recorded, of a module they are.
    """
    for entry in reversed(entries_of(site)):
        place = place_of(entry)
        tree = parsed_source(place.filename) if place.is_user else None
        blocks = (it for it in (ast.walk(tree) if tree else ()) if isinstance(it, ast.With))
        around = [it.lineno for it in blocks if _is_without_grad(it, place.lineno)]
        if around:
            line = span_of_lines(place.filename, max(around)).ref
            return replace(line, text=(line.text or "").rstrip(":"))
    return None


def _is_without_grad(block: ast.With, line: int) -> bool:
    """Return whether a statement runs a line of its body with gradients off."""
    managers = (it.context_expr for it in block.items if isinstance(it.context_expr, ast.Call))
    if not any(last_name(it.func) in ("no_grad", "inference_mode") for it in managers):
        return False
    # A function that is defined in the block may be called behind it.
    inner = (it for it in ast.walk(block) if isinstance(it, FUNCTIONS))
    return has_line(block, line) and not any(has_line(it, line) for it in inner)


def frozen_parameters(tensor: Tensor, snapshot: Snapshot) -> list[nn.Parameter]:
    """Return the parameters that a tensor is made of, where none of them requires grad.

    Empty where one does, or did when it was read, and where a cut may be the reason.
    """
    found: dict[int, nn.Parameter] = {}
    others: list[Ref] = []

    def visit(current: Ref, call: Recorded | None) -> Sequence[Ref]:
        living = current()
        if isinstance(living, nn.Parameter):
            found[id(living)] = living
            return ()
        if call is None:
            return ()
        others.extend(item for item in call.inputs if _is_of_graph(item, call.seq, snapshot))
        return call.inputs

    with plain_torch(), no_dispatch_modes():
        _walk([ref(tensor)], snapshot, visit)
    is_known = not others and not any(item.requires_grad for item in found.values())
    return list(found.values()) if is_known else []


def sources_of(tensor: Tensor, snapshot: Snapshot) -> list[Tensor]:
    """Return a tensor and the living ones that have led to it, nearest first."""
    living = (it() for it in refs_of(tensor, snapshot))
    return [it for it in living if it is not None]


def refs_of(tensor: Tensor, snapshot: Snapshot) -> list[Ref]:
    """Return a tensor and all that have led to it, dead ones too, nearest first."""
    found: dict[int, Ref] = {}

    def visit(current: Ref, call: Recorded | None) -> Sequence[Ref]:
        found.setdefault(id(current), current)
        return () if call is None else call.inputs

    _walk([ref(tensor)], snapshot, visit)
    return list(found.values())


def number_cut(name: str, snapshot: Snapshot) -> GraphCut | None:
    """Return the last line that gave a variable the number of a tensor with a graph."""
    for call in reversed(snapshot.calls):
        if call.api.stem not in _NUMBERS or not call.inputs:
            continue
        line = snapshot.reader.line(call.site)
        match statement_of(line.text if line is not None else None):
            case ast.Assign(targets=[target]) | ast.AugAssign(target=target):
                given = ast.unparse(target)
            case _:
                continue
        if line is None or given != name:
            continue
        is_cut = _is_of_graph(call.inputs[0], call.seq, snapshot)
        return GraphCut(op="item", line=line) if is_cut else None
    return None


def _is_float(tensor: Ref, snapshot: Snapshot) -> bool:
    dtype = snapshot.meta_of(tensor)[1]
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)


def _is_of_graph(tensor: Ref, before: int, snapshot: Snapshot) -> bool:
    """Return whether a tensor had a graph, or required grad, when call ``before`` read it."""
    call, living = snapshot.newest(tensor, before), tensor()
    if living is not None and living.is_leaf:
        return living.requires_grad
    return call is not None and call.last_nr > call.first_nr and _is_float(tensor, snapshot)


def lost_dimension(tensors: Iterable[Tensor], snapshot: Snapshot) -> LostDimension | None:
    """Return the ``squeeze`` behind tensors that took the dimension of a batch of one away.

    It is one where an earlier call of its line had a larger batch, and left its dimension.
    """
    lost: list[LostDimension] = []

    def visit(current: Ref, call: Recorded | None) -> Sequence[Ref]:
        if call is None or lost:
            return ()
        if call.api.stem == "squeeze":
            lost.extend(_lost_by(call, snapshot))
        return call.inputs

    with plain_torch(), no_dispatch_modes():
        _walk(map(ref, tensors), snapshot, visit)
    return next(iter(lost), None)


def regrouped(tensor: Tensor, rows: int, snapshot: Snapshot) -> Regrouped | None:
    """Return the ``view`` behind a tensor that made its rows of ``rows`` others."""
    found: list[Regrouped] = []

    def visit(current: Ref, call: Recorded | None) -> Sequence[Ref]:
        if call is None or found:
            return ()
        line, (old, new) = snapshot.reader.line(call.site), _shapes(call, snapshot)
        is_view = call.api.stem in ("view", "reshape") and old[:1] != new[:1]
        if is_view and line is not None and (old[:1], new[:1]) == ((rows,), tensor.shape[:1]):
            found.append(Regrouped(line=line, before=old, after=new))
        return call.inputs

    with plain_torch(), no_dispatch_modes():
        _walk([ref(tensor)], snapshot, visit)
    return next(iter(found), None)


def earlier_shape(
    name: str, tensor: Tensor, code: CodeType | None, snapshot: Snapshot
) -> tuple[tuple[int, ...], int] | None:
    """Return the one shape that a variable had whenever its call ran before, and how often.

    ``None`` where it had several, or this one's, and where a call of the same place may have given
    another variable its tensor.

    Args:
        name: of the variable.
        code: of the frame that failed.
    """
    own = ref(tensor)
    made = snapshot.maker(own)
    if made is None or not _assigns(made, name, code):
        return None
    at = next(at for at, item in enumerate(made.outputs) if item is own)
    way = _way(made.site)
    calls = [
        call
        for call in snapshot.calls
        if call.seq <= made.seq
        and call.api.func is made.api.func
        and len(call.outputs) == len(made.outputs)
        and _way(call.site) == way
    ]
    # A layer that calls a function twice gives the variable only one of the two results.
    layers = [id(_whole_layer(call.site)) for call in calls if not isinstance(call.site, tuple)]
    earlier = calls[:-1]
    is_alive = any(call.outputs[at]() is not None for call in earlier)
    if is_alive or len(layers) > len({*layers}):
        return None
    shapes = [tuple(call.metas[at][0] or ()) for call in earlier]
    is_other = len({*shapes}) == 1 and len(shapes[0]) == tensor.dim() and shapes[0] != tensor.shape
    return (shapes[0], len(shapes)) if is_other else None


def _assigns(made: Recorded, name: str, code: CodeType | None) -> bool:
    """Return whether ``name = call(...)`` of a frame's own code made a tensor, with no other call.

    A layer of torch's is one call, whatever it calls.
    """
    entries = entries_of(made.site)
    if not entries or entries[-1].code is not code:
        return False
    run = running(place_of(entries[-1]))
    statement, call = run.statement, run.node
    if not isinstance(statement, ast.Assign) or not isinstance(call, ast.Call):
        return False
    targets = {
        node.id
        for it in statement.targets
        for node in ast.walk(it)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    is_direct = not isinstance(made.site, tuple) or last_name(call.func) == made.api.stem
    return statement.value is call and name in targets and is_direct


def _way(site: RawSite) -> tuple[list[StackEntry], list[int]]:
    """Return the lines that led to a place, and the modules that were running."""
    modules = [None if it.module is None else it.module() for it in shared_sites(site)]
    return entries_of(site), [*map(id, modules)]


def _whole_layer(site: Site | None) -> Site | None:
    """Return the outermost of the layers that one call of the user's runs."""
    while site is not None and site.outer is not None:
        if (site.outer.code, site.outer.lasti) != (site.code, site.lasti):
            break
        site = site.outer
    return site


def flattened(snapshot: Snapshot) -> Regrouped | None:
    """Return the last recorded call, where it made one row of features of each image."""
    call = snapshot.calls[-1] if snapshot.calls else None
    line = None if call is None else snapshot.reader.line(call.site)
    if call is None or line is None or call.api.stem not in ("flatten", "view", "reshape"):
        return None
    old, new = _shapes(call, snapshot)
    is_flat = len(old) == 4 and len(new) == 2 and old[0] == new[0]
    return Regrouped(line=line, before=old, after=new) if is_flat else None


def _lost_by(call: Recorded, snapshot: Snapshot) -> Iterator[LostDimension]:
    line, (old, new) = snapshot.reader.line(call.site), _shapes(call, snapshot)
    for other in snapshot.calls if line is not None and old[:1] == (1,) else ():
        if other.seq >= call.seq or other.api.func is not call.api.func:
            continue
        whole, result = _shapes(other, snapshot)
        is_alike = whole[1:] == old[1:] and len(result) == len(new) + 1 and result[:1] == whole[:1]
        if line and is_alike and snapshot.reader.line(other.site) == line:
            yield LostDimension(line=line, before=old, after=new, earlier=(whole, result))
            return


def _shapes(call: Recorded, snapshot: Snapshot) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the argument and the result; empty where they are not known."""
    # A call such as torch.arange has no argument, one that only writes no result.
    old = next((tuple(meta[0] or ()) for meta in map(snapshot.meta_of, call.inputs[:1])), ())
    new = next((tuple(meta[0] or ()) for meta in call.metas), ())
    return old, new
