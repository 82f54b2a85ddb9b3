"""Processes that a checked block starts, on the CPU here and on the rehearsal device there."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.multiprocessing as mp
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.multiprocessing.spawn import ProcessException, ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset

import cudalens
from cudalens.core.limits import Limits
from cudalens.core.report import (
    Environment,
    Offender,
    Offenders,
    ProvenanceStep,
    RankResult,
    Report,
)
from cudalens.core.reported import report_beside
from cudalens.session import ranks
from cudalens.session.exit import attached
from cudalens.session.ranks import RankRun, Ranks, combined, reason
from cudalens.source.shown_frames import without_repeats
from tests.builders import make_report
from tests.processes import python

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.usefixtures("on_cpu"),
]
MAX = 3


def lookup(index: int, bad: tuple[int, ...]) -> None:
    """Look up rows; a bad rank asks for one that is not there."""
    loader = DataLoader(TensorDataset(torch.tensor([0, 1, 2, 9 if index in bad else 0])), 2)
    for (rows,) in loader:
        torch.zeros(MAX, 2)[rows]


def start(bad: tuple[int, ...], count: int, target: object = lookup) -> None:
    mp.start_processes(target, (bad,), count, start_method="fork")


def failed(
    *bad: int, count: int = 1, target: Any = lookup, says: str | None = None, **options: bool
) -> tuple[cudalens.CheckSession, Any]:
    """Start processes of which some fail; return the session and the launcher's exception."""
    session = cudalens.check(**options)
    with pytest.raises(ProcessException, match=says) as caught, session:
        start(bad, count, target)
    return session, caught.value


def test_one_report_says_which_processes_met_what() -> None:
    session, error = failed(0, 2, count=3)
    report = session.report
    assert report is not None and report.kind == "device_assert"
    assert report.headline.startswith("rows[1] = 9 is outside dimension 0 (size 3)")
    assert [item.name for item in report.ranks] == ["process 0", "process 1", "process 2"]
    bad = [item for item in report.ranks if item.report is not None]
    assert {item.process for item in bad} == {0, 2}
    assert {item.batch for item in bad} == {"batch 2 of loader, row 1 (dataset item 3)"}
    assert "processes 0 and 2 of 3" in report.to_text()
    # The launcher's own exception: its type, its words, and what it is about.
    assert type(error) is ProcessRaisedException
    assert "terminated with the following error" in str(error)
    assert error.error_index in (0, 2)
    assert report_beside(error) is report
    assert any(report.headline in note for note in error.__notes__)
    # Another process's device says nothing about this one's.
    assert cudalens.last_report() is report
    assert Report.from_dict(json.loads(report.to_json())) == report


def test_beside_the_report_a_process_is_quoted_without_frames_of_torch() -> None:
    """It sends its traceback as text, whose frames would take a screen; afterwards it is whole."""
    session, error = failed(0)
    whole = str(error)
    assert "torch/multiprocessing/spawn.py" in whole and "\n  where  " in whole
    with without_repeats(error, session.report):
        shown = str(error)
    assert str(error) == whole
    assert re.findall(r"in (\w+)\n", shown) == ["lookup"]
    assert "torch.zeros(MAX, 2)[rows]" in shown and "Process 0 terminated" in shown
    assert "^^^" not in shown
    assert shown.splitlines()[-1].startswith(
        "cudalens.core.errors.DeviceIndexError: rows[1] = 9 is "
    )
    with without_repeats(error, None):
        assert str(error) == whole


