"""The interactive row: it searches the calls and saves the report, and adds nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import ipywidgets
import pytest
import torch

from cudalens.core.report import (
    AutogradNeighbourhood,
    GraphEdge,
    GraphNode,
    HistoryEntry,
    LineRef,
    Offenders,
    OpName,
    Plane,
)
from cudalens.core.tensor_values import find_offenders
from cudalens.render.strip import GraphRow
from cudalens.render.widget import (
    MAX_FOUND,
    MAX_LISTED,
    MAX_NEIGHBOURS,
    NOTHING,
    _node_facts,
    build,
    live,
    save_beside,
)
from tests.builders import REPRESENTATIVE, chain, fact, make_report, node, small_graph
from tests.rendering import Page


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close every widget of a test."""
    yield
    ipywidgets.Widget.close_all()


def walk(widget: ipywidgets.Widget) -> list[ipywidgets.Widget]:
    children = getattr(widget, "children", ())
    return [widget, *(item for child in children for item in walk(child))]


def search(view: ipywidgets.Widget) -> ipywidgets.Text:
    (field,) = (item for item in walk(view) if type(item) is ipywidgets.Text)
    return field


def texts(view: ipywidgets.Widget) -> str:
    return " ".join(item.value for item in walk(view) if type(item) is ipywidgets.HTML)


@pytest.mark.parametrize(
    ("text", "kept"), [("aten::relu", 1), ("NET.3", 1), ("f32[32, 16", 3), ("nowhere", 0)]
)
def test_the_calls_are_searched(text: str, kept: int) -> None:
    """By name, module and shape, in capitals or not; what is not asked for shows nothing."""
    view = live(make_report())
    assert "<table" not in texts(view)
    search(view).value = text
    assert f"{kept} of 6" in texts(view)
    table = texts(view).partition("</style>")[2]
    rows = [tag for tag, _ in Page(f"<div>{table}</div>").elements if tag == "tr"]
    assert len(rows) == kept + 1
    search(view).value = ""
    assert "<table" not in texts(view) and "of 6" not in texts(view)


def test_hostile_searches_add_nothing() -> None:
    view = live(make_report())
    search(view).value = "<script>alert(1)</script>"
    assert "<script" not in texts(view)


@pytest.mark.parametrize("suffix", [".md", ".html", ".json"])
def test_saving_never_overwrites(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [save_beside(make_report(), suffix).name for _ in range(2)]
    assert names == [f"cudalens_report_{at}{suffix}" for at in (1, 2)]


def test_a_save_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    view = live(make_report())
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=OSError("<full>")))
    button = next(item for item in walk(view) if type(item) is ipywidgets.Button)
    button.click()
    assert "not saved: &lt;full&gt;" in texts(view)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_the_widget_of_a_report_begins_with_the_static_one(name: str) -> None:
    """Whoever displays the widget alone sees all that a notebook's output shows."""
    report = REPRESENTATIVE[name]()
    whole = build(report)
    assert '<section class="cudalens' in texts(whole.children[0])
    assert len(whole.children) == 2 and "save" in texts(whole.children[1])


def choice(view: ipywidgets.Widget) -> ipywidgets.Dropdown:
    (found,) = (item for item in walk(view) if type(item) is ipywidgets.Dropdown)
    return found


def chosen(view: ipywidgets.Widget, begin: str) -> None:
    """Choose the first item of the list that begins so."""
    field = choice(view)
    field.value = next(value for label, value in field.options if label.startswith(begin))


def test_a_chosen_tensor_shows_its_values() -> None:
    """Shape, dtype, how often each value occurs, the bad ones; nothing before, nothing after."""
    view = live(make_report())
    assert "how often" not in texts(view)
    chosen(view, "tensor  y  i64[32]")
    assert "int64" in texts(view) and "10: 3" in texts(view) and "[17] = 10" in texts(view)
    choice(view).value = NOTHING
    assert "how often" not in texts(view)


def test_one_walks_from_node_to_node() -> None:
    """The buttons lead to what a node was given and to what it feeds, and back."""
    view = live(make_report())
    chosen(view, "node  F.cross_entropy")

    def go(label: str) -> None:
        buttons = [item for item in walk(view) if type(item) is ipywidgets.Button]
        next(item for item in buttons if (item.tooltip or "").startswith(label)).click()

    assert "AddmmBackward0" not in texts(view)
    go("given: F.linear")
    assert "<code>AddmmBackward0</code>" in texts(view)
    go("feeds: F.cross_entropy")
    assert choice(view).label.startswith("node  F.cross_entropy")


