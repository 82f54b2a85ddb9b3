"""One table of calls: at the bound of what CUDA accepts, one step beyond it, and what it says then.

It is read from the kernels' sources and knows nothing of the guards, which are held against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, ones, tensor, zeros

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


class At:
    """The values of one argument, at the bound and one step beyond; numbers become tensors."""

    def __init__(self, *values: Any) -> None:
        self.values = tuple(tensor(v) if _is_numbers(v) else v for v in values)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and not any(
        item is None or isinstance(item, Tensor) for item in value
    )


def one(op: str, /, *args: Any, **options: Any) -> tuple[str, dict[str, Any]]:
    """Return a single call: its op, and its arguments by the names of the schema."""
    name = f"aten::{op}"
    names = [argument.name for argument in op_of(name)._schema.arguments]
    return name, {**dict(zip(names, args, strict=False)), **options}


def case(
    of: str,
    args: tuple[Any, ...],
    words: str = "",
    more: dict[str, Any] | None = None,
    /,
    **options: Any,
) -> Case:
    """Return a case of ``record: ops``, or of the op that has the record's name, in all forms.

    Args:
        words: what the line of CUDA contains.
        more: values of several arguments that are beyond the bound together.
    """
    record, _, ops = of.partition(": ")
    ops = ops or record
    _, given = one(ops.split(maxsplit=1)[0], *args, **options)
    varied = {name: value.values for name, value in given.items() if isinstance(value, At)}
    at_bound = {**given, **{name: values[0] for name, values in varied.items()}}
    beyond = [{name: value} for name, values in varied.items() for value in values[1:]]
    return Case(record, all_forms(ops), at_bound, (*beyond, *([more] if more else [])), words)


def silent(ops: str, args: tuple[Any, ...], /, **options: Any) -> SilentCase:
    """Return a silent case; lists of numbers are tensors."""
    _, given = one(ops.split(maxsplit=1)[0], *args, **options)
    return SilentCase(all_forms(ops), given)


def op_of(name: str) -> Any:
    """Return an overload of torch's own by its name, such as ``gather`` or ``scatter.src``."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def all_forms(ops: str) -> tuple[str, ...]:
    """Return the overloads, in place and with ``out=`` too, that take what these ops take."""
    return tuple(dict.fromkeys(form for op in ops.split() for form in _forms(op)))


# The functional form makes them.
_UNREACHED = {"_ctc_loss.out", "_ctc_loss.Tensor_out", "_ctc_loss_backward.out"}


def _forms(op: str) -> Iterator[str]:
    name, wanted = op.partition(".")[0], _inputs(op_of(op))
    for packet in (name, f"{name}_"):
        for overload in getattr(getattr(torch.ops.aten, packet, None), "overloads", list)():
            form = packet if overload == "default" else f"{packet}.{overload}"
            if form not in _UNREACHED and _inputs(op_of(form)) == wanted:
                yield form


def _inputs(op: Any) -> list[tuple[str, str]]:
    return [(item.name, str(item.type)) for item in op._schema.arguments if not item.is_out]


def ints(*values: int) -> Tensor:
    return tensor(values, dtype=torch.int64)


def many(*values: int) -> Tensor:
    """Return one index more than the kernels of few indices take."""
    return ints(*values * 9)[:17]


def floats(*values: float) -> Tensor:
    return tensor(values)


def rows(count: int = 5, width: int = 3) -> Tensor:
    return torch.arange(float(count * width)).reshape(count, width)


def columns(*values: int) -> Tensor:
    """Return an index of whole rows, as those of the row kernels are expanded."""
    return ints(*values).view(2, 1).expand(2, 4)


