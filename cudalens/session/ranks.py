"""The processes that a checked block starts: each runs under a check of its own.

Their reports become one, which says which of them met what.  Launchers stay as they are: what a
process runs is wrapped, by ``multiprocessing``'s own way to say it, and nothing else.

Not here: the ranks of torchrun, which no checked block starts (``integrations/torchrun.py``).
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from cudalens import simulate
from cudalens.core._python import replace_attribute
from cudalens.core.errors import DeviceAssertError
from cudalens.core.limits import Limits
from cudalens.core.report import RankResult, Report
from cudalens.source.files import is_user_source

OTHERS_S = 1.0
"""How long a rank with a finding waits for the findings of the others, which its end would end."""
CUT_OFF_S = 3.0
"""How long one waits whose connection broke: who broke it is to be the first that has ended."""
_POLL_S = 0.02
_OF_LAUNCHERS = ("torch.multiprocessing", "torch.distributed.elastic")
_LEFT_NONE = "and left no report"
_LAUNCHER = "torch.multiprocessing.spawn"
_CUT_OFF = re.compile(
    r"Connection (?:was )?(?:closed|reset) by peer|Broken pipe|NCCL (?:error|communicator)"
    r"|remote process (?:has )?exited|ProcessGroup\w+ .*(?:abort|timeout)"
    r"|Timed out waiting .*(?:recv|send)|(?:Gloo|gloo).*(?:connect|peer)",
    re.IGNORECASE,
)


class Ranks:
    """While one is open, the processes that this one starts run under the check.

    Args:
        make: makes the session of such a process; it travels there by pickle.
        limits: of the block, for what fails here.
    """

    def __init__(self, make: Callable[[], Any], limits: Limits) -> None:
        self._make = make
        self._limits = limits
        self._owner = os.getpid()
        self._folder: Path | None = None
        self._numbers = itertools.count()
        self._started: dict[int, tuple[int, BaseProcess]] = {}
        self._undo: Callable[[], None] = lambda: None

    def __enter__(self) -> Ranks:
        """Take the place where processes start."""
        self._undo = replace_attribute(BaseProcess, "start", self._wrap(BaseProcess.start))
        return self

    def __exit__(self, *_: object) -> None:
        """Put it back; what the processes have written goes."""
        self._undo()
        if self._folder is not None and os.getpid() == self._owner:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._started = {}

    def _wrap(self, start: Any) -> Any:
        @functools.wraps(start)
        def checked(process: BaseProcess) -> None:
            __tracebackhide__ = True
            if _is_rank(process) and os.getpid() == self._owner:
                # What cannot be prepared starts as it is.
                self._limits.attempt("check of a process", lambda: self._prepare(process))
            try:
                start(process)
            finally:
                if isinstance(vars(process).get("run"), RankRun):
                    del process.run

        return checked

    def _prepare(self, process: BaseProcess) -> None:
        number = next(self._numbers)  # several threads may start some
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="cudalens-ranks-"))
        (self._folder / f"{number}.started").touch()  # for others, which wait for its report
        run = RankRun(
            process=process,
            number=number,
            folder=self._folder,
            make=self._make,
            is_simulated=simulate.current() is not None,
        )
        self._started[number] = (_index_of(process, number), process)
        process.run = run  # type: ignore[method-assign]

    @property
    def has_started(self) -> bool:
        """Whether a process runs under the check."""
        return bool(self._started)

    def results(self) -> tuple[RankResult, ...]:
        """Return what became of each process, those that made a report first, by time."""
        reports = {} if self._folder is None else kept(self._folder)
        found = [
            result_of(report, process=index)
            if (report := reports.get(str(number))) is not None
            else RankResult(process=index, outcome=_format_end(process.exitcode))
            for number, (index, process) in sorted(self._started.items())
        ]
        order = list(reports.values())
        found.sort(key=lambda item: order.index(item.report) if item.report else len(order))
        return tuple(found)


def _is_rank(process: BaseProcess) -> bool:
    """Whether a process runs code of the user's: a loader's worker, or a pool's, does not count."""
    if "run" in vars(process):
        return False  # a check around this one, or somebody else, has replaced it
    if _is_of_launcher(process):
        return True
    target = getattr(process, "_target", None)
    code = getattr(target if target is not None else type(process).run, "__code__", None)
    return code is not None and is_user_source(code.co_filename)


def _is_of_launcher(process: BaseProcess) -> bool:
    return getattr(getattr(process, "_target", None), "__module__", "") == _LAUNCHER


def _index_of(process: BaseProcess, count: int) -> int:
    """Return the number that the launcher gave a process, else how many were started before."""
    given = (*getattr(process, "_args", ()), None, None)[1]
    return given if _is_of_launcher(process) and isinstance(given, int) else count


# --- in the process itself ------------------------------------------------------------------------


