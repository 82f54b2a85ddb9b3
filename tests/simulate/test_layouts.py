"""Sparse and nested tensors on the device, with the asserts of sparse addition and selection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cudalens import simulate
from tests.blocks import cuda
from tests.simulate.device import ASSERTED, CUDA

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]


def adjacency(device: str) -> Tensor:
    """Return a graph of three nodes with an edge that is there twice."""
    edges = torch.tensor([[0, 1, 2, 0, 1], [1, 2, 0, 2, 2]])
    graph = torch.sparse_coo_tensor(edges, torch.arange(1.0, 6.0), (3, 3))
    return graph.to(device)


def features(device: str) -> Tensor:
    return torch.arange(12.0).view(3, 4).to(device)


def dense(value: object) -> object:
    """Return a result as plain numbers."""
    if not isinstance(value, Tensor):
        return value
    if value.is_nested:
        return [part.tolist() for part in value.unbind()]
    return (value.to_dense() if value.is_sparse else value).tolist()


SPARSE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "matmul": lambda a, x: a @ x,
    "addmm": lambda a, x: torch.sparse.addmm(x, a, x),
    "sparse @ sparse": lambda a, x: torch.sparse.mm(a, a),
    "coalesce": lambda a, x: a.coalesce(),
    "add": lambda a, x: a + a.coalesce(),
    "add_": lambda a, x: a.clone().add_(a.t(), alpha=3),
    "dense add_": lambda a, x: x[:, :3].clone().add_(a, alpha=2),
    "coalesced add": lambda a, x: x[:, :3] + a.coalesce(),
    "scaled": lambda a, x: a * 2,
    "select": lambda a, x: a[1],
    "index_select": lambda a, x: a.index_select(0, torch.tensor([2, -3], device=x.device)),
    "sum": lambda a, x: torch.sparse.sum(a, dim=1),
    "to_sparse": lambda a, x: x.to_sparse(),
    "number": lambda a, x: (a._nnz(), a.coalesce()._nnz(), a.is_coalesced()),
    "dims": lambda a, x: (a.sparse_dim(), a.dense_dim(), tuple(a.shape)),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors_compute_as_on_the_cpu(name: str) -> None:
    """The result is on the device and has the CPU's values."""
    call = SPARSE[name]
    result = call(adjacency("cuda"), features("cuda"))
    assert not isinstance(result, Tensor) or result.is_cuda
    assert dense(result) == dense(call(adjacency("cpu"), features("cpu")))


def test_weights_of_another_dtype_are_refused_in_the_words_of_cuda() -> None:
    """``per_sample_weights`` has the table's dtype."""
    bag = nn.EmbeddingBag(4, 2, mode="sum").to(CUDA)
    words = torch.tensor([[1, 2]], device=CUDA)
    weights = torch.ones(1, 2, device=CUDA)
    assert bag(words, per_sample_weights=weights).shape == (1, 2)
    with pytest.raises(RuntimeError, match="expected scalar type Float but found Double"):
        bag(words, per_sample_weights=weights.double())
    with pytest.raises(RuntimeError, match="expected scalar type Half but found BFloat16"):
        bag.half()(words, per_sample_weights=weights.bfloat16())


def test_a_sparse_tensor_travels_and_prints() -> None:
    """To the device, back, and in words."""
    graph = adjacency("cuda")
    assert graph.is_sparse and graph.is_cuda and graph.device == CUDA
    assert not graph.cpu().is_cuda
    assert dense(graph.cpu()) == dense(adjacency("cpu"))
    assert "layout=torch.sparse_coo" in repr(graph) and "device='cuda:0'" in repr(graph)
    with pytest.raises(RuntimeError, match="same device"):
        graph @ features("cpu")


