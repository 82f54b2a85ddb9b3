"""torchrun: the files that a rank under ``python -m cudalens`` writes for torchelastic and users.

Its failure goes into torchelastic's error file, by torch's own handler, so that the summary shows
it.  The reports of all ranks go into one folder beside it, with an index.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cudalens.core._python import add_note
from cudalens.core.report import RankResult
from cudalens.session.ranks import (
    combined,
    give_way,
    is_cut_off,
    load_reports,
    reason,
    result_of,
    write_whole,
)

if TYPE_CHECKING:
    from cudalens.core.report import Report
    from cudalens.session.options import Options

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def files_of_rank(options: Options) -> Options:
    """Return the options with separate files for each rank: ``report.rank3.html``."""
    rank = os.environ.get("RANK", "")
    if not rank.isdigit() or os.environ.get("WORLD_SIZE", "1") == "1":
        return options

    def own(name: str | None) -> str | None:
        return name and str(Path(name).with_suffix(f".rank{rank}{Path(name).suffix}"))

    return replace(options, html=own(options.html), json=own(options.json))


@dataclass(frozen=True, kw_only=True)
class Rank:
    """This process, as one that torchrun has started."""

    number: int
    local: int
    siblings: int
    """Number of ranks on this machine, this one among them."""
    error_file: Path

    @classmethod
    def of_environment(cls) -> Rank | None:
        """Return the rank that the environment describes, ``None`` outside of torchrun."""
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        values = [os.environ.get(name, "") for name in names]
        file = os.environ.get(_ERROR_FILE)
        if not file or not all(text.isdigit() for text in values):
            return None
        number, local, siblings = map(int, values)
        return cls(number=number, local=local, siblings=siblings, error_file=Path(file))

    @property
    def folder(self) -> Path:
        """The folder of all ranks' reports, beside the folders of their error files."""
        if self.error_file == Path(os.devnull):
            # Without a folder for logs.  The ranks of a machine share their parent, the launcher.
            run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
            return Path(tempfile.gettempdir()) / f"cudalens-{run}-{os.getppid()}"
        # torchelastic gives each rank a folder, named by its number on the machine.
        own = self.error_file.parent
        return (own.parent if own.name == str(self.local) else own) / "cudalens"

    @property
    def index(self) -> Path:
        """The page that shows every rank."""
        return self.folder / "index.html"

    def conclude(
        self, error: BaseException | None, report: Report | None, show: Callable[[], None]
    ) -> None:
        """Write and show the results of this rank; call it while ``error`` is being handled.

        Args:
            error: the exception that ended the script, ``None`` without one.
            report: the report of the check, if it made one.
            show: prints the report.
        """
        cut_off = report is not None and is_cut_off(report)
        if report is not None:
            report = replace(report, environment=replace(report.environment, rank=self.number))
            _attempt(f"the report was not written to {self.folder}", self._keep, report)
        if cut_off:
            # Torchrun shows the earliest error file.  This one would be as old as the finding's.
            _attempt("the error file stayed", self.error_file.unlink, missing_ok=True)
        else:
            self.record(error, report)
            show()
        if report is not None and self.folder.is_dir():
            _attempt("the ranks' pages were not written", self._write_pages, report)
            if not cut_off:
                print(f"cudalens: the reports of all ranks: {self.index}", file=sys.stderr)
            # Wait for the other ranks, and write the index with their reports.
            give_way(report)
            _attempt("the ranks' pages were not written", self._write_pages, report)
        # If another rank has a finding, that is the failure to show, not this lost connection.
        if cut_off and not all(map(is_cut_off, load_reports(self.folder).values())):
            line = f"rank {self.number} lost its connection to a rank with a report"
            print(f"cudalens: {line}: {self.index}", file=sys.stderr)
        elif cut_off:
            self.record(error, report)
            show()

    def record(self, error: BaseException | None, report: Report | None = None) -> None:
        """Write an exception to the error file, unless torch's own ``@record`` has done so."""
        is_end = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is None or is_end or not isinstance(error, (Exception, SystemExit)):
            return
        if isinstance(error, SystemExit) and report is None:
            return  # the script ended itself
        if self.error_file.is_file() and self.error_file.stat().st_size:
            return
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        if report is not None:
            if isinstance(error, SystemExit) and reason(error) is error:
                add_note(error, f"cudalens: {report.headline}")
            add_note(error, f"cudalens: the reports of all ranks: {self.index}")
        line = f"the finding was not written to the error file {self.error_file}"
        _attempt(line, get_error_handler().record_exception, error)

    def _keep(self, report: Report) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / f"rank{self.number}.json", report.to_json())

    def _write_pages(self, report: Report) -> None:
        """Write this rank's page, and the index of what all ranks have left so far."""
        write_whole(self.folder / f"rank{self.number}.html", report.to_html())
        results = [
            result_of(item, page=f"{name}.html") for name, item in load_reports(self.folder).items()
        ]
        first = self.number - self.local
        missing = {*range(first, first + self.siblings)} - {item.rank for item in results}
        results += [RankResult(rank=rank, outcome="left no report") for rank in missing]
        if (whole := combined(results)) is not None:
            write_whole(self.index, whole.to_html())


def _attempt(line: str, act: Callable[..., object], *arguments: object, **named: object) -> None:
    """Run a step that may fail: the script's own failure must be shown in any case."""
    try:
        act(*arguments, **named)
    except Exception as failure:
        print(f"cudalens: {line}: {failure}", file=sys.stderr)
