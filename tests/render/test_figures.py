"""The pictures: what they show, where they put it, and that they overlap nothing."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from cudalens.core.report import (
    AutogradNeighbourhood,
    Bounds,
    GraphEdge,
    Histogram,
    HistoryEntry,
    LineRef,
    Offender,
    OffenderMap,
    Offenders,
    Report,
    TensorFact,
    TensorSummary,
)
from cudalens.render.figures import histogram_svg, value_map_svg
from cudalens.render.fold import MAX_BOXES, MAX_EDGES, MAX_ROWS, Box, fold, node_name
from cudalens.render.graph import graph_rows, graph_svg
from cudalens.render.layout import GAP_X, Labels, Line, place
from cudalens.render.svg import LIGHT
from cudalens.render.words import module_types
from tests.builders import bert_graph, chain, in_a_row, make_report, node
from tests.rendering import hostile_texts, with_texts

SVG = "{http://www.w3.org/2000/svg}"
BAD, BAR = LIGHT["bad"], LIGHT["bar"]


def parse(svg: str) -> ElementTree.Element:
    """Read a picture as strict XML."""
    return ElementTree.fromstring(svg)


def filled(svg: str, colour: str, tag: str = "rect") -> list[ElementTree.Element]:
    return [item for item in parse(svg).iter(SVG + tag) if item.get("fill") == colour]


def number(shape: ElementTree.Element, name: str) -> float:
    return float(shape.get(name, "0"))


def texts(svg: str) -> list[str]:
    return [item.text or "" for item in parse(svg).iter(SVG + "text")]


def one_dimensional(values: tuple[float | str | None, ...], bounds: Bounds | None) -> Report:
    """Return a report whose map has one bar per value; those outside the bounds are bad."""
    low = bounds.min if bounds and isinstance(bounds.min, int) else float("-inf")
    high = bounds.max if bounds and isinstance(bounds.max, int) else float("inf")
    bad = tuple(int(not isinstance(v, (int, float)) or not low <= v <= high) for v in values)
    grid = OffenderMap(rows=1, columns=len(values), bad=bad, low=values, high=values)
    found = Offenders(count=sum(bad), total=len(values), map=grid)
    return make_report(offenders=found, bounds=bounds)


def bars(report: Report) -> list[ElementTree.Element]:
    svg = value_map_svg(report)
    return sorted(filled(svg, BAR) + filled(svg, BAD), key=lambda item: number(item, "x"))


def test_bar_at_the_bound_touches_the_line_and_one_beyond_passes_it() -> None:
    """The dashed line stands at the bound: the last good value ends on it, a bad one above."""
    report = one_dimensional((9, 10, 4), Bounds(min=0, max=9))
    lines = list(parse(value_map_svg(report)).iter(SVG + "line"))
    (bound,) = [number(item, "y1") for item in lines]
    at, beyond, below = (number(item, "y") for item in bars(report))
    assert at == pytest.approx(bound, abs=0.1)
    assert beyond < bound - 1
    assert below > bound + 1


def test_value_far_beyond_does_not_flatten_the_others() -> None:
    """The axis follows the bounds, not the worst value."""
    report = one_dimensional((3, 2**62, 6), Bounds(min=0, max=9))
    heights = [number(item, "height") for item in bars(report)]
    assert heights[0] > 15
    assert heights[2] == pytest.approx(2 * heights[0], rel=0.02)


def test_negative_values_hang_below_zero() -> None:
    report = one_dimensional((5, -3, 2), Bounds(min=0, max=9))
    good, bad, _ = bars(report)
    assert bad.get("fill") == BAD
    assert number(bad, "y") >= number(good, "y") + number(good, "height") - 1


def test_values_without_a_height_fill_the_picture() -> None:
    """NaN and infinity have no place on an axis: their bars are as high as the picture."""
    report = one_dimensional((1, "nan", 2, "inf", None), None)
    heights = [number(item, "height") for item in bars(report)]
    assert heights[1] == heights[3] == heights[4] == max(heights)


@pytest.mark.parametrize("total", [1, 2])
def test_axis_ends_at_the_last_position(total: int) -> None:
    """Positions run from 0 to one less than their number, which is not said for one alone."""
    report = one_dimensional((1,) * total, Bounds(min=0, max=9))
    assert ("1" in texts(value_map_svg(report))) == (total == 2)
    assert "position 0" in texts(value_map_svg(report))


def grid_report(rows: int, columns: int, bad: set[tuple[int, int]]) -> Report:
    cells = tuple(int(divmod(at, columns) in bad) for at in range(rows * columns))
    grid = OffenderMap(rows=rows, columns=columns, bad=cells, low=cells, high=cells)
    first = tuple(Offender(position=cell, value=1) for cell in sorted(bad))
    return make_report(offenders=Offenders(count=len(bad), total=9, first=first, map=grid))


def test_bad_cells_are_marked_by_shape_and_colour() -> None:
    """Each bad cell is covered in red and crossed; neighbours of a row share one run."""
    svg = value_map_svg(grid_report(4, 6, {(0, 1), (0, 2), (3, 5)}))
    (runs,) = filled(svg, BAD, "path")
    assert (runs.get("d") or "").count("M") == 2
    crosses = [item for item in parse(svg).iter(SVG + "path") if item.get("stroke-width") == "1.6"]
    assert (crosses[0].get("d") or "").count("l-") == 3


def test_largest_map_stays_small() -> None:
    """A map of 32 by 64 that is bad all over is a picture of some ten kilobytes."""
    everywhere = set(itertools.product(range(32), range(64)))
    assert len(value_map_svg(grid_report(32, 64, everywhere))) < 60_000


def test_no_map_is_no_picture() -> None:
    assert value_map_svg(Report()) == ""
    assert value_map_svg(make_report(offenders=Offenders(count=1, total=2))) == ""
    empty = OffenderMap(rows=0, columns=0, bad=(), low=(), high=())
    assert value_map_svg(make_report(offenders=Offenders(map=empty))) == ""


def fact(edges: tuple[float, ...], counts: tuple[int, ...]) -> TensorFact:
    histogram = Histogram(edges=edges, counts=counts)
    return TensorFact(argument="x", summary=TensorSummary(histogram=histogram))


def test_histogram_reddens_only_what_lies_wholly_outside() -> None:
    """A bar that begins at the bound is outside; one that only reaches over it is not."""
    tensor = fact((0.0, 9.0, 10.0), (5, 2))
    assert len(filled(histogram_svg(tensor, Bounds(min=0, max=9)), BAD)) == 1
    assert len(filled(histogram_svg(tensor, Bounds(min=0, max=9.5)), BAD)) == 0
    assert len(filled(histogram_svg(tensor, None), BAR)) == 2


def test_histogram_shows_the_allowed_interval() -> None:
    """The band covers the allowed part of the axis, and there is none when nothing is allowed."""
    tensor = fact((0.0, 10.0, 20.0), (1, 1))
    (band,) = filled(histogram_svg(tensor, Bounds(min=5, max=15)), LIGHT["oksoft"])
    x, width = number(band, "x"), number(band, "width")
    assert x + width / 2 == pytest.approx(210, abs=0.2)
    assert width == pytest.approx(202, abs=0.2)
    assert filled(histogram_svg(tensor, Bounds(min=30)), LIGHT["oksoft"]) == []


@pytest.mark.parametrize(
    ("edges", "counts"),
    [((), ()), ((0.0, 1.0), (0,)), ((1.0, 1.0), (3,)), ((0.0, 1.0), (1, 2))],
)
def test_histogram_of_nothing_is_no_picture(
    edges: tuple[float, ...], counts: tuple[int, ...]
) -> None:
    assert histogram_svg(fact(edges, counts)) == ""


def nodes_drawn(svg: str) -> list[str]:
    """Return the ids of all nodes that some box stands for."""
    groups = parse(svg).iter(SVG + "g")
    return [name for group in groups for name in (group.get("data-node") or "").split()]


@pytest.mark.parametrize("graph", [make_report().graph, bert_graph()], ids=["small", "bert"])
def test_every_node_is_in_one_box(graph: AutogradNeighbourhood) -> None:
    assert sorted(nodes_drawn(graph_svg(graph))) == sorted(item.id for item in graph.nodes)
    assert len(graph_rows(graph)) == len(graph.nodes)


def outline(group: ElementTree.Element) -> tuple[float, float, float, float]:
    rect = group.find(SVG + "rect")
    if rect is not None:
        x, y, w, h = (float(rect.get(name, "0")) for name in ("x", "y", "width", "height"))
        return x, y, x + w, y + h
    polygon = group.find(SVG + "polygon")
    points = [pair.split(",") for pair in polygon.get("points", "").split()]
    xs, ys = ([float(point[axis]) for point in points] for axis in (0, 1))
    return min(xs), min(ys), max(xs), max(ys)


def test_boxes_do_not_touch_and_stay_in_the_picture() -> None:
    svg = graph_svg(bert_graph())
    width = number(parse(svg), "width")
    groups = [group for group in parse(svg).iter(SVG + "g") if group.get("data-node")]
    boxes = [outline(group) for group in groups]
    for one, other in itertools.combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart
    assert all(box[0] >= 0 and box[2] <= width for box in boxes)


def test_failed_op_and_bad_input_differ_by_shape_and_word() -> None:
    """The failed op is dashed, the bad input a pill, parameters have corners; each says so."""
    svg = graph_svg(make_report().graph, prevented=True)
    groups = {group.get("class"): group for group in parse(svg).iter(SVG + "g")}
    failed = groups["cl-node cl-node-failed"].find(SVG + "rect")
    pill = groups["cl-node cl-node-bad_input"].find(SVG + "rect")
    assert failed.get("stroke-dasharray")
    assert number(pill, "rx") == number(pill, "height") / 2
    assert groups["cl-node cl-node-parameter"].find(SVG + "polygon") is not None
    assert {"not launched", "bad input", "2 parameters"} <= set(texts(svg))
    assert "failed here" in texts(graph_svg(make_report().graph, prevented=False))


def test_data_flows_down_and_shapes_stand_on_the_edges() -> None:
    """Each box lies below all that feed it; the result's shape stands once by its box."""
    graph = make_report().graph
    svg = graph_svg(graph)
    tops = {
        name: outline(group)[1]
        for group in parse(svg).iter(SVG + "g")
        for name in (group.get("data-node") or "").split()
    }
    assert all(tops[edge.src] < tops[edge.dst] for edge in graph.edges)
    assert texts(svg).count("[32, 10]") == 1
    assert "[32, 16, 98]" in texts(svg)


