"""Every op of torch's own test database runs under a full check as without: no report, same bits.

CI takes one sample of every twelfth op, with its backward pass where it has one, and one of each
dtype and direction of the ops that a guard looks at; ``make test-all`` takes them all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import cudalens
from cudalens import simulate
from cudalens.guards.process import PROCESS
from tests.amount import AMOUNT
from tests.cpu_guards import bits
from tests.guarded_ops import GUARDED

# What it covers is covered elsewhere, and tracing it would take the longest part of a run.
pytestmark = [pytest.mark.no_cover, pytest.mark.thorough]

QUICK_SAMPLES = 1
OPS_IN_A_TEST = 25

ARBITRARY = {
    *("empty", "empty_like", "empty_permuted", "empty_strided"),
    *("new_empty", "new_empty_strided"),
}
"""Their results are whatever lies in memory."""
ON_SHAPES = {"broadcast_shapes"}
"""Their samples hold no tensor: there is nothing to record."""
ROUNDED = {"linalg.lstsq", "masked.prod"}
"""Their rounding depends on where the memory lies: two plain runs differ."""


@dataclass(frozen=True)
class Case:
    """One op of the database with a dtype and a direction."""

    op: Any
    dtype: torch.dtype
    backward: bool

    def __str__(self) -> str:
        direction = "backward" if self.backward else "forward"
        return f"{self.op.formatted_name} {self.dtype} {direction}"

    def samples(self, limit: int | None) -> Iterator[Any]:
        samples = self.op.sample_inputs("cpu", self.dtype, requires_grad=self.backward)
        return islice(samples, limit)

    def run(self, sample: Any, placed: Callable[[Any], Any] | None = None) -> Run:
        """Return values and gradients of one sample, and both random states afterwards.

        Args:
            placed: copies the arguments to where the op runs, the device by default.
        """
        args, kwargs = (placed or on_device)(((sample.input, *sample.args), sample.kwargs))
        torch.manual_seed(0)
        found: list[Any] = tensors(sample.output_process_fn_grad(self.op(*args, **kwargs)))
        if self.backward:
            leaves = [item for item in tensors((args, kwargs)) if item.requires_grad]
            outputs = [item for item in found if item.requires_grad]
            if leaves and outputs:
                total = sum((item.abs() if item.is_complex() else item).sum() for item in outputs)
                found += torch.autograd.grad(total, leaves, allow_unused=True)
        return Run(found, torch.get_rng_state(), torch.cuda.get_rng_state())

    def attempt(self, sample: Any) -> Run | None:
        """Run a sample without us; ``None`` when the device does not take it."""
        try:
            return self.run(sample)
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            return None


@dataclass(frozen=True)
class Run:
    """What came out of a sample."""

    values: Sequence[Any]
    host_state: Tensor
    device_state: Tensor

    def has_states_of(self, other: Run) -> bool:
        return torch.equal(self.host_state, other.host_state) and torch.equal(
            self.device_state, other.device_state
        )

    def has_bits_of(self, other: Run) -> bool:
        return [bits(item) for item in self.values] == [bits(item) for item in other.values]

    def is_close_to(self, other: Run) -> bool:
        for one, two in zip(self.values, other.values, strict=True):
            torch.testing.assert_close(one, two, equal_nan=True, check_stride=False)
        return True


def on_device(tree: Any, device: str = "cuda") -> Any:
    """Copy the tensors of a sample, some of which are written in place, to a device."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone().to(device).requires_grad_(leaf.requires_grad)
        return device if isinstance(leaf, str | torch.device) and str(leaf) == "cpu" else leaf

    return tree_map(move, tree)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def complaints(case: Case, limit: int | None, **options: Any) -> Iterator[str]:
    """Run the samples of a case without and with a check; yield what differs."""
    name = case.op.name
    tried = [(sample, case.attempt(sample)) for sample in case.samples(limit)]
    samples = [sample for sample, run in tried if run is not None]
    plain = [run for _, run in tried if run is not None]
    with cudalens.check(**options) as session:
        got = [case.run(sample) for sample in samples]
        recorded = 0 if session.recorder is None else session.recorder.recorded_ops
    if session.internal_errors:
        yield f"{case}: {session.internal_errors}"
    has_recorder = bool(samples) and not options.get("fast")
    if (recorded > 0) != (has_recorder and name not in ON_SHAPES):
        yield f"{case}: {recorded} ops were recorded"
    if session.report is not None or session.findings or session.warnings:
        yield f"{case}: {session.report}"
    for number, (bare, checked) in enumerate(zip(plain, got, strict=True)):
        if not checked.has_states_of(bare):
            yield f"{case} sample {number}: another random state"
        if name in ROUNDED and not checked.is_close_to(bare):
            yield f"{case} sample {number}: other values"
        if name not in ROUNDED | ARBITRARY and not checked.has_bits_of(bare):
            yield f"{case} sample {number}: other bits"


