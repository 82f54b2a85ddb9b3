"""Starting and stopping the rehearsal device: where it is refused, what is tried first."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cudalens
from cudalens.core.errors import SimulationError
from cudalens.simulate import activation
from cudalens.simulate.activation import Simulation, start
from cudalens.simulate.state import DeviceState, Forks
from tests.probes import SeenFunctions
from tests.releases import needs_rehearsal


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps of a start, none of which is taken: what was tried in another process first."""
    steps: list[str] = []
    monkeypatch.setattr(Simulation, "running", None)
    monkeypatch.setattr(Simulation, "_install", lambda self: steps.append("installed"))
    monkeypatch.setattr(activation, "_try_in_another_process", steps.append)
    monkeypatch.setattr(activation.atexit, "register", lambda call: None)
    monkeypatch.setattr(activation.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(activation.sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(activation.torch, "__version__", "2.13.0")
    return steps


def test_what_the_tests_ran_with_is_started_at_once(
    started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    simulation = start()
    assert started == ["installed"]
    assert simulation.is_active
    assert capsys.readouterr().out == f"{activation.ANNOUNCEMENT}\n"
    assert start() is simulation
    assert started == ["installed"]
    assert capsys.readouterr().out == ""


def test_the_package_is_the_function_that_starts_it(
    started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    package: Any = cudalens.simulate
    assert package.current() is None
    simulation = package(lag=3, seed=2, blocking=True)
    state = simulation._runtime.state
    assert (state._lag, state._random is None, state.blocking) == (3, False, True)
    assert capsys.readouterr().out == f"{activation.ANNOUNCEMENT}\n"
    assert package.current() is simulation is package(announce=False)
    assert package.DEVICE_NAME == "cudalens rehearsal device (CPU)"
    with pytest.raises(AttributeError, match=r"'cudalens.simulate' has no attribute 'missing'"):
        _ = package.missing


@pytest.mark.parametrize(
    ("system", "machine", "version", "tried"),
    [
        ("darwin", "x86_64", "2.13.0", "darwin x86_64"),
        ("linux", "aarch64", "2.13.0", "linux aarch64"),
        ("linux", "x86_64", "2.9.1", "torch 2.9.1"),
        ("linux", "aarch64", "2.99.0", "torch 2.99.0"),
    ],
)
def test_what_they_did_not_run_with_is_tried_in_another_process(
    started: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    system: str, machine: str, version: str, tried: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch, "__version__", version)
    start()
    assert started == [tried, "installed"]
    assert f"Not tried with {tried}; the self-check passed.\n" in capsys.readouterr().out


def test_nothing_is_printed_where_nothing_is_announced(
    started: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    start(announce=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"has_gpu": True}, "This machine has a GPU"),
        ({"platform": "win32"}, "on Windows, use WSL 2"),
        ({"machine": "riscv64"}, "this is linux riscv64"),
        ({"version": "2.7.1"}, "needs torch 2.8 or newer; this is torch 2.7.1"),
        ({"version": "2.8.0+cpu"}, None),
        ({"version": "3.0.0"}, None),
    ],
)
@pytest.mark.filterwarnings("error")
def test_where_it_cannot_run_it_is_refused(
    started: list[str], monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any],
    why: str | None,
) -> None:  # fmt: skip
    def is_available() -> bool:
        warnings.warn("a build for CUDA found no driver", stacklevel=1)
        return bool(changed.get("has_gpu"))

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(sys, "platform", changed.get("platform", "linux"))
    monkeypatch.setattr(platform, "machine", lambda: changed.get("machine", "x86_64"))
    monkeypatch.setattr(torch, "__version__", changed.get("version", "2.13.0"))
    if why is None:
        assert start(announce=False).is_active
        return
    with pytest.raises(SimulationError, match=why):
        start(announce=False)
    assert started == []
    assert Simulation.running is None


@pytest.mark.parametrize(
    ("code", "stderr", "why"),
    [
        (0, "a warning\n", None),
        (1, "a warning\nno such op\n", "no such op"),
        (1, "", "no reason given"),
        (-11, "", "with torch 9: its self-check ended the process with signal 11"),
    ],
)
def test_how_the_other_process_ended(
    monkeypatch: pytest.MonkeyPatch, code: int, stderr: str, why: str | None
) -> None:
    seen: list[Any] = []

    def run(command: list[str], *, env: dict[str, str], **options: Any) -> Any:
        seen.append((command[:2], env["PYTHONPATH"].split(os.pathsep), env["MINE"]))
        return SimpleNamespace(returncode=code, stderr=stderr)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "path", ["", "one", "two"])
    monkeypatch.setenv("MINE", "kept")
    if why is None:
        activation._try_in_another_process("torch 9")
    else:
        with pytest.raises(SimulationError, match=why):
            activation._try_in_another_process("torch 9")
    assert seen == [([sys.executable, "-c"], ["one", "two"], "kept")]


@pytest.mark.parametrize(
    ("error", "why"),
    [(SimulationError("no such op"), "no such op"), (KeyboardInterrupt(), "KeyboardInterrupt")],
)
def test_a_self_check_that_fails_says_why_in_one_line(
    error: BaseException, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Simulation) -> None:
        raise error

    monkeypatch.setattr(Simulation, "_install", fail)
    with pytest.raises(SystemExit) as ended:
        activation.check_self()
    assert ended.value.code == why


def test_the_with_statement_that_started_it_stops_it(started: list[str]) -> None:
    with start(announce=False) as outer:
        with start(announce=False) as inner:
            assert inner is outer
        assert outer.is_active
        with outer:
            pass
        assert outer.is_active
        outer._remove = outer._registrations.remove  # type: ignore[method-assign]
    assert not outer.is_active
    assert Simulation.running is None


