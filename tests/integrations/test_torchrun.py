"""torchrun with real ranks on gloo and the rehearsal device."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from cudalens.core.report import Report
from cudalens.integrations.torchrun import Rank, files_of_rank
from cudalens.session.options import Options
from tests.processes import python

TRAIN = """\
import contextlib
import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import cudalens

kind, what = sys.argv[1:3]
bad = [int(text) for text in sys.argv[3:]]
device = cudalens.ensure_cuda()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
labels = torch.arange(32) % 3
if what == "forward":
    labels[bad] = 7
data = TensorDataset(torch.randn(32, 4), labels)
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
model = torch.nn.Linear(4, 3).to(device)
if kind == "fsdp":
    fully_shard(model)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def spoil(gradient):
    rows = torch.tensor([0, 5], device=device)
    return gradient + gradient[rows].sum()


with model.join() if kind == "join" else contextlib.nullcontext():
    for step, (x, y) in enumerate(loader):
        if kind == "join" and step > rank:
            break  # this rank has fewer batches than the next
        scores = model(x.to(device))
        if step == 1 and rank in bad and what == "backward":
            scores.register_hook(spoil)
        if step == 1 and rank in bad and what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        y = y.to(device)
        loss = F.cross_entropy(scores, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""
"""Of 4 ranks, rank r has the items r, r + 4, r + 8 …, two of them in a batch."""


def torchrun(folder: Path, *words: str, ranks: int = 4) -> subprocess.CompletedProcess[str]:
    """Run ``torchrun -m cudalens …`` in a folder."""
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    start = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--log-dir=logs")
    return python(*start, "-m", "cudalens", *words, cwd=folder, CUDA_VISIBLE_DEVICES="")


def found_in(folder: Path) -> dict[str, Report]:
    """Return the reports that the ranks have left, by file name."""
    files = sorted(folder.glob("logs/*/attempt_0/cudalens/rank*.json"))
    return {file.stem: Report.from_dict(json.loads(file.read_text("utf-8"))) for file in files}


def summary(done: subprocess.CompletedProcess[str]) -> str:
    """Return what torchrun says of the first rank that failed."""
    return done.stderr.rpartition("Root Cause")[2]


def asserts(found: dict[str, Report]) -> set[str]:
    return {name for name, report in found.items() if report.kind == "device_assert"}


@pytest.mark.thorough
def test_two_bad_ranks_of_four(tmp_path: Path) -> None:
    """Both have a report, the summary shows a finding, and the index shows every rank."""
    done = torchrun(tmp_path, "train.py", "ddp", "forward", "9", "15")
    assert done.returncode == 1
    found = found_in(tmp_path)
    assert asserts(found) == {"rank1", "rank3"}
    said = summary(done)
    assert "DeviceIndexError: y[" in said and "= 7 is outside the 3 classes of scores" in said
    (index,) = tmp_path.glob("logs/*/attempt_0/cudalens/index.html")
    assert f"the reports of all ranks: {index.relative_to(tmp_path)}" in said
    page = index.read_text("utf-8")
    assert "rank 1 of 4 (rank 3 failed too)" in page or "rank 3 of 4 (rank 1 failed too)" in page
    assert "batch 2 of loader, row 0 = data[9]" in page
    assert "batch 2 of loader, row 1 = data[15]" in page
    assert 'href="rank3.html"' in page and (index.parent / "rank3.html").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "what", "bad", "ranks", "headline"),
    [
        ("fsdp", "forward", "9", {"rank1"}, "y[0] = 7 is outside the 3 classes of scores"),
        *(
            pytest.param(*case, marks=pytest.mark.all)
            for case in (
                ("ddp", "backward", "1", {"rank1"}, "rows[1] = 5 is outside dimension 0 (size 2)"),
                ("fsdp", "backward", "0 2", {"rank0", "rank2"}, "rows[1] = 5 is outside dimension"),
                ("join", "forward", "10", {"rank2"}, "y[0] = 7 is outside the 3 classes of scores"),
            )
        ),
    ],
)
def test_engines_and_directions(
    tmp_path: Path, kind: str, what: str, bad: str, ranks: set[str], headline: str
) -> None:
    done = torchrun(tmp_path, "--fast", "train.py", kind, what, *bad.split())
    assert done.returncode == 1
    found = found_in(tmp_path)
    assert asserts(found) == ranks
    assert {found[name].phase for name in ranks} == {what}
    assert headline in summary(done)


@pytest.mark.all
def test_a_good_run_leaves_nothing(tmp_path: Path) -> None:
    """Also with uneven inputs: the ranks that are done take part until the last one is."""
    done = torchrun(tmp_path, "train.py", "join", "none")
    assert done.returncode == 0, done.stderr
    assert found_in(tmp_path) == {}


