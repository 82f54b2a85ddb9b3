"""From a stack or a traceback to the user's line, and to his own words for what is on it.

Everything is read, nothing is run: no user code, no ``repr``, no property.  What could not be
read is said in ``limits``; no function here raises because of what it met on the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from cudalens.core.limits import Limits
from cudalens.core.report_types import CodeLine, Frame, SourceSpan
from cudalens.source.api_name import api_name
from cudalens.source.argument_names import (
    Candidate,
    LibraryName,
    Name,
    OpSignature,
    Other,
    Same,
    candidates,
    direct_names,
    library_names,
    name_values,
    other_tensors,
)
from cudalens.source.files import (
    cell_number,
    forget_cell,
    is_own_file,
    is_user_file,
    register_cell,
    typed_line,
)
from cudalens.source.module_path import ModulePath, module_path
from cudalens.source.running_call import IsTensor, RunningCall
from cudalens.source.running_node import Running, column_of, running
from cudalens.source.safe_eval import is_module, is_tensor
from cudalens.source.stack import (
    Entry,
    Place,
    Position,
    StackEntry,
    entries_from_traceback,
    frames_of,
    place_of,
    places_of,
    stack_of,
)

__all__ = [
    "CallSite",
    "OpSignature",
    "StackEntry",
    "entries_from_traceback",
    "forget_cell",
    "frames_of",
    "is_module",
    "is_own_file",
    "is_tensor",
    "is_user_file",
    "locate",
    "locate_entries",
    "register_cell",
    "runs_torch",
    "stack_of",
]

_CONTEXT = 4
_MAX_CONTEXT = 40
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class CallSite:
    """Where a call was made and what its tensors are called there."""

    source: SourceSpan | None = None
    """The deepest line of the user's."""
    call_text: str | None = None
    """The running call on that line, such as ``F.cross_entropy(z, y)``."""
    api: str | None = None
    """Public name of the function that was called to reach the op."""
    module_path: str | None = None
    module_type: str | None = None
    frames: tuple[Frame, ...] = ()
    names: tuple[Name, ...] = ()
    """Each argument of the op that an expression of the line is."""
    others: tuple[Other, ...] = ()
    """Each other tensor on the line; they hold the tensors, so a site is not for keeping."""
    library_names: tuple[LibraryName, ...] = ()
    """The variables that hold an argument in library functions, innermost first."""
    limits: tuple[str, ...] = ()


def locate(
    entries: Sequence[Entry] | TracebackType | None,
    values: Mapping[str, object],
    same: Same,
    is_tensor: IsTensor = is_tensor,
    is_module: Callable[[object], bool] = is_module,
    signature: OpSignature | None = None,
) -> CallSite:
    """Find the user's line for a call and name the tensors on it.

    Args:
        entries: frames, links of a traceback or recorded entries, outermost first.
        values: the op's tensor arguments by schema name; keys such as ``indices[1]`` are fine.
        same: whether two values are the same tensor; only such an expression names an argument.
        is_tensor: whether a value is a tensor.
        is_module: whether a value is an ``nn.Module``.
        signature: what the op takes, where the innermost entry is known to be running it.
    """
    guard = _Guard()
    places = guard.run("frames", places_of, entries) or []
    user = guard.run("source", _deepest_user, places)
    run = None if user is None else guard.run("source", running, places[user])
    call = None if run is None else guard.run("names", _call_of, run, is_tensor)
    found: tuple[Candidate, ...] = ()
    if run is not None and call is not None:
        found = guard.run("names", _candidates, run, call, places) or ()
    modules = guard.run("module path", module_path, places, is_module) or ModulePath()
    library = [] if user is None else places[user + 1 :]
    api = guard.run("api", api_name, places, is_tensor, values.keys())
    names = guard.run("names", name_values, found, values, same) or ()
    if call is not None and signature is not None and not library:
        names += guard.run("names", _placed, run, call, api, signature, values, names) or ()
    return CallSite(
        source=None if run is None else guard.run("source", span_of_run, run),
        call_text=None if run is None else guard.run("call text", lambda: run.call_text),
        api=api,
        module_path=modules.path,
        module_type=modules.type_name,
        frames=guard.run("frames", frames_of, entries) or (),
        names=names,
        others=guard.run("names", other_tensors, found, values, same) or (),
        library_names=guard.run("names", library_names, library, values, same, is_tensor) or (),
        limits=tuple(guard.lines),
    )


