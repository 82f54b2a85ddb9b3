"""The public name of the function that was called to reach the op."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import cudalens
from cudalens.core._python import entries_from_traceback
from cudalens.source.api_name import api_name
from cudalens.source.locate import locate, runs_torch
from cudalens.source.stack import place_of, stack_of
from tests.blocks import cuda, report_of
from tests.probes import Probe, cell, run_cell, same, site_of
from tests.releases import release

X = torch.rand(4, 5)
Y = torch.tensor([0, 1, 2, 3])
I2 = torch.zeros(4, 1, dtype=torch.int64)
WRITES_A_NUMBER = "index_fill_" if release() >= (2, 15) else "index_put_"


class Sub(torch.Tensor):
    """Tensors whose calls come through torch's own ``__torch_function__``."""


@pytest.mark.parametrize(
    ("text", "op", "api"),
    [
        ("F.cross_entropy(x, y)", "nll_loss_forward", "F.cross_entropy"),
        ("nn.CrossEntropyLoss()(x, y)", "nll_loss_forward", "F.cross_entropy"),
        ("F.nll_loss(x, y)", "nll_loss_forward", "F.nll_loss"),
        ("torch.gather(x, 1, i)", "gather", "torch.gather"),
        ("x.gather(1, i)", "gather", "torch.Tensor.gather"),
        ("x.abs().gather(1, i)", "gather", "torch.Tensor.gather"),
        ("(x\n .abs()\n .gather(1, i))", "gather", "torch.Tensor.gather"),
        ("torch.Tensor.gather(x, 1, i)", "gather", "torch.Tensor.gather"),
        ("from torch import gather as g\ng(x, 1, i)", "gather", "torch.gather"),
        ("torch.ops.aten.gather(x, 1, i)", "gather", "torch.ops.aten.gather"),
        ("x[y]", "index", "torch.Tensor.__getitem__"),
        ("x.abs()[y]", "index", "torch.Tensor.__getitem__"),
        ("x.as_subclass(Sub)[y]", "index", "torch.Tensor.__getitem__"),
        ("x.as_subclass(Sub).gather(1, i)", "gather", "torch.Tensor.gather"),
        ("x[y] = 0.5", WRITES_A_NUMBER, "torch.Tensor.__setitem__"),
        ("x[y] += 1", "index", "torch.Tensor.__getitem__"),
        ("x[y] += 1", "index_put_", "torch.Tensor.__setitem__"),
        ("x[y] += 1", "add_", "torch.Tensor.__iadd__"),
        ("x.index_add_(0, y, x.clone())", "index_add_", "torch.Tensor.index_add_"),
        ("F.embedding(y, x)", "embedding", "F.embedding"),
        ("nn.Embedding(4, 2)(y)", "embedding", "F.embedding"),
        # It is a composite: an op inside it is seen.
        ("F.one_hot(y, 4)", "scatter_", "F.one_hot"),
        ("F.linear(x, x)", "mm", "F.linear"),
        ("nn.Linear(5, 2)(x)", "addmm", "F.linear"),
        ("torch.multinomial(x, 2)", "multinomial", "torch.multinomial"),
        ("D.Categorical(x).sample()", "multinomial", "torch.distributions.Categorical.sample"),
        ("F.binary_cross_entropy(x, x)", "binary_cross_entropy", "F.binary_cross_entropy"),
        ("e(y).sum().backward()", "embedding_dense_backward", "torch.Tensor.backward"),
        ("A.grad(e(y).sum(), e.weight)", "embedding_dense_backward", "torch.autograd.grad"),
        ("x @ x.T", "mm", "torch.Tensor.__matmul__"),
        ("2.0 ** x", "pow", "torch.Tensor.__rpow__"),
        ("-x", "neg", "torch.Tensor.__neg__"),
        ("x < 3", "lt", "torch.Tensor.__lt__"),
        ("[x.gather(1, i) for _ in range(1)]", "gather", "torch.Tensor.gather"),
        ("(lambda q: q.gather(1, i))(x)", "gather", "torch.Tensor.gather"),
        ("f'{x.gather(1, i).sum().item()}'", "gather", "torch.Tensor.gather"),
        ("with torch.no_grad(): x.gather(1, i)", "gather", "torch.Tensor.gather"),
        ("@N()\ndef f(q): return q.gather(1, i)\nf(x)", "gather", "torch.Tensor.gather"),
    ],
)
def test_the_called_function_is_named_publicly(text: str, op: str, api: str) -> None:
    named = api.replace("F.", "torch.nn.functional.")
    names: dict[str, Any] = {
        "A": torch.autograd,
        "D": torch.distributions,
        "N": torch.no_grad,
        "Sub": Sub,
    }
    names |= {"e": nn.Embedding(4, 2), "x": X.clone(), "y": Y, "i": I2}
    assert site_of(text, op, **names).api == named


def test_an_optimizers_step_is_named_by_its_class() -> None:
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = torch.ones(2)
    with Probe("_foreach_add_") as probe:
        run_cell("o.step()", {"o": torch.optim.SGD([weight], lr=0.1, foreach=True)})
    assert probe.site.api == "torch.optim.SGD.step"