def cases_of(op: Any) -> Iterator[Case]:
    for dtype in (torch.float32, torch.int64):
        if dtype in op.supported_dtypes("cpu"):
            yield Case(op, dtype, backward=False)
            if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"):
                yield Case(op, dtype, backward=True)


def quick_cases_of(op: Any) -> list[Case]:
    """Return the cases of CI: a pass backward begins with one forward."""
    cases = list(cases_of(op))
    if op.name in GUARDED:
        return cases
    return [case for case in cases if case.backward][:1] or cases[:1]


# The jiterator compiles CUDA code, which no machine without a GPU does.
OPS = [op for op in op_db if not op.name.startswith("jiterator")]
CHOSEN = [op for number, op in enumerate(OPS) if number % AMOUNT.op_step == 0 or op.name in GUARDED]


def groups(ops: list[Any]) -> list[Any]:
    """Return the ops in groups, one a test."""
    starts = range(0, len(ops), OPS_IN_A_TEST)
    parts = [ops[start : start + OPS_IN_A_TEST] for start in starts]
    return [
        pytest.param(part, id=f"{part[0].formatted_name} to {part[-1].formatted_name}")
        for part in parts
    ]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The samples provoke torch's own warnings; ours stay errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", cudalens.SilentFindingWarning)
        yield


@pytest.mark.parametrize("ops", groups(CHOSEN))
def test_a_check_changes_nothing(ops: list[Any], sim: simulate.Simulation) -> None:
    """No report, no warning, the same bits and random states as without a check."""
    cases = [case for op in ops for case in quick_cases_of(op)]
    assert [line for case in cases for line in complaints(case, QUICK_SAMPLES)] == []
    assert not sim.is_poisoned


@pytest.mark.all
@pytest.mark.parametrize("options", [{}, {"fast": True}], ids=["everything", "fast"])
@pytest.mark.parametrize("ops", groups(OPS))
def test_a_check_changes_nothing_in_any_sample(
    ops: list[Any], options: dict[str, Any], sim: simulate.Simulation
) -> None:
    """The same for all samples, with all parts of a check and with the guards alone."""
    cases = [case for op in ops for case in cases_of(op)]
    assert [line for case in cases for line in complaints(case, None, **options)] == []
    assert not sim.is_poisoned


@pytest.mark.usefixtures("sim")
def test_the_database_reaches_the_guards() -> None:
    """The comparison is worth something: these ops are looked at by a guard, or the list is old."""
    missed = set(GUARDED)
    with cudalens.guard():
        for op in OPS:
            before = PROCESS.checked_ops
            if op.name in missed:
                case = Case(op, torch.float32, backward=op.supports_autograd)
                any(case.attempt(sample) is None for sample in case.samples(4))
            if PROCESS.checked_ops > before:
                missed.discard(op.name)
    assert missed == set()
