"""The machinery of the rehearsal device: start, stop, refusals, sticky state, labels, kernels."""

from __future__ import annotations

import gc
import platform
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import cudalens
from cudalens import simulate
from cudalens.simulate import _internals, activation
from cudalens.simulate.memory import METER
from cudalens.simulate.state import DeviceState
from tests.blocks import cuda
from tests.processes import python
from tests.releases import needs_rehearsal, release
from tests.simulate.device import run_python

LINE = "Kernel.cu:1: kernel: block: [0,0,0], thread: [0,0,0] Assertion `i < n` failed."
PATCHED_OWNERS = (
    torch,
    torch._C,
    torch.Tensor,
    torch.UntypedStorage,
    torch.cuda,
    torch.cuda.graphs,
    torch.cuda.memory,
    torch.cuda.nvtx,
    torch.cuda.random,
    torch.cuda.streams,
    torch.accelerator,
    getattr(torch.accelerator, "memory", torch.accelerator),
)
FLAGS = (
    torch._C._get_cudnn_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)


def snapshot() -> dict[str, Any]:
    """Return every attribute that may be patched, and every flag."""
    found = {f"{owner}.{n}": value for owner in PATCHED_OWNERS for n, value in vars(owner).items()}
    return found | {flag.__name__: flag() for flag in FLAGS}


def changed(before: dict[str, Any]) -> list[str]:
    now = snapshot()
    return [n for n in {*before, *now} if before.get(n, now) is not now.get(n, before)]


# --- start and stop ------------------------------------------------------------------------------


def test_importing_the_package_does_not_import_torch() -> None:
    """`import cudalens` stays cheap: the simulation brings torch in when it starts."""
    code = "import sys, cudalens.simulate as s; s.current(); print('torch' in sys.modules)"
    assert python("-c", code, fresh=True).stdout.strip() == "False"


@pytest.mark.parametrize(
    ("options", "said"), [({}, [simulate.ANNOUNCEMENT]), ({"announce": False}, [])]
)
def test_the_package_is_callable_and_says_what_it_is(
    capsys: pytest.CaptureFixture[str], options: dict[str, bool], said: list[str]
) -> None:
    """`cudalens.simulate()` starts the device with one honest line, or quietly."""
    with simulate(**options) as simulation:  # type: ignore[operator]
        assert simulation.is_active
        assert torch.cuda.get_device_name() == simulate.DEVICE_NAME
    assert capsys.readouterr().out.splitlines() == said


def test_stop_restores_every_attribute_flag_and_kernel() -> None:
    # What refuses tensors of a device that is off stays from the first stop on.
    simulate.start(announce=False).stop()
    before, has_kernel = snapshot(), torch._C._dispatch_has_kernel_for_dispatch_key
    had_kernel = has_kernel("aten::convolution", "CUDA")
    for _ in range(2):
        simulation = simulate.start(announce=False)
        assert changed(before)
        assert torch.cuda.is_available()
        simulation.stop()
        assert changed(before) == []
        assert has_kernel("aten::convolution", "CUDA") == had_kernel


def test_a_start_that_is_interrupted_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    before = snapshot()
    monkeypatch.setattr(activation, "_check_values", fail)
    with pytest.raises(KeyboardInterrupt):
        simulate.start(announce=False)
    assert changed(before) == []
    assert simulate.current() is None


def train(device: str) -> str:
    layer = torch.nn.Linear(2, 1).to(device)
    layer(torch.ones(3, 2, device=device)).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.device.type


def test_after_stop_the_cpu_works_and_old_tensors_refuse() -> None:
    """Also where the device was poisoned; a second start works."""
    with simulate.start(announce=False):
        old = torch.ones(2, device="cuda")
        assert train("cuda") == "cuda"
        old.take(torch.tensor([2], device="cuda"))
    assert not torch.cuda.is_available()
    assert train("cpu") == "cpu"
    for refused in (lambda: old + 1, lambda: torch.ones(2, device="cuda")):
        with pytest.raises((NotImplementedError, AssertionError, RuntimeError)):
            refused()
    with simulate.start(announce=False):
        assert train("cuda") == "cuda"


def test_starting_twice_gives_the_running_simulation() -> None:
    """There is one device; a stopped simulation no longer stops its successor."""
    first = simulate.start(announce=False)
    assert simulate.start(announce=False) is first
    first.stop()
    first.stop()
    with simulate.start(announce=False) as second:
        first.stop()
        assert not first.is_active
        assert second.is_active
        assert simulate.current() is second
    assert simulate.current() is None


