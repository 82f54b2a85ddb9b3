"""What code that says `device="cuda"` may expect of tensors, autograd, memory and modules."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from cudalens.simulate import NotRehearsedError
from tests.simulate.device import CUDA, SAME_DEVICE, on_cuda, same

pytestmark = pytest.mark.usefixtures("seeded")


# --- tensors and devices -------------------------------------------------------------------


def test_device_names_itself() -> None:
    x = torch.tensor([1.5, 2.0]).to("cuda")
    assert x.device == x.untyped_storage().device == CUDA
    assert (x.is_cuda, x.is_cpu, x.get_device()) == (True, False, 0)
    assert (repr(x), x.type()) == (
        "tensor([1.5000, 2.0000], device='cuda:0')",
        "torch.cuda.FloatTensor",
    )
    assert isinstance(x, torch.Tensor)


def test_device_factories_and_like() -> None:
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
    with torch.device("cuda"):
        x = torch.ones(2)
        layer = nn.Linear(2, 2)
        listed = torch.tensor([1.0])
    assert x.device == layer.weight.device == listed.device == CUDA
    assert torch.ones(2).device.type == "cpu"


def test_device_to_returns_self_when_nothing_changes() -> None:
    x = torch.ones(2).to("cuda")
    moved = (x.to("cuda"), x.to(0), x.cuda(), x.cuda(0), x.to(torch.ones(1, device="cuda")))
    assert all(item is x for item in moved)
    assert torch.ones(2).to(0).device == CUDA
    assert torch.ones(2).cuda().to(torch.float16).dtype == torch.float16
    assert x.cpu().device.type == "cpu"
    assert x.to("cuda", copy=True).data_ptr() != x.data_ptr()


def got(argument: str, odd: str, common: str, method: str) -> str:
    """Return what is said of an argument on another device, with torch's own wrapper method."""
    return (
        f"{SAME_DEVICE}got {argument} is on {odd}, different from other tensors on {common} "
        f"(when checking argument in method wrapper_CUDA_{method})"
    )


ROWS = torch.tensor([0, 1])
# Elementwise ops name both devices, cuda first whichever operand came first.
BOTH = f"{SAME_DEVICE}found at least two devices, cuda:0 and cpu!"
TO_NUMPY = (
    "can't convert cuda:0 device type tensor to numpy. "
    "Use Tensor.cpu() to copy the tensor to host memory first."
)
OF_THE_CPU = "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
REFUSED: list[tuple[Callable[[Tensor, Tensor], object], str]] = [
    (lambda device, host: device + host, BOTH),
    (lambda device, host: host + device, BOTH),
    (lambda device, host: torch.where(device > 0, device, host), BOTH),
    (lambda device, host: device.add_(host), BOTH),
    (lambda device, host: host.mul_(device), BOTH),
    (lambda device, host: torch.mm(device, host), got("mat2", "cpu", "cuda:0", "mm")),
    (lambda device, host: torch.mm(host, device), got("mat2", "cuda:0", "cpu", "mm")),
    (lambda x, y: F.linear(x, x, y[0]), got("mat1", "cuda:0", "cpu", "addmm")),
    (lambda x, _: x.index_select(0, ROWS), got("index", "cpu", "cuda:0", "_index_select")),
    (lambda x, _: F.embedding(ROWS, x), got("index", "cpu", "cuda:0", "_index_select")),
    (lambda x, _: x.gather(0, ROWS.view(1, 2)), got("index", "cpu", "cuda:0", "gather")),
    (lambda x, _: F.nll_loss(x[:2], ROWS), got("target", "cpu", "cuda:0", "nll_loss_forward")),
    (lambda device, host: host[ROWS.to(CUDA)], OF_THE_CPU),
    (lambda device, host: device.index_put_((ROWS,), host[:2]), BOTH),
    (lambda device, host: host.index_put_((ROWS,), device[:2]), BOTH),
    (lambda device, host: host.index_put((ROWS,), device[:2]), BOTH),
    (lambda device, host: host.__setitem__(ROWS, device[:2]), BOTH),
    (lambda device, host: host.index_put_((ROWS,), device[0, :1]), BOTH),
    (lambda device, host: device.numpy(), TO_NUMPY),
    (lambda device, host: device.__array__(), TO_NUMPY),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_device_mismatch_is_refused(call: Callable[[Tensor, Tensor], object], text: str) -> None:
    with pytest.raises(TypeError if text is TO_NUMPY else RuntimeError) as raised:
        call(on_cuda(3, 3), torch.randn(3, 3))
    assert str(raised.value).splitlines()[0] == text


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_one_value_without_dimensions_is_written_across_devices(device: str) -> None:
    written = torch.zeros(3, device=device)
    one = torch.tensor(1.0, device="cpu" if device == "cuda" else "cuda")
    written.index_put_((ROWS,), one)
    written[ROWS + 1] = 2 * one.view(1)  # an assignment drops leading dimensions of size 1
    written[0] = 3 * one
    assert written.tolist() == [3, 2, 2]


def test_a_slice_of_a_host_tensor_copies_from_the_device() -> None:
    host = torch.zeros(3)
    host[0:2] = torch.ones(2, device=CUDA)
    host[2] = torch.ones(1, device=CUDA)
    assert host.tolist() == [1, 1, 1]


def test_device_item_tolist_bool() -> None:
    x = torch.tensor([[1.0, 2.0]], device="cuda")
    two = torch.tensor(2, device="cuda")
    assert (x[0, 1].item(), x.tolist(), float(x.sum())) == (2.0, [[1.0, 2.0]], 3.0)
    assert (int(two), range(5)[two], bool(two > 1)) == (2, 2, True)
    assert (x.cpu().numpy().shape, len(x), [row.is_cuda for row in x]) == ((1, 2), 1, [True])
    with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
        x.item()


# --- the same numbers on both devices ------------------------------------------------------


def accumulated(device: str) -> list[Tensor]:
    x = torch.arange(12.0, device=device).view(4, 3).div_(9).requires_grad_()
    for _ in range(2):
        (x.exp().sum(0) @ torch.arange(3.0, device=device)).backward()
    assert x.grad is not None
    return [x.grad, *torch.autograd.grad((x.cpu() * 2).sum(), x)]


def differentiated_twice(device: str) -> list[Tensor]:
    x = torch.arange(5.0, device=device).requires_grad_()
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return list(torch.autograd.grad(first.square().sum(), x))


def clipped(device: str) -> list[Tensor]:
    layer = nn.Linear(3, 3).to(device)
    layer(torch.randn(2, 3).to(device)).mul(100).sum().backward()
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    by_norm = [p.grad.clone() for p in layer.parameters()]
    nn.utils.clip_grad_value_(layer.parameters(), 0.01)
    return [norm, *by_norm, *(p.grad for p in layer.parameters())]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        assert x.device == grad.device
        return 3 * x**2 * grad


def by_a_function_of_the_user(device: str) -> list[Tensor]:
    x = torch.tensor([2.0], device=device, requires_grad=True)
    Cube.apply(x).backward()
    return [x.grad]


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.AdamW(p, lr=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, capturable=p[0].is_cuda),
    lambda p: torch.optim.RMSprop(p, lr=0.1),
    lambda p: torch.optim.Adafactor(p, lr=0.1),
    lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
]


