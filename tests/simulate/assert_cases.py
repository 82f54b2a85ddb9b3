"""Calls at the bound of what CUDA accepts, one step beyond it, and beyond what it looks at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NAN = float("nan")
INF = float("inf")


@dataclass(frozen=True)
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


TARGETS = {"target": ints(0, -100, 3), "weight": None, "reduction": 1, "ignore_index": -100}
FORWARD = {"self": torch.zeros(3, 4), **TARGETS}
BACKWARD = {**FORWARD, "total_weight": torch.tensor(2.0)}
FORWARD_2D = {**FORWARD, "self": torch.zeros(1, 4, 1, 3), "target": ints(0, -100, 3).view(1, 1, 3)}
BACKWARD_2D = {**FORWARD_2D, "total_weight": torch.tensor(2.0), "grad_output": torch.tensor(1.0)}
BAD_TARGETS = ({"target": ints(0, 4, 3)}, {"target": ints(0, -1, 3)})
BAD_TARGETS_2D = ({"target": ints(0, 4, 3).view(1, 1, 3)}, {"target": ints(0, -1, 3).view(1, 1, 3)})
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
        "index_get",
        "index.Tensor index.Tensor_out _unsafe_index.Tensor",
        {"self": rows(), "indices": [None, ints(-3, 2)]},
        ({"indices": [None, ints(0, 3)]}, {"indices": [None, ints(-4, 0)]}),
    ),
    Case(
        "gather_rows_fast",
        "index.Tensor",
        {"self": rows(5, 4), "indices": [ints(-5, 4)]},
        ({"indices": [ints(5)]}, {"indices": [ints(-6)]}),
    ),
    Case(
        "gather_rows_fast",
        "gather gather.out",
        {"self": rows(5, 4), "dim": 0, "index": ints(4, 0).view(2, 1).expand(2, 4)},
        ({"index": ints(5, 0).view(2, 1).expand(2, 4)},),
    ),
    Case(
        "gather_rows_fast",
        "embedding embedding.out",
        {"weight": rows(5, 4), "indices": ints(*[4, 0] * 9)},
        ({"indices": ints(*[5, 0] * 9)}, {"indices": ints(*[-1, 0] * 9)}),
    ),
    Case(
        "index_put",
        "index_put index_put_ index_put.out _unsafe_index_put _index_put_impl"
        " _index_put_impl.out _index_put_impl_",
        {"self": rows(), "indices": [ints(-5, 4)], "values": torch.tensor(1.0)},
        ({"indices": [ints(5)]}, {"indices": [ints(-6)]}),
    ),
    Case(
        "index_put_sort",
        "index_put index_put_ index_put.out _unsafe_index_put _index_put_impl"
        " _index_put_impl.out _index_put_impl_",
        {"self": rows(), "indices": [ints(-5, 4)], "values": torch.tensor(1.0), "accumulate": True},
        ({"indices": [ints(5)]}, {"indices": [ints(-6)]}),
    ),
    Case(
        "index_fill",
        "index_fill.int_Scalar index_fill.int_Scalar_out index_fill_.int_Scalar",
        {"self": rows(), "dim": 0, "index": ints(-5, 4), "value": 1.0},
        ({"index": ints(5)}, {"index": ints(-6)}),
    ),
    Case(
        "index_fill",
        "index_fill.int_Tensor index_fill.int_Tensor_out index_fill_.int_Tensor",
        {"self": rows(), "dim": 1, "index": ints(-3, 2), "value": torch.tensor(1.0)},
        ({"index": ints(3)}, {"index": ints(-4)}),
    ),
    Case(
        "index_fill",
        "index_reduce index_reduce.out index_reduce_",
        {**ADD, "reduce": "amax", "include_self": False},
        ({"index": ints(0, 5)}, {"index": ints(-6, 0)}),
    ),
    Case(
        "index_copy",
        "index_copy index_copy.out index_copy_",
        ADD,
        ({"index": ints(0, 5)}, {"index": ints(-1, 0)}),
    ),
    Case(
        "take",
        "take take.out",
        {"self": rows(), "index": ints(-15, 14)},
        ({"index": ints(15)}, {"index": ints(-16)}),
    ),
    Case(
        "put",
        "put put.out put_",
        {"self": rows(), "index": ints(-15, 14), "source": torch.ones(2)},
        ({"index": ints(0, 15)}, {"index": ints(-16, 0)}),
    ),
    Case(
        "masked_scatter",
        "masked_scatter masked_scatter.out masked_scatter_",
        {"self": rows(2, 3), "mask": torch.tensor([True, False, True]), "source": torch.ones(4)},
        ({"source": torch.ones(3)}, {"mask": torch.tensor([True])}),
    ),
    Case(
        "index_add_small",
        "index_add index_add.out index_add_",
        ADD,
        ({"index": ints(0, 5)}, {"index": ints(-1, 0)}),
    ),
    Case(
        "index_add_large",
        "index_add index_add.out index_add_",
        MANY,
        ({"index": ints(*[0, 5] * 9)}, {"index": ints(*[-1, 0] * 9)}),
    ),
    Case(
        "index_add_small",
        "index_reduce index_reduce.out index_reduce_",
        {**ADD, "reduce": "amax"},
        ({"index": ints(0, 5)}, {"index": ints(-1, 0), "include_self": False}),
    ),
    Case(
        "index_add_large",
        "index_reduce index_reduce.out index_reduce_",
        {**MANY, "reduce": "amax"},
        ({"index": ints(*[0, 5] * 9)},),
    ),
    Case(
        "index_select_small",
        "index_select index_select.out",
        {"self": rows(), "dim": 1, "index": ints(*[2, 0] * 8)},
        ({"index": ints(3)}, {"index": ints(-1)}, {"self": rows(5, 0), "dim": 1}),
    ),
    Case(
        "index_select_small",
        "embedding embedding.out",
        {"weight": rows(), "indices": ints(*[4, 0] * 8), "padding_idx": 4},
        ({"indices": ints(5)}, {"indices": ints(-1)}, {"weight": rows(0)}),
    ),
    Case(
        "gather_scatter",
        "index_select index_select.out",
        {"self": rows(), "dim": 1, "index": ints(*[2, 0] * 9)},
        ({"index": ints(*[3, 0] * 9)}, {"index": ints(*[-1, 0] * 9)}),
    ),
    Case(
        "gather_scatter",
        "gather gather.out",
        {"self": rows(), "dim": 1, "index": ints(0, 2).view(2, 1)},
        ({"index": ints(3).view(1, 1)}, {"index": ints(-1).view(1, 1)}),
    ),
    Case(
        "gather_scatter",
        "scatter.src scatter.src_out scatter_.src scatter_add scatter_add.out scatter_add_",
        {"self": rows(), "dim": 1, "index": ints(0, 2).view(2, 1), "src": torch.ones(2, 1)},
        ({"index": ints(3).view(1, 1)}, {"index": ints(-1).view(1, 1)}),
    ),
    Case(
        "gather_scatter",
        "scatter.reduce scatter.reduce_out scatter_.reduce",
        {
            "self": rows(),
            "dim": -1,
            "index": ints(0, 2).view(2, 1),
            "src": torch.ones(2, 1),
            "reduce": "add",
        },
        ({"index": ints(3).view(1, 1)}, {"index": ints(-1).view(1, 1)}),
    ),
    Case(
        "gather_scatter",
        "scatter_reduce.two scatter_reduce.two_out scatter_reduce_.two",
        {
            "self": torch.zeros(3),
            "dim": 0,
            "index": ints(0, 2),
            "src": torch.ones(2),
            "reduce": "amax",
        },
        ({"index": ints(0, 3)}, {"index": ints(-1, 0)}),
    ),
    Case(
        "scatter_add_rows_fast",
        "scatter_add scatter_add.out scatter_add_",
        {
            "self": rows(5, 4),
            "dim": 0,
            "index": ints(0, 4).view(2, 1).expand(2, 4),
            "src": torch.ones(2, 4),
        },
        ({"index": ints(0, 5).view(2, 1).expand(2, 4)},),
    ),
    Case(
        "scatter_add_rows_fast",
        "scatter_reduce.two scatter_reduce.two_out scatter_reduce_.two",
        {
            "self": rows(5, 4),
            "dim": 0,
            "index": ints(0, 4).view(2, 1).expand(2, 4),
            "src": torch.ones(2, 4),
            "reduce": "sum",
        },
        ({"index": ints(-1, 4).view(2, 1).expand(2, 4)},),
    ),
    Case(
        "scatter_value",
        "scatter.value scatter.value_out scatter_.value",
        {"self": rows(), "dim": 1, "index": ints(0, 2).view(2, 1), "value": 1.0},
        ({"index": ints(3).view(1, 1)}, {"index": ints(-1).view(1, 1)}),
    ),
    Case(
        "scatter_value",
        "scatter.value_reduce scatter.value_reduce_out scatter_.value_reduce",
        {"self": rows(), "dim": 1, "index": ints(0, 2).view(2, 1), "value": 1.0, "reduce": "add"},
        ({"index": ints(3).view(1, 1)}, {"index": ints(-1).view(1, 1)}),
    ),
    Case(
        "embedding_renorm",
        "embedding_renorm embedding_renorm.out embedding_renorm_",
        {"self": rows(), "indices": ints(-5, 4), "max_norm": 1.0, "norm_type": 2.0},
        ({"indices": ints(5)}, {"indices": ints(-6)}),
    ),
    *(
        Case(
            "embedding_bag_index",
            "_embedding_bag _embedding_bag.out"
            " _embedding_bag_forward_only _embedding_bag_forward_only.out",
            {**BAG, "mode": mode},
            ({"indices": ints(0, 5, 1)}, {"indices": ints(-1, 0, 1)}),
            f"{kernel}: block: [0,0,0], thread: [0,0,0] Assertion `!has_invalid_index",
        )
        for mode, kernel in ((0, "sum_mean"), (1, "sum_mean"), (2, "max"))
    ),
    *(
        Case(
            "embedding_bag_offsets",
            "_embedding_bag _embedding_bag.out"
            " _embedding_bag_forward_only _embedding_bag_forward_only.out",
            {**BAG, "mode": mode},
            ({"offsets": ints(0, 4)}, {"offsets": ints(0, -1)}),
            f"{kernel}: block: [0,0,0], thread: [0,0,0] Assertion `end >= begin`",
        )
        for mode, kernel in ((0, "sum_mean"), (2, "max"))
    ),
    Case(
        "nll_loss_forward_reduced",
        "nll_loss_forward nll_loss_forward.output",
        FORWARD,
        BAD_TARGETS,
        "t >= 0 && t < n_classes",
    ),
    Case(
        "nll_loss_forward_reduced",
        "nll_loss_forward nll_loss_forward.output",
        {**FORWARD, "self": torch.zeros(4), "target": torch.tensor(3), "reduction": 0},
        ({"target": torch.tensor(4)}, {"target": torch.tensor(-1)}),
        "nll_loss_forward_reduce_cuda_kernel_1d",
    ),
    Case(
        "nll_loss_forward_reduced",
        "nll_loss_forward nll_loss_forward.output",
        {**FORWARD, "target": torch.tensor([0, 1, 3], dtype=torch.uint8)},
        ({"target": torch.tensor([0, 156, 4], dtype=torch.uint8)},),
        "Assertion `t < n_classes`",
    ),
    Case(
        "nll_loss_forward_none",
        "nll_loss_forward nll_loss_forward.output",
        {**FORWARD, "reduction": 0},
        BAD_TARGETS,
        "cur_target >= 0 && cur_target < n_classes",
    ),
    Case(
        "nll_loss_backward_reduced",
        "nll_loss_backward nll_loss_backward.grad_input",
        {**BACKWARD, "grad_output": torch.tensor(1.0)},
        BAD_TARGETS,
        "t >= 0 && t < n_classes",
    ),
    Case(
        "nll_loss_backward_none",
        "nll_loss_backward nll_loss_backward.grad_input",
        {**BACKWARD, "grad_output": torch.ones(3), "reduction": 0},
        BAD_TARGETS,
        "cur_target >= 0 && cur_target < n_classes",
    ),
    Case(
        "nll_loss2d_forward",
        "nll_loss2d_forward nll_loss2d_forward.output",
        FORWARD_2D,
        BAD_TARGETS_2D,
        "nll_loss2d_forward_kernel",
    ),
    Case(
        "nll_loss2d_forward",
        "nll_loss2d_forward nll_loss2d_forward.output",
        {**FORWARD_2D, "reduction": 0},
        BAD_TARGETS_2D,
        "nll_loss2d_forward_no_reduce_kernel",
    ),
    Case(
        "nll_loss2d_backward_reduced",
        "nll_loss2d_backward nll_loss2d_backward.grad_input",
        BACKWARD_2D,
        BAD_TARGETS_2D,
    ),
    Case(
        "nll_loss2d_backward_none",
        "nll_loss2d_backward nll_loss2d_backward.grad_input",
        {**BACKWARD_2D, "reduction": 0, "grad_output": torch.ones(1, 1, 3)},
        BAD_TARGETS_2D,
    ),
    Case(
        "bce_input",
        "binary_cross_entropy binary_cross_entropy.out",
        {"self": torch.tensor([0.0, -0.0, 1.0]), "target": torch.tensor([0.0, 1.0, 0.5])},
        (
            {"self": torch.tensor([0.0, 1.0000001, 1.0])},
            {"self": torch.tensor([0.0, -1e-30, 1.0])},
            {"self": torch.tensor([0.0, NAN, 1.0]), "target": torch.tensor([2.0, 1.0, 0.5])},
        ),
    ),
    Case(
        "bce_target",
        "binary_cross_entropy binary_cross_entropy.out",
        {"self": torch.tensor([0.0, -0.0, 1.0]), "target": torch.tensor([0.0, 1.0, 0.5])},
        (
            {"target": torch.tensor([0.0, 1.0000001, 1.0])},
            {"target": torch.tensor([0.0, NAN, 1.0])},
        ),
    ),
    Case(
        "multi_margin_loss",
        "multi_margin_loss multi_margin_loss.out",
        {"self": rows(2, 4), "target": ints(0, 3)},
        ({"target": ints(0, 4)}, {"target": ints(-1, 0)}),
    ),
    Case(
        "multinomial_renorm",
        "multinomial multinomial.out",
        {"self": torch.tensor([[0.0, 1.0]]), "num_samples": 2, "replacement": True},
        ({"self": torch.tensor([[-0.1, 1.0]])}, {"self": torch.tensor([[-INF, 1.0]])}),
        "!(val < zero)",
    ),
    Case(
        "multinomial_sum",
        "multinomial multinomial.out",
        {"self": torch.tensor([[0.0, 1e-30]]), "num_samples": 2, "replacement": True},
        (
            {"self": torch.tensor([[0.0, 0.0]])},
            {"self": torch.tensor([[NAN, 1.0]])},
            {"self": torch.tensor([[INF, 1.0]])},
            {"self": torch.tensor([[60000.0, 60000.0]], dtype=torch.float16)},
        ),
    ),
    Case(
        "multinomial_fast",
        "multinomial multinomial.out",
        {"self": torch.tensor([0.0, 1.0]), "num_samples": 1},
        (
            {"self": torch.tensor([-1e-30, 1.0])},
            {"self": torch.tensor([NAN, 1.0])},
            {"self": torch.tensor([INF, 1.0])},
        ),
        "probability tensor contains either `inf`, `nan` or element < 0",
    ),
    Case(
        "multinomial_fast",
        "multinomial multinomial.out",
        {"self": torch.tensor([[0.0, 1.0], [0.5, 0.5]]), "num_samples": 2},
        ({"self": torch.tensor([[0.0, 0.0], [0.5, 0.5]])},),
        "invalid multinomial distribution (sum of probabilities <= 0)",
    ),
    Case(
        "bernoulli_tensor",
        "bernoulli bernoulli.out",
        {"self": torch.tensor([0.0, 1.0])},
        (
            {"self": torch.tensor([0.0, 1.0000001])},
            {"self": torch.tensor([-1e-30, 1.0])},
            {"self": torch.tensor([0.0, NAN])},
        ),
        "0 <= p",
    ),
    Case(
        "bernoulli_tensor",
        "bernoulli.Tensor bernoulli.Tensor_out bernoulli_.Tensor",
        {"self": torch.tensor([7.0, 7.0]), "p": torch.tensor([0.0, 1.0])},
        ({"p": torch.tensor([0.0, 1.0000001])}, {"p": torch.tensor([0.0, NAN])}),
        "0 <= p2 && p2 <= 1",
    ),
    Case(
        "poisson",
        "poisson poisson.out",
        {"self": torch.tensor([0.0, 3.0])},
        ({"self": torch.tensor([-1e-30])}, {"self": torch.tensor([NAN])}),
    ),
    Case(
        "repeat_interleave_size",
        "repeat_interleave.Tensor repeat_interleave.Tensor_out",
        {"repeats": ints(1, 0, 2), "output_size": 3},
        ({"output_size": 4}, {"output_size": 2}, {"repeats": ints(1, -1, 2)}),
    ),
    Case(
        "repeat_interleave_negative",
        "repeat_interleave.Tensor repeat_interleave.Tensor_out",
        {"repeats": ints(1, 0, 2), "output_size": 3},
        ({"repeats": ints(2, -1, 2)},),
    ),
    Case(
        "max_unpool2d",
        "max_unpool2d max_unpool2d.out",
        {"self": torch.ones(1, 1, 2), "indices": ints(0, 8).view(1, 1, 2), "output_size": [3, 3]},
        ({"indices": ints(0, 9).view(1, 1, 2)}, {"indices": ints(-1, 0).view(1, 1, 2)}),
    ),
    Case(
        "max_unpool3d",
        "max_unpool3d max_unpool3d.out",
        {
            "self": torch.ones(1, 1, 1, 2),
            "indices": ints(0, 7).view(1, 1, 1, 2),
            "output_size": [2, 2, 2],
            "stride": [2, 2, 2],
            "padding": [0, 0, 0],
        },
        ({"indices": ints(0, 8).view(1, 1, 1, 2)}, {"indices": ints(-1, 0).view(1, 1, 1, 2)}),
    ),
    Case(
        "fractional_max_pool2d_backward",
        "fractional_max_pool2d_backward fractional_max_pool2d_backward.grad_input",
        FRACTIONAL,
        ({"indices": ints(0, 1, 2, 16).view(1, 1, 2, 2)},),
        "inputH < gradInput.size(2)",
    ),
    Case(
        "fractional_max_pool2d_backward",
        "fractional_max_pool2d_backward fractional_max_pool2d_backward.grad_input",
        FRACTIONAL,
        ({"indices": ints(0, 1, -1, 16).view(1, 1, 2, 2)},),
        "index >= 0",
    ),
    Case(
        "fractional_max_pool3d_backward",
        "fractional_max_pool3d_backward fractional_max_pool3d_backward.grad_input",
        FRACTIONAL_3D,
        ({"indices": ints(0, 1, 2, 32).view(1, 1, 1, 2, 2)},),
        "inputT < gradInput.size(2)",
    ),
    Case(
        "fractional_max_pool3d_backward",
        "fractional_max_pool3d_backward fractional_max_pool3d_backward.grad_input",
        FRACTIONAL_3D,
        ({"indices": ints(0, 1, -1, 32).view(1, 1, 1, 2, 2)},),
        "index >= 0",
    ),
    Case(
        "assert_async",
        "_assert_async",
        {"self": torch.tensor(NAN)},
        ({"self": torch.tensor(0.0)}, {"self": torch.tensor([False])}),
        "Assertion `` failed",
    ),
    Case(
        "assert_async",
        "_assert_async.msg",
        {"self": torch.tensor(1), "assert_msg": "lengths must match"},
        ({"self": torch.tensor(0)},),
        "lengths must match",
    ),
    Case(
        "nested_index_put",
        "_assert_async.msg",
        {
            "self": torch.tensor(True),
            "assert_msg": "Some indices in the ragged dimension are out of bounds!",
        },
        ({"self": torch.tensor(False)},),
    ),
    Case(
        "segment_reduce_nd",
        "segment_reduce segment_reduce.out",
        {**SEGMENTS, "lengths": ints(0, 6)},
        ({"lengths": ints(-1, 6)},),
    ),
    Case(
        "segment_reduce_nd",
        "segment_reduce segment_reduce.out",
        {**SEGMENTS, "unsafe": False, "offsets": ints(0, 3, 3, 6)},
        ({"offsets": ints(0, 3, 2, 6)},),
    ),
    Case(
        "segment_reduce_1d_mean",
        "segment_reduce segment_reduce.out",
        {**SEGMENTS, "data": torch.ones(6), "reduce": "mean", "offsets": ints(0, 3, 6)},
        ({"offsets": ints(0, 3, 2)},),
    ),
    Case(
        "sparse_compressed_invariants",
        "_validate_compressed_sparse_indices",
        {**COMPRESSED, "compressed_idx": ints(0, 2, 3), "plain_idx": ints(1, 2, 0)},
        (
            {"compressed_idx": ints(1, 2, 3)},
            {"compressed_idx": ints(0, 2, 2)},
            {"compressed_idx": ints(0, 4, 3)},
            {"plain_idx": ints(1, 3, 0)},
            {"plain_idx": ints(-1, 2, 0)},
            {"plain_idx": ints(2, 1, 0)},
            {"plain_idx": ints(1, 1, 0)},
        ),
    ),
]


@dataclass(frozen=True)
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
        "index_select index_select.out",
        {"self": torch.ones(3, 0), "dim": 0, "index": ints(3)},
        {"index": ints(2)},
    ),
    SilentCase(
        "embedding embedding.out",
        {"weight": torch.ones(3, 0), "indices": ints(-1)},
        {"indices": ints(0)},
    ),
    SilentCase(
        "index_select index_select.out",
        {"self": rows(), "dim": 0, "index": ints(2**32 + 1)},
        {"index": ints(1)},
    ),
    SilentCase(
        "index_add index_add_ index_reduce index_reduce_",
        {**ADD, "index": ints(0, 2**32 + 1), "reduce": "amax"},
        {"index": ints(0, 1)},
    ),
    SilentCase(
        "max_unpool2d",
        {
            "self": torch.ones(1, 1, 1),
            "indices": ints(2**32 + 1).view(1, 1, 1),
            "output_size": [2, 2],
        },
        {"indices": ints(1).view(1, 1, 1)},
    ),
    SilentCase(
        "fractional_max_pool2d_backward",
        {**FRACTIONAL, "indices": torch.full((1, 1, 2, 2), 2**32 + 1)},
        {"indices": torch.full((1, 1, 2, 2), 1)},
    ),
    SilentCase(
        "multi_margin_loss", {"self": rows(1, 4), "target": ints(2**32 + 1)}, {"target": ints(1)}
    ),
    SilentCase("index.Tensor", {"self": torch.ones(3, 0), "indices": [ints(3)]}),
    SilentCase(
        "_index_put_impl_",
        {
            "self": rows(),
            "indices": [ints(5)],
            "values": torch.tensor(1.0),
            "accumulate": True,
            "unsafe": True,
        },
    ),
    SilentCase(
        "index_fill_.int_Scalar index_fill.int_Scalar",
        {"self": torch.ones(3, 0), "dim": 0, "index": ints(7), "value": 1.0},
    ),
    SilentCase(
        "index_copy index_copy_ index_add index_add_",
        {"self": rows(3, 0), "dim": 0, "index": ints(3), "source": rows(1, 0)},
    ),
    SilentCase(
        "_embedding_bag _embedding_bag_forward_only",
        {**BAG, "offsets": ints(1, 3)},
        {"offsets": ints(0, 3)},
    ),
    SilentCase(
        "_embedding_bag _embedding_bag_forward_only",
        {**BAG, "offsets": ints(0, 2, 9), "include_last_offset": True},
        {"offsets": ints(0, 2, 3)},
    ),
    SilentCase(
        "_embedding_bag _embedding_bag_forward_only",
        {**BAG, "offsets": ints(0), "include_last_offset": True, "mode": 2},
        {"indices": ints()},
    ),
    SilentCase(
        "_embedding_bag _embedding_bag_forward_only",
        {**BAG, "weight": torch.ones(3, 0)},
        {"indices": ints(0, 2, 1)},
    ),
    SilentCase(
        "segment_reduce segment_reduce.out",
        {**SEGMENTS, "data": torch.ones(6), "offsets": ints(0, 3, 2)},
        {"offsets": ints(0, 3, 3)},
    ),
    SilentCase("segment_reduce", {**SEGMENTS, "lengths": ints(6, 1)}),
    SilentCase(
        "segment_reduce", {**SEGMENTS, "offsets": ints(0, 3, 7)}, {"offsets": ints(0, 3, 6)}
    ),
    SilentCase(
        "multi_margin_loss_backward multi_margin_loss_backward.grad_input",
        {**MARGIN, "target": ints(0, 4), "p": 1, "margin": 1.0},
        {"target": ints(0, 3)},
    ),
    SilentCase(
        "multilabel_margin_loss_forward multilabel_margin_loss_forward.output",
        {**MARGIN, "target": ints(0, 4, -1, 0, 0, -2, -1, 0).view(2, 4)},
        {"target": ints(0, 3, -1, 0, 0, -1, -1, 0).view(2, 4)},
    ),
    SilentCase(
        "multilabel_margin_loss_backward multilabel_margin_loss_backward.grad_input",
        {
            **MARGIN,
            "target": ints(0, 4, -1, 0, 0, 1, -1, 0).view(2, 4),
            "is_target": torch.zeros(2, 4),
        },
        {"target": ints(0, 3, -1, 0, 0, 1, -1, 0).view(2, 4)},
    ),
    SilentCase(
        "_ctc_loss",
        {**CTC, "input_lengths": [3], "target_lengths": [2]},
        {"targets": ints(1, 3).view(1, 2)},
    ),
    SilentCase(
        "_ctc_loss.Tensor",
        {**CTC, "input_lengths": ints(3), "target_lengths": ints(2)},
        {"targets": ints(1, 3).view(1, 2)},
    ),
    SilentCase(
        "_ctc_loss_backward",
        {
            **CTC,
            "input_lengths": [3],
            "target_lengths": [2],
            "grad": torch.ones(1),
            "neg_log_likelihood": torch.ones(1),
            "log_alpha": torch.zeros(1, 3, 5),
        },
    ),
    SilentCase(
        "_ctc_loss_backward.Tensor",
        {
            **CTC,
            "input_lengths": ints(3),
            "target_lengths": ints(2),
            "grad": torch.ones(1),
            "neg_log_likelihood": torch.ones(1),
            "log_alpha": torch.zeros(1, 3, 5),
        },
    ),
    SilentCase(
        "max_pool2d_with_indices_backward max_pool2d_with_indices_backward.grad_input"
        " adaptive_max_pool2d_backward adaptive_max_pool2d_backward.grad_input",
        POOL,
        {"indices": ints(3).view(1, 1, 1, 1)},
    ),
    SilentCase(
        "max_pool3d_with_indices_backward max_pool3d_with_indices_backward.grad_input"
        " adaptive_max_pool3d_backward adaptive_max_pool3d_backward.grad_input",
        POOL_3D,
        {"indices": ints(3).view(1, 1, 1, 1, 1)},
    ),
    SilentCase(
        "embedding_dense_backward embedding_dense_backward.out",
        {
            "grad_output": torch.ones(2, 3),
            "indices": ints(0, 5),
            "num_weights": 5,
            "padding_idx": -1,
            "scale_grad_by_freq": True,
        },
        {"indices": ints(0, 4)},
    ),
    SilentCase(
        "_embedding_bag_dense_backward _embedding_bag_dense_backward.out",
        BAG_GRADIENT,
        {"indices": ints(0, 2)},
    ),
    SilentCase(
        "_embedding_bag_backward",
        {**BAG_GRADIENT, "offsets": ints(0), "sparse": False},
        {"indices": ints(0, 2)},
    ),
    SilentCase(
        "_embedding_bag_dense_backward",
        {**BAG_GRADIENT, "mode": 2, "maximum_indices": ints(0, 9).view(1, 2)},
        {"maximum_indices": ints(0, 2).view(1, 2)},
    ),
    SilentCase(
        "_embedding_bag_per_sample_weights_backward _embedding_bag_per_sample_weights_backward.out",
        {**BAG_GRADIENT, "weight": torch.ones(3, 2), "offsets": ints(0)},
        {"indices": ints(0, 2)},
    ),
    SilentCase(
        "_segment_reduce_backward _segment_reduce_backward.out",
        {**SEGMENT_GRADIENT, "offsets": ints(0, 3, 7)},
        {"offsets": ints(0, 3, 6)},
    ),
    SilentCase(
        "_segment_reduce_backward",
        {**SEGMENT_GRADIENT, "lengths": ints(6, 1)},
        {"lengths": ints(0, 0)},
    ),
    SilentCase(
        "_convert_indices_from_coo_to_csr _convert_indices_from_coo_to_csr.out",
        {"self": ints(0, 3), "size": 3},
        {"self": ints(0, 2)},
    ),
    SilentCase(
        "_convert_indices_from_csr_to_coo _convert_indices_from_csr_to_coo.out",
        {"crow_indices": ints(0, 3, 2), "col_indices": ints(0, 1)},
        {"crow_indices": ints(0, 2, 2)},
    ),
    SilentCase(
        "_jagged_to_padded_dense_forward",
        {"values": torch.ones(3, 1), "offsets": [ints(0, 1, 9)], "max_lengths": [2]},
    ),
    SilentCase(
        "linalg_lu_solve linalg_lu_solve.out",
        {**SOLVE, "LU": torch.eye(2), "pivots": ints(1, 3).int()},
        {"pivots": ints(1, 2).int()},
    ),
    SilentCase(
        "linalg_ldl_solve linalg_ldl_solve.out",
        {**SOLVE, "LD": torch.eye(2), "pivots": ints(-3, 2).int()},
        {"pivots": ints(1, 2).int()},
    ),
    SilentCase(
        "lu_unpack lu_unpack.out",
        {"LU_data": torch.eye(2), "LU_pivots": ints(0, 2).int()},
        {"LU_pivots": ints(1, 2).int()},
    ),
]
