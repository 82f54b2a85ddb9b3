"""Deterministic algorithms: ops without such a kernel are refused by torch, before any assert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cudalens
from cudalens import simulate
from cudalens.core.deterministic_ops import kernel_without_determinism
from tests.cpu_guards import deterministic
from tests.simulate.test_asserts import CALLS as ASSERTING
from tests.simulate.test_asserts import moved
from tests.verdicts import call

aten = torch.ops.aten
BAD = 99


def on_device(*shape: int) -> Tensor:
    """Return zeros on the device."""
    return torch.zeros(shape, device="cuda")


def ids(*values: int, shape: tuple[int, ...] = (-1,)) -> Tensor:
    """Return whole numbers on the device."""
    return torch.tensor(values, device="cuda").view(shape)


PRODUCTS = {"scatter": {"reduce": "multiply"}, "scatter_reduce": {"reduce": "prod"}}
REFUSED = {"max_unpool2d", "max_unpool3d", "fractional_max_pool2d_backward", *PRODUCTS} | {
    *("nll_loss2d_forward", "nll_loss2d_backward", "index_reduce", "put"),
    "fractional_max_pool3d_backward",
}
CALLS: list[tuple[str, str, dict[str, Any]]] = []
"""Calls that violate a guard, of the ops whose kernel adds in any order."""
for case, name in (param.values for param in ASSERTING):
    packet = name.removeprefix("aten::").partition(".")[0].rstrip("_")
    given = {**case.at_bound, **case.beyond[0]}
    given |= PRODUCTS.get(packet, {}) if "reduce" in given else {}
    if packet in REFUSED and kernel_without_determinism(name, given):
        CALLS.append((packet, name, given))
each_call = pytest.mark.parametrize(("packet", "name", "given"), CALLS)


def test_every_such_op_is_called() -> None:
    assert {packet for packet, _, _ in CALLS} == REFUSED


@each_call
def test_what_torch_refuses_is_torch_s_to_tell(
    sim: simulate.Simulation, packet: str, name: str, given: dict[str, Any]
) -> None:
    """The error is that of CUDA's host code, and no report blames a value that no kernel saw."""
    given = {key: moved(value) for key, value in given.items()}
    with deterministic(), cudalens.check() as session, pytest.raises(RuntimeError) as caught:
        call(name, given)
    assert "does not have a deterministic implementation" in str(caught.value)
    assert session.report is None and session.findings == session.warnings == ()


@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
@each_call
def test_what_torch_only_warns_of_is_guarded(
    sim: simulate.Simulation, packet: str, name: str, given: dict[str, Any]
) -> None:
    """With ``warn_only`` the kernel would be launched, and assert."""
    given = {key: moved(value) for key, value in given.items()}
    with deterministic(warn_only=True), cudalens.check(), pytest.raises(IndexError):
        call(name, given)


@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
def test_a_negative_factor_s_place_does_not_wrap(sim: simulate.Simulation) -> None:
    """Sums are written by ``index_put_``, where -1 is the last place; products never are."""

    def scatter(reduce: str) -> Tensor:
        return on_device(3).scatter(0, ids(-1), torch.ones(1, device="cuda"), reduce=reduce)

    with deterministic(warn_only=True), cudalens.check():
        assert scatter("add").tolist() == [0, 0, 1]
        with pytest.raises(IndexError, match="-1"):
            scatter("multiply")


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_a_loss_of_every_pixel_needs_no_sum(sim: simulate.Simulation, reduction: int) -> None:
    """Without a reduction nothing is added by several threads: the kernel runs, so it is guarded.

    Source: NLLLoss2d.cu, nll_loss2d_forward_out_cuda_template, torch 2.13.0
    """
    wanted = IndexError if reduction == 0 else RuntimeError
    with deterministic(), cudalens.check(), pytest.raises(RuntimeError) as caught:
        aten.nll_loss2d_forward(
            on_device(1, 3, 1, 1), ids(BAD, shape=(1, 1, 1)), None, reduction, -100
        )
    assert isinstance(caught.value, wanted)
    assert isinstance(caught.value, IndexError) == (reduction == 0)


def test_places_that_are_filled_first_are_guarded(sim: simulate.Simulation) -> None:
    """Without self the fill is launched before torch refuses the product."""
    with deterministic(), cudalens.check(), pytest.raises(IndexError, match=str(BAD)):
        on_device(3).scatter_reduce(0, ids(BAD), on_device(1), "prod", include_self=False)


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_a_mask_larger_than_what_is_written_in_place(
    sim: simulate.Simulation, shape: tuple[int, ...]
) -> None:
    """Torch refuses what does not fit; the copying form spreads the tensor instead."""
    mask = torch.ones(shape, dtype=torch.bool, device="cuda")
    with cudalens.check(), pytest.raises(RuntimeError) as caught:
        on_device(3).masked_scatter_(mask, on_device(1))
    assert isinstance(caught.value, ValueError) == (shape == (3,))
    with cudalens.check(), pytest.raises(ValueError, match="selects"):
        on_device(3).masked_scatter(mask, on_device(1))


@pytest.mark.parametrize("op", ["mylib::put_", "aten::index_put_", "aten::scatter.src"])
def test_other_ops_have_a_deterministic_kernel(op: str) -> None:
    """Neither an op of another library, nor one that torch rewrites."""
    assert kernel_without_determinism(op, {"src": None}) is None
