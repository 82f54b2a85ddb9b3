"""Calls at the bound of what CUDA accepts, one step beyond it, and beyond what it looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cudalens.simulate.asserts.rule import _forms

NAN = float("nan")
INF = float("inf")


@dataclass(frozen=True)
class Case:
    """A call at the bound, the values one step beyond, and the assertion they meet."""

    record: str
    ops: tuple[str, ...]
    at_bound: dict[str, Any]
    beyond: tuple[dict[str, Any], ...]
    expression: str


@dataclass(frozen=True)
class SilentCase:
    """A call that CUDA runs without a word while the CPU kernel raises or writes out of bounds."""

    ops: tuple[str, ...]
    given: dict[str, Any]
    values: dict[str, Any]


def case(of: str, given: dict[str, Any], words: str = "", /, *more: Any, **values: Any) -> Case:
    """Return a case of ``record: ops``, or of the op that has the record's name, in all forms.

    Each of ``values`` is first the one at the bound, then those beyond it; ``more`` are values of
    several arguments that are beyond it together.
    """
    record, _, ops = of.partition(": ")
    at_bound = {**given, **{name: choices[0] for name, choices in values.items()}}
    beyond = [{name: value} for name, choices in values.items() for value in choices[1:]]
    return Case(record, all_forms(ops or record), at_bound, (*beyond, *more), words)


def silent(ops: str, given: dict[str, Any], /, **values: Any) -> SilentCase:
    """Return a silent case; each of ``values`` is the one given, then what it is repaired into."""
    given = {**given, **{name: pair[0] for name, pair in values.items()}}
    return SilentCase(all_forms(ops), given, {name: pair[1] for name, pair in values.items()})


def all_forms(ops: str) -> tuple[str, ...]:
    """Return the overloads, in place and with ``out=`` too, that take what these ops take."""
    found = (form.removeprefix("aten::") for op in ops.split() for form in _forms(op))
    return tuple(dict.fromkeys(found))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def floats(*values: float) -> Tensor:
    return torch.tensor(values)


def rows(count: int = 5, width: int = 3) -> Tensor:
    return torch.arange(float(count * width)).reshape(count, width)


def columns(*values: int) -> Tensor:
    """Return an index of whole rows, as those of the row kernels are expanded."""
    return ints(*values).view(2, 1).expand(2, 4)


TARGETS = {"target": ints(0, -100, 3), "weight": None, "reduction": 1, "ignore_index": -100}
FORWARD = {"self": torch.zeros(3, 4), **TARGETS}
BACKWARD = {**FORWARD, "total_weight": torch.tensor(2.0)}
FORWARD_2D = {**FORWARD, "self": torch.zeros(1, 4, 1, 3), "target": ints(0, -100, 3).view(1, 1, 3)}
BACKWARD_2D = {**FORWARD_2D, "total_weight": torch.tensor(2.0), "grad_output": torch.tensor(1.0)}
LABELS = (ints(0, -100, 3), ints(0, 4, 3), ints(0, -1, 3))
MARGIN_LABELS = (ints(0, 3), ints(0, 4), ints(-1, 0))
WORDS = "t >= 0 && t < n_classes"
EACH_WORDS = "cur_target >= 0 && cur_target < n_classes"
LABELS_2D = tuple(item.view(1, 1, 3) for item in LABELS)
ADD = {"self": rows(), "dim": 0, "index": ints(0, 4), "source": torch.ones(2, 3)}
MANY = {**ADD, "source": torch.ones(18, 3)}
ROW_INDEX = (ints(0, 4), ints(0, 5), ints(-1, 0))
MANY_ROWS = tuple(ints(*values * 9) for values in ([0, 4], [0, 5], [-1, 0]))
BAG = {"weight": rows(5, 2), "indices": ints(0, 4, 1), "offsets": ints(0, 3)}
BAGS = "_embedding_bag _embedding_bag_forward_only"
PUTS = "index_put _unsafe_index_put _index_put_impl"
FIRST_THREAD = "block: [0,0,0], thread: [0,0,0] Assertion"
CELLS = (ints(0, 2).view(2, 1), ints(0, 3).view(2, 1), ints(-1, 0).view(2, 1))
CELL_WRITES = {"self": rows(), "dim": 1}
ROWS_FAST = {"self": rows(5, 4), "dim": 0, "src": torch.ones(2, 4)}
SEGMENTS = {"data": rows(6, 2), "reduce": "sum", "axis": 0, "unsafe": True}
UNPOOL_3D = {"output_size": [2, 2, 2], "stride": [2, 2, 2], "padding": [0, 0, 0]}


def plane(rank: int) -> dict[str, Any]:
    """Return the sizes of pooling in windows of two by two."""
    flat = [1] * (rank - 2)
    return {"kernel_size": [*flat, 2, 2], "stride": [*flat, 2, 2], "padding": [0] * rank}


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


def fractional(rank: int, words: str, *beyond: int) -> Case:
    given = {2: FRACTIONAL, 3: FRACTIONAL_3D}[rank]
    name = f"fractional_max_pool{rank}d_backward"
    return case(name, given, words, {"indices": ints(*beyond).view_as(given["indices"])})


CASES = [
    case(
        "index_get: index.Tensor _unsafe_index.Tensor",
        {"self": rows()},
        indices=([None, ints(-3, 2)], [None, ints(0, 3)], [None, ints(-4, 0)]),
    ),
    case(
        "gather_rows_fast: index.Tensor",
        {"self": rows(5, 4)},
        indices=([ints(-5, 4)], [ints(5)], [ints(-6)]),
    ),
    case(
        "gather_rows_fast: gather",
        {"self": rows(5, 4), "dim": 0},
        index=(columns(4, 0), columns(5, 0)),
    ),
    case(
        "gather_rows_fast: embedding",
        {"weight": rows(5, 4)},
        indices=tuple(ints(*[value, 0] * 9) for value in (4, 5, -1)),
    ),
    *(
        case(
            f"{record}: {PUTS}",
            {"self": rows(), "values": torch.tensor(1.0), **mode},
            indices=([ints(-5, 4)], [ints(5)], [ints(-6)]),
        )
        for record, mode in (("index_put", {}), ("index_put_sort", {"accumulate": True}))
    ),
    case(
        "index_fill: index_fill.int_Scalar",
        {"self": rows(), "dim": 0, "value": 1.0},
        index=(ints(-5, 4), ints(5), ints(-6)),
    ),
    case(
        "index_fill: index_fill.int_Tensor",
        {"self": rows(), "dim": 1, "value": torch.tensor(1.0)},
        index=(ints(-3, 2), ints(3), ints(-4)),
    ),
    case(
        "index_fill: index_reduce",
        {**ADD, "reduce": "amax", "include_self": False},
        index=(ints(0, 4), ints(0, 5), ints(-6, 0)),
    ),
    case("index_copy", ADD, index=ROW_INDEX),
    case("take", {"self": rows()}, index=(ints(-15, 14), ints(15), ints(-16))),
    case(
        "put",
        {"self": rows(), "source": torch.ones(2)},
        index=(ints(-15, 14), ints(0, 15), ints(-16, 0)),
    ),
    case(
        "masked_scatter",
        {"self": rows(2, 3)},
        mask=(torch.tensor([True, False, True]), torch.tensor([True])),
        source=(torch.ones(4), torch.ones(3)),
    ),
    case("index_add_small: index_add", ADD, index=ROW_INDEX),
    case("index_add_large: index_add", MANY, index=MANY_ROWS),
    case(
        "index_add_small: index_reduce",
        {**ADD, "reduce": "amax"},
        "",
        {"index": ints(-1, 0), "include_self": False},
        index=ROW_INDEX[:2],
    ),
    case("index_add_large: index_reduce", {**MANY, "reduce": "amax"}, index=MANY_ROWS[:2]),
    case(
        "index_select_small: index_select",
        {"self": rows(), "dim": 1},
        "",
        {"self": rows(5, 0), "dim": 1},
        index=(ints(*[2, 0] * 8), ints(3), ints(-1)),
    ),
    case(
        "index_select_small: embedding",
        {"padding_idx": 4},
        weight=(rows(), rows(0)),
        indices=(ints(*[4, 0] * 8), ints(5), ints(-1)),
    ),
    case(
        "gather_scatter: index_select",
        {"self": rows(), "dim": 1},
        index=tuple(ints(*[value, 0] * 9) for value in (2, 3, -1)),
    ),
    case("gather_scatter: gather", {"self": rows(), "dim": 1}, index=CELLS),
    case(
        "gather_scatter: scatter.src scatter_add",
        {**CELL_WRITES, "src": torch.ones(2, 1)},
        index=CELLS,
    ),
    case(
        "gather_scatter: scatter.reduce",
        {"self": rows(), "dim": -1, "src": torch.ones(2, 1), "reduce": "add"},
        index=CELLS,
    ),
    case(
        "gather_scatter: scatter_reduce.two",
        {"self": torch.zeros(3), "dim": 0, "src": torch.ones(2), "reduce": "amax"},
        index=(ints(0, 2), ints(0, 3), ints(-1, 0)),
    ),
    case("scatter_add_rows_fast: scatter_add", ROWS_FAST, index=(columns(0, 4), columns(0, 5))),
    case(
        "scatter_add_rows_fast: scatter_reduce.two",
        {**ROWS_FAST, "reduce": "sum"},
        index=(columns(0, 4), columns(-1, 4)),
    ),
    *(
        case(f"scatter_value: {op}", {**CELL_WRITES, "value": 1.0, **mode}, index=CELLS)
        for op, mode in (("scatter.value", {}), ("scatter.value_reduce", {"reduce": "add"}))
    ),
    case(
        "embedding_renorm",
        {"self": rows(), "max_norm": 1.0, "norm_type": 2.0},
        indices=(ints(-5, 4), ints(5), ints(-6)),
    ),
    *(
        case(
            f"embedding_bag_index: {BAGS}",
            {**BAG, "mode": mode},
            f"{kernel}: {FIRST_THREAD} `!has_invalid_index",
            indices=(ints(0, 4, 1), ints(0, 5, 1), ints(-1, 0, 1)),
        )
        for mode, kernel in ((0, "sum_mean"), (1, "sum_mean"), (2, "max"))
    ),
    *(
        case(
            f"embedding_bag_offsets: {BAGS}",
            {**BAG, "mode": mode},
            f"{kernel}: {FIRST_THREAD} `end >= begin`",
            offsets=(ints(0, 3), ints(0, 4), ints(0, -1)),
        )
        for mode, kernel in ((0, "sum_mean"), (2, "max"))
    ),
    case("nll_loss_forward_reduced: nll_loss_forward", FORWARD, WORDS, target=LABELS),
    case(
        "nll_loss_forward_reduced: nll_loss_forward",
        {**FORWARD, "self": torch.zeros(4), "reduction": 0},
        "nll_loss_forward_reduce_cuda_kernel_1d",
        target=tuple(torch.tensor(value) for value in (3, 4, -1)),
    ),
    case(
        "nll_loss_forward_reduced: nll_loss_forward",
        FORWARD,
        "Assertion `t < n_classes`",
        target=(ints(0, 1, 3).to(torch.uint8), ints(0, 156, 4).to(torch.uint8)),
    ),
    case(
        "nll_loss_forward_none: nll_loss_forward",
        {**FORWARD, "reduction": 0},
        EACH_WORDS,
        target=LABELS,
    ),
    case(
        "nll_loss_backward_reduced: nll_loss_backward",
        {**BACKWARD, "grad_output": torch.tensor(1.0)},
        WORDS,
        target=LABELS,
    ),
    case(
        "nll_loss_backward_none: nll_loss_backward",
        {**BACKWARD, "grad_output": torch.ones(3), "reduction": 0},
        EACH_WORDS,
        target=LABELS,
    ),
    *(
        case("nll_loss2d_forward", {**FORWARD_2D, "reduction": reduction}, kernel, target=LABELS_2D)
        for reduction, kernel in (
            (1, "nll_loss2d_forward_kernel"),
            (0, "nll_loss2d_forward_no_reduce_kernel"),
        )
    ),
    case("nll_loss2d_backward_reduced: nll_loss2d_backward", BACKWARD_2D, target=LABELS_2D),
    case(
        "nll_loss2d_backward_none: nll_loss2d_backward",
        {**BACKWARD_2D, "reduction": 0, "grad_output": torch.ones(1, 1, 3)},
        target=LABELS_2D,
    ),
    case(
        "bce_input: binary_cross_entropy",
        {"target": floats(0.0, 1.0, 0.5)},
        "",
        {"self": floats(0.0, NAN, 1.0), "target": floats(2.0, 1.0, 0.5)},
        self=(floats(0.0, -0.0, 1.0), floats(0.0, 1.0000001, 1.0), floats(0.0, -1e-30, 1.0)),
    ),
    case(
        "bce_target: binary_cross_entropy",
        {"self": floats(0.0, -0.0, 1.0)},
        target=(floats(0.0, 1.0, 0.5), floats(0.0, 1.0000001, 1.0), floats(0.0, NAN, 1.0)),
    ),
    case("multi_margin_loss", {"self": rows(2, 4)}, target=MARGIN_LABELS),
    case(
        "multinomial_renorm: multinomial",
        {"num_samples": 2, "replacement": True},
        "!(val < zero)",
        self=tuple(floats(value, 1.0).view(1, 2) for value in (0.0, -0.1, -INF)),
    ),
    case(
        "multinomial_sum: multinomial",
        {"num_samples": 2, "replacement": True},
        "",
        {"self": floats(60000.0, 60000.0).half().view(1, 2)},
        self=tuple(
            floats(*pair).view(1, 2) for pair in ((0.0, 1e-30), (0.0, 0.0), (NAN, 1.0), (INF, 1.0))
        ),
    ),
    case(
        "multinomial_fast: multinomial",
        {"num_samples": 1},
        "probability tensor contains either `inf`, `nan` or element < 0",
        self=tuple(floats(value, 1.0) for value in (0.0, -1e-30, NAN, INF)),
    ),
    case(
        "multinomial_fast: multinomial",
        {"num_samples": 2},
        "invalid multinomial distribution (sum of probabilities <= 0)",
        self=tuple(torch.tensor([[0.0, value], [0.5, 0.5]]) for value in (1.0, 0.0)),
    ),
    case(
        "bernoulli_tensor: bernoulli",
        {},
        "0 <= p",
        self=(floats(0.0, 1.0), floats(0.0, 1.0000001), floats(-1e-30, 1.0), floats(0.0, NAN)),
    ),
    case(
        "bernoulli_tensor: bernoulli.Tensor",
        {"self": floats(7.0, 7.0)},
        "0 <= p2 && p2 <= 1",
        p=(floats(0.0, 1.0), floats(0.0, 1.0000001), floats(0.0, NAN)),
    ),
    case("poisson", {}, self=(floats(0.0, 3.0), floats(-1e-30), floats(NAN))),
    case(
        "repeat_interleave_size: repeat_interleave.Tensor",
        {},
        repeats=(ints(1, 0, 2), ints(1, -1, 2)),
        output_size=(3, 4, 2),
    ),
    case(
        "repeat_interleave_negative: repeat_interleave.Tensor",
        {"output_size": 3},
        repeats=(ints(1, 0, 2), ints(2, -1, 2)),
    ),
    case(
        "max_unpool2d",
        {"self": torch.ones(1, 1, 2), "output_size": [3, 3]},
        indices=tuple(ints(*pair).view(1, 1, 2) for pair in ((0, 8), (0, 9), (-1, 0))),
    ),
    case(
        "max_unpool3d",
        {"self": torch.ones(1, 1, 1, 2), **UNPOOL_3D},
        indices=tuple(ints(*pair).view(1, 1, 1, 2) for pair in ((0, 7), (0, 8), (-1, 0))),
    ),
    fractional(2, "inputH < gradInput.size(2)", 0, 1, 2, 16),
    fractional(2, "index >= 0", 0, 1, -1, 16),
    fractional(3, "inputT < gradInput.size(2)", 0, 1, 2, 32),
    fractional(3, "index >= 0", 0, 1, -1, 32),
    case(
        "assert_async: _assert_async",
        {},
        "Assertion `` failed",
        self=(torch.tensor(NAN), torch.tensor(0.0), torch.tensor([False])),
    ),
    case(
        "assert_async: _assert_async.msg",
        {"assert_msg": "lengths must match"},
        "lengths must match",
        self=(torch.tensor(1), torch.tensor(0)),
    ),
    case(
        "nested_index_put: _assert_async.msg",
        {"assert_msg": "Some indices in the ragged dimension are out of bounds!"},
        self=(torch.tensor(True), torch.tensor(False)),
    ),
    case("segment_reduce_nd: segment_reduce", SEGMENTS, lengths=(ints(0, 6), ints(-1, 6))),
    case(
        "segment_reduce_nd: segment_reduce",
        {**SEGMENTS, "unsafe": False},
        offsets=(ints(0, 3, 3, 6), ints(0, 3, 2, 6)),
    ),
    case(
        "segment_reduce_1d_mean: segment_reduce",
        {**SEGMENTS, "data": torch.ones(6), "reduce": "mean"},
        offsets=(ints(0, 3, 6), ints(0, 3, 2)),
    ),
    case(
        "sparse_compressed_invariants: _validate_compressed_sparse_indices",
        {"is_crow": True, "cdim": 2, "dim": 3, "nnz": 3},
        compressed_idx=(ints(0, 2, 3), ints(1, 2, 3), ints(0, 2, 2), ints(0, 4, 3)),
        plain_idx=tuple(
            ints(*columns) for columns in ((1, 2, 0), (1, 3, 0), (-1, 2, 0), (2, 1, 0), (1, 1, 0))
        ),
    ),
]

MARGIN = {"self": rows(2, 4), "reduction": 1, "grad_output": torch.tensor(1.0)}
CTC = {"log_probs": torch.zeros(3, 1, 4).log_softmax(-1), "blank": 0}
CTC_LISTS = {**CTC, "input_lengths": [3], "target_lengths": [2]}
CTC_TENSORS = {**CTC, "input_lengths": ints(3), "target_lengths": ints(2)}
CTC_GRADIENT = {
    "targets": ints(1, 4).view(1, 2),
    "grad": torch.ones(1),
    "neg_log_likelihood": torch.ones(1),
    "log_alpha": torch.zeros(1, 3, 5),
}
CTC_TARGETS = (ints(1, 4).view(1, 2), ints(1, 3).view(1, 2))
POOL = {
    **plane(2),
    "grad_output": torch.ones(1, 1, 1, 1),
    "self": torch.ones(1, 1, 2, 2),
    "dilation": [1, 1],
    "ceil_mode": False,
    "indices": ints(4).view(1, 1, 1, 1),
}
POOL_3D = {
    **plane(3),
    **{name: POOL[name].unsqueeze(2) for name in ("grad_output", "self", "indices")},
    "dilation": [1, 1, 1],
    "ceil_mode": False,
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
BAG_ROWS = (ints(0, 9), ints(0, 2))
SEGMENT_GRADIENT = {
    "grad": torch.ones(2),
    "output": torch.ones(2),
    "data": torch.ones(6),
    "reduce": "sum",
    "lengths": None,
    "offsets": None,
    "axis": 0,
}
WRAPPING = 2**32 + 1  # as 32 bits it is 1
REPAIRS = [
    silent("index_select", {"self": torch.ones(3, 0), "dim": 0}, index=(ints(3), ints(2))),
    silent("embedding", {"weight": torch.ones(3, 0)}, indices=(ints(-1), ints(0))),
    silent("index_select", {"self": rows(), "dim": 0}, index=(ints(WRAPPING), ints(1))),
    silent(
        "index_add index_reduce", {**ADD, "reduce": "amax"}, index=(ints(0, WRAPPING), ints(0, 1))
    ),
    silent(
        "max_unpool2d",
        {"self": torch.ones(1, 1, 1), "output_size": [2, 2]},
        indices=(ints(WRAPPING).view(1, 1, 1), ints(1).view(1, 1, 1)),
    ),
    silent(
        "fractional_max_pool2d_backward",
        FRACTIONAL,
        indices=(torch.full((1, 1, 2, 2), WRAPPING), torch.full((1, 1, 2, 2), 1)),
    ),
    silent("multi_margin_loss", {"self": rows(1, 4)}, target=(ints(WRAPPING), ints(1))),
    silent("index.Tensor", {"self": torch.ones(3, 0), "indices": [ints(3)]}),
    silent(
        "_index_put_impl_",
        {
            "self": rows(),
            "indices": [ints(5)],
            "values": torch.tensor(1.0),
            "accumulate": True,
            "unsafe": True,
        },
    ),
    silent(
        "index_fill.int_Scalar",
        {"self": torch.ones(3, 0), "dim": 0, "index": ints(7), "value": 1.0},
    ),
    silent(
        "index_copy index_add",
        {"self": rows(3, 0), "dim": 0, "index": ints(3), "source": rows(1, 0)},
    ),
    silent(BAGS, BAG, offsets=(ints(1, 3), ints(0, 3))),
    silent(BAGS, {**BAG, "include_last_offset": True}, offsets=(ints(0, 2, 9), ints(0, 2, 3))),
    silent(
        BAGS,
        {**BAG, "offsets": ints(0), "include_last_offset": True, "mode": 2},
        indices=(ints(0, 4, 1), ints()),
    ),
    silent(BAGS, {**BAG, "weight": torch.ones(3, 0)}, indices=(ints(0, 4, 1), ints(0, 2, 1))),
    silent(
        "segment_reduce",
        {**SEGMENTS, "data": torch.ones(6)},
        offsets=(ints(0, 3, 2), ints(0, 3, 3)),
    ),
    silent("segment_reduce", {**SEGMENTS, "lengths": ints(6, 1)}),
    silent("segment_reduce", SEGMENTS, offsets=(ints(0, 3, 7), ints(0, 3, 6))),
    silent(
        "multi_margin_loss_backward",
        {**MARGIN, "p": 1, "margin": 1.0},
        target=(ints(0, 4), ints(0, 3)),
    ),
    silent(
        "multilabel_margin_loss_forward",
        MARGIN,
        target=(
            ints(0, 4, -1, 0, 0, -2, -1, 0).view(2, 4),
            ints(0, 3, -1, 0, 0, -1, -1, 0).view(2, 4),
        ),
    ),
    silent(
        "multilabel_margin_loss_backward",
        {**MARGIN, "is_target": torch.zeros(2, 4)},
        target=(
            ints(0, 4, -1, 0, 0, 1, -1, 0).view(2, 4),
            ints(0, 3, -1, 0, 0, 1, -1, 0).view(2, 4),
        ),
    ),
    silent("_ctc_loss", CTC_LISTS, targets=CTC_TARGETS),
    silent("_ctc_loss.Tensor", CTC_TENSORS, targets=CTC_TARGETS),
    silent("_ctc_loss_backward", {**CTC_LISTS, **CTC_GRADIENT}),
    silent("_ctc_loss_backward.Tensor", {**CTC_TENSORS, **CTC_GRADIENT}),
    *(
        silent(
            f"max_pool{rank}d_with_indices_backward adaptive_max_pool{rank}d_backward",
            given,
            indices=(given["indices"], torch.full_like(given["indices"], 3)),
        )
        for rank, given in ((2, POOL), (3, POOL_3D))
    ),
    silent(
        "embedding_dense_backward",
        {
            "grad_output": torch.ones(2, 3),
            "num_weights": 5,
            "padding_idx": -1,
            "scale_grad_by_freq": True,
        },
        indices=(ints(0, 5), ints(0, 4)),
    ),
    silent("_embedding_bag_dense_backward", BAG_GRADIENT, indices=BAG_ROWS),
    silent(
        "_embedding_bag_backward",
        {**BAG_GRADIENT, "offsets": ints(0), "sparse": False},
        indices=BAG_ROWS,
    ),
    silent(
        "_embedding_bag_dense_backward",
        {**BAG_GRADIENT, "mode": 2},
        maximum_indices=(ints(0, 9).view(1, 2), ints(0, 2).view(1, 2)),
    ),
    silent(
        "_embedding_bag_per_sample_weights_backward",
        {**BAG_GRADIENT, "weight": torch.ones(3, 2), "offsets": ints(0)},
        indices=BAG_ROWS,
    ),
    silent("_segment_reduce_backward", SEGMENT_GRADIENT, offsets=(ints(0, 3, 7), ints(0, 3, 6))),
    silent("_segment_reduce_backward", SEGMENT_GRADIENT, lengths=(ints(6, 1), ints(0, 0))),
    silent("_convert_indices_from_coo_to_csr", {"size": 3}, self=(ints(0, 3), ints(0, 2))),
    silent(
        "_convert_indices_from_csr_to_coo",
        {"col_indices": ints(0, 1)},
        crow_indices=(ints(0, 3, 2), ints(0, 2, 2)),
    ),
    silent(
        "_jagged_to_padded_dense_forward",
        {"values": torch.ones(3, 1), "offsets": [ints(0, 1, 9)], "max_lengths": [2]},
    ),
    silent(
        "linalg_lu_solve",
        {"B": torch.ones(2, 1), "LU": torch.eye(2)},
        pivots=(ints(1, 3).int(), ints(1, 2).int()),
    ),
    silent(
        "linalg_ldl_solve",
        {"B": torch.ones(2, 1), "LD": torch.eye(2)},
        pivots=(ints(-3, 2).int(), ints(1, 2).int()),
    ),
    silent("lu_unpack", {"LU_data": torch.eye(2)}, LU_pivots=(ints(0, 2).int(), ints(1, 2).int())),
]