@dataclass
class RankRun:
    """What a process runs in place of its own ``run``: the same, under a check."""

    process: BaseProcess
    number: int
    folder: Path
    make: Callable[[], Any]
    is_simulated: bool

    def __call__(self) -> None:
        """Run the process, and leave its report in the folder."""
        limits = Limits()
        if self.is_simulated and simulate.current() is None:
            limits.attempt("rehearsal device", lambda: simulate.start(announce=False))
        session = limits.attempt("check", lambda: self.make().open())
        error: BaseException | None = None
        try:
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
        """Close the session and leave its report; return a finding that comes to light here."""
        cause = None if error is None else reason(error)
        if type(cause).__name__ == "SignalException":
            cause = None  # torchelastic's for SIGTERM: another rank has failed, and this one ends
        late = None
        try:
            session.__exit__(None, cause, None)
        except DeviceAssertError as found:
            late = found
        if session.report is not None:
            write_whole(self.folder / f"{self.number}.json", session.report.to_json())
            started = len(list(self.folder.glob("*.started")))
            wait(self.folder, session.report, started)
        return late


def reason(error: BaseException) -> BaseException:
    """Return the exception for which a process ends: launchers print it and call ``sys.exit``."""
    if isinstance(error, SystemExit) and error.code not in (None, 0):
        met = error.__context__
        return met if isinstance(met, Exception) else error
    return error


def write_whole(path: Path, text: str) -> None:
    """Write a file that others read, and may write, meanwhile: whole, or not at all."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def wait(folder: Path, report: Report, count: int) -> None:
    """Let other ranks come to a finding of their own before this one ends, which ends them.

    The report is this one's, which is in the folder; ``count`` ranks may leave one.
    """
    if is_cut_off(report):
        time.sleep(CUT_OFF_S)  # the launcher comes earlier, once it sees who has ended first
        return
    deadline = time.monotonic() + OTHERS_S
    while time.monotonic() < deadline and len(list(folder.glob("*.json"))) < count:
        time.sleep(_POLL_S)


# --- reading what they left -----------------------------------------------------------------------


def kept(folder: Path) -> dict[str, Report]:
    """Return the reports of a folder: raised ones, then warnings, then who was cut off; by time."""
    found = []
    for path in folder.glob("*.json"):
        try:
            report = Report.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue  # somebody else's file
        weight = 2 * is_cut_off(report) + (report.kind == "silent")
        found.append((weight, path.stat().st_mtime_ns, path.stem, report))
    found.sort(key=lambda item: item[:3])
    return {name: report for _, _, name, report in found}


def is_cut_off(report: Report) -> bool:
    """Whether a rank failed because its connection to another broke."""
    return report.kind != "device_assert" and _CUT_OFF.search(report.headline) is not None


def launcher_error(error: BaseException | None) -> BaseException | None:
    """Return the launcher's own exception behind this one: it says that a process has failed."""
    met = set()
    while error is not None and id(error) not in met:
        met.add(id(error))
        if type(error).__module__.startswith(_OF_LAUNCHERS):
            return error
        error = error.__cause__ or error.__context__
    return None


def failed_process_index(error: BaseException | None) -> int | None:
    """Return which process a launcher's exception is about."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict):
        error = min(failures.values(), key=lambda item: item.timestamp, default=None)
    index = getattr(error, "error_index", getattr(error, "local_rank", None))
    return index if isinstance(index, int) else None


def result_of(report: Report, *, process: int | None = None, page: str | None = None) -> RankResult:
    """Return what a rank's report says of it."""
    outcome = "lost its connection to another rank" if is_cut_off(report) else ""
    steps = (step.note or "" for step in report.provenance)
    batch = next((note for note in steps if note.startswith("batch ")), "")
    found = report.offenders.first if report.offenders else ()
    items = [str(item.sample) for item in found if item.sample is not None]
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
    if status > 0:
        return f"ended with exit status {status} {_LEFT_NONE}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name} {_LEFT_NONE}"


@dataclass(frozen=True, kw_only=True)
class CombinedRanks:
    """The report of the first of several processes, and what became of each."""

    report: Report
    sentence: str
    ranks: tuple[RankResult, ...]


def combined(
    results: Sequence[RankResult], failed_index: int | None = None
) -> CombinedRanks | None:
    """Return the one report of several processes: that of the first, with all of them.

    Args:
        results: in the order of their reports' times.
        failed_index: the place of the one that the launcher names as the first to fail.
    """
    told = [item for item in results if item.report is not None]
    if not told:
        return None
    bad = [item for item in told if not item.outcome] or told
    first = next((item for item in bad if item.process == failed_index), bad[0]).report
    assert first is not None
    return CombinedRanks(
        report=first,
        sentence=_sentence(bad, len(results)),
        ranks=tuple(sorted(results, key=_place_of)),
    )


def _place_of(item: RankResult) -> int:
    return item.rank if item.rank is not None else item.process or 0


def _sentence(bad: Iterable[RankResult], count: int) -> str:
    """Say which of ``count`` processes have a finding, and of which batch."""
    found = sorted(bad, key=_place_of)
    named = [f"{item.name} ({item.batch})" if item.batch else item.name for item in found]
    listed = " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
    verb = "has" if len(named) == 1 else "have"
    return f"{len(named)} of {count} processes {verb} a finding: {listed}."


def silent_ends(results: Iterable[RankResult]) -> str:
    """Say which processes ended badly without a report; empty where none did."""
    found = [item for item in results if item.report is None and _LEFT_NONE in item.outcome]
    # Launchers end the others by SIGTERM once one of them has failed.
    first = [item for item in found if "SIGTERM" not in item.outcome] or found
    return "; ".join(f"{item.name} {item.outcome}" for item in first)