def test_edges_name_the_device_where_there_are_several() -> None:
    """Operands on two devices are named in the picture; one device is not."""
    nodes = [node(f"n{at}", "aten::relu", shape=(3, at), device="cuda:0") for at in range(5)]
    assert "[3, 1]" in texts(graph_svg(in_a_row(*nodes)))
    nodes[0] = replace(nodes[0], device="cpu")
    drawn = texts(graph_svg(in_a_row(*nodes)))
    assert {"[3, 0] cpu", "[3, 1] cuda:0"} <= set(drawn)


def test_large_neighbourhoods_are_folded() -> None:
    """A chain at the limit of rows is drawn whole, one op longer is folded."""
    for extra, folded in ((0, False), (1, True)):
        ops = [node(f"n{at}", f"aten::op{at}") for at in range(MAX_ROWS + extra - 1)]
        graph = in_a_row(*ops, node("last", "aten::last", "failed"))
        assert (len(fold(graph)[0]) < len(graph.nodes)) == folded
    boxes, _ = fold(bert_graph())
    assert len(boxes) <= MAX_BOXES


def test_folding_keeps_the_failure_and_its_neighbours_apart() -> None:
    """The failed op, the bad input and what feeds them directly stay boxes of their own."""
    boxes, _ = fold(bert_graph())
    alone = {box.members[0].id for box in boxes.values() if len(box.members) == 1}
    assert {"lost", "bad", "n20"} <= alone


