"""What code that says `device="cuda"` may expect of the simulated device.

The 65 criteria: `test_device_*` (55) are about device behaviour, `test_assert_*` (10) about device
asserts; two of them may end in the error "not rehearsed". `test_sticky_*` and `test_process_*` are
about what a failure leaves behind, `test_found_*` about two faults that a prototype had.
"""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.library import Library
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from cudalens.simulate import Simulation
from tests.releases import here

CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[1]
SAME_DEVICE = "Expected all tensors to be on the same device, but "
ASSERTED = "device-side assert triggered"


@pytest.fixture(autouse=True)
def seeded(sim: Simulation) -> None:
    """Run every test on the device, with the same random numbers."""
    torch.manual_seed(0)


def on_cuda(*shape: int) -> Tensor:
    return torch.randn(*shape).to(CUDA)


def same(device: Tensor, host: Tensor, tolerance: float = 1e-5) -> bool:
    assert device.is_cuda
    return torch.allclose(device.cpu(), host, atol=tolerance, rtol=tolerance)


def trained(
    module: nn.Module, *inputs: Tensor, output: Callable[[Any], Tensor] = lambda y: y
) -> tuple[Tensor, list[Tensor]]:
    """Run one forward and backward pass; return the result and every gradient."""
    result = output(module(*inputs))
    result.square().mean().backward()
    return result.detach(), [p.grad for p in module.parameters() if p.grad is not None]


def assert_like_cpu(
    module: nn.Module,
    *inputs: Tensor,
    output: Callable[[Any], Tensor] = lambda y: y,
) -> None:
    """Train one step on both devices and compare results and gradients."""
    host, host_grads = trained(copy.deepcopy(module), *inputs, output=output)
    moved = copy.deepcopy(module).to(CUDA)
    device, device_grads = trained(moved, *(x.to(CUDA) for x in inputs), output=output)
    assert same(device, host, 1e-4)
    assert len(device_grads) == len(host_grads) > 0
    assert all(same(d, h, 1e-4) for d, h in zip(device_grads, host_grads, strict=True))


def run_python(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own and return what it printed."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1", **environment},
    )


# --- tensors and devices -------------------------------------------------------------------


def test_device_names_itself() -> None:
    """A device tensor says cuda:0 in every way a tensor can say it."""
    x = torch.tensor([1.5, 2.0]).to("cuda")
    assert x.device == CUDA
    assert x.is_cuda
    assert not x.is_cpu
    assert x.get_device() == 0
    assert repr(x) == "tensor([1.5000, 2.0000], device='cuda:0')"
    assert x.type() == "torch.cuda.FloatTensor"
    assert isinstance(x, torch.Tensor)
    assert x.untyped_storage().device == CUDA


def test_device_factories_and_like() -> None:
    """Every factory makes its tensor on the device, and *_like and new_* follow their source."""
    made = [
        torch.ones(2, device="cuda"),
        torch.zeros(2, device="cuda:0"),
        torch.empty(2, device=0),
        torch.empty_strided((2, 2), (1, 2), device=CUDA),
        torch.full((2,), 7.0, device="cuda"),
        torch.arange(3, device="cuda"),
        torch.linspace(0, 1, 3, device="cuda"),
        torch.eye(2, device="cuda"),
        torch.tensor([1, 2], device="cuda"),
        torch.as_tensor([1, 2], device="cuda"),
        torch.rand(2, device="cuda"),
        torch.randn(2, device="cuda"),
        torch.randint(0, 5, (2,), device="cuda"),
        torch.randperm(4, device="cuda"),
        torch.tril_indices(2, 2, device="cuda"),
    ]
    source = made[0]
    made += [
        torch.zeros_like(source),
        torch.rand_like(source),
        torch.empty_like(source),
        source.new_full((2,), 3.0),
        source.new_tensor([1.0]),
        torch.ones_like(torch.ones(2), device="cuda"),
    ]
    assert all(x.device == CUDA for x in made)
    assert made[5].tolist() == [0, 1, 2]
    assert torch.zeros_like(source, device="cpu").device.type == "cpu"


def test_device_context_chooses_the_device() -> None:
    """Inside `with torch.device("cuda")` factories and modules are made on the device."""
    with torch.device("cuda"):
        x = torch.ones(2)
        layer = nn.Linear(2, 2)
        listed = torch.tensor([1.0])
    assert x.is_cuda
    assert layer.weight.is_cuda
    assert listed.is_cuda
    assert torch.ones(2).device.type == "cpu"


def test_device_to_returns_self_when_nothing_changes() -> None:
    """`.to("cuda")` of a device tensor is the tensor itself, as are `.to(0)` and `.cuda()`."""
    x = torch.ones(2).to("cuda")
    assert x.to("cuda") is x
    assert x.to(0) is x
    assert x.cuda() is x
    assert x.cuda(0) is x
    assert x.to(torch.ones(1, device="cuda")) is x
    assert torch.ones(2).to(0).device == CUDA
    assert torch.ones(2).cuda().to(torch.float16).dtype == torch.float16
    assert x.cpu().device.type == "cpu"
    assert x.to("cuda", copy=True).data_ptr() != x.data_ptr()


