"""From a stack or a traceback to the user's line, and to the user's names for its tensors.

Everything is read, nothing is run: no user code, no ``repr``, no property.  A failed read becomes
a line of ``limits``.  No function here raises because of an object on the stack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cudalens.core.evidence_types import CallSyntax
from cudalens.core.limits import Limits
from cudalens.core.report_types import CodeLine, Frame, LineRef, SourceSpan
from cudalens.source.api_name import api_name
from cudalens.source.argument_names import (
    LineTensor,
    Name,
    RowOf,
    Same,
    library_names,
    name_values,
    other_tensors,
    tensors_on,
)
from cudalens.source.files import place_of_code, source_lines, typed_line
from cudalens.source.module_path import ModulePath, module_path
from cudalens.source.running_call import RunningCall
from cudalens.source.running_node import Running, column_of, running
from cudalens.source.stack import Entry, Place, Position, frames_of, place_of, places_of

_CONTEXT = 4
_MAX_CONTEXT = 40


@dataclass(frozen=True, kw_only=True)
class CallSite:
    """Place of a call, and the user's names for its tensors."""

    source: SourceSpan | None = None
    """The innermost line of the user's code."""
    call: CallSyntax | None = None
    """The running call on that line."""
    api: str | None = None
    """Public name of the function that was called to reach the op."""
    module_path: str | None = None
    module_type: str | None = None
    frames: tuple[Frame, ...] = ()
    names: tuple[Name, ...] = ()
    """Each argument of the op that an expression of the line evaluates to."""
    others: tuple[LineTensor, ...] = ()
    """Each other tensor on the line.  They keep the tensors alive, so a site must not be stored."""
    library_names: tuple[tuple[str, str], ...] = ()
    """An argument and the variable that holds it in a library's function, innermost first."""
    limits: tuple[str, ...] = ()


def locate(
    entries: Sequence[Entry],
    values: Mapping[str, object],
    same: Same,
    call: RunningCall | None = None,
    row_of: RowOf | None = None,
) -> CallSite:
    """Find the user's line for a call and name the tensors on it.

    Args:
        entries: frames, entries of a traceback or recorded entries, outermost first.
        values: the op's tensor arguments by schema name; keys such as ``indices[1]`` are fine.
        same: whether two values are the same tensor; only such an expression names an argument.
        call: the running call of the user's innermost entry, if more is known of it than the
            source and the variables show.
        row_of: returns which row of a tensor another one is.
    """
    limits = Limits()
    attempt = limits.attempt
    places = attempt("frames", lambda: places_of(entries), list)
    run, library = attempt("source", lambda: _users_run(places), lambda: (None, []))
    modules = attempt("module path", lambda: module_path(places), ModulePath)
    api = attempt("api", lambda: api_name(places, values.keys()))
    tensors: tuple[LineTensor, ...] = ()
    # Without a frame, the variables are gone.
    if call is None and run is not None and run.place.frame is not None:
        call = RunningCall(run)
        attempt("names", partial(call.learn_from_callee, library[0] if library else None))
    if call is not None:
        tensors = attempt("names", partial(tensors_on, call), tuple)
    names = attempt("names", lambda: name_values(tensors, values, same, row_of), tuple)
    return CallSite(
        source=None if run is None else attempt("source", lambda: _span_of(run)),
        call=None if run is None else attempt("call", lambda: run.call),
        api=api,
        module_path=modules.path,
        module_type=modules.type_name,
        frames=attempt("frames", lambda: frames_of(entries), tuple),
        names=names,
        others=attempt("names", lambda: other_tensors(tensors, values, same), tuple),
        library_names=attempt("names", lambda: library_names(library, values, same), tuple),
        limits=tuple(limits.lines),
    )


def locate_entries(entries: Sequence[Entry]) -> SourceSpan | None:
    """Return the user's innermost line in entries, outermost first; the frames may be gone.

    ``None`` when no entry is the user's or its source cannot be read.
    """
    run = Limits().attempt("source", lambda: _users_run(places_of(entries))[0])
    return None if run is None else Limits().attempt("source", lambda: _span_of(run))


def locate_line(entries: Sequence[Entry]) -> LineRef | None:
    """Return the line that :func:`locate_entries` finds, in short.

    Where several statements share the line, the text is that of the running one.
    """

    def line_ref() -> LineRef | None:
        run, _ = _users_run(places_of(entries))
        if run is None:
            return None
        line, alone = _span_of(run).ref, run.statement_text
        return line if alone in (None, run.text) else replace(line, text=alone)

    return Limits().attempt("source", line_ref)


def runs_torch(entry: Entry) -> bool:
    """Return whether the running expression of an entry is proven to use torch or a tensor."""
    return bool(Limits().attempt("api", lambda: RunningCall.at(place_of(entry)).uses_torch()))


def _users_run(places: Sequence[Place]) -> tuple[Running | None, Sequence[Place]]:
    """Return the running syntax of the user's innermost entry, and the entries below it."""
    user = next((at for at in reversed(range(len(places))) if places[at].is_user), None)
    return (None, []) if user is None else (running(places[user]), places[user + 1 :])


def _span_of(run: Running) -> SourceSpan:
    """Describe the running expression of an entry and the lines around it."""
    place, lines, position = run.place, run.lines, run.place.position
    line = end_line = place.lineno
    column = end_column = None
    if run.node is not None and position is not None:
        line, end_line = position.line, position.end_line
        shift = _typed_shift(place, lines, position)
        if shift is not None:
            column = column_of(lines[line - 1], position.column) + shift
            end_column = column_of(lines[end_line - 1], position.end_column)
            end_column += shift * (line == end_line)
    first = line if run.statement is None else min(line, run.statement.lineno)
    # A long statement is cut to fewer lines, but its running line is always kept.
    start = max(1, first - _CONTEXT, line - _MAX_CONTEXT + _CONTEXT)
    stop = min(len(lines), end_line + _CONTEXT)
    cell, file = place_of_code(place.filename)
    return SourceSpan(
        cell=cell,
        file=file,
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


def span_of_lines(filename: str, line: int, end_line: int | None = None) -> SourceSpan:
    """Return the place of lines of a file or cell, with the text of the first as it was typed."""
    (cell, file), lines = place_of_code(filename), source_lines(filename)
    text = typed_line(filename, lines, line).strip() if 0 < line <= len(lines) else ""
    return SourceSpan(cell=cell, file=file, line=line, end_line=end_line, text=text)


def _typed_shift(place: Place, lines: Sequence[str], position: Position) -> int | None:
    """Return by how many columns a running expression was typed further right.

    A magic such as ``%time`` may precede it in the typed line alone.  ``None`` where the typed
    line has other text, such as a shell command.
    """
    first = lines[position.line - 1]
    typed = typed_line(place.filename, lines, position.line)
    start, shift = column_of(first, position.column), len(typed) - len(first)
    is_one_line = position.line == position.end_line
    last = lines[position.end_line - 1]
    is_end_typed = is_one_line or typed_line(place.filename, lines, position.end_line) == last
    # From the expression on, the typed line must be the same.
    return shift if is_end_typed and typed[max(0, start + shift) :] == first[start:] else None
