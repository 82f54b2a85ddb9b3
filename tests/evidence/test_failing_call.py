"""The call that failed, read from frames: function, arguments, operands, what is odd of them."""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cudalens.core.call import ApiCall, Operand
from cudalens.evidence import failing_call
from cudalens.evidence.failing_call import (
    api_call_of_stack,
    arguments_of,
    call_of,
    is_known,
    refused_arguments,
    running_api_call,
    text_of,
    value_of,
)
from cudalens.evidence.variables import line_of
from cudalens.recorder import Recorder
from cudalens.source.running_call import ABSENT
from tests.probes import asked, cell

X = torch.arange(6.0).reshape(2, 3)
ROW = torch.ones(4)
GRADIENT = torch.zeros(2)
OWN = "class Own(torch.Tensor):\n    @classmethod\n    def __torch_function__(cls, *_):\n"
OWN += "        return x @ row\n"
"""A function of torch's calls code of the user's, which makes the call that fails."""


@contextmanager
def failed(text: str, **names: Any) -> Iterator[list[Any]]:
    """Run a cell that fails, and give the traceback's entries from the cell on."""
    with cell(text) as code:
        space = {"torch": torch, "nn": nn, "F": F, "x": X, "row": ROW, **names}
        with pytest.raises(Exception) as caught:
            exec(code, space)
        entries, entry = [], caught.value.__traceback__
        while entry is not None:
            entries.append(entry)
            entry = entry.tb_next
        yield entries[1:]


@pytest.mark.parametrize(
    ("text", "func", "arguments"),
    [
        ("x @ row", operator.matmul, {"self": X, "other": ROW}),
        ("x.matmul(row)", Tensor.matmul, {"other": ROW}),
        ("torch.mm(x, mat2=row)", torch.mm, {"mat2": ROW}),
        ("F.linear(x, row[None])", F.linear, {"input": X}),
        ("x[9]", operator.getitem, {"self": X, "indices": 9}),
        ("x[0, 9]", operator.getitem, {"self": X, "indices[0]": 0, "indices[1]": 9}),
        ("x[0] = row", operator.setitem, {"self": X, "indices": 0, "values": ROW}),
        ("torch.mm(x, **more)", torch.mm, {"mat2": ROW}),
        (f"{OWN}F.relu(x.as_subclass(Own))", operator.matmul, {"self": X, "other": ROW}),
        ("F.cross_entropy(x, row)", F.cross_entropy, {"input": X, "target": ROW}),
        ("x.split('a')", Tensor.split, {"self": X, "split_size": "a", "dim": 0}),
        ("torch.meshgrid(x, row, indexing='ij')", torch.meshgrid, {"tensors": X}),
    ],
)
def test_function_and_arguments_of_a_refused_call(
    text: str, func: Any, arguments: dict[str, Any]
) -> None:
    with failed(text, more={"mat2": ROW}) as entries:
        api = api_call_of_stack(entries)
    assert api is not None
    assert api.func is func or api.func == func
    found = arguments_of(api)
    assert {key: value for key, value in found.items() if key in arguments}.keys() == (
        arguments.keys()
    )
    assert all(found[key] is value or found[key] == value for key, value in arguments.items())
    assert not any(value is None or value is ABSENT for value in found.values())
    assert "self" not in api.kwargs


@pytest.mark.parametrize(
    "text",
    ["torch.mm(*pair)", "missing(x)", "raise ValueError", "torch.autograd.variable(x, k=row)"],
)
def test_what_cannot_be_read_is_no_call(text: str) -> None:
    with failed(text, pair=(X, ROW)) as entries:
        api = api_call_of_stack(entries)
    assert arguments_of(api) == {}
    assert api_call_of_stack([]) is None


def test_what_a_layer_was_given_with_a_star_is_read_below_the_line() -> None:
    given = X[None, None]
    with failed("nn.LSTM(4, 2)(*pair)", pair=[given]) as entries:
        api = api_call_of_stack(entries)
    assert api is not None and api.func is not None
    assert (api.func.__name__, type(api.func.__self__)) == ("forward", nn.LSTM)
    assert [it is given for it in arguments_of(api).values()] == [True]


