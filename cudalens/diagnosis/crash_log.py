"""Read what a crashed job has printed: assertions, tracebacks and CUDA errors of several processes.

A log is read once, line by line, and only what differs is kept, so that its size does not matter.

Not here: what the lines mean (``log_verdict``).
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from cudalens.core.device_asserts import AssertFold, AssertLine
from cudalens.core.report_types import Frame
from cudalens.diagnosis.host_errors._base import groups

__all__ = ["CrashLog", "Failure", "read_log"]

MAX_FAILURES = 64
"""Different failures that are kept, the first half and the last half of them."""
MAX_FRAMES = 300
MAX_RANKS = 4096
MAX_TEXT = 600
"""Characters of a line that are kept; the longest one torch prints is a schema."""
_PATIENCE = 100
"""Lines without a frame after which a traceback is taken to have been cut off."""
_MESSAGE_LINES = 5

_MARKS = re.compile(
    r"Assertion `|Traceback \(most recent|CUDA|cuda|NCCL|Error\b|File \"|-- Process \d|rank +: "
    r"|torchrun|torch[./]distributed"
)
"""What a line outside a traceback holds that says anything here."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GROUP = re.compile(r"^ +\| ")
"""What stands before the lines of an exception group."""
_RANK = re.compile(
    r"\[(?:rank|default|trainer|worker)\s*:?\s*(?P<a>\d+)\]:?[ ]?"
    r"|\((?:\w+ )?(?:rank=(?P<b>\d+),? )?pid=(?P<pid>\d+)(?:, ip=[\d.]+)?\) ?"
    r"|(?P<c>\d{1,4}): "
)
"""How torchrun, its ``--tee``, Ray and srun mark the lines of a process."""
_RANK_INSIDE = re.compile(r"\[Rank (\d+)\]|\bRank (\d+)\]|\[rank(\d+)\]")
_HEADER = re.compile(r"Traceback \(most recent call last\)")
_FRAME = re.compile(r' *File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_RICH = re.compile(r"│ (?P<file>\S[^│]*?):(?P<line>\d+) in (?P<function>[^│]+?) *│")
_RICH_TEXT = re.compile(r"│ [❱>] *\d+ [│ ]*(?P<text>.*?)[│ ]*$")
_CELL = re.compile(
    r"(?:Cell |Input )?In ?\[(?P<cell>\d+)\][,:]? *(?:line (?P<line>\d+)|in )"
    r"|File (?P<file>\S+):(?P<line2>\d+), in (?P<function>[\w.<>]+)"
    r"|(?P<file2><ipython-input-(?P<cell2>\d+)-\w+>) in "
    r"|(?P<file3>(?:/|[A-Za-z]:\\)\S+\.py) in (?P<function2>\w+)\("
)
"""A frame as IPython draws it, in two generations."""
_CELL_TEXT = re.compile(r"-+> ?(?P<line>\d+) (?P<text>.*)")
_RAISED = re.compile(
    r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Warning))"
    r"(?:: ?(?P<message>.*))?$"
)
_BARE = re.compile(
    r"CUDA(?: driver)? error: [^()]+|error=\d+ : .+|Watchdog caught collective operation.*"
    r"|CUDA out of memory.*|NCCL (?:error|WARN Cuda failure).*|cuda runtime error \(\d+\) : .+"
)
"""What a process prints that dies without a traceback."""
_STARTED = re.compile(r"-- Process (\d+) terminated with")
_COMMAND = re.compile(r"Command '(?P<words>\[.*\])' (?:returned|died)")
_LAUNCHER = re.compile(r"\btorchrun\b|torch[./]distributed[./](?:run|launch|elastic)")
_ROOT = re.compile(r"^ *rank +: (\d+)\b")
_MARKERS = re.compile(r"[\s~^|]*")
_NO_SOURCE = re.compile(rf"{_RAISED.pattern}|[│╰╭┌└\[]")
"""A line behind a frame that is not its source, although it may have lost its blanks."""
_PREFIX = re.compile(r"[\d\[(:]")
"""What time and level of a logger hold, and nothing that belongs to a traceback."""
_MORE = re.compile(
    r"\s+\S|CUDA kernel errors|For debugging|Compile with|Device-side assert|Search for|Last error"
    r"|nccl\w+:|Cuda failure"
)
"""How a line begins that goes on with the message before it."""
Source = int | str | None
"""Who printed a line: a rank, a process of which the number alone is known, or nobody knows."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One way in which processes of the job ended, or told of an error."""

    type_name: str = ""
    """The exception's class, empty where a process printed an error without one."""
    message: str = ""
    frames: tuple[Frame, ...] = ()
    """Outermost first; ``is_user`` is not known yet."""
    ranks: frozenset[int] = frozenset()
    number: int = 0
    """The line of the log."""
    is_mixed: bool = False
    """Whether lines of several processes are mixed in its frames."""