def test_fold_never_makes_a_box_feed_itself() -> None:
    """Two ways between two modules stay a graph without a circle."""
    ids = [f"n{at}" for at in range(40)]
    nodes = tuple(node(name, "aten::relu", module_path=f"m{at % 2}") for at, name in enumerate(ids))
    skips = tuple(GraphEdge(src=f"n{at}", dst=f"n{at + 3}") for at in range(37))
    graph = AutogradNeighbourhood(nodes=nodes, edges=(*chain(*ids), *skips), focus="n39")
    boxes, edges = fold(graph)
    order = {key: at for at, key in enumerate(boxes)}
    assert all(one != other for one, other in edges)
    assert place(dict.fromkeys(boxes, (80.0, 40.0)), edges).centres.keys() == order.keys()


def unrolled(steps: int) -> AutogradNeighbourhood:
    """Return a loop of cells that share their weight, as a recurrent network leaves it."""
    line = LineRef(cell=1, line=4)
    weight = node("w", "", "parameter", name="weight")
    cells = [node(f"c{at}", "aten::cell", source=line) for at in range(steps)]
    inputs = [node(f"x{at}", "aten::mm", source=line) for at in range(steps)]
    last = node("last", "aten::last", "failed")
    edges = [GraphEdge(src=f"x{at}", dst=f"c{at}") for at in range(steps)]
    edges += [GraphEdge(src="w", dst=f"x{at}") for at in range(steps)]
    edges += [GraphEdge(src=f"c{at}", dst=f"c{at + 1}") for at in range(steps - 1)]
    edges.append(GraphEdge(src=f"c{steps - 1}", dst="last"))
    nodes = (*cells, *inputs, weight, last)
    return AutogradNeighbourhood(nodes=nodes, edges=tuple(edges), focus="last")


