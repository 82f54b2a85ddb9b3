"""The assert table of the simulated device, rule by rule, on plain CPU tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cudalens.simulate import Simulation
from cudalens.simulate.asserts import ASSERTS, NOT_SIMULATED, AssertHit, Repair
from tests.releases import here

INVENTORY = {
    record["id"]: record
    for record in json.loads(
        (Path(__file__).parents[1] / "data" / "device_asserts.json").read_text()
    )
}
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call at the bound, the values one step beyond, and the assertion they meet."""

    record: str
    ops: str
    at_bound: dict[str, Any]
    beyond: tuple[dict[str, Any], ...]
    expression: str = ""


def ints(*values: int, shape: tuple[int, ...] | None = None) -> Tensor:
    index = torch.tensor(values, dtype=torch.int64)
    return index if shape is None else index.expand(shape)


def rows(count: int = 5, width: int = 3) -> Tensor:
    return torch.arange(float(count * width)).reshape(count, width)


def overload(name: str) -> Any:
    packet, _, variant = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), variant or "default")


def filled(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return every argument of the schema, the defaults filled in."""
    arguments = overload(name)._schema.arguments
    return {
        a.name: given.get(a.name, a.default_value)
        for a in arguments
        if a.name in given or a.has_default_value() or not a.is_out
    }


def call(name: str, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Run an op, on copies of what it writes, with output tensors where the schema wants them."""
    op = overload(name)
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


ADVANCED = '-sizes[i] <= index && index < sizes[i] && "index out of bounds"'
TARGETS = {
    "target": ints(0, -100, 3),
    "weight": None,
    "reduction": 1,
    "ignore_index": -100,
}
FORWARD = {"self": torch.zeros(3, 4), **TARGETS}
BACKWARD = {**FORWARD, "total_weight": torch.tensor(2.0)}
FORWARD_2D = {**FORWARD, "self": torch.zeros(1, 4, 1, 3), "target": ints(0, -100, 3).view(1, 1, 3)}
BACKWARD_2D = {
    **FORWARD_2D,
    "total_weight": torch.tensor(2.0),
    "grad_output": torch.tensor(1.0),
}
BAD_TARGETS = ({"target": ints(0, 4, 3)}, {"target": ints(0, -1, 3)})
BAD_TARGETS_2D = (
    {"target": ints(0, 4, 3).view(1, 1, 3)},
    {"target": ints(0, -1, 3).view(1, 1, 3)},
)
ADD = {"self": rows(), "dim": 0, "index": ints(0, 4), "source": torch.ones(2, 3)}
MANY = {**ADD, "index": ints(*[0, 4] * 9), "source": torch.ones(18, 3)}
BAG = {"weight": rows(5, 2), "indices": ints(0, 4, 1), "offsets": ints(0, 3)}
SEGMENTS = {"data": rows(6, 2), "reduce": "sum", "axis": 0, "unsafe": True}
COMPRESSED = {"is_crow": True, "cdim": 2, "dim": 3, "nnz": 3}
FRACTIONAL = {
    "grad_output": torch.ones(1, 1, 2, 2),
    "self": torch.ones(1, 1, 4, 4),
    "kernel_size": [2, 2],
    "output_size": [2, 2],
    "indices": ints(0, 1, 14, 15).view(1, 1, 2, 2),
}
FRACTIONAL_3D = {
    "grad_output": torch.ones(1, 1, 1, 2, 2),
    "self": torch.ones(1, 1, 2, 4, 4),
    "kernel_size": [2, 2, 2],
    "output_size": [1, 2, 2],
    "indices": ints(0, 1, 30, 31).view(1, 1, 1, 2, 2),
}

CASES = [
    Case(
        record="index_get",
        ops="index.Tensor index.Tensor_out _unsafe_index.Tensor",
        at_bound={"self": rows(), "indices": [None, ints(-3, 2)]},
        beyond=({"indices": [None, ints(0, 3)]}, {"indices": [None, ints(-4, 0)]}),
        expression=ADVANCED,
    ),
    Case(
        record="gather_rows_fast",
        ops="index.Tensor",
        at_bound={"self": rows(5, 4), "indices": [ints(-5, 4)]},
        beyond=({"indices": [ints(5)]}, {"indices": [ints(-6)]}),
        expression="ind >=0 && ind < ind_dim_size",
    ),
    Case(
        record="gather_rows_fast",
        ops="gather gather.out",
        at_bound={"self": rows(5, 4), "dim": 0, "index": ints(4, 0).view(2, 1).expand(2, 4)},
        beyond=({"index": ints(5, 0).view(2, 1).expand(2, 4)},),
        expression="ind >=0 && ind < ind_dim_size",
    ),
    Case(
        record="gather_rows_fast",
        ops="embedding embedding.out",
        at_bound={"weight": rows(5, 4), "indices": ints(*[4, 0] * 9)},
        beyond=({"indices": ints(*[5, 0] * 9)}, {"indices": ints(*[-1, 0] * 9)}),
        expression="ind >=0 && ind < ind_dim_size",
    ),
    Case(
        record="index_put",
        ops="index_put index_put_ index_put.out _unsafe_index_put _index_put_impl"
        " _index_put_impl.out _index_put_impl_",
        at_bound={"self": rows(), "indices": [ints(-5, 4)], "values": torch.tensor(1.0)},
        beyond=({"indices": [ints(5)]}, {"indices": [ints(-6)]}),
        expression=ADVANCED,
    ),
    Case(
        record="index_put_sort",
        ops="index_put index_put_ index_put.out _unsafe_index_put _index_put_impl"
        " _index_put_impl.out _index_put_impl_",
        at_bound={
            "self": rows(),
            "indices": [ints(-5, 4)],
            "values": torch.tensor(1.0),
            "accumulate": True,
        },
        beyond=({"indices": [ints(5)]}, {"indices": [ints(-6)]}),
        expression="Assertion `` failed",
    ),
    Case(
        record="index_fill",
        ops="index_fill.int_Scalar index_fill.int_Scalar_out index_fill_.int_Scalar",
        at_bound={"self": rows(), "dim": 0, "index": ints(-5, 4), "value": 1.0},
        beyond=({"index": ints(5)}, {"index": ints(-6)}),
        expression="idx >= -self_dim_size && idx < self_dim_size",
    ),
    Case(
        record="index_fill",
        ops="index_fill.int_Tensor index_fill.int_Tensor_out index_fill_.int_Tensor",
        at_bound={"self": rows(), "dim": 1, "index": ints(-3, 2), "value": torch.tensor(1.0)},
        beyond=({"index": ints(3)}, {"index": ints(-4)}),
        expression="idx >= -self_dim_size && idx < self_dim_size",
    ),
    Case(
        record="index_fill",
        ops="index_reduce index_reduce.out index_reduce_",
        at_bound={**ADD, "reduce": "amax", "include_self": False},
        beyond=({"index": ints(0, 5)}, {"index": ints(-6, 0)}),
        expression="idx >= -self_dim_size && idx < self_dim_size",
    ),
    Case(
        record="index_copy",
        ops="index_copy index_copy.out index_copy_",
        at_bound=ADD,
        beyond=({"index": ints(0, 5)}, {"index": ints(-1, 0)}),
        expression="idx >= 0 && idx < self_dim_size",
    ),
    Case(
        record="take",
        ops="take take.out",
        at_bound={"self": rows(), "index": ints(-15, 14)},
        beyond=({"index": ints(15)}, {"index": ints(-16)}),
        expression="idx < numel && idx >= -numel",
    ),
    Case(
        record="put",
        ops="put put.out put_",
        at_bound={"self": rows(), "index": ints(-15, 14), "source": torch.ones(2)},
        beyond=({"index": ints(0, 15)}, {"index": ints(-16, 0)}),
        expression="idx < numel && idx >= -numel",
    ),
    Case(
        record="masked_scatter",
        ops="masked_scatter masked_scatter.out masked_scatter_",
        at_bound={
            "self": rows(2, 3),
            "mask": torch.tensor([True, False, True]),
            "source": torch.ones(4),
        },
        beyond=({"source": torch.ones(3)}, {"mask": torch.tensor([True])}),
        expression="totalElements <= srcSize",
    ),
    Case(
        record="index_add_small",
        ops="index_add index_add.out index_add_",
        at_bound=ADD,
        beyond=({"index": ints(0, 5)}, {"index": ints(-1, 0)}),
        expression="dstIndex < dstAddDimSize",
    ),
    Case(
        record="index_add_large",
        ops="index_add index_add.out index_add_",
        at_bound=MANY,
        beyond=({"index": ints(*[0, 5] * 9)}, {"index": ints(*[-1, 0] * 9)}),
        expression="dstIndex < dstAddDimSize",
    ),
    Case(
        record="index_add_small",
        ops="index_reduce index_reduce.out index_reduce_",
        at_bound={**ADD, "reduce": "amax"},
        beyond=({"index": ints(0, 5)}, {"index": ints(-1, 0), "include_self": False}),
        expression="dstIndex < dstAddDimSize",
    ),
    Case(
        record="index_add_large",
        ops="index_reduce index_reduce.out index_reduce_",
        at_bound={**MANY, "reduce": "amax"},
        beyond=({"index": ints(*[0, 5] * 9)},),
        expression="dstIndex < dstAddDimSize",
    ),
    Case(
        record="index_select_small",
        ops="index_select index_select.out",
        at_bound={"self": rows(), "dim": 1, "index": ints(*[2, 0] * 8)},
        beyond=({"index": ints(3)}, {"index": ints(-1)}, {"self": rows(5, 0), "dim": 1}),
        expression="srcIndex < srcSelectDimSize",
    ),
    Case(
        record="index_select_small",
        ops="embedding embedding.out",
        at_bound={"weight": rows(), "indices": ints(*[4, 0] * 8), "padding_idx": 4},
        beyond=({"indices": ints(5)}, {"indices": ints(-1)}, {"weight": rows(0)}),
        expression="srcIndex < srcSelectDimSize",
    ),
    Case(
        record="gather_scatter",
        ops="index_select index_select.out",
        at_bound={"self": rows(), "dim": 1, "index": ints(*[2, 0] * 9)},
        beyond=({"index": ints(*[3, 0] * 9)}, {"index": ints(*[-1, 0] * 9)}),
        expression="idx_dim >= 0 && idx_dim < index_size",
    ),
    Case(
        record="gather_scatter",
        ops="gather gather.out",
        at_bound={"self": rows(), "dim": 1, "index": ints(0, 2).view(2, 1)},
        beyond=({"index": ints(3).view(1, 1)}, {"index": ints(-1).view(1, 1)}),
        expression="idx_dim >= 0 && idx_dim < index_size",
    ),
    Case(
        record="gather_scatter",
        ops="scatter.src scatter.src_out scatter_.src scatter_add scatter_add.out scatter_add_",
        at_bound={
            "self": rows(),
            "dim": 1,
            "index": ints(0, 2).view(2, 1),
            "src": torch.ones(2, 1),
        },
        beyond=({"index": ints(3).view(1, 1)}, {"index": ints(-1).view(1, 1)}),
        expression="idx_dim >= 0 && idx_dim < index_size",
    ),
    Case(
        record="gather_scatter",
        ops="scatter.reduce scatter.reduce_out scatter_.reduce",
        at_bound={
            "self": rows(),
            "dim": -1,
            "index": ints(0, 2).view(2, 1),
            "src": torch.ones(2, 1),
            "reduce": "add",
        },
        beyond=({"index": ints(3).view(1, 1)}, {"index": ints(-1).view(1, 1)}),
        expression="idx_dim >= 0 && idx_dim < index_size",
    ),
    Case(
        record="gather_scatter",
        ops="scatter_reduce.two scatter_reduce.two_out scatter_reduce_.two",
        at_bound={
            "self": torch.zeros(3),
            "dim": 0,
            "index": ints(0, 2),
            "src": torch.ones(2),
            "reduce": "amax",
        },
        beyond=({"index": ints(0, 3)}, {"index": ints(-1, 0)}),
        expression="idx_dim >= 0 && idx_dim < index_size",
    ),
    Case(
        record="scatter_add_rows_fast",
        ops="scatter_add scatter_add.out scatter_add_",
        at_bound={
            "self": rows(5, 4),
            "dim": 0,
            "index": ints(0, 4).view(2, 1).expand(2, 4),
            "src": torch.ones(2, 4),
        },
        beyond=({"index": ints(0, 5).view(2, 1).expand(2, 4)},),
        expression="ind >= 0 && ind < self_dim_size",
    ),
    Case(
        record="scatter_add_rows_fast",
        ops="scatter_reduce.two scatter_reduce.two_out scatter_reduce_.two",
        at_bound={
            "self": rows(5, 4),
            "dim": 0,
            "index": ints(0, 4).view(2, 1).expand(2, 4),
            "src": torch.ones(2, 4),
            "reduce": "sum",
        },
        beyond=({"index": ints(-1, 4).view(2, 1).expand(2, 4)},),
        expression="ind >= 0 && ind < self_dim_size",
    ),
    Case(
        record="scatter_value",
        ops="scatter.value scatter.value_out scatter_.value",
        at_bound={"self": rows(), "dim": 1, "index": ints(0, 2).view(2, 1), "value": 1.0},
        beyond=({"index": ints(3).view(1, 1)}, {"index": ints(-1).view(1, 1)}),
        expression='idx_dim < index_size && "index out of bounds"',
    ),
    Case(
        record="scatter_value",
        ops="scatter.value_reduce scatter.value_reduce_out scatter_.value_reduce",
        at_bound={
            "self": rows(),
            "dim": 1,
            "index": ints(0, 2).view(2, 1),
            "value": 1.0,
            "reduce": "add",
        },
        beyond=({"index": ints(3).view(1, 1)}, {"index": ints(-1).view(1, 1)}),
        expression='idx_dim < index_size && "index out of bounds"',
    ),
    Case(
        record="embedding_renorm",
        ops="embedding_renorm embedding_renorm.out embedding_renorm_",
        at_bound={"self": rows(), "indices": ints(-5, 4), "max_norm": 1.0, "norm_type": 2.0},
        beyond=({"indices": ints(5)}, {"indices": ints(-6)}),
        expression="index >= -num_weights && index < num_weights",
    ),
    *(
        Case(
            record="embedding_bag_index",
            ops="_embedding_bag _embedding_bag.out"
            " _embedding_bag_forward_only _embedding_bag_forward_only.out",
            at_bound={**BAG, "mode": mode},
            beyond=({"indices": ints(0, 5, 1)}, {"indices": ints(-1, 0, 1)}),
            expression=f"{kernel}: block: [0,0,0], thread: [0,0,0] Assertion `!has_invalid_index",
        )
        for mode, kernel in ((0, "sum_mean"), (1, "sum_mean"), (2, "max"))
    ),
    *(
        Case(
            record="embedding_bag_offsets",
            ops="_embedding_bag _embedding_bag.out"
            " _embedding_bag_forward_only _embedding_bag_forward_only.out",
            at_bound={**BAG, "mode": mode},
            beyond=({"offsets": ints(0, 4)}, {"offsets": ints(0, -1)}),
            expression=f"{kernel}: block: [0,0,0], thread: [0,0,0] Assertion `end >= begin`",
        )
        for mode, kernel in ((0, "sum_mean"), (2, "max"))
    ),
    Case(
        record="nll_loss_forward_reduced",
        ops="nll_loss_forward nll_loss_forward.output",
        at_bound=FORWARD,
        beyond=BAD_TARGETS,
        expression="t >= 0 && t < n_classes",
    ),
    Case(
        record="nll_loss_forward_reduced",
        ops="nll_loss_forward nll_loss_forward.output",
        at_bound={**FORWARD, "self": torch.zeros(4), "target": torch.tensor(3), "reduction": 0},
        beyond=({"target": torch.tensor(4)}, {"target": torch.tensor(-1)}),
        expression="nll_loss_forward_reduce_cuda_kernel_1d",
    ),
    Case(
        record="nll_loss_forward_reduced",
        ops="nll_loss_forward nll_loss_forward.output",
        at_bound={**FORWARD, "target": torch.tensor([0, 1, 3], dtype=torch.uint8)},
        beyond=({"target": torch.tensor([0, 156, 4], dtype=torch.uint8)},),
        expression="Assertion `t < n_classes`",
    ),
    Case(
        record="nll_loss_forward_none",
        ops="nll_loss_forward nll_loss_forward.output",
        at_bound={**FORWARD, "reduction": 0},
        beyond=BAD_TARGETS,
        expression="cur_target >= 0 && cur_target < n_classes",
    ),
    Case(
        record="nll_loss_backward_reduced",
        ops="nll_loss_backward nll_loss_backward.grad_input",
        at_bound={**BACKWARD, "grad_output": torch.tensor(1.0)},
        beyond=BAD_TARGETS,
        expression="t >= 0 && t < n_classes",
    ),
    Case(
        record="nll_loss_backward_none",
        ops="nll_loss_backward nll_loss_backward.grad_input",
        at_bound={**BACKWARD, "grad_output": torch.ones(3), "reduction": 0},
        beyond=BAD_TARGETS,
        expression="cur_target >= 0 && cur_target < n_classes",
    ),
    Case(
        record="nll_loss2d_forward",
        ops="nll_loss2d_forward nll_loss2d_forward.output",
        at_bound=FORWARD_2D,
        beyond=BAD_TARGETS_2D,
        expression="nll_loss2d_forward_kernel",
    ),
    Case(
        record="nll_loss2d_forward",
        ops="nll_loss2d_forward nll_loss2d_forward.output",
        at_bound={**FORWARD_2D, "reduction": 0},
        beyond=BAD_TARGETS_2D,
        expression="nll_loss2d_forward_no_reduce_kernel",
    ),
    Case(
        record="nll_loss2d_backward_reduced",
        ops="nll_loss2d_backward nll_loss2d_backward.grad_input",
        at_bound=BACKWARD_2D,
        beyond=BAD_TARGETS_2D,
        expression="t >= 0 && t < n_classes",
    ),
    Case(
        record="nll_loss2d_backward_none",
        ops="nll_loss2d_backward nll_loss2d_backward.grad_input",
        at_bound={**BACKWARD_2D, "reduction": 0, "grad_output": torch.ones(1, 1, 3)},
        beyond=BAD_TARGETS_2D,
        expression="cur_target >= 0 && cur_target < n_classes",
    ),
    Case(
        record="bce_input",
        ops="binary_cross_entropy binary_cross_entropy.out",
        at_bound={"self": torch.tensor([0.0, -0.0, 1.0]), "target": torch.tensor([0.0, 1.0, 0.5])},
        beyond=(
            {"self": torch.tensor([0.0, 1.0000001, 1.0])},
            {"self": torch.tensor([0.0, -1e-30, 1.0])},
            {"self": torch.tensor([0.0, NAN, 1.0]), "target": torch.tensor([2.0, 1.0, 0.5])},
        ),
        expression="input_val >= zero && input_val <= one",
    ),
    Case(
        record="bce_target",
        ops="binary_cross_entropy binary_cross_entropy.out",
        at_bound={"self": torch.tensor([0.0, -0.0, 1.0]), "target": torch.tensor([0.0, 1.0, 0.5])},
        beyond=(
            {"target": torch.tensor([0.0, 1.0000001, 1.0])},
            {"target": torch.tensor([0.0, NAN, 1.0])},
        ),
        expression="target_val >= zero && target_val <= one",
    ),
    Case(
        record="multi_margin_loss",
        ops="multi_margin_loss multi_margin_loss.out",
        at_bound={"self": rows(2, 4), "target": ints(0, 3)},
        beyond=({"target": ints(0, 4)}, {"target": ints(-1, 0)}),
        expression="target_k >= 0 && target_k < dim",
    ),
    Case(
        record="multinomial_renorm",
        ops="multinomial multinomial.out",
        at_bound={
            "self": torch.tensor([[0.0, 1.0]]),
            "num_samples": 2,
            "replacement": True,
        },
        beyond=({"self": torch.tensor([[-0.1, 1.0]])}, {"self": torch.tensor([[-INF, 1.0]])}),
        expression="!(val < zero)",
    ),
    Case(
        record="multinomial_sum",
        ops="multinomial multinomial.out",
        at_bound={
            "self": torch.tensor([[0.0, 1e-30]]),
            "num_samples": 2,
            "replacement": True,
        },
        beyond=(
            {"self": torch.tensor([[0.0, 0.0]])},
            {"self": torch.tensor([[NAN, 1.0]])},
            {"self": torch.tensor([[INF, 1.0]])},
            {"self": torch.tensor([[60000.0, 60000.0]], dtype=torch.float16)},
        ),
        expression="cumdist[size - 1] > static_cast<scalar_t>(0)",
    ),
    Case(
        record="multinomial_fast",
        ops="multinomial multinomial.out",
        at_bound={"self": torch.tensor([0.0, 1.0]), "num_samples": 1},
        beyond=(
            {"self": torch.tensor([-1e-30, 1.0])},
            {"self": torch.tensor([NAN, 1.0])},
            {"self": torch.tensor([INF, 1.0])},
        ),
        expression="probability tensor contains either `inf`, `nan` or element < 0",
    ),
    Case(
        record="multinomial_fast",
        ops="multinomial multinomial.out",
        at_bound={"self": torch.tensor([[0.0, 1.0], [0.5, 0.5]]), "num_samples": 2},
        beyond=({"self": torch.tensor([[0.0, 0.0], [0.5, 0.5]])},),
        expression="invalid multinomial distribution (sum of probabilities <= 0)",
    ),
    Case(
        record="bernoulli_tensor",
        ops="bernoulli bernoulli.out",
        at_bound={"self": torch.tensor([0.0, 1.0])},
        beyond=(
            {"self": torch.tensor([0.0, 1.0000001])},
            {"self": torch.tensor([-1e-30, 1.0])},
            {"self": torch.tensor([0.0, NAN])},
        ),
        expression="0 <= p",
    ),
    Case(
        record="bernoulli_tensor",
        ops="bernoulli.Tensor bernoulli.Tensor_out bernoulli_.Tensor",
        at_bound={"self": torch.tensor([7.0, 7.0]), "p": torch.tensor([0.0, 1.0])},
        beyond=({"p": torch.tensor([0.0, 1.0000001])}, {"p": torch.tensor([0.0, NAN])}),
        expression="0 <= p2 && p2 <= 1",
    ),
    Case(
        record="poisson",
        ops="poisson poisson.out",
        at_bound={"self": torch.tensor([0.0, 3.0])},
        beyond=({"self": torch.tensor([-1e-30])}, {"self": torch.tensor([NAN])}),
        expression="lambda >= 0",
    ),
    Case(
        record="repeat_interleave_size",
        ops="repeat_interleave.Tensor repeat_interleave.Tensor_out",
        at_bound={"repeats": ints(1, 0, 2), "output_size": 3},
        beyond=({"output_size": 4}, {"output_size": 2}, {"repeats": ints(1, -1, 2)}),
        expression="result_size == cumsum_ptr[size - 1]",
    ),
    Case(
        record="repeat_interleave_negative",
        ops="repeat_interleave.Tensor repeat_interleave.Tensor_out",
        at_bound={"repeats": ints(1, 0, 2), "output_size": 3},
        beyond=({"repeats": ints(2, -1, 2)},),
        expression="repeat >= 0",
    ),
    Case(
        record="max_unpool2d",
        ops="max_unpool2d max_unpool2d.out",
        at_bound={
            "self": torch.ones(1, 1, 2),
            "indices": ints(0, 8).view(1, 1, 2),
            "output_size": [3, 3],
        },
        beyond=({"indices": ints(0, 9).view(1, 1, 2)}, {"indices": ints(-1, 0).view(1, 1, 2)}),
        expression="maxind >= 0 && maxind < outputImageSize",
    ),
    Case(
        record="max_unpool3d",
        ops="max_unpool3d max_unpool3d.out",
        at_bound={
            "self": torch.ones(1, 1, 1, 2),
            "indices": ints(0, 7).view(1, 1, 1, 2),
            "output_size": [2, 2, 2],
            "stride": [2, 2, 2],
            "padding": [0, 0, 0],
        },
        beyond=(
            {"indices": ints(0, 8).view(1, 1, 1, 2)},
            {"indices": ints(-1, 0).view(1, 1, 1, 2)},
        ),
        expression="index >= 0 && index < outputImageSize",
    ),
    Case(
        record="fractional_max_pool2d_backward",
        ops="fractional_max_pool2d_backward fractional_max_pool2d_backward.grad_input",
        at_bound=FRACTIONAL,
        beyond=({"indices": ints(0, 1, 2, 16).view(1, 1, 2, 2)},),
        expression="inputH < gradInput.size(2)",
    ),
    Case(
        record="fractional_max_pool2d_backward",
        ops="fractional_max_pool2d_backward fractional_max_pool2d_backward.grad_input",
        at_bound=FRACTIONAL,
        beyond=({"indices": ints(0, 1, -1, 16).view(1, 1, 2, 2)},),
        expression="index >= 0",
    ),
    Case(
        record="fractional_max_pool3d_backward",
        ops="fractional_max_pool3d_backward fractional_max_pool3d_backward.grad_input",
        at_bound=FRACTIONAL_3D,
        beyond=({"indices": ints(0, 1, 2, 32).view(1, 1, 1, 2, 2)},),
        expression="inputT < gradInput.size(2)",
    ),
    Case(
        record="fractional_max_pool3d_backward",
        ops="fractional_max_pool3d_backward fractional_max_pool3d_backward.grad_input",
        at_bound=FRACTIONAL_3D,
        beyond=({"indices": ints(0, 1, -1, 32).view(1, 1, 1, 2, 2)},),
        expression="index >= 0",
    ),
    Case(
        record="assert_async",
        ops="_assert_async",
        at_bound={"self": torch.tensor(NAN)},
        beyond=({"self": torch.tensor(0.0)}, {"self": torch.tensor([False])}),
        expression="Assertion `` failed",
    ),
    Case(
        record="assert_async",
        ops="_assert_async.msg",
        at_bound={"self": torch.tensor(1), "assert_msg": "lengths must match"},
        beyond=({"self": torch.tensor(0)},),
        expression="lengths must match",
    ),
    Case(
        record="nested_index_put",
        ops="_assert_async.msg",
        at_bound={
            "self": torch.tensor(True),
            "assert_msg": "Some indices in the ragged dimension are out of bounds!",
        },
        beyond=({"self": torch.tensor(False)},),
        expression="Some indices in the ragged dimension are out of bounds!",
    ),
    Case(
        record="segment_reduce_nd",
        ops="segment_reduce segment_reduce.out",
        at_bound={**SEGMENTS, "lengths": ints(0, 6)},
        beyond=({"lengths": ints(-1, 6)},),
        expression="lengths_data[lengths_idx] >= 0",
    ),
    Case(
        record="segment_reduce_nd",
        ops="segment_reduce segment_reduce.out",
        at_bound={**SEGMENTS, "unsafe": False, "offsets": ints(0, 3, 3, 6)},
        beyond=({"offsets": ints(0, 3, 2, 6)},),
        expression="lengths_data[lengths_idx] >= 0",
    ),
    Case(
        record="segment_reduce_1d_mean",
        ops="segment_reduce segment_reduce.out",
        at_bound={**SEGMENTS, "data": torch.ones(6), "reduce": "mean", "offsets": ints(0, 3, 6)},
        beyond=({"offsets": ints(0, 3, 2)},),
        expression="lengths_data[index] >= 0",
    ),
    Case(
        record="sparse_compressed_invariants",
        ops="_validate_compressed_sparse_indices",
        at_bound={**COMPRESSED, "compressed_idx": ints(0, 2, 3), "plain_idx": ints(1, 2, 0)},
        beyond=(
            {"compressed_idx": ints(1, 2, 3)},
            {"compressed_idx": ints(0, 2, 2)},
            {"compressed_idx": ints(0, 4, 3)},
            {"plain_idx": ints(1, 3, 0)},
            {"plain_idx": ints(-1, 2, 0)},
            {"plain_idx": ints(2, 1, 0)},
            {"plain_idx": ints(1, 1, 0)},
        ),
        expression="cond && message",
    ),
]

CALLS = [
    pytest.param(case, f"aten::{op}", id=f"{case.record}-{op}-{number}")
    for number, case in enumerate(CASES)
    for op in case.ops.split()
]


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def outcome(name: str, given: dict[str, Any]) -> Repair | None:
    return ASSERTS[name](filled(name, given))


def shapes(results: tuple[Tensor, ...]) -> list[torch.Size]:
    return [result.shape for result in results]


@pytest.mark.parametrize(("case", "name"), CALLS)
def test_values_at_the_bound_pass(case: Case, name: str) -> None:
    """The last values that CUDA accepts are neither a hit nor in need of repair."""
    assert outcome(name, case.at_bound) is None
    call(name, case.at_bound)


@pytest.mark.parametrize(("case", "name"), CALLS)
def test_values_one_step_beyond_assert(case: Case, name: str) -> None:
    """One step beyond the bound meets the assertion of the inventory, word for word."""
    for change in case.beyond:
        hit = outcome(name, {**case.at_bound, **change})
        printed = {here(line): line for line in INVENTORY[case.record]["stderr_text"]}
        if not any(printed):  # a release before this assertion
            assert isinstance(hit, Repair) and not isinstance(hit, AssertHit)
            continue
        assert isinstance(hit, AssertHit), change
        assert hit.record == case.record
        assert case.expression in printed[hit.text]


@pytest.mark.parametrize(("case", "name"), CALLS)
def test_repaired_arguments_run_on_the_cpu(case: Case, name: str) -> None:
    """With the repaired arguments the CPU kernel returns, and the rule has nothing more to say."""
    for change in case.beyond:
        given = {**case.at_bound, **change}
        hit = outcome(name, given)
        assert hit is not None
        repaired = {**given, **hit.repaired}
        assert outcome(name, repaired) is None
        call(name, repaired)
        for argument, value in hit.repaired.items():
            if isinstance(value, Tensor):
                assert value.dtype == given[argument].dtype


@pytest.mark.parametrize(("case", "name"), CALLS)
def test_rules_leave_the_arguments_alone(case: Case, name: str) -> None:
    """A repair is a copy: the user's own tensors keep their values."""
    for change in case.beyond:
        given = {**case.at_bound, **change}
        before = {k: v.clone() for k, v in given.items() if isinstance(v, Tensor)}
        outcome(name, given)
        for argument, value in before.items():
            assert torch.equal(given[argument].nan_to_num(), value.nan_to_num())


def test_every_rule_has_a_schema() -> None:
    """Every key of the table is the full name of an overload that torch has."""
    for name in ASSERTS:
        schema = overload(name)._schema
        assert name in (schema.name, f"{schema.name}.{schema.overload_name}")


def test_every_reachable_record_is_simulated_or_listed_with_a_reason() -> None:
    """No assertion that values can reach is forgotten: it has a tested rule or a stated reason."""
    simulated = {case.record for case in CASES}
    reachable = {name for name, record in INVENTORY.items() if record["reachable"]}
    assert simulated | set(NOT_SIMULATED) == reachable
    assert not simulated & set(NOT_SIMULATED)
    assert all(NOT_SIMULATED.values())


# These run the op that carries the rule; they never reach a device kernel of their own.
REACHED_THROUGH = {
    "aten::_validate_sparse_compressed_tensor_args": "aten::_validate_compressed_sparse_indices",
    "aten::_validate_sparse_csr_tensor_args": "aten::_validate_compressed_sparse_indices",
    "aten::sparse_compressed_tensor.comp_plain_value": "aten::_validate_compressed_sparse_indices",
    "aten::sparse_compressed_tensor.comp_plain_value_size": (
        "aten::_validate_compressed_sparse_indices"
    ),
}


@pytest.mark.parametrize("record", sorted({case.record for case in CASES}))
def test_every_overload_of_a_simulated_record_has_a_rule(record: str) -> None:
    """All overloads of an assertion are covered: functional, in-place, out= and backward."""
    tested = {f"aten::{op}" for case in CASES if case.record == record for op in case.ops.split()}
    for name in INVENTORY[record]["ops"]:
        if name in REACHED_THROUGH:
            assert REACHED_THROUGH[name] in tested
        else:
            assert name in ASSERTS


def test_every_tested_overload_is_exercised_by_its_own_rule() -> None:
    """Every rule that can assert is run by the table of cases."""
    exercised = {f"aten::{op}" for case in CASES for op in case.ops.split()}
    silent = {name for name in ASSERTS if name not in exercised}
    assert silent == {f"aten::{op}" for repair in REPAIRS for op in repair.ops.split()} - exercised


@dataclass(frozen=True, kw_only=True)
class SilentCase:
    """A call that CUDA runs without a word while the CPU kernel raises or writes out of bounds."""

    ops: str
    given: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)


