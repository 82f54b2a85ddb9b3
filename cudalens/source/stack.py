"""The call stack as plain facts: live frames, tracebacks and recorded entries look alike.

Every sequence here is ordered outermost first.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, TypeAlias

from cudalens.core.report_types import Frame
from cudalens.source.files import (
    cell_number,
    is_machinery,
    is_own_file,
    is_top,
    is_user_file,
    source_lines,
    title_of,
    torch_path,
    typed_line,
)
from cudalens.source.safe_eval import instance_dict

MAX_FRAMES = 60
OUTERMOST = 5
"""Number of outermost frames kept when there are more than ``MAX_FRAMES``."""

_RUNNER = str(Path(__file__).parents[1] / "notebook" / "statement.py")

# Files of torch between a call and an observer of it: dispatch modes, hooks, custom ops.
_DISPATCH = (
    "_compile.py",
    "_dynamo/",
    "_library/",
    "_ops.py",
    "library.py",
    "overrides.py",
    "utils/_python_dispatch.py",
    "utils/_stats.py",
)


class StackEntry(NamedTuple):
    """A frame kept cheaply: its code, line and instruction, without its variables."""

    code: CodeType
    lineno: int
    lasti: int


Entry: TypeAlias = FrameType | TracebackType | StackEntry


def frame_of(entry: FrameType | TracebackType) -> FrameType:
    """Return a frame, or that of a traceback entry."""
    return entry.tb_frame if isinstance(entry, TracebackType) else entry


def line_of(code: CodeType, lasti: int) -> int:
    """Return the line of an instruction, that of the function if the code has none."""
    line = _origin_of(code, lasti)[0]
    return code.co_firstlineno if line is None else line


class Position(NamedTuple):
    """Source range of an instruction: 1-based lines, 0-based columns in UTF-8 bytes."""

    line: int
    end_line: int
    column: int
    end_column: int


class Place(NamedTuple):
    """One entry of the stack, made from any kind of entry; ``frame`` is set while it is alive."""

    code: CodeType
    lineno: int
    lasti: int
    frame: FrameType | None

    @property
    def filename(self) -> str:
        """The file name of the code's source."""
        return self.code.co_filename

    @property
    def is_user(self) -> bool:
        """True if the code is the user's."""
        return is_user_file(self.filename)

    @property
    def is_generated(self) -> bool:
        """True if torch's compiler wrote the running instruction: its line is only the function's.

        Such code has the file and the name of the user's function, and no columns.
        """
        line, _, column, _ = _origin_of(self.code, self.lasti)
        is_function = not is_top(self.code.co_name)
        is_first = is_function and line == self.code.co_firstlineno
        return is_first and column is None and _HAS_COLUMNS

    @property
    def position(self) -> Position | None:
        """Source range of the running instruction, ``None`` when the code has none."""
        line, end_line, column, end_column = _origin_of(self.code, self.lasti)
        if line is None or end_line is None or column is None or end_column is None:
            return None
        return Position(line, end_line, column, end_column)

    @property
    def operation(self) -> str:
        """The name of the running instruction, such as ``CALL`` or ``STORE_SUBSCR``."""
        code, at = self.code.co_code, self.lasti
        # Each instruction may be followed by cache slots, which belong to it.
        while 0 < at < len(code) and dis.opname[code[at]] == "CACHE":
            at -= 2
        return dis.opname[code[at]] if 0 <= at < len(code) else ""

    @property
    def variables(self) -> Mapping[str, object]:
        """The frame's local variables, empty when the frame is gone."""
        return {} if self.frame is None else self.frame.f_locals


_Origin: TypeAlias = tuple[int | None, int | None, int | None, int | None]
_MOST_TABLES = 8
_tables: dict[int, tuple[CodeType, list[_Origin]]] = {}
"""Cache of the origins of all instructions, by the ``id`` of their code object.

An entry keeps its code object alive, so that no other one can have its ``id``.
"""


def _origin_of(code: CodeType, lasti: int) -> _Origin:
    """Return lines and columns of an instruction, ``None`` where the code has none.

    Cached, as Python decodes its table from the start each time, and a report needs hundreds of
    places in one long cell.
    """
    cached = _tables.get(id(code))
    if cached is None:
        while len(_tables) >= _MOST_TABLES:
            _tables.pop(next(iter(_tables)), None)
        cached = _tables[id(code)] = (code, list(code.co_positions()))
    table, at = cached[1], lasti // 2  # an instruction has two bytes
    return table[at] if 0 <= at < len(table) else (None, None, None, None)


# Python can be told to keep no columns (-X no_debug_ranges): generated code is not detected then.
_HAS_COLUMNS = any(item[2] is not None for item in _origin_of.__code__.co_positions())


