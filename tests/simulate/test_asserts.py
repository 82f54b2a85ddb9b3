"""The assert table of the simulated device, rule by rule, on plain CPU tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, zeros
from torch.utils._pytree import tree_leaves

from cudalens.core._torch import op_of
from cudalens.guards import GUARDS
from cudalens.simulate import Simulation
from cudalens.simulate.asserts import ASSERTS, NOT_SIMULATED, AssertHit, Repair
from tests.calls import (
    CASES,
    MEAN,
    POOL,
    POOL_3D,
    REPAIRS,
    UNREAD,
    Case,
    SilentCase,
    ints,
    one,
    rows,
)
from tests.inventory import REACHABLE, RECORDS
from tests.releases import here
from tests.verdicts import call, foretold, outcome

CALLS = [
    pytest.param(case, f"aten::{op}", id=f"{case.record}-{op}-{number}")
    for number, case in enumerate(CASES)
    for op in case.ops
]


@pytest.mark.parametrize(("case", "name"), CALLS)
def test_values_at_the_bound_pass_and_one_step_beyond_assert(case: Case, name: str) -> None:
    """One step beyond the bound meets the assertion of the inventory, word for word.

    The guard of the op foretells the same line.
    """
    assert foretold(name, case.at_bound)[0] is None
    call(name, case.at_bound)
    for change in case.beyond:
        hit, found = foretold(name, {**case.at_bound, **change})
        assert found is not None
        printed = {here(line): line for line in RECORDS[case.record]["stderr_text"]}
        if not any(printed):  # a release before this assertion
            assert isinstance(hit, Repair) and not isinstance(hit, AssertHit)
            continue
        assert isinstance(hit, AssertHit), change
        assert hit.record == case.record
        assert case.expression in printed[hit.text]
        assert case.expression or len(RECORDS[case.record]["stderr_text"]) == 1


@pytest.mark.parametrize(("case", "name"), CALLS)
def test_repaired_arguments_run_on_the_cpu(case: Case, name: str) -> None:
    """The CPU kernel returns with copies in place of the user's tensors, which stay as they were.

    The rule has nothing more to say of them.
    """
    for change in case.beyond:
        given = {**case.at_bound, **change}
        before = {k: v.clone() for k, v in given.items() if isinstance(v, Tensor)}
        hit = outcome(name, given)
        assert hit is not None
        for argument, value in before.items():
            assert torch.equal(given[argument].nan_to_num(), value.nan_to_num())
        repaired = {**given, **hit.repaired}
        assert outcome(name, repaired) is None
        call(name, repaired)
        for argument, value in hit.repaired.items():
            if isinstance(value, Tensor):
                assert value.dtype == given[argument].dtype


SILENT = [*REPAIRS, *UNREAD]


def test_every_rule_has_a_schema() -> None:
    for name in ASSERTS:
        schema = op_of(name)._schema
        assert name in (schema.name, f"{schema.name}.{schema.overload_name}")


def test_every_reachable_record_is_simulated_or_listed_with_a_reason() -> None:
    of_sparse_tensors = {"add_dense_sparse", "index_select_sparse"}  # see test_layouts.py
    simulated = {case.record for case in CASES} | of_sparse_tensors
    assert simulated | set(NOT_SIMULATED) == set(REACHABLE)
    assert not simulated & set(NOT_SIMULATED)
    assert all(NOT_SIMULATED.values())


# These run `_validate_compressed_sparse_indices`, which carries the rule; they never reach a device
# kernel of their own.
VALIDATED = {
    "aten::_validate_sparse_compressed_tensor_args",
    "aten::_validate_sparse_csr_tensor_args",
    "aten::sparse_compressed_tensor.comp_plain_value",
    "aten::sparse_compressed_tensor.comp_plain_value_size",
}


@pytest.mark.parametrize("record", sorted({case.record for case in CASES}))
def test_every_overload_of_a_simulated_record_has_a_rule(record: str) -> None:
    tested = {f"aten::{op}" for case in CASES if case.record == record for op in case.ops}
    for name in RECORDS[record]["ops"]:
        if name in VALIDATED:
            assert "aten::_validate_compressed_sparse_indices" in tested
        else:
            assert name in ASSERTS


def test_every_tested_overload_is_exercised_by_its_own_rule() -> None:
    exercised = {f"aten::{op}" for case in CASES for op in case.ops}
    silent = {name for name in ASSERTS if name not in exercised}
    assert silent == {f"aten::{op}" for repair in SILENT for op in repair.ops} - exercised


@pytest.mark.parametrize(
    ("case", "name", "is_found"),
    [
        pytest.param(case, f"aten::{op}", is_found, id=f"{op}-{number}")
        for is_found, cases in ((True, REPAIRS), (False, UNREAD))
        for number, case in enumerate(cases)
        for op in case.ops
    ],
)
def test_what_cuda_takes_in_silence_is_repaired_without_a_hit(
    case: SilentCase, name: str, is_found: bool
) -> None:
    """What a kernel reads is a finding of the op's guard; a max pool of windows has none."""
    repair, found = foretold(name, case.given)
    assert (found is not None) == (is_found and op_of(name) in GUARDS)
    assert isinstance(repair, Repair)
    assert not isinstance(repair, AssertHit)
    for argument, value in case.values.items():
        replaced = repair.repaired[argument]
        assert isinstance(replaced, Tensor)
        assert torch.equal(replaced, value)
    repaired = {**case.given, **repair.repaired}
    assert outcome(name, repaired) is None
    call(name, repaired)