def test_each_slice_with_bad_values_can_be_seen() -> None:
    """The first screen shows two of them."""
    masks = torch.zeros(3, 8, 8, dtype=torch.long)
    masks[0, 0], masks[1, 1], masks[2, 2] = 9, 9, 9
    found = find_offenders(masks, masks > 6)
    view = live(make_report(offenders=found))
    chosen(view, "tensor  y")
    (slider,) = (item for item in walk(view) if type(item) is ipywidgets.SelectionSlider)
    first = texts(view)
    assert slider.options == (("y[0]", 0), ("y[1]", 1), ("y[2]", 2))
    slider.value = 2
    assert "y[2], 8 × 8" in texts(view) and "y[2]" not in first


def test_names_of_tensors_are_text() -> None:
    """Nothing that a user has named becomes an element."""
    facts = tuple(
        replace(fact, expression="<b>y</b>", dtype="<i>") for fact in make_report().tensors
    )
    plane = Plane(index=(0,), rows=("0x",), size=(1, 2))
    found = Offenders(total=2, count=1, planes=(plane,))
    view = live(make_report(tensors=facts, expression="<b>y</b>", offenders=found))
    for at in range(len(facts)):
        choice(view).value = ("tensor", str(at))
        assert "<b>y" not in texts(view) and "<i>" not in texts(view)
    assert "&lt;b&gt;y&lt;/b&gt;[0], 1 × 2" in texts(view)


# --- what the list has, and what is known of each ------------------------------------------------


def items(view: ipywidgets.Widget, kind: type) -> list[Any]:
    return [item for item in walk(view) if type(item) is kind]


def test_the_row_has_parts_for_what_the_report_has() -> None:
    empty = AutogradNeighbourhood()
    for facts, dropdowns, fields in (
        ({}, 1, 1),
        ({"history": ()}, 1, 0),
        ({"tensors": ()}, 1, 1),
        ({"graph": empty}, 1, 1),
        ({"tensors": (), "graph": empty}, 0, 1),
    ):
        view = live(make_report(**facts))
        assert len(items(view, ipywidgets.Dropdown)) == dropdowns
        assert len(items(view, ipywidgets.Text)) == fields
        assert [item.description for item in items(view, ipywidgets.Button)] == (
            ["Markdown", "HTML", "JSON"]
        )


