"""The rehearsal device among threads, tracers and guards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.library import _scoped_library
from torch.nn import functional as F

from cudalens.simulate import Simulation
from tests.probes import SeenFunctions, SeenOps
from tests.releases import default_device
from tests.simulate.device import CUDA, on_cuda, same

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


def test_device_tracer_sees_each_op_once() -> None:
    """A dispatch mode on top sees each op once, forward and backward, and device results only."""
    layer = nn.Linear(3, 2).to(CUDA)
    x = on_cuda(4, 3)
    target = torch.tensor([0, 1, 0, 1], device="cuda")
    with SeenOps() as tracer:
        loss = F.cross_entropy(layer(x).relu(), target)
    # A result that autograd saves of its own op is detached first on some builds.
    assert [op for op in tracer.ops if op is not aten.detach.default] == [
        aten.t.default,
        aten.addmm.default,
        aten.relu.default,
        aten._log_softmax.default,
        aten.nll_loss_forward.default,
    ]
    assert tracer.devices == {"cuda:0"}
    with SeenOps() as backward:
        loss.backward()
    assert backward.ops.count(aten.nll_loss_backward.default) == 1
    assert backward.ops.count(aten.threshold_backward.default) == 1
    assert backward.devices == {"cuda:0"}


def test_device_guard_on_backend_select_comes_first(sim: Simulation) -> None:
    seen: list[str] = []
    op = torch.ops.aten.index_select.default
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def guard(keyset: Any, x: Tensor, dim: int, index: Tensor) -> Tensor:
        seen.append(str(index.device))
        if int(index.max()) >= x.size(dim):
            raise IndexError("guarded")
        result: Tensor = op.redispatch(keyset & after, x, dim, index)
        return result

    x = on_cuda(3)
    with _scoped_library("aten", "IMPL") as library:
        library.impl("index_select", guard, "BackendSelect", with_keyset=True)
        assert x.index_select(0, torch.tensor([2], device="cuda")).is_cuda
        with pytest.raises(IndexError, match="guarded"):
            x.index_select(0, torch.tensor([3], device="cuda"))
    assert seen == ["cuda:0", "cuda:0"]
    torch.cuda.synchronize()
    assert not sim.is_poisoned
    assert x.index_select(0, torch.tensor([0], device="cuda")).is_cuda
    assert len(seen) == 2


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="torch 2.8 has no get_kernel")
def test_device_guard_on_the_cuda_key_chains() -> None:
    seen: list[torch.Size] = []
    inner = torch.library.get_kernel("aten::mm", "CUDA")

    def outer(keyset: Any, *args: Any) -> Any:
        seen.append(args[0].shape)
        return inner.call_boxed(keyset, *args)

    x = on_cuda(2, 2)
    with _scoped_library("aten", "IMPL") as library:
        library.impl("mm", outer, "CUDA", with_keyset=True, allow_override=True)
        assert same(x @ x, x.cpu() @ x.cpu())
    assert seen == [torch.Size([2, 2])]
    assert same(x @ x, x.cpu() @ x.cpu())
    assert len(seen) == 1


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


def test_device_fake_tensor_mode() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x = torch.ones(2, 3, device="cuda")
        assert (x @ x.t()).shape == (2, 2)
        assert x.device == CUDA
        assert mode.from_tensor(torch.ones(2)).device.type == "cpu"


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
