"""The user's expressions by their places in the call, where no value can prove them."""

from __future__ import annotations

import ast
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import cudalens
from cudalens.core._torch import signature_of
from cudalens.core.report import Report
from cudalens.source.running_call import RunningCall
from cudalens.source.stack import Place
from tests.blocks import report_of as block_report

pytestmark = pytest.mark.usefixtures("sim")


def report_of(call: Callable[[Tensor, Tensor], object]) -> Report:
    """Let a call meet an id that is one too large, with the recorder watching."""
    table = torch.zeros(4, 6, device="cuda")
    ids = torch.tensor([5, 7, 0, 1], device="cuda")
    return block_report(lambda: call(table, ids), cudalens.DeviceAssertError)


ROWS = torch.arange(4)
FIRST = 0
take = torch.take

ARRAY = np.array([0, 9])


def write(x: Tensor, i: Tensor) -> None:
    x[:, i - 1] = 1.0


@pytest.mark.parametrize(
    ("call", "expression"),
    [
        (lambda x, i: x[ROWS.cuda(), i - 1], "i - 1"),
        (lambda x, i: x[:, i - 1], "i - 1"),
        (lambda x, i: x[..., i - 1], "i - 1"),
        (write, "i - 1"),
        (lambda x, i: x[FIRST, i - 1], "i - 1"),
        (lambda x, i: x[0][i - 1], "i - 1"),
        (lambda x, i: x.T[i - 1, ROWS.cuda()], "i - 1"),
        (lambda x, i: x.T[i - 1], "i - 1"),
        (lambda x, i: x.gather(1, i[:, None] - 1), "i[:, None] - 1"),
        (lambda x, i: x.gather(dim=1, index=i[:, None] - 1), "i[:, None] - 1"),
        (lambda x, i: x.gather(1, i.int()[:, None].long()), "i.int()[:, None].long()"),
        (lambda x, i: torch.gather(x, 1, i[:, None] - 1), "i[:, None] - 1"),
        (lambda x, i: torch.gather(input=x, dim=1, index=i[:, None] - 1), "i[:, None] - 1"),
        (lambda x, i: torch.index_select(x.relu(), 1, i - 1), "i - 1"),
        (lambda x, i: x.index_add_(1, i - 1, x[:, :4]), "i - 1"),
        (lambda x, i: torch.multinomial(i[None] - 1.0, 1), "i[None] - 1.0"),
        (lambda x, i: torch.bernoulli(i - 1.0), "i - 1.0"),
        (lambda x, i: take(x, 4 * i), "4 * i"),
        # An array of NumPy's becomes one index; one of a single number does not.
        (lambda x, i: x[ARRAY], "ARRAY"),
        (lambda x, i: x[None, ARRAY], "ARRAY"),
        (lambda x, i: x[np.array(1), i], "i"),
        # Which of two parts is the number and which the index is not known.
        (lambda x, i: x[int(FIRST + 0), i - 1], None),
        (lambda x, i: x[(slice(None), i - 1)], None),
        (lambda x, i: x.gather(*(1, i[:, None] - 1)), None),
        # The method's receiver is not on the line: what stands first is the dimension.
        (lambda x, i: [gather(1, i[:, None] - 1) for gather in [x.gather]], None),
    ],
)
def test_an_argument_is_named_by_its_place(
    call: Callable[[Tensor, Tensor], object], expression: str | None
) -> None:
    """Whatever the way of calling; what its place does not tell stays unnamed."""
    assert report_of(call).expression == expression


@pytest.mark.parametrize(
    ("text", "op", "overload", "expected"),
    [
        # The op inside takes the repeats alone: the first of two arguments is not they.
        ("torch.repeat_interleave(x, r)", "repeat_interleave", "Tensor", {}),
        ("torch.repeat_interleave(x, repeats=r)", "repeat_interleave", "Tensor", {}),
        ("torch.repeat_interleave(x, **more)", "repeat_interleave", "Tensor", {}),
        ("torch.repeat_interleave(r)", "repeat_interleave", "Tensor", {"repeats": "r"}),
        # The receiver of a method is not always the first of the schema.
        ("x.where(c, y)", "where", "self", {"self": "x", "condition": "c", "other": "y"}),
        ("torch.where(c, x, y)", "where", "self", {"condition": "c", "self": "x", "other": "y"}),
        # The neighbour: in the order of the schema.
        ("torch.gather(x, 1, i)", "gather", "default", {"self": "x", "dim": "1", "index": "i"}),
        ("x.gather(axis=1, index=i)", "gather", "", {"self": "x", "dim": "1", "index": "i"}),
    ],
)
def test_places_are_those_of_the_op_only_where_it_takes_this_call(
    text: str, op: str, overload: str, expected: dict[str, str]
) -> None:
    """Issue 17, item 7: the order of the API is that of the op only where it is proven."""
    code = compile(text, "<test>", "eval")
    node = ast.parse(text, mode="eval").body
    call = RunningCall(Place(code, 1, 0, None), node)
    is_method = not text.startswith("torch.")
    signature = signature_of(f"aten::{op}", overload)
    bound = call.bind(signature, is_method=is_method, is_whole=True)
    assert {name: ast.unparse(node) for name, node in (bound or {}).items()} == expected


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda w, i: torch.repeat_interleave(i * 2, -i, output_size=2, dim=0), None),
        (lambda w, i: (i * 2).repeat_interleave(-i, 0, output_size=2), None),
        (lambda w, i: torch.repeat_interleave(w, NEGATIVE.cuda(), 0, output_size=2), None),
        (lambda w, i: functional.embedding(i * 1, w * 1), None),
        (lambda w, i: functional.embedding_bag(i * 1, w * 1, i[:1] * 0), None),
        (lambda w, i: functional.embedding(i, w), "i"),
        (lambda w, i: functional.embedding_bag(i, w, i[:1] * 0), "i"),
    ],
)
def test_item_7_positions_of_a_function_are_not_those_of_an_op_in_another_order(
    call: Callable[[Tensor, Tensor], object], named: str | None
) -> None:
    """Inline arguments have no name unless they are proven; variables have theirs."""
    report = report_of(call)
    assert report.expression == named
    wrong = {"i * 2", "w * 1", "w"} if named is None else {"w"}
    assert not any(report.headline_own.startswith(f"{name}[") for name in wrong)
    assert report.argument in ("repeats", "indices")


NEGATIVE = torch.tensor([1, -1, 1, 1])
