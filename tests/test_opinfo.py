"""Every op of torch's own test database runs under a full check as without: no report, same bits.

The normal run takes the ops that reach a guard and an even sample of the others; the marker
``full`` adds the rest, and all samples of each.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import cudalens
from cudalens import simulate
from cudalens.guarding import PROCESS

DTYPES = (torch.float32, torch.int64)
QUICK_SAMPLES = 4
EVERY = 9
"""Of the ops that no guard looks at, the normal run takes each ninth."""

GUARDED: frozenset[str] = frozenset()
"""Names in the database whose samples reach a guard."""
ARBITRARY = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
"""Their results are whatever lies in memory."""


def on_device(tree: Any) -> Any:
    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone().cuda().requires_grad_(leaf.requires_grad)
        return "cuda" if isinstance(leaf, str) and leaf == "cpu" else leaf

    return tree_map(move, tree)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def run(op: Any, sample: Any, backward: bool) -> tuple[list[Any], Tensor, Tensor]:
    """Give values and gradients of one sample, and both random states afterwards."""
    args, kwargs = on_device(((sample.input, *sample.args), sample.kwargs))
    torch.manual_seed(0)
    found: list[Any] = tensors(sample.output_process_fn_grad(op(*args, **kwargs)))
    if backward:
        leaves = [item for item in tensors((args, kwargs)) if item.requires_grad]
        outputs = [item for item in found if item.requires_grad]
        if leaves and outputs:
            total = sum((item.abs() if item.is_complex() else item).sum() for item in outputs)
            found += torch.autograd.grad(total, leaves, allow_unused=True)
    return found, torch.get_rng_state(), torch.cuda.get_rng_state()


def bits(tensor: Tensor) -> tuple[Any, ...]:
    """Give everything that tells one result from another."""
    meta = (tensor.layout, tensor.dtype, tensor.device, tuple(tensor.shape), tensor.requires_grad)
    if tensor.layout != torch.strided:
        return (*meta, bits(tensor.detach().cpu().to_dense()))
    host = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    host = host.clone(memory_format=torch.contiguous_format)
    return (*meta, tensor.stride(), host.view(torch.uint8).numpy().tobytes())


def as_bits(found: list[Any]) -> list[Any]:
    return [None if item is None else bits(item) for item in found]


def plain_runs(op: Any, dtype: torch.dtype, backward: bool, limit: int | None) -> Iterator[Any]:
    """Give each sample that the device accepts, and what comes out without a check."""
    for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=backward), limit):
        try:
            yield sample, run(op, sample, backward)
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            continue  # refused with or without us


def compare(op: Any, dtype: torch.dtype, backward: bool, limit: int | None) -> int:
    """Run samples without and with a check; give the number of calls that a guard looked at."""
    expected = list(plain_runs(op, dtype, backward, limit))
    before = PROCESS.checked_ops
    with cudalens.check() as session:
        got = [run(op, sample, backward) for sample, _ in expected]
        looked = PROCESS.checked_ops - before
    assert (session.report, session.findings, session.warnings) == (None, (), ())
    for (_, (plain, host_state, device_state)), (checked, *states) in zip(
        expected, got, strict=True
    ):
        assert torch.equal(host_state, states[0])
        assert torch.equal(device_state, states[1])
        if op.name not in ARBITRARY:
            assert as_bits(checked) == as_bits(plain)
    return looked


def cases(*, quick: bool) -> Iterator[Any]:
    others = sorted({op.name for op in op_db} - GUARDED)
    wanted = GUARDED | set(others[::EVERY])
    for op in op_db:
        if op.name.startswith("jiterator"):  # compiles CUDA code, refused without a GPU
            continue
        if quick and op.name not in wanted:
            continue
        for dtype in DTYPES:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            yield pytest.param(op, dtype, False, id=f"{op.formatted_name}-{dtype}-forward")
            if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"):
                yield pytest.param(op, dtype, True, id=f"{op.formatted_name}-{dtype}-backward")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The samples provoke torch's own warnings; ours stay errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", cudalens.SilentFindingWarning)
        yield


@pytest.mark.parametrize(("op", "dtype", "backward"), list(cases(quick=True)))
def test_a_check_changes_nothing(
    op: Any, dtype: torch.dtype, backward: bool, sim: simulate.Simulation
) -> None:
    """No report, no warning, the same bits and random states as without a check."""
    compare(op, dtype, backward, QUICK_SAMPLES)
    assert not sim.is_poisoned


@pytest.mark.full
@pytest.mark.parametrize(("op", "dtype", "backward"), list(cases(quick=False)))
def test_a_check_changes_nothing_anywhere(
    op: Any, dtype: torch.dtype, backward: bool, sim: simulate.Simulation
) -> None:
    """The same for every op and every sample of the database."""
    compare(op, dtype, backward, None)
    assert not sim.is_poisoned
