"""The user's names for tensors: proven to be the tensor, else not given."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import cudalens
from cudalens.core.report import Report
from cudalens.core.report_types import Expression
from cudalens.source.argument_names import (
    LineTensor,
    _tensors_of,
    name_values,
    other_tensors,
    tensors_on,
)
from cudalens.source.running_call import RunningCall
from cudalens.source.stack import place_of
from tests.blocks import report_of
from tests.probes import asked, named, site_of

X = torch.rand(4, 5)
Y = torch.tensor([0, 1, 2, 3])
I2 = torch.zeros(4, 1, dtype=torch.int64)


class Holder:
    def __init__(self, **kept: Any) -> None:
        self.__dict__.update(kept)


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("F.nll_loss(x, y)", "y"),
        ("F.nll_loss(x, target=y)", "y"),
        ("F.nll_loss(x, batch['labels'])", "batch['labels']"),
        ("F.nll_loss(x, batch[\n  'labels'])", "batch['labels']"),
        ("F.nll_loss(x, h.t)", "h.t"),
        ("F.nll_loss(x, h.t.view(4))", "h.t"),
        ("F.nll_loss(*pair)", "pair[1]"),
        ("F.nll_loss(x, **{'target': y})", "y"),
        ("F.nll_loss(**both)", 'both["target"]'),
        ("f = lambda z, q: F.nll_loss(z, q)\nf(x, y)", "q"),
        ("[F.nll_loss(x, t) for t in [y]]", "t"),
        ("sum(F.nll_loss(x, t) for t in [y])", "t"),
        ("F.nll_loss(x, y - 0)", "y - 0"),
        ("F.nll_loss(target=y - 0, input=x)", "y - 0"),
        ("loss(x, y - 0)", "y - 0"),
        ("loss(x, target=y - 0)", "y - 0"),
        ("z = F.nll_loss(x, y) if len(y) else y", "y"),
        # Of two names the shortest in the call is taken.
        ("q = y, F.nll_loss(x, h.t)", "h.t"),
        ("F.nll_loss(x, (h.t, y)[0])", "y"),
    ],
)
def test_an_expression_that_is_the_tensor_names_the_argument(text: str, expression: str) -> None:
    names = {
        "batch": {"labels": Y},
        "h": Holder(t=Y),
        "pair": (X, Y),
        "both": {"input": X, "target": Y},
        "loss": nn.NLLLoss(),
    }
    site = site_of(text, "nll_loss_forward", x=X, y=Y, **names)
    assert named(site)["target"] == expression
    assert site.limits == ()


@pytest.mark.parametrize(
    "text",
    [
        "torch.gather(x, 1, i.clone())",
        "torch.gather(x, 1, i + 0)",
        "x.gather(1, i.long().clone())",
        "g = lambda q: torch.gather(x, 1, q + 0)\ng(i)",
        # The old value of a name that is being assigned is not what the line passes.
        "i = torch.gather(x, 1, make())",
        # Nor is a name of an inner scope.
        "y = torch.gather(x, 1, make(lambda i: i))",
    ],
)
def test_an_equal_but_different_tensor_names_nothing(text: str) -> None:
    site = site_of(text, "gather", x=X, y=Y, i=I2, make=lambda *_: I2)
    assert "index" not in named(site)
    assert named(site)["self"] == "x"


@pytest.mark.parametrize(
    ("picked", "expression"),
    [
        (lambda pairs: pairs[0], "pairs[0]"),
        (lambda pairs: pairs[1], "pairs[1]"),
        (lambda pairs: pairs.unbind()[1], "pairs[1]"),
        # The neighbours: none is a row of it, in memory and as a whole.
        (lambda pairs: pairs[:, 0], None),
        (lambda pairs: pairs[1].clone(), None),
        (lambda pairs: pairs[1, :2], None),
        (lambda pairs: pairs[1].flip(0), None),
    ],
)
@pytest.mark.usefixtures("sim")
def test_a_row_of_a_tensor_on_the_line_names_the_argument(
    picked: Callable[[Tensor], Tensor], expression: str | None
) -> None:
    """A library takes the ends of the edges that it is given."""
    pairs = torch.tensor([[7, 7, 7], [7, 7, 7]], device="cuda")
    take: Callable[..., Any] = eval(
        "lambda rows, edges: rows.index_select(0, picked(edges))", {"picked": picked}
    )
    report = report_of(lambda: take(torch.ones(3, 2, device="cuda"), pairs))
    assert report.expression == expression


def line_tensor(text: str, value: object) -> LineTensor:
    return LineTensor(Expression(text, ast.parse(text, mode="eval").body), None, value)


def names_of(
    tensors: list[LineTensor], values: dict[str, object], rows: dict[tuple[object, object], int]
) -> dict[str, str]:
    """Name strings that stand for tensors; ``rows`` has which one is which row of another."""
    found = name_values(
        tensors, values, lambda a, b: a == b, lambda part, whole: rows.get((part, whole))
    )
    assert len({name.key for name in found}) == len(found)
    return {name.key: str(name.expression) for name in found}


def test_a_row_is_named_by_the_first_expression_that_can_have_a_subscript() -> None:
    """A tensor itself comes before a row of another, and each argument has one name."""
    line = [line_tensor(text, value) for text, value in (("a + b", "A"), ("c", "C"), ("d.e", "D"))]
    rows: dict[tuple[object, object], int] = {("r", "A"): 1, ("r", "C"): 0, ("r", "D"): 2}
    assert names_of(line, {"self": "D", "index": "r"}, rows) == {"self": "d.e", "index": "c[0]"}
    assert names_of(line, {"index": "r"}, {("r", "D"): 2}) == {"index": "d.e[2]"}
    assert names_of(line, {"index": "r"}, {("r", "A"): 1}) == {}
    assert names_of(line, {"index": "C"}, {("C", "D"): 1}) == {"index": "c"}


@pytest.mark.parametrize(
    ("text", "spelled", "wanted"),
    [
        ("here(xx, h.t)", (), ["xx", "h.t"]),
        ("here(xx, h.t)", ("h.t",), ["h.t", "xx"]),
        # An item of a batch comes after the call's own, and before what is beside the call.
        ("x, here(p, h.t)", (), ["h.t", "p[0]", "x"]),
        ("x, here(p, h.t)", ("x",), ["h.t", "x", "p[0]"]),
    ],
)
def test_what_the_call_spells_comes_before_other_ways(
    text: str, spelled: tuple[str, ...], wanted: list[str]
) -> None:
    def expressions(frames: Any) -> list[str]:
        call = RunningCall.at(place_of(frames[-1]))
        assert call.statement is not None
        call.spelled = {
            id(node) for node in ast.walk(call.statement)
            if isinstance(node, ast.expr) and ast.unparse(node) in spelled
        }  # fmt: skip
        return [item.expression for item in tensors_on(call)]

    assert asked(text, expressions, x=X, xx=X, h=Holder(t=X), p=[X]) == [wanted]


@pytest.mark.parametrize(
    ("text", "value", "wanted"),
    [
        ("x", X, ["x"]),
        ("p", (X, 1, Y), ["p[0]", "p[2]"]),
        ("p", {"a": X, "b c": Y, 3: X, (4,): Y}, ['p["a"]', "p['b c']", "p[3]"]),
        ("(x, y)", (X, Y), ["x", "y"]),
        ("[*p, y]", [X, Y], ["[*p, y][0]", "[*p, y][1]"]),
        ("(x, y)", (X,), ["(x, y)[0]"]),
        ("p + [y]", [X, Y], ["(p + [y])[0]", "(p + [y])[1]"]),
        ("p or q", [X], ["(p or q)[0]"]),
        ("f(p)", [X], ["f(p)[0]"]),
        ("p", (1, 2), []),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("is_whole", [True, False])
def test_tensors_of_a_batch_are_named_by_their_place_or_as_the_line_spells_them(
    text: str, value: object, wanted: list[str], is_whole: bool
) -> None:
    read: Any = SimpleNamespace(
        node=ast.parse(text, mode="eval").body, value=value, is_whole=is_whole
    )
    found = [(extra, str(shown)) for extra, shown, _, _ in _tensors_of(read, [text])]
    if value is X:
        assert found == [(0, "x")]
    else:
        assert found == [(1, item) for item in wanted if is_whole]


def test_a_parameter_that_the_function_rebinds_proves_nothing() -> None:
    def rebinding(z: Tensor, q: Tensor) -> Tensor:
        q = q.clone()
        return called(z, q)

    def keeping(z: Tensor, q: Tensor) -> Tensor:
        return called(z, q)

    called = _library_gather()
    assert "index" not in named(_below(rebinding, called, "f(x, i + 0)"))
    assert named(_below(keeping, called, "f(x, i + 0)"))["index"] == "i + 0"


def test_a_partial_shifts_the_arguments_and_proves_nothing() -> None:
    def keeping(q: Tensor, z: Tensor) -> Tensor:
        return called(z, q)

    called = _library_gather()
    assert "index" not in named(_below(functools.partial(keeping, I2.clone()), called, "f(x + 0)"))


def _library_gather() -> Any:
    return lambda z, q: torch.gather(z, 1, q)


def _below(function: Any, called: Any, text: str) -> Any:
    """Run text as a cell that calls ``function`` as if it were a library's."""
    inner = function.func if isinstance(function, functools.partial) else function
    for each in (inner, called):
        each.__code__ = each.__code__.replace(co_filename="/v/site-packages/lib/ops.py")
    return site_of(text, "gather", f=function, x=X, i=I2)


