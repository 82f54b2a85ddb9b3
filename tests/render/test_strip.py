"""The strip of calls: only arrows that are data flow, the failing box at its own layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cudalens.core.report import (
    AutogradNeighbourhood,
    GraphEdge,
    HistoryEntry,
    LineRef,
    OpName,
    Report,
    SourceSpan,
)
from cudalens.render.strip import MAX_BOXES, MAX_WIDTH, Node, _fitting, strip
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