def test_the_self_check_is_no_call_of_the_users() -> None:
    names = []

    class Names(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Names(), simulate.start(announce=False):
        torch.ones(2, device="cuda").relu()
    assert names == ["ones", "relu"]


def test_leaving_a_nested_with_statement_leaves_the_outer_simulation() -> None:
    """Whoever found it running does not stop it, however deep; whoever started it does."""
    with simulate.start(announce=False) as outer:
        with simulate.start(announce=False) as inner, outer:
            assert inner is outer
        assert outer.is_active
        with simulate.start(announce=False):
            simulate.start(announce=False)
        assert outer.is_active
    assert not outer.is_active


def test_stop_ends_the_simulation_inside_any_with_statement() -> None:
    """What is asked for by name is done; leaving then has nothing left to stop."""
    with simulate.start(announce=False) as outer, simulate.start(announce=False) as inner:
        inner.stop()
        assert not outer.is_active
        with simulate.start(announce=False) as second:
            pass
    assert simulate.current() is None
    assert not second.is_active


# --- refusals ------------------------------------------------------------------------------------


@needs_rehearsal
@pytest.mark.parametrize(
    ("owner", "name", "value", "words"),
    [
        (torch.cuda, "is_available", lambda: True, "has a GPU"),
        (torch, "__version__", "2.7.1+cu126", "needs torch 2.8 or newer; this is torch 2.7.1"),
        (platform, "machine", lambda: "riscv64", "x86-64 or ARM64"),
        (sys, "platform", "win32", "WSL 2"),
        (activation, "install_device", "", "registering the device failed: TypeError: 'str'"),
    ],
)
def test_it_refuses_in_one_sentence(
    owner: Any, name: str, value: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value)
        with pytest.raises(simulate.SimulationError, match=words) as raised:
            simulate.start(announce=False)
    assert "\n" not in str(raised.value)
    assert changed(before) == []


@pytest.mark.parametrize(("release", "is_tried"), [("2.99.0", False), ("2.13.1", True)])
def test_an_untried_torch_gets_one_line_and_runs(
    release: str,
    is_tried: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    with simulate.start():
        assert torch.ones(2, device="cuda").sum().item() == 2.0
    line = "" if is_tried else f"Not tried with torch {release}; the self-check passed.\n"
    assert capfd.readouterr() == (f"{simulate.ANNOUNCEMENT}\n{line}", "")


@pytest.mark.parametrize(
    ("what_breaks", "words"),
    [
        (
            "import torch\ntorch._C._get_accelerator = str",
            "registering the device failed: OSError: torch did not accept",
        ),
        ("import os\nos.abort()", "does not work with torch 2.99.0: its self-check ended the proc"),
    ],
)
def test_an_untried_torch_that_fails_or_crashes_is_refused_in_one_sentence(
    what_breaks: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(what_breaks)
    before = snapshot()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        patch.setattr(torch, "__version__", "2.99.0")
        with pytest.raises(simulate.SimulationError, match=words) as raised:
            simulate.start(announce=False)
    assert "\n" not in str(raised.value)
    assert changed(before) == []


@needs_rehearsal
def test_the_self_check_notices_an_assertion_that_does_not_fire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DeviceState, "device_assert", lambda *call: None)
    with pytest.raises(simulate.SimulationError, match="went unnoticed"):
        simulate.start(announce=False)
    assert simulate.current() is None


@needs_rehearsal
def test_it_refuses_after_a_backward() -> None:
    """The engine has no thread for a device that came later: restart the kernel first."""
    code = (
        "import torch\nfrom cudalens import simulate\n"
        "torch.ones(1, requires_grad=True).sum().backward()\n"
        "try:\n    simulate.start(announce=False)\n"
        "except simulate.SimulationError as error:\n"
        "    print(error, torch.cuda.is_available(), simulate.current())\n"
    )
    result = run_python(code)
    assert "restart the kernel first" in result.stdout
    assert result.stdout.rstrip().endswith("False None")
    assert result.returncode == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.eye(2, device="cuda").to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2, device="cuda")] * 2).sum(),
        lambda: torch.quantize_per_tensor(torch.ones(2, device="cuda"), 0.1, 0, torch.qint8),
        lambda: torch.cuda.CUDAGraph(),
        # The refusal speaks of the device and not of the CPU.
        lambda: torch.Generator("cuda").set_offset(4),
        lambda: torch.Generator("cuda").get_offset(),
        lambda: torch.Generator("cuda").graphsafe_get_state(),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_not_rehearsed_says_so(
    call: Callable[[], object], sim: simulate.Simulation
) -> None:
    with pytest.raises(simulate.NotRehearsedError, match="not rehearsed") as raised:
        call()
    assert isinstance(raised.value, NotImplementedError)
    assert "real GPU" in str(raised.value)