def locate_entries(entries: Sequence[Entry]) -> SourceSpan | None:
    """Find the user's deepest line in recorded entries, outermost first, frames gone or not.

    ``None`` when no entry is the user's or its source cannot be read.
    """
    guard = _Guard()
    places = guard.run("frames", places_of, entries) or []
    user = guard.run("source", _deepest_user, places)
    run = None if user is None else guard.run("source", running, places[user])
    return None if run is None else guard.run("source", span_of_run, run)


def runs_torch(entry: Entry, *, is_tensor: IsTensor = is_tensor) -> bool:
    """Return whether the running expression of an entry is proven to use torch or a tensor."""
    return bool(_Guard().run("api", _uses_torch, entry, is_tensor))


def span_of_run(run: Running) -> SourceSpan:
    """Describe the running expression of an entry and the lines around it."""
    place, lines, position = run.place, run.lines, run.place.position
    line = end_line = place.lineno
    column = end_column = None
    if run.node is not None and position is not None and _is_as_typed(place, lines, position):
        line, end_line = position.line, position.end_line
        column = column_of(lines[line - 1], position.column)
        end_column = column_of(lines[end_line - 1], position.end_column)
    first = line if run.statement is None else min(line, run.statement.lineno)
    # Of a statement of many lines not all are kept, and the running one always is.
    start = max(1, first - _CONTEXT, line - _MAX_CONTEXT + _CONTEXT)
    stop = min(len(lines), end_line + _CONTEXT)
    cell = cell_number(place.filename)
    return SourceSpan(
        cell=cell,
        file=place.filename if cell is None else None,
        line=line,
        end_line=end_line,
        column=column,
        end_column=end_column,
        text=run.text,
        context=tuple(
            CodeLine(line=number, text=typed_line(place.filename, lines, number))
            for number in range(start, min(stop, start + _MAX_CONTEXT - 1) + 1)
        ),
    )


def _is_as_typed(place: Place, lines: Sequence[str], position: Position) -> bool:
    """Return whether columns count in what the user typed, and not in the shell's text of a
    magic.
    """
    first, last = lines[position.line - 1], lines[position.end_line - 1]
    # What stands before the expression may be a magic, as long as it takes the same room.
    start = column_of(first, position.column)
    typed = typed_line(place.filename, lines, position.line)
    if typed[start:] != first[start:]:
        return False
    is_one_line = position.line == position.end_line
    return is_one_line or typed_line(place.filename, lines, position.end_line) == last


class _Guard(Limits):
    """Runs one stage after another; a stage that fails becomes a line in ``limits``."""

    def run(self, stage: str, function: Callable[..., _T], *args: object) -> _T | None:
        """Return what ``function`` returns, ``None`` when it raises."""
        return self.attempt(stage, lambda: function(*args))


def _deepest_user(places: Sequence[Place]) -> int | None:
    return next((i for i in range(len(places) - 1, -1, -1) if places[i].is_user), None)


def _uses_torch(entry: Entry, is_tensor: IsTensor) -> bool:
    return RunningCall.at(place_of(entry), is_tensor).uses_torch()


def _call_of(run: Running, is_tensor: IsTensor) -> RunningCall | None:
    """Return the running call of an entry whose frame lives, with positions in its file."""
    return None if run.place.frame is None else RunningCall(run.place, is_tensor, run.node)


def _placed(
    run: Running,
    call: RunningCall,
    api: str | None,
    signature: OpSignature,
    values: Mapping[str, object],
    names: tuple[Name, ...],
) -> tuple[Name, ...]:
    """Name by their places in the call what no value names."""
    if len(names) == len(values):
        return ()
    known = {item.key for item in names}
    found = direct_names(run, call, api, signature, values.keys())
    return tuple(item for item in found if item.key not in known)


def _candidates(run: Running, call: RunningCall, places: Sequence[Place]) -> tuple[Candidate, ...]:
    after = places.index(run.place) + 1
    callee = places[after] if after < len(places) else None
    return candidates(run, call, callee)
