"""Guards, device and status of the whole process."""

from __future__ import annotations

import sys
import unittest
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cudalens
from cudalens import DeviceIndexError, DeviceValueError, simulate
from cudalens.guards.process import PROCESS
from cudalens.session import process
from cudalens.session.process import ensure_cuda, note_check, status
from cudalens.session.succession import SUCCESSION
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
@pytest.mark.parametrize("begin", [cudalens.install, cudalens.guard().__enter__])
def test_what_is_pending_comes_to_light_before_more_guards_are_installed(begin: Any) -> None:
    cudalens.install(deferred=True)
    bad()
    with pytest.raises(DeviceIndexError):
        begin()
    assert PROCESS.installs == [True]
    cudalens.uninstall()
    assert not PROCESS.is_installed


@pytest.mark.parametrize("is_deferred", [True, False])
@pytest.mark.parametrize("in_compiled", [True, False])
def test_the_guards_are_installed_as_they_are_asked_for(
    is_deferred: bool, in_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(PROCESS, "acquire", lambda make, **options: asked.append((make, options)))
    process.acquire(is_deferred=is_deferred, in_compiled=in_compiled)
    process.acquire()
    (make, options), (_, plain) = asked
    assert options == {"is_deferred": is_deferred, "in_compiled": in_compiled}
    assert plain == {"is_deferred": False, "in_compiled": False}
    made: list[Any] = []
    monkeypatch.setattr(process, "Interceptor", lambda *given, **more: made.append((given, more)))
    make("the devices")
    ((given, more),) = made
    assert given == (process.on_violation, PROCESS.internal_error)
    is_users = more.pop("is_users")
    assert more == {
        "devices": "the devices",
        "on_failed_call": PROCESS.call_failed,
        "on_past_violation": process.on_past_violation,
    }
    assert (is_users(__file__), is_users(torch.__file__)) == (True, False)


@pytest.mark.usefixtures("sim")
def test_what_a_block_hands_on_is_lost_with_an_uninstall() -> None:
    """What runs unguarded could write to a tensor unseen."""
    followed: list[str] = []
    for is_uninstalled in (False, True):
        SUCCESSION.begin(None)
        SUCCESSION.end(SimpleNamespace(handed_on=lambda: "earlier"))
        if is_uninstalled:
            cudalens.uninstall()
        SUCCESSION.begin(SimpleNamespace(follow=followed.append))
        SUCCESSION.end(None)
        assert followed == ["earlier"]


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
    empty = torch.zeros(0, device="cuda")
    with cudalens.guard():
        empty.median()
        undo = cudalens.register_guard("aten::median", lambda self: None if len(self) else "empty")
        torch.ones(2, device="cuda").median()
        with pytest.raises(DeviceValueError, match="empty"):
            empty.median()
        undo()
        undo()
        empty.median()
        checks = (lambda self: "empty"), (lambda self: None)
        undos = [cudalens.register_guard("aten::median", it, "mine") for it in checks]
        empty.median()  # the second of a name takes the place of the first
        for undo in undos:
            undo()


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
    monkeypatch.setattr(PROCESS, "last_check", "none")
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


def test_the_last_report_stays_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROCESS, "last", report := make_report())
    assert [cudalens.last_report() is report for _ in range(2)] == [True, True]


@pytest.mark.parametrize(
    ("error", "takes_its_place"),
    [
        (SystemExit(0), True), (SystemExit(), True), (SystemExit(1), False),
        (GeneratorExit(), True),
        (pytest.skip.Exception("no"), True), (unittest.SkipTest("no"), True),
        (ValueError("mine"), False), (KeyboardInterrupt(), False),
    ],
)  # fmt: skip
def test_a_finding_takes_the_place_of_what_ends_a_block_well(
    error: BaseException, takes_its_place: bool
) -> None:
    finding = ValueError("y[0] = 9 is outside\nmore")
    raised = process.in_place_of(error, finding)
    assert raised is (finding if takes_its_place else None)
    notes = [] if takes_its_place else ["cudalens: found before this: y[0] = 9 is outside"]
    assert getattr(error, "__notes__", []) == notes
    assert finding.__suppress_context__ is takes_its_place


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("ends", [None, KeyError, SystemExit])
@pytest.mark.parametrize("found", [True, False])
def test_what_is_pending_comes_to_light_where_a_block_ends(
    monkeypatch: pytest.MonkeyPatch, deferred: bool, ends: Any, found: bool
) -> None:
    finding, error, released = ValueError("found"), None if ends is None else ends(), []
    monkeypatch.setattr(process.PROCESS, "settle", lambda: finding if found else None)
    monkeypatch.setattr(process.PROCESS, "release", lambda **options: released.append(options))
    block: Any = cudalens.guard(deferred=deferred)
    if deferred and found and ends is not KeyError:
        with pytest.raises(ValueError, match="found"):
            block.__exit__(ends, error, None)
    else:
        assert block.__exit__(ends, error, None) is None
    is_noted = deferred and found and ends is KeyError
    assert hasattr(error, "__notes__") is is_noted
    assert released == [{"is_deferred": deferred}]