@pytest.mark.parametrize(("at", "suffix"), enumerate([".md", ".html", ".json"]))
def test_each_button_saves_its_form_and_says_so(
    at: int, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    view = live(make_report())
    items(view, ipywidgets.Button)[at].click()
    assert f"saved as cudalens_report_1{suffix}" in texts(view)
    assert (tmp_path / f"cudalens_report_1{suffix}").exists()


@pytest.mark.parametrize("count", [MAX_LISTED, MAX_LISTED + 1])
def test_only_so_many_tensors_and_nodes_are_listed(count: int) -> None:
    facts = tuple(fact("x", "float32[2]", f"x{at}") for at in range(count))
    made = tuple(node(f"n{at}", f"torch.f{at}") for at in range(count))
    graph = AutogradNeighbourhood(nodes=made, edges=chain("n0", "n1", f"n{count - 1}"))
    view = live(make_report(tensors=facts, graph=graph))
    labels = [label for label, _ in choice(view).options]
    assert labels[:2] == ["look at a tensor or a node", "tensor  x0  f32[2]"]
    assert sum(label.startswith("tensor") for label in labels) == MAX_LISTED
    assert sum(label.startswith("node") for label in labels) == MAX_LISTED
    chosen(view, "node  f1")  # what is not listed cannot be gone to
    tips = [item.tooltip for item in items(view, ipywidgets.Button)[3:]]
    assert tips == ["given: f0", *([f"feeds: f{count - 1}"] if count == MAX_LISTED else [])]


@pytest.mark.parametrize("count", [MAX_NEIGHBOURS, MAX_NEIGHBOURS + 1])
def test_a_node_has_a_button_for_each_neighbour_up_to_a_limit(count: int) -> None:
    made = [node(f"n{at}", f"torch.{'f' * 50}{at}") for at in range(count)]
    edges = [GraphEdge(src=item.id, dst="end", input=at) for at, item in enumerate(made)]
    graph = AutogradNeighbourhood(nodes=(*made, node("end", "torch.end")), edges=(edges[0], *edges))
    view = live(make_report(graph=graph))
    chosen(view, "node  end")
    buttons = items(view, ipywidgets.Button)[3:]
    assert len(buttons) == len({button.tooltip for button in buttons}) == MAX_NEIGHBOURS
    assert all(len(button.description) <= 44 < len(button.tooltip) for button in buttons)


@pytest.mark.parametrize("count", [1, 2])
def test_one_plane_needs_no_slider(count: int) -> None:
    planes = tuple(Plane(index=(at,), rows=("0x",), size=(1, 2)) for at in range(count))
    report = make_report()
    assert report.offenders is not None
    view = live(replace(report, offenders=replace(report.offenders, planes=planes)))
    chosen(view, "tensor  y")
    assert len(items(view, ipywidgets.SelectionSlider)) == count - 1
    assert 'alt="y[0], 1 × 2: where the bad values are"' in texts(view)
    chosen(view, "tensor  logits")
    assert not items(view, ipywidgets.SelectionSlider) and "<img" not in texts(view)


@pytest.mark.parametrize("bad_at", [(0,), None])
def test_the_picture_is_at_the_tensor_that_was_typed_too(bad_at: tuple[int, ...] | None) -> None:
    planes = (Plane(index=(), rows=("0x",), size=(1, 2)),)
    report = make_report()
    assert report.offenders is not None
    typed = fact(None, "int64[2]", "z", bad_at=bad_at)
    found = replace(report.offenders, planes=planes)
    view = live(replace(report, offenders=found, tensors=(*report.tensors, typed)))
    chosen(view, "tensor  z")
    assert ("<img" in texts(view)) is (bad_at is not None)


def test_modules_and_nodes_go_by_their_names_in_the_list_and_in_the_search() -> None:
    """The model's variable stands before a path where that is proven."""
    graph = replace(small_graph(), module_names=(("net.3", "model.head"),))
    for made, name in ((graph, "model.head"), (small_graph(), "net.3")):
        view = live(make_report(graph=made))
        search(view).value = name
        assert "1 of 6" in texts(view)
        search(view).value = ""
        chosen(view, "node  F.linear  [32, 10]  In [7] line 11")
        assert f"<code>{name}</code>" in texts(view)


def test_each_part_of_the_row_has_its_class() -> None:
    """The style sheet reaches it by that."""
    view = live(make_report())
    chosen(view, "node  F.cross_entropy")
    classes = [item._dom_classes for item in walk(view) if item._dom_classes]
    assert classes == [("cudalens", "cl-live"), ("cl-live-bar",), ("cl-live-ends",)]


def test_what_is_known_of_a_node() -> None:
    where = LineRef(line=3, cell=2, text="y = f(x)")
    made = GraphNode(
        id="a", name="SinBackward0", op="torch.sin", role="failed", source=where, value=0.0,
        device="cuda:0", module_path="net.0", shape=(2,), dtype="float32",
    )  # fmt: skip
    row = GraphRow("sin", "failed", "f32[2]", "net.0", "In [2] line 3", "")
    assert _node_facts(made, row) == [
        ("node", "SinBackward0"), ("role", "failed"), ("operator", "torch.sin"),
        ("shape", "f32[2]"), ("device", "cuda:0"), ("module", "net.0"),
        ("line", "In [2] line 3: y = f(x)"), ("value", "0"),
    ]  # fmt: skip
    bare = GraphNode(id="a", name="a")
    assert _node_facts(bare, GraphRow("a", "", "", "", "", "")) == [("node", "a")]


@pytest.mark.parametrize(
    ("word", "count"), [("in [2] line 3", 1), ("y = f(x)", 1), ("net.0", 1), ("backward", 1),
                        ("f32[2]", 1), ("forward", 0)],
)  # fmt: skip
def test_each_fact_of_a_call_is_searched(word: str, count: int) -> None:
    where = LineRef(line=3, cell=2, text="y = f(x)")
    entry = HistoryEntry(
        seq=1, op="aten::sin", shapes="f32[2]", source=where, module_path="net.0", phase="backward"
    )
    view = live(make_report(history=(entry,), op=OpName()))
    assert "search 1 call: " in search(view).placeholder
    search(view).value = f" {word.upper()} "
    assert f"{count} of 1<" in texts(view)


@pytest.mark.parametrize("count", [MAX_FOUND, MAX_FOUND + 1])
def test_only_so_many_found_calls_are_drawn_and_all_are_counted(count: int) -> None:
    entries = tuple(HistoryEntry(seq=at, op=f"aten::f{at}", shapes="") for at in range(count))
    view = live(make_report(history=entries, op=OpName()))
    search(view).value = "aten::f"
    assert f"{count} of {count}" in texts(view)
    table = texts(view).partition("</style>")[2]
    assert table.count("<tr") == MAX_FOUND + 1


def test_the_row_says_what_it_does_to_readers_of_each_kind() -> None:
    """A search answers while it is typed, and a screen reader is told how many it found."""
    view = live(make_report())
    field = search(view)
    assert field.placeholder == "search 5 calls: name, shape, line or module"
    assert field.continuous_update
    field.value = "aten::relu"
    assert '<span role="status">1 of 6</span>' in texts(view)
    assert [item.tooltip for item in items(view, ipywidgets.Button)] == [
        f"save the report as {name} in the notebook's folder"
        for name in ("Markdown", "HTML", "JSON")
    ]
