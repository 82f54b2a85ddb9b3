"""Kernels of the rehearsal whose CUDA form differs from the CPU's: values, waits, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cudalens.simulate import Simulation
from tests.simulate.device import CUDA, on_cuda, same

pytestmark = pytest.mark.usefixtures("seeded")
aten = torch.ops.aten


# --- copies, reads, sizes ------------------------------------------------------------------------


def test_a_copy_to_the_other_device_waits_unless_it_need_not(sim: Simulation) -> None:
    def pending_after(copy: Any) -> bool:
        target = on_cuda(2)
        sim.device_assert("aten::mine", "mine.cu:1: Assertion `x` failed.")
        try:
            copy(target)
        except RuntimeError:
            return False
        finally:
            is_pending = sim.pending is not None
            sim.reset()
        return is_pending

    host, other = torch.zeros(2), on_cuda(2)
    assert pending_after(lambda x: x.copy_(other))
    assert pending_after(lambda x: x.copy_(host, non_blocking=True))
    assert not pending_after(lambda x: x.copy_(host))
    assert not pending_after(lambda x: host.copy_(x))
    assert not pending_after(lambda x: x.cpu())
    assert not pending_after(lambda x: x[0].item())


@pytest.mark.parametrize(
    "launch",
    [
        lambda x: x.copy_(x),
        lambda x: x[0, 0].item(),
        lambda x: x.softmax(1),
        lambda x: aten._softmax_backward_data(x, x, 1, torch.float16),
        lambda x: aten.mm.dtype(x, x.t(), torch.float32),
        lambda x: torch.native_dropout(x, 0.5, True),
        lambda x: aten._efficientzerotensor([2], dtype=torch.half, device=CUDA),
        lambda x: aten._thnn_fused_gru_cell_backward(x[:, :4], x, True),
    ],
)
def test_nothing_is_launched_on_a_device_that_was_lost(
    launch: Callable[[Tensor], object], sim: Simulation
) -> None:
    x = on_cuda(4, 20).half()
    launch(x)
    sim.device_assert("aten::mine", "mine.cu:1: Assertion `x` failed.")
    for call in (torch.cuda.synchronize, lambda: launch(x)):
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            call()


def test_resized_elements_stay_where_they_are() -> None:
    x = torch.tensor([[1, 2], [3, 4]], device=CUDA)
    assert x.resize_(3).tolist() == [1, 2, 3]
    assert x.resize_(2, 4) is x
    assert x.flatten()[:4].tolist() == [1, 2, 3, 4]


def test_a_tensor_that_is_set_shares_memory_or_has_none() -> None:
    x, y = on_cuda(3), on_cuda(3)
    assert x.set_(y) is x
    y.fill_(5)
    assert x.tolist() == [5, 5, 5]
    x.set_(y.untyped_storage(), 1, (2,))
    assert x.shape == (2,) and x.storage_offset() == 1
    assert x.set_().numel() == 0
    assert x.is_cuda and y.tolist() == [5, 5, 5]


# --- softmax, products, dropout ------------------------------------------------------------------


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_softmax_widens_half_precision_as_cuda_does(function: Any) -> None:
    x = torch.randn(3, 4).half()
    device = x.to(CUDA).requires_grad_()
    made = function(device, 1, dtype=torch.float32)
    assert made.dtype == torch.float32
    assert same(made.detach(), function(x.float(), 1))
    weight = torch.randn(3, 4)
    (made * weight.to(CUDA)).sum().backward()
    host = x.float().requires_grad_()
    (function(host, 1) * weight).sum().backward()
    assert device.grad is not None and device.grad.dtype == torch.float16
    assert same(device.grad.float(), host.grad, tolerance=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softmax_into_a_result_that_is_given(dtype: torch.dtype) -> None:
    """It keeps its dtype, whatever its shape was."""
    x = torch.randn(3, 4)
    for shape in ((3, 4), (0,)):
        out = torch.empty(shape, device=CUDA, dtype=dtype)
        assert aten._softmax.out(x.to(CUDA), 0, False, out=out) is out
        assert out.dtype == dtype and same(out, x.softmax(0).to(dtype))


@pytest.mark.parametrize("op", [aten._softmax_backward_data, aten._log_softmax_backward_data])
def test_gradients_of_softmax_are_of_one_device(op: Any) -> None:
    x, grad = torch.randn(3, 4).softmax(1), torch.randn(3, 4)
    expected = op(grad, x, 1, torch.float32)
    for dtype in (torch.float32, torch.float16):  # of what was widened
        made = op(grad.to(CUDA), x.to(CUDA), 1, dtype)
        assert made.dtype == dtype and same(made.float(), expected, tolerance=1e-2)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        op(grad.to(CUDA), x, 1, torch.float32)


def test_products_in_a_wider_dtype() -> None:
    left, right, start = torch.randn(2, 3).half(), torch.randn(3, 4).half(), torch.randn(2, 4)
    here = left.to(CUDA), right.to(CUDA)
    assert same(aten.mm.dtype(*here, torch.float32), left.float() @ right.float())
    added = aten.addmm.dtype(start.half().to(CUDA), *here, torch.float32, beta=2, alpha=3)
    expected = 2 * start.half().float() + 3 * (left.float() @ right.float())
    assert added.dtype == torch.float32 and same(added, expected)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        aten.mm.dtype(here[0], right, torch.float32)


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
def test_each_product_in_a_wider_dtype_can_be_given_its_result(name: str, is_given: bool) -> None:
    op = getattr(aten, name)
    batch = (2,) if "bmm" in name else ()
    values = [torch.randn(*batch, 2, 2).half() for _ in range(3 if "add" in name else 2)]
    scales = {"beta": 2, "alpha": 3} if "add" in name else {}
    expected = op.default(*(value.float() for value in values), **scales)
    there = [value.to(CUDA) for value in values]
    if is_given:
        for start in (torch.zeros(*batch, 2, 2, device=CUDA), torch.empty(0, device=CUDA)):
            assert op.dtype_out(*there, torch.float32, out=start, **scales) is start
            assert start.dtype == torch.float32 and same(start, expected)
    else:
        made = op.dtype(*there, torch.float32, **scales)
        assert made.dtype == torch.float32 and same(made, expected)


def test_dropout_keeps_and_scales() -> None:
    x = torch.ones(1000, device=CUDA)
    made, mask = torch.native_dropout(x, 0.75, True)
    assert mask.dtype == torch.bool and mask.is_cuda
    assert 150 < int(mask.sum()) < 350
    assert {*made.tolist()} == {0.0, 4.0}
    assert torch.equal(made != 0, mask)
    assert torch.native_dropout(x, 1.0, True)[0].sum().item() == 0
    made, mask = torch.native_dropout(x, 0.75, False)
    assert torch.equal(made, x) and bool(mask.all()) and made.data_ptr() != x.data_ptr()


def test_dropout_draws_from_the_device_s_stream_alone() -> None:
    x, state = torch.ones(64, device=CUDA), torch.get_rng_state()
    drawn = []
    for train in (True, None):
        torch.cuda.manual_seed(7)
        drawn.append(torch.native_dropout(x, 0.5, train)[0])
    assert torch.equal(*drawn) and 0 in drawn[0]
    assert torch.equal(torch.get_rng_state(), state)


# --- sparse sums ---------------------------------------------------------------------------------


def sparse(values: list[float], *rows: int, size: int = 3) -> Tensor:
    return torch.sparse_coo_tensor([[*rows]], values, (size,), device=CUDA)


def test_a_dense_tensor_plus_a_sparse_one() -> None:
    dense = torch.tensor([1.0, 2.0, 3.0], device=CUDA)
    other = sparse([10.0, 20.0, 30.0], 0, 2, 2)
    assert (dense + other).tolist() == [11.0, 2.0, 53.0]
    assert torch.add(dense, other, alpha=2).tolist() == [21.0, 2.0, 103.0]
    assert torch.add(dense, other.coalesce()).tolist() == [11.0, 2.0, 53.0]
    assert dense.tolist() == [1.0, 2.0, 3.0]
    assert dense.add_(other) is dense
    assert dense.tolist() == [11.0, 2.0, 53.0]
    out = torch.empty(0, device=CUDA)
    assert torch.add(dense, other, out=out) is out
    assert out.tolist() == [21.0, 2.0, 103.0]


def test_rows_of_a_hybrid_tensor_are_added_whole() -> None:
    other = torch.sparse_coo_tensor([[2, 0]], [[1.0, 2.0], [3.0, 4.0]], (3, 2), device=CUDA)
    dense = torch.ones(3, 2, device=CUDA)
    assert (dense + other).tolist() == [[4, 5], [1, 1], [2, 3]]
    flat = torch.sparse_coo_tensor([[2, 0], [1, 0]], [1.0, 2.0], (3, 2), device=CUDA)
    assert (dense + flat).tolist() == [[3, 1], [1, 1], [1, 2]]


def test_two_sparse_tensors_keep_their_elements_until_they_are_too_many() -> None:
    few = sparse([1.0], 0) + sparse([2.0], 0)
    assert (few._nnz(), few.to_dense().tolist()) == (2, [3.0, 0.0, 0.0])
    full = sparse([1.0, 1.0], 0, 1) + sparse([2.0], 1)
    assert (full._nnz(), full.to_dense().tolist()) == (3, [1.0, 3.0, 0.0])
    many = sparse([1.0, 1.0], 0, 1) + sparse([2.0, 2.0], 0, 1)
    assert (many._nnz(), many.to_dense().tolist()) == (2, [3.0, 3.0, 0.0])


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda x, s: x.view(1, 3) + s, "expected 'self' and 'other' to have same size"),
        (lambda x, s: s + sparse([1.0], 0, size=4), "expected sizes of 'self' and 'other' to"),
        (lambda x, s: x.cpu() + s, "found at least two devices"),
        (lambda x, s: x.int().add_(s), "Can't convert result type Float to output Int"),
        (lambda x, s: s.int().add_(s), "Can't convert result type Float to output Int"),
        (lambda x, s: torch.add(x, s, out=x.int()), "Can't convert result type Float to output"),
    ],
)
def test_a_sum_that_is_refused(call: Callable[[Tensor, Tensor], object], why: str) -> None:
    x = torch.ones(3, device=CUDA)
    assert x.add_(sparse([1.0], 0).double()).tolist() == [2.0, 1.0, 1.0]
    with pytest.raises(RuntimeError, match=why):
        call(x, sparse([1.0], 0))


# --- fused cells ---------------------------------------------------------------------------------


def cell_gradients(kind: str, device: torch.device, has_bias: bool) -> list[Tensor]:
    """Return results and gradients of one cell, on the host."""
    torch.manual_seed(1)
    cell = getattr(torch.nn, kind)(3, 4, bias=has_bias)
    x, h, c = torch.randn(2, 3), torch.randn(2, 4), torch.randn(2, 4)
    cell = cell.to(device)
    given = [item.to(device).requires_grad_() for item in (x, h, c)]
    made = cell(given[0], tuple(given[1:]) if kind == "LSTMCell" else given[1])
    results = list(made) if isinstance(made, tuple) else [made]
    sum((item * (at + 1)).sin().sum() for at, item in enumerate(results)).backward()
    grads = [item.grad for item in (*given, *cell.parameters()) if item.grad is not None]
    return [item.detach().cpu() for item in (*results, *grads)]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell"])
def test_a_fused_cell_computes_what_the_host_does(kind: str, has_bias: bool) -> None:
    host = cell_gradients(kind, torch.device("cpu"), has_bias)
    device = cell_gradients(kind, CUDA, has_bias)
    assert len(host) == len(device)
    for here, there in zip(host, device, strict=True):
        assert torch.allclose(here, there, atol=1e-5)


def test_a_backward_without_biases_has_no_gradients_of_them() -> None:
    grad, workspace = on_cuda(2, 4), on_cuda(2, 20)
    for has_bias in (True, False):
        made = aten._thnn_fused_gru_cell_backward(grad, workspace, has_bias)
        assert [item is not None for item in made] == [True] * 3 + [has_bias] * 2
        for given, is_made in ((grad, True), (None, False)):
            made = aten._thnn_fused_lstm_cell_backward_impl(
                given, given, grad, grad, workspace[:, :16], has_bias
            )
            assert [item is not None for item in made] == [is_made] * 2 + [is_made and has_bias]


def test_a_fused_cell_is_of_one_device() -> None:
    gates, hx = on_cuda(2, 12), on_cuda(2, 4)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        aten._thnn_fused_gru_cell(gates, gates, hx.cpu())
