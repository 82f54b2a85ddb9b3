"""Every op of torch's own test database gives on the simulated device what it gives on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from cudalens import simulate
from tests.amount import AMOUNT
from tests.guarded_ops import GUARDED

pytestmark = pytest.mark.thorough

NOT_REHEARSED = {"to_sparse", "sparse.sampled_addmm", "sparse.mm"}
HOST_ARGUMENT = {
    "tensor_split",  # takes its indices from the CPU on every device
    "as_strided",  # partial views: a copy of the sample has another storage layout
}
ARBITRARY = {
    "empty",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "empty_strided",
    "empty_permuted",
}
ROUNDED = {
    "linalg.lstsq",  # LAPACK sees another memory layout
    "renorm",
    "nn.functional.rms_norm",  # a CUDA build has a fused kernel of its own
}
OPS = [
    op
    for number, op in enumerate(op_db)
    if op.name not in NOT_REHEARSED | HOST_ARGUMENT
    and not op.name.startswith("jiterator")  # compiles CUDA code, refused without a GPU
    and (number % AMOUNT.op_step == 0 or op.name in GUARDED)
]


def on_device(tree: Any) -> Any:
    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().cuda().requires_grad_(leaf.requires_grad)
        return "cuda" if leaf in ("cpu", torch.device("cpu")) else leaf

    return tree_map(move, tree)


def fresh(tree: Any) -> Any:
    """Copy the tensors of a sample: some samples are written in place."""
    return tree_map(
        lambda t: (
            t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t
        ),
        tree,
    )


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def values_and_gradients(op: Any, sample: Any, args: Any, kwargs: Any, backward: bool) -> list[Any]:
    result = sample.output_process_fn_grad(op(*args, **kwargs))
    found: list[Any] = tensors(result)
    if backward:
        leaves = [t for t in tensors((args, kwargs)) if t.requires_grad]
        outputs = [t for t in found if t.requires_grad]
        if outputs:
            total = sum((t.abs() if t.is_complex() else t).sum() for t in outputs)
            found = found + list(torch.autograd.grad(total, leaves, allow_unused=True))
    return found


def assert_same(name: str, host: Any, device: Any) -> None:
    assert (host is None) == (device is None)
    if host is None:
        return
    assert device.is_cuda
    assert (device.shape, device.dtype) == (host.shape, host.dtype)
    if name in ARBITRARY:
        return
    # Some samples ask for cuda themselves, as soon as it is available.
    got, expected = device.detach().cpu(), host.detach().cpu()
    if expected.dtype is torch.complex32:  # compares on neither device
        got, expected = got.to(torch.complex64), expected.to(torch.complex64)
    exact = {} if name in ROUNDED else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(got, expected, equal_nan=True, **exact)


def directions(op: Any) -> Iterator[tuple[torch.dtype, bool]]:
    """Yield dtype and whether to run backward too, for all that the CPU supports."""
    for dtype in (torch.float32, torch.int64):
        if dtype in op.supported_dtypes("cpu"):
            yield dtype, False
            if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"):
                yield dtype, True


def host_run(op: Any, sample: Any, backward: bool) -> list[Any] | None:
    """Return the CPU's answer, None for a sample that the CPU itself refuses."""
    args, kwargs = fresh(((sample.input, *sample.args), sample.kwargs))
    torch.manual_seed(0)
    try:
        return values_and_gradients(op, sample, args, kwargs, backward)
    except (RuntimeError, ValueError, TypeError):
        return None


def check(op: Any, dtype: torch.dtype, backward: bool) -> int:
    """Compare both devices on each sample; return how many samples were compared."""
    compared = 0
    for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=backward), AMOUNT.op_samples):
        expected = host_run(op, sample, backward)
        if expected is None:
            continue
        args, kwargs = on_device(((sample.input, *sample.args), sample.kwargs))
        torch.manual_seed(0)
        got = values_and_gradients(op, sample, args, kwargs, backward)
        assert len(got) == len(expected)
        for host, device in zip(expected, got, strict=True):
            assert_same(op.name, host, device)
        compared += 1
    return compared


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", OPS, ids=[op.formatted_name for op in OPS])
def test_op_gives_what_the_cpu_gives(op: Any, sim: simulate.Simulation) -> None:
    """Values and gradients are the CPU's bit for bit; random draws follow the same seed."""
    compared = sum(check(op, dtype, backward) for dtype, backward in directions(op))
    assert compared > 0 or not list(directions(op))
    assert sim.pending is None
    assert not sim.is_poisoned