MARGIN = {"self": rows(2, 4), "reduction": 1, "grad_output": torch.tensor(1.0)}
CTC = {
    "log_probs": torch.zeros(3, 1, 4).log_softmax(-1),
    "targets": ints(1, 4).view(1, 2),
    "blank": 0,
}
POOL = {
    "grad_output": torch.ones(1, 1, 1, 1),
    "self": torch.ones(1, 1, 2, 2),
    "kernel_size": [2, 2],
    "stride": [2, 2],
    "padding": [0, 0],
    "dilation": [1, 1],
    "ceil_mode": False,
    "indices": ints(4).view(1, 1, 1, 1),
}
POOL_3D = {
    **POOL,
    "grad_output": torch.ones(1, 1, 1, 1, 1),
    "self": torch.ones(1, 1, 1, 2, 2),
    "kernel_size": [1, 2, 2],
    "stride": [1, 2, 2],
    "padding": [0, 0, 0],
    "dilation": [1, 1, 1],
    "indices": ints(4).view(1, 1, 1, 1, 1),
}

BAG_GRADIENT = {
    "grad": torch.ones(1, 2),
    "indices": ints(0, 9),
    "offset2bag": ints(0, 0),
    "bag_size": ints(2),
    "maximum_indices": ints(),
    "num_weights": 3,
    "scale_grad_by_freq": False,
    "mode": 0,
    "per_sample_weights": None,
}
SEGMENT_GRADIENT = {
    "grad": torch.ones(2),
    "output": torch.ones(2),
    "data": torch.ones(6),
    "reduce": "sum",
    "lengths": None,
    "offsets": None,
    "axis": 0,
}
SOLVE = {"B": torch.ones(2, 1)}
REPAIRS = [
    SilentCase(
        ops="index_select index_select.out",
        given={"self": torch.ones(3, 0), "dim": 0, "index": ints(3)},
        values={"index": ints(2)},
    ),
    SilentCase(
        ops="embedding embedding.out",
        given={"weight": torch.ones(3, 0), "indices": ints(-1)},
        values={"indices": ints(0)},
    ),
    SilentCase(
        ops="index_select index_select.out",
        given={"self": rows(), "dim": 0, "index": ints(2**32 + 1)},
        values={"index": ints(1)},
    ),
    SilentCase(
        ops="index_add index_add_ index_reduce index_reduce_",
        given={**ADD, "index": ints(0, 2**32 + 1), "reduce": "amax"},
        values={"index": ints(0, 1)},
    ),
    SilentCase(
        ops="max_unpool2d",
        given={
            "self": torch.ones(1, 1, 1),
            "indices": ints(2**32 + 1).view(1, 1, 1),
            "output_size": [2, 2],
        },
        values={"indices": ints(1).view(1, 1, 1)},
    ),
    SilentCase(
        ops="fractional_max_pool2d_backward",
        given={**FRACTIONAL, "indices": torch.full((1, 1, 2, 2), 2**32 + 1)},
        values={"indices": torch.full((1, 1, 2, 2), 1)},
    ),
    SilentCase(
        ops="multi_margin_loss",
        given={"self": rows(1, 4), "target": ints(2**32 + 1)},
        values={"target": ints(1)},
    ),
    SilentCase(
        ops="index.Tensor",
        given={"self": torch.ones(3, 0), "indices": [ints(3)]},
    ),
    SilentCase(
        ops="_index_put_impl_",
        given={
            "self": rows(),
            "indices": [ints(5)],
            "values": torch.tensor(1.0),
            "accumulate": True,
            "unsafe": True,
        },
    ),
    SilentCase(
        ops="index_fill_.int_Scalar index_fill.int_Scalar",
        given={"self": torch.ones(3, 0), "dim": 0, "index": ints(7), "value": 1.0},
    ),
    SilentCase(
        ops="index_copy index_copy_ index_add index_add_",
        given={"self": rows(3, 0), "dim": 0, "index": ints(3), "source": rows(1, 0)},
    ),
    SilentCase(
        ops="_embedding_bag _embedding_bag_forward_only",
        given={**BAG, "offsets": ints(1, 3)},
        values={"offsets": ints(0, 3)},
    ),
    SilentCase(
        ops="_embedding_bag _embedding_bag_forward_only",
        given={**BAG, "offsets": ints(0, 2, 9), "include_last_offset": True},
        values={"offsets": ints(0, 2, 3)},
    ),
    SilentCase(
        ops="_embedding_bag _embedding_bag_forward_only",
        given={**BAG, "offsets": ints(0), "include_last_offset": True, "mode": 2},
        values={"indices": ints()},
    ),
    SilentCase(
        ops="_embedding_bag _embedding_bag_forward_only",
        given={**BAG, "weight": torch.ones(3, 0)},
        values={"indices": ints(0, 2, 1)},
    ),
    SilentCase(
        ops="segment_reduce segment_reduce.out",
        given={**SEGMENTS, "data": torch.ones(6), "offsets": ints(0, 3, 2)},
        values={"offsets": ints(0, 3, 3)},
    ),
    SilentCase(
        ops="segment_reduce",
        given={**SEGMENTS, "lengths": ints(6, 1)},
    ),
    SilentCase(
        ops="segment_reduce",
        given={**SEGMENTS, "offsets": ints(0, 3, 7)},
        values={"offsets": ints(0, 3, 6)},
    ),
    SilentCase(
        ops="multi_margin_loss_backward multi_margin_loss_backward.grad_input",
        given={**MARGIN, "target": ints(0, 4), "p": 1, "margin": 1.0},
        values={"target": ints(0, 3)},
    ),
    SilentCase(
        ops="multilabel_margin_loss_forward multilabel_margin_loss_forward.output",
        given={**MARGIN, "target": ints(0, 4, -1, 0, 0, -2, -1, 0).view(2, 4)},
        values={"target": ints(0, 3, -1, 0, 0, -1, -1, 0).view(2, 4)},
    ),
    SilentCase(
        ops="multilabel_margin_loss_backward multilabel_margin_loss_backward.grad_input",
        given={
            **MARGIN,
            "target": ints(0, 4, -1, 0, 0, 1, -1, 0).view(2, 4),
            "is_target": torch.zeros(2, 4),
        },
        values={"target": ints(0, 3, -1, 0, 0, 1, -1, 0).view(2, 4)},
    ),
    SilentCase(
        ops="_ctc_loss",
        given={**CTC, "input_lengths": [3], "target_lengths": [2]},
        values={"targets": ints(1, 3).view(1, 2)},
    ),
    SilentCase(
        ops="_ctc_loss.Tensor",
        given={**CTC, "input_lengths": ints(3), "target_lengths": ints(2)},
        values={"targets": ints(1, 3).view(1, 2)},
    ),
    SilentCase(
        ops="_ctc_loss_backward",
        given={
            **CTC,
            "input_lengths": [3],
            "target_lengths": [2],
            "grad": torch.ones(1),
            "neg_log_likelihood": torch.ones(1),
            "log_alpha": torch.zeros(1, 3, 5),
        },
    ),
    SilentCase(
        ops="_ctc_loss_backward.Tensor",
        given={
            **CTC,
            "input_lengths": ints(3),
            "target_lengths": ints(2),
            "grad": torch.ones(1),
            "neg_log_likelihood": torch.ones(1),
            "log_alpha": torch.zeros(1, 3, 5),
        },
    ),
    SilentCase(
        ops="max_pool2d_with_indices_backward max_pool2d_with_indices_backward.grad_input"
        " adaptive_max_pool2d_backward adaptive_max_pool2d_backward.grad_input",
        given=POOL,
        values={"indices": ints(3).view(1, 1, 1, 1)},
    ),
    SilentCase(
        ops="max_pool3d_with_indices_backward max_pool3d_with_indices_backward.grad_input"
        " adaptive_max_pool3d_backward adaptive_max_pool3d_backward.grad_input",
        given=POOL_3D,
        values={"indices": ints(3).view(1, 1, 1, 1, 1)},
    ),
    SilentCase(
        ops="embedding_dense_backward embedding_dense_backward.out",
        given={
            "grad_output": torch.ones(2, 3),
            "indices": ints(0, 5),
            "num_weights": 5,
            "padding_idx": -1,
            "scale_grad_by_freq": True,
        },
        values={"indices": ints(0, 4)},
    ),
    SilentCase(
        ops="_embedding_bag_dense_backward _embedding_bag_dense_backward.out",
        given=BAG_GRADIENT,
        values={"indices": ints(0, 2)},
    ),
    SilentCase(
        ops="_embedding_bag_backward",
        given={**BAG_GRADIENT, "offsets": ints(0), "sparse": False},
        values={"indices": ints(0, 2)},
    ),
    SilentCase(
        ops="_embedding_bag_dense_backward",
        given={**BAG_GRADIENT, "mode": 2, "maximum_indices": ints(0, 9).view(1, 2)},
        values={"maximum_indices": ints(0, 2).view(1, 2)},
    ),
    SilentCase(
        ops="_embedding_bag_per_sample_weights_backward"
        " _embedding_bag_per_sample_weights_backward.out",
        given={**BAG_GRADIENT, "weight": torch.ones(3, 2), "offsets": ints(0)},
        values={"indices": ints(0, 2)},
    ),
    SilentCase(
        ops="_segment_reduce_backward _segment_reduce_backward.out",
        given={**SEGMENT_GRADIENT, "offsets": ints(0, 3, 7)},
        values={"offsets": ints(0, 3, 6)},
    ),
    SilentCase(
        ops="_segment_reduce_backward",
        given={**SEGMENT_GRADIENT, "lengths": ints(6, 1)},
        values={"lengths": ints(0, 0)},
    ),
    SilentCase(
        ops="_convert_indices_from_coo_to_csr _convert_indices_from_coo_to_csr.out",
        given={"self": ints(0, 3), "size": 3},
        values={"self": ints(0, 2)},
    ),
    SilentCase(
        ops="_convert_indices_from_csr_to_coo _convert_indices_from_csr_to_coo.out",
        given={"crow_indices": ints(0, 3, 2), "col_indices": ints(0, 1)},
        values={"crow_indices": ints(0, 2, 2)},
    ),
    SilentCase(
        ops="_jagged_to_padded_dense_forward",
        given={"values": torch.ones(3, 1), "offsets": [ints(0, 1, 9)], "max_lengths": [2]},
    ),
    SilentCase(
        ops="linalg_lu_solve linalg_lu_solve.out",
        given={**SOLVE, "LU": torch.eye(2), "pivots": ints(1, 3).int()},
        values={"pivots": ints(1, 2).int()},
    ),
    SilentCase(
        ops="linalg_ldl_solve linalg_ldl_solve.out",
        given={**SOLVE, "LD": torch.eye(2), "pivots": ints(-3, 2).int()},
        values={"pivots": ints(1, 2).int()},
    ),
    SilentCase(
        ops="lu_unpack lu_unpack.out",
        given={"LU_data": torch.eye(2), "LU_pivots": ints(0, 2).int()},
        values={"LU_pivots": ints(1, 2).int()},
    ),
]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, f"aten::{op}", id=f"{op}-{number}")
        for number, case in enumerate(REPAIRS)
        for op in case.ops.split()
    ],
)
def test_what_cuda_takes_in_silence_is_repaired_without_a_hit(case: SilentCase, name: str) -> None:
    """Where CUDA says nothing the rule says nothing either, and the CPU kernel returns."""
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
        ("aten::multinomial", {"self": torch.tensor([1.0, 0.0, 0.0]), "num_samples": 2}),
    ],
)
def test_empty_and_exempt_calls_pass(name: str, given: dict[str, Any]) -> None:
    """Calls that launch nothing, or that CUDA does not check, are left alone."""
    assert outcome(name, given) is None


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("aten::index.Tensor", {"self": rows(), "indices": [ints(9), ints(0, 1, 2), ints(0)]}),
        ("aten::index.Tensor", {"self": rows(), "indices": [torch.ones(4).bool(), ints(9)]}),
        ("aten::index.Tensor", {"self": rows(0), "indices": [ints(9)]}),
        ("aten::index_select", {"self": rows(), "dim": 2, "index": ints(9)}),
        (
            "aten::index_copy",
            {"self": rows(0), "dim": 0, "index": ints(2), "source": rows(1)},
        ),
        ("aten::index_add", {**ADD, "self": rows(0), "index": ints(9)}),
        (
            "aten::index_reduce",
            {**ADD, "self": rows(0), "index": ints(9), "reduce": "amax"},
        ),
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
    ],
)
def test_host_errors_are_left_to_torch(name: str, given: dict[str, Any]) -> None:
    """A call that torch refuses on the host is no device assert, whatever its values are."""
    assert outcome(name, given) is None
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        call(name, given)


