"""Device asserts: how they surface, what a poisoned device does, and whole processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cudalens.simulate import Simulation
from tests.releases import here
from tests.simulate.device import ASSERTED, CUDA, on_cuda, run_python

pytestmark = pytest.mark.usefixtures("seeded")


# --- device asserts ------------------------------------------------------------------------


def assert_fails_late(
    sim: Simulation, capfd: pytest.CaptureFixture[str], launch: Callable[[], Any], expression: str
) -> None:
    """Check that a launch goes through, and that the error comes late, once in text, and stays."""
    result = launch()
    if isinstance(result, Tensor):
        assert result.is_cuda
    assert not sim.is_poisoned
    with pytest.raises(torch.AcceleratorError, match=ASSERTED):
        torch.cuda.synchronize()
    assert sim.is_poisoned
    assert expression in capfd.readouterr().err
    with pytest.raises(torch.AcceleratorError, match=ASSERTED) as again:
        torch.ones(1, device="cuda")
    assert again.value.error_code == 710
    assert capfd.readouterr().err == ""


def test_assert_embedding(sim: Simulation, capfd: pytest.CaptureFixture[str]) -> None:
    """An embedding index one beyond the table asserts, and the result has the right shape."""
    table = nn.Embedding(10, 3).to(CUDA)
    assert table(torch.tensor([9], device="cuda")).shape == (1, 3)
    torch.cuda.synchronize()
    launch = lambda: table(torch.tensor([[10, 0]], device="cuda"))
    assert_fails_late(sim, capfd, launch, "`srcIndex < srcSelectDimSize`")
    sim.reset()
    assert table(torch.tensor([[10, 0]], device="cuda")).shape == (1, 2, 3)


def test_assert_index(sim: Simulation, capfd: pytest.CaptureFixture[str]) -> None:
    """Advanced indexing lets -size wrap and asserts one beyond."""
    x = on_cuda(5)
    assert x[torch.tensor([-5, 4], device="cuda")].shape == (2,)
    torch.cuda.synchronize()
    launch = lambda: x[torch.tensor([5], device="cuda")]
    assert_fails_late(sim, capfd, launch, "-sizes[i] <= index && index < sizes[i]")


def test_assert_gather(sim: Simulation, capfd: pytest.CaptureFixture[str]) -> None:
    """gather asserts on an index equal to the size, and on a negative one."""
    x = on_cuda(2, 3)
    assert x.gather(1, torch.tensor([[2]], device="cuda")).shape == (1, 1)
    torch.cuda.synchronize()
    launch = lambda: x.gather(1, torch.tensor([[-1]], device="cuda"))
    assert_fails_late(sim, capfd, launch, "scatter gather kernel index out of bounds")


def test_assert_scatter(sim: Simulation, capfd: pytest.CaptureFixture[str]) -> None:
    """scatter_ asserts in place, and hands back the tensor it was given."""
    x = torch.zeros(2, 3, device="cuda")
    index = torch.tensor([[3]], device="cuda")
    assert x.scatter_(1, index - 1, 1.0)[0, 2].item() == 1.0
    returned: list[Tensor] = []
    launch = lambda: returned.append(x.scatter_(1, index, 1.0))
    assert_fails_late(sim, capfd, launch, 'idx_dim < index_size && "index out of bounds"')
    assert returned[0] is x


def test_assert_one_hot(sim: Simulation, capfd: pytest.CaptureFixture[str]) -> None:
    """F.one_hot relies on the assertion of its scatter on the device; the CPU raises at once."""
    labels = torch.tensor([0, 3], device="cuda")
    assert F.one_hot(labels, 4).shape == (2, 4)
    torch.cuda.synchronize()
    launch = lambda: F.one_hot(labels, 3)
    assert_fails_late(sim, capfd, launch, 'idx_dim < index_size && "index out of bounds"')
    with pytest.raises(RuntimeError, match="Class values must be smaller than num_classes"):
        F.one_hot(labels_on_host(), 3)


def labels_on_host() -> Tensor:
    return torch.tensor([0, 3])


def test_assert_nll_loss(sim: Simulation, capfd: pytest.CaptureFixture[str]) -> None:
    """cross_entropy ignores -100 and asserts on a label equal to the number of classes."""
    logits = on_cuda(3, 4).requires_grad_()
    good = F.cross_entropy(logits, torch.tensor([0, 3, -100], device="cuda"))
    good.backward()
    torch.cuda.synchronize()
    launch = lambda: F.cross_entropy(logits, torch.tensor([0, 4, 1], device="cuda"))
    assert_fails_late(sim, capfd, launch, "`t >= 0 && t < n_classes`")


def test_assert_binary_cross_entropy(sim: Simulation, capfd: pytest.CaptureFixture[str]) -> None:
    """binary_cross_entropy accepts 0 and 1 and asserts on anything beyond."""
    target = torch.tensor([0.0, 1.0], device="cuda")
    assert F.binary_cross_entropy(target, target).item() == 0.0
    launch = lambda: F.binary_cross_entropy(target * 1.5, target)
    assert_fails_late(sim, capfd, launch, "`input_val >= zero && input_val <= one`")


def test_assert_multinomial(sim: Simulation, capfd: pytest.CaptureFixture[str]) -> None:
    """Sampling from NaN asserts with the readable sentence."""
    weights = torch.tensor([0.5, 0.5], device="cuda")
    assert torch.multinomial(weights, 1).shape == (1,)
    torch.cuda.synchronize()
    launch = lambda: torch.multinomial(weights * float("nan"), 1)
    assert_fails_late(sim, capfd, launch, "probability tensor contains either `inf`, `nan`")


def test_assert_in_backward(sim: Simulation, capfd: pytest.CaptureFixture[str]) -> None:
    """A value that goes bad between forward and backward asserts in backward, and sticks."""
    logits = on_cuda(2, 3).requires_grad_()
    target = torch.tensor([0, 1], device="cuda")
    loss = F.cross_entropy(logits, target)
    target.data[1] = 7
    torch.cuda.synchronize()
    assert_fails_late(sim, capfd, loss.backward, "nll_loss_backward_reduce_cuda_kernel_2d")


def test_assert_launch_blocking(
    sim: Simulation, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CUDA_LAUNCH_BLOCKING=1 the launch itself raises."""
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    table = on_cuda(3, 2)
    bad = torch.tensor([3], device="cuda")
    with pytest.raises(torch.AcceleratorError, match=ASSERTED):
        F.embedding(bad, table)
    assert sim.is_poisoned
    assert "srcIndex < srcSelectDimSize" in capfd.readouterr().err