def optimized(device: str) -> list[Tensor]:
    def weight_after(make: Callable[[Any], torch.optim.Optimizer]) -> Tensor:
        layer, x = nn.Linear(3, 1).to(device), torch.randn(4, 3).to(device)
        optimizer = make(list(layer.parameters()))

        def closure() -> float:
            optimizer.zero_grad()
            loss = layer(x).square().sum()
            loss.backward()
            return loss.item()

        for _ in range(2):
            optimizer.step(closure)
        return layer.weight.detach()

    return [weight_after(make) for make in OPTIMIZERS]


def by_layers(device: str) -> list[Tensor]:
    """Return what layers make of their inputs, and the gradients of all their parameters."""
    x, image, words = torch.randn(5, 2, 3), torch.randn(2, 4, 6, 6), torch.randn(2, 5, 8)
    layers: list[tuple[nn.Module, Tensor]] = [
        (nn.LSTM(3, 4, num_layers=2), x),
        (nn.GRU(3, 4, bidirectional=True), x),
        (nn.RNN(3, 4), x),
        (nn.LSTMCell(3, 4), x[0]),
        (nn.GRUCell(3, 4), x[0]),
        (nn.Conv2d(4, 2, 3, padding=1), image),
        (nn.ConvTranspose2d(4, 2, 3), image),
        (nn.Conv1d(4, 4, 3, groups=2), image[:, :, 0]),
        (nn.Sequential(nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2)), image),
        (nn.Sequential(nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1)), image),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), words),
        (nn.MultiheadAttention(8, 2), words),
    ]
    results = []
    for layer, given in layers:
        inputs = [given.to(device)] * (3 if isinstance(layer, nn.MultiheadAttention) else 1)
        made = layer.to(device)(*inputs)
        made = made[0] if isinstance(made, tuple) else made
        made.square().mean().backward()
        results += [made.detach(), *(p.grad for p in layer.parameters())]
    query = words.view(2, 5, 2, 4).transpose(1, 2).to(device)
    return [*results, F.scaled_dot_product_attention(query, query, query, is_causal=True)]


def written_by_index(device: str) -> list[Tensor]:
    x = torch.arange(24.0, device=device).reshape(4, 6)
    i = torch.tensor([0, -1, 2], device=device)
    x[i] = 0.0
    x[x > 20] = -1.0
    x[:, 1] = torch.ones(4, device=device)
    x.index_add_(0, i.abs(), torch.ones(3, 6, device=device))
    x[0, 0] = torch.tensor(3.0)
    return [x]