def test_deterministic_mode_asserts_through_the_sorting_path() -> None:
    """With deterministic algorithms an assignment by index prints the empty assertion."""
    given = {"self": rows(), "indices": [ints(0, 5)], "values": torch.ones(2, 3)}
    with deterministic():
        hit = outcome("aten::index_put_", given)
    assert isinstance(hit, AssertHit)
    assert hit.record == "index_put_sort"


@pytest.mark.parametrize("name", ["aten::index_add_", "aten::index_copy_"])
def test_deterministic_mode_lets_negative_rows_wrap(name: str) -> None:
    """In deterministic mode rows are written by index_put_, which takes negatives: no assert."""
    given = {**ADD, "index": ints(0, -1)}
    with deterministic():
        repair = outcome(name, given)
        beyond = outcome(name, {**given, "index": ints(0, -6)})
    assert isinstance(repair, Repair)
    assert not isinstance(repair, AssertHit)
    assert torch.equal(repair.repaired["index"], ints(0, 4))
    assert isinstance(beyond, AssertHit)
    assert beyond.record == "index_put_sort"


def test_padding_idx_and_ignore_index_are_no_exemption_from_range() -> None:
    """padding_idx is range-checked like any index; ignore_index may itself be out of range."""
    padded = {"weight": rows(), "indices": ints(5), "padding_idx": 5}
    assert isinstance(outcome("aten::embedding", padded), AssertHit)
    void = {**FORWARD, "target": ints(255, 0, 3), "ignore_index": 255}
    assert outcome("aten::nll_loss_forward", void) is None


