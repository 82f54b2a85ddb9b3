"""Facts of an op's schema, the check of its devices, and the dtype of a number in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, ones, tensor

from cudalens.simulate import Simulation
from cudalens.simulate.op_schema import (
    DeviceCheck,
    check_devices,
    has_mixed_devices,
    method_name,
    number_tensor,
    schema_of,
    yaml_facts,
)

aten = torch.ops.aten


def test_positions_of_the_arguments_by_what_they_are() -> None:
    facts = schema_of(aten.add.out)
    assert facts.names == ("self", "other", "alpha", "out")
    assert (facts.positional, facts.tensors, facts.lists) == (2, (0, 1, 3), ())
    assert (facts.written, facts.outs, facts.aliases) == ((3,), (3,), (3,))
    assert dict(facts.defaults)["alpha"] == 1
    assert (facts.is_view, facts.generator) == (False, None)


def test_an_op_in_place_gives_back_what_it_writes() -> None:
    facts = schema_of(aten.add_.Tensor)
    assert (facts.written, facts.outs, facts.aliases) == ((0,), (), (0,))
    assert schema_of(aten.add.Tensor).aliases == (None,)
    assert schema_of(aten.add.Tensor).written == ()
    # The second of two results is that of the second argument which is written.
    assert schema_of(aten.max.dim_max).aliases == (3, 4)


def test_views_lists_and_generators() -> None:
    view = schema_of(aten.view.default)
    assert view.is_view and view.aliases == (None,) and view.written == ()
    assert schema_of(aten.cat.default).lists == (0,)
    assert schema_of(aten.cat.default).tensors == ()
    assert schema_of(aten.index.Tensor).lists == (1,)
    assert schema_of(aten.bernoulli.default).generator == 1


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.new_zeros.default, True),
        (aten.add.Tensor, False),
        (aten.index_select.default, False),
        (aten.linear.default, False),
    ],
)
def test_one_kernel_of_other_ops_for_every_device(op: Any, expected: bool) -> None:
    assert schema_of(op).is_composite is expected


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.mm.default, DeviceCheck.WRAPPER),
        (aten.add.Tensor, DeviceCheck.ITERATOR),
        (aten._foreach_add.List, DeviceCheck.NONE),
        (torch.ops.prims.sin.default, DeviceCheck.NONE),
    ],
)
def test_the_check_of_devices_in_the_compiled_wrapper(op: Any, expected: DeviceCheck) -> None:
    assert schema_of(op).check is expected


def test_what_the_yaml_file_says() -> None:
    facts = yaml_facts()
    assert {"aten::mm", "aten::mm.out", "aten::add_.Tensor"} <= facts.structured
    assert not {"aten::index_select", "aten::bernoulli"} & facts.structured
    assert "aten::index_select" in facts.has_cuda_kernel
    assert "aten::linear" not in facts.has_cuda_kernel


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.mm.default, "wrapper_CUDA_mm"),
        (aten.mm.out, "wrapper_CUDA_mm_out_out"),
        (aten.addmm_.default, "wrapper_CUDA_addmm_"),
        (aten.addmm.default, "wrapper_CUDA_addmm"),
        (aten.index_select.default, "wrapper_CUDA__index_select"),
        (aten.nll_loss_forward.default, "wrapper_CUDA_nll_loss_forward"),
        (aten.index_select.out, "wrapper_CUDA_out_index_select_out"),
    ],
)
def test_the_name_in_cuda_s_message(op: Any, expected: str) -> None:
    assert method_name(schema_of(op)) == expected


# --- devices -------------------------------------------------------------------------------------


def refused(op: Any, *values: Any) -> str | None:
    """Return what a call is refused with, for the devices of its tensors."""
    try:
        check_devices(schema_of(op), values)
    except RuntimeError as error:
        return str(error)
    return None


TWO = "Expected all tensors to be on the same device, but found at least two devices"


def test_tensors_of_one_device_pass(sim: Simulation) -> None:
    there = ones(2, 2, device="cuda")
    assert refused(aten.mm.default, there, there) is None
    assert not has_mixed_devices(schema_of(aten.mm.default), (there, there))
    assert has_mixed_devices(schema_of(aten.mm.default), (there, ones(2, 2)))


def test_a_wrapper_names_the_first_tensor_that_differs(sim: Simulation) -> None:
    here, there = ones(2, 2), ones(2, 2, device="cuda")
    said = refused(aten.addmm.default, there, there, here, 1, 1)
    assert said is not None and said.startswith(
        "Expected all tensors to be on the same device, but got mat2 is on cpu, different from "
        "other tensors on cuda:0"
    )
    # The result that is given comes first, wherever it stands.
    said = refused(aten.mm.out, there, there, here)
    assert said is not None and "got self is on cuda:0, different from other tensors on cpu" in said


def test_numbers_without_dimensions_ride_along_unless_they_are_written(sim: Simulation) -> None:
    here, there = tensor(1.0), ones(2, device="cuda")
    assert refused(aten.add.Tensor, there, here, 1) is None
    assert TWO in str(refused(aten.add.Tensor, there, here.view(1), 1))
    assert TWO in str(refused(aten.add_.Tensor, here, there, 1))
    assert TWO in str(refused(aten.binary_cross_entropy.default, there, here, None, 1))


def test_lists_of_tensors_are_not_compared_by_every_wrapper(sim: Simulation) -> None:
    here, there = [ones(2)], [ones(2, device="cuda")]
    assert refused(aten._foreach_add.List, there, here, 1) is None
    assert "Expected all tensors to be on the same device" in str(
        refused(aten.cat.default, there + here, 0)
    )


def test_indices_may_be_on_the_host_but_not_on_the_device_alone(sim: Simulation) -> None:
    here, there = ones(2), ones(2, device="cuda")
    index = tensor([0])
    assert refused(aten.index.Tensor, there, [index]) is None
    said = refused(aten.index.Tensor, here, [None, index.cuda()])
    assert said is not None and said.startswith("indices should be either on cpu or on the same")
    put = aten._index_put_impl_.default
    assert refused(put, there, [index], tensor(1.0)) is None
    assert TWO in str(refused(put, there, [index], ones(1)))
    assert refused(put, there, [index], ones(1, device="cuda")) is None


def test_a_mask_is_where_the_masked_tensor_is(sim: Simulation) -> None:
    there = ones(2, device="cuda")
    fill = aten.masked_fill_.Scalar
    assert refused(fill, there, there > 0, 1.0) is None
    said = refused(fill, there, ones(2) > 0, 1.0)
    assert said is not None and said.endswith("but got mask on cpu and self on cuda:0")


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "other", "dtype"),
    [
        (2, ones(2).half(), torch.float16),
        (2.0, ones(2).half(), torch.float64),
        (2j, ones(2, dtype=torch.complex64), torch.complex128),
        (2.0, tensor(1), torch.float32),
        (2.0, tensor([1]), torch.float32),
        (2, tensor(1.0).half(), torch.float16),
        (2.0, tensor(1.0).half(), torch.float16),
        (True, ones(2), torch.bool),
        (2.5, None, torch.float32),
        (2, None, torch.int64),
    ],
)
def test_a_number_leaves_the_promotion_as_it_is(
    value: complex, other: Tensor | None, dtype: torch.dtype
) -> None:
    made = number_tensor(value, schema_of(aten.add.Tensor), (other, value, 1))
    assert (made.dtype, made.shape, made.item()) == (dtype, (), value)
    if other is not None:
        assert torch.result_type(other, made) == torch.result_type(other, value)


def test_an_operand_with_dimensions_decides_and_a_mask_does_not() -> None:
    facts = schema_of(aten.where.self)
    mask = tensor([True])
    assert number_tensor(2, facts, (mask, tensor(1.0).half(), 2)).dtype == torch.float16
    facts = schema_of(aten.addcmul.default)
    host = (tensor(1.0).double(), ones(2).half(), 2, 1)
    assert number_tensor(2, facts, host).dtype == torch.float16