def test_columns_of_a_name_are_characters_of_the_users_line() -> None:
    site = site_of("s = 'é'; F.nll_loss(x, y)", "nll_loss_forward", x=X, y=Y)
    spans = {name.key: name.span for name in site.names}
    assert spans["target"] == (1, 23, 24)


def test_other_tensors_of_the_line_are_listed_once_and_in_reading_order() -> None:
    text = "w = F.cross_entropy(x, y) + a[0] * y.sum() + b"
    site = site_of(text, "nll_loss_forward", x=X, y=Y, a=[torch.ones(1)], b=torch.ones(2))
    assert named(site) == {"target": "y"}
    assert [other.expression for other in site.others] == ["x", "a[0]", "b"]
    assert site.others[2].value is not None


def test_of_several_expressions_that_are_one_tensor_the_first_is_listed() -> None:
    spans = {"a": (1, 5, 6), "b": None, "again": (1, 0, 1), "own": (1, 2, 3), "c": (1, 7, 8)}
    values = {"a": X, "b": Y, "again": X, "own": I2, "c": X[0]}
    line = [LineTensor(Expression(it, ast.Name(it)), spans[it], values[it]) for it in spans]
    found = other_tensors(line, {"self": I2}, lambda one, other: one is other)
    assert [item.expression for item in found] == ["a", "c", "b"]
    many = [line[0]._replace(span=(99 - it, 0, 1), value=it) for it in range(13)]
    found = other_tensors(many, {}, lambda one, other: one is other)
    assert [item.value for item in found] == [*reversed(range(12))]