@pytest.mark.thorough
def test_a_killed_rank_is_the_first_to_fail(tmp_path: Path) -> None:
    """Nobody can write a report for it, and no rank that lost its connection is blamed."""
    done = torchrun(tmp_path, "train.py", "ddp", "killed", "1")
    assert done.returncode == 1
    assert "Signal 9 (SIGKILL)" in summary(done)
    assert asserts(found_in(tmp_path)) == set()


@pytest.mark.thorough
def test_a_missing_script_is_one_line_and_status_two(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "missing.py", ranks=1)
    assert done.stderr.count("cudalens: there is no script 'missing.py'\n") == 1
    assert "exitcode  : 2" in summary(done)
    assert "there is no script 'missing.py'" in summary(done)


# --- one rank in this process ---------------------------------------------------------------------


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    file = tmp_path / "attempt_0" / "1" / "error.json"
    file.parent.mkdir(parents=True)
    given = {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "8"}
    for name in ("CUT_OFF_S", "OTHERS_S"):
        monkeypatch.setattr(f"cudalens.session.ranks.{name}", 0)
    for name, value in {**given, "TORCHELASTIC_ERROR_FILE": str(file)}.items():
        monkeypatch.setenv(name, value)
    return Rank.of_environment()


def conclude(rank: Rank, error: BaseException, report: Report | None) -> list[str]:
    shown: list[str] = []
    try:
        raise error
    except type(error):
        rank.conclude(error, report, lambda: shown.append("report"))
    return shown


FOUND = Report(kind="device_assert", headline="y[0] = 7 is outside the 3 classes of input")
CUT_OFF = Report(kind="host_error", headline="[gloo/pair.cc:553] Connection closed by peer [::1]:9")


def test_the_finding_stands_in_the_error_file(rank: Rank) -> None:
    assert conclude(rank, IndexError(FOUND.headline), FOUND) == ["report"]
    message = json.loads(rank.error_file.read_text("utf-8"))["message"]
    assert message["message"] == f"IndexError: {FOUND.headline}"
    assert str(rank.index) in message["extraInfo"]["py_callstack"]
    kept = json.loads((rank.folder / "rank5.json").read_text("utf-8"))
    assert (kept["headline"], kept["environment"]["rank"]) == (FOUND.headline, 5)


def test_what_record_has_written_stays(rank: Rank) -> None:
    """torch's own decorator comes first, with the same exception."""
    rank.error_file.write_text("{}")
    conclude(rank, IndexError(FOUND.headline), FOUND)
    assert rank.error_file.read_text() == "{}"


def test_a_swallowed_finding_is_named_where_the_script_exits(rank: Rank) -> None:
    conclude(rank, SystemExit(3), FOUND)
    assert FOUND.headline in rank.error_file.read_text("utf-8")


@pytest.mark.parametrize("status", [0, None])
def test_a_good_end_is_no_error(rank: Rank, status: int | None) -> None:
    conclude(rank, SystemExit(status), FOUND)
    assert not rank.error_file.exists()


