"""What a running call is named, whether it is torch's, and which values its arguments have."""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from cudalens.source.running_call import (
    ABSENT,
    RunningCall,
    class_name,
    code_of,
    is_tensor_method,
    method_of,
    of_value,
)
from cudalens.source.running_node import Running
from cudalens.source.stack import Place, place_of

X = torch.ones(2, 2)
NAMES: dict[str, Any] = {"torch": torch, "F": nn.functional, "nn": nn, "x": X, "y": X, "xs": [X]}


def call_of(text: str, **names: Any) -> RunningCall:
    """Return the call, subscript or operator that a line is, with the variables that it sees."""
    statement = ast.parse(text).body[0]
    frame = eval("frame()", {"frame": lambda: sys._getframe(1), **NAMES, **names})
    code = compile(text, "<line>", "exec")
    steps = [item for item in dis.get_instructions(code) if "SUBSCR" in item.opname]
    place = Place(code, 1, steps[-1].offset, frame) if steps else place_of(frame)
    node: ast.AST = statement.value if isinstance(statement, ast.Expr) else statement
    if steps and isinstance(statement, ast.Assign | ast.Delete):
        first = statement.targets[0]
        node = first if isinstance(first, ast.Subscript) else statement.value  # type: ignore[union-attr]
    return RunningCall(Running(place=place, node=node, statement=statement))


def place_inside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Place:
    """Call a function that returns its own frame."""
    return place_of(function(*args, **kwargs))


def here() -> Any:
    return sys._getframe(1)


# --- the public name ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "api"),
    [
        ("F.embedding(x, y)", "torch.nn.functional.embedding"),
        ("torch.nn.functional.embedding(x, y)", "torch.nn.functional.embedding"),
        ("torch.add(x, y)", "torch.add"),
        ("x.index_select(0, y)", "torch.Tensor.index_select"),
        # A receiver that is not known is a result: only a name that tensors have says something.
        ("made().index_select(0, y)", "torch.Tensor.index_select"),
        ("made().own_method(0, y)", None),
        ("made().__len__()", None),
        ("xs.append(x)", None),
        ("nn.Linear(2, 2)", "torch.nn.Linear"),
        ("torch.classes.made.run(x)", "torch.classes.made.run"),
        # Over one name from another package, not over several, and not from the standard library.
        ("other.run(x)", "other.lib.run"),
        ("other.inner.run(x)", None),
        ("sys.getrefcount(x)", None),
        ("renamed(x, x)", "torch.add"),
        ("made(x)", None),
    ],
)
def test_the_public_name_of_a_call(text: str, api: str | None) -> None:
    module = type(sys)("other.lib")
    assert call_of(text, other=module, sys=sys, renamed=torch.add).api() == api


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("x + y", "add"),
        ("xs + x", None),
        ("2 + x", "radd"),
        ("x + 2", "add"),
        ("2 + 2", None),
        ("made() + x", None),
        # What is not read is a tensor where each part of it, or what makes it, says so.
        ("(x if a() else y) + 1", "add"),
        ("(x if a() else 2) + 1", None),
        ("(z := x) + 1", None),
        ("[a()] + x", None),
        ("{a()} @ x", None),
        ("x[0:1] + 1", "add"),
        ("made()[0:1] + x", None),
        ("(x * a()) + 1", "add"),
        ("x[0:1].T + 1", "add"),
        ("x[0:1].is_cuda + 1", None),
        ("torch.add(x, y) + 1", "add"),
        ("torch.is_tensor(x) + 1", None),
        ("x @ y", "matmul"),
        ("x / y", "truediv"),
        ("x += 1", "iadd"),
        ("xs += x", None),
        ("x < y", "lt"),
        ("x <= y", "le"),
        ("x in y", "contains"),
        ("xs in x", "contains"),
        ("x in xs", None),
        ("x not in xs", None),
        ("x is y", None),
        ("-x", "neg"),
        ("-2", None),
        ("x[0]", "getitem"),
        ("xs[0]", None),
        ("x[0] = 1", "setitem"),
        ("del x[0]", "delitem"),
    ],
)
def test_the_public_name_of_an_operator(text: str, method: str | None) -> None:
    expected = None if method is None else f"torch.Tensor.__{method}__"
    assert call_of(text).api() == expected


