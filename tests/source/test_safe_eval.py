"""Values are read, never computed: what can be read, and what must stay untouched."""

from __future__ import annotations

import ast
import collections
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from cudalens.source import safe_eval
from cudalens.source.safe_eval import SafeEvaluator, instance_dict, items_of, value_or
from tests.probes import Untouchable

LINEAR = nn.Linear(1, 1)


class Batch(NamedTuple):
    x: object
    y: object


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(3, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.heads = nn.ModuleDict({"a": nn.Linear(2, 2)})
        self.register_buffer("mask", torch.ones(2))

    @property
    def computed(self) -> torch.Tensor:
        raise AssertionError("a property was triggered")


class Shouting(dict[str, object]):
    def __getitem__(self, key: str) -> object:
        raise AssertionError("user code ran")


class Plain(dict[str, object]):
    pass


def read(text: str, **names: object) -> object:
    return SafeEvaluator(names)[ast.parse(text, mode="eval").body]


def refuses(text: str, **names: object) -> bool:
    node = ast.parse(text, mode="eval").body
    missing = object()
    return value_or(SafeEvaluator(names), node, missing) is missing


def test_attributes_and_items_of_plain_containers_are_read() -> None:
    t = torch.zeros(2)
    holder = type("Holder", (), {})()
    holder.t = t
    assert read("h.t", h=holder) is t
    assert read("d['a'][0]", d={"a": [t]}) is t
    assert read("xs[-1]", xs=(0, t)) is t
    assert read("xs[i - 1]", xs=[t], i=1) is t
    assert read("b.y", b=Batch(0, t)) is t
    assert read("b[1]", b=Batch(0, t)) is t
    assert read("d['k']", d=Plain(k=t)) is t
    assert read("d['k']", d=collections.defaultdict(list, k=t)) is t
    assert read("d['k']", d=collections.UserDict(k=t)) is t


def test_what_a_module_registered_is_read_without_its_getattr() -> None:
    net = Net()
    assert read("net.emb.weight", net=net) is net.emb.weight
    assert read("net.mask", net=net) is net.mask
    assert read("net.layers[1].bias", net=net) is net.layers[1].bias
    assert read("net.layers[-1]", net=net) is net.layers[1]
    assert read("net.heads['a']", net=net) is net.heads["a"]
    assert refuses("net.layers[2]", net=net)
    assert refuses("net.computed", net=net)


def test_a_batch_of_transformers_is_read_by_item_and_by_attribute() -> None:
    transformers = pytest.importorskip("transformers")
    t = torch.zeros(2)
    batch = transformers.BatchEncoding({"labels": t})
    assert read("batch['labels']", batch=batch) is t
    assert read("batch.labels", batch=batch) is t
    assert refuses("batch['label']", batch=batch)
    assert items_of(batch, 1) == [("labels", t)]


def test_a_batch_of_graphs_is_read_by_item_and_by_attribute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As PyTorch Geometric stores it."""
    module = ModuleType("torch_geometric.data.data")
    module.Data = type("Data", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    batch, t = module.Data(), torch.zeros(2)
    batch._store = SimpleNamespace(_mapping={"y": t})
    assert read("batch.y", batch=batch) is read("batch['y']", batch=batch) is t
    assert refuses("batch.z", batch=batch)


class Guarded(Net):
    def __getattribute__(self, name: str) -> object:
        return super().__getattribute__(name)


def test_what_a_class_may_look_up_in_its_own_way_is_refused() -> None:
    own = collections.UserDict(a=1)
    assert read("own['a']", own=own) == 1
    own.data = Shouting(a=1)
    assert refuses("own['a']", own=own)
    assert refuses("net.emb", net=Guarded())
    assert refuses("d['a']", d=Plain({(1, 2): 3, "a": 1}))  # type: ignore[dict-item]


FOREIGN = ("u.x", "u[0]", "u + 1", "-u", "u()", "d[u]", "u.x.y", "s['k']", "k['a']", "f(xs)")
COSTLY = ("xs[0:1]", "[0] * 10", "2 ** 9", "len('a')", "list('ab')", "'a' * 3", "t[0]")


@pytest.mark.parametrize("text", [*FOREIGN, *COSTLY])
def test_what_would_run_code_or_copy_is_refused(text: str) -> None:
    u = Untouchable()
    names = {"u": u, "d": {"k": 1}, "s": Shouting(k=1), "k": {(1, "odd"): 2}, "xs": [1], "f": list}
    assert refuses(text, t=torch.zeros(1), **names)


def test_arithmetic_is_read_up_to_a_bound() -> None:
    assert read("i + 1", i=(1 << 31) - 1) == 1 << 31
    assert read("1 - i", i=-(1 << 31) + 1) == 1 << 31
    assert refuses("i + 1", i=1 << 31)
    assert refuses("i + 1", i=-(1 << 31))
    assert refuses("1 + i", i=1 << 31)
    assert refuses("i * 2", i=1)
    assert refuses("i + 1", i=True)


def test_a_variable_that_has_ended_is_not_read() -> None:
    gone = here = 1
    assert here == gone
    made = safe_eval.evaluator_for(sys._getframe(), {"gone", "x"})
    nodes = [ast.parse(text, mode="eval").body for text in ("here", "gone")]
    assert [value_or(made, node, None) for node in nodes] == [1, None]
    assert value_or(None, nodes[0], "default") == "default"


def test_what_is_nested_too_deep_is_not_read() -> None:
    node: ast.expr = ast.Name("x", ast.Load())
    for _ in range(20_000):
        node = ast.Attribute(node, "a", ast.Load())
    assert value_or(SafeEvaluator({"x": 1}), node, "default") == "default"


class OwnList(nn.ModuleList):
    """A list of modules of the user's, which may look up in its own way."""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("xs[1]", 2), ("xs[2]", None), ("xs[-2]", 1), ("xs[-3]", None),
        ("xs['a']", None), ("d['a']", 3), ("d['b']", None), ("d[None]", 4), ("d[0.5]", 5),
        ("many['a']", None), ("few['a']", 2), ("own[0]", None), ("plain[0]", LINEAR),
        ("plain[-1]", LINEAR), ("plain[1]", None), ("plain[-2]", None), ("h.none", None),
        ("plain.none", None), ("u['a']", 6), ("u['b']", None),
    ],
)  # fmt: skip
def test_which_items_are_read(text: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_eval, "_MAX_KEYS", 3)
    names = {
        "xs": [1, 2], "d": {"a": 3, None: 4, 0.5: 5}, "few": Plain.fromkeys("abc", 2),
        "many": Plain.fromkeys("abcd", 1),
        "own": OwnList([LINEAR]), "plain": nn.ModuleList([LINEAR]), "h": nn.Linear(1, 1),
        "u": collections.UserDict(a=6),
    }  # fmt: skip
    node = ast.parse(text, mode="eval").body
    found = value_or(SafeEvaluator(names), node, None)
    assert found is value