def test_out_of_range_rows_of_an_empty_table_keep_the_result_shape() -> None:
    """A look-up in a table without rows asserts, and still yields a result of the right shape."""
    for name, given in (
        ("aten::embedding", {"weight": rows(0), "indices": ints(2)}),
        ("aten::index_select", {"self": rows(0), "dim": 0, "index": ints(2)}),
        ("aten::gather", {"self": rows(0), "dim": 0, "index": ints(2, 0, 1).view(1, 3)}),
    ):
        hit = outcome(name, given)
        assert isinstance(hit, AssertHit)
        assert shapes(call(name, {**given, **hit.repaired})) == [torch.Size([1, 3])]


def test_writes_into_an_empty_table_keep_its_shape() -> None:
    """A write into a table without rows asserts, and leaves a table without rows."""
    index = ints(2, 0, 1).view(1, 3)
    for name, given in (
        ("aten::scatter.value", {"self": rows(0), "dim": 0, "index": index, "value": 1.0}),
        ("aten::scatter_add", {"self": rows(0), "dim": 0, "index": index, "src": rows(1)}),
        ("aten::index_add", {"self": rows(0), "dim": 0, "index": ints(2), "source": rows(1)}),
    ):
        hit = outcome(name, given)
        assert isinstance(hit, AssertHit)
        assert shapes(call(name, {**given, **hit.repaired})) == [torch.Size([0, 3])]


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