LABELS = At([0, -100, 3], [0, 4, 3], [0, -1, 3])
LABELS_2D = At([[[0, -100, 3]]], [[[0, 4, 3]]], [[[0, -1, 3]]])
EACH, MEAN, SUM = ((None, reduction, -100) for reduction in range(3))
"""Weight, reduction and ``ignore_index`` of a negative log likelihood."""
WORDS = "t >= 0 && t < n_classes"
EACH_WORDS = "cur_target >= 0 && cur_target < n_classes"
ONE, TWO = tensor(1.0), tensor(2.0)
ROW_INDEX = At([0, 4], [0, 5], [-1, 0])
MANY_ROWS = At(many(0, 4), many(0, 5), many(-1, 0))
ANY_ROWS = At([ints(-5, 4)], [ints(5)], [ints(-6)])
CELLS = At([[0], [2]], [[0], [3]], [[-1], [0]])
BAGS = "_embedding_bag _embedding_bag_forward_only"
BAG = (rows(5, 2), ints(0, 4, 1), ints(0, 3))
PUTS = "index_put _unsafe_index_put _index_put_impl"
FIRST_THREAD = "block: [0,0,0], thread: [0,0,0] Assertion"

CASES = [
    case(
        "index_get: index.Tensor _unsafe_index.Tensor",
        (rows(), At([None, ints(-3, 2)], [None, ints(0, 3)], [None, ints(-4, 0)])),
    ),
    case("gather_rows_fast: index.Tensor", (rows(5, 4), ANY_ROWS)),
    case("gather_rows_fast: gather", (rows(5, 4), 0, At(columns(4, 0), columns(5, 0)))),
    case("gather_rows_fast: embedding", (rows(5, 4), At(many(4, 0), many(5, 0), many(-1, 0)))),
    case(f"index_put: {PUTS}", (rows(), ANY_ROWS, ONE)),
    case(f"index_put_sort: {PUTS}", (rows(), ANY_ROWS, ONE, True)),
    case("index_fill: index_fill.int_Scalar", (rows(), 0, At([-5, 4], [5], [-6]), 1.0)),
    case("index_fill: index_fill.int_Tensor", (rows(), 1, At([-3, 2], [3], [-4]), ONE)),
    case(
        "index_fill: index_reduce",
        (rows(), 0, At([0, 4], [0, 5], [-6, 0]), ones(2, 3), "amax"),
        include_self=False,
    ),
    case("index_copy", (rows(), 0, ROW_INDEX, ones(2, 3))),
    case("take", (rows(), At([-15, 14], [15], [-16]))),
    case("put", (rows(), At([-15, 14], [0, 15], [-16, 0]), ones(2))),
    case("masked_scatter", (rows(2, 3), At([True, False, True], [True]), At(ones(4), ones(3)))),
    case("index_add_small: index_add", (rows(), 0, ROW_INDEX, ones(2, 3))),
    case("index_add_large: index_add", (rows(), 0, MANY_ROWS, ones(17, 3))),
    case(
        "index_add_small: index_reduce",
        (rows(), 0, At([0, 4], [0, 5]), ones(2, 3), "amax"),
        "",
        {"index": ints(-1, 0), "include_self": False},
    ),
    case(
        "index_add_large: index_reduce",
        (rows(), 0, At(many(0, 4), many(0, 5)), ones(17, 3), "amax"),
    ),
    case(
        "index_select_small: index_select",
        (rows(), 1, At([2, 0] * 8, [3], [-1])),
        "",
        {"self": rows(5, 0), "dim": 1},
    ),
    case("index_select_small: embedding", (At(rows(), rows(0)), At([4, 0] * 8, [5], [-1]), 4)),
    case("gather_scatter: index_select", (rows(), 1, At(many(2, 0), many(3, 0), many(-1, 0)))),
    case("gather_scatter: gather", (rows(), 1, CELLS)),
    case("gather_scatter: scatter.src scatter_add", (rows(), 1, CELLS, ones(2, 1))),
    case("gather_scatter: scatter.reduce", (rows(), -1, CELLS, ones(2, 1)), reduce="add"),
    case(
        "gather_scatter: scatter_reduce.two",
        (zeros(3), 0, At([0, 2], [0, 3], [-1, 0]), ones(2), "amax"),
    ),
    case(
        "scatter_add_rows_fast: scatter_add",
        (rows(5, 4), 0, At(columns(0, 4), columns(0, 5)), ones(2, 4)),
    ),
    case(
        "scatter_add_rows_fast: scatter_reduce.two",
        (rows(5, 4), 0, At(columns(0, 4), columns(-1, 4)), ones(2, 4), "sum"),
    ),
    case("scatter_value: scatter.value", (rows(), 1, CELLS, 1.0)),
    case("scatter_value: scatter.value_reduce", (rows(), 1, CELLS, 1.0), reduce="add"),
    case("embedding_renorm", (rows(), At([-5, 4], [5], [-6]), 1.0, 2.0)),
    *(
        case(
            f"embedding_bag_index: {BAGS}",
            (BAG[0], At([0, 4, 1], [0, 5, 1], [-1, 0, 1]), BAG[2]),
            f"{kernel}: {FIRST_THREAD} `!has_invalid_index",
            mode=mode,
        )
        for mode, kernel in ((0, "sum_mean"), (1, "sum_mean"), (2, "max"))
    ),
    *(
        case(
            f"embedding_bag_offsets: {BAGS}",
            (*BAG[:2], At([0, 3], [0, 4], [0, -1])),
            f"{kernel}: {FIRST_THREAD} `end >= begin`",
            mode=mode,
        )
        for mode, kernel in ((0, "sum_mean"), (2, "max"))
    ),
    case("nll_loss_forward_reduced: nll_loss_forward", (zeros(3, 4), LABELS, *MEAN), WORDS),
    *(
        case(
            "nll_loss_forward_reduced: nll_loss_forward",
            (zeros(4), At(tensor(3), tensor(4), tensor(-1)), *reduction),
            "nll_loss_forward_reduce_cuda_kernel_1d",
        )
        for reduction in (EACH, MEAN)
    ),
    case(
        "nll_loss_forward_reduced: nll_loss_forward",
        (zeros(3, 4), LABELS, *SUM),
        "nll_loss_forward_reduce_cuda_kernel_2d",
    ),
    case(
        "nll_loss_forward_reduced: nll_loss_forward",
        (zeros(3, 4), At(ints(0, 1, 3).byte(), ints(0, 156, 4).byte()), *MEAN),
        "Assertion `t < n_classes`",
    ),
    case("nll_loss_forward_none: nll_loss_forward", (zeros(3, 4), LABELS, *EACH), EACH_WORDS),
    case(
        "nll_loss_backward_reduced: nll_loss_backward",
        (ONE, zeros(3, 4), LABELS, *MEAN, TWO),
        WORDS,
    ),
    case(
        "nll_loss_backward_none: nll_loss_backward",
        (ones(3), zeros(3, 4), LABELS, *EACH, TWO),
        EACH_WORDS,
    ),
    case("nll_loss2d_forward", (zeros(1, 4, 1, 3), LABELS_2D, *MEAN), "nll_loss2d_forward_kernel"),
    case(
        "nll_loss2d_forward",
        (zeros(1, 4, 1, 3), LABELS_2D, *EACH),
        "nll_loss2d_forward_no_reduce_kernel",
    ),
    case(
        "nll_loss2d_backward_reduced: nll_loss2d_backward",
        (ONE, zeros(1, 4, 1, 3), LABELS_2D, *MEAN, TWO),
    ),
    case(
        "nll_loss2d_backward_none: nll_loss2d_backward",
        (ones(1, 1, 3), zeros(1, 4, 1, 3), LABELS_2D, *EACH, TWO),
    ),
    case(
        "bce_input: binary_cross_entropy",
        (At([0.0, -0.0, 1.0], [0.0, 1.0000001, 1.0], [0.0, -1e-30, 1.0]), floats(0.0, 1.0, 0.5)),
        "",
        {"self": floats(0.0, NAN, 1.0), "target": floats(2.0, 1.0, 0.5)},
    ),
    case(
        "bce_target: binary_cross_entropy",
        (floats(0.0, -0.0, 1.0), At([0.0, 1.0, 0.5], [0.0, 1.0000001, 1.0], [0.0, NAN, 1.0])),
    ),
    case("multi_margin_loss", (rows(2, 4), At([0, 3], [0, 4], [-1, 0]))),
    case(
        "multinomial_renorm: multinomial",
        (At([[0.0, 1.0]], [[-0.1, 1.0]], [[-INF, 1.0]]), 2, True),
        "!(val < zero)",
    ),
    case(
        "multinomial_sum: multinomial",
        (
            At(
                [[0.0, 1e-30]],
                [[0.0, 0.0]],
                [[NAN, 1.0]],
                [[INF, 1.0]],
                tensor([[6e4, 6e4]]).half(),
            ),
            *(2, True),
        ),
    ),
    case(
        "multinomial_fast: multinomial",
        (At([0.0, 1.0], [-1e-30, 1.0], [NAN, 1.0], [INF, 1.0]), 1),
        "probability tensor contains either `inf`, `nan` or element < 0",
    ),
    case(
        "multinomial_fast: multinomial",
        (At([[0.0, 1.0], [0.5, 0.5]], [[0.0, 0.0], [0.5, 0.5]]), 2),
        "invalid multinomial distribution (sum of probabilities <= 0)",
    ),
    case(
        "bernoulli_tensor: bernoulli",
        (At([0.0, 1.0], [0.0, 1.0000001], [-1e-30, 1.0], [0.0, NAN]),),
        "0 <= p",
    ),
    case(
        "bernoulli_tensor: bernoulli.Tensor",
        (floats(7.0, 7.0), At([0.0, 1.0], [0.0, 1.0000001], [0.0, NAN])),
        "0 <= p2 && p2 <= 1",
    ),
    case("poisson", (At([0.0, 3.0], [-1e-30], [NAN]),)),
    case(
        "repeat_interleave_size: repeat_interleave.Tensor",
        (At([1, 0, 2], [1, -1, 2]),),
        output_size=At(3, 4, 2),
    ),
    case(
        "repeat_interleave_negative: repeat_interleave.Tensor",
        (At([1, 0, 2], [2, -1, 2]),),
        output_size=3,
    ),
    case("max_unpool2d", (ones(1, 1, 2), At([[[0, 8]]], [[[0, 9]]], [[[-1, 0]]]), [3, 3])),
    case(
        "max_unpool3d",
        (ones(1, 1, 1, 2), At([[[[0, 7]]]], [[[[0, 8]]]], [[[[-1, 0]]]])),
        **{"output_size": [2, 2, 2], "stride": [2, 2, 2], "padding": [0, 0, 0]},
    ),
    case(
        "assert_async: _assert_async",
        (At(tensor(NAN), tensor(0.0), [False]),),
        "Assertion `` failed",
    ),
    case(
        "assert_async: _assert_async.msg",
        (At(tensor(1), tensor(0)), "lengths must match"),
        "lengths must match",
    ),
    case(
        "nested_index_put: _assert_async.msg",
        (
            At(tensor(True), tensor(False)),
            "Some indices in the ragged dimension are out of bounds!",
        ),
    ),
    case(
        "segment_reduce_nd: segment_reduce",
        (rows(6, 2), "sum"),
        lengths=At([0, 6], [-1, 6]),
        unsafe=True,
    ),
    case(
        "segment_reduce_nd: segment_reduce",
        (rows(6, 2), "sum"),
        offsets=At([0, 3, 3, 6], [0, 3, 2, 6]),
    ),
    case(
        "segment_reduce_1d_mean: segment_reduce",
        (ones(6), "mean"),
        offsets=At([0, 3, 6], [0, 3, 2]),
        unsafe=True,
    ),
    case(
        "sparse_compressed_invariants: _validate_compressed_sparse_indices",
        (
            True,
            At([0, 2, 3], [1, 2, 3], [0, 2, 2], [0, 4, 3]),
            At([1, 2, 0], [1, 3, 0], [-1, 2, 0], [2, 1, 0], [1, 1, 0]),
            *(2, 3, 3),
        ),
    ),
]

