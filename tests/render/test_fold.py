"""Folding of a neighbourhood: what is joined until it can be read, and what stays as it is."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest

from cudalens.core.report import AutogradNeighbourhood, GraphEdge, GraphNode, LineRef, Role
from cudalens.render.fold import (
    MAX_BOXES,
    MAX_EDGES,
    MAX_NODES,
    MAX_ROWS,
    Box,
    _is_large,
    _is_tangled,
    fold,
    is_statement,
    is_view,
    node_name,
)
from tests.builders import chain, node


def test_an_unrolled_loop_is_folded_but_not_beside_the_failure() -> None:
    """Seven states that two lines carry on, each step from two states of the step before."""
    states, ops = 7, 45
    lines = [LineRef(line=at, cell=1, text="h = f(h)") for at in (4, 5)]
    steps = [
        replace(node(f"n{at}", f"torch.{'abc'[at % 3]}"), source=lines[at % 2]) for at in range(ops)
    ]
    edges = [
        GraphEdge(src=f"n{at - back}", dst=f"n{at}")
        for at in range(ops)
        for back in (states, states + 1)
        if at >= back
    ]
    edges += [GraphEdge(src=f"n{at}", dst="f") for at in range(ops - states, ops)]
    graph = AutogradNeighbourhood(
        nodes=(*steps, node("f", "aten::index", "failed")), edges=tuple(edges), focus="f"
    )
    boxes, links = fold(graph)
    assert len(boxes) <= MAX_BOXES and len(links) <= MAX_EDGES
    beside = [src for src, dst in links if dst == "f"]
    assert [len(boxes[key].members) for key in beside] == [1] * states
    farther = [len(boxes[key].members) for key in boxes.keys() - {*beside, "f"}]
    assert max(farther) > 1
    assert sum(farther) == ops - states


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (node("n", "aten::addmm"), "F.linear"),
        (node("n", "aten::relu_"), "relu"),
        (node("n", "aten::embedding", "failed"), "nn.Embedding"),
        (node("n", "EmbeddingBackward0", "failed"), "embedding"),
        (node("n", "torch.nn.functional.linear"), "F.linear"),
        (node("n", "torch.Tensor.mul_"), "Tensor.mul_"),
        (node("n", "mylib::gather_rows.default"), "gather_rows"),
        (node("n", "mylib::_gather_rows"), "gather_rows"),
        (node("n", "aten::_log_softmax_backward_data"), "F.log_softmax"),
        (node("n", "", name="ConvolutionBackward0"), "F.conv"),
        (node("n", "", "parameter", name="net.0.weight"), "net.0.weight"),
        (node("n", "aten::add", "bad_input", name="y"), "y"),
        (node("n", "", "leaf", name="AccumulateGrad"), "leaf tensor"),
        (node("n", "", "leaf", name=""), "unnamed"),
    ],
)
def test_a_node_is_called_as_people_call_it(made: GraphNode, name: str) -> None:
    assert node_name(made) == name


@pytest.mark.parametrize(
    ("made", "is_it"),
    [
        (node("n", "aten::view"), True),
        (node("n", "aten::t"), True),
        (node("n", "torch.nn.functional.linear", name="TBackward0"), True),
        (node("n", "aten::view", "failed"), False),
        (node("n", "aten::mul"), False),
        (node("n", "aten::_to_copy"), False),
    ],
)
def test_a_view_only_looks_at_its_input(made: GraphNode, is_it: bool) -> None:
    assert is_view(made) is is_it


def test_a_node_at_fault_is_named_by_the_statement_that_wrote() -> None:
    line = LineRef(line=2, text="x += 1")
    assert is_statement(node("n", "aten::add", name="x += 1", source=line))
    assert not is_statement(node("n", "aten::add", name="x", source=line))
    assert not is_statement(node("n", "aten::add", name="x += 1"))


def boxed(*members: GraphNode, role: Role = "upstream") -> Box:
    return Box(key="k", role=role, members=members)


def test_the_title_of_a_box_is_its_module_else_its_ops() -> None:
    conv = node("a", "aten::convolution", module_path="net.0")
    relu = node("b", "aten::relu", module_path="net.0")
    view = node("c", "aten::view", module_path="net.1")
    assert boxed(conv, relu, view).title({"net.0": "Block"}) == "Block net.0"
    assert boxed(conv).title({}) == "F.conv"
    assert boxed(conv, relu).title({}) == "F.conv → relu"
    assert boxed(conv, conv, relu).title({}) == "F.conv → relu"
    assert boxed(conv, node("d", "aten::mul"), relu).title({}) == "F.conv → … → relu"
    other = node("e", "aten::relu", module_path="net.2")
    assert boxed(conv, other).module == ""
    assert boxed(conv, role="failed").module == ""


def test_inputs_of_one_box_are_counted() -> None:
    one, two = (node(key, "", "parameter", name=key) for key in "ab")
    assert boxed(one, two, role="parameter").title({}) == "2 parameters"
    assert boxed(one, two, role="leaf").title({}) == "2 inputs"
    assert boxed(one, role="parameter").title({}) == "a"


def test_a_long_title_keeps_both_ends() -> None:
    first = node("a", "mylib::" + "first_" * 5)
    last = node("b", "mylib::" + "last__" * 5)
    title = boxed(first, last).title({})
    assert len(title) <= 26
    start, _, end = title.partition(" → ")
    assert start.startswith("first") and end.startswith("last")
    whole, cut = (
        boxed(node("a", f"m::{'a' * at}"), node("b", f"m::{'b' * 12}")) for at in (11, 12)
    )
    assert whole.title({}) == f"{'a' * 11} → {'b' * 12}"
    assert len(cut.title({})) <= 26 and "…" in cut.title({})


def chained(count: int, modules: dict[int, str], *more: str) -> list[str]:
    """Return the members of each box of a chain of so many nodes, the last of which failed."""
    made = [node(f"{at}", "aten::mul", module_path=modules.get(at)) for at in range(count - 1)]
    sides = [node("p", "", "parameter", name="p"), node("x", "", "leaf", name="x")]
    edges = [*chain(*(item.id for item in (*made, FAILED)))]
    edges += [GraphEdge(src=src, dst=dst) for src, dst in more]
    used = [item for item in sides if any(item.id in pair for pair in more)]
    graph = AutogradNeighbourhood(nodes=(*used, *made, FAILED), edges=tuple(edges), focus="f")
    return ["".join(item.id for item in box.members) for box in fold(graph)[0].values()]


@pytest.mark.parametrize(
    ("modules", "boxes"),
    [
        ({}, "012 3 4 5 6 7 f"),
        ({4: "net.0.a", 5: "net.0.b"}, "01 2 3 45 6 7 f"),
        ({4: "net.0.a", 5: "net.1.a"}, "012 3 4 5 6 7 f"),
        ({4: "net.0", 5: "net.1"}, "012 3 4 5 6 7 f"),
        ({6: "net.0.a", 7: "net.0.b"}, "012 3 4 5 6 7 f"),  # right beside the failure
    ],
)
def test_a_long_chain_is_folded_by_parents_and_then_from_its_far_end(
    modules: dict[int, str], boxes: str
) -> None:
    assert sorted(chained(9, modules)) == boxes.split()
    assert len(chained(MAX_ROWS, modules)) == MAX_ROWS


@pytest.mark.parametrize(
    ("more", "boxes"),
    [("p1", "0123 4 5 6 7 f p"), ("x1", "0 123 4 5 6 7 f x"), ("03", "0 12 34 5 6 7 f")],
)
def test_a_box_goes_into_the_next_one_where_there_is_no_other_way(more: str, boxes: str) -> None:
    assert sorted(chained(9, {}, more)) == boxes.split()


# --- what is joined -------------------------------------------------------------------------------


def folded(*nodes: GraphNode, links: str, focus: str = "f") -> dict[str, int]:
    """Return how many nodes each box has; the links are pairs such as ``a>b``."""
    edges = [GraphEdge(src=link[0], dst=link[2]) for link in links.split()]
    graph = AutogradNeighbourhood(nodes=nodes, edges=tuple(edges), focus=focus)
    return {key: len(box.members) for key, box in fold(graph)[0].items()}


FAILED = node("f", "aten::embedding", "failed")


def test_parameters_of_one_box_are_joined_and_few_inputs_are_not() -> None:
    params = [node(key, "", "parameter", name=key) for key in "ab"]
    assert folded(*params, FAILED, links="a>f b>f") == {"a": 2, "f": 1}
    assert folded(*params[:1], FAILED, links="a>f") == {"a": 1, "f": 1}
    inputs = [node(key, "", "leaf", name=key) for key in "abcd"]
    assert folded(*inputs[:3], FAILED, links="a>f b>f c>f") == dict.fromkeys("abcf", 1)
    assert folded(*inputs, FAILED, links="a>f b>f c>f d>f") == {"a": 4, "f": 1}


def test_a_parameter_of_two_boxes_stays_alone() -> None:
    params = [node(key, "", "parameter", name=key) for key in "ab"]
    mul = node("m", "aten::mul")
    made = folded(*params, mul, FAILED, links="a>m a>f b>f m>f")
    assert made == {"a": 1, "b": 1, "m": 1, "f": 1}


def test_a_view_is_joined_with_its_neighbour_and_two_ops_are_not() -> None:
    mul, exp, view = node("m", "aten::mul"), node("e", "aten::exp"), node("v", "aten::view")
    assert folded(mul, view, FAILED, links="m>v v>f") == {"v": 2, "f": 1}
    assert folded(mul, exp, FAILED, links="m>e e>f") == {"m": 1, "e": 1, "f": 1}


def test_ops_of_one_module_are_joined() -> None:
    mul = node("m", "aten::mul", module_path="net.0")
    exp = node("e", "aten::exp", module_path="net.0")
    assert folded(mul, exp, FAILED, links="m>e e>f") == {"e": 2, "f": 1}
    other = replace(exp, module_path="net.1")
    assert folded(mul, other, FAILED, links="m>e e>f") == {"m": 1, "e": 1, "f": 1}


def test_parts_of_one_call_are_joined() -> None:
    line = LineRef(line=3, cell=1, text="h, c = lstm(x)")
    parts = [node(key, "torch.lstm", source=line) for key in "ab"]
    assert folded(*parts, FAILED, links="a>b b>f") == {"b": 2, "f": 1}
    elsewhere = replace(parts[1], source=replace(line, line=4))
    assert folded(parts[0], elsewhere, FAILED, links="a>b b>f") == {"a": 1, "b": 1, "f": 1}
    simple = [node(key, "torch.mul", source=line) for key in "ab"]
    assert folded(*simple, FAILED, links="a>b b>f") == {"a": 1, "b": 1, "f": 1}
    unplaced = [node(key, "torch.lstm") for key in "ab"]
    assert folded(*unplaced, FAILED, links="a>b b>f") == {"a": 1, "b": 1, "f": 1}


def test_a_box_never_feeds_itself() -> None:
    """Joined across another box between them, the two ends of a module would."""
    mul, exp = (node(key, "aten::mul", module_path="net.0") for key in "me")
    between = node("x", "aten::sin")
    made = folded(mul, between, exp, FAILED, links="m>e m>x x>e e>f")
    assert made == {"m": 1, "x": 1, "e": 1, "f": 1}


def test_an_edge_that_would_close_a_circle_is_left_out() -> None:
    nodes = (node("a", "aten::mul"), node("b", "aten::exp"), FAILED)
    edges = (*chain("a", "b", "f"), GraphEdge(src="b", dst="a"), GraphEdge(src="gone", dst="a"))
    graph = AutogradNeighbourhood(nodes=nodes, edges=edges, focus="f")
    assert fold(graph)[1] == [("a", "b"), ("b", "f")]
    wider = replace(graph, edges=(*chain("a", "b", "f"), GraphEdge(src="f", dst="a")))
    assert fold(wider)[1] == [("a", "b"), ("b", "f")]


def test_only_the_nodes_nearest_to_the_failure_are_looked_at() -> None:
    ids = [f"n{at}" for at in range(MAX_NODES)]
    nodes = [node(key, "aten::mul") for key in ids]
    for more in (0, 1):
        extra = [node("far", "aten::exp")] if more else []
        graph = AutogradNeighbourhood(
            nodes=(*extra, *nodes),
            edges=chain(*(item.id for item in (*extra, *nodes))),
            focus=ids[-1],
        )
        members = [item.id for box in fold(graph)[0].values() for item in box.members]
        assert sorted(members) == sorted(ids)
        apart = replace(graph, edges=chain(*ids))
        members = [item.id for box in fold(apart)[0].values() for item in box.members]
        assert sorted(members) == sorted(ids)
        assert (
            sum(len(it.members) for it in fold(replace(graph, edges=()))[0].values()) == MAX_NODES
        )


@pytest.mark.parametrize(
    ("boxes", "rows", "edges", "large", "tangled"),
    [
        (1, 0, 0, False, False),
        (MAX_BOXES, 0, 0, False, False),
        (MAX_BOXES + 1, 0, 0, True, True),
        (MAX_ROWS, MAX_ROWS - 1, 0, False, False),
        (MAX_ROWS + 1, MAX_ROWS, 0, True, False),
        (16, 0, MAX_EDGES, False, False),
        (16, 0, MAX_EDGES + 1, False, True),
    ],
)
def test_a_graph_is_too_large_beyond_each_of_its_bounds(
    boxes: int, rows: int, edges: int, large: bool, tangled: bool
) -> None:
    links = nx.DiGraph()
    links.add_nodes_from(range(boxes))
    links.add_edges_from((at, at + 1) for at in range(rows))
    ways = [(one, other) for one in range(8) for other in range(8, 16)]  # of two rows
    links.add_edges_from(ways[:edges])
    assert (_is_large(links), _is_tangled(links)) == (large, tangled)