def test_scatter_in_deterministic_mode() -> None:
    """Sums are written by index_put_, where negatives wrap; other reductions assert on them."""
    given = {"self": torch.zeros(3), "dim": 0, "index": ints(0, -1), "src": torch.ones(2)}
    name = "aten::scatter_reduce.two"
    for reduce in ("sum", "amax"):
        hit = outcome(name, {**given, "reduce": reduce})
        assert isinstance(hit, AssertHit) and hit.record == "gather_scatter"
    with deterministic():
        wrapped = outcome(name, {**given, "reduce": "sum"})
        kept = outcome(name, {**given, "reduce": "amax"})
        beyond = outcome(name, {**given, "reduce": "sum", "index": ints(0, -4)})
        one = outcome("aten::scatter.src", {**given, "index": ints(3), "src": torch.ones(1)})
    assert isinstance(wrapped, Repair) and not isinstance(wrapped, AssertHit)
    assert torch.equal(wrapped.repaired["index"], ints(0, 2))
    assert isinstance(kept, AssertHit) and kept.record == "gather_scatter"
    assert isinstance(beyond, AssertHit) and beyond.record == "index_put_sort"
    assert isinstance(one, AssertHit) and one.record == "index_put"


def test_places_that_are_filled_first_assert_there() -> None:
    """Without include_self the places are filled before anything is reduced into them."""
    given = {"self": rows(), "dim": 0, "index": ints(9).view(1, 1), "src": rows(1, 1)}
    given["reduce"] = "sum"
    hit = outcome("aten::scatter_reduce.two", {**given, "include_self": True})
    assert isinstance(hit, AssertHit) and hit.record == "gather_scatter"
    hit = outcome("aten::scatter_reduce.two", {**given, "include_self": False})
    assert isinstance(hit, AssertHit) and hit.record == "scatter_value"


