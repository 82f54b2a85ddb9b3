"""The assert table of the simulated device, rule by rule, on plain CPU tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cudalens.core._torch import op_of
from cudalens.simulate import Simulation
from cudalens.simulate.asserts import ASSERTS, NOT_SIMULATED, AssertHit, Repair
from tests.cpu_guards import deterministic
from tests.releases import here
from tests.simulate.assert_cases import (
    ADD,
    CASES,
    FORWARD,
    FORWARD_2D,
    POOL,
    POOL_3D,
    REPAIRS,
    SEGMENT_GRADIENT,
    SEGMENTS,
    Case,
    SilentCase,
    floats,
    ints,
    rows,
)

INVENTORY = {
    record["id"]: record
    for record in json.loads(
        (Path(__file__).parents[1] / "data" / "device_asserts.json").read_text()
    )
}


def filled(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return every argument of the schema, the defaults filled in."""
    arguments = op_of(name)._schema.arguments
    return {
        a.name: given.get(a.name, a.default_value)
        for a in arguments
        if a.name in given or a.has_default_value() or not a.is_out
    }


def call(name: str, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Run an op, on copies of what it writes, with output tensors where the schema wants them."""
    op = op_of(name)
    arguments = op._schema.arguments
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    chosen = {
        a.name: given[a.name].clone() if a.name in written else given[a.name]
        for a in arguments
        if a.name in given
    }
    wanted = [a.name for a in arguments if a.is_out]
    if wanted:
        produced = call(functional(name), given)
        chosen.update(zip(wanted, (torch.empty_like(t) for t in produced), strict=True))
    result = op(**chosen)
    return result if isinstance(result, tuple) else () if result is None else (result,)


def functional(name: str) -> str:
    """Name the overload that returns what this `out=` overload writes."""
    packet, _, variant = name.partition(".")
    kept = re.sub(r"(_out|^out|^output|^grad_input)$", "", variant)
    return f"{packet}.{kept}" if kept else packet


CALLS = [
    pytest.param(case, f"aten::{op}", id=f"{case.record}-{op}-{number}")
    for number, case in enumerate(CASES)
    for op in case.ops
]


def outcome(name: str, given: dict[str, Any]) -> Repair | None:
    return ASSERTS[name](filled(name, given))


@pytest.mark.parametrize(("case", "name"), CALLS)
def test_values_at_the_bound_pass_and_one_step_beyond_assert(case: Case, name: str) -> None:
    """One step beyond the bound meets the assertion of the inventory, word for word."""
    assert outcome(name, case.at_bound) is None
    call(name, case.at_bound)
    for change in case.beyond:
        hit = outcome(name, {**case.at_bound, **change})
        printed = {here(line): line for line in INVENTORY[case.record]["stderr_text"]}
        if not any(printed):  # a release before this assertion
            assert isinstance(hit, Repair) and not isinstance(hit, AssertHit)
            continue
        assert isinstance(hit, AssertHit), change
        assert hit.record == case.record
        assert case.expression in printed[hit.text]
        assert case.expression or len(INVENTORY[case.record]["stderr_text"]) == 1


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


def test_every_rule_has_a_schema() -> None:
    for name in ASSERTS:
        schema = op_of(name)._schema
        assert name in (schema.name, f"{schema.name}.{schema.overload_name}")


def test_every_reachable_record_is_simulated_or_listed_with_a_reason() -> None:
    of_sparse_tensors = {"add_dense_sparse", "index_select_sparse"}  # see test_layouts.py
    simulated = {case.record for case in CASES} | of_sparse_tensors
    reachable = {name for name, record in INVENTORY.items() if record["reachable"]}
    assert simulated | set(NOT_SIMULATED) == reachable
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
    for name in INVENTORY[record]["ops"]:
        if name in VALIDATED:
            assert "aten::_validate_compressed_sparse_indices" in tested
        else:
            assert name in ASSERTS


def test_every_tested_overload_is_exercised_by_its_own_rule() -> None:
    exercised = {f"aten::{op}" for case in CASES for op in case.ops}
    silent = {name for name in ASSERTS if name not in exercised}
    assert silent == {f"aten::{op}" for repair in REPAIRS for op in repair.ops} - exercised


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, f"aten::{op}", id=f"{op}-{number}")
        for number, case in enumerate(REPAIRS)
        for op in case.ops
    ],
)
def test_what_cuda_takes_in_silence_is_repaired_without_a_hit(case: SilentCase, name: str) -> None:
    repair = outcome(name, case.given)
    assert isinstance(repair, Repair)
    assert not isinstance(repair, AssertHit)
    for argument, value in case.values.items():
        replaced = repair.repaired[argument]
        assert isinstance(replaced, Tensor)
        assert torch.equal(replaced, value)
    repaired = {**case.given, **repair.repaired}
    assert outcome(name, repaired) is None
    call(name, repaired)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("aten::index.Tensor", {"self": rows(), "indices": [ints(), None]}),
        ("aten::index.Tensor", {"self": rows(), "indices": [torch.tensor([True] * 5)]}),
        ("aten::gather", {"self": rows(), "dim": 0, "index": ints().view(0, 3)}),
        ("aten::embedding", {"weight": rows(0), "indices": ints()}),
        ("aten::nll_loss_forward", {**FORWARD, "self": torch.zeros(0, 4), "target": ints()}),
        ("aten::repeat_interleave.Tensor", {"repeats": ints(), "output_size": 4}),
        ("aten::_convert_indices_from_csr_to_coo", {"crow_indices": ints(), "col_indices": ints()}),
        ("aten::multinomial", {"self": torch.tensor([1.0, 0.0, 0.0]), "num_samples": 2}),
    ],
)
def test_empty_and_exempt_calls_pass(name: str, given: dict[str, Any]) -> None:
    assert outcome(name, given) is None


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("aten::index.Tensor", {"self": rows(), "indices": [ints(9), ints(0, 1, 2), ints(0)]}),
        ("aten::index.Tensor", {"self": rows(), "indices": [torch.ones(4).bool(), ints(9)]}),
        ("aten::index.Tensor", {"self": rows(0), "indices": [ints(9)]}),
        ("aten::index_select", {"self": rows(), "dim": 2, "index": ints(9)}),
        ("aten::index_copy", {"self": rows(0), "dim": 0, "index": ints(2), "source": rows(1)}),
        ("aten::index_add", {**ADD, "self": rows(0), "index": ints(9)}),
        ("aten::index_reduce", {**ADD, "self": rows(0), "index": ints(9), "reduce": "amax"}),
        ("aten::index_select", {"self": rows(), "dim": 0, "index": ints(9).view(1, 1)}),
        ("aten::embedding", {"weight": rows(), "indices": torch.tensor([9.0])}),
        ("aten::embedding", {"weight": torch.ones(3), "indices": ints(9)}),
        ("aten::gather", {"self": rows(), "dim": 2, "index": ints(9).view(1, 1)}),
        ("aten::nll_loss_forward", {**FORWARD, "target": ints(9)}),
        ("aten::nll_loss_forward", {**FORWARD, "target": torch.tensor([9.0, 0.0, 0.0])}),
        ("aten::nll_loss2d_forward", {**FORWARD_2D, "target": ints(9).view(1, 1, 1)}),
        ("aten::multinomial", {"self": torch.tensor([-1.0]), "num_samples": 2}),
        ("aten::multinomial", {"self": torch.tensor([-1.0]), "num_samples": 0}),
        ("aten::take", {"self": torch.ones(0), "index": ints(9)}),
        ("aten::repeat_interleave.Tensor", {"repeats": ints(1, -1)}),
        ("aten::segment_reduce", {**SEGMENTS, "unsafe": False, "lengths": ints(-1, 7)}),
        ("aten::masked_scatter_", {"self": rows(), "mask": torch.ones(4).bool(), "source": rows()}),
        ("aten::nll_loss2d_forward", {**FORWARD_2D, "target": floats(9.0).view(1, 1, 1)}),
        ("aten::binary_cross_entropy", {"self": ints(9), "target": floats(9.0)}),
        ("aten::multinomial", {"self": ints(-1), "num_samples": 1}),
        ("aten::segment_reduce", {**SEGMENTS, "lengths": floats(9.0)}),
        ("aten::_segment_reduce_backward", {**SEGMENT_GRADIENT, "offsets": floats(0.0, 9.0)}),
        ("aten::linalg_lu_solve", {"B": rows(2, 1), "LU": torch.eye(2), "pivots": ints(9, 9)}),
        (
            "aten::_convert_indices_from_csr_to_coo",
            {"crow_indices": floats(0.0, 9.0), "col_indices": floats(0.0)},
        ),
        (
            "aten::_jagged_to_padded_dense_forward",
            {"values": rows(3, 1), "offsets": [ints(0, 9), ints(0, 1)], "max_lengths": [2, 2]},
        ),
    ],
)
def test_host_errors_are_left_to_torch(name: str, given: dict[str, Any]) -> None:
    assert outcome(name, given) is None
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        call(name, given)


PUT = {"self": rows(), "indices": [ints(0, 5)], "values": torch.ones(2, 3)}
FILLED = {"self": rows(), "dim": 0, "index": ints(9).view(1, 1), "src": rows(1, 1), "reduce": "sum"}
PLACES = {"self": torch.zeros(3), "dim": 0, "index": ints(0, -1), "src": torch.ones(2)}
SUM, MAXIMUM = {**PLACES, "reduce": "sum"}, {**PLACES, "reduce": "amax"}
REDUCE = "aten::scatter_reduce.two"


@pytest.mark.parametrize(
    ("is_deterministic", "name", "given", "wanted"),
    [
        # In deterministic mode index_put_ sorts, and writes rows and sums: negatives wrap.
        (True, "aten::index_put_", PUT, "index_put_sort"),
        (True, "aten::index_add_", {**ADD, "index": ints(0, -1)}, ints(0, 4)),
        (True, "aten::index_copy_", {**ADD, "index": ints(0, -1)}, ints(0, 4)),
        (True, "aten::index_add_", {**ADD, "index": ints(0, -6)}, "index_put_sort"),
        (True, "aten::index_copy_", {**ADD, "index": ints(0, -6)}, "index_put_sort"),
        (True, REDUCE, SUM, ints(0, 2)),
        (True, REDUCE, {**SUM, "index": ints(0, -4)}, "index_put_sort"),
        (True, REDUCE, MAXIMUM, "gather_scatter"),
        (
            True,
            "aten::scatter.src",
            {**PLACES, "index": ints(3), "src": torch.ones(1)},
            "index_put",
        ),
        (False, REDUCE, SUM, "gather_scatter"),
        (False, REDUCE, MAXIMUM, "gather_scatter"),
        # Places that are filled first assert there.
        (False, REDUCE, {**FILLED, "include_self": True}, "gather_scatter"),
        (False, REDUCE, {**FILLED, "include_self": False}, "scatter_value"),
    ],
)
def test_the_mode_and_the_reduction_pick_the_kernel(
    is_deterministic: bool, name: str, given: dict[str, Any], wanted: str | Tensor
) -> None:
    """Which assertion is met, or which index is taken in silence."""
    with deterministic() if is_deterministic else nullcontext():
        found = outcome(name, given)
    assert found is not None and isinstance(found, AssertHit) == isinstance(wanted, str)
    if isinstance(found, AssertHit):
        assert found.record == wanted
    else:
        assert torch.equal(found.repaired["index"], wanted)


def test_padding_idx_and_ignore_index_are_no_exemption_from_range() -> None:
    """padding_idx is range-checked like any index; ignore_index may itself be out of range."""
    padded = {"weight": rows(), "indices": ints(5), "padding_idx": 5}
    assert isinstance(outcome("aten::embedding", padded), AssertHit)
    void = {**FORWARD, "target": ints(255, 0, 3), "ignore_index": 255}
    assert outcome("aten::nll_loss_forward", void) is None


ROW_OF_THREE = ints(2, 0, 1).view(1, 3)


@pytest.mark.parametrize(
    ("name", "given", "length"),
    [
        ("embedding", {"weight": rows(0), "indices": ints(2)}, 1),
        ("index_select", {"self": rows(0), "dim": 0, "index": ints(2)}, 1),
        ("gather", {"self": rows(0), "dim": 0, "index": ROW_OF_THREE}, 1),
        ("scatter.value", {"self": rows(0), "dim": 0, "index": ROW_OF_THREE, "value": 1.0}, 0),
        ("scatter_add", {"self": rows(0), "dim": 0, "index": ROW_OF_THREE, "src": rows(1)}, 0),
        ("index_add", {"self": rows(0), "dim": 0, "index": ints(2), "source": rows(1)}, 0),
    ],
)
def test_a_table_without_rows_keeps_the_result_shape(
    name: str, given: dict[str, Any], length: int
) -> None:
    """It asserts; a look-up still has a row for each index, a write leaves no row."""
    hit = outcome(f"aten::{name}", given)
    assert isinstance(hit, AssertHit)
    (result,) = call(f"aten::{name}", {**given, **hit.repaired})
    assert result.shape == (length, 3)


@pytest.mark.parametrize("low", [-1, -2])
@pytest.mark.parametrize("rank", [2, 3])
def test_only_windows_of_padding_have_negative_positions(rank: int, low: int) -> None:
    """-1 is dropped by the max pools; the adaptive ones of the CPU would write before the plane."""
    given = {2: POOL, 3: POOL_3D}[rank]
    given = {**given, "indices": torch.full_like(given["indices"], low)}
    pooled = outcome(f"aten::max_pool{rank}d_with_indices_backward", given)
    adaptive = outcome(f"aten::adaptive_max_pool{rank}d_backward", given)
    assert (pooled is None) == (low == -1)
    assert adaptive is not None and adaptive.repaired["indices"].flatten().tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_targets_without_a_class_are_repaired_into_ignored_ones(dtype: torch.dtype) -> None:
    """8 bits hold no -100: what takes the place of a target is ignored whatever its dtype."""
    given = {**FORWARD, "self": torch.zeros(3, 0), "target": ints(0, 7, 1).to(dtype)}
    hit = outcome("aten::nll_loss_forward", given)
    assert isinstance(hit, AssertHit)
    assert call("aten::nll_loss_forward", {**given, **hit.repaired})[1].item() == 0


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
        if shapes(change.values()) == shapes(map(at_bound.get, change)):
            assert shapes(results) == expected
        # Silent where the release has no such assertion yet.
        assert sim.pending == getattr(hit, "text", None)
        sim.reset()


def test_silent_cases_run_on_the_simulated_device(sim: Simulation) -> None:
    for case in REPAIRS:
        for op in case.ops:
            call(f"aten::{op}", {key: moved(value) for key, value in case.given.items()})
            torch.cuda.synchronize()
