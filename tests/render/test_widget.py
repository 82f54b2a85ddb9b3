"""The interactive row: it searches the calls and saves the report, and adds nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import ipywidgets
import pytest
import torch

from cudalens.core.tensor_values import find_offenders
from cudalens.render.widget import NOTHING, build, live, save_beside
from tests.builders import REPRESENTATIVE, make_report
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
    assert "<table" not in texts(view)


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
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
    button = next(item for item in walk(view) if type(item) is ipywidgets.Button)
    button.click()
    assert "not saved: full" in texts(view)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_the_widget_of_a_report_begins_with_the_static_one(name: str) -> None:
    """Whoever displays the widget alone sees all that a notebook's output shows."""
    report = REPRESENTATIVE[name]()
    assert '<section class="cudalens' in texts(build(report))


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
    slider.value = 2
    assert "y[2], 8 × 8" in texts(view) and "y[2]" not in first


def test_names_of_tensors_are_text() -> None:
    """Nothing that a user has named becomes an element."""
    facts = tuple(
        replace(fact, expression="<b>y</b>", dtype="<i>") for fact in make_report().tensors
    )
    view = live(make_report(tensors=facts, expression="<b>y</b>"))
    chosen(view, "tensor")
    assert "<b>y" not in texts(view) and "<i>" not in texts(view)
