"""Device asserts: how they surface, and what a poisoned device does."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cudalens.simulate import Simulation
from cudalens.simulate.state import DeviceState, Forks
from tests.releases import here
from tests.simulate.device import ASSERTED, on_cuda, run_python
from tests.sticky_calls import ADVICE, NO_CUBLAS, ORDINAL, TEXT, expected, texts_after

pytestmark = pytest.mark.usefixtures("seeded")


# --- device asserts ------------------------------------------------------------------------


def assert_fails_late(
    sim: Simulation, capfd: pytest.CaptureFixture[str], launch: Callable[[], Any], expression: str
) -> Any:
    """Check that a launch goes through, and that the error comes late, once in text, and stays."""
    result = launch()
    assert not sim.is_poisoned
    assert sim.pending is not None and expression in sim.pending
    with pytest.raises(torch.AcceleratorError, match=ASSERTED):
        torch.cuda.synchronize()
    assert (sim.is_poisoned, sim.pending) == (True, None)
    assert expression in capfd.readouterr().err
    with pytest.raises(torch.AcceleratorError, match=ASSERTED) as again:
        torch.ones(1, device="cuda")
    assert again.value.error_code == 710
    assert capfd.readouterr().err == ""
    sim.reset()
    return result


SCATTERED = 'idx_dim < index_size && "index out of bounds"'


def test_assert_of_one_hot(sim: Simulation, capfd: pytest.CaptureFixture[str]) -> None:
    """It relies on the assertion of its scatter; the CPU raises at once."""
    good, bad = torch.tensor([[0, 3], [0, 4]], device="cuda")
    expected = F.one_hot(good, 4)
    torch.cuda.synchronize()
    result = assert_fails_late(sim, capfd, lambda: F.one_hot(bad, 4), SCATTERED)
    assert result.is_cuda and result.shape == expected.shape


def test_assert_in_backward(sim: Simulation, capfd: pytest.CaptureFixture[str]) -> None:
    logits = on_cuda(2, 3).requires_grad_()
    target = torch.tensor([0, 1], device="cuda")
    loss = F.cross_entropy(logits, target)
    target.data[1] = 7
    torch.cuda.synchronize()
    assert_fails_late(sim, capfd, loss.backward, "nll_loss_backward_reduce_cuda_kernel_2d")


# --- what a poisoned device does -----------------------------------------------------------


def launch_a_bad_write() -> None:
    x = torch.ones(2, device="cuda")
    assert x.scatter_(0, torch.tensor([2], device="cuda"), 1.0) is x


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(lambda x: x.item(), id="item"),
        pytest.param(lambda x: x.cpu(), id="cpu"),
        pytest.param(lambda x: x.tolist(), id="tolist"),
        pytest.param(bool, id="bool"),
        pytest.param(repr, id="repr"),
        pytest.param(lambda x: x.nonzero(), id="nonzero"),
        pytest.param(lambda x: torch.cuda.current_stream().synchronize(), id="stream"),
    ],
)
def test_sticky_error_surfaces_at_the_next_wait(
    wait: Callable[[Tensor], Any], sim: Simulation, capfd: pytest.CaptureFixture[str]
) -> None:
    """Launches do not wait, however many; whatever waits raises the error of an earlier one."""
    innocent = torch.tensor(1.0, device="cuda")
    launch_a_bad_write()
    for _ in range(20):
        innocent.add_(1)
    assert not sim.is_poisoned
    with pytest.raises(torch.AcceleratorError, match=ASSERTED):
        wait(innocent)
    assert SCATTERED in capfd.readouterr().err


def test_sticky_error_leaves_the_host_side_usable(sim: Simulation) -> None:
    x = on_cuda(2, 3)
    launch_a_bad_write()
    with pytest.raises(torch.AcceleratorError):
        torch.cuda.synchronize()
    assert torch.cuda.is_available()
    assert (x.shape, x.view(6).shape, x.t().is_cuda) == ((2, 3), (6,), True)
    del x
    for call in (lambda: torch.ones(1, device="cuda"), torch.ones(1).cuda, torch.cuda.synchronize):
        with pytest.raises(torch.AcceleratorError, match=ASSERTED):
            call()
    assert torch.ones(2).sum().item() == 2.0
    sim.reset()
    assert torch.ones(1, device="cuda").item() == 1.0


def test_sticky_error_crosses_threads() -> None:
    thread = threading.Thread(target=launch_a_bad_write)
    thread.start()
    thread.join()
    with pytest.raises(torch.AcceleratorError, match=ASSERTED):
        torch.cuda.synchronize()


def test_sticky_first_failure_wins(capfd: pytest.CaptureFixture[str]) -> None:
    """Of several bad launches the first one is reported, once, when the error is raised."""
    x, index = torch.ones(2, device="cuda"), torch.tensor([2], device="cuda")
    x.take(index)
    x.gather(0, index)
    assert capfd.readouterr().err == ""
    for _ in range(2):
        with pytest.raises(torch.AcceleratorError):
            torch.cuda.synchronize()
    (line,) = capfd.readouterr().err.splitlines()
    assert "cuda_take_put_kernel() index out of bounds" in line


@pytest.mark.parametrize("blocking", ["0", "1"])
def test_process_that_does_not_catch_it(blocking: str) -> None:
    """torch's error and the line are on stderr; CUDA_LAUNCH_BLOCKING=1 names the bad line too."""
    done = run_python(
        """
import torch
from cudalens.simulate import start
start()
def guilty():
    torch.embedding(torch.ones(3, 2, device="cuda"), torch.tensor([3], device="cuda"))
guilty()
print("launched")
torch.cuda.synchronize()
""",
        CUDA_LAUNCH_BLOCKING=blocking,
    )
    assert done.returncode == 1
    assert here("Indexing.cu:1582: indexSelectSmallIndex: block: [0,0,0]") in done.stderr
    assert "AcceleratorError: CUDA error: device-side assert triggered" in done.stderr
    assert ("in guilty" in done.stderr, "launched" in done.stdout) == (
        (True, False) if blocking == "1" else (False, True)
    )