WRAPPING = 2**32 + 1  # as 32 bits it is 1
OF_BAGS = (ints(0, 0), ints(2), ints())
"""The bag of each index, the size of the bag, and no maxima."""
SCORES = (zeros(3, 1, 4).log_softmax(-1), ints(1, 4).view(1, 2))
ALIGNED = (ones(1), zeros(1, 3, 5))
"""What the forward pass of CTC leaves for the backward one."""
UNCHECKED = [
    silent("index_select", (rows(), 0, ints(WRAPPING))),
    silent("index_add index_reduce", (rows(), 1, ints(0, WRAPPING), ones(5, 2)), reduce="amax"),
    silent("max_unpool2d", (ones(1, 1, 1), ints(WRAPPING).view(1, 1, 1), [2, 2])),
    silent("multi_margin_loss", (rows(1, 4), ints(WRAPPING))),
    silent("_index_put_impl_", (rows(), [ints(5)], ONE, True, True)),
    silent("segment_reduce", (ones(6), "sum"), offsets=ints(0, 3, 2), unsafe=True),
    silent("segment_reduce", (rows(6, 2), "sum"), lengths=ints(6, 1), unsafe=True),
    silent("segment_reduce", (rows(6, 2), "sum"), offsets=ints(0, 3, 7), unsafe=True),
    silent("multi_margin_loss_backward", (ONE, rows(2, 4), ints(0, 4), 1, 1.0)),
    silent(
        "multilabel_margin_loss_forward", (rows(2, 4), tensor([[0, 4, -1, 0], [0, -1, -1, 0]]), 1)
    ),
    silent(
        "multilabel_margin_loss_backward",
        (ONE, rows(2, 4), tensor([[0, 4, -1, 0], [0, 1, -1, 0]]), 1, zeros(2, 4)),
    ),
    silent("_ctc_loss", (*SCORES, [3], [2])),
    silent("_ctc_loss.Tensor", (*SCORES, ints(3), ints(2))),
    silent("_ctc_loss_backward", (ones(1), *SCORES, [3], [2], *ALIGNED, 0)),
    silent("_ctc_loss_backward.Tensor", (ones(1), *SCORES, ints(3), ints(2), *ALIGNED, 0)),
    silent("embedding_dense_backward", (ones(2, 3), ints(0, 5), 5, -1, True)),
    silent(
        "_embedding_bag_dense_backward",
        (ones(1, 2), ints(0, 9), *OF_BAGS, 3, False, 0, None),
    ),
    silent(
        "_embedding_bag_backward",
        (ones(1, 2), ints(0, 9), ints(0), *OF_BAGS, 3, False, 0, False, None),
    ),
    silent(
        "_embedding_bag_per_sample_weights_backward",
        (ones(1, 2), ones(3, 2), ints(0, 9), ints(0), OF_BAGS[0], 0),
    ),
]
"""What a kernel reads beyond the bound without a word: a guard finds it."""
UNREAD = [
    silent("index_select", (ones(3, 0), 0, ints(3))),
    silent("embedding", (ones(3, 0), ints(-1, 3, 2**40, -(2**40)))),
    silent("index.Tensor", (ones(3, 0), [ints(3)])),
    silent("index.Tensor", (zeros(3, 4), [tensor([[9]]), ints()])),
    silent("index.Tensor", (zeros(3, 4), [tensor([False, False, False]), ints(9)])),
    silent("index_copy", (zeros(1, 0), 0, ints(1), zeros(1, 0))),
    silent(BAGS, (zeros(3, 2), ints(9), ints())),
    silent(BAGS, (zeros(3, 0), ints(9), ints(0, 9))),
    silent("index_fill.int_Scalar", (ones(3, 0), 0, ints(7), 1.0)),
    silent("index_copy index_add", (rows(3, 0), 0, ints(3), rows(1, 0))),
    silent(BAGS, (*BAG[:2], ints(1, 3))),
    silent(BAGS, (*BAG[:2], ints(0, 2, 9)), include_last_offset=True),
    silent(BAGS, (BAG[0], ints(0, 4, 1), ints(0)), include_last_offset=True, mode=2),
    silent(BAGS, (ones(3, 0), ints(0, 4, 1), BAG[2])),
]
"""Values that no kernel reads, though the CPU kernel does: guards find nothing."""