def test_beside_the_report_torchelastic_says_what_it_alone_knows(tmp_path: Path) -> None:
    """Which rank, its exit code and its file, without rules and without our lines a second time."""
    session, error = failed(0)
    file = tmp_path / "error.json"
    sent = {"message": {"extraInfo": {"py_callstack": str(error), "timestamp": "0"}}}
    file.write_text(json.dumps(sent), encoding="utf-8")
    elastic = ChildFailedError("train", {0: ProcessFailure(0, 99, 1, str(file))})
    whole = str(elastic)
    assert "====" in whole and "NO_OTHER_FAILURES" in whole and "\n    where  " in whole
    attached(elastic, report_beside(error), "")
    with without_repeats(elastic, session.report):
        shown = str(elastic)
    assert str(elastic) == whole
    assert "rank      : 0" in shown and f"error_file: {file}" in shown
    assert not re.search(r"===|---|NO_OTHER|  host  |\^\^\^|    where  |spawn\.py", shown)
    assert shown.splitlines()[-1].startswith("  cudalens.core.errors.DeviceIndexError: rows[1] = 9")


def test_torchelastic_logs_a_failed_rank_without_frames_of_torch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While a block is checked, and for this logger alone; the exception keeps them."""
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    monitor = logging.Formatter()
    with pytest.raises(ProcessException), cudalens.check():
        try:
            start((0,), 1)
        except ProcessException:
            logger.exception("failed")
            logging.getLogger("mine").exception("failed")
            raise
    shown, other = [monitor.format(item) for item in caplog.records if item.exc_info]
    assert re.findall(r"in (\w+)\n", shown)[1:] == ["start", "lookup"]
    assert "Process 0 terminated" in shown and "spawn.py" not in shown
    assert "DeviceIndexError: rows[1] = 9 is" in shown
    assert "spawn.py" in other
    assert logger.filters == []


def test_good_processes_make_no_report() -> None:
    with cudalens.check() as session:
        start((), 3)
    assert (session.report, session.internal_errors) == (None, [])


def end_silently(index: int, bad: tuple[int, ...]) -> None:
    if index in bad:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_without_a_word_is_named() -> None:
    """By the launcher, whose exception stays as it is."""
    session, error = failed(1, count=3, target=end_silently, says="terminated with signal SIGKILL")
    assert session.report is None and not hasattr(error, "__notes__")
    assert error.error_index == 1


def draw(index: int, bad: tuple[int, ...]) -> None:
    torch.bernoulli(torch.tensor([7.0]))


def fail(index: int, bad: tuple[int, ...]) -> None:
    torch.zeros(2, 3) @ torch.zeros(2, 3)


def fail_otherwise(index: int, bad: tuple[int, ...]) -> None:
    raise FileNotFoundError("labels.csv")


def end_as_told(index: int, bad: tuple[int, ...]) -> None:
    raise SignalException(f"Process {os.getpid()} got signal: 15", signal.SIGTERM)


@pytest.mark.parametrize(
    ("target", "says", "is_deferred", "kind"),
    [
        (draw, "terminated with exit code 1", True, "device_assert"),
        # It ends in the launcher's handler, which prints it and exits.
        (fail, "cannot be multiplied", False, "host_error"),
        # What is no business of ours passes, as in a block that starts no process.
        (fail_otherwise, r"labels\.csv", False, None),
        # Torchelastic ends the others once one has failed; torch's launcher wraps that exception.
        (end_as_told, "got signal: 15", False, None),
    ],
)
def test_what_ends_a_process_is_reported_where_it_is_ours(
    target: Any, says: str, is_deferred: bool, kind: str | None
) -> None:
    session, error = failed(target=target, says=says, deferred=is_deferred)
    report = session.report
    assert (report_beside(error) is not None) is (report is not None)
    assert (report and report.kind) == kind
    if report is not None:
        assert report.deferred is is_deferred
        assert [item.report is not None for item in report.ranks] == [True]


def test_a_plain_process_of_the_users_is_checked() -> None:
    """Nobody raises anything here, and the finding is reported all the same."""
    with cudalens.check() as session:
        process = multiprocessing.get_context("fork").Process(target=lookup, args=(1, (1,)))
        process.start()
        assert "run" not in vars(process)
        process.join()
    assert process.exitcode == 1
    assert session.report is not None and session.report.kind == "device_assert"


def leave(opened: Ranks) -> None:
    opened.__exit__()


def test_a_forked_process_that_leaves_the_block_keeps_the_folder_of_all() -> None:
    with cudalens.check() as session:
        opened = session._ranks
        assert opened is not None
        process = multiprocessing.get_context("fork").Process(target=leave, args=(opened,))
        process.start()
        process.join()
        folder = opened._folder
        assert process.exitcode == 0
        assert folder is not None and folder.is_dir()
    assert not folder.exists()


def test_the_users_own_exception_after_a_process_has_failed_is_left_alone() -> None:
    process = multiprocessing.get_context("fork").Process(target=lookup, args=(0, (0,)))
    with pytest.raises(KeyError) as caught, cudalens.check() as session:
        process.start()
        process.join()
        raise KeyError("mine")
    assert session.report is not None
    assert session.report.headline.startswith("rows[1] = 9 is outside dimension 0 (size 3)")
    assert report_beside(caught.value) is None
    assert not hasattr(caught.value, "__notes__")


def test_a_loaders_worker_is_none_of_these() -> None:
    data = TensorDataset(torch.tensor([0, 1]))
    with cudalens.check() as session:
        loader = DataLoader(data, num_workers=1, multiprocessing_context="fork")
        assert len(list(loader)) == 2
        assert session._ranks is not None and session._ranks.results() == ()


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_process_with_another_run_or_another_starter_is_left_alone(is_replaced: bool) -> None:
    process = multiprocessing.get_context("fork").Process(target=lookup, args=(0, ()))
    if is_replaced:
        process.run = lambda: None  # type: ignore[method-assign]
    with cudalens.check() as session:
        assert session._ranks is not None
        session._ranks._owner += not is_replaced  # as in a process that was forked in the block
        process.start()
        process.join()
        assert session._ranks.results() == ()


def test_a_process_starts_as_it_is_where_nothing_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.mkdtemp", Mock(side_effect=OSError("no space left on device")))
    session, _ = failed(1, count=2, says=r"rows\[1\] = 9 is outside")
    line = "check of a process unavailable: OSError: no space left on device"
    assert session.internal_errors == [line]


def test_nothing_stays_replaced() -> None:
    before = BaseProcess.start
    with cudalens.check():
        assert BaseProcess.start is not before
        assert BaseProcess.start.__name__ == "start"
    assert BaseProcess.start is before


def test_why_a_process_ends() -> None:
    error = ValueError("x")
    end = SystemExit(1)
    end.__context__ = error
    assert reason(end) is error
    assert reason(error) is error
    end.code = 0
    assert reason(end) is end


def test_whose_connection_broke_has_no_finding() -> None:
    """It is listed, and the report is that of the other."""
    lost = Report(kind="host_error", headline="Connection closed by peer [127.0.0.1]:1")
    found = Report(kind="device_assert", headline="y[0] = 7 is outside the 3 classes of input")
    results = (
        RankResult(rank=0, outcome="lost its connection to another rank", report=lost),
        RankResult(rank=1, report=found),
    )
    report = combined(results)
    assert report is not None and report.headline_schema == found.headline
    assert "rank 1 of 2" in report.to_text()
    assert combined(()) is None


def test_reports_come_by_what_they_say_and_then_by_time(tmp_path: Path) -> None:
    lost, wrong = "Broken pipe", "the result is wrong"
    written = (
        ("late", "device_assert", "y is outside", 9), ("early", "nonfinite", "NaN", 8),
        ("b", "host_error", "a shape", 9), ("silent", "silent", wrong, 7),
        ("cut", "host_error", lost, 6), ("silent-cut", "silent", lost, 5),
    )  # fmt: skip
    for name, kind, headline, time in written:
        path = tmp_path / f"{name}.json"
        path.write_text(Report(kind=kind, headline=headline).to_json())  # type: ignore[arg-type]
        os.utime(path, ns=(time, time))
    for other in ("no json", "[3]", "{}"):
        (tmp_path / f"other{len(other)}.json").write_text(other)
    (tmp_path / "report.txt").write_text(make_report().to_json())
    found = ranks.load_reports(tmp_path)
    assert [*found] == ["early", "b", "late", "silent", "cut", "silent-cut"]
    assert found["late"].headline == "y is outside"


def test_a_file_that_is_not_finished_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError))
    with pytest.raises(OSError):
        ranks.write_whole(tmp_path / "1.json", make_report().to_json())
    assert ranks.load_reports(tmp_path) == {}


@pytest.mark.parametrize(
    ("headline", "is_cut"),
    [
        ("Connection closed by peer [127.0.0.1]:1", True),
        ("connection was reset by peer", True),
        ("NCCL communicator was aborted on rank 1.", True),
        ("ProcessGroupGloo was aborted", True),
        ("gloo: cannot connect to 10.0.0.1", True),
        ("Timed out waiting 1800000ms for recv operation to complete", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_who_lost_a_connection(headline: str, is_cut: bool) -> None:
    assert ranks.is_cut_off(Report(kind="host_error", headline=headline)) is is_cut
    assert not ranks.is_cut_off(Report(kind="device_assert", headline=headline))


@pytest.mark.parametrize(("headline", "seconds"), [("Broken pipe", 3.0), ("a shape", 1.0)])
def test_a_rank_whose_connection_broke_gives_way_longer(
    headline: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(ranks.time, "sleep", waited.append)
    ranks.give_way(Report(kind="host_error", headline=headline))
    assert waited == [seconds]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (None, "is running"),
        (0, "ended without a finding"),
        (3, "ended with exit status 3 and left no report"),
        (-9, "was ended by SIGKILL and left no report"),
        (-99, "was ended by signal 99 and left no report"),
    ],
)
def test_how_a_process_ended_in_words(status: int | None, words: str) -> None:
    assert ranks._format_end(status) == words


@pytest.mark.parametrize(
    ("notes", "samples", "batch"),
    [
        (("batch 3 of loader", "batch 4"), (5,), "batch 3 of loader"),
        (
            (None, "made here", "batch 3 of loader"),
            (5, 6),
            "batch 3 of loader; all bad items: 5, 6",
        ),
        (("batch 3 of loader",), (5, None), "batch 3 of loader"),
        (("made here",), (5, 6), ""),
        ((), (), ""),
    ],
)
def test_the_batch_of_a_rank_and_its_bad_items(
    notes: tuple[str | None, ...], samples: tuple[int | None, ...], batch: str
) -> None:
    first = tuple(Offender(position=(0,), value=9, sample=sample) for sample in samples)
    report = make_report(
        provenance=tuple(ProvenanceStep(note=note) for note in notes),
        offenders=Offenders(total=9, count=2, first=first) if samples else None,
        environment=Environment(rank=2),
    )
    result = ranks.result_of(report, process=4, page="a.html")
    assert (result.batch, result.rank, result.process) == (batch, 2, 4)
    assert (result.page, result.outcome, result.report) == ("a.html", "", report)
    lost = ranks.result_of(Report(kind="host_error", headline="Broken pipe"))
    assert lost.outcome == "lost its connection to another rank"


def test_the_launchers_exception_is_found_behind_others() -> None:
    launchers = ProcessRaisedException("failed", 0, 1)
    outer = ValueError("mine")
    for link in ("__cause__", "__context__"):
        setattr(outer, link, launchers)
        assert ranks.launcher_error(outer) is launchers
        setattr(outer, link, None)
    assert ranks.launcher_error(launchers) is launchers
    assert ranks.launcher_error(None) is None
    outer.__context__ = inner = ValueError("too")
    inner.__context__ = outer
    assert ranks.launcher_error(outer) is None


def test_of_several_reports_the_first_that_was_not_cut_off_speaks_for_all() -> None:
    cut = RankResult(rank=1, outcome="lost its connection", report=Report(headline="cut"))
    found = RankResult(rank=3, report=Report(headline="found"))
    later = RankResult(rank=0, report=Report(headline="later"))
    silent = RankResult(process=2, outcome="is running")
    report = combined((cut, found, silent, later))
    assert report is not None and report.headline == "found"
    assert report.ranks == (later, cut, silent, found)
    assert combined((silent,)) is None
    only = combined((cut, silent))
    assert only is not None and only.headline == "cut"


def test_a_log_keeps_the_text_that_somebody_has_made() -> None:
    def record(text: str | None, error: BaseException | None) -> logging.LogRecord:
        info = None if error is None else (type(error), error, error.__traceback__)
        made = logging.LogRecord("a", logging.ERROR, "f", 1, "m", (), info)
        made.exc_text = text
        assert ranks._shorten(made)
        return made

    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    assert record("theirs", caught.value).exc_text == "theirs"
    assert record(None, None).exc_text is None
    assert str(record(None, caught.value).exc_text).startswith("Traceback")


# --- real launchers, in a process of their own ----------------------------------------------------

MODULE = """\
import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import cudalens