def test_a_private_function_that_a_layer_calls_is_not_the_call() -> None:
    layer = nn.TransformerEncoderLayer(3, 1)
    with failed("layer(x, src_mask=mask)", layer=layer, mask=X.long()) as entries:
        assert entries[-1].tb_frame.f_code.co_name == "_canonical_mask"
        api = api_call_of_stack(entries)
    assert api is not None and getattr(api.func, "__self__", None) is layer


def test_the_module_of_a_library_is_part_of_the_call() -> None:
    layer = nn.Linear(4, 2)
    with failed("layer(x)", layer=layer) as entries:
        line = line_of(entries)
        assert line is not None
        call = call_of(entries, line)
    assert [item.func for item in call.enclosing][:1] == [layer]
    assert [item.text for item in call.operands] == ["x", "layer(x)"]
    # One that runs code of the user's is none of it.
    own = type("Own", (nn.Module,), {})
    with failed("net(x)", net=nn.Sequential(own())) as entries:
        line = line_of(entries)
        assert line is not None
        found = call_of(entries, line).enclosing
    assert not any(isinstance(item.func, nn.Module) for item in found)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x", X),
        ("(x, 1)", (X, 1)),
        ("[1, missing]", [1, ABSENT]),
        ("2 * 3", 6),
        ("n * 0", ABSENT),
        ("n / 2", 1.5),
        ("x.shape", X.shape),
        ("x.grad", None),
        ("leaf.grad", GRADIENT),
        ("(2 * leaf).grad", ABSENT),
        ("inner.grad", None),
        ("[1, x]", [1, X]),
        ("2 - n", -1),
        ("n + 'a'", ABSENT),
        ("n * missing", ABSENT),
        ("missing.shape", ABSENT),
        ("x.unknown", ABSENT),
        ("missing", ABSENT),
        ("f(x)", ABSENT),
        ("x.size(1)", 3),
        ("x[missing]", ABSENT),
    ],
)
def test_the_value_of_an_expression(text: str, value: object) -> None:
    def ask(frames: Any) -> Any:
        line = line_of(frames)
        assert line is not None
        function: Any = line.running.node  # the body of its argument has not run
        return value_of(line.call, function.args[0].body)

    leaf = torch.ones(2, requires_grad=True)
    leaf.grad = GRADIENT
    names = {"x": X, "n": 3, "leaf": leaf, "inner": 2 * leaf}
    (found,) = asked(f"here(lambda: {text})", ask, **names)
    assert found is value or found == value


@pytest.mark.parametrize(
    ("value", "is_it"), [(1, True), (ABSENT, False), ([1, (2, ABSENT)], False), ([[], ()], True)]
)
def test_known_values(value: object, is_it: bool) -> None:
    assert is_known(value) is is_it


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None"),
        ([1, 2], "a list of 2"),
        (X.numpy(), "a numpy.ndarray of float32 [2, 3]"),
        (X.sum, "a method that was not called"),
        ({}, "a dict"),
        (1, "an int"),
        (nn.Linear(1, 1), "a Linear"),
        (nn.Embedding(1, 1), "an Embedding"),
    ],
)
def test_the_kind_of_an_odd_argument_in_words(value: object, words: str) -> None:
    assert failing_call._odd("it", value).words == words


def test_constants_and_tensors_are_not_odd() -> None:
    node = ast.parse("5", mode="eval").body
    operands = [Operand(text="5", node=node, value=5)]
    with failed("nn.Linear(3, 2)(x, 5)") as entries:
        found = refused_arguments(entries, {"five": 5, "x": X, "more": [1]}, operands)
    assert [item.name for item in found.odd_arguments] == ["more"]
    assert refused_arguments([], {"more": [1]}).odd_arguments == ()


@pytest.mark.parametrize(
    ("text", "func", "args", "texts"),
    [
        ("x + row", Tensor.__add__, (X, ROW), ["x", "row"]),
        ("2 * x", Tensor.__mul__, (X, 2), ["x", "2"]),
        ("2 / x", Tensor.__rtruediv__, (X, 2), ["x", "2"]),
        ("x / 2", Tensor.__truediv__, (X, 2), ["x", "2"]),
        ("x >> 2", Tensor.__rshift__, (X, 2), ["x", "2"]),
    ],
)
def test_operands_in_the_order_of_the_arguments(
    text: str, func: Any, args: tuple[Any, ...], texts: list[str]
) -> None:
    found = failing_call._in_order(reader(text), ApiCall(func=func, args=args))
    assert [text_of(item) for item in found] == texts