@pytest.mark.parametrize(
    ("names", "api"),
    [
        (("self", "indices"), "torch.Tensor.__getitem__"),
        (("self", "mask"), "torch.Tensor.__getitem__"),
        (("self", "index[0]"), "torch.Tensor.__getitem__"),
        (("indices",), None),
        (("self", "target"), None),
        ((), None),
    ],
)
def test_a_subscript_of_an_unknown_object_is_named_by_the_op(
    names: tuple[str, ...], api: str | None
) -> None:
    assert call_of("made()[0]").api(names) == api


def test_a_subscript_of_what_is_no_tensor_is_not_named_by_the_op() -> None:
    assert call_of("xs[0]").api(("self", "indices")) is None
    assert call_of("[made()][0]").api(("self", "indices")) is None


# --- whether it is torch's ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("torch.add(x, y)", True),
        ("x.sum()", True),
        ("x.sum().add(1)", True),
        ("made().add(1)", False),
        ("made().add(1).sum()", False),
        ("xs.append(x)", False),
        ("len(xs)", False),
        ("half(x)", True),
        ("torch.add(x, y).sum()", True),
        ("(x if a() else made().sum()) + 1", False),
        ("bound()", True),
        ("x[0]", True),
        ("xs[x]", False),
        ("x + 1", True),
        ("1 + x", True),
        ("[1] + x", False),
        ("xs + x", False),
        ("x += 1", True),
        ("xs += x", False),
        ("x in xs", False),
        ("1 in x", True),
        ("1 < x", True),
        ("1 < 2", False),
        ("-x", True),
    ],
)
def test_whether_it_is_proven_to_use_torch(text: str, *, uses: bool) -> None:
    assert call_of(text, half=partial(partial(torch.add, X), X), bound=X.sum).uses_torch() is uses


# --- its operands ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("x + y", ["x", "y"]),
        ("x += y", ["x", "y"]),
        ("x < y < 3", ["x", "y"]),
        ("-x", ["x"]),
        ("x[0]", ["x", "0"]),
        ("x[0] = y", ["x", "0", "y"]),
        ("z = x[0]", ["x", "0"]),
        ("del x[0]", ["x", "0"]),
        ("made(x)", []),
    ],
)
def test_the_operands_in_their_order(text: str, operands: list[str]) -> None:
    assert [ast.unparse(item) for item in call_of(text).operands] == operands


@pytest.mark.parametrize(
    ("text", "receiver"), [("x.sum(y)", "x"), ("made(x)", None), ("x[0]", None)]
)
def test_the_receiver_of_a_method(text: str, receiver: str | None) -> None:
    found = call_of(text).receiver
    assert (found and ast.unparse(found)) == receiver


def test_a_tensor_that_is_read_is_not_replaced_by_what_is_learned() -> None:
    call = call_of("made(x, a, b, c)", a=1)
    assert isinstance(call.node, ast.Call)
    call.learn(zip(call.node.args, [5, 6, 7, ABSENT], strict=True))
    assert [call.value(item) for item in call.node.args] == [X, 6, 7, ABSENT]


def returns_frame(a: Any, b: Any = 2, *rest: Any, key: Any = None, **more: Any) -> Any:
    return here()


def rebinds(a: Any, b: Any) -> Any:
    a = b
    return here(), a


def learned(text: str, callee: Place, **names: Any) -> dict[str, object]:
    call = call_of(text, **names)
    call.learn_from_callee(callee)
    node = call.node
    assert isinstance(node, ast.Call)
    given = [*node.args, *(item.value for item in node.keywords)]
    return {ast.unparse(item): call.value(item) for item in given if id(item) in call.learned}


def test_arguments_are_read_from_the_function_that_runs() -> None:
    callee = place_inside(returns_frame, 1, 2, 3, 4, key=5, other=6)
    text = "f(p(), q(), r(), s(), key=k(), other=o())"
    found = learned(text, callee, f=returns_frame)
    assert found == {"p()": 1, "q()": 2, "r()": 3, "s()": 4, "k()": 5, "o()": 6}


