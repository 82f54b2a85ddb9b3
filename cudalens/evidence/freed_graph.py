"""The tensor through which a second backward reaches a graph that an earlier one has freed.

Found from sequence numbers of nodes, without reading values.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType, TracebackType
from typing import Any, cast

from torch import Tensor, nn

from cudalens.core._torch import no_dispatch_modes, plain_torch
from cudalens.core.call import NodeMark
from cudalens.core.evidence_types import FreedGraph
from cudalens.core.report_types import LineRef, SourceSpan
from cudalens.core.user_objects import is_tensor
from cudalens.diagnosis.user_code import statements_of
from cudalens.evidence.autograd_graph import name_of, nodes_behind
from cudalens.recorder.calls import Recorded
from cudalens.recorder.history import Snapshot
from cudalens.recorder.sites import entries_of, phase_of
from cudalens.source.locate import locate_line
from cudalens.source.running_node import mentioned, running
from cudalens.source.safe_eval import evaluator_for, value_or
from cudalens.source.scopes import loop_names
from cudalens.source.stack import place_of, running_frame

_MAX_ITEMS = 64
_COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>")
FREED = "Trying to backward through the graph a second time"
MODIFIED = "has been modified by an inplace operation"
_ROOTS = ("self", "tensors", "outputs")


def freed_graph(
    arguments: Mapping[str, Tensor],
    recorder: Any,
    entries: Sequence[TracebackType],
    here: SourceSpan | None,
    raising: NodeMark,
    write: Recorded | None = None,
) -> FreedGraph | None:
    """Return the freed part, the backward pass that freed it, and what leads back to it.

    With ``write``, the part is not freed: this call has changed a tensor that it saved.

    Args:
        arguments: the arguments of ``backward``, by name.
        entries: the traceback.
        here: the failing line.
        raising: the node that raised.
    """
    roots = [
        tensor.grad_fn
        for name, tensor in arguments.items()
        if name.partition("[")[0] in _ROOTS and tensor.grad_fn is not None
    ]
    with plain_torch(), no_dispatch_modes():
        return _freed_part(roots, recorder, entries, here, raising, write)


def _freed_part(
    roots: Sequence[Any],
    recorder: Any,
    entries: Sequence[TracebackType],
    here: SourceSpan | None,
    raising: NodeMark,
    write: Recorded | None,
) -> FreedGraph | None:
    way = _way_to(raising.sequence_nr, roots)
    snapshot = recorder.snapshot()
    calls = [snapshot.forward_call(int(node._sequence_nr())) for node in way]
    made = calls[-1] if calls else None
    passes = snapshot.earlier_passes if write is None else [(write.seq, write)]
    done = [item for item in passes if made is not None and item[0] > made.seq]
    if made is None or not done:
        # No pass has run since, so the failing pass itself has freed it.
        return None
    part = FreedGraph(node=name_of(way[-1]), made=_line(made, here))
    if len(done) > 1:
        return part
    ((first, freeing),) = done
    after = [item for item in snapshot.calls if item.seq > freeing.seq]
    stepped = any(phase_of(item.site) == "optimizer" and item.written for item in after)
    part = replace(part, freed=_line(freeing, here), has_stepped=stepped)
    # The first node from before the pass was read by the forward call of the node in front of it.
    at = next((at for at, call in enumerate(calls) if call is None or call.seq < first), 0)
    reader, source = calls[at - 1] if at else None, calls[at]
    if reader is None or source is None:
        return part
    # A line may make it in two ways: ``z = x if z is None else z + x``.
    is_made_again = any(_stack_lines(item) == _stack_lines(source) for item in after)
    # With a write nothing was freed: the caller is the function of the failing line.
    freeing_entries = entries_of(freeing.site)
    callers = [freeing_entries[-1].code] if freeing_entries else []
    if write is not None:
        failing = (it.tb_frame.f_code for it in entries if here and it.tb_lineno == here.line)
        callers = [*failing][-1:]
    newer = source if is_made_again else None
    name, detached = _holder(way[at], reader, newer, snapshot, entries, callers)
    return replace(
        part,
        read=_line(reader, here),
        holder=_line(source, here),
        name=name,
        detached=detached,
        is_made_again=is_made_again,
    )


def is_shared(write: Recorded) -> bool:
    """Return whether a changed tensor also belongs to a caller, or is a view."""
    entries = entries_of(write.site)
    run = running(place_of(entries[-1])) if entries else None
    match run and run.statement:
        case ast.AugAssign(ast.Name(name)) | ast.Expr(ast.Call(ast.Attribute(ast.Name(name)))):
            code = entries[-1].code
            parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            is_view = any(item.base is not None for item in write.written)
            is_held = is_view or name in (*parameters, *code.co_freevars)
            # The values of a loop's variable also belong to what it runs over.
            return is_held or (run is not None and name in loop_names(run.parents))
    return False


def stale_lines(
    arguments: Mapping[str, Tensor],
    snapshot: Snapshot,
    entries: Sequence[TracebackType],
    here: SourceSpan | None,
    write: Recorded,
) -> tuple[LineRef, ...]:
    """Return the lines to run again after parameters were changed, oldest first.

    These are the forward calls that read a parameter before the write, and all calls between them
    and the loss.  Each is given as a line of the function that calls ``backward``.

    Args:
        entries: the traceback.
        here: the failing line.
    """
    failing = [it.tb_frame.f_code for it in entries if here and it.tb_lineno == here.line]
    roots = [it.grad_fn for name, it in arguments.items() if name.partition("[")[0] in _ROOTS]
    with plain_torch(), no_dispatch_modes():
        before = nodes_behind(roots)
        calls = {node: snapshot.forward_call(int(node._sequence_nr())) for node in before}
    stale = {node for node, call in calls.items() if call and _is_stale(call, snapshot, write)}
    waiting = deque(stale)
    users: dict[Any, list[Any]] = {}
    for node in before:
        for following, _ in node.next_functions:
            users.setdefault(following, []).append(node)
    while waiting:
        more = [it for it in users.get(waiting.popleft(), ()) if it not in stale]
        stale.update(more)
        waiting.extend(more)
    lines: dict[LineRef, None] = {}
    made = {id(call): call for node in stale if (call := calls[node]) is not None}
    made = {key: call for key, call in made.items() if call.seq < write.seq}
    for call in sorted(made.values(), key=lambda it: it.seq):
        own = [it for it in entries_of(call.site) if failing and _is_same(it.code, failing[-1])]
        line = locate_line(own[-1:]) if own else None
        if line is None:
            return ()
        lines[line] = None
    return tuple(lines) if all(calls[node] for node in stale) else ()


def _is_stale(call: Recorded, snapshot: Snapshot, write: Recorded) -> bool:
    """Return whether a call read a parameter that was written to since."""
    if call.seq > write.seq:
        return False
    return any(
        isinstance(item(), nn.Parameter) and snapshot.has_write(item, call.seq)
        for item in call.inputs
    )


def _is_same(code: CodeType, other: CodeType) -> bool:
    """Return whether two code objects belong to one function, or to the top level of one cell."""
    return (code.co_filename, code.co_name) == (other.co_filename, other.co_name)


def _way_to(number: int, roots: Iterable[Any]) -> list[Any]:
    """Return the shortest path from the roots of backward to the node with a sequence number."""
    before = nodes_behind(roots)
    node = next((item for item in before if item._sequence_nr() == number), None)
    way: list[Any] = []
    while node is not None:
        way.insert(0, node)
        node = before[node]
    return way


def _line(call: Recorded, here: SourceSpan | None) -> LineRef | None:
    """Return the user's innermost line, with its cell or file if that differs from ``here``."""
    entries = entries_of(call.site)
    line = locate_line(entries[-1:]) if entries else None
    if line is None or line.line is None:
        return None
    is_here = here is not None and (line.cell, line.file) == (here.cell, here.file)
    return replace(line, cell=None, file=None) if is_here else line