def test_an_error_file_that_cannot_be_written_is_one_line(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    rank.error_file.mkdir()
    assert conclude(rank, IndexError(FOUND.headline), FOUND) == ["report"]
    said = capsys.readouterr().err.splitlines()
    assert sum("the finding was not written to the error file" in line for line in said) == 1
    assert (rank.folder / "rank5.json").exists()


def test_a_folder_that_cannot_be_written_is_one_line(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    rank.folder.write_text("a file")
    assert conclude(rank, IndexError(FOUND.headline), FOUND) == ["report"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("cudalens: the report was not written to ")
    assert FOUND.headline in rank.error_file.read_text("utf-8")


def test_a_rank_that_was_cut_off_leaves_the_word_to_the_other(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    rank.folder.mkdir()
    (rank.folder / "rank4.json").write_text(FOUND.to_json(), encoding="utf-8")
    rank.error_file.write_text("{}")
    assert conclude(rank, RuntimeError(CUT_OFF.headline), CUT_OFF) == []
    assert not rank.error_file.exists()
    assert "rank 5 lost its connection to a rank with a report" in capsys.readouterr().err


def test_a_rank_that_was_cut_off_by_nobody_says_so(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    """The network may be at fault: then its own error is all that is known."""
    assert conclude(rank, RuntimeError(CUT_OFF.headline), CUT_OFF) == ["report"]
    assert capsys.readouterr().err == "", "no error file was there to take away"
    assert "Connection closed by peer" in rank.error_file.read_text("utf-8")


def test_outside_of_torchrun_there_is_no_rank(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert Rank.of_environment() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", ""), ("RANK", "-1"), ("LOCAL_RANK", "x"), ("LOCAL_WORLD_SIZE", ""),
     ("TORCHELASTIC_ERROR_FILE", "")],
)  # fmt: skip
def test_a_rank_needs_its_numbers_and_its_error_file(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    assert Rank.of_environment() == rank
    assert (rank.number, rank.local, rank.siblings) == (5, 1, 1)
    monkeypatch.setenv(name, value)
    assert Rank.of_environment() is None


def test_the_reports_lie_beside_the_folders_of_the_ranks(rank: Rank, tmp_path: Path) -> None:
    """One error file for all ranks, as a program may ask for, has no such folder."""
    assert rank.folder == tmp_path / "attempt_0" / "cudalens"
    assert rank.index == rank.folder / "index.html"
    shared = replace(rank, error_file=tmp_path / "logs" / "error.json")
    assert shared.folder == tmp_path / "logs" / "cudalens"


def test_the_index_names_the_ranks_of_this_machine_that_left_nothing(rank: Rank) -> None:
    two = replace(rank, siblings=3)
    conclude(two, IndexError(FOUND.headline), FOUND)
    page = two.index.read_text("utf-8")
    assert page.count("left no report") >= 2 and "rank 6" in page and "rank 4" in page
    assert "rank 7" not in page and "rank 3" not in page
    assert 'href="rank5.html"' in page and (two.folder / "rank5.html").exists()


def test_the_index_has_a_rank_whose_report_comes_while_this_one_waits(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(_: Report) -> None:
        assert "rank4.html" not in rank.index.read_text("utf-8")
        late = replace(FOUND, environment=replace(FOUND.environment, rank=4))
        (rank.folder / "rank4.json").write_text(late.to_json(), encoding="utf-8")

    monkeypatch.setattr("cudalens.integrations.torchrun.give_way", wait)
    conclude(rank, IndexError(FOUND.headline), FOUND)
    assert 'href="rank4.html"' in rank.index.read_text("utf-8")


def test_pages_that_cannot_be_made_are_a_line_for_each_try(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = Mock(side_effect=ValueError("no page"))
    monkeypatch.setattr("cudalens.integrations.torchrun.load_reports", fails)
    assert conclude(rank, IndexError(FOUND.headline), FOUND) == ["report"]
    line = "cudalens: the ranks' pages were not written: no page"
    assert capsys.readouterr().err.splitlines().count(line) == 2


@pytest.mark.parametrize(
    ("error", "report", "is_written"),
    [
        (IndexError("mine"), None, True),
        (SystemExit(3), None, False),
        (SystemExit(0), FOUND, False),
        (KeyboardInterrupt(), FOUND, False),
        (None, FOUND, False),
    ],
)
def test_which_end_is_an_error_of_the_rank(
    rank: Rank, error: BaseException | None, report: Report | None, is_written: bool
) -> None:
    rank.record(error, report)
    assert rank.error_file.exists() is is_written


def test_an_empty_error_file_is_written(rank: Rank) -> None:
    rank.error_file.touch()
    rank.record(IndexError("mine"))
    assert "mine" in rank.error_file.read_text("utf-8")


def test_without_a_report_nothing_is_left_but_the_error(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    assert conclude(rank, IndexError("mine"), None) == ["report"]
    assert not rank.folder.exists() and capsys.readouterr().err == ""
    assert "mine" in rank.error_file.read_text("utf-8")


def test_a_rank_that_was_cut_off_shows_no_index_of_its_own(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    conclude(rank, IndexError(FOUND.headline), FOUND)
    assert f"cudalens: the reports of all ranks: {rank.index}" in capsys.readouterr().err
    other = replace(rank, number=6)
    conclude(other, RuntimeError(CUT_OFF.headline), CUT_OFF)
    assert "the reports of all ranks" not in capsys.readouterr().err
    assert (rank.folder / "rank6.html").exists()


def test_without_a_log_folder_the_reports_lie_among_temporary_files(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    none = Rank(number=5, local=1, siblings=2, error_file=Path(os.devnull))
    assert none.folder.name == f"cudalens-none-{os.getppid()}"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    assert none.folder == Path(tempfile.gettempdir()) / f"cudalens-mine-{os.getppid()}"


def test_each_rank_has_files_of_its_own(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    options = files_of_rank(Options(html="out/r.html", json=None))
    assert (options.html, options.json) == ("out/r.rank5.html", None)
    assert files_of_rank(Options(json="r.json")).json == "r.rank5.json"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert files_of_rank(Options(html="r.html")).html == "r.html"
    monkeypatch.delenv("WORLD_SIZE")
    assert files_of_rank(Options(html="r.html")).html == "r.html"
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "x")
    assert files_of_rank(Options(html="r.html")).html == "r.html"
