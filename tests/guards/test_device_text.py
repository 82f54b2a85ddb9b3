"""What guards foretell of a call: CUDA's line, an error of torch's, or nothing at all."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import ones, tensor, zeros

from cudalens.core.device_asserts import READ_RELEASE
from cudalens.simulate import Simulation
from tests.calls import MEAN, floats, ints, many, one, op_of, rows
from tests.cpu_guards import deterministic
from tests.releases import release
from tests.verdicts import ask, call, finding, on_device

Given = tuple[str, dict[str, Any]]
WIDE = tensor([2**32])
ROWS = ("index_reduce_", zeros(3), 0)
COLUMNS = ("index_reduce_", zeros(2, 3), 1, WIDE, ones(2, 1), "amax")
PLACE = ("scatter_reduce_.two", zeros(3), 0, ints(3), ones(1))
LINES: list[tuple[str | None, bool, Given]] = [
    # Up to 16 indices, more of them, and whole aligned rows are three kernels.
    ("indexSelectSmallIndex", False, one("embedding", zeros(3, 4), ints(*[3] * 16))),
    ("ScatterGatherKernel.cu:257", False, one("embedding", zeros(3, 3), many(3, 3))),
    ("IndexKernelUtils.cu:22", False, one("embedding", zeros(3, 4), many(3, 3))),
    ("Indexing.cu:1034", False, one("index_add_", zeros(3), 0, ints(*[3] * 16), ones(16))),
    *(
        (line, False, one("index.Tensor", zeros(3, 4), indices))
        for line, indices in (
            ("IndexKernelUtils.cu:22", [ints(9)]),
            ("IndexKernel.cu:111", [None, ints(9)]),
            ("IndexKernel.cu:111", [ints(0), ints(9)]),
        )
    ),
    # Without include_self rows and places are filled first; that fill knows negatives.
    ("Indexing.cu:1034", False, one(*ROWS, ints(3), ones(1), "amax")),
    ("IndexKernel.cu:154", False, one(*ROWS, ints(3), ones(1), "amax", include_self=False)),
    ("Indexing.cu:1034", False, one(*ROWS, ints(-1), ones(1), "amax", include_self=False)),
    *(
        (f"ScatterGatherKernel.cu:{line}", False, one(*PLACE, reduce, include_self=has_self))
        for line, has_self in ((257, True), (504, False))
        for reduce in ("amax", "sum")
    ),
    # Deterministic algorithms sort, or put a single value; sums are sorted always, those of one
    # value too.
    ("IndexKernel.cu:111", False, one("index_put_", rows(), [ints(0, 5)], ones(2, 3))),
    ("IndexKernel.cu:111", True, one("index_put_", rows(), [ints(5)], ones(()))),
    ("TensorCompare.cu:121", False, one("index_put_", rows(), [ints(5)], ones(()), True)),
    ("TensorCompare.cu:121", True, one("index_put_", rows(), [ints(0, 5)], ones(2, 3))),
    ("IndexKernel.cu:111", True, one("scatter_.src", zeros(3), 0, ints(3), ones(1))),
    ("TensorCompare.cu:121", True, one("scatter_.src", zeros(3), 0, ints(3, 3), ones(2))),
    ("TensorCompare.cu:121", True, one("scatter_add_", zeros(3), 0, ints(3), ones(1))),
    ("IndexKernel.cu:111", True, one("index_copy_", zeros(3), 0, ints(3), ones(1))),
    ("TensorCompare.cu:121", True, one("index_copy_", zeros(3), 0, ints(3, 3), ones(2))),
    # These kernels compare all bits, as do others with many indices.
    ("", False, one("gather", zeros(3), 0, WIDE)),
    ("", False, one("index.Tensor", zeros(3), [WIDE])),
    ("", False, one("index_select", zeros(3), 0, WIDE.expand(17))),
    ("", False, one("embedding", zeros(3, 2), WIDE.expand(17))),
    ("", False, one("index_copy_", zeros(3), 0, WIDE, ones(1))),
    ("", False, one("max_unpool3d", ones(1, 1, 1, 1), WIDE.view(1, 1, 1, 1), [1, 1, 3])),
    # The fill before a reduction compares all bits, the reduction 32.
    (None, False, one(*COLUMNS)),
    ("IndexKernel.cu:154", False, one(*COLUMNS, include_self=False)),
]


@pytest.mark.parametrize(("line", "is_deterministic", "given"), LINES)
def test_the_line_is_that_of_the_kernel_that_runs(
    line: str | None, is_deterministic: bool, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes, layout, mode and values pick the kernel; ``None``: it asserts nothing here."""
    monkeypatch.setattr(torch, "__version__", READ_RELEASE)
    with deterministic() if is_deterministic else nullcontext():
        found = finding(*given)
    assert found is not None and (found.device_text is None) == (line is None)
    assert (line or "") in (found.device_text or "")