def _stack_lines(call: Recorded) -> list[tuple[CodeType, int]]:
    return [(item.code, item.lineno) for item in entries_of(call.site)]


def _holder(
    node: Any,
    reader: Recorded,
    newer: Recorded | None,
    snapshot: Snapshot,
    entries: Sequence[TracebackType],
    callers: Sequence[CodeType],
) -> tuple[str | None, str | None]:
    """Name the variable through which a line reached the old graph, if its frame still runs.

    Otherwise try the line that called it, and so on.

    Args:
        node: the node that made the tensor that was read.
        newer: the call that made it, if its line has made another one since.
        callers: the functions that call ``backward``.

    Returns:
        Its name, and code that detaches it, for a variable of one of these functions.
    """

    def is_it(tensor: Tensor) -> bool:
        own = tensor.grad_fn
        if newer is None or own is None or own is node or type(own) is not type(node):
            return own is node
        call = snapshot.forward_call(int(own._sequence_nr()))
        return call is not None and entries_of(call.site) == entries_of(newer.site)

    for entry in reversed(entries_of(reader.site)):
        frame = running_frame(entry.code, entries)
        # The frame of a comprehension has ended, but that of the function around it may still run.
        if frame is None and entry.code.co_name in _COMPREHENSIONS:
            running_frames = (item.tb_frame for item in entries)
            frame = next((it for it in running_frames if entry.code in it.f_code.co_consts), None)
        if frame is not None:
            evaluator = evaluator_for(frame)
            found: dict[str, str | None] = {}
            cut = _cut_before(reader, snapshot) if newer is not None else set()
            for item in _names_read(running(place_of(entry)).statement):
                name, value = ast.unparse(item), value_or(evaluator, item, None)
                if name not in cut and any(map(is_it, _tensors_in(value))):
                    found[name] = _detached(name, value)
                    if newer is None:
                        break
            if found:
                # One call returns both states of an LSTM.
                codes = [code for code in found.values() if code]
                is_whole = entry.code in callers and len(codes) == len(found)
                return ", ".join(found), ", ".join(codes) if is_whole else None
    # Only the innermost call is recorded, so search the callers' variables as well.
    names = {
        name
        for item in entries
        for name, value in mentioned(item.tb_frame).items()
        if any(tensor.grad_fn is node for tensor in _tensors_in(value))
    }
    return names.pop() if len(names) == 1 else None, None


