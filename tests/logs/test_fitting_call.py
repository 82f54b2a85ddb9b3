"""The calls of some code that can launch the kernel of an assertion."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import pytest

from cudalens.diagnosis.assert_meanings import Meaning
from cudalens.logs.fitting_call import Objects, fitting_calls

LOOKUP = Meaning(arguments=(("aten::embedding", "indices"),), sentence="")
INDEX = Meaning(
    arguments=(("aten::index", "indices"), ("aten::index_put_", "indices")), sentence=""
)
LOSS = Meaning(arguments=(("aten::nll_loss_forward", "target"),), sentence="")
BACKWARD = Meaning(arguments=(("aten::nll_loss_backward", "target"),), sentence="")
READ = Meaning(arguments=(("aten::index", "indices"),), sentence="")
ADD = Meaning(arguments=(("aten::add", "other"),), sentence="")


def texts(code: str, meaning: Meaning, objects: Objects | None = None) -> list[str]:
    return [item.text for item in fitting_calls(ast.parse(code), meaning, objects)]


@pytest.mark.parametrize(
    ("code", "meaning", "found"),
    [
        ("F.embedding(i, w)", LOOKUP, ["F.embedding(i, w)"]),
        ("nn.Embedding(3, 2)(i)", LOOKUP, ["nn.Embedding(3, 2)(i)"]),
        ("emb = nn.Embedding(3, 2)\nemb(i)", LOOKUP, ["emb(i)"]),
        ("self.e = nn.Embedding(3, 2)\nself.e(i)", LOOKUP, ["self.e(i)"]),
        ("other(i)", LOOKUP, []),
        ("import mylib as m\nm.embedding(i)", LOOKUP, []),
        ("import torch.nn as t\nt.embedding(i)", LOOKUP, ["t.embedding(i)"]),
        ("import torch\ntorch.embedding(i)", LOOKUP, ["torch.embedding(i)"]),
        ("import mylib.ops\nmylib.ops.embedding(i)", LOOKUP, []),
        ("import mylib.ops\nops.embedding(i)", LOOKUP, ["ops.embedding(i)"]),
        ("nets = [nn.Embedding(3, 2)]\nnets[0](i)", LOOKUP, []),
        ("net = nn.Sequential(nn.Embedding(3, 2), nn.ReLU())\nnet(i)", LOOKUP, ["net(i)"]),
        ("a = b = nn.Embedding(3, 2)\na(i), b(j)", LOOKUP, ["a(i)", "b(j)"]),
        ("nn.Embedding(3, 2)", LOOKUP, []),
        ("net().embedding(i)", LOOKUP, ["net().embedding(i)"]),
        ("x.index_put(i, y)", INDEX, ["x.index_put(i, y)"]),
        ("x.index_put_(i, y)", INDEX, ["x.index_put_(i, y)"]),
        ("x[i]", INDEX, ["x[i]"]),
        ("x[~i]", INDEX, []),
        ("x[not i]", INDEX, []),
        ("x[a and b]", INDEX, []),
        ("x[None, ...]", INDEX, []),
        ("for i, (a, b) in enumerate(loader):\n    x[i], x[a]", INDEX, ["x[a]"]),
        ("for i in loader:\n    x[i]", INDEX, ["x[i]"]),
        ("x[-i]", INDEX, ["x[-i]"]),
        ("x[3]", INDEX, []),
        ("x[-3]", INDEX, []),
        ("x[1:]", INDEX, []),
        ("x[y > 0]", INDEX, []),
        ("x[0, i]", INDEX, ["x[0, i]"]),
        ("for i in range(3):\n    x[i]", INDEX, []),
        ("for i, b in enumerate(loader):\n    x[i], x[b]", INDEX, ["x[b]"]),
        ("x[i] = 1", INDEX, ["x[i]"]),
        ("x[i] += 1", INDEX, ["x[i]"]),
        ("x[i] += 1", READ, ["x[i]"]),
        ("x[i] = 1", READ, []),
        ("del x[i]", INDEX, []),
        ("def f(a: x[i]) -> x[j]: pass", INDEX, []),
        ("F.cross_entropy(z, y)", LOSS, ["F.cross_entropy(z, y)"]),
        ("F.cross_entropy(z, y)", BACKWARD, []),
        ("torch.add(x, y)", ADD, []),  # which is in every program
    ],
)
def test_which_calls_fit(code: str, meaning: Meaning, found: list[str]) -> None:
    assert texts(code, meaning) == found


def test_in_order_of_their_lines_with_line_and_function() -> None:
    calls = fitting_calls(
        ast.parse("if a:\n    F.embedding(i, w)\nemb = F.embedding(j, w)"), LOOKUP
    )
    assert [(item.line, item.text) for item in calls] == [
        (2, "F.embedding(i, w)"),
        (3, "F.embedding(j, w)"),
    ]
    assert {item.op for item in calls} == {"aten::embedding"}
    gather = Meaning(arguments=(("aten::gather", "index"),), sentence="")
    (call,) = fitting_calls(ast.parse("x.gather(0, i)"), gather)
    assert call.api == "torch.gather"


def test_a_long_call_is_named_by_its_function() -> None:
    name = "x" * (60 - len("F.embedding(, w)"))
    assert texts(f"F.embedding({name}, w)", LOOKUP) == [f"F.embedding({name}, w)"]
    assert texts(f"F.embedding({name}y, w)", LOOKUP) == ["F.embedding"]


class Known(Objects):
    """Facts on objects by the text that names them."""

    def __init__(self, **kinds: Sequence[str]) -> None:
        self.kinds = kinds

    def classes(self, node: ast.expr) -> Sequence[str] | None:
        return self.kinds.get(ast.unparse(node))

    def parts(self, node: ast.expr) -> Sequence[str]:
        return self.kinds.get(f"{ast.unparse(node)}_parts", ())

    def definitions(self, node: ast.expr) -> Sequence[ast.AST]:
        source = self.kinds.get(f"{ast.unparse(node)}_source", ())
        return [ast.parse(item).body[0] for item in source]


def test_what_is_known_of_the_objects() -> None:
    assert texts("x[i]", INDEX, Known(x=["dict"])) == []
    assert texts("x[i]", INDEX, Known(x=["Tensor"])) == ["x[i]"]
    assert texts("x[i]", INDEX, Known(i=["int"])) == []
    assert texts("x[-i]", INDEX, Known(i=["int"])) == []
    for kind in ("Tensor", "list", "tuple", "ndarray"):
        assert texts("x[i]", INDEX, Known(i=[kind])) == ["x[i]"]
    assert texts("m.embedding(i)", LOOKUP, Known(m=["module"])) == []


def test_calls_inside_the_users_functions_and_modules() -> None:
    source = "def pick(a, i):\n    return F.embedding(i, a)"
    found = texts("pick(w, i)", LOOKUP, Known(pick_source=[source]))
    assert found == ["F.embedding(i, a) inside pick(w, i)"]
    # What the code itself defines is read where it stands.
    for kind in ("def", "async def"):
        own = f"{kind} pick(a, i):\n    return F.embedding(i, a)\npick(w, i)"
        assert texts(own, LOOKUP, Known(pick_source=[source])) == ["F.embedding(i, a)"]
    two = [source, source.replace("embedding(i, a)", "relu(a)")]
    assert len(texts("pick(w, i)", LOOKUP, Known(pick_source=two))) == 1
    assert texts("net(i)", LOOKUP, Known(net_parts=["Embedding"])) == ["net(i)"]
    found = texts("net(i)", LOOKUP, Known(net_parts=["Net", "Embedding"]))
    assert found == ["nn.Embedding inside net(i)"]
