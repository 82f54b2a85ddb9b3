"""The parts of a report: one action, marks at lines, and the words that three views share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cudalens.core.graph_types import FIRST_NAN
from cudalens.core.report import (
    CodeLine,
    Hint,
    LineRef,
    Observation,
    ProvenanceStep,
    SourceSpan,
)
from cudalens.core.report_types import MarkedLine, RaisedException
from cudalens.render import screen
from cudalens.render.markdown import MAX_LINES, render
from tests.builders import CELL, REPRESENTATIVE, make_report
from tests.rendering import check_golden


def observed() -> list[Observation]:
    """Return the observations of labels that one line makes and another bounds."""
    return [
        Observation(kind="values", text="3 of 32 labels are 10, all others 1 … 9"),
        Observation(
            kind="came_from",
            text="line 10: y.to",
            sources=(MarkedLine(cell=7, line=10, text=CELL[1].strip(), mark="10 is made here"),),
        ),
        Observation(
            kind="bound",
            text="10 classes, set in line 2: nn.Linear(16, 10)",
            sources=(
                MarkedLine(cell=3, line=2, text="net = nn.Linear(16, 10)", mark="10 set here"),
            ),
        ),
    ]


def test_marks_are_the_observations_and_stand_by_cell() -> None:
    report = make_report(observations=tuple(observed()))
    parts = screen.build(report)
    assert [block.title for block in parts.blocks] == ["In [7]", "In [3]"]
    marks = {row.number: row.marks for block in parts.blocks for row in block.rows if row.marks}
    assert marks == {10: ("10 is made here",), 2: ("10 set here",)}
    facts = [screen.plain(fact) for fact in parts.facts]
    assert facts == ["3 of 32 labels are 10, all others 1 … 9", "In [7] line 12"]


def test_without_observations_the_way_of_the_values_has_marks() -> None:
    marks = screen.line_marks(make_report())
    assert [(mark.line, mark.said) for mark in marks] == [
        (10, "out of bounds before it reached the device")
    ]


@pytest.mark.parametrize(
    ("op", "note", "said"),
    [
        ("torch.ones", None, None),
        ("torch.tensor", None, None),
        ("torch.zeros_like", None, None),
        ("torch.Tensor.fill_", None, None),
        ("torch.Tensor.resize_", None, None),
        ("torch.nn.init.kaiming_uniform_", None, None),
        ("torch.full", FIRST_NAN, FIRST_NAN),
        ("torch.Tensor.data", None, "the values pass through here"),
        ("torch.Tensor.mul_", None, "the values pass through here"),
    ],
)
def test_no_value_passes_through_what_gives_a_tensor_new_ones(
    op: str, note: str | None, said: str | None
) -> None:
    step = ProvenanceStep(op=op, source=LineRef(cell=7, line=10, text="x"), note=note)
    marks = screen.line_marks(make_report(provenance=(step,)))
    assert [mark.said for mark in marks] == ([said] if said else [])


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_what_changes_labels_after_the_forward_call_has_a_mark(phase: str) -> None:
    """Beside the line that the values are from, which is no mistake; of one line one thing."""
    steps = (
        ProvenanceStep(op="torch.Tensor.copy_", source=LineRef(cell=7, line=11, text="t.copy_(y)")),
        ProvenanceStep(op="torch.Tensor.to", source=LineRef(cell=7, line=10, text="y.to()")),
    )
    report = make_report(observations=tuple(observed()), provenance=steps, phase=phase)
    said = [(mark.line, mark.said) for mark in screen.line_marks(report)]
    passes = [(11, "the values pass through here")] if phase == "backward" else []
    assert said == [(2, "10 set here"), (10, "10 is made here"), *passes]


def test_the_magic_above_the_failing_line_is_not_drawn() -> None:
    for above, shown in (("%%cudacheck", 1), ("x = 1", 2)):
        lines = (CodeLine(line=1, text=above), CodeLine(line=2, text="f(y)"))
        here = SourceSpan(cell=7, line=2, end_line=2, text="f(y)", context=lines)
        parts = screen.build(make_report(source=here, tensors=(), provenance=()))
        assert len(parts.blocks[0].rows) == shown


@pytest.mark.parametrize(
    ("tried", "line"),
    [
        (True, "try: F.cross_entropy(logits, y - 1) in line 12"),
        (None, "hint: F.cross_entropy(logits, y - 1) in line 12"),
    ],
)
def test_only_what_was_tried_is_tried(tried: bool | None, line: str) -> None:
    hint = Hint(text="they look 1-based", fix="F.cross_entropy(logits, y - 1)", tried=tried)
    action = screen.action_of(make_report(hints=(hint,)))
    assert action is not None and action.line == line
    assert ("Tested" in action.reason) == bool(tried)
    changed = [action.code[start:end] for start, end in action.changed]
    assert "".join(changed).strip() == "- 1"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ((), "All lie from 1 to 10. They look 1-based. Tested on copies: it runs."),
        ((Hint(text="a third"),), "They look 1-based. Tested on copies: it runs."),
    ],
    ids=["alone", "one of several"],
)
def test_a_reading_is_the_reason_of_an_edit_beside_it(more: tuple[Hint, ...], reason: str) -> None:
    edit = Hint(text="they look 1-based", fix="F.cross_entropy(logits, y - 1)", tried=True)
    hints = (Hint(text="all lie from 1 to 10"), edit, *more)
    action = screen.action_of(make_report(hints=hints))
    assert action is not None and action.reason == reason


def test_the_place_of_an_edit_in_another_cell_names_the_cell() -> None:
    at = SourceSpan(cell=3, line=2, text="net = nn.Linear(16, 10)")
    hint = Hint(text="one more class", fix="net = nn.Linear(16, 11)", at=at)
    action = screen.action_of(make_report(hints=(hint,)))
    assert action is not None and action.place == "In [3] line 2"
    assert [action.code[start:end] for start, end in action.changed] == ["11"]


def test_a_lost_device_has_a_next_step_outside_the_code() -> None:
    action = screen.action_of(make_report(context_usable=False, certainty="likely", hints=()))
    assert action is not None and action.label == "next"
    assert "restart the kernel" in action.line.casefold()


def test_no_action_is_better_than_a_guess() -> None:
    assert screen.action_of(make_report(hints=())) is None


@pytest.mark.parametrize(
    ("headline", "reason"),
    [
        ("h still has its graph, which line 6 has freed", "Add h = h.detach() after line 6."),
        ("c still has its graph", "h still has its graph: add h = h.detach() after line 6."),
    ],
)
def test_the_action_does_not_repeat_the_headline(headline: str, reason: str) -> None:
    hint = Hint(text="h still has its graph: add h = h.detach() after line 6")
    report = make_report(headline=headline, hints=(hint,))
    action = screen.action_of(report)
    assert action is not None and action.reason == reason
    assert [fact for fact in screen.details(report) if fact.name == "also"] == []


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_markdown_is_at_most_forty_lines(name: str) -> None:
    report = REPRESENTATIVE[name]()
    lines = render(report).splitlines()
    assert len(lines) <= MAX_LINES
    assert sum(line.startswith("```") for line in lines) % 2 == 0


@pytest.mark.parametrize("name", ["labels", "host_error", "lost_context"])
def test_markdown_is_the_golden_markdown(name: str) -> None:
    check_golden(f"{name}.md", render(REPRESENTATIVE[name]()))


def test_markdown_quotes_as_words_of_pytorch_only_those() -> None:
    own = RaisedException(type="SilentFindingWarning", message="y[0] = 9 is outside")
    found = render(make_report(kind="silent", prevented=False, exception=own))
    assert "PyTorch:" not in found and "the result is wrong here" in found
    assert "fails here" not in found
    theirs = RaisedException(type="RuntimeError", message="mat1 and mat2 cannot be multiplied")
    found = render(make_report(kind="host_error", prevented=False, exception=theirs))
    assert "- PyTorch: `mat1 and mat2" in found


def test_markdown_does_not_call_a_fact_untried() -> None:
    fact = Hint(text="sqrt takes numbers from 0 on", tried=None)
    assert "tried" not in render(make_report(hints=(fact,)))


def test_markdown_says_once_where_it_fails() -> None:
    for build in REPRESENTATIVE.values():
        assert render(build()).count("fails here") <= 1


def test_a_mark_beside_no_code_has_no_row() -> None:
    line = MarkedLine(cell=7, line=2, text="", mark="y is made here")
    seen = Observation(kind="device", text="y is made in line 2", sources=(line,))
    rows = [row for block in screen.build(make_report(observations=(seen,))).blocks
            for row in block.rows]  # fmt: skip
    assert all(row.text.strip() for row in rows if row.number is not None)


def test_the_bad_value_of_a_headline_is_that_of_the_report() -> None:
    first = screen.build(make_report()).headline[0]
    assert (first.text, first.look) == ("y[17] = 10", "badcode")
    other = replace(make_report(), headline="y[17] = 100 is outside")
    assert screen.build(other).headline[0].look == "plain"


@pytest.mark.parametrize(
    ("typed", "fix", "new"),
    [
        ("net(inputs)", "net(inputs.float())", [".float()"]),
        ("F.cross_entropy(out, y)", "F.cross_entropy(out, y - 1)", [" - 1"]),
        ("nn.L()(p, m)", "nn.L(ignore_index=255)(p, m)", ["ignore_index=255"]),
    ],
)
def test_only_what_is_new_in_a_fix_is_marked(typed: str, fix: str, new: list[str]) -> None:
    """The closing bracket that was there before is not new."""
    at = LineRef(cell=7, line=18, text=typed)
    report = make_report(hints=(Hint(text="so", fix=fix, tried=True, at=at),))
    action = screen.action_of(report)
    assert action is not None
    found = [action.code[start:stop] for start, stop in action.changed]
    assert found == new


@pytest.mark.parametrize(
    ("kind", "mark", "is_said"),
    [("values", "here", True), ("item", "here", False), ("item", "", True), ("others", "", False)],
)
def test_what_a_line_of_code_carries_is_not_said_again(kind: str, mark: str, is_said: bool) -> None:
    line = MarkedLine(cell=7, line=10, text=CELL[1].strip(), mark=mark)
    seen = Observation(kind=kind, text="the words", sources=(line,))
    parts = screen.build(make_report(observations=(seen,)))
    assert ("the words" in map(screen.plain, parts.facts)) is is_said
    assert ("the words" in parts.notes) is (kind == "others")