def _cut_before(reader: Recorded, snapshot: Snapshot) -> set[str]:
    """Return the variables that were detached since the previous run of the reading line.

    Their current values were made after that.
    """
    # The line itself may have made other calls first.
    same = (it for it in snapshot.calls if it.seq < reader.seq and it.api.func is reader.api.func)
    last = [it for it in same if _stack_lines(it) == _stack_lines(reader)]
    first = last[-1].seq if last else 0
    cuts = (it for it in snapshot.calls if first < it.seq < reader.seq)
    lines = {snapshot.reader.line(it.site) for it in cuts if it.api.stem in ("detach", "detach_")}
    return {name for line in lines if line is not None for name in _given(line.text or "")}


def _given(code: str) -> Iterator[str]:
    """Yield the names that a line detaches: ``h`` in ``h = h.detach()`` and ``h.detach_()``."""
    for node in ast.walk(ast.Module(statements_of(code), [])):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield ast.unparse(node)
        if isinstance(node, ast.Attribute) and node.attr == "detach_":
            yield ast.unparse(node.value)


def _detached(name: str, value: object) -> str | None:
    """Return ``h.detach()``, or its form for each item of a tuple or list."""
    if is_tensor(value):
        return f"{name}.detach()"
    if type(value) not in (tuple, list) or not all(map(is_tensor, cast("Sequence[object]", value))):
        return None
    each = f"item.detach() for item in {name}"
    return f"[{each}]" if type(value) is list else f"tuple({each})"


def _tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in a value: itself, or the items of a sequence and of its tuples."""
    if is_tensor(value):
        return [value]
    items: list[object] = []
    if type(value) in (tuple, list, deque):
        items = list(cast("Iterable[object]", value))[:_MAX_ITEMS]
    parts = [part for item in items for part in (item if type(item) is tuple else (item,))]
    return [item for item in parts if is_tensor(item)]


def _names_read(statement: ast.stmt | None) -> Iterator[ast.expr]:
    """Return the names and attributes whose values a statement uses, comprehensions included."""
    for item in ast.walk(statement) if statement is not None else ():
        if isinstance(item, ast.Name | ast.Attribute):
            is_added_to = isinstance(statement, ast.AugAssign) and item is statement.target
            if is_added_to or isinstance(item.ctx, ast.Load):
                yield item