def test_device_mismatch_of_elementwise_ops() -> None:
    """Elementwise ops name both devices, cuda first whichever operand came first."""
    text = SAME_DEVICE + "found at least two devices, cuda:0 and cpu!"
    device, host = on_cuda(3), torch.randn(3)
    for call in (
        lambda: device + host,
        lambda: host + device,
        lambda: torch.where(device > 0, device, host),
        lambda: device.add_(host),
        lambda: host.mul_(device),
    ):
        with pytest.raises(RuntimeError) as raised:
            call()
        assert str(raised.value).startswith(text)


def test_device_mismatch_names_argument_and_wrapper() -> None:
    """Other ops name the argument, both devices and torch's own wrapper method."""
    device, host = on_cuda(3, 3), torch.randn(3, 3)
    rows = torch.tensor([0, 1])
    expected = [
        (lambda: torch.mm(device, host), "mat2", "cpu", "cuda:0", "mm"),
        (lambda: torch.mm(host, device), "mat2", "cuda:0", "cpu", "mm"),
        (lambda: F.linear(device, device, host[0]), "mat1", "cuda:0", "cpu", "addmm"),
        (lambda: device.index_select(0, rows), "index", "cpu", "cuda:0", "_index_select"),
        (lambda: F.embedding(rows, device), "index", "cpu", "cuda:0", "_index_select"),
        (lambda: device.gather(0, rows.view(1, 2)), "index", "cpu", "cuda:0", "gather"),
        (lambda: F.nll_loss(device[:2], rows), "target", "cpu", "cuda:0", "nll_loss_forward"),
    ]
    for call, argument, odd, common, method in expected:
        with pytest.raises(RuntimeError) as raised:
            call()
        assert str(raised.value) == (
            f"{SAME_DEVICE}got {argument} is on {odd}, different from other tensors on {common} "
            f"(when checking argument in method wrapper_CUDA_{method})"
        )


def test_device_cpu_scalars_ride_along() -> None:
    """Python numbers and 0-dim CPU tensors mix with device tensors, with torch's promotion."""
    x = on_cuda(3)
    scale = torch.tensor(2.0)
    assert same(x * scale, x.cpu() * 2)
    assert same(scale - x, 2 - x.cpu())
    assert same(x.clone().fill_(scale), torch.full((3,), 2.0))
    counts = torch.arange(3, device="cuda")
    assert (counts * 2.5).dtype == torch.float32
    assert (counts + 1).dtype == torch.int64
    assert torch.remainder(5, counts + 1).tolist() == [0, 1, 2]
    assert (x.half() * torch.tensor(2.0, dtype=torch.float64)).dtype == torch.float16


def test_device_cpu_index_on_a_device_tensor() -> None:
    """A CPU index, mask or list selects from a device tensor."""
    x = torch.arange(5.0, device="cuda")
    assert x[torch.tensor([0, -1])].tolist() == [0.0, 4.0]
    assert x[torch.tensor([True, False, False, False, True])].tolist() == [0.0, 4.0]
    assert x[[1, 2]].tolist() == [1.0, 2.0]
    x[torch.tensor([0])] = 9.0
    assert x[0].item() == 9.0


def test_device_index_on_a_cpu_tensor_is_refused() -> None:
    """A device index on a CPU tensor is refused in torch's words."""
    with pytest.raises(RuntimeError) as raised:
        torch.arange(5)[torch.tensor([0, 1], device="cuda")]
    assert str(raised.value).startswith(
        "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
    )


def test_device_numpy_is_refused() -> None:
    """numpy cannot see device memory, and torch says how to copy it."""
    x = on_cuda(3)
    text = "can't convert cuda:0 device type tensor to numpy"
    for call in (x.numpy, x.__array__):
        with pytest.raises(TypeError) as raised:
            call()
        assert str(raised.value).startswith(text)
    assert x.cpu().numpy().shape == (3,)


def test_device_item_tolist_bool() -> None:
    """Single values and lists can be read out."""
    x = torch.tensor([[1.0, 2.0]], device="cuda")
    assert x[0, 1].item() == 2.0
    assert x.tolist() == [[1.0, 2.0]]
    assert bool(x.sum() > 2)
    assert float(x.sum()) == 3.0
    assert int(torch.tensor(4, device="cuda")) == 4
    assert len(x) == 1
    assert [row.is_cuda for row in x] == [True]
    assert list(range(5))[torch.tensor(2, device="cuda")] == 2
    with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
        x.item()


# --- autograd ------------------------------------------------------------------------------


def test_device_backward_and_accumulation() -> None:
    """Gradients equal the CPU's and accumulate over two passes."""
    host = torch.randn(4, 3)
    device = host.to(CUDA).requires_grad_()
    host.requires_grad_()
    for x in (host, device):
        for _ in range(2):
            (x.exp().sum(0) @ torch.arange(3.0, device=x.device)).backward()
    assert device.grad is not None
    assert host.grad is not None
    assert same(device.grad, host.grad)
    (copied,) = torch.autograd.grad((device.cpu() * 2).sum(), device)
    assert same(copied, torch.full((4, 3), 2.0))


