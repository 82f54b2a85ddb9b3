"""The rehearsal device among threads, tracers and guards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cudalens import simulate
from tests.probes import SeenFunctions
from tests.releases import default_device
from tests.simulate.device import CUDA, on_cuda

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("seeded")


def test_device_threads() -> None:
    layer = nn.Linear(4, 4).to(CUDA)

    def work(_: int) -> Tensor:
        x = torch.ones(2, 4, device="cuda", requires_grad=True)
        for _ in range(5):
            (grad,) = torch.autograd.grad(layer(x).square().sum(), x)
        return grad.cpu()

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_device_is_invisible_to_function_modes() -> None:
    """Compiled code calls ops without asking a mode: what serves them asks none either."""

    def work(x: Tensor) -> Tensor:
        return x[torch.tensor([0], device=x.device)] + 1

    seen = []
    for x in (torch.ones(2), torch.ones(2, device="cuda")):
        traced = torch.jit.trace(work, (x,))
        with torch.device(x.device), SeenFunctions() as watch:
            work(x)
            traced(x)
        seen.append(watch.names)
    assert seen[0] == seen[1]


def test_device_as_default_device_trains() -> None:
    with default_device("cuda"):
        layer = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(layer.parameters())
        loss = F.cross_entropy(layer(torch.randn(4, 3)), torch.tensor([0, 1, 0, 1]))
        loss.backward()
        optimizer.step()
        assert loss.is_cuda
        assert layer.weight.is_cuda
    assert torch.ones(1).device.type == "cpu"


def test_device_inference_mode() -> None:
    layer = nn.Linear(3, 2).to(CUDA)
    with torch.inference_mode():
        y = layer(on_cuda(4, 3))
        y.add_(1)
        assert y.is_inference()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        (layer.weight.sum() * y).sum()
    with torch.no_grad():
        assert not layer(on_cuda(1, 3)).requires_grad


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_device_jit_trace_and_profiler() -> None:
    layer = nn.Linear(3, 2).to(CUDA)
    x = on_cuda(4, 3)
    traced = torch.jit.trace(layer, (x,))
    assert torch.equal(traced(x), layer(x))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x)
    assert "aten::addmm" in {event.key for event in profile.key_averages()}


# --- version counters of list ops ----------------------------------------------------------


def test_found_lists_raise_version_counters_in_place() -> None:
    x, other = on_cuda(3), on_cuda(3)
    before = [t._version for t in (x, other)]
    torch._foreach_add_([x, other], 1.0)
    assert [t._version for t in (x, other)] == [v + 1 for v in before]


@pytest.mark.parametrize("fused", [False, True])
def test_found_optimizer_step_before_backward_is_found(fused: bool) -> None:
    """A step between forward and backward changes what backward needs, and backward says so."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=not fused, fused=fused)
    model(on_cuda(1, 2)).sum().backward()
    stale = model(on_cuda(1, 2)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_a_result_that_overlaps_what_is_read_is_refused_as_on_cuda(seeded: None) -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to"):
        torch.sin(x[:3], out=x[1:])
    assert torch.sin(x[:2], out=x[2:]).shape == (2,)
    x[:2].copy_(x[2:])
    assert torch.equal(x[:2], x[2:])


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_mask_as_an_index_waits_for_the_device_and_numbers_do_not(
    sim: simulate.Simulation, dtype: torch.dtype
) -> None:
    """CUDA asks a mask of either dtype for its nonzero(): their number is the result's size."""
    x, rows = on_cuda(3), torch.tensor([2, 0], device="cuda")
    mask = torch.ones(3, dtype=dtype, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        x[mask]
    assert x[rows].shape == (2,)
