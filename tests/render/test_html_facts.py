"""What the HTML views say of a report: facts, tables and drawers, before they are drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.report import (
    AutogradNeighbourhood,
    Bounds,
    Histogram,
    HistoryEntry,
    Observation,
    Offender,
    Offenders,
    OpName,
    RankResult,
    Report,
    SourceSpan,
    TensorSummary,
    Timing,
)
from cudalens.core.report_types import MarkedLine
from cudalens.render import html
from cudalens.render.code import Block, Piece, Row
from cudalens.render.figures import Figure, Picture
from cudalens.render.html import MAX_BYTES, tensor_facts
from tests.builders import fact, make_report, node, small_graph


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({}, "3 bad of 9"),
        ({"shown": 1}, "the first 1 of 3 bad of 9"),
        ({"shown": 3}, "3 bad of 9"),
        ({"others": "0 … 2"}, "3 bad of 9; all others 0 … 2"),
        ({"allowed": 2}, "3 bad of 9; 2 more are allowed"),
        ({"bounds": Bounds(min=0, max=2)}, "3 bad of 9; allowed: 0 … 2"),
        (
            {"shown": 1, "others": "0", "allowed": 2, "bounds": Bounds(max=2)},
            "the first 1 of 3 bad of 9; all others 0; 2 more are allowed; allowed: at most 2",
        ),
    ],
)
def test_the_values_in_a_line(parts: dict[str, Any], line: str) -> None:
    first = (Offender(position=(0,), value=9),) * parts.pop("shown", 3)
    bounds = parts.pop("bounds", None)
    found = Offenders(total=9, count=3, first=first, **parts)
    assert html._values_line(make_report(offenders=found, bounds=bounds)) == line
    assert html._values_line(make_report(offenders=None)) == ""


@pytest.mark.parametrize(
    ("size", "tried"), [(MAX_BYTES - 1, 1), (MAX_BYTES, 2), (MAX_BYTES // 2, 2)]
)
def test_a_page_that_is_too_large_in_bytes_is_drawn_with_less(size: int, tried: int) -> None:
    letter = "x" if size > MAX_BYTES // 2 else "…"  # of three bytes
    limits: list[Any] = []

    def draw(limit: Any) -> str:
        limits.append(limit)
        return letter * size if len(limits) == 1 else "small"

    page = html._fitting(draw, html._PAGE)
    assert limits == [html._PAGE, html._SMALL][:tried]
    assert page == ("small" if tried > 1 else letter * size)


def test_what_is_too_large_in_any_form_is_drawn_in_the_smallest() -> None:
    limits: list[Any] = []
    html._fitting(lambda limit: limits.append(limit) or "x" * MAX_BYTES, html._FRAGMENT)
    assert limits == [html._FRAGMENT, html._SMALL, html._TINY]


NOTHING: dict[str, Any] = {
    "ranks": (), "graph": AutogradNeighbourhood(), "offenders": None, "observations": (),
    "provenance": (), "tensors": (), "history": (), "frames": (),
}  # fmt: skip


def drawers(drawn: Any = None, **parts: Any) -> list[tuple[str, int | None]]:
    report = make_report(**{**NOTHING, **parts})
    return [(it.label, it.things) for it in html._drawers(report, drawn)][:-2]


def test_there_is_a_drawer_for_what_the_report_has() -> None:
    whole = make_report()
    assert html._drawers(make_report(**NOTHING), None)[-2:] == (
        (html.Drawer("Details", None, "details"), html.Drawer("Share", None, "share"))
    )
    assert drawers() == []
    assert drawers(graph=whole.graph) == drawers("a strip") == [("Graph", None)]
    assert drawers(offenders=whole.offenders) == [("Values", None)]
    assert drawers(offenders=Offenders(total=9, count=3)) == []
    assert drawers(provenance=whole.provenance) == [("Origin", None)]
    seen = Observation(kind="values", text="3 are 10")
    assert drawers(observations=(seen,)) == [("Origin", None)]
    assert drawers(tensors=whole.tensors) == [("Tensors", 2)]
    assert drawers(history=whole.history[:3]) == [("History", 3)]
    assert drawers(frames=whole.frames) == [("Call stack", 2)]


@pytest.mark.parametrize("kind", ["host_error", "autograd_error", "nonfinite", "device_assert"])
@pytest.mark.parametrize("drawn", ["a strip", None])
def test_the_graph_is_open_where_the_error_is_about_it(kind: Any, drawn: Any) -> None:
    graph = AutogradNeighbourhood(nodes=(node("a", "torch.sin"),))
    (first, *_) = html._drawers(make_report(**{**NOTHING, "kind": kind, "graph": graph}), drawn)
    assert first.is_open is (kind != "device_assert" and drawn is not None)


@pytest.mark.parametrize(
    ("width", "fold"), [(None, 112), (16, 109), (400, 59), (484, 48), (600, 48)]
)
def test_code_beside_a_picture_is_folded_to_what_room_it_leaves(
    width: int | None, fold: int
) -> None:
    picture = Picture(data="", width=(width or 0) - 16, height=9, title="")
    figure = None if width is None else Figure(pictures=(picture,), title="", legend=())
    assert html._fold(figure) == fold


def test_a_table_has_no_column_that_nobody_filled() -> None:
    rows = [{"a": "1", "b": "", "c": ""}, {"a": "", "b": "", "c": "3"}]
    assert html._table(("a", "b", "c", "d"), rows) == (["a", "c"], [["1", "–"], ["–", "3"]])
    assert html._table(("a",), []) == ([], [])


def test_bad_values_have_their_inputs_and_items_where_they_are_known() -> None:
    first = (
        Offender(position=(0,), value=9, sample=0, inputs=(("x", 0.0), ("z", 2))),
        Offender(position=(3,), value=8),
    )
    report = make_report(offenders=Offenders(total=9, count=2, first=first))
    assert html._bad_table(report) == (
        ["position", "value", "from x", "from z", "dataset item"],
        [["[0]", "9", "0", "2", "0"], ["[3]", "8", "–", "–", "–"]],
    )
    assert html._bad_table(make_report(offenders=None)) == ([], [])


def cells(**parts: Any) -> dict[str, str]:
    made = fact("target", "int64[3, 2]", "y", **parts)
    report = make_report(offenders=Offenders(total=6, count=2), tensors=(made,))
    return {name: text for name, text in html._tensor_cells(report, made).items() if text}


def test_what_is_known_of_a_tensor() -> None:
    assert cells() == {
        "tensor": "y", "argument": "target", "shape": "[3, 2]", "dtype": "int64", "bad": "2",
    }  # fmt: skip
    assert cells(requires_grad=True)["grad"] == "leaf"
    assert cells(requires_grad=True, grad_fn="SinBackward0")["grad"] == "SinBackward0"
    found = cells(summary=TensorSummary(min=0, max=4, mean=1.5, nan=0, inf=1, unique=(0, 4)))
    told = {"min": "0", "max": "4", "mean": "1.5", "nan": "0", "inf": "1", "distinct": "0, 4"}
    assert found.items() >= told.items()


def test_where_a_tensor_lies_is_known() -> None:
    found = cells(device="cuda:0", stride=(1, 3))
    assert (found["device"], found["stride"]) == ("cuda:0", "[1, 3]")


def test_a_value_that_does_not_occur_is_not_counted() -> None:
    values = TensorSummary(
        min=0, max=2, histogram=Histogram(edges=(-0.5, 0.5, 1.5, 2.5), counts=(2, 0, 1))
    )
    found = fact("other", "int64[3]", "z", summary=values)
    assert dict(tensor_facts(make_report(), found))["how often"] == "0: 2, 2: 1"
    told = dict(tensor_facts(make_report(), replace(found, dtype="float32")))
    assert "how often" not in told and told["min"] == "0"


def test_a_tensor_that_is_not_at_fault_has_no_bad_values() -> None:
    other = fact("input", "float32[3]", "x", device="cuda:0")
    typed = fact("weight", "float32[3]", "w", bad_at=(0,))
    report = make_report(tensors=(*make_report().tensors, other, typed))
    names = [name for name, _ in tensor_facts(report, other)]
    assert "bad values" not in names and "bad" not in names and "allowed" not in names
    assert "= 10" in dict(tensor_facts(report, typed))["bad values"]
    at_fault = dict(tensor_facts(report, report.tensors[1]))
    assert at_fault["how often"].startswith("1: ") and at_fault["how often"].endswith("10: 3")
    assert at_fault["allowed"] == "0 … 9 or -100 (ignore_index)"
    assert html.tensor_line(report, other) == "x  f32[3]"


@pytest.mark.parametrize(
    ("parts", "failed"),
    [
        ({}, True),
        ({"phase": "unknown"}, False),
        ({"op": OpName()}, False),
        ({"history": ()}, False),
    ],
)
def test_the_failed_op_is_the_last_of_the_history_where_it_is_known(
    parts: dict[str, Any], failed: bool
) -> None:
    entries = html.history_entries(make_report(**parts))
    assert any(item.is_failed for item in entries) is failed
    if failed:
        entry = entries[0].entry
        assert (entry.op, entry.shapes) == ("aten::nll_loss_forward", "f32[32, 10], i64[32]")
        assert (entry.seq, entry.source) == (413, make_report().source.ref)  # type: ignore[union-attr]


def test_the_failed_op_has_the_facts_of_the_report() -> None:
    tensors = (fact("self", "float32[2]", "x"), fact(None, "float32[9]", "z"))
    known = make_report(module_path="net.3", phase="backward", tensors=tensors, source=None)
    entry = html.history_entries(known)[0].entry
    assert (entry.module_path, entry.phase) == ("net.3", "backward")
    assert (entry.shapes, entry.source) == ("f32[2]", None)


def test_ops_are_one_row_where_they_are_alike_in_all_but_their_number() -> None:
    one = HistoryEntry(seq=1, op="aten::sin", shapes="f32[2]")
    history = (one, replace(one, seq=2), replace(one, seq=3, shapes="f32[3]"), replace(one, seq=4))
    found = html.history_entries(make_report(history=history, op=OpName()))
    assert [(item.times, item.entry.seq) for item in found] == [(1, 4), (1, 3), (2, 2)]


@pytest.mark.parametrize(
    ("path", "short"),
    [("/a/nn/functional.py", "nn/functional.py"), ("C:\\a\\b.py", "a/b.py"), ("b.py", "b.py")],
)
def test_a_path_is_shown_by_its_end(path: str, short: str) -> None:
    assert html.short_path(path) == short


def group(**parts: Any) -> str:
    return html._group(make_report(**parts))


def test_reports_that_differ_have_groups_that_differ() -> None:
    assert group() == group(timing=replace(make_report().timing, diagnose_s=9.0))
    others = (
        group(kind="silent"), group(headline="another"), group(op=OpName(name="aten::sin")),
        group(source=SourceSpan(cell=1, line=1)), group(timing=Timing(recorded_ops=1)),
    )  # fmt: skip
    assert len({group(), *others}) == 6
    assert group().startswith("cl-") and len(group()) == 15


def row(text: str, number: int | None, *marks: str) -> Row:
    return Row(number=number, pieces=(Piece(text=text),), marks=marks)


def test_line_numbers_stand_below_each_other_beside_the_name_of_the_cell() -> None:
    block = Block(title="In [7]", rows=(row("a", 9), row("b", 10), row("c", None)))
    assert html._gutter(block) == 9
    assert html._gutter(replace(block, title="")) == 4
    assert html._gutter(Block(title="", rows=(row("c", None),))) == 3
    assert html._number(9, block, block.rows[0], True) == "In [7]  9  "
    assert html._number(9, block, block.rows[1], False) == "       10  "
    assert html._number(9, block, block.rows[2], False) == " " * 11


def test_marks_stand_below_each_other_where_there_is_room() -> None:
    short, long = row("a", 1, "m"), row("b" * 20, 2, "n")
    block = Block(title="", rows=(short, long, row("x" * 60, 3)))
    assert [len(html._padding(100, 3, block, item)) for item in (short, long)] == [21, 2]
    assert html._padding(15, 3, block, long) == "\n" + " " * 9
    assert html._padding(15, 3, block, short) == "  "
    assert html._said(row("a", 1)) == 0
    assert html._said(row("a", 1, "m" * 10, "n" * 20)) == 39


def test_code_in_backticks_is_code_and_all_else_is_text() -> None:
    assert html._coded(99, "use `a<b>` & `c`") == "use <code>a&lt;b&gt;</code> &amp; <code>c</code>"
    assert html._coded(99, "one ` alone") == "one ` alone"
    assert str(html._coded(5, "abcdefgh")) == "abcd…"


def test_a_place_stands_beside_the_code_where_nothing_else_is_said() -> None:
    report = make_report(
        kind="host_error", offenders=None, bounds=None, device_text=None, provenance=(),
        tensors=(), history=(), graph=AutogradNeighbourhood(), argument=None,
    )  # fmt: skip

    def title(of: Report) -> tuple[int, str]:
        parts = html._with_place_beside_code(of, html.screen.build(of))
        return len(parts.facts), parts.blocks[0].title

    assert title(report) == (0, "In [7]")
    asserted = replace(report, kind="device_assert", device_text="Assertion `x` failed.")
    assert title(asserted) == (1, "")  # the link to the page stands beside it
    assert title(replace(report, certainty="unknown")) == (2, "")
    line = MarkedLine(cell=3, line=2, text="n = 10", mark="set here")
    elsewhere = Observation(kind="bound", text="t", sources=(line,))
    assert title(replace(report, observations=(elsewhere,))) == (1, "In [7]")


@pytest.mark.parametrize("draw", [html.render_fragment, html.render_page])
def test_a_view_names_the_model_where_that_is_proven(draw: Any) -> None:
    graph = replace(small_graph(), module_names=(("net.3", "model.head"),))
    assert "model.head" in draw(make_report(graph=graph))
    assert "model.head" not in draw(make_report())


def test_the_report_of_a_rank_is_whole_and_has_no_ranks_of_its_own() -> None:
    ranks = (RankResult(rank=0, outcome="<ran on>"), RankResult(rank=1, outcome="ended"))
    whole = html._whole(make_report(ranks=ranks, headline="<y> is wrong"))
    assert "ended" not in whole and "&lt;y&gt; is wrong" in whole
    assert "F.cross_entropy(logits, y)" in whole


def test_a_long_text_is_escaped_and_not_cut() -> None:
    assert html._Long(f"<b>\n{'x' * 3500}\x07") == f"&lt;b&gt;\n{'x' * 3500}␇"