def test_device_double_backward() -> None:
    """A gradient of a gradient equals the CPU's."""
    host = torch.randn(5)
    results = []
    for x in (host.clone(), host.to(CUDA)):
        x.requires_grad_()
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        results.append(second)
    assert same(results[1], results[0], 1e-3)


def test_device_clip_grad() -> None:
    """Clipping by norm and by value works on device gradients."""
    layer = nn.Linear(3, 3).to(CUDA)
    layer(on_cuda(2, 3)).mul(100).sum().backward()
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    assert norm.is_cuda
    assert norm.item() > 1.0
    clipped = torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None])
    assert clipped.norm().item() == pytest.approx(1.0, abs=1e-4)
    nn.utils.clip_grad_value_(layer.parameters(), 0.01)
    assert clipped.is_cuda
    assert max(p.grad.abs().max().item() for p in layer.parameters()) <= 0.01 + 1e-6


def test_device_hooks_fire() -> None:
    """Tensor, module, post-accumulate and saved-tensor hooks fire with device tensors."""
    seen: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def hook(*values: Any) -> None:
            flat = [v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, Tensor)]
            assert all(v.is_cuda for v in flat)
            seen.append(name)

        return hook

    layer = nn.Linear(3, 2).to(CUDA)
    layer.register_forward_pre_hook(note("forward_pre"))
    layer.register_forward_hook(note("forward"))
    layer.register_full_backward_hook(note("backward"))
    layer.weight.register_hook(note("tensor"))
    layer.weight.register_post_accumulate_grad_hook(note("accumulated"))
    x = on_cuda(4, 3).requires_grad_()
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t) or t.cpu(),  # type: ignore[func-returns-value]
        lambda t: t.to(CUDA),
    ):
        layer(x).square().sum().backward()
    assert set(seen) == {"forward_pre", "forward", "backward", "tensor", "accumulated"}
    assert packed
    assert all(t.is_cuda for t in packed)