def test_near_the_recursion_limit_it_raises_what_the_cpu_raises() -> None:
    done = run_python(
        """
import sys, torch
from cudalens.simulate import start
start()
def deep(room):
    return torch.ones(3, device="cuda").sum() if room == 0 else deep(room - 1)
outcomes = set()
for spare in range(2, 60):
    try:
        deep(sys.getrecursionlimit() - spare)
        outcomes.add("runs")
    except Exception as error:
        outcomes.add(type(error).__name__)
print(sorted(outcomes))
"""
    )
    assert done.stdout.splitlines()[-1] == "['RecursionError', 'runs']"


# --- exceptions of the user's in the device's autograd thread --------------------------------


def leaf() -> Tensor:
    return torch.ones(3, device="cuda", requires_grad=True)


def test_an_exception_in_the_autograd_thread_reaches_the_caller() -> None:
    """Raised in a hook, twice; then backward works again."""

    def fail(*values: Any) -> None:
        raise KeyError("mine")

    for _ in range(2):
        y = leaf() * 2
        y.register_hook(fail)
        with pytest.raises(KeyError, match="mine"):
            y.sum().backward()
    x = leaf()
    (x * 3).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3.0, 3.0, 3.0]


# --- as in the CUDA lane ---------------------------------------------------------------------