def test_the_variable_of_a_loop_has_the_value_of_before() -> None:
    def others(text: str) -> list[str]:
        site = site_of(text, "gather", x=X, y=Y, i=I2)
        return [str(item.expression) for item in site.others]

    assert "y" not in others("for y in torch.gather(x, 1, i):\n    pass")
    assert "y" in others("for z in (y, torch.gather(x, 1, i)):\n    pass")


def test_a_batch_that_is_only_indexed_does_not_spill_its_other_tensors() -> None:
    batch = {"labels": Y, "mask": torch.ones(4)}
    site = site_of("F.nll_loss(x, batch['labels'])", "nll_loss_forward", x=X, batch=batch)
    assert [other.expression for other in site.others] == []


# --- by the call that the recorder sees, where the line has no name for them ----------------------


def report_on(call: Callable[[Tensor, Tensor], object]) -> Report:
    """Let a call meet an id that is one too large, with the recorder watching."""
    table = torch.zeros(4, 6, device="cuda")
    ids = torch.tensor([5, 7, 0, 1], device="cuda")
    return report_of(lambda: call(table, ids), cudalens.DeviceAssertError)


ROWS = torch.arange(4)
FIRST = 0
take = torch.take

ARRAY = np.array([0, 9])
NEGATIVE = torch.tensor([1, -1, 1, 1])


def write(x: Tensor, i: Tensor) -> None:
    x[:, i - 1] = 1.0


ARGUMENTS = {
    "aten::index": "indices",
    "aten::index_put_": "indices",
    "aten::embedding": "indices",
    "aten::_embedding_bag_forward_only": "indices",
    "aten::repeat_interleave": "repeats",
    "aten::multinomial": "self",
    "aten::bernoulli": "self",
}
"""The argument at fault of each op; that of the others is called ``index``."""