def test_device_custom_function() -> None:
    """A custom autograd function runs forward and backward on device tensors."""

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            assert x.is_cuda
            assert grad.is_cuda
            return 3 * x**2 * grad

    x = torch.tensor([2.0], device="cuda", requires_grad=True)
    Cube.apply(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [12.0]


def test_device_checkpoint() -> None:
    """Recomputation in backward gives the same gradients, with dropout replayed."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)).to(CUDA)
    x = on_cuda(3, 4).requires_grad_()
    grads = []
    for recompute in (False, True, None):
        torch.manual_seed(3)
        x.grad = None
        if recompute is False:
            y = layer(x)
        else:
            y = checkpoint(layer, x, use_reentrant=recompute is None)
        y.sum().backward()
        assert x.grad is not None
        grads.append(x.grad.cpu())
    assert torch.allclose(grads[0], grads[1])
    assert torch.allclose(grads[0], grads[2])


def test_device_vmap_grad_jacrev() -> None:
    """torch.func transforms work on device tensors."""
    x = on_cuda(4, 3)
    host = x.cpu()

    def loss(v: Tensor) -> Tensor:
        return v.sin().prod()

    assert same(torch.func.grad(loss)(x[0]), torch.func.grad(loss)(host[0]))
    assert same(
        torch.func.vmap(torch.func.grad(loss))(x), torch.func.vmap(torch.func.grad(loss))(host)
    )
    assert same(torch.func.jacrev(torch.sin)(x[0]), torch.func.jacrev(torch.sin)(host[0]))
    assert same(torch.func.hessian(loss)(x[0]), torch.func.hessian(loss)(host[0]), 1e-4)


# --- memory and views ----------------------------------------------------------------------


def test_device_in_place_and_version_counter() -> None:
    """In-place ops return self, raise the version and are found by backward."""
    x = on_cuda(3)
    before = x._version
    assert x.add_(1) is x
    assert x._version == before + 1
    w = on_cuda(3).requires_grad_()
    y = w.exp()
    z = (y * y).sum()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        w.add_(1)


def test_device_views_share_memory() -> None:
    """Views know their base, share its memory and see writes through it."""
    x = torch.zeros(2, 3, device="cuda")
    views = [x.view(6), x.t(), x[0], x[:, 1:], x.unsqueeze(0), x.expand(2, 2, 3), x.detach()]
    x.fill_(5.0)
    assert all(v.is_cuda and bool((v == 5).all()) for v in views)
    assert x[0]._base is x
    assert x.view(6).data_ptr() == x.data_ptr()
    assert x[1].data_ptr() == x.data_ptr() + 12
    assert x.view(6).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    x[0].mul_(2)
    assert x.sum().item() == 45.0
    assert x.t().is_contiguous() is False
    assert x.t().contiguous().data_ptr() != x.data_ptr()


def test_device_resize_and_out() -> None:
    """resize_, out= of any size and set_ through .data behave as on any device."""
    x = torch.arange(2.0, device="cuda")
    x.resize_(4)
    assert x.shape == (4,)
    assert x[:2].tolist() == [0.0, 1.0]
    empty = torch.empty(0, device="cuda")
    assert torch.add(x, 1, out=empty) is empty
    assert empty.shape == (4,)
    right = torch.empty(4, device="cuda")
    pointer = right.data_ptr()
    torch.mul(x, 2, out=right)
    assert right.data_ptr() == pointer
    values, indices = torch.empty(0, device="cuda"), torch.empty(0, dtype=torch.long, device="cuda")
    torch.sort(torch.tensor([2.0, 1.0], device="cuda"), out=(values, indices))
    assert values.tolist() == [1.0, 2.0]
    assert indices.tolist() == [1, 0]
    x.data = torch.ones(7, device="cuda")
    assert x.shape == (7,)
    with pytest.raises(RuntimeError, match="same device"):
        torch.add(right, 1, out=torch.empty(4))


def test_device_indexing_and_masks() -> None:
    """Reading and writing by index, mask and slice equals the CPU."""
    host = torch.arange(24.0).reshape(4, 6)
    device = host.to(CUDA)
    index = torch.tensor([0, -1, 2])
    for read in (
        lambda x, i: x[i],
        lambda x, i: x[:, i],
        lambda x, i: x[i, i],
        lambda x, i: x[x > 7],
        lambda x, i: x[1:, ::2],
        lambda x, i: x[..., None, 0],
        lambda x, i: x.masked_fill(x > 7, 0.0),
        torch.take,
        lambda x, i: x.masked_select(x > 7),
    ):
        assert same(read(device, index.to(CUDA)), read(host, index))
    for x, i in ((host, index), (device, index.to(CUDA))):
        x[i] = 0.0
        x[x > 20] = -1.0
        x[:, 1] = torch.ones(4, device=x.device)
        x.index_add_(0, i.abs(), torch.ones(3, 6, device=x.device))
        x[0, 0] = torch.tensor(3.0)
    assert same(device, host)


def test_device_sort_topk_unique_nonzero() -> None:
    """Ops whose result is an order or has a data-dependent size equal the CPU."""
    host = torch.tensor([3.0, 1.0, 3.0, 0.0, 2.0])
    device = host.to(CUDA)
    for call in (
        lambda x: x.sort().indices,
        lambda x: x.argsort(descending=True, stable=True),
        lambda x: x.topk(2).values,
        lambda x: x.unique(return_counts=True)[1],
        torch.unique_consecutive,
        lambda x: x.nonzero(),
        lambda x: torch.nonzero(x, as_tuple=True)[0],
        lambda x: x.long().bincount(),
        lambda x: torch.searchsorted(x.sort().values, x),
        lambda x: x.cumsum(0).argmax(),
        lambda x: x.kthvalue(2).values,
    ):
        assert same(call(device).double(), call(host).double())


# --- modules and optimizers ----------------------------------------------------------------


def test_device_module_to_keeps_identity_and_ties() -> None:
    """Module.to keeps Parameter objects, buffers and tied weights; state_dict loads both ways."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5))
    model[1].weight = model[0].weight
    parameters = list(model.parameters())
    moved = model.to("cuda")
    assert moved is model
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert model[1].weight is model[0].weight
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()
    assert all(t.is_cuda for t in model.state_dict().values())
    host = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5))
    host.load_state_dict(model.state_dict())
    assert host[0].weight.device.type == "cpu"
    model.load_state_dict(host.state_dict())
    assert model.cpu()[0].weight.device.type == "cpu"
    assert model[1].weight is model[0].weight


def test_device_lazy_modules() -> None:
    """Lazy modules materialise on the device."""
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()).to("cuda")
    assert model(on_cuda(3, 5)).is_cuda
    assert model[0].weight.shape == (4, 5)
    assert model[0].weight.is_cuda
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    assert meta.to_empty(device="cuda").weight.is_cuda


def test_device_recurrent_layers() -> None:
    """LSTM, GRU, RNN and their cells train as on the CPU."""
    x = torch.randn(5, 2, 3)
    for layer in (nn.LSTM(3, 4, num_layers=2), nn.GRU(3, 4, bidirectional=True), nn.RNN(3, 4)):
        assert_like_cpu(layer, x, output=lambda y: y[0])
    assert_like_cpu(nn.LSTMCell(3, 4), x[0], output=lambda y: y[0])
    assert_like_cpu(nn.GRUCell(3, 4), x[0])


