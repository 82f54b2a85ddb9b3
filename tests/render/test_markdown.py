"""The Markdown of a report: what each part of it says, and how texts are written there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.report import Hint, Observation, RankResult, Report
from cudalens.core.report_types import MarkedLine, RaisedException
from cudalens.render.markdown import MAX_LINES, render, render_with
from cudalens.render.strip import Node, Strip
from tests.builders import (
    NOTHING_ELSE,
    fact,
    make_report,
    offenders,
    one_row,
    raised,
    small_graph,
    source,
    user_frame,
)

LINE = "loss = F.cross_entropy(logits, y)"
HERE = source((LINE,), 0, "F.cross_entropy(logits, y)")


def lines_of(report: Report, start: str = "") -> list[str]:
    return [line for line in render(report).splitlines() if line.startswith(start)]


def flow_of(*nodes: Node) -> str:
    """Return the line of the graph for these boxes, empty without one."""
    text = render_with(make_report(), Strip(nodes=nodes))
    return "".join(line[9:] for line in text.splitlines() if line.startswith("- graph: "))


@pytest.mark.parametrize(
    ("facts", "title"),
    [
        ({}, "### device-side assert: y is bad"),
        (
            {"exception": RaisedException(type="IndexError", message="m")},
            "### IndexError: y is bad",
        ),
        ({"certainty": "likely"}, "### device-side assert: Likely cause (not proven): y is bad"),
    ],
)
def test_the_title_names_the_exception_or_the_kind(facts: dict[str, Any], title: str) -> None:
    assert render(make_report(headline="y is bad", **facts)).splitlines()[0] == title


@pytest.mark.parametrize("kind", ["came_from", "values"])
def test_a_fact_with_a_line_is_said_once(kind: str) -> None:
    line = MarkedLine(cell=7, line=10, text="y = make()", mark="10 is made here")
    seen = Observation(kind=kind, text="the made words", sources=(line,))
    assert lines_of(make_report(observations=(seen,))).count("- the made words") == 1


def test_a_fact_without_a_line_is_said_where_it_is_the_values() -> None:
    for kind, is_said in (("came_from", False), ("values", True)):
        seen = Observation(kind=kind, text="the made words")
        assert ("- the made words" in lines_of(make_report(observations=(seen,)))) is is_said


@pytest.mark.parametrize(
    ("kind", "is_quoted"),
    [("host_error", True), ("autograd_error", True), ("cuda_error", True), ("silent", False)],
)
def test_pytorchs_words_are_quoted_where_pytorch_raised(kind: str, is_quoted: bool) -> None:
    error = RaisedException(type="RuntimeError", message="its words")
    found = lines_of(make_report(kind=kind, exception=error), "- PyTorch: ")
    assert found == (["- PyTorch: `its words`"] if is_quoted else [])


def test_what_the_cpu_raises_is_said_only_where_it_raised() -> None:
    start = "- the CPU kernel"
    assert lines_of(make_report(replay=raised("IndexError", "out of range")), start) == [
        "- the CPU kernel with the same arguments raises `IndexError: out of range`"
    ]
    assert lines_of(make_report(replay=NOTHING_ELSE["replay"]), start) == []


@pytest.mark.parametrize(("prevented", "verb"), [(True, "would print"), (False, "printed")])
def test_what_cuda_printed_is_quoted_without_its_line_ends(prevented: bool, verb: str) -> None:
    report = make_report(prevented=prevented, device_text="\nits text\n")
    assert lines_of(report, "- CUDA") == [f"- CUDA {verb} `its text`"]
    assert lines_of(make_report(device_text=None), "- CUDA") == []


def test_boxes_that_feed_each_other_have_an_arrow_and_others_three_dots() -> None:
    boxes = (
        Node(title="a", shape="[2]"),
        Node(title="b", has_arrow=True),
        Node(title="c"),
        Node(title="x", lane=2),
        Node(title="op", look="fail", small="not launched", has_arrow=True),
    )
    assert flow_of(*boxes) == "a [2] → b … c → **op (not launched)**"


def test_a_module_goes_by_the_models_name_where_that_is_proven() -> None:
    graph = replace(small_graph(), module_names=(("net.3", "model.head"),))
    (flow,) = lines_of(make_report(graph=graph), "- graph: ")
    assert "Linear model.head" in flow
    (flow,) = lines_of(make_report(), "- graph: ")
    assert "Linear net.3" in flow


@pytest.mark.parametrize(
    ("small", "look", "text"),
    [
        ("fails here", "fail", "**op**"),
        ("not launched", "fail", "**op (not launched)**"),
        ("net.0", "", "op"),
    ],
)
def test_only_the_failing_box_says_what_became_of_it(small: str, look: str, text: str) -> None:
    assert flow_of(Node(title="op", small=small, look=look)) == text


def test_the_graph_has_its_last_twelve_boxes() -> None:
    boxes = [Node(title=f"n{at}", has_arrow=at > 0) for at in range(13)]
    assert flow_of(*boxes[1:]) == " → ".join(f"n{at}" for at in range(1, 13))
    assert flow_of(*boxes) == flow_of(*boxes[1:])
    assert flow_of() == ""
    assert "- graph: " not in render_with(make_report(), None)


def test_the_last_three_callers_are_named() -> None:
    frames = [user_frame("a.py", at, f"f{at}", f"f{at + 1}()") for at in range(1, 6)]
    assert lines_of(make_report(frames=tuple(frames)), "- called") == [
        f"- called from `a.py:{at} in f{at}: f{at + 1}()`" for at in (2, 3, 4)
    ]
    assert lines_of(make_report(frames=tuple(frames[:1])), "- called") == []


def test_each_rank_has_a_line() -> None:
    ranks = (RankResult(rank=0, outcome="ran on"), RankResult(rank=1, batch="batch 4", outcome="*"))
    found = lines_of(make_report(ranks=ranks), "- rank ")
    assert found == ["- rank 0: ran on", r"- rank 1: batch 4 · \*"]


def test_at_most_three_notes_are_said() -> None:
    limits = tuple(f"fact {at} is unknown" for at in range(4))
    found = lines_of(make_report(limits=limits), "- note: ")
    assert found == [f"- note: fact {at} is unknown" for at in range(3)]


def test_at_most_so_many_tensors_are_listed_with_name_and_type() -> None:
    many = tuple(fact(f"tensors[{at}]", f"float32[{at + 1}]") for at in range(20))
    found = lines_of(make_report(tensors=many, argument=None), "- with ")
    assert found[0] == "- with `tensors[0]`: f32[1]"
    assert 1 < len(found) < 20


@pytest.mark.parametrize(
    ("facts", "end"),
    [
        ({}, "fails here"),
        ({"kind": "silent"}, "the result is wrong here"),
        ({"phase": "backward"}, "fails here"),
        ({"phase": "backward", "forward_source": HERE}, "its backward fails"),
        ({"certainty": "likely"}, "likely here"),
        ({"kind": "nonfinite"}, "fails here"),
    ],
)
def test_the_failing_line_says_what_happens_there(facts: dict[str, Any], end: str) -> None:
    report = make_report(**{**NOTHING_ELSE, "source": HERE, "tensors": (), **facts})
    assert f"{LINE}  # <- {end}" in render(report).splitlines()


@pytest.mark.parametrize(
    ("kind", "seen", "is_said"),
    [
        ("nonfinite", "maker", False),
        ("nonfinite", "graph", True),
        ("device_assert", "maker", True),
    ],
)
def test_a_line_that_makes_a_nan_is_marked_in_place_of_the_failing_one(
    kind: str, seen: Any, is_said: bool
) -> None:
    maker = Observation(kind=seen, text="made in line 2")
    report = make_report(kind=kind, observations=(maker,))
    assert ("fails here" in render(report)) is is_said


def test_a_line_says_that_it_fails_then_its_marks_and_then_its_tensors_once() -> None:
    here = source(("f(y, y)",), 0, "f(y, y)")
    mark = MarkedLine(cell=7, line=9, text="f(y, y)", mark="y is read here")
    seen = Observation(kind="device", text="y", sources=(mark,))
    twice = [fact(name, "int64[3]", "y", span=(9, at, at + 1)) for name, at in (("a", 2), ("b", 5))]
    report = make_report(source=here, tensors=tuple(twice), observations=(seen,), argument=None)
    assert "f(y, y)  # <- fails here; y is read here; y: i64[3]" in lines_of(report)


@pytest.mark.parametrize(
    ("hint", "line"),
    [
        (
            Hint(text="so", fix="y = y - 1", tried=True),
            "- tried on copies: `y = y - 1` before line 12. So. Tested on copies: it runs.",
        ),
        (Hint(text="so", fix="f(y - 1)"), "- hint: `f(y - 1)` in line 12. So. Not tested."),
        (Hint(text="so"), "- hint: So."),
    ],
)
def test_the_action_says_whether_it_was_tried_and_where_it_belongs(hint: Hint, line: str) -> None:
    assert line in lines_of(make_report(hints=(hint,)))


def test_a_gap_between_lines_and_the_name_of_each_cell() -> None:
    here = source(("y = make()", "", "", "f(y)"), 3, "f(y)", first=1)
    marks = (
        MarkedLine(cell=7, line=1, text="y = make()", mark="made here"),
        MarkedLine(cell=3, line=2, text="n = 10", mark="10 set here"),
    )
    seen = (
        Observation(kind="came_from", text="it comes from line 1", sources=marks[:1]),
        Observation(kind="bound", text="it is set in another cell", sources=marks[1:]),
    )
    report = make_report(source=here, tensors=(), observations=seen)
    text = render(report)
    code = text[text.index("In [7]:") :].splitlines()
    assert code[:5] == [
        "In [7]:",
        "```python",
        "y = make()  # <- made here",
        "# …",
        "f(y)  # <- fails here",
    ]
    assert code[5:] == ["```", "In [3]:", "```python", "n = 10  # <- 10 set here", "```"]


def test_a_statement_of_several_lines_says_once_that_it_fails() -> None:
    lines = ("f(", "    y,", ")")
    here = replace(source(lines, 0, "f("), end_line=11, end_column=1)
    code = lines_of(make_report(source=here, tensors=(), provenance=()))[-5:]
    assert code == ["```python", "f(  # <- fails here", "    y,", ")", "```"]


def test_code_cannot_close_its_own_fence() -> None:
    here = source(("f('```')",), 0, "f('```')")
    assert "f('` ` `')  # <- fails here" in lines_of(make_report(source=here, tensors=()))


@pytest.mark.parametrize(("cells", "last"), [(5, "n5 = 1  # <- mark 5"), (6, "…")])
def test_code_that_is_too_long_is_cut_and_its_fence_closed(cells: int, last: str) -> None:
    marks = tuple(
        MarkedLine(cell=at, line=1, text=f"n{at} = 1", mark=f"mark {at}")
        for at in range(1, cells + 1)
    )
    seen = Observation(kind="came_from", text="from many cells", sources=marks)
    lines = render(make_report(observations=(seen,), limits=("unknown",) * 3)).splitlines()
    assert len(lines) == MAX_LINES
    assert lines[-2:] == [last, "```"]


def test_of_a_short_vector_the_name_is_code_and_the_bad_values_are_bold() -> None:
    found = offenders(2, 1, first=[((1,), 10)], map=one_row((4, 10), (0, 1)))
    assert lines_of(make_report(offenders=found), "- `y`") == ["- `y` = 4, **`10`**"]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"simulated": True}, "rehearsal device (no GPU)"),
        ({"simulated": False, "device": "NVIDIA\nH200"}, "NVIDIA H200"),
        ({"simulated": False, "device": None}, "cudalens 0.1.0"),
    ],
)
def test_the_last_fact_names_versions_and_the_device(facts: dict[str, Any], said: str) -> None:
    report = make_report()
    report = replace(report, environment=replace(report.environment, **facts))
    assert lines_of(report, "- torch 2.13.0, Python 3.11.9, ")[0].endswith(f", {said}")


@pytest.mark.parametrize(
    ("words", "written"),
    [
        ("a * b", r"a \* b"),
        ("<b> and [x](y)", r"\<b> and [x]\(y)"),
        ("`a * b` of c * d", r"`a * b` of c \* d"),
        ("a ` b * c", r"a \` b \* c"),
        ("f(x) stays", "f(x) stays"),
    ],
)
def test_signs_of_markdown_in_words_mean_themselves(words: str, written: str) -> None:
    seen = Observation(kind="came_from", text=words, sources=(MarkedLine(line=10, cell=7),))
    assert f"- {written}" in lines_of(make_report(observations=(seen,)))


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("plain", "`plain`"),
        ("a `b` c", "``a `b` c``"),
        ("`b` c", "`` `b` c ``"),
        ("a ``b``", "``` a ``b`` ```"),
        ("two\nlines", "`two lines`"),
    ],
)
def test_a_quoted_text_is_one_span_of_code(text: str, written: str) -> None:
    report = make_report(prevented=False, device_text=text)
    assert lines_of(report, "- CUDA") == [f"- CUDA printed {written}"]