def test_a_graph_convolution_learns() -> None:
    """Gradients of edge weights and features are the CPU's."""

    def gradients(device: str) -> list[object]:
        graph = adjacency(device).coalesce()
        weights = graph.values().detach().requires_grad_()
        x = features(device).requires_grad_()
        adj = torch.sparse_coo_tensor(graph.indices(), weights, (3, 3))
        torch.sparse.mm(adj, torch.sparse.mm(adj, x)).square().sum().backward()
        return [dense(weights.grad), dense(x.grad)]

    assert gradients("cuda") == gradients("cpu")


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_sparse_embedding_is_trained(name: str) -> None:
    """Three steps with sparse gradients leave the CPU's weights."""

    def trained(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        table = nn.Embedding(6, 3, sparse=True).to(device)
        bag = nn.EmbeddingBag(6, 3, sparse=True, mode="sum").to(device)
        both = nn.ModuleList([table, bag])
        optimizer = OPTIMIZERS[name](both.parameters())
        words = torch.tensor([[1, 1], [4, 0]], device=device)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):  # the second backward adds to a sparse gradient
                (table(words).sum(1) + bag(words)).square().sum().backward()
            optimizer.step()
        assert table.weight.grad is not None and table.weight.grad.is_sparse
        return [p.detach().cpu() for p in both.parameters()]

    for result, expected in zip(trained("cuda"), trained("cpu"), strict=True):
        torch.testing.assert_close(result, expected)


OUTSIDE, UNSELECTED = "dstIndex < dstAddDimSize", "index_select(): index out of bounds"
BAD = torch.tensor([[0, 3]])
MANY_BAD = torch.tensor([[0, 3] * 9])


def broken(indices: Tensor) -> Tensor:
    values = torch.ones(indices.shape[1], device=CUDA)
    return torch.sparse_coo_tensor(indices.to(CUDA), values, (3,), check_invariants=False)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: torch.zeros(3, device=CUDA) + broken(BAD), OUTSIDE),
        (lambda: torch.zeros(3, device=CUDA).add_(broken(MANY_BAD)), OUTSIDE),
        (lambda: broken(BAD).to_dense(), OUTSIDE),
        (lambda: adjacency("cuda").index_select(0, BAD[0].to(CUDA)), UNSELECTED),
        (lambda: adjacency("cuda").index_select(1, cuda(-4)), UNSELECTED),
    ],
)
def test_sparse_addition_and_selection_assert(
    call: Callable[[], object], text: str, sim: simulate.Simulation
) -> None:
    """Late and sticky, with CUDA's own line."""
    call()
    assert text in str(sim.pending)
    with pytest.raises(RuntimeError, match=ASSERTED):
        torch.cuda.synchronize()


def test_a_coalesced_sparse_tensor_is_added_without_an_assert(sim: simulate.Simulation) -> None:
    """That kernel of CUDA's looks at no position."""
    total = torch.zeros(3, device=CUDA) + broken(BAD)._coalesced_(True)
    assert sim.pending is None
    assert total.tolist() == [1.0, 0.0, 0.0]


# --- nested tensors ------------------------------------------------------------------------


def test_an_encoder_with_a_padding_mask_is_evaluated() -> None:
    """The fast path makes a nested tensor of what the mask leaves."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 8)
    mask = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]).bool()
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=mask)
        result = encoder.to(CUDA)(x.to(CUDA), src_key_padding_mask=mask.to(CUDA))
    assert result.is_cuda
    assert not result[0, 3:].any()  # only the fast path leaves zeros there
    torch.testing.assert_close(result.cpu(), expected)


NESTED: dict[str, Callable[[Tensor], Any]] = {
    "pad": lambda n: torch.nested.to_padded_tensor(n, -1.0),
    "scaled": lambda n: n * 2,
    "mul_": lambda n: n.mul_(3),
    "part": lambda n: n.unbind()[1],
    "linear": lambda n: nn.functional.linear(n, torch.ones(2, 3, device=n.device)),
    "softmax": lambda n: torch.softmax(n, -1),
    "clone": lambda n: n.clone(),
    "embedding": lambda n: nn.functional.embedding(
        torch.nested.as_nested_tensor([part[0].long() for part in n.unbind()]),
        torch.arange(6.0, device=n.device).view(3, 2),
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors_compute_as_on_the_cpu(name: str) -> None:
    """Made, moved, padded and computed with, on the device and back."""
    parts = [torch.arange(6.0).view(2, 3), torch.arange(3.0).view(1, 3)]
    host = torch.nested.nested_tensor(parts)
    moved, made = host.to(CUDA), torch.nested.nested_tensor(parts, device=CUDA)
    assert moved.is_cuda and not moved.cpu().is_cuda
    expected = dense(NESTED[name](host))
    for nested in (moved, made):
        result = NESTED[name](nested)
        assert result.is_cuda
        assert dense(result.cpu()) == expected