def reader(text: str) -> Any:
    """Return a reader of an expression with the cell's names."""
    node = ast.parse(text, mode="eval").body
    assert isinstance(node, ast.BinOp)
    values = {"x": X, "row": ROW, "2": 2}
    return SimpleNamespace(
        operands=[node.left, node.right], value=lambda item: values[ast.unparse(item)]
    )


def learned(text: str, args: Any, kwargs: Any, lasti: int = 7) -> tuple[list[str], list[str], int]:
    """Return what is learned of a line from its API call, the syntax of that call's arguments,
    and the number of the expressions whose values are known then.
    """
    pairs: list[tuple[ast.expr, object]] = []
    code = compile(text, "<cell>", "eval")
    node: Any = ast.parse(text, mode="eval").body
    function = getattr(node, "func", None)
    call: Any = SimpleNamespace(
        place=SimpleNamespace(code=code, lasti=7),
        node=node,
        operands=[*ast.iter_child_nodes(node)][:2],
        receiver=getattr(function, "value", None),
        value=lambda it: {"torch": torch}.get(ast.unparse(it), ABSENT),
        learn=pairs.extend,
        spelled=set(),
    )
    api = ApiCall(func=torch.mm, args=args, kwargs=kwargs, code=code, lasti=lasti)
    failing_call._learn_from_api(call, api)
    return [text_of(it) for it, _ in pairs], [text_of(it) for it in api.nodes], len(call.spelled)


@pytest.mark.parametrize(
    ("text", "args", "kwargs", "wanted"),
    [
        ("torch.mm(x, row)", (X, ROW), {}, (["x", "row"], ["x", "row"], 2)),
        ("x.mm(row)", (X, ROW), {}, (["x", "row"], ["x", "row"], 2)),
        ("torch.f(row)", (X, ROW), {}, ([], [], 0)),  # a module is no argument
        ("x.f(row)", (ROW,), {}, (["row"], ["row"], 1)),  # neither is what has a static method
        ("f(*pair)", (ROW,), {}, ([], [], 0)),
        ("f(x, k=row, z=1)", (X,), {"k": ROW}, (["row", "x"], ["x"], 2)),
        ("f([x, row])", ([X, ROW],), {}, (["[x, row]", "x", "row"], ["[x, row]"], 3)),
        ("f([x, row])", ([X],), {}, (["[x, row]"], ["[x, row]"], 1)),
        ("f(x)", ((X,),), {}, ([], ["x"], 1)),  # torch has put it into a tuple
        ("x[0]", (X, 0), {}, (["x", "0"], ["x", "0"], 2)),
    ],
)
def test_what_a_call_that_was_seen_tells_of_its_line(
    text: str, args: Any, kwargs: Any, wanted: Any
) -> None:
    assert learned(text, args, kwargs) == wanted
    # A line may make another call of torch's before the one that fails.
    assert learned(text, args, kwargs, lasti=8) == ([], [], 0)


@pytest.mark.parametrize(
    ("name", "below", "is_it"), [("a", [], True), ("b", [], False), ("a", ["f"], False)]
)
def test_what_lacks_an_attribute_is_read_from_the_error(
    name: str, below: list[str], is_it: bool
) -> None:
    pairs: list[tuple[ast.expr, object]] = []
    line: Any = SimpleNamespace(
        running=SimpleNamespace(node=ast.parse("it.a", mode="eval").body),
        below=below,
        call=SimpleNamespace(learn=pairs.extend),
    )
    failing_call.learn_from_error(line, AttributeError(name=name, obj=5))
    assert [(text_of(node), value) for node, value in pairs] == [("it", 5)] * is_it