@pytest.mark.parametrize("steps", [2, 12, 30])
def test_a_loop_without_modules_is_folded(steps: int) -> None:
    """Cells that share a weight form no chain: they are folded by line until they can be read."""
    graph = unrolled(steps)
    boxes, edges = fold(graph)
    assert len(boxes) <= MAX_BOXES
    assert len(edges) <= MAX_EDGES
    assert (len(boxes) < len(graph.nodes)) == (steps > 2)
    assert sorted(nodes_drawn(graph_svg(graph))) == sorted(item.id for item in graph.nodes)
    assert boxes["last"].members[0].role == "failed"


def test_a_label_goes_where_no_line_is() -> None:
    """On the wanted side when that is clear, on the other one when a line passes there."""
    clear = Line(points=((100.0, 0.0), (100.0, 36.0)), bend=0.5, is_bad=False)
    aside = Line(points=((60.0, 0.0), (70.0, 36.0)), bend=0.5, is_bad=False)
    for lines, wanted, side in (
        ([clear], True, "end"),
        ([clear], False, "start"),
        ([clear, aside], True, "start"),
    ):
        assert Labels(lines).place((100.0, 0.0), "[32, 16]", left=wanted).anchor == side


def test_two_labels_never_lie_on_each_other() -> None:
    labels = Labels([])
    spots = [labels.place((100.0, 0.0), "[32, 16]", left=True) for _ in range(4)]
    assert len({(spot.x, spot.y) for spot in spots}) == 4


def test_a_side_input_passes_below_the_shapes() -> None:
    """The line of a bias turns lower than the words that stand under the op beside it."""
    line = Line(points=((0.0, 0.0), (120.0, 29.0)), bend=0.85, is_bad=False)
    beside = [y for x, y in line.samples() if x > 60]
    assert min(beside) > 15 + 3


def test_no_words_are_drawn_below_nine_pixels() -> None:
    report = make_report()
    drawn = [graph_svg(bert_graph()), value_map_svg(report)]
    drawn += [histogram_svg(item, report.bounds) for item in report.tensors[1:]]
    for svg in map(parse, drawn):
        least = float(re.sub("[^0-9]", "", svg.get("style", "")))
        smallest = min(number(item, "font-size") for item in svg.iter(SVG + "text"))
        assert 9 <= smallest * least / number(svg, "width") < 9.1