@dataclass(kw_only=True)
class CrashLog:
    """What a log holds, without what it repeats."""

    lines: int = 0
    asserts: tuple[AssertLine, ...] = ()
    failures: tuple[Failure, ...] = ()
    ranks: set[int] = field(default_factory=set)
    """Ranks that mark lines, and those that speak of themselves."""
    root_rank: int | None = None
    """The rank that torchrun names as the first to fail."""
    command: tuple[str, ...] = ()
    """The words of the command that failed, where a launcher has printed them."""
    is_launched: bool = False
    """Whether torchrun, or a launcher like it, started the processes."""
    starts_itself: bool = False
    """Whether the program started its processes itself, by ``spawn`` or Ray."""


@dataclass
class _Open:
    """A traceback that is being printed by one process."""

    frames: list[Frame] = field(default_factory=list)
    waiting: int = 0
    """Tracebacks whose exception has not come yet, besides the first."""
    silent: int = 0
    """Lines since the last one that belongs to it."""
    is_mixed: bool = False

    def add(self, frame: Frame) -> None:
        """Take in a frame; of several processes that print the same one it is kept once."""
        self.silent = 0
        place = (frame.file, frame.line, frame.function)
        last = ((item.file, item.line, item.function) for item in self.frames[-8:])
        if self.is_mixed and place in last:
            return
        self.frames.append(frame)
        if len(self.frames) > MAX_FRAMES:
            del self.frames[MAX_FRAMES // 2]

    def say(self, text: str) -> bool:
        """Give the last frame its line of source; where lines are mixed, the oldest without."""
        last = len(self.frames)
        for at in range(max(0, last - (8 if self.is_mixed else 1)), last):
            if not self.frames[at].text:
                self.frames[at] = replace(self.frames[at], text=text)
                return True
        return False


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
        self._open: dict[Source, _Open] = {}
        self._told: tuple[Failure, int, Source] | None = None
        """The failure whose message may go on, lines that it may take, and whose it is."""
        self._prefix: re.Pattern[str] | None = None
        self._failures: dict[object, Failure] = {}
        self._started: int | None = None

    def result(self) -> CrashLog:
        """Return what was read."""
        self._settle()
        log = self._log
        log.asserts = self._asserts.lines()
        log.failures = tuple(sorted(self._failures.values(), key=lambda item: item.number))
        log.starts_itself = log.starts_itself and not log.is_launched
        return log

    def read(self, line: str) -> None:
        """Take in one line."""
        self._log.lines += 1
        if not self._open and self._told is None and not _MARKS.search(line):
            return
        if "Assertion `" in line and self._asserts.add(line):
            return
        source, text = self._split(line[: 4 * MAX_TEXT].rstrip())
        text = text[:MAX_TEXT]
        if isinstance(source, int) and len(self._log.ranks) < MAX_RANKS:
            self._log.ranks.add(source)
        self._note(text)
        if self._told is not None and self._goes_on(source, text):
            return
        if _HEADER.search(text):
            self._begin(source)
        elif not self._frame(source, text):
            self._end(source, text)

    def _split(self, line: str) -> tuple[Source, str]:
        """Return who marks a line as their own, and the line without what stands before it."""
        text = _COLOURS.sub("", line) if "\x1b" in line else line
        if text.startswith("  "):
            text = _GROUP.sub("", text)
        source: Source = None
        if (match := _RANK.match(text)) is not None:
            rank = match["a"] or match["b"] or match["c"]
            self._log.starts_itself = self._log.starts_itself or match["pid"] is not None
            source = int(rank) if rank else f"pid {match['pid']}"
            text = text[match.end() :]
        if self._prefix is not None and (match := self._prefix.match(text)) is not None:
            return source, text[match.end() :]
        header = _HEADER.search(text)
        before = text[: header.start()] if header is not None else ""
        if _PREFIX.search(before) and len(before) < 80:
            pattern = re.sub(r"\d+", r"\\d+", re.escape(before.rstrip()))
            self._prefix = re.compile(f"{pattern} ?")
        return source, text

    def _note(self, text: str) -> None:
        """Take note of what launchers print."""
        if (match := _STARTED.search(text)) is not None:
            self._started, self._log.starts_itself = int(match[1]), True
            self._log.ranks.add(self._started)
        self._log.is_launched = self._log.is_launched or _LAUNCHER.search(text) is not None
        if (match := _ROOT.match(text)) is not None:
            self._log.root_rank = int(match[1])  # the root cause stands last
            self._log.ranks.add(self._log.root_rank)
        if not self._log.command and (match := _COMMAND.search(text)) is not None:
            try:
                words = ast.literal_eval(match["words"])
            except (SyntaxError, ValueError):
                words = shlex.split(match["words"].strip("[]").replace(",", " "))
            self._log.command = tuple(str(word) for word in words)

    # --- tracebacks ------------------------------------------------------------------------------

    def _begin(self, source: Source) -> None:
        self._settle()
        known = self._open.get(source)
        if known is not None and known.silent < _PATIENCE and not isinstance(source, int):
            known.waiting += 1
            known.is_mixed, known.silent = True, 0
        elif known is not None or len(self._open) < MAX_RANKS:
            self._open[source] = _Open()

    def _frame(self, source: Source, text: str) -> bool:
        """Take in a line of a traceback; return whether it was one."""
        match = _FRAME.match(text)
        if match is not None:
            if source not in self._open and len(self._open) < MAX_RANKS:
                self._open[source] = _Open()  # its head was cut off
            if (known := self._open.get(source)) is not None:
                function = (match["function"] or "").strip()
                known.add(Frame(file=match["file"], line=int(match["line"]), function=function))
            return True
        known = self._open.get(source)
        if known is None:
            return False
        known.silent += 1
        if known.silent > _PATIENCE:
            del self._open[source]
            return False
        return _drawn_line(known, text)

    def _end(self, source: Source, text: str) -> None:
        """Take in a line that is no frame: an exception, or an error of a process without one."""
        known = self._open.get(source)
        match = _RAISED.match(text)
        if match is not None and (known is not None or _BARE.search(text)):
            seen = known or _Open()
            failure = Failure(
                type_name=match["type"].rpartition(".")[2],
                message=match["message"] or "",
                frames=tuple(seen.frames),
                is_mixed=seen.is_mixed,
                ranks=self._whose(source, text),
                number=self._log.lines,
            )
            if seen.waiting:
                seen.waiting -= 1
            else:
                self._open.pop(source, None)
            self._told = (failure, _MESSAGE_LINES, source)
        elif (found := _BARE.search(text)) is not None and not text.startswith("For debugging"):
            self._told = None
            whose = self._whose(source, text)
            self._keep(Failure(message=found[0].strip(), ranks=whose, number=self._log.lines))

    def _whose(self, source: Source, text: str) -> frozenset[int]:
        found = source if isinstance(source, int) else None
        if (match := _RANK_INSIDE.search(text)) is not None:
            found = int(next(item for item in match.groups() if item is not None))
        elif source is None and self._started is not None:
            found, self._started = self._started, None
        if found is None:
            return frozenset()
        self._log.ranks.add(found)
        return frozenset({found})

    def _goes_on(self, source: Source, text: str) -> bool:
        """Add a line to the message of the exception before it; return whether it was one."""
        assert self._told is not None
        failure, room, whose = self._told
        is_more = _MORE.match(text) is not None or failure.message.endswith(":")
        if room == 0 or source != whose or not is_more or _FRAME.match(text):
            self._settle()
            return False
        self._told = (replace(failure, message=f"{failure.message}\n{text}"), room - 1, whose)
        return True

    def _settle(self) -> None:
        if self._told is not None:
            failure, self._told = self._told[0], None
            self._keep(failure)

    def _keep(self, failure: Failure) -> None:
        """Keep a failure; equal ones are one, and of many the first and the last are kept."""
        first = failure.message.split("\n", 1)[0]
        frames = tuple((item.file, item.line) for item in failure.frames)
        key = (failure.type_name, re.sub(r"\d+", "0", first), frames)
        known = self._failures.get(key)
        if known is not None:
            ranks = known.ranks if len(known.ranks) >= MAX_RANKS else known.ranks | failure.ranks
            self._failures[key] = replace(known, ranks=ranks)
            return
        if len(self._failures) >= MAX_FAILURES:
            del self._failures[list(self._failures)[MAX_FAILURES // 2]]
        self._failures[key] = failure


def _drawn_line(known: _Open, text: str) -> bool:
    """Take in a line of a traceback that is not Python's ``File``; return whether it was one."""
    if (drawn := _drawn(text)) is not None:
        known.add(drawn)
    elif (match := _RICH_TEXT.search(text)) is not None:
        known.say(match["text"])
    elif (match := _CELL_TEXT.match(text)) is not None and known.frames:
        last = known.frames[-1]
        known.frames[-1] = replace(last, line=int(match["line"]), text=match["text"].strip())
        known.silent = 0
    elif _MARKERS.fullmatch(text):
        return True
    elif text.startswith("    ") or (known.silent == 1 and not _NO_SOURCE.match(text)):
        known.say(text.strip())  # who pastes a log may lose its blanks
    else:
        return False
    return True


def _drawn(text: str) -> Frame | None:
    """Read a frame as rich or IPython draw it."""
    match = _RICH.search(text) or _CELL.match(text)
    if match is None:
        return None
    found = groups(match)
    return Frame(
        file=found.get("file", "").strip(),
        line=int(found.get("line", 0)),
        function=found.get("function", "<module>"),
        cell=int(found["cell"]) if "cell" in found else None,
    )