def train(rank, folder, bad):
    device = cudalens.ensure_cuda()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    labels = torch.arange(32) % 3
    labels[bad] = 7
    data = TensorDataset(torch.randn(32, 4), labels)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3).to(device))
    for x, y in loader:
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
    dist.destroy_process_group()
"""
START = """\
import sys
import torch.multiprocessing as mp
import cudalens
import module

if __name__ == "__main__":
    folder, method = sys.argv[1:3]
    with cudalens.check(json="report.json"):
        mp.start_processes(module.train, (folder, [6, 17]), nprocs=4, start_method=method)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("method", [pytest.param("fork", marks=pytest.mark.all), "spawn"])
def test_ranks_on_the_rehearsal_device(tmp_path: Path, method: str) -> None:
    """Rank 2 has item 6, of its first batch; rank 1 item 17, of its second, which never comes."""
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "start.py").write_text(START)
    done = python("start.py", str(tmp_path), method, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "ProcessRaisedException: " in done.stderr
    report = Report.from_dict(json.loads((tmp_path / "report.json").read_text("utf-8")))
    found = {item.rank: item for item in report.ranks if item.report and not item.outcome}
    assert set(found) == {2}
    assert found[2].batch == "batch 1 of loader, row 1 = data[6]"
    assert len(report.ranks) == 4


LAUNCH = """\
import socket
from tests.shells import run, shell_with_cudalens

TRAIN = '''
import torch
import torch.nn.functional as F
import cudalens

def train(bad):
    import torch.distributed as dist
    device = cudalens.ensure_cuda()
    dist.init_process_group("gloo")
    labels = torch.arange(4, device=device) % 3
    if dist.get_rank() == bad:
        labels[3] = 7
    F.cross_entropy(torch.zeros(4, 3, device=device), labels)
    dist.barrier()
'''
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    PORT = free.getsockname()[1]
CELL = f'''%%cudacheck
from accelerate import notebook_launcher
notebook_launcher(train, (1,), num_processes=2, use_port="{PORT}")
'''
with shell_with_cudalens() as shell:
    run(shell, TRAIN)
    error, shown = run(shell, CELL)
    print("ERROR", type(error).__name__, "finding" * ("= 7 is outside" in str(error)))
    print(len(shown), "shown")
    print(shown[0]["text/plain"])
    folded = '<summary style="cursor:pointer"><b>rank 1</b>'
    print("FOLDED" * (folded in shown[0]["text/html"]))
"""


@pytest.mark.thorough
def test_notebook_launcher_in_a_cell() -> None:
    """One report in the cell, and the launcher's exception as it is."""
    done = python("-c", LAUNCH, timeout=120, CUDA_VISIBLE_DEVICES="")
    assert "ERROR ChildFailedError finding" in done.stdout, done.stdout + done.stderr
    assert "1 shown" in done.stdout
    assert "rank 1 of 2" in done.stdout
    assert "In [1] line 12" in done.stdout
    assert "FOLDED" in done.stdout


# --- in the process itself ------------------------------------------------------------------------


class Rank:
    """A process whose ``run`` is called here."""

    error: BaseException | None = None
    ran = False

    def run(self) -> None:
        self.ran = True
        if self.error is not None:
            raise self.error


class Block:
    """A check that finds what it is given."""

    def __init__(self, report: Report | None = None, late: BaseException | None = None) -> None:
        self.report, self.late, self.ended = report, late, False
        self.cause: BaseException | None = None

    def open(self) -> Block:
        return self

    def __exit__(self, _: object, cause: BaseException | None, __: object) -> None:
        self.ended, self.cause = True, cause
        if self.late is not None:
            raise self.late


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, bool]]:
    """Return what the rehearsal device was started with; ranks do not wait for each other."""
    calls: list[dict[str, bool]] = []
    device = Mock(current=lambda: None, start=lambda **options: calls.append(options))
    monkeypatch.setattr(ranks, "simulate", device)
    monkeypatch.setattr(ranks, "give_way", lambda report: None)
    return calls