def test_a_single_bad_value_has_its_own_bar() -> None:
    """The bin that reaches over the bound is split where its bad values are known."""
    tensor = replace(fact((0.0, 8.0, 16.0), (90, 10)), dtype="int64")
    bounds = Bounds(min=0, max=9)
    found = Offenders(count=1, total=100, first=(Offender(position=(3,), value=12),))
    (bad,) = filled(histogram_svg(tensor, bounds, found), BAD)
    good = filled(histogram_svg(tensor, bounds, found), BAR)
    assert number(bad, "height") == 2
    assert number(bad, "x") > number(good[1], "x")
    assert number(good[1], "height") == pytest.approx(72 * 9 / 90)
    unknown = replace(found, count=40)
    assert filled(histogram_svg(tensor, bounds, unknown), BAD) == []


def test_the_bound_does_not_cut_the_last_allowed_bar() -> None:
    """Whole numbers end half a step below the line; other numbers reach it."""
    edges, counts = (-0.5, 0.5, 1.5, 2.5), (4, 4, 4)
    for dtype, spot in (("int64", 2 / 3), ("float32", 1.5 / 3)):
        svg = histogram_svg(replace(fact(edges, counts), dtype=dtype), Bounds(max=1))
        (line,) = parse(svg).iter(SVG + "line")
        assert number(line, "x1") == pytest.approx(8 + 404 * spot, abs=0.1)
        assert len(filled(svg, BAD)) == 1


def test_a_column_vector_is_drawn_by_position() -> None:
    column = grid_report(32, 1, {(3, 0), (9, 0)})
    assert number(parse(value_map_svg(column)), "height") < 150
    assert len(filled(value_map_svg(column), BAD)) == 2
    assert 200 < number(parse(value_map_svg(grid_report(32, 2, {(3, 0)}))), "height") < 250


def test_a_straight_ramp_is_drawn_straight() -> None:
    """79 positions in 64 bars: each stands where its positions are, however many it has."""
    starts = [at + min(at, 15) for at in range(65)]
    values = [(starts[at], starts[at + 1] - 1) for at in range(64)]
    grid = OffenderMap(
        rows=1,
        columns=64,
        bad=(0,) * 64,
        low=tuple(low for low, _ in values),
        high=tuple(high for _, high in values),
    )
    found = Offenders(count=0, total=79, map=grid)
    drawn = bars(make_report(offenders=found, bounds=None))
    rise = [
        (number(bar, "height") / (number(bar, "x") + number(bar, "width") - 8)) for bar in drawn[8:]
    ]
    assert max(rise) < 1.1 * min(rise)


def test_a_bar_that_goes_on_beyond_the_picture_is_marked() -> None:
    """The mark, and how far the values go; none where the axis shows them all."""
    bounds = Bounds(min=0, max=9)
    cut, whole = (value_map_svg(one_dimensional((3, top, 6), bounds)) for top in (999, 10))
    marks = [
        [p for p in parse(svg).iter(SVG + "path") if p.get("stroke-width") == "2"]
        for svg in (cut, whole)
    ]
    assert [len(found) for found in marks] == [1, 0]
    assert "cut bars go on to 999" in texts(cut)
    assert not any("cut" in text for text in texts(whole))


@pytest.mark.parametrize(("rows", "name"), [(1, "bar"), (3, "cell")])
def test_fewer_marks_than_bad_values_are_said(rows: int, name: str) -> None:
    """One place of the map may stand for several values."""
    report = grid_report(rows, 4, {(0, 1), (0, 3)})
    found = report.offenders
    said = [text for text in texts(value_map_svg(report)) if "bad" in text]
    assert said == []
    more = replace(report, offenders=replace(found, count=7, total=64))
    said = [text for text in texts(value_map_svg(more)) if "bad" in text]
    assert said == [f"7 bad values in 2 {name}s"]


def test_few_values_are_no_broad_bars() -> None:
    two, many = (bars(one_dimensional(tuple(range(n)), Bounds(min=0, max=9))) for n in (2, 32))
    assert number(two[0], "width") <= 44
    assert number(many[0], "width") < 20


def test_broken_graphs_are_drawn() -> None:
    """Circles, loops, unknown ends and lone nodes never stop a report."""
    nodes = (*(node(name, f"aten::{name}") for name in "abc"), node("d", "aten::d"))
    edges = (*chain("a", "b", "a"), *chain("c", "c"), *chain("a", "nowhere"))
    svg = graph_svg(AutogradNeighbourhood(nodes=nodes, edges=edges, focus="gone"))
    assert sorted(nodes_drawn(svg)) == ["a", "b", "c", "d"]
    assert graph_svg(AutogradNeighbourhood()) == ""


