"""A report as a figure: what is bad is marked in it, and matplotlib comes only with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.colors import to_hex
from matplotlib.image import imread
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from cudalens.core.report import AutogradNeighbourhood, Bounds, OffenderMap, Offenders, Plane
from cudalens.render import figures
from cudalens.render.colours import LIGHT
from cudalens.render.strip import strip
from tests.builders import REPRESENTATIVE, make_report, small_graph
from tests.processes import python


def test_the_figure_marks_the_bad_values_the_bound_and_the_graph() -> None:
    """Item 38.5: a red bar and a cross at each bad position, a line at the bound, the boxes."""
    report = make_report()
    assert report.offenders is not None
    figure = report.figure()
    values, graph = figure.axes
    red = [bar for bar in values.patches if to_hex(bar.get_facecolor()) == LIGHT["bad"]]
    places = [item.position[0] for item in report.offenders.first]
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in red] == places
    assert [bar.get_height() for bar in red] == [item.value for item in report.offenders.first]
    crosses = [line.get_xdata()[0] for line in values.lines if line.get_marker() == "x"]
    assert crosses == places
    assert 9 in [line.get_ydata()[0] for line in values.lines if line.get_linestyle() == "--"]
    assert "max 9" in [text.get_text() for text in values.texts]
    named = {text.get_text() for text in graph.texts}
    assert {"F.cross_entropy", "not launched", "y", "bad input"} <= named
    assert "y[17] = 10 is outside" in figure.texts[0].get_text().replace("\n", " ")


@pytest.mark.parametrize("name", ["labels", "mismatch", "bert_backward"])
def test_the_name_of_a_node_fits_into_its_box(name: str) -> None:
    figure = REPRESENTATIVE[name]().figure()
    figure.draw_without_rendering()
    graph = figure.axes[-1]
    boxes = [box.get_window_extent() for box in graph.patches if isinstance(box, FancyBboxPatch)]
    names = [text.get_window_extent() for text in graph.texts]
    for box in boxes:
        inside = [name for name in names if box.y0 < (name.y0 + name.y1) / 2 < box.y1]
        inside = [name for name in inside if box.x0 < (name.x0 + name.x1) / 2 < box.x1]
        assert inside
        assert all(box.x0 <= name.x0 and name.x1 <= box.x1 for name in inside)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_report_is_saved_as_a_figure(suffix: str, tmp_path: Path) -> None:
    """The file is what its suffix says, and the picture has the colour of what is bad in it."""
    path = make_report().save(tmp_path / f"report.{suffix}")
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(begins)
    if suffix == "png":
        pixels = {to_hex(pixel) for row in imread(path) for pixel in row}
        assert {LIGHT["bad"], LIGHT["bar"], LIGHT["badsoft"]} <= pixels
    elif suffix == "svg":
        assert LIGHT["bad"] in path.read_text()


def bars(low: tuple[Any, ...], high: tuple[Any, ...], bad: tuple[int, ...], **parts: Any) -> Any:
    """Return the axes of a vector that is drawn by position."""
    grid = OffenderMap(rows=1, columns=len(bad), bad=bad, low=low, high=high)
    found = Offenders(total=len(bad), count=sum(bad), map=grid)
    facts = {"graph": AutogradNeighbourhood(), "history": (), "bounds": None, **parts}
    return make_report(offenders=found, **facts).figure().axes


def test_a_bar_goes_from_the_smallest_to_the_largest_value() -> None:
    """From zero where both are on one side of it; to an end where a value is not finite."""
    nan = float("nan")
    (axes,) = bars((1, -3, -2, nan, 4), (2, -1, 5, 3, nan), (0, 0, 0, 1, 0))
    drawn = [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in axes.patches]
    assert drawn == [(0, 2), (-3, 0), (-2, 5), (-3, 3), (0, 5)]
    assert [round(bar.get_x() + 0.4, 6) for bar in axes.patches] == [0, 1, 2, 3, 4]
    colours = [to_hex(bar.get_facecolor()) for bar in axes.patches]
    assert colours == [LIGHT["bar"]] * 3 + [LIGHT["bad"], LIGHT["bar"]]
    (cross,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (3, pytest.approx(3 + 8 * 0.04))


@pytest.mark.parametrize(
    ("bounds", "lines"),
    [
        (Bounds(min=-1, max=4), {"min -1": -1, "max 4": 4}),
        (Bounds(min=-2, max=5), {}),
        (Bounds(max=0.5), {"max 0.5": 0.5}),
        (None, {}),
    ],
)
def test_a_bound_has_a_line_where_it_is_within_the_values(
    bounds: Bounds | None, lines: dict[str, float]
) -> None:
    (axes,) = bars((-1, 2), (1, 4), (0, 1), bounds=bounds)
    assert {text.get_text(): text.xy[1] for text in axes.texts} == lines
    assert [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"] == (
        [*lines.values()]
    )


@pytest.mark.parametrize(
    ("parts", "title"),
    [
        ({"expression": "y", "bounds": Bounds(min=0, max=3)}, "y, 2 values; allowed 0 … 3"),
        ({"expression": None}, "target, 2 values"),
        ({"expression": None, "argument": None}, "values, 2 values"),
        ({"expression": "a$b"}, r"a\$b, 2 values"),
    ],
)
def test_the_values_are_named_with_what_is_allowed(parts: dict[str, Any], title: str) -> None:
    (axes,) = bars((-1, 2), (1, 4), (0, 1), **parts)
    assert axes.get_title(loc="left") == title


def test_only_what_is_known_is_drawn() -> None:
    assert len(bars((1,), (1,), (1,), graph=make_report().graph)) == 2
    assert len(make_report(offenders=None).figure().axes) == 1
    assert bars((), (), ()) == []


def test_a_box_of_the_strip_says_what_is_below_it() -> None:
    axes = make_report().figure().axes[-1]
    said = [text.get_text() for text in axes.texts]
    assert said.count("[32]") == 1 and "bad input" in said  # both, of the bad input
    boxes = [box for box in axes.patches if isinstance(box, FancyBboxPatch)]
    arrows = [arrow for arrow in axes.patches if isinstance(arrow, FancyArrowPatch)]
    drawn = strip(make_report())
    assert drawn is not None
    assert len(boxes) == len(drawn.nodes)
    assert len(arrows) == sum(node.has_arrow + node.joins for node in drawn.nodes)
    begins = {tuple(arrow._posA_posB[0]) for arrow in arrows}
    assert begins >= {(node.column + 0.38, node.lane) for node in drawn.nodes if node.joins}
    assert [box.get_linestyle() == "--" for box in boxes] == [it.is_bad for it in drawn.nodes]
    assert [to_hex(box.get_edgecolor()) for box in boxes] == (
        [LIGHT["bad" if node.look in ("fail", "badin") else "muted"] for node in drawn.nodes]
    )


def test_a_box_goes_by_the_models_name_where_that_is_proven() -> None:
    graph = replace(small_graph(), module_names=(("net.3", "model.head"),))
    for report, title in (
        (make_report(graph=graph), "Linear model.head"),
        (make_report(), "Linear net.3"),
    ):
        axes = report.figure().axes[-1]
        assert title in [text.get_text() for text in axes.texts]


def test_an_image_stays_an_image() -> None:
    """Of a plane each bad cell is red at its row and column."""
    report = make_report()
    assert report.offenders is not None
    plane = Plane(index=(1,), size=(2, 4), rows=("00x9", "0000"))
    drawn = replace(report, offenders=replace(report.offenders, planes=(plane,))).figure()
    (image,) = drawn.axes[0].images
    drawn_as = [[to_hex(image.to_rgba(value)) for value in row] for row in image.get_array()]
    good, best = (figures.css(figures.PALETTE[at]) for at in (1, 10))
    assert drawn_as == [[good, good, figures.css(figures.BAD), best], [good] * 4]
    assert "at [1]" in drawn.axes[0].get_title()


def test_a_notebook_shows_the_figure() -> None:
    """As a picture, though nothing has set matplotlib up for notebooks."""
    data, _ = DisplayFormatter().format(make_report().figure())
    assert data["image/png"].startswith(b"\x89PNG")


def test_a_report_without_values_or_graph_is_still_a_figure(tmp_path: Path) -> None:
    """The headline alone is drawn, also where it holds what matplotlib reads as mathematics."""
    report = replace(make_report(), offenders=None, graph=type(make_report().graph)())
    report = replace(report, headline="cost $x_{i}$ of $y$")
    assert report.save(tmp_path / "report.png").stat().st_size > 1000


def test_matplotlib_comes_with_a_figure_only() -> None:
    """Neither loading nor showing a report imports it."""
    code = (
        "import sys\nfrom tests.builders import make_report\nreport = make_report()\n"
        "report.to_text(), report.to_html(), report._repr_mimebundle_(), report.to_json()\n"
        "report.widget()\nprint('matplotlib' in sys.modules)\n"
        "report.figure()\nprint('matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    assert python("-c", code, fresh=True).stdout.split() == ["False", "True", "False"]


def test_the_first_plane_is_drawn_with_its_rows_downwards() -> None:
    report = make_report()
    assert report.offenders is not None
    planes = tuple(Plane(index=(at,), size=(2, 4), rows=("00x9", "0000")) for at in (1, 2))
    drawn = replace(report, offenders=replace(report.offenders, planes=planes)).figure()
    (image,) = drawn.axes[0].images
    assert tuple(image.get_extent()) == (-0.5, 3.5, 1.5, -0.5)
    assert "at [1]" in drawn.axes[0].get_title()


def test_the_figure_has_room_for_each_column_and_lane_of_the_strip() -> None:
    """The main lane is above; what a box says of itself stands over its shape."""
    figure, drawn = make_report().figure(), strip(make_report())
    assert drawn is not None
    columns, lanes = (max(getattr(it, name) for it in drawn.nodes) for name in ("column", "lane"))
    assert lanes > 1
    values, graph = figure.axes
    assert (graph.get_xlim(), graph.get_ylim()) == ((0.4, columns + 0.6), (lanes + 0.6, 0.5))
    assert not graph.axison and values.axison
    size = (max(6.4, 1.6 * columns), 2.4 + 0.8 * lanes + 0.2 + 0.8)
    assert tuple(figure.get_size_inches()) == pytest.approx(size)
    said = {text.get_position(): text.get_text() for text in graph.texts}
    for node in drawn.nodes:
        assert said[node.column, node.lane + 0.13] == (node.small or node.shape)
        below = said.get((node.column, node.lane + 0.39))
        assert below == (node.shape if node.small and node.shape else None)
    assert values.get_xlabel() == "position"
    dashed = [line.get_color() for line in values.lines if line.get_linestyle() == "--"]
    assert dashed and {*dashed} == {LIGHT["bad"]}