def with_numbers_of_the_host(device: str) -> list[Tensor]:
    x, scale = torch.arange(5.0, device=device), torch.tensor(2.0)
    counts, ends = torch.arange(3, device=device), torch.tensor([True, False, False, False, True])
    written = x.clone()
    written[torch.tensor([0])] = 9.0
    return [
        *(x * scale, scale - x, x.clone().fill_(scale), x.half() * scale.double()),
        *(counts * 2.5, counts + 1, torch.remainder(5, counts + 1)),
        *(x[torch.tensor([0, -1])], x[ends], x[[1, 2]], written),
    ]


@pytest.mark.parametrize(
    "compute",
    [
        *(accumulated, differentiated_twice),
        *(clipped, by_a_function_of_the_user, optimized, by_layers),
        *(written_by_index, with_numbers_of_the_host),
    ],
)
def test_results_are_those_of_the_cpu(compute: Callable[[str], list[Tensor]]) -> None:
    results = []
    for name in ("cuda", "cpu"):
        torch.manual_seed(0)
        results.append(compute(name))
    for device, host in zip(*results, strict=True):
        assert same(device, host) and device.dtype == host.dtype


# --- autograd ------------------------------------------------------------------------------


# --- memory and views ----------------------------------------------------------------------


def test_device_in_place_and_version_counter() -> None:
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


def test_device_out_and_data() -> None:
    """Several outputs, an output of the host, and set_ through .data behave as on any device."""
    x = torch.arange(2.0, device="cuda")
    values, indices = torch.empty(0, device="cuda"), torch.empty(0, dtype=torch.long, device="cuda")
    torch.sort(torch.tensor([2.0, 1.0], device="cuda"), out=(values, indices))
    assert (values.tolist(), indices.tolist()) == ([1.0, 2.0], [1, 0])
    x.data = torch.ones(7, device="cuda")
    assert x.shape == (7,)
    with pytest.raises(RuntimeError, match="same device"):
        torch.add(x, 1, out=torch.empty(7))


# --- modules and optimizers ----------------------------------------------------------------


def test_device_module_to_keeps_identity_and_ties() -> None:
    model, host = (
        nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5))
        for _ in range(2)
    )
    model[1].weight = model[0].weight
    parameters = list(model.parameters())
    assert model.to("cuda") is model
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert model[1].weight is model[0].weight
    assert all(t.is_cuda for t in model.state_dict().values())
    host.load_state_dict(model.state_dict())
    assert host[0].weight.device.type == "cpu"
    model.load_state_dict(host.state_dict())
    assert model.cpu()[0].weight.device.type == "cpu"
    assert model[1].weight is model[0].weight


def test_device_autocast() -> None:
    layer, x = nn.Linear(4, 4).to(CUDA), on_cuda(2, 4)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype=dtype):
            assert torch.is_autocast_enabled("cuda")
            y = layer(x)
            assert y.dtype == dtype
            assert y.softmax(-1).dtype == torch.float32
            loss = F.cross_entropy(y, torch.tensor([0, 1], device="cuda"))
        loss.backward()
        assert layer.weight.grad.dtype == torch.float32
    with torch.autocast("cuda"):
        assert layer(x).dtype == torch.float16
    assert torch.is_autocast_enabled("cuda") is False


def test_device_grad_scaler_skips_inf() -> None:
    layer = nn.Linear(2, 1).to(CUDA)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    weights, scales = [layer.weight.detach().clone()], []
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale(layer(on_cuda(3, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        weights.append(layer.weight.detach().clone())
        scales.append(scaler.get_scale())
    assert [torch.equal(*pair) for pair in pairwise(weights)] == [False, True]
    assert scales == [1024.0, 512.0]


def test_device_data_loader_pins_memory() -> None:
    data = TensorDataset(torch.arange(8.0).view(8, 1), torch.arange(8))
    for workers in (0, 2):
        loader = DataLoader(data, batch_size=4, num_workers=workers, pin_memory=True)
        total = 0
        for x, y in loader:
            assert x.is_pinned()
            assert y.to("cuda", non_blocking=True).is_cuda
            total += int(x.to("cuda", non_blocking=True).sum())
        assert total == 28
    made = [torch.ones(2), torch.ones(2).pin_memory(), torch.empty(4, pin_memory=True)]
    assert [x.is_pinned() for x in made] == [False, True, True]


class OfDevice(Dataset[Tensor]):
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
    forked: Any = {"batch_size": 4, "num_workers": 1, "multiprocessing_context": "fork"}
    (batch,) = DataLoader(OfDevice("cpu", makes=makes), **forked)
    assert batch.shape == (4, 2)
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
        list(DataLoader(OfDevice("cuda", makes=makes), **forked))
    assert torch.ones(2, device="cuda").sum().item() == 2


def test_device_shares_no_tensor_with_another_process() -> None:
    ForkingPickler.dumps(torch.ones(2))
    with pytest.raises(NotRehearsedError, match="a tensor shared with another process"):
        ForkingPickler.dumps(torch.ones(2, device="cuda"))
