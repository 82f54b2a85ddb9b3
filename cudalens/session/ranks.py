"""Child processes of a checked block: each runs under a check of its own.

Their reports are combined into one.  Launchers are not patched: only the ``run`` method of a
``multiprocessing`` process is wrapped.

The ranks of torchrun are not started by a block: see ``integrations/torchrun.py``.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from cudalens import simulate
from cudalens.core._python import replace_attribute
from cudalens.core.errors import DeviceAssertError
from cudalens.core.limits import Limits
from cudalens.core.report import RankResult, Report
from cudalens.source.files import is_user_file
from cudalens.source.shown_frames import without_frames

OTHERS_S = 1.0
"""Seconds that a rank with a finding waits before it exits: its exit ends the other ranks, which
may be about to find something too."""
CUT_OFF_S = 3.0
"""Seconds that a rank with a broken connection waits, so that the rank at fault exits first."""
_LOG = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
"""torchelastic logs a failed rank here before it raises: a hundred lines of traceback."""
_OF_LAUNCHERS = ("torch.multiprocessing", "torch.distributed.elastic")
_CUT_OFF = re.compile(
    r"Connection (?:was )?(?:closed|reset) by peer|Broken pipe|NCCL (?:error|communicator)"
    r"|remote process (?:has )?exited|ProcessGroup\w+ .*(?:abort|timeout)"
    r"|Timed out waiting .*(?:recv|send)|(?:Gloo|gloo).*(?:connect|peer)",
    re.IGNORECASE,
)


class Ranks:
    """Context manager in which child processes run under the check.

    Args:
        make: makes the session in the child process; it is pickled.
        limits: collects internal failures of the block.
    """

    def __init__(self, make: Callable[[], Any], limits: Limits) -> None:
        self._make = make
        self._limits = limits
        self._owner = os.getpid()
        self._folder: Path | None = None
        self._numbers = itertools.count()
        self._started: dict[int, BaseProcess] = {}
        self._undo: Callable[[], None] = lambda: None

    def __enter__(self) -> Ranks:
        """Replace ``BaseProcess.start``."""
        start = BaseProcess.start

        @functools.wraps(start)
        def checked(process: BaseProcess) -> None:
            __tracebackhide__ = True
            # A forked child has this replacement, too, but its children are none of this block.
            if _is_rank(process) and os.getpid() == self._owner:
                # A process that cannot be prepared runs unchecked.
                self._limits.attempt("check of a process", lambda: self._prepare(process))
            try:
                start(process)
            finally:
                # The child has its copy by now, and the user's object is as before.
                if isinstance(vars(process).get("run"), RankRun):
                    del process.run

        self._undo = replace_attribute(BaseProcess, "start", checked)
        _LOG.addFilter(_shorten)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore it; delete the files of the processes."""
        _LOG.removeFilter(_shorten)
        self._undo()
        if self._folder is not None and os.getpid() == self._owner:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._started = {}

    def _prepare(self, process: BaseProcess) -> None:
        number = next(self._numbers)  # atomic: several threads may start processes
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="cudalens-ranks-"))
        file = self._folder / f"{number}.json"
        run = RankRun(process, file, self._make, is_simulated=simulate.current() is not None)
        self._started[number] = process
        process.run = run  # type: ignore[method-assign]

    @property
    def has_started(self) -> bool:
        """Return whether a process runs under the check."""
        return bool(self._started)

    def results(self) -> tuple[RankResult, ...]:
        """Return the result of each process: those with a report first, by time."""
        reports = {} if self._folder is None else load_reports(self._folder)
        results = [result_of(reports[name], process=int(name)) for name in reports]
        results += [
            RankResult(process=number, outcome=_format_end(process.exitcode))
            for number, process in sorted(self._started.items())
            if str(number) not in reports
        ]
        return tuple(results)


def _shorten(record: logging.LogRecord) -> bool:
    """Cut torch's and our frames from the exception of a log record; a filter that passes all."""
    # A formatter prints `exc_text` where it is set, and formats the exception only where it is not.
    if record.exc_info and not record.exc_text:
        record.exc_text = without_frames("".join(traceback.format_exception(*record.exc_info)))
    return True


def _is_rank(process: BaseProcess) -> bool:
    """Return whether a process runs the user's code: no ``DataLoader`` worker, no pool."""
    if "run" in vars(process):
        return False  # already replaced, by an outer check or by other code
    target = getattr(process, "_target", None) or type(process).run
    code = getattr(target, "__code__", None)
    is_launchers = target.__module__ == "torch.multiprocessing.spawn"
    return is_launchers or (code is not None and is_user_file(code.co_filename))


