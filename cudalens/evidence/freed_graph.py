"""The tensor through which a second backward reaches a graph that an earlier one has freed.

No value is read: the node that refused to run is known by its number.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, cast

from torch import Tensor

from cudalens.core._torch import no_dispatch_modes, plain_torch
from cudalens.core.call import NodeMark
from cudalens.core.evidence_types import FreedGraph
from cudalens.core.report_types import LineRef, SourceSpan
from cudalens.evidence.autograd_graph import name_of
from cudalens.recorder.calls import Recorded
from cudalens.recorder.history import FreedPart, find_freed
from cudalens.source.locate import locate_line
from cudalens.source.running_node import mentioned, running
from cudalens.source.safe_eval import evaluator_for, value_or
from cudalens.source.stack import StackEntry, place_of, running_frame

MAX_VISITED = 5000
"""Nodes that are looked at."""
_MAX_ITEMS = 64
_COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>")
FREED = "Trying to backward through the graph a second time"
_ROOTS = ("self", "tensors", "outputs")


def freed_graph(
    arguments: Mapping[str, Tensor],
    recorder: Any,
    entries: Sequence[TracebackType],
    here: SourceSpan | None,
    raising: NodeMark,
    write: Recorded | None = None,
) -> FreedGraph | None:
    """Return the freed part, which backward freed it and what leads back.

    With ``write`` it is not freed: this call has changed a tensor that it saved.

    Args:
        arguments: the tensors that backward was asked of, among others, by name.
        entries: the traceback.
        here: the failing line.
        raising: the node that refused to run.
    """
    roots = [
        tensor.grad_fn
        for name, tensor in arguments.items()
        if name.partition("[")[0] in _ROOTS and tensor.grad_fn is not None
    ]
    with plain_torch(), no_dispatch_modes():
        way = _way_to(raising.sequence_nr, roots)
        part = find_freed(recorder.snapshot(), way, write)
        if part is None:
            return None
        name = _holder_name(way, part, recorder, entries)
        others = _ends(roots, None if part.at is None else way[part.at])
    lines = (part.made, part.freed, part.read, part.source)
    made, freed, read, holder = (_line(stack, here) for stack in lines)
    return FreedGraph(
        node=name_of(way[-1]),
        made=made,
        freed=freed,
        read=read,
        holder=holder,
        name=name,
        has_stepped=part.has_stepped,
        is_made_again=part.is_made_again,
        trains_more=bool(others),
    )


def _way_to(number: int, roots: Iterable[Any]) -> tuple[Any, ...]:
    """Return the shortest way from where backward began to the node of a sequence number."""
    before: dict[Any, Any] = dict.fromkeys(roots)
    waiting = deque(before)
    while waiting and len(before) < MAX_VISITED:
        node = waiting.popleft()
        if node._sequence_nr() == number:
            way = [node]
            while (node := before[node]) is not None:
                way.append(node)
            return tuple(reversed(way))
        for following, _ in node.next_functions:
            if following is not None and following not in before:
                before[following] = node
                waiting.append(following)
    return ()


def _ends(roots: Iterable[Any], without: Any) -> set[Any]:
    """Return the leaves' nodes that backward reaches without passing through one node."""
    before, waiting = {without}, [*roots]
    while waiting and len(before) < MAX_VISITED:
        node = waiting.pop()
        if node not in before:
            before.add(node)
            waiting += [item for item, _ in node.next_functions if item is not None]
    return {item for item in before if item is not None and not item.next_functions} - {without}


def _line(entries: Sequence[StackEntry], here: SourceSpan | None) -> LineRef | None:
    """Return the user's deepest line, with its cell or file where that is not ``here``."""
    line = locate_line(entries[-1:]) if entries else None
    if line is None or line.line is None:
        return None
    is_here = here is not None and (line.cell, line.file) == (here.cell, here.file)
    return replace(line, cell=None, file=None) if is_here else line


def _holder_name(
    way: Sequence[Any], part: FreedPart, recorder: Any, entries: Sequence[TracebackType]
) -> str | None:
    """Name the variable that the line read which leads back, where its frame still runs.

    Else what the line read that called it, and so on.
    """
    if part.at is None:
        return None
    node = way[part.at]
    target = recorder.forward_site(int(node._sequence_nr()))

    def is_it(tensor: Tensor) -> bool:
        """Return whether a tensor is what was read, or what its line has made of it since."""
        own = tensor.grad_fn
        if own is None or type(own) is not type(node):
            return False
        if own is node:
            return True
        site = recorder.forward_site(int(own._sequence_nr()))
        return bool(part.is_made_again and target and site and site[0] == target[0])

    for entry in reversed(part.read):
        frame = running_frame(entry.code, entries)
        if frame is None and entry.code.co_name in _COMPREHENSIONS:
            running_frames = (item.tb_frame for item in entries)
            frame = next((it for it in running_frames if entry.code in it.f_code.co_consts), None)
        if frame is not None:
            reader = evaluator_for(frame)
            for item in _names_read(running(place_of(entry)).statement):
                if any(map(is_it, _tensors_in(value_or(reader, item, None)))):
                    return ast.unparse(item)
    # Of functions only the innermost call is noted: what a caller's variable holds is it too.
    names = {
        name
        for item in entries
        for name, value in mentioned(item.tb_frame).items()
        if any(tensor.grad_fn is node for tensor in _tensors_in(value))
    }
    return names.pop() if len(names) == 1 else None


def _tensors_in(value: object) -> list[Tensor]:
    """Return a tensor, or those of a sequence and of its tuples."""
    if isinstance(value, Tensor):
        return [value]
    items: list[object] = []
    if type(value) in (tuple, list, deque):
        items = list(cast("Iterable[object]", value))[:_MAX_ITEMS]
    parts = [part for item in items for part in (item if isinstance(item, tuple) else (item,))]
    return [item for item in parts if isinstance(item, Tensor)]


def _names_read(statement: ast.stmt | None) -> Iterator[ast.expr]:
    """Return the names and attributes whose values a statement uses, comprehensions included."""
    for item in ast.walk(statement) if statement is not None else ():
        if isinstance(item, ast.Name | ast.Attribute):
            is_added_to = isinstance(statement, ast.AugAssign) and item is statement.target
            if is_added_to or isinstance(item.ctx, ast.Load):
                yield item
