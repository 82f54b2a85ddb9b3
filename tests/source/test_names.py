"""What the user called, and what would have asserted: the names when one hides behind the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import cudalens
from cudalens.core.report import Report
from cudalens.simulate import Simulation


def cuda(*values: float) -> torch.Tensor:
    return torch.tensor(values, device="cuda")


def scores() -> torch.Tensor:
    return torch.zeros(2, 3, device="cuda", requires_grad=True)


def _add_in_place() -> None:
    table = torch.zeros(3, device="cuda")
    table[cuda(0, 3)] += 1


def _write() -> None:
    table = torch.zeros(3, device="cuda")
    table[cuda(0, 3)] = 1


def _autocast() -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        F.cross_entropy(scores() @ torch.eye(3, device="cuda"), cuda(0, 3))


def _checkpoint() -> None:
    layer = nn.Embedding(3, 2, device="cuda")
    checkpoint(layer, cuda(0, 3), use_reentrant=False)


CASES: list[tuple[Callable[[], object], str, str]] = [
    (lambda: F.one_hot(cuda(0, 3), 3), "torch.nn.functional.one_hot", "aten::scatter_"),
    (
        lambda: F.cross_entropy(scores(), cuda(0, 3)),
        "torch.nn.functional.cross_entropy",
        "aten::nll_loss_forward",
    ),
    (
        lambda: nn.CrossEntropyLoss()(scores(), cuda(0, 3)),
        "torch.nn.functional.cross_entropy",
        "aten::nll_loss_forward",
    ),
    (
        lambda: F.embedding(cuda(0, 3), scores().T.contiguous(), padding_idx=0),
        "torch.nn.functional.embedding",
        "aten::embedding",
    ),
    (_add_in_place, "torch.Tensor.__getitem__", "aten::index"),
    (_write, "torch.Tensor.__setitem__", "aten::index_put_"),
    (_autocast, "torch.nn.functional.cross_entropy", "aten::nll_loss_forward"),
    (
        lambda: torch.vmap(lambda row, at: row.gather(0, at))(
            scores().detach(), torch.tensor([[0], [3]], device="cuda")
        ),
        "torch.Tensor.gather",
        "aten::gather",
    ),
    (_checkpoint, "torch.nn.functional.embedding", "aten::embedding"),
    (
        lambda: torch.func.grad(lambda z: F.cross_entropy(z, cuda(0, 3)))(scores().detach()),
        "torch.nn.functional.cross_entropy",
        "aten::nll_loss_forward",
    ),
    (lambda: torch.multinomial(cuda(-1.0, 1.0), 1), "torch.multinomial", "aten::multinomial"),
]


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "full"])
@pytest.mark.parametrize(("code", "api", "op"), CASES)
def test_both_names_are_told(
    sim: Simulation, code: Callable[[], object], api: str, op: str, fast: bool
) -> None:
    """``op.api`` is what the user wrote, ``op.name`` what CUDA would have stopped in."""
    report = _report(code, fast=fast)
    assert (report.op.api, report.op.name) == (api, op)


def test_the_outermost_guarded_op_reports_first(sim: Simulation) -> None:
    """embedding looks rows up through index_select, whose guard would see the same ids."""
    report = _report(lambda: F.embedding(cuda(0, 3), torch.zeros(3, 2, device="cuda")))
    assert report.op.name == "aten::embedding"
    assert cudalens.last_report() is report


def _report(code: Callable[[], object], *, fast: bool = True) -> Report:
    session = cudalens.check(fast=fast)
    with pytest.raises(cudalens.DeviceAssertError), session:
        code()
    assert session.report is not None
    assert len(session.findings) == 1
    return session.report