def test_far_too_large_graph_shows_what_is_near() -> None:
    graph = in_a_row(*(node(f"n{at}", f"aten::n{at}") for at in range(1000)))
    drawn = nodes_drawn(graph_svg(graph))
    assert "n999" in drawn
    assert "n0" not in drawn
    assert len(drawn) == 80


def crossings(layout_edges: list[tuple[str, str]], centres: dict[str, tuple[float, float]]) -> int:
    """Count the pairs of edges between the same two rows that cross."""
    count = 0
    for (a, b), (c, d) in itertools.combinations(layout_edges, 2):
        same = centres[a][1] == centres[c][1] and centres[b][1] == centres[d][1]
        count += same and (centres[a][0] - centres[c][0]) * (centres[b][0] - centres[d][0]) < 0
    return count


def test_rows_are_ordered_against_crossings() -> None:
    """Lines listed crosswise are drawn side by side."""
    edges = [("a1", "b3"), ("a2", "b2"), ("a3", "b1"), ("b1", "c"), ("b2", "c"), ("b3", "c")]
    keys = ("a1", "a2", "a3", "b1", "b2", "b3", "c")
    layout = place(dict.fromkeys(keys, (80.0, 40.0)), edges)
    assert crossings(edges, layout.centres) == 0
    listed = {key: (float(key[-1]) if key != "c" else 0.0, float(ord(key[0]))) for key in keys}
    assert crossings(edges, listed) == 3


def test_long_edge_passes_beside_the_boxes_between() -> None:
    edges = [("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")]
    layout = place(dict.fromkeys("abcd", (80.0, 40.0)), edges)
    stops = layout.routes["a", "d"]
    assert len(stops) == 2
    for (x, y), box in zip(stops, "bc", strict=True):
        assert y == layout.centres[box][1]
        assert abs(x - layout.centres[box][0]) >= 40


def test_side_inputs_do_not_bend_the_main_line() -> None:
    """Parameters move aside: a chain of ops stands in one column, its end half a box beside."""
    edges = [("a", "b"), ("b", "c"), ("c", "d"), ("x", "d"), ("p", "b"), ("q", "c")]
    sizes = dict.fromkeys("abcdxpq", (80.0, 40.0))
    across = {key: x for key, (x, _) in place(sizes, edges, light=("p", "q")).centres.items()}
    assert across["a"] == pytest.approx(across["b"], abs=4)
    assert across["b"] == pytest.approx(across["c"], abs=4)
    assert across["d"] - across["c"] == pytest.approx((80 + GAP_X) / 2, abs=4)


@pytest.mark.no_cover
def test_hostile_texts_leave_pictures_well_formed() -> None:
    """Pictures stay strict XML with the same elements, whatever nodes are called."""
    base = replace(make_report(), bounds=replace(make_report().bounds or Bounds(), text=None))
    plain = {item.tag for item in parse(graph_svg(base.graph)).iter()}
    for hostile in hostile_texts():
        report = with_texts(base, lambda _, hostile=hostile: hostile)  # type: ignore[misc]
        assert {item.tag for item in parse(graph_svg(report.graph)).iter()} <= plain, hostile
        parse(value_map_svg(report))
        for item in report.tensors:
            if svg := histogram_svg(item, report.bounds):
                parse(svg)


def test_colours_are_attributes_and_classes() -> None:
    """Every painted shape has its colour as an attribute, for pages without the style sheet."""
    svg = graph_svg(make_report().graph) + value_map_svg(make_report())
    for fill in re.findall(r"<(?:rect|polygon|text)[^>]*>", svg):
        assert re.search(r'fill="#[0-9a-f]{6}"', fill), fill


@pytest.mark.parametrize(
    ("names", "title"),
    [
        (("mul", "relu", "add"), "mul → … → add"),
        (("NativeDropoutBackward0", "mm", "relu"), "Nati…ard0 → … → relu"),
        (("native_layer_norm_backward", "scaled_dot_product"), "nativ…kward → scale…oduct"),
    ],
)
def test_both_ends_of_a_folded_chain_are_read(names: tuple[str, ...], title: str) -> None:
    """A long name is shortened; it does not push the other end out."""
    members = tuple(node(f"n{at}", op=f"aten::{name}") for at, name in enumerate(names))
    assert Box(key="n0", role="upstream", members=members).title({}) == title