# --- in the process itself ------------------------------------------------------------------------


@dataclass
class RankRun:
    """Replacement for a process's ``run`` method that runs it under a check."""

    process: BaseProcess
    file: Path
    make: Callable[[], Any]
    is_simulated: bool

    def __call__(self) -> None:
        """Run the process, and write its report to the file."""
        limits = Limits()
        if self.is_simulated and simulate.current() is None:
            limits.attempt("rehearsal device", lambda: simulate.start(announce=False))
        session = limits.attempt("check", lambda: self.make().open())
        if session is not None:
            session.show_early = lambda: self._leave(session.report)  # torch may end the process
        error: BaseException | None = None
        try:
            # By the class, because the instance's own `run` is this object.
            type(self.process).run(self.process)
        except BaseException as raised:
            error = raised
            raise
        finally:
            late = None
            if session is not None:
                late = limits.attempt("report", lambda: self._conclude(session, error))
            for line in limits.lines:
                print(f"cudalens: {line}", file=sys.stderr)
        if late is not None:
            raise late

    def _conclude(self, session: Any, error: BaseException | None) -> DeviceAssertError | None:
        """Close the session and write its report; return a finding that is found only here."""
        cause = None if error is None else reason(error)
        if type(cause).__name__ == "SignalException":
            cause = None  # torchelastic terminates this rank because another one has failed
        late = None
        try:
            session.__exit__(None, cause, None)
        except DeviceAssertError as found:
            late = found
        if session.report is not None:
            self._leave(session.report)
            give_way(session.report)
        return late

    def _leave(self, report: Report) -> None:
        write_whole(self.file, report.to_json())


def reason(error: BaseException) -> BaseException:
    """Return the exception behind a ``sys.exit``: launchers print it and exit with a status."""
    if isinstance(error, SystemExit) and error.code not in (None, 0):
        context = error.__context__
        return context if isinstance(context, Exception) else error
    return error


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: other processes may read or write it at the same time."""
    # With the process id, because each process needs a draft of its own.
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def give_way(report: Report) -> None:
    """Wait, so that other ranks can report before the exit of this one ends them."""
    time.sleep(CUT_OFF_S if is_cut_off(report) else OTHERS_S)


# --- reading what they left -----------------------------------------------------------------------


def load_reports(folder: Path) -> dict[str, Report]:
    """Return the reports in a folder, by time: raised ones, warnings, broken connections."""
    reports = []
    for path in folder.glob("*.json"):
        try:
            report = Report.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue  # not a report of ours
        weight = 2 * is_cut_off(report) + (report.kind == "silent")
        reports.append((weight, path.stat().st_mtime_ns, path.stem, report))
    reports.sort(key=lambda item: item[:3])
    return {name: report for _, _, name, report in reports}


def is_cut_off(report: Report) -> bool:
    """Return whether a rank failed because its connection to another broke."""
    return report.kind != "device_assert" and _CUT_OFF.search(report.headline) is not None


def launcher_error(error: BaseException | None) -> BaseException | None:
    """Return the launcher's exception in a chain, which only says that a process has failed."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if type(error).__module__.startswith(_OF_LAUNCHERS):
            return error
        error = error.__cause__ or error.__context__
    return None


def result_of(report: Report, *, process: int | None = None, page: str | None = None) -> RankResult:
    """Return the result of a rank with a report."""
    outcome = "lost its connection to another rank" if is_cut_off(report) else ""
    steps = (step.note or "" for step in report.provenance)
    batch = next((note for note in steps if note.startswith("batch ")), "")
    bad_values = report.offenders.first if report.offenders else ()
    items = [str(item.sample) for item in bad_values if item.sample is not None]
    if batch and len(items) > 1:
        batch += f"; all bad items: {', '.join(items)}"
    return RankResult(
        rank=report.environment.rank,
        process=process,
        outcome=outcome,
        batch=batch,
        page=page,
        report=report,
    )


def _format_end(status: int | None) -> str:
    if status is None:
        return "is running"
    if status == 0:
        return "ended without a finding"
    name = next((item.name for item in signal.Signals if item == -status), f"signal {-status}")
    how = f"ended with exit status {status}" if status > 0 else f"was ended by {name}"
    return f"{how} and left no report"


def combined(results: Iterable[RankResult]) -> Report | None:
    """Return the report of the first process that failed, with the results of all.

    Args:
        results: the results, in order of time.
    """
    order = sorted(results, key=lambda item: bool(item.outcome))
    first = next((item.report for item in order if item.report), None)
    ranks = sorted(
        order, key=lambda item: item.rank if item.rank is not None else item.process or 0
    )
    return None if first is None else replace(first, ranks=tuple(ranks))