def test_device_conv_attention_norm_layers() -> None:
    """Convolutions, attention, pooling and norms train as on the CPU."""
    image = torch.randn(2, 4, 6, 6)
    assert_like_cpu(nn.Conv2d(4, 2, 3, padding=1), image)
    assert_like_cpu(nn.ConvTranspose2d(4, 2, 3), image)
    assert_like_cpu(nn.Conv1d(4, 4, 3, groups=2), image[:, :, 0])
    assert_like_cpu(nn.Sequential(nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2)), image)
    assert_like_cpu(nn.Sequential(nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1)), image)
    words = torch.randn(2, 5, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    assert_like_cpu(layer, words)
    assert_like_cpu(nn.MultiheadAttention(8, 2), words, words, words, output=lambda y: y[0])
    query = words.view(2, 5, 2, 4).transpose(1, 2)
    device = F.scaled_dot_product_attention(*[query.to(CUDA)] * 3, is_causal=True)
    host = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert same(device, host)


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.AdamW(p, lr=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    lambda p: torch.optim.RMSprop(p, lr=0.1),
    lambda p: torch.optim.Adafactor(p, lr=0.1),
]


def test_device_optimizers() -> None:
    """SGD, AdamW in its four forms, RMSprop, Adafactor and LBFGS step as on the CPU."""

    def steps(make: Callable[[Any], torch.optim.Optimizer], device: torch.device) -> Tensor:
        torch.manual_seed(1)
        layer = nn.Linear(3, 1)
        x = torch.randn(4, 3).to(device)
        layer.to(device)
        optimizer = make(layer.parameters())

        def closure() -> float:
            optimizer.zero_grad()
            loss = layer(x).square().sum()
            loss.backward()
            return loss.item()

        for _ in range(2):
            optimizer.step(closure)
        return layer.weight.detach()

    for make in OPTIMIZERS:
        assert same(steps(make, CUDA), steps(make, torch.device("cpu")), 1e-4)
    capturable = steps(lambda p: torch.optim.AdamW(p, lr=0.1, capturable=True), CUDA)
    assert same(capturable, steps(OPTIMIZERS[1], torch.device("cpu")), 1e-4)
    searched = steps(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3), CUDA)
    assert searched.is_cuda


def test_device_autocast() -> None:
    """autocast("cuda") computes in half precision where torch's lists say so."""
    layer, x = nn.Linear(4, 4).to(CUDA), on_cuda(2, 4)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype=dtype):
            assert torch.is_autocast_enabled("cuda")
            y = layer(x)
            assert y.dtype == dtype
            assert y.softmax(-1).dtype == torch.float32
            loss = F.cross_entropy(y, torch.tensor([0, 1], device="cuda"))
        loss.backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == torch.float32
    with torch.autocast("cuda"):
        assert layer(x).dtype == torch.float16
    assert torch.is_autocast_enabled("cuda") is False


