"""Guards, device and status of the whole process."""

from __future__ import annotations

import pytest
import torch

import cudalens
from cudalens import DeviceIndexError, DeviceValueError, simulate
from cudalens.guards.process import PROCESS
from cudalens.session import process
from cudalens.session.process import ensure_cuda, note_check, status
from tests.builders import make_report
from tests.releases import needs_rehearsal

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the device is a real one")


def bad() -> None:
    torch.zeros(3, device="cuda")[torch.tensor([3], device="cuda")]


@needs_no_gpu
@needs_rehearsal
def test_a_device_is_there_and_said_once_more(capsys: pytest.CaptureFixture[str]) -> None:
    for is_running in (False, True):
        assert (simulate.current() is not None) is is_running
        assert ensure_cuda() == torch.device("cuda")
        assert "rehears" in capsys.readouterr().out.lower()
    process.stop_simulation()
    process.stop_simulation()
    assert capsys.readouterr().out == "rehearsal device off\nno rehearsal device\n"


@needs_no_gpu
@needs_rehearsal
def test_the_rehearsal_device_is_started_once(capsys: pytest.CaptureFixture[str]) -> None:
    started = process.start_simulation()
    assert started is simulate.current() is not None
    assert process.start_simulation() is None
    assert capsys.readouterr().out == f"{simulate.ANNOUNCEMENT}\n" * 2
    process.stop_simulation()


@pytest.mark.usefixtures("sim")
def test_installs_nest() -> None:
    cudalens.install()
    cudalens.install()
    cudalens.uninstall()
    with pytest.raises(DeviceIndexError):
        bad()
    cudalens.uninstall()
    assert not PROCESS.is_installed
    cudalens.uninstall()


@pytest.mark.usefixtures("sim")
def test_a_pending_finding_comes_with_the_last_uninstall() -> None:
    cudalens.install(deferred=True)
    assert status().startswith("guards:       installed, deferred: 0 calls pending")
    bad()
    with pytest.raises(DeviceIndexError):
        cudalens.uninstall()
    assert not PROCESS.is_installed


@pytest.mark.usefixtures("sim")
def test_an_exception_that_ends_a_block_goes_on_with_the_pending_finding_as_a_note() -> None:
    with pytest.raises(KeyError) as caught, cudalens.guard(deferred=True):
        bad()
        raise KeyError("mine")
    (note,) = caught.value.__notes__
    assert note.startswith("cudalens: found before this: ")
    with pytest.raises(DeviceIndexError), cudalens.guard(deferred=True):
        bad()
        raise SystemExit(0)
    with pytest.raises(KeyError) as caught, cudalens.guard(deferred=True):
        raise KeyError("mine")
    assert not hasattr(caught.value, "__notes__")
    assert not PROCESS.is_installed


@pytest.mark.usefixtures("sim")
def test_a_guard_of_ones_own_until_it_is_taken_out() -> None:
    undo = cudalens.register_guard("aten::median", lambda self: None if self.numel() else "empty")
    empty = torch.zeros(0, device="cuda")
    with cudalens.guard():
        torch.ones(2, device="cuda").median()
        with pytest.raises(DeviceValueError, match="empty"):
            empty.median()
        undo()
        undo()
        empty.median()


@pytest.mark.parametrize(
    ("counts", "has_report", "words"),
    [
        ((1, 1), False, "1 guarded call checked, 1 op recorded, nothing found"),
        ((0, 2), True, "0 guarded calls checked, 2 ops recorded, a problem found"),
    ],
)
def test_the_last_check_is_counted(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int], has_report: bool, words: str
) -> None:
    monkeypatch.setattr(process._Last, "check", "none")
    note_check(*counts, make_report() if has_report else None)
    assert f"last check:   {words}" in status().split("\n")


@pytest.mark.usefixtures("sim")
def test_status_says_guards_device_and_the_last_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROCESS, "last", None)
    lines = status().split("\n")
    assert lines[0] == "guards:       not installed"
    assert lines[1].startswith("CUDA:         fine (")
    assert lines[3] == "last finding: none"
    monkeypatch.setattr(PROCESS, "last", report := make_report())
    with cudalens.guard():
        lines = status().split("\n")
    assert (lines[0], lines[3]) == ("guards:       installed", f"last finding: {report.headline}")