def place_of(entry: Entry) -> Place:
    """Return the :class:`Place` of a frame, of a traceback entry or of a recorded entry."""
    if isinstance(entry, TracebackType):
        frame = entry.tb_frame
        return Place(frame.f_code, entry.tb_lineno, entry.tb_lasti, frame)
    if isinstance(entry, FrameType):
        # f_lineno may be None, between the lines of a frame: then take the function's.
        line = entry.f_lineno or entry.f_code.co_firstlineno
        return Place(entry.f_code, line, entry.f_lasti, entry)
    return Place(*entry, None)


def namespaces(frames: Sequence[FrameType]) -> Iterator[Mapping[str, object]]:
    """Yield the variables of the user's frames, innermost first, then those of their modules.

    Each namespace comes once: a module's is also its frame's, and that of a notebook is large.
    """
    users = [item for item in reversed(frames) if is_user_file(item.f_code.co_filename)]
    scopes = [*(frame.f_locals for frame in users), *(frame.f_globals for frame in users)]
    yield from {id(scope): scope for scope in scopes}.values()


def stack_of(frame: FrameType | None) -> tuple[FrameType, ...]:
    """Return a frame and all its callers, outermost first."""
    frames = [] if frame is None else [item for item, _ in walk_stack(frame)]
    return tuple(reversed(frames))


def is_loader_worker() -> bool:
    """Return whether a DataLoader forked this process: its code is still on the stack."""
    files = (frame.f_code.co_filename for frame in stack_of(sys._getframe()))
    return any(torch_path(file) == "utils/data/dataloader.py" for file in files)


def running_frame(code: CodeType, entries: Sequence[TracebackType]) -> FrameType | None:
    """Return the newest frame of ``code`` that still runs below or above a traceback.

    For a statement of a cell, any frame of that cell: a shell compiles each statement separately.
    """
    if not entries:
        return None
    outside = stack_of(entries[0].tb_frame)[:-1]
    for frame in reversed((*outside, *map(frame_of, entries))):
        running = frame.f_code
        is_cell = is_top(code.co_name) and is_top(running.co_name)
        if running is code or (is_cell and running.co_filename == code.co_filename):
            return frame
    return None


def places_of(entries: Sequence[Entry]) -> list[Place]:
    """Return the places of a stack, outermost first, without the frames of its observer."""
    places = [place for place in map(place_of, entries) if not is_own_file(place.filename)]
    # The innermost frame of a traceback raised the exception, so it stays in any case.
    is_live = bool(entries) and not isinstance(entries[-1], TracebackType)
    while is_live and places and torch_path(places[-1].filename).startswith(_DISPATCH):
        places.pop()
    written = []
    for at, place in enumerate(places):
        if not place.is_generated:
            written.append(place)
        # Compiled code gets the line that the compiler traced; without one it is left out.
        elif (line := _traced_line(place.code, places[at + 1 :])) is not None:
            written.append(place._replace(lineno=line))
    return written


_TRACED = re.compile(r'^\s*File "(.+)", line (\d+), in (\S+)$', re.MULTILINE)


def _traced_line(code: CodeType, below: Sequence[Place]) -> int | None:
    """Return the user's line of the running line of a compiled graph, from the graph's traces."""
    for place in below:
        graph_module: dict[str, Any] = instance_dict(place.variables.get("self"))
        lines, graph = graph_module.get("_lineno_map"), graph_module.get("_graph")
        if place.filename[:1] == "<" and isinstance(lines, dict) and graph is not None:
            number = lines.get(place.lineno - place.code.co_firstlineno)
            trace = None if number is None else list(graph.nodes)[number].stack_trace
            traced = _TRACED.findall(trace or "")
            own = code.co_filename, code.co_name
            here = [int(n) for file, n, name in traced if (file, name) == own]
            return here[-1] if here else None
    return None


def frames_of(entries: Sequence[Entry]) -> tuple[Frame, ...]:
    """Describe at most ``MAX_FRAMES`` of a stack, without this package and the cell's runner.

    Frames outside the user's first one belong to the front end and are left out too, unless no
    frame is the user's.
    """
    # Start inside the innermost runner of a cell, which another cell may have called.  A cell that
    # awaits is run by this package alone: the shell's frames are further out.
    files = enumerate(place_of(item).filename for item in entries)
    runner = max((at for at, file in files if file == _RUNNER or is_machinery(file)), default=-1)
    places = places_of(entries[runner + 1 :])
    first = next((index for index, place in enumerate(places) if place.is_user), 0)
    places = places[first:]
    if len(places) > MAX_FRAMES:
        places = places[:OUTERMOST] + places[OUTERMOST - MAX_FRAMES :]
    return tuple(map(_describe, places))


def _describe(place: Place) -> Frame:
    lines = source_lines(place.filename)
    is_known = 0 < place.lineno <= len(lines)
    return Frame(
        file=title_of(place.filename),
        line=place.lineno,
        function="<module>" if is_top(place.code.co_name) else place.code.co_name,
        text=typed_line(place.filename, lines, place.lineno).strip() if is_known else "",
        is_user=place.is_user,
        cell=cell_number(place.filename),
    )