@pytest.mark.parametrize("blocking", ["0", "1"])
def test_calls_raise_as_on_torch_s_cuda_build(
    sim: Simulation, blocking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``tests/cuda_host/test_sticky_calls.py`` holds that build to the same table."""

    def lose() -> None:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
        with contextlib.suppress(torch.AcceleratorError):
            launch_a_bad_write()

    text = TEXT + ("" if blocking == "1" else ADVICE)
    assert texts_after(lose) == expected(text)
    sim.reset()
    with pytest.raises(torch.AcceleratorError) as caught:
        torch.ones(1, device="cuda:9")
    assert str(caught.value) == ORDINAL


def matmul() -> Tensor:
    x = torch.ones(3, 3, device="cuda")
    return x @ x


def test_cublas_cannot_start_on_a_lost_device(
    sim: Simulation, capfd: pytest.CaptureFixture[str]
) -> None:
    """The assert is still to be reported: its text is printed, and the status is raised."""
    sim.reset()
    x = torch.ones(3, 3, device="cuda")
    launch_a_bad_write()
    with pytest.raises(RuntimeError) as caught:
        x @ x
    assert (type(caught.value), str(caught.value)) == (RuntimeError, NO_CUBLAS)
    assert "Assertion" in capfd.readouterr().err
    with pytest.raises(torch.AcceleratorError):
        torch.cuda.synchronize()


def test_a_matmul_before_the_loss_leaves_cublas_ready(sim: Simulation) -> None:
    sim.reset()
    matmul()
    x = torch.ones(3, 3, device="cuda")
    launch_a_bad_write()
    with pytest.raises(torch.AcceleratorError):
        torch.cuda.synchronize()
    with pytest.raises(torch.AcceleratorError):
        x @ x


# --- forks ----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_compiler_can_trace_what_asks_for_a_fork(sim: Simulation) -> None:
    """It warns of functions that it does not know, such as ``os.getpid``."""
    import torch._dynamo  # takes seconds

    torch.compiler.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(lambda x: x.sum().item(), backend="eager")(on_cuda(3))
    assert not [item for item in caught if "getpid" in str(item.message)]
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("asked", "variable", "is_it"),
    [
        (None, "1", True),
        (None, "0", False),
        (None, "", False),
        (None, None, False),
        (True, "0", True),
        (False, "1", False),
    ],
)
def test_whether_each_launch_waits(
    asked: bool | None, variable: str | None, is_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked for comes before CUDA's own variable, of which 0 and nothing mean no."""
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", variable)
    assert DeviceState(blocking=asked).is_blocking is is_it


# --- the state alone -----------------------------------------------------------------------


@pytest.mark.parametrize(("index", "is_there"), [(None, True), (0, True), (-1, True), (1, False)])
def test_there_is_one_device(index: int | None, is_there: bool) -> None:
    state = DeviceState()
    if is_there:
        state.check_device_index(index)
        return
    with pytest.raises(torch.AcceleratorError, match="invalid device ordinal") as caught:
        state.check_device_index(index)
    assert caught.value.error_code == 101


def test_the_state_forgets_all_that_an_error_left(capfd: pytest.CaptureFixture[str]) -> None:
    state = DeviceState(lag=1, blocking=False)
    state.use_cublas()
    state.set_sync_debug_mode(2)
    state.device_assert("one", "first")
    state.device_assert("two", "second")
    assert state.failure is not None and (state.failure.op, state.pending) == ("one", "first")
    state.launch()
    with pytest.raises(torch.AcceleratorError):
        state.launch()
    assert (state.is_poisoned, state.pending) == (True, None)
    state.reset()
    assert (state.failure, state.is_poisoned, state.sync_debug_mode) == (None, False, 0)
    state.launch()
    state.check_context()
    state.device_assert("three", "third")
    with pytest.raises(RuntimeError, match="CUBLAS_STATUS_NOT_INITIALIZED"):
        state.use_cublas()  # the handle went with the error
    assert state.is_poisoned
    assert capfd.readouterr().err == "first\nthird\n"


@pytest.mark.parametrize(("mode", "refused"), [(-1, True), (0, False), (2, False), (3, True)])
def test_the_mode_of_waits_is_one_of_three(mode: int, refused: bool) -> None:
    state = DeviceState()
    with (
        pytest.raises(RuntimeError, match="invalid value") if refused else contextlib.nullcontext()
    ):
        state.set_sync_debug_mode(mode)
    assert state.sync_debug_mode == (0 if refused else mode)


def test_each_wait_is_counted_and_told_as_the_mode_says() -> None:
    state = DeviceState(blocking=False)
    state.synchronizing()
    state.set_sync_debug_mode(1)
    with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
        state.synchronizing()
    state.device_assert("one", "first")
    with pytest.warns(UserWarning), pytest.raises(torch.AcceleratorError):
        state.synchronizing()
    state.set_sync_debug_mode(2)
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        state.synchronizing()
    assert state.sync_count == 4
    state.sync_debug_mode = 0
    with pytest.raises(torch.AcceleratorError):
        state.sync()
    assert state.sync_count == 4


@pytest.mark.parametrize(
    ("variable", "blocking"), [("1", True), ("2", True), ("", False), ("0", False), (None, False)]
)
def test_a_variable_makes_each_launch_wait(
    variable: str | None, blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", variable)
    assert DeviceState().is_blocking is blocking
    assert not DeviceState(blocking=False).is_blocking and DeviceState(blocking=True).is_blocking


def test_the_advice_is_left_out_where_each_launch_waits() -> None:
    for blocking in (True, False):
        state = DeviceState(blocking=False)
        state.device_assert("one", "first")
        state.blocking = blocking
        with pytest.raises(torch.AcceleratorError) as caught:
            state.sync()
        assert ("CUDA_LAUNCH_BLOCKING=1" in str(caught.value)) is not blocking


def test_a_child_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state = DeviceState()
    assert not state.is_forked
    monkeypatch.setattr(Forks, "count", Forks.count)
    Forks.add()
    assert state.is_forked and not DeviceState().is_forked
    for call in (state.launch, state.sync, state.use_cublas, state.synchronizing):
        with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
            call()


@pytest.mark.parametrize(
    ("lag", "seed", "lags"),
    [(None, None, {9}), (None, 1, {9}), (2, None, {2}), (0, 0, {0}), (2, 0, {0, 1, 2})],
)
def test_a_lag_is_fixed_or_drawn_by_a_seed(
    lag: int | None, seed: int | None, lags: set[int]
) -> None:
    """Without a lag no launch raises, and every seed counts, 0 too."""

    def drawn() -> list[int]:
        state, found = DeviceState(lag=lag, seed=seed, blocking=False), []
        for _ in range(30):
            state.device_assert("one", "first")
            passed = 0
            with contextlib.suppress(torch.AcceleratorError):
                while passed < 9:
                    state.launch()
                    passed += 1
            found.append(passed)
            state.reset()
        return found

    assert {*drawn()} == lags
    assert drawn() == drawn()