@pytest.mark.parametrize(
    ("op", "reduce", "include_self", "wraps"),
    [
        ("index_add_", (), True, True),
        ("index_copy_", (), True, True),
        ("scatter_add_", (), True, True),
        ("scatter_.src", (), True, True),
        *(("scatter_reduce_.two", (name,), True, True) for name in ("sum", "mean")),
        *(("scatter_reduce_.two", (name,), True, False) for name in ("amax", "prod")),
        ("scatter_reduce_.two", ("sum",), False, False),
    ],
)
def test_deterministic_writes_let_negatives_wrap(
    op: str, reduce: tuple[str, ...], include_self: bool, wraps: bool
) -> None:
    """Those by index_put_: rows, sums and means; a fill before them knows no negatives."""
    options = {} if include_self else {"include_self": False}
    last, before = (
        one(op, zeros(3), 0, ints(0, value), ones(2), *reduce, **options) for value in (-3, -4)
    )
    assert finding(*last) is not None
    with deterministic():
        assert (finding(*last) is None) == wraps
        assert finding(*before) is not None


REFUSED: list[Given] = [
    one("gather", zeros(3), 1, ints(9)),
    one("gather", zeros(3), 0, ints(9).short()),
    one("gather", zeros(2, 3), 1, tensor([[9], [9], [9]])),
    one("scatter_.src", zeros(3), 0, ints(9, 9), ones(1)),
    one("index_select", zeros(3), 0, tensor([[9]])),
    one("take_along_dim", zeros(3), ints(9).int(), 0),
    one("take_along_dim", zeros(3), tensor([[9]]), 0),
    one("nll_loss_forward", zeros(3, 4), ints(9), *MEAN),
    one("nll_loss_forward", zeros(3, 4), floats(9.0, 0.0, 0.0), *MEAN),
    one("nll_loss_backward", ones(()), zeros(3), ints(9), *MEAN, ones(())),
    one("binary_cross_entropy", ints(9), floats(9.0)),
    one("index_add_", zeros(3), 0, ints(9, 9), ones(1)),
    one("index_copy_", zeros(3), 0, ints(9).int(), ones(1)),
    one("index_fill_.int_Scalar", zeros(3), 0, ints(9).int(), 1.0),
    one("take", zeros(3), ints(9).int()),
    one("take", zeros(0), ints(9)),
    one("masked_scatter", zeros(3), ints(1, 1, 1), ones(1)),
    one("embedding", zeros(3), ints(9)),
    one("embedding", zeros(3, 2), ints(9).short()),
    one("index.Tensor", zeros(3), [ints(9).short()]),
    one("index.Tensor", zeros(3), [ints(0), ints(9)]),
    one("index.Tensor", zeros(3, 4), [ints(9, 9), ints(0, 0, 0)]),
    one("index.Tensor", zeros(3, 4), [tensor([True, True, True]), ints(9, 9)]),
    one("index.Tensor", rows(), [ones(4).bool(), ints(9)]),
    one("index.Tensor", rows(0), [ints(9)]),
    one("multinomial", floats(-1.0), 2),
    one("multinomial", ints(-1), 1),
    one("repeat_interleave.Tensor", ints(1, -1)),
    one("segment_reduce", rows(6, 2), "sum", lengths=ints(-1, 7)),
    one("segment_reduce", rows(6, 2), "sum", lengths=floats(9.0), unsafe=True),
    one("nll_loss_forward", zeros(2, 3), ints(0, 9).int(), *MEAN),
    one("multi_margin_loss", zeros(2, 3), ints(9, 9).int()),
    one("poisson", ints(-1)),
    one("bernoulli_.float", zeros(2), 1.5),
    *(one("bernoulli_.Tensor", zeros(2), p) for p in (ints(2, 2), ones(2).bool())),
    one("normal.Tensor_Tensor", zeros(2), floats(1.0, -1.0)),
    one("repeat_interleave.Tensor", ints(1, -1), output_size=-1),
    one("segment_reduce", ones(4), "sum", lengths=ints(3, 2)),
    *(
        one("_assert_async.msg", condition, message)
        for condition, message in ((ints(0, 1), "x"), (floats(), "x"), (tensor(0), "x" * 255))
    ),
    *(
        one("_grouped_mm", zeros(32, 16).bfloat16(), zeros(3, 16, 8).bfloat16(), offsets)
        for offsets in (ints(1, 5, 99), ints(1, 99).int())
        if release() >= (2, 10)
    ),
    # Refused by what only the kernel looks at: a second argument's shape or dtype.
    one("scatter_.src", zeros(3), 0, ints(9), ones(1).double()),
    one("index_select", zeros(()), 0, ints(0, 9)),
    one("nll_loss_forward", zeros(2, 3), ints(0, 9), ones(3).double(), 1, -100),
    *(
        [one("nll_loss_forward", zeros(2), ints(0, 9), *MEAN)] if release() >= (2, 10) else []
    ),  # earlier the CPU takes more targets than there are rows
    one("index_add_", zeros(3, 2), 0, ints(9), ones(1, 3)),
    one("put_", zeros(3), ints(9, 9), ones(1)),
    one("index_put_", zeros(3), [ints(9)], ones(1).double()),
    one("max_unpool2d", ones(1, 1, 2), tensor([[[9]]]), [2, 2]),
    one("binary_cross_entropy", floats(7.0, 7.0, 7.0), ones(2)),
    one("multi_margin_loss", zeros(3), ints(0, 3)),
    *(
        one("_ctc_loss", zeros(5, 2, 4), tensor([[9, 9]] * 2), [5] * steps, [2] * lengths)
        for steps, lengths in ((3, 2), (2, 3), (1, 2), (2, 1))
    ),
    one("bernoulli_.Tensor", zeros(2), floats(2.0, 2.0, 2.0)),
    # More positions than values.
    one("max_unpool2d", ones(1, 1, 2), ints(0, 99, 1).view(1, 1, 3), [2, 2]),
    one(
        "max_unpool3d", ones(1, 1, 1, 2), ints(0, 99, 1).view(1, 1, 1, 3), [2] * 3, [2] * 3, [0] * 3
    ),
]


