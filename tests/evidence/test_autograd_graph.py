"""The neighbourhood of a call in the autograd graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cudalens import simulate
from cudalens.core.graph_types import AutogradNeighbourhood, GraphNode
from cudalens.core.report_types import LineRef, SourceSpan
from cudalens.evidence import autograd_graph
from cudalens.evidence.autograd_graph import FOCUS, neighbourhood, nodes_behind, op_of
from tests.hostcells import run_cell


def by_name(graph: AutogradNeighbourhood, name: str) -> GraphNode:
    (node,) = [item for item in graph.nodes if item.name == name]
    return node


def edges(graph: AutogradNeighbourhood) -> set[tuple[str, str, int]]:
    """The edges with the names of the nodes in place of their ids."""
    names = {node.id: node.name for node in graph.nodes}
    return {(names[edge.src], names[edge.dst], edge.input) for edge in graph.edges}


def test_nodes_edges_and_roles_of_a_loss() -> None:
    """A layer and a loss: parameters by name, the bad labels as an input without history."""
    layer = nn.Linear(4, 3)
    logits, target = layer(torch.ones(2, 4)), torch.tensor([1, 7])
    graph = neighbourhood(
        {"input": logits, "target": target},
        op_name="aten::nll_loss_forward",
        bad="target",
        names={id(parameter): f"head.{name}" for name, parameter in layer.named_parameters()},
    )
    assert graph.focus == FOCUS
    assert [node.id for node in graph.nodes] == [*(f"n{i}" for i in range(5)), FOCUS]
    assert (graph.nodes[-1].role, graph.nodes[-1].op) == ("failed", "aten::nll_loss_forward")
    known = {node.name: (node.role, node.shape, node.dtype, node.op) for node in graph.nodes}
    assert known["AddmmBackward0"] == ("upstream", (2, 3), "float32", "aten::addmm")
    assert known["target"][:3] == ("bad_input", (2,), "int64")
    assert known["head.weight"][:2] == ("parameter", (3, 4))
    assert by_name(graph, "head.weight").module_path == "head"
    assert edges(graph) == {
        ("AddmmBackward0", "aten::nll_loss_forward", 0),
        ("target", "aten::nll_loss_forward", 1),
        ("head.bias", "AddmmBackward0", 0),
        ("TBackward0", "AddmmBackward0", 2),
        ("head.weight", "TBackward0", 0),
    }
    # Four of autograd's, the labels, and the call.
    assert graph.total_nodes == len(graph.nodes) == 6


def test_leaves_that_are_no_parameters() -> None:
    x = torch.ones(2, requires_grad=True)
    rows = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    graph = neighbourhood({"self": x, "other": x.exp(), "n": rows}, op_name="aten::add", bad=None)
    found = by_name(graph, "AccumulateGrad")
    assert (by_name(graph, "self").role, found.role, found.shape) == ("leaf", "leaf", (2,))
    assert by_name(graph, "n").shape is None


def test_an_input_without_history_has_the_users_name() -> None:
    """Whether or not it is at fault; where the user has no name for it, that of the schema."""
    arguments = {"self": torch.zeros(2, 3), "target": torch.tensor([1, 7]), "weight": torch.ones(3)}
    graph = neighbourhood(
        arguments,
        op_name="aten::nll_loss_forward",
        bad="target",
        expressions={"self": "logits", "target": "y"},
    )
    names = [(node.name, node.role) for node in graph.nodes[:-1]]
    assert names == [("logits", "leaf"), ("y", "bad_input"), ("weight", "leaf")]


@pytest.mark.parametrize(
    ("bad", "name", "role"), [("self", "w", "bad_input"), (None, "head.0.w", "parameter")]
)
def test_a_parameter_has_its_name_unless_it_is_at_fault(
    bad: str | None, name: str, role: str
) -> None:
    w = nn.Parameter(torch.ones(2))
    graph = neighbourhood(
        {"self": w}, op_name="a::b", bad=bad, names={id(w): "head.0.w"}, expressions={"self": "w"}
    )
    found = graph.nodes[0]
    assert (found.name, found.role, found.module_path) == (name, role, "head.0")


def test_a_bad_tensor_with_a_history_is_the_bad_input() -> None:
    x = torch.ones(2, requires_grad=True).exp()
    graph = neighbourhood({"self": x}, op_name="aten::bernoulli", bad="self")
    assert by_name(graph, "ExpBackward0").role == "bad_input"
    two = {"self": x, "other": x.sin()}
    named = {"self": "a", "other": "b"}
    graph = neighbourhood(two, op_name="aten::add", bad="self", expressions=named)
    assert [node.name for node in graph.nodes[:2]] == ["a", "SinBackward0"]


@pytest.mark.parametrize(("other", "value"), [(1.0, 1.0), (2.0, None)])
def test_a_node_holds_the_one_value_of_its_results(other: float, value: float | None) -> None:
    x, y = torch.ones(2, requires_grad=True).unbind()
    inputs = {"self": 1.0, "other": other, "weight": 3.0}
    arguments = {"self": x, "other": y, "p": torch.ones(1)}
    graph = neighbourhood(arguments, op_name="aten::add", bad=None, inputs=inputs)
    assert by_name(graph, "UnbindBackward0").value == value
    assert by_name(graph, "p").value is None


def test_one_tensor_as_two_arguments_is_one_node() -> None:
    x = torch.ones(2, requires_grad=True).exp()
    graph = neighbourhood({"self": x, "other": x}, op_name="aten::mul", bad=None)
    assert ("ExpBackward0", "aten::mul", 0) in edges(graph)
    assert ("ExpBackward0", "aten::mul", 1) in edges(graph)
    assert graph.total_nodes == len(graph.nodes) == 3


def test_places_come_from_the_sequence_number() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    asked: list[int] = []

    def site(sequence_nr: int) -> tuple[SourceSpan | None, str | None, str | None]:
        asked.append(sequence_nr)
        return SourceSpan(line=4, text="y = x.exp()"), "body", "torch.Tensor.exp"

    graph = neighbourhood({"self": y}, op_name="aten::log", bad=None, site=site)
    assert asked == [y.grad_fn._sequence_nr()]
    assert by_name(graph, "ExpBackward0").source == LineRef(line=4, text="y = x.exp()")
    assert by_name(graph, "ExpBackward0").module_path == "body"
    assert by_name(graph, "ExpBackward0").op == "torch.Tensor.exp"
    assert by_name(graph, "AccumulateGrad").source is None


def test_a_failure_in_backward_starts_from_the_running_node() -> None:
    x = torch.ones(2, requires_grad=True)
    node = x.exp().sin().grad_fn
    place = SourceSpan(line=4, text="x.exp().sin()")
    graph = neighbourhood(
        {"index": torch.tensor([9])},
        op_name="aten::index_put_",
        bad="index",
        node=node,
        site=lambda _: (place, "body", "torch.Tensor.sin"),
    )
    focus = graph.nodes[-1]
    assert (focus.name, focus.op, focus.role) == ("SinBackward0", "aten::index_put_", "failed")
    assert (focus.source, focus.module_path) == (place.ref, "body")
    assert edges(graph) == {
        ("index", "SinBackward0", 0),
        ("ExpBackward0", "SinBackward0", 1),
        ("AccumulateGrad", "ExpBackward0", 0),
    }
    assert graph.total_nodes == len(graph.nodes) == 4
    y = x.exp()  # a gradient with a history, which leads through the node that runs
    graph = neighbourhood({"grad": y * 2}, op_name="a::b", bad=None, node=y.grad_fn)
    assert edges(graph) == {
        ("MulBackward0", "ExpBackward0", 0),
        ("AccumulateGrad", "ExpBackward0", 1),
    }


def test_at_most_limit_nodes_are_kept_nearest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd_graph, "LIMIT", 5)
    x = torch.ones(1, requires_grad=True)
    y = x.sin().cos().exp()
    whole = neighbourhood({"self": y}, op_name="aten::log", bad=None)
    names = ["ExpBackward0", "CosBackward0", "SinBackward0", "AccumulateGrad", "aten::log"]
    assert [node.name for node in whole.nodes] == names
    monkeypatch.setattr(autograd_graph, "LIMIT", 4)
    cut = neighbourhood({"self": y}, op_name="aten::log", bad=None)
    assert [node.name for node in cut.nodes] == [*names[:3], "aten::log"]
    assert cut.total_nodes == whole.total_nodes == 5
    assert {edge.src for edge in cut.edges} <= {node.id for node in cut.nodes}
    plain = dict.fromkeys("abcd", torch.ones(1))
    assert len(neighbourhood(plain, op_name="a::b", bad=None).nodes) == 4


class Node:
    """Stands for a node of a chain without end, and counts how many were looked at."""

    looked_at = 0

    def __init__(self, number: int = 0) -> None:
        self._number = number

    def name(self) -> str:
        return "AddBackward0"

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        Node.looked_at += 1
        return ((Node(self._number + 1), 0),)


def test_time_does_not_grow_with_the_graph() -> None:
    """An endless graph is left after a fixed number of nodes, its size unknown."""
    Node.looked_at = 0
    graph = neighbourhood({}, op_name="aten::add", bad=None, node=Node())
    assert graph.total_nodes is None
    assert len(graph.nodes) == autograd_graph.LIMIT
    assert Node.looked_at == autograd_graph.MAX_VISITED


def test_size_is_known_up_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd_graph, "MAX_VISITED", 4)
    x = torch.ones(1, requires_grad=True)
    three, four = x.sin().cos().exp(), x.sin().cos().exp().exp()
    for known in (three, x.sin() * x.cos()):  # of which both end in one node
        assert neighbourhood({"self": known}, op_name="a::b", bad=None).total_nodes == 5
    assert neighbourhood({"self": four}, op_name="a::b", bad=None).total_nodes is None


def test_nothing_is_kept_alive() -> None:
    import weakref

    x = torch.ones(1, requires_grad=True)
    y = x.exp()
    reference = weakref.ref(y)
    graph = neighbourhood({"self": y}, op_name="aten::log", bad=None)
    del y
    assert reference() is None
    assert graph.nodes


@pytest.mark.parametrize(
    ("node", "op"),
    [
        ("AddmmBackward0", "aten::addmm"),
        ("NllLossBackward0", "aten::nll_loss_forward"),
        ("LogSoftmaxBackward0", "aten::_log_softmax"),
        ("UpsampleNearest2DBackward0", "aten::upsample_nearest2d"),
        ("NativeDropoutBackward0", "aten::native_dropout"),
        ("LinearBackward0", "aten::linear"),  # of nested tensors; others run aten::addmm
        ("MyFunctionBackward", None),
        ("SinBackward", None),  # of a function of the user's
        ("StackBackward0", None),  # aten::stack or aten::_stack
        ("AccumulateGrad", None),
        ("NoSuchThingBackward0", None),
    ],
)
def test_ops_behind_nodes(node: str, op: str | None) -> None:
    assert op_of(node) == op


def test_nodes_behind_some_each_with_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1, requires_grad=True)
    last = x.sin().cos().grad_fn
    assert last is not None
    middle, leaf = last.next_functions[0][0], last.next_functions[0][0].next_functions[0][0]
    assert nodes_behind([None, last]) == {last: None, middle: last, leaf: middle}
    both = (x.sin() * x.cos()).grad_fn
    assert both is not None and nodes_behind([both])[leaf] is both.next_functions[0][0]
    monkeypatch.setattr(autograd_graph, "MAX_VISITED", 2)
    assert [*nodes_behind([last])] == [last, middle]


def test_parameters_keep_their_names_in_a_straight_cell(sim: simulate.Simulation) -> None:
    """Made in an earlier cell, and not mentioned by the statement that fails."""
    made = {
        "net": nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).cuda(),
        "x": torch.ones(5, 3, device="cuda"),
        "y": torch.full((5,), 7, device="cuda"),
        "F": torch.nn.functional,
    }
    exec("out = net(x)", made)
    made["last"] = made["out"] * torch.ones(2, device="cuda", requires_grad=True)
    for line in ("F.cross_entropy(last, y)", "last + x"):
        names = {node.name for node in run_cell(line, made).shown.graph.nodes}
        # What no variable holds has no name.
        assert {"2.weight", "2.bias", "0.weight", "AccumulateGrad"} <= names
