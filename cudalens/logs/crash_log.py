"""Read what a crashed job printed: assertions, tracebacks and CUDA errors, by process.

A log is read once, line by line, and only what differs is kept: its size does not matter.

Not here: what ended the job and what it means (``log_verdict``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from cudalens.core.device_asserts import AssertFold, AssertLine
from cudalens.core.report_types import Frame

__all__ = ["CrashLog", "Failure", "read_log"]

MAX_FAILURES = 64
"""Different failures that are kept, the first half and the last half of them."""
MAX_FRAMES = 300
MAX_RANKS = 4096
MAX_TEXT = 600
"""Characters of a line that are kept; the longest one torch prints is a schema."""
_MESSAGE_LINES = 5

_MARKS = re.compile(
    r"Assertion `|Traceback|CUDA|cuda|NCCL|Error\b|File \"|torch|[Rr]ank\b|-- Process"
)
"""Text of a line outside of a traceback that matters here."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RANK = re.compile(
    r"\[(?:rank|default)(?P<a>\d+)\]:[ ]?|\((?:\w+ )?(?:rank=(?P<b>\d+),? )?pid=\d+[^)]*\) ?"
    r"|(?P<c>\d{1,4}): | +\| (?=[ \w])"
)
"""Marks of torchrun, its ``--tee``, Ray and srun on a process's lines, and of exception groups."""
_RANK_INSIDE = re.compile(r"\b[Rr]ank ?(\d+)\b(?=\]| Process)")
_STARTED = re.compile(r"-- Process (\d+) terminated")
"""Line of a process before the traceback of another one, which it has started."""
_LAUNCHER = re.compile(
    r"\btorchrun\b|torch[./]distributed[./](?:run|launch|elastic)|ProcessGroupNCCL.*\[Rank \d"
)
_HEADER = re.compile(r"Traceback \(most recent call last\)")
_FRAME = re.compile(
    r' *File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?'
    r"|│ (?P<rich>\S[^│]*?):(?P<rich_line>\d+) in (?P<rich_function>[^│]+?) *│"
    r"|(?:Cell |Input )?In ?\[(?P<cell>\d+)\],? |<ipython-input-(?P<old_cell>\d+)-\w+> in "
    r"|File (?P<jupyter>\S+):(?P<jupyter_line>\d+), in (?P<jupyter_function>[\w.]+)"
    r"|(?P<old>/\S+\.py) in (?P<old_function>\w+)\("
)
"""A frame as Python, rich and two generations of IPython draw it."""
_MARKED = re.compile(r"-+> ?(?P<line>\d+) (?P<text>.*)|│ [❱>] *\d+ [│ ]*(?P<rich>.*?)[│ ]*$")
"""The line of source that rich and IPython point at."""
_NUMBERED = re.compile(r"[ -]*>? *(?P<line>\d+)(?: (?P<text>.*))?$")
"""A line of source as IPython shows it around that line."""
_RAISED = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?P<type>[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure))"
    r"(?:: ?(?P<message>.*))?$"
)
_BARE = re.compile(
    r"(?:\s*what\(\): +|THCudaCheck FAIL .*?(?=error=)|\[[EF]\d* .*?(?:exception: |(?=Watchdog))"
    r"|.*\b(?:ERROR|CRITICAL|FATAL)\b\W*)?(?P<text>CUDA(?: driver)? error: [^()]+|error=\d+ : .+"
    r"|Watchdog caught collective .*|CUDA out of memory.*|cuda runtime error \(\d+\) : .+"
    r"|NCCL (?:error|WARN Cuda failure).*)"
)
"""Line of a process that dies without a traceback: the line is the error, not about it."""
_MORE = re.compile(
    r"\s+\S|CUDA kernel errors|For debugging|Compile with|Device-side assert|Last error|nccl\w+:"
)
"""Start of a line that goes on with the message before it."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception, or an error that a process printed, equal ones of several processes once."""

    type_name: str = ""
    """The exception's class, empty where a process printed an error without one."""
    message: str = ""
    frames: tuple[Frame, ...] = ()
    """Outermost first; ``is_user`` is not known yet."""
    ranks: frozenset[int] = frozenset()
    cell_lines: Mapping[int, str] = field(default_factory=dict, compare=False)
    """Lines of the deepest cell that the log shows."""
    number: int = 0
    """The line of the log that holds it, the last one of equal ones."""