def test_a_parameter_that_is_rebound_is_not_read() -> None:
    callee = place_of(rebinds(1, 2)[0])
    assert learned("f(p(), q())", callee, f=rebinds) == {"q()": 2}


@pytest.mark.parametrize("text", ["f(*p())", "g(p())", "unknown(p())"])
def test_nothing_is_read_where_another_function_may_run(text: str) -> None:
    callee = place_inside(returns_frame, 1)
    assert learned(text, callee, f=returns_frame, g=rebinds) == {}


class Thing:
    def __init__(self, a: Any) -> None:
        self.made_in = here()

    def method(self, a: Any) -> Any:
        return here()


class Layer(nn.Module):
    def __call__(self, a: Any) -> Any:
        return here()


def test_the_bound_parameter_is_skipped() -> None:
    thing, layer = Thing(1), Layer()
    inside = place_inside(thing.method, 3)
    assert learned("f(p())", inside, f=thing.method) == {"p()": 3}
    assert learned("f(p())", place_of(thing.made_in), f=Thing) == {"p()": 1}
    assert learned("f(p())", place_inside(layer, 4), f=layer) == {"p()": 4}


def _wrapped_call_impl(self: Any, *args: Any) -> Any:
    return here()


@pytest.mark.parametrize(("count", "found"), [(1, {"p()": 7}), (2, {})])
def test_an_unknown_module_is_read_where_all_arguments_are_on_the_line(
    count: int, found: dict[str, object]
) -> None:
    """More than the line has is what a partial adds: the places are not those of the line."""
    callee = place_inside(_wrapped_call_impl, None, *[7] * count)
    assert learned("unknown(p())", callee) == found


# --- names of functions and classes ---------------------------------------------------------------


def test_the_code_that_a_call_runs() -> None:
    thing = Thing(1)
    method = Thing.method.__code__
    assert code_of(returns_frame) is returns_frame.__code__
    assert code_of(partial(partial(returns_frame, 1), 2)) is returns_frame.__code__
    assert (code_of(thing.method), code_of(Thing.method)) == (method, method)
    assert code_of(Layer()) is Layer.__call__.__code__
    assert code_of(len) is None


@pytest.mark.parametrize(
    ("operator", "method"),
    [
        (ast.Add(), "add"),
        (ast.Sub(), "sub"),
        (ast.MatMult(), "matmul"),
        (ast.LtE(), "le"),
        (ast.Lt(), "lt"),
        (ast.Is(), None),
        (ast.Not(), "bool"),
    ],
)
def test_the_method_of_an_operator(operator: ast.AST, method: str | None) -> None:
    assert method_of(operator) == method


@pytest.mark.parametrize(
    ("name", "is_it"), [("add", True), ("shape", True), ("own_method", False), ("__dir__", True)]
)
def test_whether_tensors_have_an_attribute(name: str, *, is_it: bool) -> None:
    assert is_tensor_method(name) is is_it


def test_what_every_object_has_is_no_attribute_of_tensors() -> None:
    assert not is_tensor_method("__class__")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (torch.add, "torch.add"),
        (nn.functional.relu, "torch.nn.functional.relu"),
        (nn.functional._threshold, "torch.nn.functional.threshold"),
        (torch._C._nn.gelu, "torch.nn.functional.gelu"),
        (torch._assert, None),
        (torch.linalg.norm, "torch.linalg.norm"),
        (nn.Linear, "torch.nn.Linear"),
        (torch.no_grad, "torch.no_grad"),
        (torch.Tensor, "torch.Tensor"),
        (nn.modules.loss._Loss, "torch.nn.modules.loss._Loss"),
        (returns_frame, None),
        (Thing, None),
        (len, None),
        (3, None),
        (torch.overrides.handle_torch_function, None),
    ],
)
def test_the_public_name_of_a_function_or_class(value: object, name: str | None) -> None:
    assert of_value(value) == name
    if isinstance(value, type):
        assert class_name(value) == name