def test_device_grad_scaler_skips_inf() -> None:
    """GradScaler unscales, steps, and skips a step whose gradients are infinite."""
    layer = nn.Linear(2, 1).to(CUDA)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    before = layer.weight.detach().clone()
    scaler.scale(layer(on_cuda(3, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    moved = layer.weight.detach().clone()
    assert not torch.equal(moved, before)
    optimizer.zero_grad()
    scaler.scale(layer(on_cuda(3, 2)).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, moved)
    assert scaler.get_scale() == 512.0


def test_device_data_loader_pins_memory() -> None:
    """DataLoader pins its batches with no and with two workers; they move without blocking."""
    data = TensorDataset(torch.arange(8.0).view(8, 1), torch.arange(8))
    for workers in (0, 2):
        loader = DataLoader(data, batch_size=4, num_workers=workers, pin_memory=True)
        total = 0
        for x, y in loader:
            assert x.is_pinned()
            assert y.to("cuda", non_blocking=True).is_cuda
            total += int(x.to("cuda", non_blocking=True).sum())
        assert total == 28
    assert torch.ones(2).is_pinned() is False
    assert torch.ones(2).pin_memory().is_pinned() is True


class OfDevice(Dataset[Tensor]):
    """Gives rows that lie on a device, or makes them there."""

    def __init__(self, device: str, *, makes: bool) -> None:
        self.rows = torch.ones(4, 2, device=device)
        self.makes = makes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(2, device=self.rows.device) if self.makes else self.rows[index]


@pytest.mark.parametrize("makes", [True, False])
def test_device_does_not_serve_a_forked_worker(makes: bool) -> None:
    """The worker raises as on CUDA, and does not hang; rows of the host pass."""
    (batch,) = DataLoader(OfDevice("cpu", makes=makes), batch_size=4, num_workers=1)
    assert batch.shape == (4, 2)
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
        list(DataLoader(OfDevice("cuda", makes=makes), batch_size=4, num_workers=1))
    assert torch.ones(2, device="cuda").sum().item() == 2


# --- torch.cuda ----------------------------------------------------------------------------


def test_device_has_its_own_random_stream() -> None:
    """The device draws from its own stream: seeded, saved, restored and forked on its own."""
    torch.manual_seed(5)
    host_first = torch.rand(3)
    torch.manual_seed(5)
    torch.rand(100, device="cuda")
    assert torch.equal(torch.rand(3), host_first)
    torch.cuda.manual_seed(7)
    first = torch.rand(3, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), second)
    torch.cuda.manual_seed_all(7)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    with torch.random.fork_rng(devices=[0]):
        torch.rand(5, device="cuda")
    assert torch.equal(torch.rand(3, device="cuda"), second)
    torch.cuda.manual_seed(7)
    dropped = F.dropout(torch.ones(64, device="cuda"))
    torch.cuda.manual_seed(7)
    assert torch.equal(F.dropout(torch.ones(64, device="cuda")), dropped)


def test_device_generator() -> None:
    """A device generator draws on the device; a CPU generator is refused there."""
    generator = torch.Generator(device="cuda")
    assert generator.device.type == "cuda"
    assert isinstance(generator, torch.Generator)
    generator.manual_seed(3)
    first = torch.rand(3, device="cuda", generator=generator)
    generator.manual_seed(3)
    assert torch.equal(torch.rand(3, device="cuda", generator=generator), first)
    assert generator.initial_seed() == 3
    weights = torch.ones(4, device="cuda")
    assert torch.multinomial(weights, 2, generator=generator).is_cuda
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.rand(3, device="cuda", generator=torch.Generator())
    assert torch.Generator().device.type == "cpu"


def test_device_queries_streams_events() -> None:
    """The torch.cuda surface answers, honestly, for one device; streams and events work."""
    assert torch.cuda.is_available()
    assert torch.cuda.is_initialized()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert "cudalens" in torch.cuda.get_device_name()
    assert torch.cuda.get_device_name(0) == torch.cuda.get_device_properties(0).name
    major, minor = torch.cuda.get_device_capability()
    assert (major, minor) >= (7, 0)
    assert torch.cuda.is_bf16_supported() in (True, False)
    torch.cuda.set_device(0)
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    with torch.cuda.device(0):
        assert torch.cuda.current_device() == 0
    stream = torch.cuda.Stream()
    start_event = torch.cuda.Event(enable_timing=True)
    end_event = torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        start_event.record()
        x = torch.ones(3, device="cuda") + 1
        x.record_stream(stream)
        end_event.record()
    stream.synchronize()
    torch.cuda.current_stream().wait_stream(stream)
    end_event.synchronize()
    assert end_event.query()
    assert start_event.elapsed_time(end_event) >= 0
    with torch.cuda.nvtx.range("marked"):
        x.add_(1)
    assert torch.cuda.is_current_stream_capturing() is False
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total


def test_device_memory_is_counted() -> None:
    """memory_allocated rises with a tensor and falls when it is gone."""
    before = torch.cuda.memory_allocated()
    x = torch.empty(1024, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4096
    view = x[:2]
    del x
    assert torch.cuda.memory_allocated() - before == 4096
    del view
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() >= before + 4096
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()


# --- copies and files ----------------------------------------------------------------------


def test_device_deepcopy_and_pickle() -> None:
    """Deep copies and pickles stay on the device with memory of their own."""
    x = on_cuda(3)
    twin = copy.deepcopy(x)
    assert twin.is_cuda
    assert torch.equal(twin, x)
    assert twin.data_ptr() != x.data_ptr()
    model = copy.deepcopy(nn.Linear(2, 2).to(CUDA))
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight.is_cuda
    loaded = pickle.loads(pickle.dumps({"x": x}))["x"]
    assert loaded.is_cuda
    assert torch.equal(loaded, x)


def test_device_save_and_load() -> None:
    """torch.save and torch.load keep the device, or move with map_location."""

    def through_file(thing: Any, **options: Any) -> Any:
        file = io.BytesIO()
        torch.save(thing, file)
        file.seek(0)
        return torch.load(file, **options)

    x = on_cuda(3)
    state = nn.Linear(2, 2).to(CUDA).state_dict()
    assert through_file(x).is_cuda
    assert torch.equal(through_file(x), x)
    assert through_file(x, map_location="cpu").device.type == "cpu"
    assert through_file(x.cpu(), map_location="cuda").device == CUDA
    assert through_file(x.cpu(), map_location=torch.device("cuda", 0)).is_cuda
    assert all(t.is_cuda for t in through_file(state).values())
    assert through_file(state, map_location="cpu")["weight"].device.type == "cpu"
    shared = through_file({"a": x, "b": x[:2]})
    assert shared["a"].data_ptr() == shared["b"].data_ptr()
    assert isinstance(through_file(nn.Parameter(x)), nn.Parameter)


def test_device_compile_runs_eagerly() -> None:
    """torch.compile with the eager backend, or forced eager, runs on device tensors."""

    def f(x: Tensor) -> Tensor:
        return x.sin() + x.cos()

    x = on_cuda(3)
    with torch.compiler.set_stance("force_eager"):
        assert same(torch.compile(f)(x), f(x.cpu()))
    torch._dynamo.reset()
    assert same(torch.compile(f, backend="eager", fullgraph=True)(x), f(x.cpu()))
    torch._dynamo.reset()


# --- models --------------------------------------------------------------------------------


def _config(name: str, **sizes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, f"{name}Config")(
        vocab_size=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes
    )


def _encoder(name: str, **sizes: Any) -> Any:
    return _config(
        name,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **sizes,
    )


def _bert() -> Any:
    import transformers

    return transformers.BertLMHeadModel(_encoder("Bert", is_decoder=True))


def _bart() -> Any:
    import transformers

    return transformers.BartForConditionalGeneration(
        _config(
            "Bart",
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            max_position_embeddings=32,
            dropout=0.0,
            decoder_start_token_id=2,
            forced_eos_token_id=2,
        )
    )


def _t5() -> Any:
    import transformers

    return transformers.T5ForConditionalGeneration(
        _config(
            "T5",
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def _llama() -> Any:
    import transformers

    return transformers.LlamaForCausalLM(
        _config(
            "Llama",
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
        )
    )


def _gpt2() -> Any:
    import transformers

    return transformers.GPT2LMHeadModel(
        _config(
            "GPT2",
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def _layout() -> Any:
    import transformers

    return transformers.LayoutLMv3ForTokenClassification(
        _encoder(
            "LayoutLMv3",
            max_2d_position_embeddings=64,
            coordinate_size=2,
            shape_size=4,
            input_size=16,
            patch_size=8,
            num_labels=3,
        )
    )


def _batch(name: str) -> dict[str, Tensor]:
    torch.manual_seed(2)
    ids = torch.randint(3, 40, (2, 6))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    if name == "layoutlmv3":
        batch["bbox"] = torch.randint(0, 8, (2, 6, 1)).expand(2, 6, 4).contiguous()
        batch["pixel_values"] = torch.randn(2, 3, 16, 16)
        batch["labels"] = ids % 3
    return batch


def _two_steps(model: nn.Module, batch: dict[str, Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


MODELS = {
    "bert": _bert,
    "bart": _bart,
    "t5": _t5,
    "llama": _llama,
    "gpt2": _gpt2,
    "layoutlmv3": _layout,
}


@pytest.mark.parametrize("name", MODELS)
def test_device_transformer_trains_and_generates(name: str) -> None:
    """Two AdamW steps lose as on the CPU; beams agree with the CPU and sampling runs."""
    pytest.importorskip("transformers")
    torch.manual_seed(1)
    host = MODELS[name]()
    device = copy.deepcopy(host).to("cuda")
    batch = _batch(name)
    moved = {k: v.to("cuda") for k, v in batch.items()}
    expected = _two_steps(host, batch)
    assert _two_steps(device, moved) == pytest.approx(expected, abs=1e-3)
    if name == "layoutlmv3":
        return
    options = {"max_new_tokens": 4, "min_new_tokens": 4}
    host.eval()
    device.load_state_dict(host.state_dict())
    device.eval()
    prompt, moved_prompt = (
        {k: b[k] for k in ("input_ids", "attention_mask")} for b in (batch, moved)
    )
    beams = host.generate(**prompt, num_beams=2, do_sample=False, **options)
    device_beams = device.generate(**moved_prompt, num_beams=2, do_sample=False, **options)
    assert device_beams.is_cuda
    assert device_beams.tolist() == beams.tolist()
    sampled = device.generate(**moved_prompt, do_sample=True, **options)
    assert sampled.is_cuda
    assert sampled.shape == device.generate(**moved_prompt, do_sample=False, **options).shape


# --- threads, tracers, guards --------------------------------------------------------------


def test_device_threads() -> None:
    """Four threads run forward and backward at once and get the same gradients."""
    layer = nn.Linear(4, 4).to(CUDA)
    results: list[Tensor] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            x = torch.ones(2, 4, device="cuda", requires_grad=True)
            for _ in range(5):
                (grad,) = torch.autograd.grad(layer(x).square().sum(), x)
            results.append(grad.cpu())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(results) == 4
    assert all(torch.equal(r, results[0]) for r in results)


class Tracer(TorchDispatchMode):
    """Record each op with the device of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ops.append(str(func))
        leaves = torch.utils._pytree.tree_leaves(result)
        self.devices |= {str(t.device) for t in leaves if isinstance(t, Tensor)}
        return result


def test_device_tracer_sees_each_op_once() -> None:
    """A dispatch mode on top sees each op once, forward and backward, and device results only."""
    layer = nn.Linear(3, 2).to(CUDA)
    x = on_cuda(4, 3)
    target = torch.tensor([0, 1, 0, 1], device="cuda")
    with Tracer() as tracer:
        loss = F.cross_entropy(layer(x).relu(), target)
    # A result that autograd saves of its own op is detached first on some builds.
    assert [name for name in tracer.ops if name != "aten.detach.default"] == [
        "aten.t.default",
        "aten.addmm.default",
        "aten.relu.default",
        "aten._log_softmax.default",
        "aten.nll_loss_forward.default",
    ]
    assert tracer.devices == {"cuda:0"}
    with Tracer() as backward:
        loss.backward()
    assert backward.ops.count("aten.nll_loss_backward.default") == 1
    assert backward.ops.count("aten.threshold_backward.default") == 1
    assert backward.devices == {"cuda:0"}


def test_device_guard_on_backend_select_comes_first(sim: Simulation) -> None:
    """A guard in the dispatcher sees the device tensor and may raise before any launch."""
    seen: list[str] = []
    op = torch.ops.aten.index_select.default
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def guard(keyset: Any, x: Tensor, dim: int, index: Tensor) -> Tensor:
        seen.append(str(index.device))
        if int(index.max()) >= x.size(dim):
            raise IndexError("guarded")
        result: Tensor = op.redispatch(keyset & after, x, dim, index)
        return result

    library = Library("aten", "IMPL")
    library.impl("index_select", guard, "BackendSelect", with_keyset=True)
    x = on_cuda(3)
    try:
        assert x.index_select(0, torch.tensor([2], device="cuda")).is_cuda
        with pytest.raises(IndexError, match="guarded"):
            x.index_select(0, torch.tensor([3], device="cuda"))
    finally:
        library._destroy()
    assert seen == ["cuda:0", "cuda:0"]
    torch.cuda.synchronize()
    assert not sim.is_poisoned
    assert x.index_select(0, torch.tensor([0], device="cuda")).is_cuda
    assert len(seen) == 2


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_device_guard_on_the_cuda_key_chains() -> None:
    """A kernel registered on the CUDA key can call the simulation's, and can be removed."""
    seen: list[torch.Size] = []
    inner = torch.library.get_kernel("aten::mm", "CUDA")

    def outer(keyset: Any, *args: Any) -> Any:
        seen.append(args[0].shape)
        return inner.call_boxed(keyset, *args)

    library = Library("aten", "IMPL")
    library.impl("mm", outer, "CUDA", with_keyset=True, allow_override=True)
    x = on_cuda(2, 2)
    try:
        assert same(x @ x, x.cpu() @ x.cpu())
    finally:
        library._destroy()
    assert seen == [torch.Size([2, 2])]
    assert same(x @ x, x.cpu() @ x.cpu())
    assert len(seen) == 1


def test_device_is_invisible_to_function_modes() -> None:
    """A user's function mode sees the user's calls alone, none made by the simulation."""
    calls: list[str] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    def work(x: Tensor) -> None:
        torch.add(x, 1)
        x[torch.tensor([0], device=x.device)]

    seen = []
    for x in (torch.ones(2), torch.ones(2, device="cuda")):
        calls.clear()
        with Watch():
            work(x)
        seen.append(list(calls))
    assert seen[0] == seen[1]


def test_device_as_default_device_trains() -> None:
    """With torch.set_default_device("cuda") a training step needs no device argument."""
    torch.set_default_device("cuda")
    try:
        layer = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(layer.parameters())
        loss = F.cross_entropy(layer(torch.randn(4, 3)), torch.tensor([0, 1, 0, 1]))
        loss.backward()
        optimizer.step()
        assert loss.is_cuda
        assert layer.weight.is_cuda
    finally:
        torch.set_default_device(None)
    assert torch.ones(1).device.type == "cpu"


def test_device_fake_tensor_mode() -> None:
    """FakeTensorMode reasons about device tensors without touching the device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x = torch.ones(2, 3, device="cuda")
        assert (x @ x.t()).shape == (2, 2)
        assert x.device == CUDA
        assert mode.from_tensor(torch.ones(2)).device.type == "cpu"


def test_device_inference_mode() -> None:
    """inference_mode and no_grad work on device tensors."""
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
    """jit.trace and the profiler follow device code."""
    layer = nn.Linear(3, 2).to(CUDA)
    x = on_cuda(4, 3)
    traced = torch.jit.trace(layer, (x,))
    assert torch.equal(traced(x), layer(x))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x)
    assert "aten::addmm" in {event.key for event in profile.key_averages()}


def test_device_pinned_factory_works_or_says_not_rehearsed() -> None:
    """A pinned factory either pins or says that it is not rehearsed; it never pretends."""
    try:
        x = torch.empty(4, pin_memory=True)
    except RuntimeError as error:
        assert "not rehearsed" in str(error)
    else:
        assert x.is_pinned()


def test_device_sparse_works_or_says_not_rehearsed() -> None:
    """Sparse layouts on the device either work or say that they are not rehearsed."""
    indices = torch.tensor([[0, 1], [1, 0]], device="cuda")
    for make in (
        lambda: torch.sparse_coo_tensor(indices, torch.ones(2, device="cuda"), (2, 2)),
        lambda: torch.eye(2, device="cuda").to_sparse(),
        lambda: torch.eye(2, device="cuda").to_sparse_csr(),
    ):
        try:
            dense = make().to_dense()
        except RuntimeError as error:
            assert "not rehearsed" in str(error)
        else:
            assert dense.is_cuda
            assert dense.sum().item() == 2.0


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


# --- version counters of list ops ----------------------------------------------------------


def test_found_lists_raise_version_counters_in_place() -> None:
    """_foreach_ and _fused_ in-place ops raise the version of every tensor they write."""
    x, other = on_cuda(3), on_cuda(3)
    before = [t._version for t in (x, other)]
    torch._foreach_add_([x, other], 1.0)
    assert [t._version for t in (x, other)] == [v + 1 for v in before]
    layer = nn.Linear(2, 2).to(CUDA)
    for fused in (False, True):
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, foreach=not fused, fused=fused)
        layer(on_cuda(1, 2)).sum().backward()
        version = layer.weight._version
        optimizer.step()
        assert layer.weight._version > version


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