def test_a_second_device_does_not_exist(sim: simulate.Simulation) -> None:
    """cuda:0 works, cuda:1 is CUDA's own invalid ordinal and poisons nothing."""
    assert torch.ones(1, device="cuda:0").item() == 1.0
    for call in (
        lambda: torch.ones(1, device="cuda:1"),
        lambda: torch.cuda.set_device(1),
        lambda: torch.cuda.get_device_properties(1),
    ):
        with pytest.raises(torch.AcceleratorError, match="invalid device ordinal") as raised:
            call()
        assert raised.value.error_code == 101
    assert torch.ones(1, device="cuda").item() == 1.0


# --- sticky error --------------------------------------------------------------------------------


def launches_until_error(state: DeviceState, limit: int = 50) -> int:
    for passed in range(limit):
        try:
            state.launch()
        except torch.AcceleratorError:
            return passed
    return limit


@pytest.mark.parametrize(("rows", "is_refused"), [(2, False), (3, True)])
def test_a_call_that_is_refused_on_the_host_launches_nothing(
    rows: int, is_refused: bool, sim: simulate.Simulation
) -> None:
    target, source = torch.zeros(3, 4, device="cuda"), torch.ones(rows, 4, device="cuda")
    refusal = pytest.raises(RuntimeError, match="Number of indices")
    with refusal if is_refused else nullcontext():
        target.index_add_(0, cuda(0, 7), source)
    assert (sim.pending is None) == is_refused


@pytest.mark.parametrize("lag", [0, 1, 5])
def test_a_fixed_lag_lets_exactly_so_many_launches_pass(lag: int) -> None:
    with simulate.start(lag=lag, announce=False):
        x = torch.ones(2, device="cuda")
        x.take(torch.tensor([2], device="cuda"))
        for _ in range(lag):
            x += 1
        with pytest.raises(torch.AcceleratorError):
            x += 1


@needs_rehearsal
def test_a_seeded_lag_repeats_and_stays_in_its_range() -> None:
    def lags(seed: int) -> list[int]:
        state = DeviceState(lag=3, seed=seed, blocking=False)
        found = []
        for _ in range(60):
            state.device_assert("op", LINE)
            found.append(launches_until_error(state))
            state.reset()
        return found

    assert lags(1) == lags(1)
    assert lags(1) != lags(2)
    assert set(lags(1)) == {0, 1, 2, 3}


