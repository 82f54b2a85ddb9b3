"""What the user called, and what would have asserted: the names when one hides behind the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import cudalens
from tests.blocks import cuda, report_of

pytestmark = pytest.mark.usefixtures("sim")


def scores() -> torch.Tensor:
    return torch.zeros(2, 3, device="cuda", requires_grad=True)


def _autocast() -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        F.cross_entropy(scores() @ torch.eye(3, device="cuda"), cuda(0, 3))


def _checkpoint() -> None:
    layer = nn.Embedding(3, 2, device="cuda")
    checkpoint(layer, cuda(0, 3), use_reentrant=False)


CASES: list[tuple[Callable[[], object], str, str]] = [
    (lambda: F.one_hot(cuda(0, 3), 3), "F.one_hot", "scatter_"),
    (_autocast, "F.cross_entropy", "nll_loss_forward"),
    (
        lambda: torch.vmap(lambda row, at: row.gather(0, at))(
            scores().detach(), torch.tensor([[0], [3]], device="cuda")
        ),
        "torch.Tensor.gather",
        "gather",
    ),
    (_checkpoint, "F.embedding", "embedding"),
    (
        lambda: torch.func.grad(lambda z: F.cross_entropy(z, cuda(0, 3)))(scores().detach()),
        "F.cross_entropy",
        "nll_loss_forward",
    ),
]


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "full"])
@pytest.mark.parametrize(("code", "api", "op"), CASES)
def test_both_names_are_told(code: Callable[[], object], api: str, op: str, fast: bool) -> None:
    """``op.api`` is what the user wrote, ``op.name`` what CUDA would have stopped in."""
    report = report_of(code, cudalens.DeviceAssertError, fast=fast)
    assert report.op.api == api.replace("F.", "torch.nn.functional.")
    assert report.op.name == f"aten::{op}"


def test_the_outermost_guarded_op_reports_first() -> None:
    """embedding looks rows up through index_select, whose guard would see the same ids."""
    report = report_of(lambda: F.embedding(cuda(0, 3), torch.zeros(3, 2, device="cuda")))
    assert report.op.name == "aten::embedding"
    assert cudalens.last_report() is report