@pytest.mark.parametrize("device", [None, "the rehearsal device"])
def test_a_rank_is_told_whether_its_starter_has_the_rehearsal_device(
    device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "simulate", Mock(current=lambda: device))
    opened, process = Ranks(Block, Limits()), Rank()
    opened._prepare(process)  # type: ignore[arg-type]
    opened.__exit__()
    assert isinstance(process.run, RankRun) and process.run.is_simulated is bool(device)


@pytest.mark.parametrize("is_simulated", [True, False])
def test_a_rank_has_the_rehearsal_device_where_its_starter_has(
    started: list[dict[str, bool]], tmp_path: Path, is_simulated: bool
) -> None:
    process, block = Rank(), Block()
    RankRun(process, tmp_path / "report", lambda: block, is_simulated=is_simulated)()
    assert started == ([{"announce": False}] if is_simulated else [])
    assert (process.ran, block.ended) == (True, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("started")
def test_a_rank_leaves_its_report_and_its_exception_goes_on(tmp_path: Path) -> None:
    process, block, file = Rank(), Block(make_report()), tmp_path / "report"
    process.error = ValueError("mine")
    with pytest.raises(ValueError, match="mine"):
        RankRun(process, file, lambda: block, is_simulated=False)()
    assert block.cause is process.error
    assert Report.from_dict(json.loads(file.read_text())).headline == make_report().headline
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.usefixtures("started")
def test_a_finding_at_the_end_of_a_rank_is_raised(tmp_path: Path) -> None:
    late = cudalens.DeviceIndexError("found", make_report())
    with pytest.raises(cudalens.DeviceIndexError) as caught:
        RankRun(Rank(), tmp_path / "r", lambda: Block(None, late), is_simulated=False)()
    assert caught.value is late


@pytest.mark.usefixtures("started")
def test_a_rank_whose_check_cannot_be_opened_runs_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = Rank()
    RankRun(process, tmp_path / "r", lambda: 1 / 0, is_simulated=False)()
    assert process.ran
    assert "check" in capsys.readouterr().err


def test_a_rank_shows_early_what_it_leaves(started: list[dict[str, bool]], tmp_path: Path) -> None:
    block = Block(make_report())
    RankRun(Rank(), tmp_path / "r", lambda: block, is_simulated=False)()
    (tmp_path / "r").unlink()
    block.show_early()  # type: ignore[attr-defined]
    assert (tmp_path / "r").exists()
    assert started == []