@dataclass(kw_only=True)
class CrashLog:
    """Contents of a log, without repeats."""

    lines: int = 0
    asserts: tuple[AssertLine, ...] = ()
    failures: tuple[Failure, ...] = ()
    """In order of their first lines."""
    is_launched: bool = False
    """True if the log has marks of torchrun."""
    last_text: int = 0
    """The last line that holds more than blanks and assertions."""


@dataclass
class _Process:
    """Output of one process, or of all that do not mark their lines."""

    frames: list[Frame] | None = None
    """Of the traceback that is open, ``None`` outside of one."""
    cell_lines: dict[int, str] = field(default_factory=dict)
    failure: Failure | None = None
    """The failure whose message may go on."""
    room: int = 0


_MOST_DIGITS = 9


def read_log(lines: Iterable[str]) -> CrashLog:
    """Read the lines of a log, in order, with or without their line breaks."""
    reader = _Reader()
    for line in lines:
        reader.read(line)
    return reader.result()


class _Reader:
    """Takes in lines; memory is bounded by what differs, not by what comes."""

    def __init__(self) -> None:
        self._log = CrashLog()
        self._asserts = AssertFold()
        self._processes: dict[int | None, _Process] = {}
        # Matches nothing, until a traceback shows a prefix.
        self._prefix = re.compile(r"(?!)")
        """Prefix of a logger before each line of a traceback."""
        self._failures: dict[object, Failure] = {}
        self._open: set[int | None] = set()
        """The processes that are in the midst of a traceback or a message."""
        self._spawned: str | None = None
        """The rank whose traceback the process that started it prints next."""

    def result(self) -> CrashLog:
        """Return what was read."""
        for process in self._processes.values():
            self._keep(process)
        self._log.asserts = self._asserts.lines()
        self._log.failures = tuple(self._failures.values())
        return self._log

    def read(self, line: str) -> None:
        """Take in one line."""
        log = self._log
        log.lines += 1
        # Almost every line of a log is none of this, and one search tells.
        if not self._open and not _MARKS.search(line):
            log.last_text = log.lines if line.strip() else log.last_text
            return
        # Cut before and after: a line may have any length, and colours take room.
        text = _COLOURS.sub("", line[: 4 * MAX_TEXT]).rstrip()[:MAX_TEXT]
        if "Assertion `" in text and self._asserts.add(text):
            return
        log.last_text = log.lines if text else log.last_text
        rank, text = self._split(text)
        process = self._processes.get(rank)
        if process is None:
            if len(self._processes) >= MAX_RANKS:
                return
            process = self._processes[rank] = _Process()
        if process.failure is not None:
            # A message of torch's goes on over several lines, which belong to the failure.
            failure = process.failure
            is_more = _MORE.match(text) or failure.message.endswith(":")
            if process.room and is_more and not _FRAME.match(text):
                process.failure = replace(failure, message=f"{failure.message}\n{text}")
                process.room -= 1
                return
            self._keep(process)
        if _HEADER.search(text):
            process.frames = []
        elif not self._error(process, rank, text):
            self._frame(process, text)
        is_open = process.frames is not None or process.failure is not None
        (self._open.add if is_open else self._open.discard)(rank)

    def _split(self, text: str) -> tuple[int | None, str]:
        """Return the rank that marks a line as its own, and the line without its marks."""
        log, rank = self._log, None
        while (match := _RANK.match(text)) is not None:
            number = match["a"] or match["b"] or match["c"]
            rank = _number(number) if number else rank
            log.is_launched = log.is_launched or match["a"] is not None
            text = text[match.end() :]
        if (started := _STARTED.search(text)) is not None:
            self._spawned = started[1]
        log.is_launched = log.is_launched or _LAUNCHER.search(text) is not None
        header = _HEADER.search(text)
        if header is not None and re.search(r"[\d\[(:]", text[: header.start()]):
            before = text[: min(header.start(), 80)]
            blanks = len(before) - len(before.rstrip())
            pattern = re.sub(r"\d+", r"\\d+", re.escape(before.rstrip()))
            self._prefix = re.compile(f"{pattern} {{0,{blanks}}}")
        return rank, text[match.end() :] if (match := self._prefix.match(text)) else text

    def _frame(self, process: _Process, text: str) -> None:
        """Take in a line, which may be one of a traceback."""
        match = _FRAME.match(text)
        frames = process.frames
        if match is not None and (frames is not None or match["file"]):  # else its head was cut off
            frames = process.frames = frames or []
            cell = match["cell"] or match["old_cell"]
            first = next((key for key in ("file", "rich", "jupyter", "old") if match[key]), None)
            line = match["line"] or match["rich_line"] or match["jupyter_line"] or "0"
            named = (key for key in match.groupdict() if key.endswith("function") and match[key])
            function = match[next(named, "function")] or "<module>"
            file = match[first] if first else ""
            number = _number(cell) if cell else None
            frame = Frame(file=file, line=_number(line), function=function.strip(), cell=number)
            frames.append(frame)
            process.cell_lines = {} if cell else process.cell_lines
            if len(frames) > MAX_FRAMES:
                # From the middle, because the ends show where a recursion began and what failed in
                # it.
                del frames[MAX_FRAMES // 2]
            return
        if not frames:
            return
        if frames[-1].cell is not None and (match := _NUMBERED.match(text)) is not None:
            process.cell_lines[_number(match["line"])] = match["text"] or ""
        if (match := _MARKED.match(text)) is not None:
            source = (match["text"] or match["rich"] or "").strip()
            line = _number(match["line"] or frames[-1].line)
            frames[-1] = replace(frames[-1], line=line, text=source)
        elif not frames[-1].text and text and not text.startswith("│") and frames[-1].cell is None:
            frames[-1] = replace(frames[-1], text=text.strip())

    def _error(self, process: _Process, rank: int | None, text: str) -> bool:
        """Take in an exception, or an error of a process without one; return whether it was one."""
        match, bare = _RAISED.match(text), _BARE.match(text)
        if match is None and bare is None:
            return False
        if match is not None and process.frames is None and not _BARE.match(match["message"] or ""):
            return True  # without a traceback only what CUDA says counts
        inside = _RANK_INSIDE.search(text)
        number = inside[1] if inside else rank
        if number is None:
            number, self._spawned = self._spawned, None
        process.failure = Failure(
            type_name=match["type"] if match else "",
            message=(match["message"] or "") if match else bare["text"].strip() if bare else "",
            frames=tuple(process.frames or ()),
            ranks=frozenset() if number is None else frozenset({int(number)}),
            cell_lines=process.cell_lines,
            number=self._log.lines,
        )
        process.frames, process.cell_lines = None, {}
        process.room = _MESSAGE_LINES if match else 0
        return True

    def _keep(self, process: _Process) -> None:
        """Keep a failure; equal ones are one, and of many the first and the last are kept."""
        failure, process.failure = process.failure, None
        if failure is None:
            return
        first = failure.message.split("\n", 1)[0]
        frames = tuple((item.file, item.line) for item in failure.frames)
        # Processes report one error with other numbers in it, such as a rank or a process id.
        key = (failure.type_name, re.sub(r"\d+", "0", first), frames)
        earlier = self._failures.get(key)
        if earlier is not None:
            is_full = len(earlier.ranks) >= MAX_RANKS
            ranks = earlier.ranks if is_full else earlier.ranks | failure.ranks
            failure = replace(earlier, ranks=ranks, number=failure.number)
        elif len(self._failures) >= MAX_FAILURES:
            del self._failures[list(self._failures)[MAX_FAILURES // 2]]
        self._failures[key] = failure


def _number(text: str | int) -> int:
    """Return a number of lines, cells or ranks; 0 where it is larger than any of them."""
    return int(text) if len(str(text)) <= _MOST_DIGITS else 0