@pytest.mark.usefixtures("sim")
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
        # An array of NumPy's is no tensor: torch makes one of it.
        (lambda x, i: x[ARRAY], None),
        (lambda x, i: x[np.array(1), i], "i"),
        (lambda x, i: x[int(FIRST + 0), i - 1], "i - 1"),
        (lambda x, i: x[(slice(None), i - 1)], "i - 1"),
        (lambda x, i: x.gather(*(1, i[:, None] - 1)), None),
        # The method's receiver is not on the line: what stands first is the dimension.
        (lambda x, i: [gather(1, i[:, None] - 1) for gather in [x.gather]], None),
        # Positions of a function are not those of an op in another order.
        (lambda w, i: torch.repeat_interleave(i * 2, -i, output_size=2, dim=0), "-i"),
        (lambda w, i: (i * 2).repeat_interleave(-i, 0, output_size=2), "-i"),
        (
            lambda w, i: torch.repeat_interleave(w, NEGATIVE.cuda(), 0, output_size=2),
            "NEGATIVE.cuda()",
        ),
        (lambda w, i: functional.embedding(i * 1, w * 1), "i * 1"),
        (lambda w, i: functional.embedding_bag(i * 1, w * 1, i[:1] * 0), None),
        (lambda w, i: functional.embedding(i, w), "i"),
        (lambda w, i: functional.embedding_bag(i, w, i[:1] * 0), "i"),
    ],
)
def test_an_argument_is_named_by_its_place(
    call: Callable[[Tensor, Tensor], object], expression: str | None
) -> None:
    """Whatever the way of calling; what its place does not tell stays unnamed."""
    report = report_on(call)
    assert report.expression == expression
    assert report.argument == ARGUMENTS.get(report.op.name, "index")
    name = expression or ("index" if report.op.name == "aten::index" else report.argument)
    assert report.headline.startswith((f"{name}[", f"({name})["))


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x, i: (x * 1)[i], "(x * 1)"),
        (lambda x, i: (x * 1).T[i - 1], "(x * 1).T"),
        (lambda x, i: (x * 1)[ROWS.cuda(), i - 1], "(x * 1)"),
        # The op gets a view: dimension 0 of it is another one of what is written.
        (lambda x, i: (x * 1)[0, i - 1], ""),
        (lambda x, i: (x * 1)[:, i - 1], ""),
        (lambda x, i: (x * 1)[None, i - 1], ""),
    ],
    ids=["one", "another", "both", "number", "slice", "new dimension"],
)
def test_what_is_indexed_is_named_by_its_place(
    call: Callable[[Tensor, Tensor], object], name: str
) -> None:
    """Where the op gets all of it."""
    assert report_on(call).headline.endswith(f" of {name}" if name else ")")


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda x: x.tan() / x, ["x.tan()", "x"]),
        (lambda x: 1 / x.tan(), ["x.tan()"]),
        (lambda x: x.neg() ** -1, ["x.neg()"]),
        (lambda x: (x.tan() + 1) * 3e38, ["x.tan() + 1"]),
        (lambda x: 3e38 * (x.tan() + 1), ["x.tan() + 1"]),
        # Which of two results is the number is not known.
        (lambda x: float("3e38") * (x.tan() + 1), ["self"]),
        (lambda x: (x.tan() + 1) * float("3e38"), ["self"]),
    ],
)
def test_operands_of_an_operator_are_named_in_its_order(
    call: Callable[[Tensor], object], names: list[str]
) -> None:
    """Also where Python asks the operand on the right."""
    x = torch.tensor([0.0, 1.0], device="cuda")
    report = report_of(lambda: call(x), cudalens.NonFiniteError, nan="strict")
    assert [name for name, _ in report.offenders.first[0].inputs] == names


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize(
    ("joined", "names"),
    [
        (lambda p, x: torch.cat([*p, x.neg()]), ["[*p, x.neg()][0]", "[*p, x.neg()][1]"]),
        (lambda p, x: torch.cat([p[0], x.neg()]), ["p[0]", "x.neg()"]),
    ],
    ids=["star", "one by one"],
)
def test_what_a_star_stands_for_is_no_tensor(
    joined: Callable[[list[Tensor], Tensor], Tensor], names: list[str]
) -> None:
    part = torch.zeros(2, 2, 2, device="cuda")
    report = report_of(lambda: joined([part], X.cuda()), RuntimeError)
    assert [item.expression for item in report.tensors] == [*names, "x"]