def test_where_nothing_can_be_settled_the_exception_of_a_block_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process.PROCESS, "settle", lambda: 1 / 0)
    monkeypatch.setattr(process.PROCESS, "release", lambda **options: None)
    block: Any = cudalens.guard(deferred=True)
    assert block.__exit__(KeyError, KeyError(), None) is None
    with pytest.raises(ZeroDivisionError):
        block.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("pending", "capturing", "usable", "refused"),
    [(True, True, True, True), (True, True, False, False), (True, False, True, False),
     (False, True, True, False)],
)  # fmt: skip
def test_while_a_graph_is_captured_nothing_is_settled(
    monkeypatch: pytest.MonkeyPatch, pending: bool, capturing: bool, usable: bool, refused: bool
) -> None:
    settled: list[bool] = []
    monkeypatch.setattr(type(process.PENDING), "__bool__", lambda self: pending)
    monkeypatch.setattr(process._torch, "is_capturing", lambda: capturing)
    monkeypatch.setattr(process._torch, "is_device_usable", lambda: usable)
    monkeypatch.setattr(process.PROCESS, "settle", lambda: settled.append(True))
    if refused:
        with pytest.raises(RuntimeError, match="call it after a replay"):
            cudalens.settle()
    else:
        cudalens.settle()
    assert settled == ([] if refused else [True])


@pytest.mark.parametrize(
    ("error", "said"), [(None, ""), (RuntimeError("lost"), "RuntimeError: lost\n")]
)
def test_what_is_pending_at_the_end_is_told_apart_from_the_output_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception | None,
    said: str,
) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(process.atexit, "register", at_exit.append)
    monkeypatch.setattr(process.PROCESS, "settle", lambda: error)
    process._report_at_exit.__wrapped__()
    (report,) = at_exit
    report()
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(("count", "words"), [(1, "1 check$"), (2, "2 checks$")])
def test_what_the_parent_has_pending_is_said_once(
    monkeypatch: pytest.MonkeyPatch, count: int, words: str
) -> None:
    monkeypatch.setattr(process.PENDING, "inherited", count)
    with pytest.warns(UserWarning, match=words) as warned:
        cudalens.settle()
    assert warned[0].filename == __file__
    assert process.PENDING.inherited == 0
    cudalens.settle()


