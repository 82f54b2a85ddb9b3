"""The strip of calls: only arrows that are data flow, the failing box at its own layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.graph_types import CHANGED
from cudalens.core.report import (
    AutogradNeighbourhood,
    GraphEdge,
    GraphNode,
    HistoryEntry,
    LineRef,
    Observation,
    OpName,
    ProvenanceStep,
    Report,
    SourceSpan,
)
from cudalens.core.report_types import MarkedLine
from cudalens.render.fold import Box
from cudalens.render.strip import (
    MAX_BOXES,
    MAX_LANES,
    MAX_WIDTH,
    GraphRow,
    Node,
    _brackets,
    _fitting,
    _free_lane,
    _node,
    graph_rows,
    strip,
)
from cudalens.render.words import with_module_names
from tests.builders import REPRESENTATIVE, autograd_error, chain, fact, make_report, mismatch, node


def nodes(report: object) -> list[Node]:
    drawn = strip(report)  # type: ignore[arg-type]
    return list(drawn.nodes) if drawn else []


def test_data_flows_from_left_to_right_and_the_bad_input_has_its_lane() -> None:
    main = [item for item in nodes(make_report()) if item.lane == 1]
    assert [item.title for item in main][-1] == "F.cross_entropy"
    assert [item.column for item in main] == list(range(1, len(main) + 1))
    assert all(item.has_arrow for item in main[1:])
    (side,) = [item for item in nodes(make_report()) if item.lane == 2]
    assert (side.title, side.look, side.joins, side.column) == ("y", "badin", True, len(main) - 1)


def test_a_failing_backward_node_is_its_own_forward_call() -> None:
    """Not a box behind the loss: data does not flow from mean into the layer before it."""
    graph = AutogradNeighbourhood(
        nodes=(
            node("x", "", "leaf", name="x", shape=(2, 4)),
            node("l", "torch.nn.functional.linear", name="AddmmBackward0", shape=(2, 1)),
            node("m", "torch.Tensor.mean", name="MeanBackward0", shape=()),
            node("f", "AddmmBackward0", "failed", name="AddmmBackward0"),
        ),
        edges=chain("x", "l", "m", "f"),
        focus="f",
    )
    found = nodes(replace(autograd_error(), graph=graph))
    assert [(item.title, item.is_bad) for item in found] == [
        ("x", False),
        ("F.linear", True),
        ("Tensor.mean", False),
    ]
    assert found[1].small == "backward fails here"
    forward = nodes(replace(autograd_error(), graph=graph, phase="forward"))
    assert [item.is_bad for item in forward] == [False, False, False, True]


def test_a_failing_backward_node_is_none_of_several_calls_of_its_name() -> None:
    graph = AutogradNeighbourhood(
        nodes=(
            node("x", "", "leaf", name="x", shape=(2, 4)),
            node("a", "torch.mm", name="MmBackward0", shape=(2, 3)),
            node("b", "torch.relu", name="ReluBackward0", shape=(2, 3)),
            node("c", "torch.mm", name="MmBackward0", shape=(2, 1)),
            node("f", "MmBackward0", "failed", name="MmBackward0"),
        ),
        edges=chain("x", "a", "b", "c", "f"),
        focus="f",
    )
    found = nodes(replace(autograd_error(), graph=graph))
    assert [item.is_bad for item in found] == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("op", "titles"),
    [
        ("torch.gru", ["gru", "sum"]),
        ("torch.nn.functional.layer_norm", ["F.layer_norm", "sum"]),
        # Two additions in one line are two calls.
        ("torch.add", ["add", "add", "sum"]),
    ],
)
def test_a_function_of_several_ops_is_one_box(op: str, titles: list[str]) -> None:
    line = LineRef(line=4, cell=1, text="y = f(x)")
    graph = AutogradNeighbourhood(
        nodes=(
            node("x", "", "leaf", name="x", shape=(2, 4)),
            replace(node("a", op, name="AddBackward0", shape=(2, 4)), source=line),
            replace(node("b", op, name="TanhBackward0", shape=(2, 4)), source=line),
            node("s", "torch.sum", name="SumBackward0", shape=()),
            node("f", "MulBackward0", "failed", name="MulBackward0"),
        ),
        edges=chain("x", "a", "b", "s", "f"),
        focus="f",
    )
    found = nodes(replace(mismatch(), graph=graph, history=()))
    assert [item.title for item in found][1:-1] == titles


@pytest.mark.parametrize(
    ("last", "shape"), [((), ""), ((2, 4), "[2, 4] cuda:0")], ids=["other", "same"]
)
def test_inputs_in_one_box_show_a_shape_that_all_have(last: tuple[int, ...], shape: str) -> None:
    """The shape and device of the last one stood for all."""
    ids = [f"x{at}" for at in range(5)]
    facts = [((2, 4), "cuda:0")] * 4 + [(last, "cuda:0" if last else "cpu")]
    inputs = [
        node(name, "", "leaf", name=name, shape=size, device=device)
        for name, (size, device) in zip(ids, facts, strict=True)
    ]
    bad = node("y", "", "bad_input", name="y", shape=(3,), device="cpu")
    graph = AutogradNeighbourhood(
        nodes=(*inputs, bad, node("f", "aten::index_put_", "failed")),
        edges=tuple(GraphEdge(src=it, dst="f") for it in (*ids, "y")),
        focus="f",
    )
    found = nodes(replace(make_report(), graph=graph))
    assert [it.shape for it in found if it.title == "5 inputs"] == [shape]


def test_each_argument_of_cat_has_an_arrow_of_its_own() -> None:
    ids = [f"a{at}" for at in range(3)]
    parts = [node(i, "torch.nn.functional.relu", shape=(2, at)) for at, i in enumerate(ids)]
    lines = [replace(part, source=LineRef(line=at)) for at, part in enumerate(parts)]
    graph = AutogradNeighbourhood(
        nodes=(*lines, node("c", "torch.cat", "failed", name="cat")),
        edges=tuple(GraphEdge(src=i, dst="c", input=at) for at, i in enumerate(ids)),
        focus="c",
    )
    found = nodes(make_report(graph=graph))
    (cat,) = [item for item in found if item.is_bad]
    assert cat.has_arrow
    assert [item.joins for item in found if item.lane > 1] == [True, True]
    assert {item.column for item in found if item is not cat} == {cat.column - 1}


@pytest.mark.parametrize(("end", "lanes"), [("d", {2}), ("c", {2, 3})])
def test_branches_that_lie_apart_share_a_lane(end: str, lanes: set[int]) -> None:
    ops = [node(key, f"torch.{key}", shape=(at, 1)) for at, key in enumerate("abc")]
    sides = [node(key, f"torch.{key}", shape=(9, at)) for at, key in enumerate("st")]
    lines = [replace(part, source=LineRef(line=at)) for at, part in enumerate([*ops, *sides])]
    pairs = [("a", "b"), ("b", "c"), ("c", "d"), ("s", "b"), ("t", end)]
    graph = AutogradNeighbourhood(
        nodes=(*lines, node("d", "torch.d", "failed", name="d")),
        edges=tuple(GraphEdge(src=src, dst=dst, input=0) for src, dst in pairs),
        focus="d",
    )
    found = nodes(make_report(graph=graph))
    assert {item.lane for item in found} - {1} == lanes


def test_a_shape_error_has_a_strip_of_the_recorded_calls() -> None:
    """An arrow needs the shape that one gives and the next one is given."""
    found = nodes(with_module_names(mismatch()))
    assert [(item.title, item.has_arrow) for item in found] == [
        ("Conv1d 0", False),
        ("ReLU 1", True),
        ("Flatten 2", True),
        ("Linear 3", True),
    ]
    assert (found[-1].small, found[-1].is_bad) == ("takes 784", True)


def test_a_strip_of_very_many_boxes_is_short() -> None:
    found = nodes(REPRESENTATIVE["bert_backward"]())
    assert 3 < len([item for item in found if item.lane == 1]) <= MAX_BOXES
    assert any(item.is_bad for item in found)


def deep_mismatch() -> Report:
    """Return a shape error behind 20 modules, each of which gives what the next one takes."""
    entries = [
        HistoryEntry(
            seq=at,
            op="torch.nn.functional.relu",
            shapes="f32[16, 32] -> f32[16, 32]",
            module_path=f"layers.{at}",
            module_type="ReLU",
        )
        for at in range(20)
    ]
    given = fact("input", "float32[16, 32]", "x")
    return replace(
        mismatch(), history=tuple(entries), tensors=(given,), argument="input", module_path="head"
    )


def test_a_long_lane_leaves_out_its_middle_and_keeps_the_failure() -> None:
    """It fits the pane; a box says how many are missing, next to those right before it."""
    found = nodes(deep_mismatch())
    assert found[-1].is_bad and found[-1].has_arrow
    assert [item.title for item in found[-3:-1]] == ["ReLU layers.18", "ReLU layers.19"]
    (gap,) = [item for item in found if item.look == "gap"]
    assert gap.title == f"… {20 - sum(item.title.startswith('ReLU') for item in found)} more"
    assert sum(7.1 * len(item.title) + 40 for item in found) < MAX_WIDTH + 40


@pytest.mark.parametrize(("letters", "missing"), [(5, []), (6, ["… 2 more"])])
def test_a_lane_that_fits_as_a_whole_needs_no_room_for_a_gap(
    letters: int, missing: list[str]
) -> None:
    report = deep_mismatch()
    path = "a" * letters
    entries = [replace(item, module_path=f"{path}{item.seq}") for item in report.history[:6]]
    found = nodes(replace(report, history=tuple(entries)))
    assert [item.title for item in found if item.look == "gap"] == missing


def test_a_lane_keeps_its_first_box_and_those_around_the_failure() -> None:
    """What comes right before the failure says most, then what made that, then what comes after."""
    lane = [Node(title="x" * 26, look="fail" if at == 5 else "") for at in range(9)]
    assert [at for at, _ in _fitting(lane)] == [0, -1, 4, 5, -1]
    short = [replace(item, title="x" * 15) for item in lane]
    assert [at for at, _ in _fitting(short)] == [0, -1, 3, 4, 5, 6, -1]
    gaps = [node.title for at, node in _fitting(lane) if at == -1]
    assert gaps == ["… 3 more", "… 3 more"]


def test_a_lane_has_only_so_many_boxes() -> None:
    for count, places in ((MAX_BOXES, [*range(9)]), (MAX_BOXES + 1, [0, -1, *range(2, 10)])):
        lane = [Node(title="x", look="fail" if at == count - 1 else "") for at in range(count)]
        found = _fitting(lane)
        assert [at for at, _ in found] == places
        gaps = [(item.title, item.look, item.has_arrow) for at, item in found if at == -1]
        assert gaps == [("… 1 more", "gap", True)] * (count > MAX_BOXES)


def test_calls_that_do_not_lead_to_the_failure_are_no_boxes() -> None:
    """What the failing call was given has another shape than the last result."""
    other = fact("input", "float32[4, 4]", "mask")
    assert nodes(replace(deep_mismatch(), tensors=(other,))) == []


def nonfinite_line(*ops: tuple[str, int]) -> Report:
    """Return a NaN of ``std``, the last of some recorded calls with their lines."""
    entries = [
        HistoryEntry(
            seq=at,
            op=f"torch.Tensor.{op}",
            shapes="f32[9] -> f32[9]",
            source=LineRef(cell=7, line=line),
        )
        for at, (op, line) in enumerate(ops)
    ]
    here = SourceSpan(cell=7, line=5)
    own = fact("self", "float32[9]", "x")
    return replace(
        mismatch(),
        kind="nonfinite",
        source=here,
        history=tuple(entries),
        tensors=(own,),
        argument="self",
        module_path=None,
        op=OpName(name="aten::std", api="torch.Tensor.std"),
    )


def test_a_call_that_made_nan_is_one_box_behind_those_of_this_turn() -> None:
    """The turn before is behind another line, and the call itself has run."""
    ops = [("sub", 5), ("std", 5), ("add", 4), ("abs", 5), ("sub", 5), ("std", 5)]
    titles = [item.title for item in nodes(nonfinite_line(*ops)) if item.small != "input"]
    assert titles == ["Tensor.abs", "Tensor.sub", "Tensor.std"]


def test_a_box_has_the_shape_of_its_own_call_and_not_of_the_next_ones_view() -> None:
    relu, linear = "torch.nn.functional.relu", "torch.nn.functional.linear"
    graph = AutogradNeighbourhood(
        nodes=(
            node("a", linear, name="AddmmBackward0", shape=(1, 32)),
            node("b", linear, name="ViewBackward0", shape=(32,)),
            node("c", relu, name="ReluBackward0", shape=(32,)),
            node("d", linear, name="UnsqueezeBackward0", shape=(1, 32)),
            node("e", "aten::mm", "failed", name="MmBackward0"),
        ),
        edges=chain("a", "b", "c", "d", "e"),
        focus="e",
    )
    shapes = [(item.title, item.shape) for item in nodes(make_report(graph=graph))]
    assert shapes[:2] == [("F.linear", "[32]"), ("F.relu", "[32]")]


def test_every_box_has_a_place_of_its_own() -> None:
    for name, build in REPRESENTATIVE.items():
        places = [(item.lane, item.column) for item in nodes(build())]
        assert len(places) == len(set(places)), name
        assert all(lane >= 1 and column >= 1 for lane, column in places), name


# --- the table of nodes ---------------------------------------------------------------------------


def test_each_node_has_a_row_that_says_where_its_result_goes() -> None:
    rows = {row.name: row for row in graph_rows(make_report())}
    assert [*rows][2:5] == ["F.linear", "y", "F.cross_entropy"]
    assert rows["y"] == GraphRow(
        name="y", role="bad input", shape="i64[32]", module="", source="",
        feeds="F.cross_entropy (input 1)",
    )  # fmt: skip
    assert rows["net.3.weight"].feeds == "F.linear (input 2)"
    assert rows["F.linear"].source == "In [7] line 11 logits = net(x)"
    assert (rows["F.linear"].role, rows["F.linear"].module) == ("", "net.3")
    assert (rows["F.cross_entropy"].role, rows["F.cross_entropy"].feeds) == ("failed", "")


def test_a_node_that_feeds_several_lists_them_and_no_unknown_one() -> None:
    graph = AutogradNeighbourhood(
        nodes=(node("a", "torch.sin"), node("b", "torch.cos"), node("c", "torch.tan", "failed")),
        edges=(
            *(GraphEdge(src="a", dst=dst, input=at) for at, dst in enumerate("bcz")),
            GraphEdge(src="z", dst="b"),
        ),
    )
    feeds = [row.feeds for row in graph_rows(make_report(graph=graph))]
    assert feeds == ["cos (input 0), tan (input 1)", "", ""]


# --- one box --------------------------------------------------------------------------------------


def drawn(made: GraphNode, **parts: Any) -> tuple[str, str]:
    """Return what stands in the box of one node, and its look."""
    report = make_report(**{"prevented": False, "graph": AutogradNeighbourhood(), **parts})
    box = _node(report, Box(key=made.id, role=made.role, members=(made,)), {})
    return box.small, box.look


AT = LineRef(line=5, cell=7)


@pytest.mark.parametrize(
    ("role", "parts", "small"),
    [
        ("failed", {}, ("fails here", "fail")),
        ("failed", {"certainty": "likely"}, ("likely here", "fail")),
        ("failed", {"certainty": "likely", "phase": "backward"}, ("backward fails here", "fail")),
        ("failed", {"phase": "backward", "prevented": True}, ("not launched", "fail")),
        ("failed", {"prevented": True, "kind": "silent"}, ("wrong result", "fail")),
        ("bad_input", {}, ("bad input", "badin")),
        ("leaf", {}, ("line 5", "leaf")),
        ("upstream", {}, ("line 5", "")),
    ],
)
def test_a_box_says_what_happens_there(
    role: Any, parts: dict[str, Any], small: tuple[str, str]
) -> None:
    assert drawn(GraphNode(id="a", name="a", role=role, source=AT), **parts) == small


def test_a_box_without_a_line_says_nothing_and_a_value_goes_before_all() -> None:
    plain = GraphNode(id="a", name="a", role="upstream")
    assert drawn(plain) == ("", "")
    assert drawn(replace(plain, value=0.0, source=AT)) == ("value 0", "")


@pytest.mark.parametrize(
    ("parts", "is_writer"),
    [
        ({"provenance": (ProvenanceStep(source=AT, note=CHANGED),)}, True),
        ({"provenance": (ProvenanceStep(source=AT, note="made here"),)}, False),
        ({"provenance": (ProvenanceStep(source=replace(AT, line=6), note=CHANGED),)}, False),
        ({"provenance": (ProvenanceStep(source=replace(AT, cell=8), note=CHANGED),)}, False),
        ({"observations": (Observation(kind="write", text="t", sources=(
            MarkedLine(line=5, cell=7, mark="changes it"),)),)}, True),
        ({"observations": (Observation(kind="write", text="t", sources=(
            MarkedLine(line=5, cell=7, mark="reads it"),)),)}, False),
        ({"observations": (Observation(kind="graph", text="t", sources=(
            MarkedLine(line=5, cell=7, mark="changes it"),)),)}, False),
    ],
)  # fmt: skip
def test_what_changes_a_tensor_that_backward_needs_says_so(
    parts: dict[str, Any], is_writer: bool
) -> None:
    made = GraphNode(id="a", name="a", role="bad_input", source=AT)
    expected = ("changes it, line 5", "writer") if is_writer else ("bad input", "badin")
    assert drawn(made, **{"provenance": (), **parts}) == expected
    assert drawn(replace(made, source=None), **parts) == ("bad input", "badin")


def test_a_device_is_told_where_the_graph_is_on_several() -> None:
    one = GraphNode(id="a", name="a", role="leaf", shape=(2,), device="cuda:0")
    for devices, shape in ((("cuda:0", "cpu"), "[2] cuda:0"), (("cuda:0", None), "[2]")):
        graph = AutogradNeighbourhood(nodes=tuple(replace(one, device=it) for it in devices))
        box = Box(key="a", role="leaf", members=(one,))
        assert _node(make_report(graph=graph), box, {}).shape == shape


# --- lanes ----------------------------------------------------------------------------------------


def test_a_lane_needs_a_column_on_each_side_of_what_is_there() -> None:
    taken = [(2, range(3, 5)), (3, range(1, 2))]
    assert _free_lane([], range(1, 2)) == 2
    assert _free_lane(taken, range(6, 8)) == 2
    assert _free_lane(taken, range(5, 8)) == 3
    assert _free_lane(taken, range(1, 2)) == 2
    assert _free_lane(taken, range(2, 3)) == 4


def flow(*pairs: str, failed: str = "f", bad: str = "", letters: int = 1) -> list[Node]:
    """Return the boxes of a graph whose nodes are letters and whose edges are pairs of them."""
    keys = dict.fromkeys("".join(pairs))
    roles = {failed: "failed", bad: "bad_input"}
    made = [
        replace(
            node(
                key,
                f"torch.{key * letters}",
                roles.get(key, "upstream"),
                name=key,
                shape=(at, 1),
            ),
            source=LineRef(line=at),
        )
        for at, key in enumerate(keys)
    ]
    graph = AutogradNeighbourhood(
        nodes=tuple(made),
        edges=tuple(GraphEdge(src=one, dst=other) for one, other in pairs),
        focus=failed,
    )
    return nodes(make_report(graph=graph))


def lane(found: list[Node], number: int = 1) -> str:
    return "".join(item.title for item in found if item.lane == number)


def test_the_longest_way_to_the_failure_is_the_main_lane() -> None:
    assert lane(flow("ab", "bc", "cf", "xf", "fy")) == "abcfy"
    assert lane(flow("ab", "bc", "cf", "xf"), 2) == "x"
    assert lane(flow("xf", "ab", "bc", "cf")) == "abcf"


def test_a_branch_begins_where_its_ways_meet() -> None:
    assert lane(flow("ab", "bc", "cf", "yx", "xf"), 2) == "yx"
    assert lane(flow("ab", "bc", "cf", "yx", "zx", "xf"), 2) == "x"


def test_a_bad_input_has_a_lane_of_its_own_unless_it_is_all_or_was_computed() -> None:
    assert lane(flow("ab", "bf", "xf", bad="x")) == "abf"
    assert lane(flow("xf", "fy", "yz", bad="x")) == "xfyz"
    assert lane(flow("ax", "xf", "bf", bad="x")) == "axf"
    assert lane(flow("xf", "af", "fb", bad="x")) == "afb"


@pytest.mark.parametrize(
    ("branch", "shown"),
    [(("xe",), "x"), (("xc",), ""), (("xy", "ye"), "xy"), (("xy", "yz", "ze"), "")],
)
def test_a_branch_of_a_box_that_is_left_out_or_without_room_is_left_out(
    branch: tuple[str, ...], shown: str
) -> None:
    """Of six wide boxes the first, a gap and the last two fit."""
    found = flow("ab", "bc", "cd", "de", "ef", *branch, letters=26)
    assert [item.title[:3] for item in found if item.lane == 1] == ["aaa", "… 3", "eee", "fff"]
    assert "".join(item.title[0] for item in found if item.lane > 1) == shown
    assert min(item.column for item in found) == 1


W, VIEW = node("w", "", "parameter", name="w"), node("v", "aten::t", shape=(2,))


@pytest.mark.parametrize(
    ("between", "more", "titles"),
    [
        (VIEW, (), ["x", "exp", "f"]),
        (replace(VIEW, op="aten::mul", name="MulBackward0"), (), ["x", "exp", "f", "mul"]),
        (VIEW, ("xv",), ["x", "t", "f", "exp"]),
    ],
)
def test_parameters_and_their_views_are_no_boxes(
    between: GraphNode, more: tuple[str, ...], titles: list[str]
) -> None:
    made = (
        *(node("x", "", "leaf", name="x"), W, between),
        *(node("a", "aten::exp"), node("f", "torch.f", "failed", name="f")),
    )
    pairs = ("xa", "af", "wv", "vf", *more)
    edges = tuple(GraphEdge(src=one, dst=other) for one, other in pairs)
    graph = AutogradNeighbourhood(nodes=made, edges=edges, focus="f")
    assert [item.title for item in nodes(make_report(graph=graph))] == titles


@pytest.mark.parametrize(
    ("lines", "inner", "more", "titles"),
    [
        ((3,), (), (), ["x", "exp", "Head head"]),
        ((3, 4), (), (), ["x", "exp", "Head head", "f"]),
        ((3,), ("head.0",), (), ["x", "exp", "Head head", "f"]),
        # Joined, it would feed itself.
        ((3,), (), ("bc", "cf"), ["x", "exp", "Head head", "cos", "Head head"]),
    ],
)
def test_a_module_that_failed_in_its_one_call_is_one_box(
    lines: tuple[int, ...], inner: tuple[str, ...], more: tuple[str, ...], titles: list[str]
) -> None:
    made = [node("x", "", "leaf", name="x"), node("a", "aten::exp", module_path="net")]
    made += [node("b", "aten::mul", module_path="head"), node("c", "aten::cos")][: 1 + len(more)]
    made.append(node("f", "torch.f", "failed", name="f", module_path="head"))
    history = [
        HistoryEntry(
            seq=at, op="o", module_path=path, module_type="Head", source=LineRef(line=line)
        )
        for at, (path, line) in enumerate(
            [*(("head", it) for it in lines), *((i, 3) for i in inner)]
        )
    ]
    edges = tuple(GraphEdge(src=one, dst=other) for one, other in ("xa", "ab", "bf", *more))
    graph = AutogradNeighbourhood(nodes=tuple(made), edges=edges, focus="f")
    report = make_report(graph=graph, history=tuple(history))
    assert [item.title for item in nodes(report)] == titles


def test_there_are_only_so_many_lanes() -> None:
    found = flow("ab", "bf", "pf", "qf", "rf", "sf")
    assert {item.lane for item in found} == set(range(1, MAX_LANES + 1))
    found = flow("ab", "bc", "cd", "df", "pb", "qc", "rd", "sf")
    assert {item.title for item in found if item.lane > 1} == set("qrs")  # nearest to the failure


@pytest.mark.parametrize(
    ("pairs", "starts"),
    [
        (("ab", "bc", "cf", "xf"), {"x": False}),
        (("ab", "bc", "cf", "bx", "xf"), {"x": True}),
        (("ab", "bc", "cf", "ax", "xf"), {"x": False}),
        (("ab", "bc", "cd", "df", "bx", "xy", "yf"), {"x": True, "y": False}),
        # What feeds a later box of the chain does not feed its first one.
        (("ab", "bc", "cd", "df", "bx", "px", "xf"), {"p": False, "x": False}),
    ],
)
def test_an_arrow_from_the_lane_above_is_an_edge_to_the_first_box_of_a_branch(
    pairs: tuple[str, ...], starts: dict[str, bool]
) -> None:
    branch = [item for item in flow(*pairs) if item.lane == 2]
    assert {item.title: item.starts_above for item in branch} == starts
    assert [item.joins for item in branch] == [*[False] * (len(starts) - 1), True]
    assert [item.has_arrow for item in branch] == [False, *[True] * (len(starts) - 1)]


@pytest.mark.parametrize(("pairs", "count"), [(("af",), 0), (("ab", "bf"), 3)])
def test_a_strip_of_two_boxes_tells_little(pairs: tuple[str, ...], count: int) -> None:
    assert len(flow(*pairs)) == count
    assert strip(make_report(graph=AutogradNeighbourhood(), history=())) is None


# --- recorded calls -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shape"),
    [("f32[2, 3]", "[2, 3]"), ("f32[2], i64[3]", "[2]"), ("f32[]", "[]"), ("3", ""), ("", "")],
)
def test_the_shape_of_the_first_value(text: str, shape: str) -> None:
    assert _brackets(text) == shape


def test_calls_before_a_break_in_the_flow_are_left_out() -> None:
    """What leads nowhere would be taken for an input of the failing call."""
    entries = list(deep_mismatch().history[:4])
    for broken, titles in ((0, "x0123"), (1, "123"), (2, "23"), (3, "3")):
        given = "f32[9]" if broken else "f32[16, 32]"
        changed = [
            replace(item, shapes=f"{given} -> f32[16, 32]") if at == broken else item
            for at, item in enumerate(entries)
        ]
        found = nodes(replace(deep_mismatch(), history=tuple(changed)))
        told = "".join(item.title.rpartition(".")[2] for item in found[:-1])
        assert told == (titles if len(titles) > 1 else "")


@pytest.mark.parametrize(("kind", "count"), [("host_error", 3), ("nonfinite", 2)])
def test_only_a_call_that_made_nan_is_among_those_recorded(kind: Any, count: int) -> None:
    report = nonfinite_line(("abs", 5), ("sub", 5), ("std", 5))
    found = nodes(replace(report, kind=kind))
    assert sum(item.small == "" for item in found) == count
    assert nodes(replace(report, kind="cuda_error")) == []
    assert nodes(replace(report, source=None)) == []


def test_what_the_failing_module_has_done_itself_is_within_its_box() -> None:
    report = deep_mismatch()
    entries = [*report.history[:3]]
    own = replace(entries[2], module_path="head")
    found = nodes(replace(report, history=(*entries[:2], own)))
    assert [item.title for item in found] == ["x", "ReLU layers.0", "ReLU layers.1", "ReLU head"]
    assert found[-1].is_bad


@pytest.mark.parametrize(
    ("api", "argument", "small"),
    [
        ("torch.nn.functional.linear", "weight", "takes 784"),
        ("torch.nn.functional.linear", "other", "fails here"),
        ("torch.nn.functional.conv1d", "weight", "fails here"),
    ],
)
def test_only_a_linear_layer_says_how_many_features_it_takes(
    api: str, argument: str, small: str
) -> None:
    report = deep_mismatch()
    facts = (*report.tensors, fact(argument, "float32[10, 784]"))
    found = nodes(replace(report, tensors=facts, op=OpName(name="aten::linear", api=api)))
    assert found[-1].small == small and found[-1].is_bad