@pytest.mark.parametrize("given", REFUSED)
def test_host_errors_are_left_to_torch(given: Given, sim: Simulation) -> None:
    """Arguments that torch refuses by shape or dtype are not ours, whatever their values."""
    name, arguments = given
    assert ask(op_of(name), **arguments) == []
    for there in (arguments, {key: on_device(value) for key, value in arguments.items()}):
        with pytest.raises((RuntimeError, IndexError, ValueError)):
            call(name, there)
    assert sim.pending is None


NOTHING = ints()
IDLE: list[Given] = [
    one("max_unpool2d", ones(1, 1, 1), tensor([[[9]]]), [0, 2]),
    one("embedding", rows(0), NOTHING),
    one("index.Tensor", zeros(3), [NOTHING]),
    one("index.Tensor", rows(), [NOTHING, None]),
    one("index.Tensor", zeros(3), [tensor([True, False, True])]),
    one("index.Tensor", rows(), [tensor([True] * 5)]),
    one("index.Tensor", zeros(0), [ints(9)]),
    one("gather", rows(), 0, NOTHING.view(0, 3)),
    one("nll_loss_forward", zeros(0, 4), NOTHING, *MEAN),
    one("repeat_interleave.Tensor", NOTHING, output_size=4),
]


@pytest.mark.parametrize("given", IDLE, ids=lambda given: given[0])
def test_nothing_is_launched(given: Given) -> None:
    """Where no element is read or written CUDA looks at no index, whatever it says."""
    assert finding(*given) is None


def test_too_few_categories_are_found_though_nothing_asserts() -> None:
    found = finding(*one("multinomial", floats(1.0, 0.0, 0.0), 2))
    assert found is not None and found.is_silent