RANDOM_CALLS: list[tuple[str, Callable[[Tensor], dict[str, Any]], int]] = [
    ("gather", lambda i: {"self": rows(4, 3), "dim": 0, "index": i.view(2, 2)}, 4),
    (
        "scatter.value",
        lambda i: {"self": rows(3, 4), "dim": 1, "index": i.view(2, 2), "value": 1},
        4,
    ),
    ("index_select", lambda i: {"self": rows(4, 3), "dim": 0, "index": i}, 4),
    ("embedding", lambda i: {"weight": rows(4, 3), "indices": i.view(2, 2)}, 4),
    ("index.Tensor", lambda i: {"self": rows(3, 4), "indices": [None, i]}, 4),
    ("index_put", lambda i: {"self": rows(4), "indices": [i], "values": torch.tensor(1.0)}, 4),
    ("index_fill.int_Scalar", lambda i: {"self": rows(4), "dim": 0, "index": i, "value": 1}, 4),
    ("index_copy", lambda i: {"self": rows(4), "dim": 0, "index": i, "source": rows(4)}, 4),
    ("index_add", lambda i: {"self": rows(4), "dim": 0, "index": i, "source": rows(4)}, 4),
    ("take", lambda i: {"self": rows(2, 2), "index": i}, 4),
    ("put", lambda i: {"self": rows(2, 2), "index": i, "source": torch.ones(4)}, 4),
    ("_embedding_bag", lambda i: {"weight": rows(4), "indices": i, "offsets": ints(0, 2)}, 4),
    ("multi_margin_loss", lambda i: {"self": rows(4, 4), "target": i}, 4),
    ("nll_loss_forward", lambda i: {**FORWARD, "self": torch.zeros(4, 4), "target": i}, 4),
]


