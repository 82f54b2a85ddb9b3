"""Every op of torch's own test database gives on the rehearsal device what it gives on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from cudalens import simulate
from tests.amount import AMOUNT
from tests.guarded_ops import GUARDED
from tests.test_opinfo import ARBITRARY, Case, cases_of, on_device

pytestmark = [pytest.mark.no_cover, pytest.mark.thorough]

NOT_REHEARSED = {"to_sparse", "sparse.sampled_addmm", "sparse.mm"}
HOST_ARGUMENT = {
    "tensor_split",  # takes its indices from the CPU on every device
    "as_strided",  # partial views: a copy of the sample has another storage layout
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


def compare(case: Case, sample: Any) -> bool:
    """Compare both devices on a sample; return whether the CPU takes it."""
    try:
        expected = case.run(sample, partial(on_device, device="cpu")).values
    except (RuntimeError, ValueError, TypeError):
        return False
    for host, device in zip(expected, case.run(sample, on_device).values, strict=True):
        assert_same(case.op.name, host, device)
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", OPS, ids=[op.formatted_name for op in OPS])
def test_op_gives_what_the_cpu_gives(op: Any, sim: simulate.Simulation) -> None:
    """Values and gradients are the CPU's bit for bit; random draws follow the same seed."""
    cases = list(cases_of(op))
    tried = [compare(case, sample) for case in cases for sample in case.samples(AMOUNT.op_samples)]
    assert any(tried) or not cases
    assert sim.pending is None
    assert not sim.is_poisoned
