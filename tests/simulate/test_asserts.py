"""Asserts of the rehearsal device: calls one step beyond what CUDA's kernels accept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, zeros
from torch.utils._pytree import tree_leaves

from cudalens.guards import GUARDS
from cudalens.simulate import Simulation
from cudalens.simulate.asserts import NOT_SIMULATED, look
from tests.calls import CASES, MEAN, UNCHECKED, UNREAD, Case, SilentCase, ints, one, op_of, rows
from tests.inventory import REACHABLE, RECORDS, UNGUARDABLE
from tests.releases import here
from tests.verdicts import call, finding, on_device, without_thread

CALLS = [
    pytest.param(case, f"aten::{op}", id=f"{case.record}-{op}-{number}")
    for number, case in enumerate(CASES)
    for op in case.ops
]


def printed(case: Case) -> list[str]:
    """Return the lines that the kernels of this release print for a case's assertion."""
    lines = RECORDS[case.record]["stderr_text"]
    expected = [here(line) for line in lines if here(line) and case.expression in line]
    assert case.expression or len(lines) == 1
    return expected


@pytest.mark.parametrize(("case", "name"), CALLS)
def test_guards_pass_the_bound_and_foretell_the_line_one_step_beyond(case: Case, name: str) -> None:
    """The line is that of the inventory, word for word."""
    found = finding(name, case.at_bound)
    assert found is None or found.is_silent
    call(name, case.at_bound)
    for change in case.beyond:
        found = finding(name, {**case.at_bound, **change})
        assert found is not None
        lines = printed(case)
        if lines:  # else a release before this assertion
            assert without_thread(found.device_text) in map(without_thread, lines), change


def shapes(values: Iterable[Any]) -> list[Any]:
    """Return the shapes of some values, alone or in lists, and what has none as it is."""
    return [getattr(value, "shape", value) for value in tree_leaves(list(values))]


@pytest.mark.parametrize(("case", "name"), CALLS)
def test_a_call_beyond_the_bound_asserts_late(case: Case, name: str, sim: Simulation) -> None:
    """It launches, leaves the right line behind and raises nothing; arguments stay as they were.

    The results have the shapes that good values of the same shapes give.
    """
    at_bound = {key: on_device(value) for key, value in case.at_bound.items()}
    expected = shapes(call(name, at_bound))
    assert sim.pending is None
    for change in case.beyond:
        moved = {key: on_device(value) for key, value in change.items()}
        if any(isinstance(value, Tensor) and not value.numel() for value in change.values()):
            continue  # a dimension without elements has no harmless index: the CPU refuses the call
        results = call(name, {**at_bound, **moved})
        assert all(value.is_cuda for value in tree_leaves(results) if isinstance(value, Tensor))
        if shapes(change.values()) == shapes(map(at_bound.get, change)):
            assert shapes(results) == expected
        lines = printed(case)
        assert without_thread(sim.pending) in (map(without_thread, lines) if lines else [""])
        sim.reset()
        pairs = zip(tree_leaves(moved), tree_leaves(change), strict=True)
        for after, before in pairs:
            if isinstance(before, Tensor):
                assert torch.equal(after.cpu().nan_to_num(), before.nan_to_num())


def test_every_reachable_record_is_simulated_or_listed_with_a_reason() -> None:
    of_sparse_tensors = {"add_dense_sparse", "index_select_sparse"}  # see test_layouts.py
    simulated = {case.record for case in CASES} | of_sparse_tensors
    assert simulated | set(NOT_SIMULATED) | UNGUARDABLE == set(REACHABLE)
    assert not simulated & set(NOT_SIMULATED)
    assert all(NOT_SIMULATED.values())


@pytest.mark.parametrize(
    ("case", "name", "is_found"),
    [
        pytest.param(case, f"aten::{op}", is_found, id=f"{op}-{number}")
        for is_found, cases in ((True, UNCHECKED), (False, UNREAD))
        for number, case in enumerate(cases)
        for op in case.ops
    ],
)
def test_guards_find_what_a_kernel_reads_unchecked(
    case: SilentCase, name: str, is_found: bool
) -> None:
    """A value that no kernel reads is no finding; neither kind is said to assert."""
    found = finding(name, case.given)
    assert (found is not None) == (is_found and op_of(name) in GUARDS)
    assert found is None or found.device_text is None


def test_what_cuda_takes_in_silence_runs_in_silence(sim: Simulation) -> None:
    for case in UNCHECKED:
        for op in case.ops:
            call(f"aten::{op}", {key: on_device(value) for key, value in case.given.items()})
            torch.cuda.synchronize()


def test_bad_values_give_way_to_harmless_ones_in_each_argument() -> None:
    name, given = one("index.Tensor", zeros(2, 2, 3), [ints(9), None, ints(-9)])
    first, kept, last = look(op_of(name), given)[1]["indices"]
    assert (first.tolist(), kept, last.tolist()) == ([1], None, [-3])
    starts, places = ints(0, 2, 1).view(1, 3), ints(0, 5).view(1, 2)
    given = one("_validate_compressed_sparse_indices", True, starts, places, 2, 2, 2)[1]
    harmless = look(torch.ops.aten._validate_compressed_sparse_indices.default, given)[1]
    assert shapes(harmless.values()) == [(1, 3), (1, 0), 0]


def test_padding_idx_and_ignore_index_are_no_exemption_from_range() -> None:
    """padding_idx is range-checked like any index; ignore_index may itself be out of range."""
    assert finding(*one("embedding", rows(), ints(5), 5)) is not None
    assert finding(*one("nll_loss_forward", zeros(3, 4), ints(255, 0, 3), None, 1, 255)) is None
    assert finding(*one("nll_loss_forward", zeros(3, 4), ints(7, 0, 3), *MEAN)) is not None
