"""The user's expressions by their places in the call, where no value can prove them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import cudalens
from cudalens.core._torch import signature_of
from cudalens.core.report import Report
from cudalens.source.running_call import RunningCall
from cudalens.source.stack import Place


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with cudalens.simulate():
        yield


def report_of(call: Callable[[Tensor, Tensor], object]) -> Report:
    """Let a call meet an id that is one too large, with the recorder watching."""
    table = torch.zeros(4, 6, device="cuda")
    ids = torch.tensor([5, 7, 0, 1], device="cuda")
    with pytest.raises(cudalens.DeviceAssertError) as caught, cudalens.check():
        call(table, ids)
    assert isinstance(caught.value.report, Report)
    return caught.value.report


ROWS = torch.arange(4)
FIRST = 0
take = torch.take

PLACED: list[tuple[Callable[[Tensor, Tensor], object], str]] = [
    (lambda x, i: x[ROWS.cuda(), i - 1], "i - 1"),
    (lambda x, i: x[:, i - 1], "i - 1"),
    (lambda x, i: x[..., i - 1], "i - 1"),
    (lambda x, i: x[FIRST, i - 1], "i - 1"),
    (lambda x, i: x[0][i - 1], "i - 1"),
    (lambda x, i: x.T[i - 1, ROWS.cuda()], "i - 1"),
    (lambda x, i: x.T[i - 1], "i - 1"),
    (lambda x, i: x.gather(1, i[:, None] - 1), "i[:, None] - 1"),
    (lambda x, i: x.gather(dim=1, index=i[:, None] - 1), "i[:, None] - 1"),
    (lambda x, i: torch.gather(x, 1, i[:, None] - 1), "i[:, None] - 1"),
    (lambda x, i: torch.gather(input=x, dim=1, index=i[:, None] - 1), "i[:, None] - 1"),
    (lambda x, i: torch.index_select(x.relu(), 1, i - 1), "i - 1"),
    (lambda x, i: x.index_add_(1, i - 1, x[:, :4]), "i - 1"),
    (lambda x, i: torch.multinomial(i[None] - 1.0, 1), "i[None] - 1.0"),
    (lambda x, i: torch.bernoulli(i - 1.0), "i - 1.0"),
    (lambda x, i: take(x, 4 * i), "4 * i"),
]


@pytest.mark.parametrize(("call", "expression"), PLACED)
def test_an_argument_is_named_by_its_place(
    call: Callable[[Tensor, Tensor], object], expression: str
) -> None:
    """Whatever the way of calling: subscript, method, function, keywords."""
    assert report_of(call).expression == expression


def test_a_write_is_named_by_its_place() -> None:
    """``x[…] = v`` is a statement."""

    def write(x: Tensor, i: Tensor) -> None:
        x[:, i - 1] = 1.0

    assert report_of(write).expression == "i - 1"


UNKNOWN: list[Callable[[Tensor, Tensor], object]] = [
    # Which of two parts is the number and which the index is not known.
    lambda x, i: x[int(FIRST + 0), i - 1],
    lambda x, i: x[(slice(None), i - 1)],
    lambda x, i: x.gather(*(1, i[:, None] - 1)),
    # The method's receiver is not on the line: what stands first is the dimension.
    lambda x, i: [gather(1, i[:, None] - 1) for gather in [x.gather]],
]


@pytest.mark.parametrize("call", UNKNOWN)
def test_what_its_place_does_not_tell_stays_unnamed(
    call: Callable[[Tensor, Tensor], object],
) -> None:
    """No name rather than a wrong one."""
    assert report_of(call).expression is None


def test_an_expression_that_is_another_tensor_gives_no_name() -> None:
    """What can be read was compared: only the unreadable is named by its place."""
    report = report_of(lambda x, i: x.gather(1, i.int()[:, None].long()))
    assert report.expression == "i.int()[:, None].long()"
    index = next(fact for fact in report.tensors if fact.argument == "self")
    assert index.expression == "x"


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
    call = RunningCall(Place(code, 1, 0, None), lambda value: False, node)
    is_method = not text.startswith("torch.")
    signature = signature_of(f"aten::{op}", overload)
    bound = call.bind(signature, is_method=is_method, is_whole=True)
    assert {item.name: ast.unparse(item.node) for item in bound or ()} == expected