def test_what_the_parent_has_pending_is_not_said_where_this_process_has_checks_of_its_own(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(process.PENDING, "inherited", 1)
    monkeypatch.setattr(type(process.PENDING), "__bool__", lambda self: True)
    cudalens.settle()
    assert (process.PENDING.inherited, [*recwarn]) == (1, [])


@pytest.mark.parametrize(
    ("installed", "deferred", "pending", "words"),
    [
        (False, False, 0, "not installed"), (True, False, 3, "installed"),
        (True, True, 1, "installed, deferred: 1 call pending"),
        (True, True, 0, "installed, deferred: 0 calls pending"),
    ],
)  # fmt: skip
def test_the_state_of_the_guards_in_words(
    monkeypatch: pytest.MonkeyPatch, installed: bool, deferred: bool, pending: int, words: str
) -> None:
    states = SimpleNamespace(is_installed=installed, is_deferred=deferred)
    monkeypatch.setattr(process, "PROCESS", states)
    monkeypatch.setattr(process, "PENDING", SimpleNamespace(count=pending))
    assert process._guards() == words


@pytest.mark.parametrize(
    ("checked", "recorded", "report", "words"),
    [
        (1, 2, None, "1 guarded call checked, 2 ops recorded, nothing found"),
        (0, 1, "report", "0 guarded calls checked, 1 op recorded, a problem found"),
    ],
)
def test_the_last_check_in_words(
    monkeypatch: pytest.MonkeyPatch, checked: int, recorded: int, report: Any, words: str
) -> None:
    monkeypatch.setattr(PROCESS, "last_check", "none")
    process.note_check(checked, recorded, report)
    assert PROCESS.last_check == words


@pytest.mark.parametrize(
    ("available", "initialized", "lost", "words"),
    [
        (False, False, False, "no GPU; `%cudacheck simulate` turns on a rehearsal device"),
        (True, False, False, "a GPU that this process has not used yet"),
        (True, True, False, "fine (H200)"),
        (
            True,
            True,
            True,
            "lost: an earlier CUDA kernel failed. Restart the notebook or the process (H200)",
        ),
    ],
)
def test_the_state_of_cuda_in_words(
    monkeypatch: pytest.MonkeyPatch, available: bool, initialized: bool, lost: bool, words: str
) -> None:
    def synchronize() -> None:
        if lost:
            raise RuntimeError

    monkeypatch.setattr(process.simulate, "current", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(process, "describe", lambda: SimpleNamespace(device="H200"))
    assert process._cuda() == words


@pytest.mark.parametrize(
    ("is_rehearsal", "device", "words"),
    [
        (True, "H200", f"fine ({simulate.DEVICE_NAME}, a rehearsal and not a GPU)"),
        (False, "H200", "fine (H200)"),
        (False, None, "fine (a GPU)"),
    ],
)
def test_the_device_by_its_name(
    monkeypatch: pytest.MonkeyPatch, is_rehearsal: bool, device: str | None, words: str
) -> None:
    monkeypatch.setattr(process.simulate, "current", lambda: "running" if is_rehearsal else None)
    for name in ("is_available", "is_initialized"):
        monkeypatch.setattr(torch.cuda, name, lambda: not is_rehearsal)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(process, "describe", lambda: SimpleNamespace(device=device))
    assert process._cuda() == words


def test_a_real_gpu_is_named_and_no_rehearsal_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process.simulate, "current", lambda: None)
    monkeypatch.setattr(process.simulate, "start", lambda: 1 / 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    assert ensure_cuda() == torch.device("cuda")
    assert capsys.readouterr().out == "cuda: H200\n"


@pytest.mark.parametrize(
    ("installed", "worker", "is_cleaned"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_a_loaders_worker_hands_on_errors_without_our_frames(
    monkeypatch: pytest.MonkeyPatch, installed: bool, worker: bool, is_cleaned: bool
) -> None:
    class Wrapper:
        """Keeps the traceback of an error, as torch's does as text."""

        def __init__(self, exc_info: Any = None, where: str = "") -> None:
            self.kind, self.error, self.trace = exc_info or sys.exc_info()
            self.where = where

    hidden: list[BaseException] = []
    monkeypatch.setattr(process._torch, "ExceptionWrapper", Wrapper)
    monkeypatch.setattr(process, "PROCESS", SimpleNamespace(is_installed=installed))
    monkeypatch.setattr(process, "is_loader_worker", lambda: worker)
    monkeypatch.setattr(process, "hide_own_frames", hidden.append)
    process._clean_worker_errors()
    error = ValueError("mine")
    try:
        raise error
    except ValueError:
        made = [Wrapper(where="worker 1"), Wrapper((ValueError, error, None), "worker 2")]
    assert hidden == ([error, error] if is_cleaned else [])
    assert [item.where for item in made] == ["worker 1", "worker 2"]
    assert all((item.kind, item.error) == (ValueError, error) for item in made)
    assert (made[1].trace is error.__traceback__) is is_cleaned


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("deferred", [False, True])
def test_only_deferred_guards_report_at_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch, deferred: bool
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(process, "_report_at_exit", lambda: asked.append(True))
    cudalens.install(deferred=deferred)
    cudalens.uninstall()
    assert bool(asked) is deferred