def test_padding_idx_and_ignore_index_are_no_exemption_from_range() -> None:
    """padding_idx is range-checked like any index; ignore_index may itself be out of range."""
    assert isinstance(outcome(*one("embedding", rows(), ints(5), 5)), AssertHit)
    void = one("nll_loss_forward", zeros(3, 4), ints(255, 0, 3), None, 1, 255)
    assert outcome(*void) is None


ROW_OF_THREE = ints(2, 0, 1).view(1, 3)


@pytest.mark.parametrize(
    ("name", "args", "length"),
    [
        ("embedding", (rows(0), ints(2)), 1),
        ("index_select", (rows(0), 0, ints(2)), 1),
        ("gather", (rows(0), 0, ROW_OF_THREE), 1),
        ("scatter.value", (rows(0), 0, ROW_OF_THREE, 1.0), 0),
        ("scatter_add", (rows(0), 0, ROW_OF_THREE, rows(1)), 0),
        ("index_add", (rows(0), 0, ints(2), rows(1)), 0),
    ],
)
def test_a_table_without_rows_keeps_the_result_shape(
    name: str, args: tuple[Any, ...], length: int
) -> None:
    """It asserts; a look-up still has a row for each index, a write leaves no row."""
    op, given = one(name, *args)
    hit = outcome(op, given)
    assert isinstance(hit, AssertHit)
    (result,) = call(op, {**given, **hit.repaired})
    assert result.shape == (length, 3)


@pytest.mark.parametrize("low", [-1, -2])
@pytest.mark.parametrize("rank", [2, 3])
def test_only_windows_of_padding_have_negative_positions(rank: int, low: int) -> None:
    """-1 is dropped by the max pools; the adaptive ones of the CPU would write before the plane."""
    pool, shape = {2: (POOL, (1, 1, 1, 1)), 3: (POOL_3D, (1, 1, 1, 1, 1))}[rank]
    op, given = one(f"max_pool{rank}d_with_indices_backward", *pool, torch.full(shape, low))
    pooled = outcome(op, given)
    adaptive = outcome(f"aten::adaptive_max_pool{rank}d_backward", given)
    assert (pooled is None) == (low == -1)
    assert adaptive is not None and adaptive.repaired["indices"].flatten().tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_targets_without_a_class_are_repaired_into_ignored_ones(dtype: torch.dtype) -> None:
    """8 bits hold no -100: what takes the place of a target is ignored whatever its dtype."""
    op, given = one("nll_loss_forward", zeros(3, 0), ints(0, 7, 1).to(dtype), *MEAN)
    hit = outcome(op, given)
    assert isinstance(hit, AssertHit)
    assert call(op, {**given, **hit.repaired})[1].item() == 0


def moved(value: Any) -> Any:
    """Copy tensors, alone or in lists, to the device; expanded ones stay expanded."""
    if isinstance(value, list):
        return [moved(item) for item in value]
    if not isinstance(value, Tensor):
        return value
    if value.dim() > 1 and value.stride(-1) == 0:
        return value[..., :1].to("cuda").expand(value.shape)
    return value.to("cuda")


def shapes(values: Iterable[Any]) -> list[Any]:
    """Return the shapes of some values, alone or in lists, and what has none as it is."""
    return [getattr(value, "shape", value) for value in tree_leaves(list(values))]


@pytest.mark.parametrize(("case", "name"), CALLS)
def test_every_case_asserts_on_the_simulated_device(case: Case, name: str, sim: Simulation) -> None:
    """On the device every case launches, leaves the right assertion behind and raises nothing.

    The results have the shapes that good values of the same shapes give.
    """
    at_bound = {key: moved(value) for key, value in case.at_bound.items()}
    expected = shapes(call(name, at_bound))
    assert sim.pending is None
    for change in case.beyond:
        hit = outcome(name, {**case.at_bound, **change})
        results = call(name, {**at_bound, **{k: moved(v) for k, v in change.items()}})
        assert all(value.is_cuda for value in tree_leaves(results) if isinstance(value, Tensor))
        if shapes(change.values()) == shapes(map(at_bound.get, change)):
            assert shapes(results) == expected
        # Silent where the release has no such assertion yet.
        assert sim.pending == getattr(hit, "text", None)
        sim.reset()


def test_silent_cases_run_on_the_simulated_device(sim: Simulation) -> None:
    for case in SILENT:
        for op in case.ops:
            call(f"aten::{op}", {key: moved(value) for key, value in case.given.items()})
            torch.cuda.synchronize()