def test_a_module_call_is_one_box_with_its_class_and_path() -> None:
    """Its ops are one box; ops of no module stay what they are."""
    ops = [node(f"a{at}", "aten::mul", module_path="net.0") for at in range(3)]
    free = [node("b", "aten::exp"), node("c", "aten::log")]
    graph = in_a_row(*ops, *free, node("last", "aten::sum", "failed"))
    drawn = texts(graph_svg(graph, types={"net.0": "Conv1d"}))
    assert drawn.count("Conv1d net.0") == 1
    assert {"3 ops", "exp", "log"} <= set(drawn)
    assert "Conv1d net.0" not in texts(graph_svg(graph))


@pytest.mark.parametrize(
    ("op", "called"),
    [
        ("aten::addmm", "F.linear"),
        ("aten::embedding", "nn.Embedding"),
        ("torch.nn.functional.linear", "F.linear"),
        ("torch.Tensor.mul", "Tensor.mul"),
        ("aten::_softmax", "softmax"),
        ("aten::add.Tensor", "add"),
    ],
)
def test_a_box_has_the_name_that_people_call(op: str, called: str) -> None:
    assert node_name(node("n", op)) == called


def test_a_graph_that_repeats_the_line_is_not_drawn() -> None:
    """Three boxes hang under the code as well; four tell more."""
    ends = (node("a", "aten::exp"), node("b", "aten::log"), node("c", "aten::sum", "failed"))
    assert graph_svg(in_a_row(*ends)) == ""
    assert graph_svg(in_a_row(node("z", "aten::sin"), *ends)) != ""


def test_the_bad_input_is_drawn_narrow_however_it_is_written() -> None:
    """Elided in its middle: where an expression begins and ends tells most."""
    graph = make_report().graph
    long = "labels[:, None] - other_labels_of_the_batch[None, :] + self.window - 1"
    nodes = [replace(n, name=long) if n.role == "bad_input" else n for n in graph.nodes]
    svg = graph_svg(replace(graph, nodes=tuple(nodes)))
    (shown,) = [text for text in texts(svg) if "…" in text and text.startswith("labels[:")]
    assert shown.endswith("window - 1")
    groups = [g for g in parse(svg).iter(SVG + "g") if "bad_input" in (g.get("class") or "")]
    left, _, right, _ = outline(groups[0])
    assert right - left < 250


@pytest.mark.parametrize(
    ("op", "name", "folds"),
    [
        ("aten::t", "TBackward0", True),
        ("aten::expand", "ExpandBackward0", True),
        ("aten::view", "ViewBackward0", True),
        ("", "UnsafeViewBackward0", True),
        ("aten::tanh", "TanhBackward0", False),
        ("aten::sum.dim_IntList", "SumBackward1", False),
    ],
)
def test_views_fold_into_their_neighbour(op: str, name: str, folds: bool) -> None:
    """A view has no box of its own, and lends its neighbour no name."""
    ends = (node("b", "aten::relu"), node("c", "aten::exp"), node("last", "aten::nll", "failed"))
    graph = in_a_row(node("a", "aten::mm"), node("v", op, name=name), *ends)
    drawn = texts(graph_svg(graph))
    assert len(fold(graph)[0]) == (4 if folds else 5)
    assert {"mm", "relu", "nll"} <= set(drawn)
    assert sorted(nodes_drawn(graph_svg(graph))) == ["a", "b", "c", "last", "v"]


def test_a_path_of_two_classes_has_none() -> None:
    """Two nets have a module 0 each: neither class is certain."""
    entries = [HistoryEntry(seq=at, op="aten::mm", module_path="0") for at in range(2)]
    both = [replace(entries[0], module_type="Linear"), replace(entries[1], module_type="Conv1d")]
    assert module_types(make_report(history=tuple(both))) == {}
    assert module_types(make_report(history=tuple(both[:1]))) == {"0": "Linear"}