def test_the_call_that_a_recorder_sees_is_read_while_it_runs() -> None:
    assert running_api_call() is None
    seen: list[ApiCall | None] = []

    class Seeing(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(running_api_call())
            return None

    with Recorder():
        torch.add(X.as_subclass(Seeing), 2, alpha=3)
    (call,) = seen
    assert call is not None
    assert (call.func, call.args[1:], call.kwargs) == (torch.add, (2,), {"alpha": 3})
    assert call.code is sys._getframe().f_code and call.lasti
    assert running_api_call() is None


def test_more_expressions_of_a_line_that_need_no_kernel() -> None:
    """A view, a size and what is on the host already; nothing that a line computes."""
    view = Recorded()
    assert view("x[0]").tolist() == [0.0, 1.0, 2.0]
    assert view("x[..., 1]").tolist() == [1.0, 4.0]
    assert view("x[None, 1:]").tolist() == [[[3.0, 4.0, 5.0]]]
    assert view("x.view(3, 2)").shape == (3, 2)
    assert view("x.cpu()") is X
    assert view("x.t().cpu()").shape == (3, 2)
    for text in ("x.cpu(1)", "x.view(7)", "x[x > 1]", "x.exp()", "n.cpu()", "x[9]", "x.view(k=1)"):
        assert view(text) is ABSENT, text
    assert view("x[n:]").shape == (1, 3)
    assert view("x[missing:]") is ABSENT and view("x[..., x]") is ABSENT


class Recorded:
    """Reads an expression of a cell in which ``x`` and ``n`` are known."""

    def __call__(self, text: str) -> Any:
        def ask(frames: Any) -> Any:
            line = line_of(frames)
            assert line is not None
            function: Any = line.running.node
            return value_of(line.call, function.args[0].body)

        (found,) = asked(f"here(lambda: {text})", ask, x=X, n=1)
        return found


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("f(**batch)", ["batch", "f(**batch)", 'batch["a"]']),
        ("f(x, k=row, **batch)", ["x", "row", "batch", "f(x, k=row, **batch)", 'batch["a"]']),
        ("F.linear([x, row])", ["F", "[x, row]", "x", "row", "F.linear([x, row])"]),
        # A star may stand for one item, or for several.
        ("F.linear([*x, row])", ["F", "[*x, row]", "F.linear([*x, row])"]),
        ("x[0, 9]", ["x", "0", "9"]),
        ("x[9]", ["x", "9"]),
        ("x @ row", ["x", "row"]),
        ("x += row", ["x", "row"]),
        ("(x, row) @ 1", ["(x, row)", "x", "row", "1"]),
        ("row.missing", ["row"]),
    ],
)
def test_what_a_line_spells_as_operands(text: str, texts: list[str]) -> None:
    """Of ``**batch`` the tensors under names; of a function what it is an attribute of."""
    batch = {"a": X, "b": 1, 2: X}
    with failed(text, batch=batch, f=len) as entries:
        line = line_of(entries)
        assert line is not None
        found = [item.text for item in failing_call._operands(line.call)]
    assert found == texts


def test_of_many_entries_of_a_batch_the_first_eight_are_operands() -> None:
    batch = {f"k{at}": X for at in range(9)}
    with failed("len(**batch)", batch=batch) as entries:
        line = line_of(entries)
        assert line is not None
        found = [item.text for item in failing_call._operands(line.call)]
    assert found[2:] == [f'batch["k{at}"]' for at in range(8)]


@pytest.mark.parametrize(
    "text",
    ["x[0] += row", "for x[0] in [row]: pass", "del x[0]", "len(x, **n)", "torch.mm(*[x, x])"],
)
def test_a_call_of_which_a_part_is_unknown_is_not_read(text: str) -> None:
    with failed(text, n=3) as entries:
        line = line_of(entries)
        found = None if line is None else failing_call._of_running(line.call)
    assert found is None or found.func not in (len, torch.mm, operator.setitem)


def test_the_op_of_a_guard_stands_in_for_a_call_that_is_not_known_whole() -> None:
    op: Any = SimpleNamespace(op=torch.ops.aten.mm.default, args=(X, ROW), kwargs={"k": 1})
    for text in ("torch.mm(x, mat2=row * 2)", "torch.mm(*pair)"):
        with failed(text, pair=(X, ROW)) as entries:
            line = line_of(entries)
            assert line is not None
            found = call_of(entries, line, None, op)
        assert found.api is not None
        assert (found.api.func, found.api.args) == (op.op, op.args)
        assert found.api.kwargs == {"k": 1}
    with failed("torch.mm(*pair)", pair=(X, ROW)) as entries:
        line = line_of(entries)
        assert line is not None
        without = call_of(entries, line, None, SimpleNamespace(op=None))
    assert without.api is None or without.api.func is not op.op
    known = ApiCall(func=torch.mm, args=(X, ROW))
    with failed("torch.mm(*pair)", pair=(X, ROW)) as entries:
        line = line_of(entries)
        assert line is not None
        assert call_of(entries, line, known, op).api is known