@pytest.mark.parametrize(
    ("op", "arguments", "size"), RANDOM_CALLS, ids=[c[0] for c in RANDOM_CALLS]
)
def test_rules_agree_with_the_checks_of_the_cpu_kernels(
    op: str, arguments: Callable[[Tensor], dict[str, Any]], size: int
) -> None:
    """On random indices a rule asserts exactly where the CPU kernel, which checks too, raises."""
    generator = torch.Generator().manual_seed(7)
    answers = set()
    for number in range(60):
        low = (-size - 1, -size, -1, 0)[number % 4]
        index = torch.randint(low, size + number % 2, (4,), generator=generator)
        given = arguments(index)
        try:
            call(f"aten::{op}", given)
            raised = False
        except (IndexError, RuntimeError):
            raised = True
        assert isinstance(outcome(f"aten::{op}", given), AssertHit) is raised, index
        answers.add(raised)
    assert answers == {True, False}


def moved(value: Any) -> Any:
    """Copy tensors, alone or in lists, to the device; expanded ones stay expanded."""
    if isinstance(value, list):
        return [moved(item) for item in value]
    if not isinstance(value, Tensor):
        return value
    if value.dim() > 1 and value.stride(-1) == 0:
        return value[..., :1].to("cuda").expand(value.shape)
    return value.to("cuda")


def test_every_case_asserts_on_the_simulated_device(sim: Simulation) -> None:
    """On the device every case launches, leaves the right assertion behind and raises nothing."""
    for case in CASES:
        for name in (f"aten::{op}" for op in case.ops.split()):
            at_bound = {key: moved(value) for key, value in case.at_bound.items()}
            call(name, at_bound)
            assert sim.pending is None, name
            for change in case.beyond:
                given = {**case.at_bound, **change}
                hit = outcome(name, given)
                call(name, {**at_bound, **{k: moved(v) for k, v in change.items()}})
                # Silent where the release has no such assertion yet.
                assert (name, sim.pending) == (name, getattr(hit, "text", None))
                sim.reset()


def test_silent_cases_run_on_the_simulated_device(sim: Simulation) -> None:
    """What CUDA takes in silence runs on the device without an error, then or later."""
    for case in REPAIRS:
        for op in case.ops.split():
            call(f"aten::{op}", {key: moved(value) for key, value in case.given.items()})
            torch.cuda.synchronize()