def test_a_with_statement_around_a_running_one_leaves_it_running(started: list[str]) -> None:
    simulation = start(announce=False)
    with start(announce=False):
        pass
    assert simulation.is_active
    with simulation:
        pass
    assert not simulation.is_active


@pytest.mark.parametrize(
    ("error", "kind", "why"),
    [
        (ValueError("a\nb"), SimulationError, r" the list of ops failed: ValueError: a$"),
        (SimulationError("as it is"), SimulationError, "^as it is$"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
)
def test_a_step_that_fails_takes_back_those_before_it(
    error: BaseException, kind: type[BaseException], why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    undone: list[str] = []

    def fail() -> None:
        raise error

    monkeypatch.setattr(activation, "yaml_facts", fail)
    monkeypatch.setattr(Simulation, "_remove", lambda self: undone.append("removed"))
    with pytest.raises(kind, match=why):
        Simulation(DeviceState())._install()
    assert undone == ["removed"]


def test_a_program_that_ends_without_a_wait_prints_what_is_pending(
    capfd: pytest.CaptureFixture[str],
) -> None:
    simulation = Simulation(DeviceState())
    simulation._print_pending()
    assert capfd.readouterr().err == ""
    simulation.device_assert("aten::mine", "mine.cu:1: Assertion `x` failed.")
    assert simulation.pending == "mine.cu:1: Assertion `x` failed."
    simulation._print_pending()
    assert capfd.readouterr().err == "mine.cu:1: Assertion `x` failed.\n"
    simulation.reset()
    assert (simulation.pending, simulation.fault, simulation.is_poisoned) == (None, None, False)


# --- real starts ----------------------------------------------------------------------------------


@needs_rehearsal
def test_the_devices_numbers_follow_an_earlier_seed() -> None:
    drawn = []
    for seed in (11, 11, 12):
        torch.manual_seed(seed)
        with start(announce=False):
            drawn.append(torch.rand(3, device="cuda").tolist())
    assert drawn[0] == drawn[1] != drawn[2]


@needs_rehearsal
def test_a_start_under_guards_makes_no_finding_of_its_self_check() -> None:
    with cudalens.guard(), SeenFunctions() as watch, start(announce=False) as simulation:
        assert watch.names == []
        assert (simulation.pending, simulation.fault) == (None, None)
        with pytest.raises(cudalens.DeviceIndexError):
            torch.zeros(3, device="cuda")[torch.tensor([3], device="cuda")]


@needs_rehearsal
@pytest.mark.parametrize("blocking", [True, False, None])
def test_the_self_check_leaves_no_trace(
    blocking: bool | None, capfd: pytest.CaptureFixture[str]
) -> None:
    with start(announce=False, blocking=blocking, lag=2, seed=1) as simulation:
        state = simulation._runtime.state
        assert (state.blocking, state._lag, state.failure) == (blocking, 2, None)
        assert not simulation.is_poisoned
    assert capfd.readouterr() == ("", "")


@needs_rehearsal
def test_code_that_only_a_gpu_has_is_kept_away_while_the_device_runs() -> None:
    flags = (
        torch._C._get_cudnn_enabled,
        torch._C._get_flash_sdp_enabled,
        torch._C._get_mem_efficient_sdp_enabled,
        torch._C._get_cudnn_sdp_enabled,
    )
    before = [flag() for flag in flags]
    with start(announce=False):
        assert [flag() for flag in flags] == [False] * 4
    assert [flag() for flag in flags] == before != [False] * 4


@needs_rehearsal
def test_what_poisoned_the_device_is_one_object_for_one_fault() -> None:
    with start(announce=False) as simulation:
        faults = []
        for _ in range(2):
            simulation.device_assert("aten::mine", "mine.cu:1: Assertion `x` failed.")
            assert simulation.fault is None
            with pytest.raises(torch.AcceleratorError):
                torch.cuda.synchronize()
            assert simulation.fault is simulation.fault is not None
            faults.append(simulation.fault)
            simulation.reset()
        assert faults[0] is not faults[1]
        x = torch.ones(1, device="cuda")
        assert simulation.memory_allocated() == torch.cuda.memory_allocated() >= 512
        assert x.is_cuda
    simulation.stop()  # harmless


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError("device_ready_queues_.size()"), "This process already ran a backward"),
        (RuntimeError("another"), "another"),
    ],
)
def test_a_backward_that_fails_is_told_by_its_cause(
    error: RuntimeError, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> None:
        raise error

    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda size, device, **rest: ones(size, **rest))
    with pytest.raises(RuntimeError, match="instead of 6"):
        activation._check_values()  # of another device
    monkeypatch.setattr(torch.Tensor, "backward", fail)
    with pytest.raises(RuntimeError, match=why) as caught:
        activation._check_values()
    assert isinstance(caught.value, SimulationError) is why.startswith("This")


@pytest.mark.parametrize(
    ("forked", "reset", "printed"), [(False, False, True), (True, False, False),
    (False, True, False)],
)  # fmt: skip
def test_a_child_process_prints_no_assert_of_its_parent(
    forked: bool, reset: bool, printed: bool, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    simulation = Simulation(DeviceState())
    simulation.device_assert("aten::mine", "the line")
    monkeypatch.setattr(Forks, "count", Forks.count + forked)
    if reset:
        simulation.reset()
    simulation._print_pending()
    assert capfd.readouterr().err == ("the line\n" if printed else "")