def test_an_unknown_receiver_is_not_guessed() -> None:
    """Without the op's arguments a subscript of a result could be that of a list."""
    found: list[str | None] = []

    class Result:
        def __getitem__(self, key: int) -> None:
            frames = stack_of(sys._getframe(1))
            found.append(locate(frames, {}, same).api)
            found.append(locate(frames, {"self": X, "indices[0]": Y}, same).api)

    run_cell("make()[0]", {"make": Result})
    assert found == [None, "torch.Tensor.__getitem__"]


class OwnSGD(torch.optim.SGD):
    """An optimizer of the user's."""


class OwnReLU(nn.ReLU):
    """A module of the user's."""


PARAMETERS = [torch.zeros(1, requires_grad=True)]


@pytest.mark.parametrize(
    ("file", "function", "owner", "api"),
    [
        ("functional.py", "unique", None, "torch.unique"),
        ("functional.py", "_unique_impl", None, None),
        ("functional.py", "<lambda>", None, None),
        ("nn/functional.py", "relu", None, "torch.nn.functional.relu"),
        ("nn/functional.py", "_threshold", None, None),
        ("_tensor.py", "norm", X, "torch.Tensor.norm"),
        ("_tensor.py", "_own_helper", X, None),
        ("autograd/__init__.py", "backward", None, "torch.autograd.backward"),
        ("autograd/__init__.py", "grad", None, "torch.autograd.grad"),
        ("autograd/__init__.py", "_make_grads", None, None),
        ("optim/sgd.py", "step", torch.optim.SGD(PARAMETERS), "torch.optim.SGD.step"),
        ("optim/sgd.py", "_single", torch.optim.SGD(PARAMETERS), None),
        ("optim/optimizer.py", "wrapper", torch.optim.SGD(PARAMETERS), None),
        ("optim/sgd.py", "step", OwnSGD(PARAMETERS), None),
        ("nn/modules/other.py", "forward", nn.ReLU(), "torch.nn.ReLU"),
        ("nn/modules/other.py", "forward", OwnReLU(), None),
        ("nn/modules/other.py", "forward", X, None),
    ],
)
def test_a_frame_of_torch_names_the_function_or_the_module(
    file: str, function: str, owner: object, api: str | None
) -> None:
    """The module alone where the line that it runs cannot be read."""
    path = str(Path(torch.__file__).parent / file)
    code = compile("def f(self): return here()", path, "exec").co_consts[0]
    names = {"here": lambda: sys._getframe(1)}
    frame = FunctionType(code.replace(co_name=function), names)(owner)
    assert api_name([place_of(frame)]) == api


def test_without_a_stack_nothing_is_named() -> None:
    assert api_name([]) is None


class Mean:
    def mean(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize(
    ("text", "is_torch"),
    [
        ("torch.cat([x, x.T])", True),
        ("x.view(3, 7)", True),
        ("x @ x", True),
        ("x.abs() + x.T", True),
        ("x[9]", True),
        ("-x.bool()", True),
        ("x + {}", True),
        ("x in x[:3]", True),
        ("(x if xs else x).view(7)", True),
        ("(q := x).view(7)", True),
        ("m = x.view; m(7)", True),
        ("p = functools.partial(torch.cat, [x, x.T]); p()", True),
        ("xs[x]", False),
        ("xs * x", False),
        ("'a' + x", False),
        ("x in 'abc'", False),
        ("(x if xs else d).pop(7)", False),
        ("(q := d).pop(7)", False),
        ("m = d.pop; m(7)", False),
        ("getattr(d, 'pop')(7)", False),
        ("functools.partial(d.pop, 7)()", False),
        ("Mean().mean()[x]", False),
        ("xs[9]", False),
        ("d['k']", False),
        ("int('a')", False),
        ("1 / 0", False),
        ("xs.index(5)", False),
    ],
)
def test_an_error_is_torchs_when_the_line_uses_torch(text: str, is_torch: bool) -> None:
    names: dict[str, Any] = {"torch": torch, "functools": functools, "Mean": Mean}
    names |= {"x": X, "y": Y, "xs": [1], "d": {}}
    with cell(text) as code:
        with pytest.raises(Exception) as caught:
            exec(code, names)
        assert runs_torch(entries_from_traceback(caught.value.__traceback__)[-1]) is is_torch


# --- in reports: what the user called, and what would have asserted -------------------------------


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


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "full"])
@pytest.mark.parametrize(("code", "api", "op"), CASES)
def test_both_names_are_told(code: Callable[[], object], api: str, op: str, fast: bool) -> None:
    """``op.api`` is what the user wrote, ``op.name`` what CUDA would have stopped in."""
    report = report_of(code, cudalens.DeviceAssertError, fast=fast)
    assert report.op.api == api.replace("F.", "torch.nn.functional.")
    assert report.op.name == f"aten::{op}"


@pytest.mark.usefixtures("sim")
def test_the_outermost_guarded_op_reports_first() -> None:
    """embedding looks rows up through index_select, whose guard would see the same ids."""
    report = report_of(lambda: F.embedding(cuda(0, 3), torch.zeros(3, 2, device="cuda")))
    assert report.op.name == "aten::embedding"
    assert cudalens.last_report() is report