# --- what a poisoned device does -----------------------------------------------------------


def poison() -> None:
    """Launch a bad look-up and wait for its error."""
    torch.ones(2, device="cuda").gather(0, torch.tensor([2], device="cuda"))
    with pytest.raises(torch.AcceleratorError):
        torch.cuda.synchronize()


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
    wait: Callable[[Tensor], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever waits for the device raises the error of an earlier launch."""
    innocent = torch.tensor(1.0, device="cuda")
    torch.ones(2, device="cuda").gather(0, torch.tensor([2], device="cuda"))
    innocent.add_(1)
    with pytest.raises(torch.AcceleratorError, match=ASSERTED):
        wait(innocent)
    assert "idx_dim >= 0 && idx_dim < index_size" in capfd.readouterr().err


def test_sticky_error_leaves_the_host_side_usable(sim: Simulation) -> None:
    """Shapes, views, deletion and queries go on working on a poisoned device; launches do not."""
    x = on_cuda(2, 3)
    poison()
    assert torch.cuda.is_available()
    assert x.shape == (2, 3)
    assert x.view(6).shape == (6,)
    assert x.t().is_cuda
    del x
    for call in (
        lambda: torch.ones(1, device="cuda"),
        lambda: torch.ones(1).to("cuda"),
        torch.cuda.synchronize,
    ):
        with pytest.raises(torch.AcceleratorError, match=ASSERTED):
            call()
    assert torch.ones(2).sum().item() == 2.0
    sim.reset()
    assert torch.ones(1, device="cuda").item() == 1.0


def test_sticky_error_crosses_threads() -> None:
    """An error launched in one thread surfaces in another."""
    thread = threading.Thread(
        target=lambda: torch.ones(2, device="cuda").take(torch.tensor([2], device="cuda"))
    )
    thread.start()
    thread.join()
    with pytest.raises(torch.AcceleratorError, match=ASSERTED):
        torch.cuda.synchronize()


def test_sticky_first_failure_wins(capfd: pytest.CaptureFixture[str]) -> None:
    """Of several bad launches the first one is reported, once."""
    x, index = torch.ones(2, device="cuda"), torch.tensor([2], device="cuda")
    x.take(index)
    x.gather(0, index)
    for _ in range(2):
        with pytest.raises(torch.AcceleratorError):
            torch.cuda.synchronize()
    text = capfd.readouterr().err
    assert text.count("Assertion") == 1
    assert "cuda_take_put_kernel() index out of bounds" in text


def test_sticky_error_without_a_wait_stays_silent(sim: Simulation) -> None:
    """Launches alone do not wait: the error shows at the first wait, however late."""
    x = torch.ones(2, device="cuda")
    x.take(torch.tensor([2], device="cuda"))
    for _ in range(20):
        x = x + 1
    assert not sim.is_poisoned
    with pytest.raises(torch.AcceleratorError, match=ASSERTED):
        x.sum().item()


# --- processes of their own ----------------------------------------------------------------

START = """
import torch
import torch.nn.functional as F
from cudalens.simulate import start
"""


def test_found_exceptions_in_the_autograd_thread_reach_the_caller() -> None:
    """Exceptions raised in hooks, recomputation and custom backwards arrive in the caller."""
    done = run_python(
        START
        + """
sim = start()
from torch.utils.checkpoint import checkpoint

class Odd(Exception):
    pass

def leaf():
    return torch.ones(3, device="cuda", requires_grad=True)

def in_tensor_hook(error):
    x = leaf()
    y = x * 2
    def hook(grad):
        raise error
    y.register_hook(hook)
    y.sum().backward()

def in_module_hook(error):
    layer = torch.nn.Linear(3, 1).to("cuda")
    def hook(*args):
        raise error
    layer.register_full_backward_hook(hook)
    layer(leaf()).sum().backward()

def in_checkpoint(error):
    runs = []
    def block(v):
        runs.append(1)
        if len(runs) > 1:
            raise error
        return v.exp()
    checkpoint(block, leaf(), use_reentrant=False).sum().backward()

def in_custom_backward(error):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2
        @staticmethod
        def backward(ctx, grad):
            raise error
    Broken.apply(leaf()).sum().backward()

caught = 0
for place in (in_tensor_hook, in_module_hook, in_checkpoint, in_custom_backward):
    for kind in (ValueError, KeyError, RuntimeError, Odd):
        for _ in range(2):
            try:
                place(kind("mine"))
            except kind as error:
                assert "mine" in str(error)
                caught += 1
x = leaf()
(x * 3).sum().backward()
assert x.grad.tolist() == [3.0, 3.0, 3.0]
print("caught", caught)
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["caught", "32"]


def test_process_ends_cleanly_with_live_tensors_and_a_poisoned_device() -> None:
    """Live tensors, a live graph and a poisoned device do not disturb the end of a process."""
    done = run_python(
        START
        + """
sim = start()
x = torch.ones(3, device="cuda", requires_grad=True)
graph = (x * 2).sum()
x.detach().take(torch.tensor([3], device="cuda"))
try:
    torch.cuda.synchronize()
except torch.AcceleratorError:
    print("poisoned", sim.is_poisoned)
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["poisoned", "True"]


def test_process_prints_the_assert_line_uncaught() -> None:
    """An uncaught device assert ends the script with torch's error and the line on stderr."""
    done = run_python(
        START
        + """
start()
F.embedding(torch.tensor([3], device="cuda"), torch.ones(3, 2, device="cuda"))
torch.cuda.synchronize()
"""
    )
    assert done.returncode == 1
    assert here("Indexing.cu:1524: indexSelectSmallIndex: block: [0,0,0]") in done.stderr
    assert "AcceleratorError: CUDA error: device-side assert triggered" in done.stderr


def test_process_obeys_launch_blocking_from_the_environment() -> None:
    """CUDA_LAUNCH_BLOCKING=1 in the environment makes the traceback name the bad line."""
    done = run_python(
        START
        + """
start()
def guilty():
    F.embedding(torch.tensor([3], device="cuda"), torch.ones(3, 2, device="cuda"))
guilty()
print("unreachable")
""",
        CUDA_LAUNCH_BLOCKING="1",
    )
    assert done.returncode == 1
    assert "unreachable" not in done.stdout
    assert "in guilty" in done.stderr


def test_process_with_lag_blames_an_innocent_line() -> None:
    """With a launch latency the error surfaces that many launches later, at an innocent op."""
    done = run_python(
        START
        + """
start(lag=2)
x = torch.ones(2, device="cuda")
x.take(torch.tensor([2], device="cuda"))
done = 0
try:
    for _ in range(10):
        x = x + 1
        done += 1
except torch.AcceleratorError:
    print("innocent launches", done)
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == ["innocent", "launches", "2"]


def test_process_can_stop_and_start_again() -> None:
    """After stop the CPU works, cuda is gone, old tensors refuse; a second start works."""
    done = run_python(
        START
        + """
def train(device):
    layer = torch.nn.Linear(2, 1).to(device)
    layer(torch.ones(3, 2, device=device)).sum().backward()
    return layer.weight.grad.device.type
original = torch.cuda.synchronize
sim = start()
old = torch.ones(2, device="cuda")
assert train("cuda") == "cuda"
sim.stop()
assert torch.cuda.synchronize is original
assert not torch.cuda.is_available()
assert train("cpu") == "cpu"
for refused in (lambda: old + 1, lambda: torch.ones(2, device="cuda")):
    try:
        refused()
    except (NotImplementedError, AssertionError, RuntimeError) as error:
        print(type(error).__name__)
    else:
        raise SystemExit("not refused")
with start():
    assert train("cuda") == "cuda"
    assert (torch.ones(2, device="cuda") + 1).tolist() == [2.0, 2.0]
assert not torch.cuda.is_available()
print("ok")
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "ok"