def test_a_class_attribute_is_not_mistaken_for_a_registered_parameter() -> None:
    class Shadow(nn.Linear):
        weight = property(lambda self: 0)  # type: ignore[assignment]

    shadow = object.__new__(Shadow)
    shadow.__dict__["_parameters"] = {"weight": torch.zeros(1)}
    assert refuses("s.weight", s=shadow)


def test_own_attributes_are_read_past_the_class() -> None:
    class Hiding:
        def __getattribute__(self, name: str) -> object:
            raise AssertionError("user code ran")

    object.__setattr__(hiding := Hiding(), "own", 1)
    assert instance_dict(hiding) == {"own": 1}
    assert instance_dict(Net) == instance_dict(1) == {}


class Looping(list[object]):
    def __iter__(self) -> Iterator[object]:
        return iter(())


def test_items_of_containers_up_to_the_limit() -> None:
    assert items_of(Looping([1]), 2) == []
    assert items_of([1, 2], 2) == [(0, 1), (1, 2)]
    assert items_of([1, 2, 3], 2) == []
    assert items_of((1, 2), 2) == [(0, 1), (1, 2)]
    assert items_of(collections.UserDict(a=1), 1) == [("a", 1)]
    assert items_of("ab", 2) == []
    assert items_of({"a": 1}, 2) == [("a", 1)]
    assert items_of(Plain(a=1), 2) == [("a", 1)]
    assert items_of(Shouting(a=1), 2) == []
    assert items_of(Untouchable(), 2) == []