@needs_rehearsal
@pytest.mark.parametrize(
    ("blocking", "variable", "raises"),
    [
        (None, "1", True),
        (None, "0", False),
        (None, None, False),
        (True, None, True),
        (False, "1", False),
    ],
)
def test_blocking_raises_at_the_failing_launch(
    blocking: bool | None, variable: str | None, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_LAUNCH_BLOCKING is read at each launch; the argument outranks it."""
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    state = DeviceState(blocking=blocking)
    if variable is not None:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", variable)
    with pytest.raises(torch.AcceleratorError) if raises else nullcontext() as raised:
        state.device_assert("op", LINE)
    assert state.pending == (None if raises else LINE)
    assert raised is None or "asynchronously" not in str(raised.value)


# --- exports of the process ----------------------------------------------------------------------

EXIT = """
import threading, time, torch
from cudalens import simulate
sim = simulate.start(announce=False)
table = torch.zeros(3, 2, device="cuda", requires_grad=True)
loss = torch.nn.functional.embedding(torch.tensor([0, {index}], device="cuda"), table).sum()
loss.register_hook(lambda grad: grad * 2)
try:
    torch.cuda.synchronize()
except torch.AcceleratorError:
    pass
assert sim.is_poisoned == ({index} == 3)
if {stop}:
    sim.stop()
threading.Thread(target=time.sleep, args=(0.2,), daemon=True).start()
"""


@needs_rehearsal
@pytest.mark.parametrize(("index", "stop"), [(2, False), (3, False), (2, True)])
def test_exit_with_live_tensors_graph_and_thread_is_clean(index: int, stop: bool) -> None:
    """The interpreter ends with status 0 and adds nothing, poisoned or not, stopped or not."""
    result = run_python(EXIT.format(index=index, stop=stop))
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("\n") == (index == 3)


@needs_rehearsal
def test_the_headers_of_the_wheel_have_the_slots() -> None:
    guard = _internals.virtual_slots(_internals.GUARD_HEADER)
    assert (guard["type"], guard["exchangeStream"]) == (0, 9)
    assert guard["deviceCount"] == (15 if release() >= (2, 11) else 14)
    hooks = _internals.virtual_slots(_internals.HOOKS_HEADER)
    assert (hooks["isBuilt"], hooks["deviceCount"], hooks["isPinnedPtr"]) == (2, 6, 11)


def test_streams_that_cpp_makes_are_the_default_stream(sim: simulate.Simulation) -> None:
    for stream in (torch.Stream("cuda"), torch.accelerator.current_stream()):
        assert (stream.device, stream.stream_id) == (torch.device("cuda", 0), 0)
    assert torch.accelerator.device_count() == 1


# --- labels --------------------------------------------------------------------------------------


def test_memory_is_counted_until_the_storage_dies(sim: simulate.Simulation) -> None:
    """One byte counts 512, 513 count 1024, a view nothing; freeing gives all of it back."""
    gc.collect()  # what earlier code left must not be freed in between
    base = METER.allocated_bytes
    small = torch.zeros(1, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - base == 512
    large = torch.zeros(513, dtype=torch.uint8, device="cuda")
    view = large[1:]
    assert sim.memory_allocated() - base == 512 + 1024
    del large
    assert sim.memory_allocated() - base == 512 + 1024
    del view, small
    assert sim.memory_allocated() == base
    assert torch.cuda.max_memory_allocated() >= base + 512 + 1024
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == base


def test_lazy_conjugate_and_negative_survive_the_labels(sim: simulate.Simulation) -> None:
    """A capsule drops the conj and neg bits; the labelled values must not."""
    host = torch.tensor([1 + 2j, 3 - 4j])
    device = host.cuda()
    assert torch.equal(device.conj().cpu(), host.conj())
    assert torch.equal((device.conj() * device).cpu(), host.conj() * host)
    assert torch.equal(device.conj().imag.cpu(), host.conj().imag)
    assert torch.equal(torch.vdot(device, device).cpu(), torch.vdot(host, host))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(1 << 50, device="cuda"),
        lambda: torch.zeros(1, device="cuda").expand(1 << 50) + 1,
        lambda: torch.zeros(1, device="cuda").expand(1 << 50).clone(),
    ],
)
def test_a_tensor_that_fits_nowhere_is_cuda_s_error(
    sim: simulate.Simulation, make: Callable[[], torch.Tensor]
) -> None:
    """CUDA raises OutOfMemoryError with the sizes; the host's own error stays the host's."""
    check = cudalens.check()
    with pytest.raises(torch.OutOfMemoryError) as caught, check:
        make()
    assert str(caught.value).startswith("CUDA out of memory. Tried to allocate 4194304.00 GiB. GPU")
    assert check.report is not None and check.report.kind == "cuda_error"
    assert check.report.headline_schema.startswith("the GPU has no room for 4194304.00 GiB: ")
    with pytest.raises(RuntimeError) as host:
        torch.empty(1 << 50)
    assert not isinstance(host.value, torch.OutOfMemoryError)
    assert torch.ones(2, device="cuda").sum().item() == 2


# --- kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 2, 4, 6])
def test_out_is_filled_reshaped_or_grown(start: int, sim: simulate.Simulation) -> None:
    out = torch.full((start,), 7.0, device="cuda")
    kept = out.data_ptr() if start == 4 else None
    x = torch.arange(4.0, device="cuda")
    if start in (0, 4):
        torch.add(x, 1, out=out)
    else:
        with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
            torch.add(x, 1, out=out)
    assert out.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert kept is None or out.data_ptr() == kept


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("number", [2, True, 2.5, 1 + 2j])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_python_numbers_promote_as_on_the_cpu(
    number: complex, dtype: torch.dtype, shape: tuple[int, ...], sim: simulate.Simulation
) -> None:
    host = torch.ones(shape, dtype=dtype)
    expected = host * number
    result = host.cuda() * number
    assert result.dtype == expected.dtype
    # complex32 has no comparison on the CPU.
    assert torch.equal(result.cpu().to(torch.complex64), expected.to(torch.complex64))


def test_a_kernel_of_the_user_can_assert(sim: simulate.Simulation) -> None:
    sim.device_assert("myops::kernel", LINE)
    torch.zeros(2, device="cuda")
    with pytest.raises(torch.AcceleratorError):
        torch.cuda.synchronize()


def test_data_parallel_runs_on_the_one_device(sim: simulate.Simulation) -> None:
    model = torch.nn.DataParallel(torch.nn.Linear(3, 2)).to("cuda")
    for device in ("cuda", "cpu"):
        result = model(torch.randn(4, 3, device=device))
        assert (tuple(result.shape), str(result.device)) == ((4, 2), "cuda:0")
        result.sum().backward()


BAD_LOOKUP = """
import torch, cudalens
sim = cudalens.simulate(announce=False)
x = torch.nn.Embedding(10, 4).to("cuda")(torch.tensor([{id}], device="cuda"))
{after}
"""


@pytest.mark.parametrize(
    ("id", "after", "printed"),
    [(10, "", 1), (9, "", 0), (10, "sim.stop()", 0), (10, "sim.reset()", 0)],
)
@needs_rehearsal
def test_a_script_that_ends_without_a_wait_prints_the_pending_assert(
    id: int, after: str, printed: int
) -> None:
    """As the driver of a GPU does at exit; the exit status is the script's own."""
    done = run_python(BAD_LOOKUP.format(id=id, after=after))
    assert done.returncode == 0
    assert done.stderr.count("Assertion `") == printed
