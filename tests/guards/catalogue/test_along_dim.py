"""Guards of one indexed dimension: which calls they judge, by which interval and which kernel."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, ones, tensor, zeros

from cudalens.core.report_types import Violation
from tests.cpu_guards import assert_said, deterministic, said_id
from tests.releases import takes_modulo
from tests.verdicts import ask

aten = torch.ops.aten
NINE = tensor([9])
"""Outside every dimension here."""
SHARED = torch.sparse_coo_tensor([[0, 1]], ones(2, 3), (2, 3), check_invariants=True)
"""One sparse dimension, one dense."""


def found(name: str, *args: Any, **options: Any) -> Violation | None:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet), overload or "default")
    return next(iter(dict(ask(op, *args, **options)).values()), None)


REFUSED_OR_IDLE: list[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = [
    # Each with a call next to it that is launched.
    ("gather", (zeros(2, 5), 1, tensor([[9]] * 2)), (zeros(2, 5), 1, tensor([[9]] * 3))),
    ("gather", (zeros(2, 5), 1, tensor([[9]])), (zeros(2, 5), 2, tensor([[9]]))),
    ("gather", (zeros(2, 5), 1, tensor([[9]])), (zeros(2, 5), 1, tensor([9]))),
    ("gather", (zeros(2, 5), -1, tensor([[9] * 6])), (zeros(2, 5), -2, tensor([[9] * 6]))),
    ("scatter.src", (zeros(5), 0, NINE, ones(1)), (zeros(5), 0, NINE, ones(1).double())),
    ("scatter.value", (zeros(2, 5), -1, tensor([[9] * 6]), 1), (zeros(5), 0, tensor([[9] * 6]), 1)),
    ("scatter.src", (zeros(5), 0, NINE, ones(1)), (zeros(5), 1, NINE, ones(1))),
    ("scatter.src", (zeros(5), 0, tensor([0, 9]), ones(2)), (zeros(5), 0, tensor([0, 9]), ones(1))),
    (
        "scatter.src",
        (zeros(2, 5), 1, tensor([[9]] * 2), ones(2, 1)),
        (zeros(2, 5), 1, tensor([[9]] * 3), ones(3, 1)),
    ),
    ("index_select", (zeros(2, 5), 1, NINE), (zeros(2, 5), 1, tensor([[9]]))),
    ("index_select", (zeros(2, 5), 1, NINE), (zeros(0, 5), 1, NINE)),
    ("index_select", (zeros(2, 5), 0, NINE), (zeros(2, 0), 0, NINE)),
    ("index_select", (zeros(2, 0), 1, NINE), (zeros(2, 0), 0, NINE)),
    ("index_select", (zeros(()), 0, NINE), (zeros(()), 0, tensor([0, 9]))),
    ("index_select", (SHARED, 0, NINE), (SHARED, 1, NINE)),
    ("index_select", (SHARED, 0, NINE), (SHARED, 0, NINE.int())),
    (
        "index_add",
        (zeros(3, 2), 0, NINE, ones(1, 2)),
        (zeros(3, 2), 0, tensor([0, 9]), ones(1, 2)),
    ),
    ("index_add", (zeros(3, 2), 0, NINE, ones(1, 2)), (zeros(3, 2), 0, NINE, ones(1, 3))),
    ("index_add", (zeros(3, 2), 1, NINE, ones(3, 1)), (zeros(3, 2), 1, NINE, ones(2, 1))),
    ("index_add", (zeros(3, 2), 0, NINE, ones(1, 2)), (zeros(3, 2), 2, NINE, ones(1, 2))),
    ("index_add", (zeros(3), 0, NINE, ones(1)), (zeros(3), 0, NINE, ones(1).double())),
    ("index_add", (zeros(3), 0, NINE, ones(1)), (zeros(3), 0, tensor([[9]]), ones(1))),
    ("index_add", (zeros(3), 0, NINE, ones(1)), (zeros(3), 0, NINE, ones(2))),
    ("index_add", (zeros(3, 2), 0, NINE, ones(1, 2)), (zeros(3, 0), 0, NINE, ones(1, 0))),
    ("index_copy", (zeros(3), 0, NINE, ones(())), (zeros(3, 2), 0, NINE, ones(()))),
    ("index_copy", (zeros(3, 2), 0, NINE, ones(1, 2)), (zeros(3, 2), 0, NINE, ones(1, 3))),
    ("index_copy", (zeros(3), 0, NINE, ones(1)), (zeros(3), 0, NINE.int(), ones(1))),
    ("index_copy", (zeros(3), 0, NINE, ones(1)), (zeros(0), 0, NINE, ones(1))),
    ("index_fill.int_Scalar", (zeros(3), 0, NINE, 1.0), (zeros(3), 0, NINE.int(), 1.0)),
    ("index_fill.int_Scalar", (zeros(3), 0, NINE, 1.0), (zeros(3), 0, tensor([[9]]), 1.0)),
    ("index_fill.int_Scalar", (zeros(3), 0, NINE, 1.0), (zeros(3, 0), 0, NINE, 1.0)),
]


@pytest.mark.parametrize(("op", "launched", "other"), REFUSED_OR_IDLE)
def test_what_torch_refuses_or_does_not_launch_is_not_judged(
    op: str, launched: tuple[Any, ...], other: tuple[Any, ...]
) -> None:
    assert found(op, *launched) is not None
    assert found(op, *other) is None


def test_a_0_dim_tensor_takes_a_row_of_one() -> None:
    assert found("index_add", zeros(()), 0, tensor(0), ones(())) is None
    assert found("index_add", zeros(()), 0, tensor(1), ones(())) is not None
    assert found("index_add", zeros(()), 0, tensor([1]), ones(1)) is not None


SCATTERED = (zeros(5), 0, tensor([0, 5]))
WRITES: list[tuple[str, tuple[Any, ...], dict[str, Any], bool, dict[str, Any]]] = [
    # op, arguments, keywords, under deterministic algorithms, what is said of the index 5
    ("scatter.src", (*SCATTERED, ones(2)), {}, False, {"bounds.text": "0 … 4"}),
    ("scatter.src", (*SCATTERED, ones(2)), {}, True, {"bounds.text": "-5 … 4"}),
    ("scatter.value", (*SCATTERED, 1.0), {}, True, {"bounds.text": "0 … 4"}),
    ("scatter.reduce", (*SCATTERED, ones(2)), {"reduce": "add"}, True, {"bounds.text": "-5 … 4"}),
    (
        "scatter.reduce",
        (*SCATTERED, ones(2)),
        {"reduce": "multiply"},
        True,
        {"bounds.text": "0 … 4"},
    ),
    ("scatter_add", (*SCATTERED, ones(2)), {}, False, {"bounds.text": "0 … 4"}),
    ("scatter_add", (*SCATTERED, ones(2)), {}, True, {"bounds.text": "-5 … 4"}),
    *(
        (
            "scatter_reduce.two",
            (*SCATTERED, ones(2), reduce),
            {"include_self": include},
            True,
            {"bounds.text": "-5 … 4" if is_put else "0 … 4"},
        )
        for reduce, include, is_put in (
            ("sum", True, True),
            ("mean", True, True),
            ("amax", True, False),
            ("sum", False, False),
        )
    ),
    ("index_add", (*SCATTERED, ones(2)), {}, False, {"bounds.text": "0 … 4"}),
    ("index_add", (*SCATTERED, ones(2)), {}, True, {"bounds.text": "-5 … 4"}),
    ("index_reduce", (*SCATTERED, ones(2), "amax"), {}, True, {"bounds.text": "0 … 4"}),
    ("index_copy", (*SCATTERED, ones(2)), {}, False, {"bounds.text": "0 … 4"}),
    ("index_copy", (*SCATTERED, ones(2)), {}, True, {"bounds.text": "-5 … 4"}),
    ("index_fill.int_Scalar", (*SCATTERED, 1.0), {}, False, {"bounds.text": "-5 … 4"}),
]


@pytest.mark.parametrize(("op", "args", "options", "is_set", "said"), WRITES)
def test_negative_indices_count_from_the_end_where_the_kernel_lets_them(
    op: str, args: tuple[Any, ...], options: dict[str, Any], is_set: bool, said: dict[str, Any]
) -> None:
    """Deterministic algorithms write by ``index_put_``."""
    with deterministic() if is_set else nullcontext():
        assert_said(found(op, *args, **options), {"at": [(1,)], **said})


ONE, TWO = (tensor([5]), ones(1)), (tensor([5, 5]), ones(2))


@pytest.mark.parametrize(
    ("op", "call", "line"),
    [
        ("scatter.src", ONE, "IndexKernel.cu:111"),
        ("scatter.src", TWO, "TensorCompare.cu:121"),
        ("scatter_add", ONE, "TensorCompare.cu:121"),
        ("index_copy", ONE, "IndexKernel.cu:111"),
        ("index_copy", TWO, "TensorCompare.cu:121"),
        ("index_add", ONE, "TensorCompare.cu:121"),
    ],
)
def test_what_deterministic_algorithms_assert(
    op: str, call: tuple[Tensor, Tensor], line: str
) -> None:
    """Several indices are sorted first, and so are those whose values are added."""
    with deterministic():
        assert_said(found(op, zeros(5), 0, *call), {"line": line})


@pytest.mark.parametrize(
    ("op", "written", "line"),
    [
        ("scatter.src", (ones(2),), "ScatterGatherKernel.cu:257"),
        ("scatter.value", (1.0,), "ScatterGatherKernel.cu:504"),
        ("index_copy", (ones(2),), "IndexKernel.cu:193"),
        ("index_fill.int_Scalar", (1.0,), "IndexKernel.cu:154"),
    ],
)
def test_the_kernel_that_writes_asserts(op: str, written: tuple[Any, ...], line: str) -> None:
    assert_said(found(op, *SCATTERED, *written), {"line": line})


def test_one_index_of_a_row_is_sorted_too() -> None:
    with deterministic():
        row = found("index_copy", zeros(5, 2), 0, tensor([5]), ones(1, 2))
    assert_said(row, {"line": "TensorCompare.cu:121"})


def spread(value: int, rows: int = 1) -> Tensor:
    return tensor([[value]] * rows).expand(rows, 4)


@pytest.mark.parametrize(
    ("reduce", "include", "rows", "line"),
    [
        ("sum", True, zeros(5, 4), "IndexKernelUtils.cu:241"),
        ("sum", True, zeros(4, 5).t(), "ScatterGatherKernel.cu:257"),
        ("amax", True, zeros(5, 4), "ScatterGatherKernel.cu:257"),
        ("sum", False, zeros(5, 4), "ScatterGatherKernel.cu:504"),
    ],
)
def test_the_kernel_that_reduces_whole_rows(
    reduce: str, include: bool, rows: Tensor, line: str
) -> None:
    """Sums of whole rows have one; without ``include_self`` a fill comes before all others."""
    violation = found(
        "scatter_reduce.two", rows, 0, spread(5), ones(1, 4), reduce, include_self=include
    )
    assert_said(violation, {"line": line})


@pytest.mark.parametrize(("index", "line"), [(-3, "Indexing.cu:1034"), (3, "IndexKernel.cu:154")])
def test_rows_are_filled_first_where_they_are_not_reduced_with_themselves(
    index: int, line: str
) -> None:
    """The fill lets negative values wrap, so that they fail in the kernel behind it."""
    call = (zeros(2, 3), 1, tensor([index]), ones(2, 1), "amax")
    assert_said(found("index_reduce", *call, include_self=True), {"line": "Indexing.cu:1034"})
    assert_said(found("index_reduce", *call, include_self=False), {"line": line})


@takes_modulo
@pytest.mark.parametrize(
    ("data", "index", "dim", "said"),
    [
        (zeros(3), tensor([-3, 2]), 0, None),
        (zeros(3), tensor([-4]), 0, {"bounds.text": "-3 … 2", "is_silent": True}),
        (zeros(2, 3), tensor([[3]]), -1, {"dim": 1, "bounds.text": "-3 … 2"}),
        (zeros(2, 3), tensor([[3], [0]]), 1, {"at": [(0, 0)]}),
        (zeros(2, 3), tensor([[3], [0], [0]]), 1, None),
        (zeros(2, 3), tensor([[3, 0]]), 0, None),
        (zeros(3), tensor([3]), None, None),
        (zeros(3), tensor([3]).int(), 0, None),
        (zeros(3), tensor([[3]]), 0, None),
        (zeros(3), tensor([3]), 1, None),
        (zeros(()), tensor(3), 0, None),
    ],
    ids=said_id,
)
def test_an_index_that_is_taken_modulo_the_size(
    data: Tensor, index: Tensor, dim: int | None, said: dict[str, Any] | None
) -> None:
    assert_said(found("take_along_dim", data, index, dim), said)
