"""The parts of a report: one action, marks at lines, and the words that three views share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.graph_types import FIRST_NAN
from cudalens.core.report import (
    Bounds,
    CodeLine,
    Environment,
    Hint,
    LineRef,
    Observation,
    ProvenanceStep,
    RankResult,
    SourceSpan,
)
from cudalens.core.report_types import MarkedLine, RaisedException, SeenBefore
from cudalens.render import screen
from cudalens.render.markdown import MAX_LINES, render
from tests.builders import (
    CELL,
    REPRESENTATIVE,
    fact,
    make_report,
    offenders,
    one_row,
    source,
    user_frame,
)
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


@pytest.mark.parametrize(
    ("kind", "line", "is_told"),
    [
        ("came_from", 10, True), ("write", 10, True), ("maker", 10, True), ("graph", 10, True),
        ("bound", 10, False), ("graph", None, False),
    ],
)  # fmt: skip
def test_the_way_of_the_values_is_marked_where_no_observation_tells_it(
    kind: Any, line: int | None, is_told: bool
) -> None:
    seen = Observation(kind=kind, text="t", sources=(MarkedLine(cell=7, line=line, mark="m"),))
    steps = (step(11, "y.mul_(2)"),)
    marks = screen.line_marks(make_report(observations=(seen,), provenance=steps))
    way = [] if is_told else [(11, "the values pass through here")]
    assert [(mark.line, mark.said) for mark in marks] == [(10, "m")] * (line is not None) + way


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


@pytest.mark.parametrize(
    ("seen", "kind", "copies"),
    [
        (None, "values", "copies"),
        (SeenBefore(calls=1), "values", "copies of this call"),
        (SeenBefore(calls=1), "item", "copies of this batch"),
        (None, "item", "copies of this batch"),
    ],
)
def test_what_an_edit_was_tested_on(seen: SeenBefore | None, kind: Any, copies: str) -> None:
    """Another call of the line, and another batch of a loader, may have other values."""
    edit = Hint(text="they look 1-based", fix="F.cross_entropy(logits, y - 1)", tried=True)
    facts = (Observation(kind=kind, text="a fact"),)
    report = make_report(hints=(edit,), observations=facts, seen_before=seen)
    action = screen.action_of(report)
    assert action is not None and action.reason.endswith(f"Tested on {copies}: it runs.")


@pytest.mark.parametrize(
    ("cell", "line", "place"), [(3, 2, "In [3] line 2"), (7, 2, "line 2"), (7, None, "")]
)
def test_the_place_of_an_edit_in_another_cell_names_the_cell(
    cell: int, line: int | None, place: str
) -> None:
    at = SourceSpan(cell=cell, line=line, text="net = nn.Linear(16, 10)")
    hint = Hint(text="one more class", fix="net = nn.Linear(16, 11)", at=at)
    action = screen.action_of(make_report(hints=(hint,)))
    assert action is not None and action.place == place
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
        ("so h still has its graph", "h still has its graph: add h = h.detach() after line 6."),
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
        ("f(a)", "f(a)(a)", ["(a)"]),
        ("nn.L()(p, m)", "nn.L(ignore_index=255)(p, m)", ["ignore_index=255"]),
        ("f(a)", "x = torch.tensor(b, device=d)", []),  # none of it is the user's
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


# --- the second line, the action, and what is behind the drawers ----------------------------------


def step(
    line: int | None, text: str, op: str = "torch.Tensor.mul_", note: str | None = None
) -> Any:
    ref = None if line is None else LineRef(cell=7, line=line, text=text)
    return ProvenanceStep(op=op, source=ref, note=note)


def test_the_origin_is_every_observation_and_the_steps_of_other_lines() -> None:
    """A line with a mark says it in place of the sentence, and no step says it again."""
    marked = MarkedLine(cell=7, line=3, text="y = make()", mark="10 is made here")
    other = MarkedLine(cell=7, line=4, text="y += 1", mark="")
    seen = (
        Observation(kind="values", text="3 of 32 labels are 10"),
        Observation(kind="came_from", text="line 3: make", sources=(marked, other)),
        Observation(kind="device", text="y is on the CPU", sources=(other,)),
    )
    steps = (step(3, "y = make()"), step(4, "y += 1"), step(None, "", "torch.randn"))
    report = make_report(observations=seen, provenance=steps)
    assert screen.origin(report) == (
        "3 of 32 labels are 10",
        "In [7] line 3 y = make(): 10 is made here",
        "y is on the CPU",
        "In [7] line 4 y += 1",
        "torch.randn",
    )


def test_the_origin_says_a_line_once_and_ends_with_the_forward_call() -> None:
    seen = Observation(kind="values", text="3 of 32 labels are 10")
    forward = SourceSpan(cell=7, line=2, text="out = net(x)")
    report = make_report(observations=(seen, seen), provenance=(), forward_source=forward)
    said = "forward call: In [7] line 2 out = net(x)"
    assert screen.origin(report) == ("3 of 32 labels are 10", said)
    assert screen.origin(replace(report, forward_source=None)) == ("3 of 32 labels are 10",)


def test_the_callers_are_the_users_frames_above_the_failing_one() -> None:
    frames = (
        user_frame("train.py", 30, "<module>", "main()"),
        user_frame("/site-packages/lib.py", 4, "wrapped", "return f()"),
        user_frame("train.py", 20, "main", "  step(y)"),
        user_frame("train.py", 9, "step", "loss(y)"),
    )
    frames = (frames[0], replace(frames[1], is_user=False), *frames[2:])
    found = screen.callers(make_report(frames=frames))
    assert found == ("train.py:30 in <module>: main()", "train.py:20 in main: step(y)")


@pytest.mark.parametrize(
    ("headline", "certainty", "shown"),
    [
        ("y is wrong", "likely", "Likely: y is wrong"),
        ("Likely y is wrong", "likely", "Likely y is wrong"),
        ("likely y is wrong", "likely", "likely y is wrong"),
        ("y is wrong", "proven", "y is wrong"),
        (" ", "proven", "device-side assert: nothing more could be established"),
    ],
)
def test_a_headline_says_once_that_it_is_likely(headline: str, certainty: str, shown: str) -> None:
    parts = screen.build(make_report(headline=headline, certainty=certainty))
    assert screen.plain(parts.headline) == shown


@pytest.mark.parametrize(
    ("headline", "element"),
    [
        ("y[17] = 10 is outside", "y[17] = 10"),
        ("y[17] = 1000 is outside", ""),
        ("z[17] = 10 is outside", ""),
        ("logits[17] = 10 is outside", "logits[17] = 10"),  # of another tensor of the call
    ],
)
def test_the_bad_element_is_a_whole_number_of_a_tensor_of_the_call(
    headline: str, element: str
) -> None:
    first = screen.build(make_report(headline=headline)).headline[0]
    assert (first.text if first.look == "badcode" else "") == element


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"context_usable": False, "deferred": True}, "CUDA is lost"),
        ({"kind": "silent", "deferred": True}, "silent: the result is wrong"),
        ({"deferred": True}, "found after the launch, which ran with values in bounds"),
        (
            {"deferred": True, "prevented": False},
            "found after the launch, which ran with values in bounds",
        ),
        ({"context_usable": None}, "found before the launch"),
        ({"context_usable": None, "prevented": False}, None),
        ({}, "CUDA is fine"),
        ({"environment": Environment()}, None),
        ({"environment": Environment(simulated=True)}, "CUDA is fine"),
    ],
)
def test_the_status_says_of_cuda_what_is_known(facts: dict[str, Any], text: str | None) -> None:
    status = screen.build(make_report(**facts)).status
    assert (status and status.text) == text


def second_line(**facts: Any) -> list[str]:
    facts = {"provenance": (), "offenders": None, "bounds": None, **facts}
    return [screen.plain(fact) for fact in screen.build(make_report(**facts)).facts]


def test_the_second_line_names_the_op_where_no_line_is_known_and_the_phase_beside_a_line() -> None:
    assert second_line() == ["In [7] line 12"]
    assert second_line(source=None) == ["F.cross_entropy → aten::nll_loss_forward"]
    assert second_line(phase="backward") == ["In [7] line 12, backward"]
    assert second_line(phase="optimizer") == ["In [7] line 12, optimizer"]


def test_the_second_line_says_the_rank_unless_it_lists_the_ranks() -> None:
    environment = Environment(rank=0, device="NVIDIA H200")
    assert second_line(environment=environment) == ["rank 0", "In [7] line 12"]
    ranks = tuple(RankResult(rank=at, report=None if at else make_report()) for at in range(4))
    assert second_line(environment=environment, ranks=ranks) == ["rank 0 of 4", "In [7] line 12"]


@pytest.mark.parametrize("kind", ["bound", "pattern"])
def test_the_second_line_says_earlier_calls_and_the_bound_once(kind: Any) -> None:
    seen = SeenBefore(calls=2, min=0, max=9)
    bounds = Bounds(min=0, max=9)
    said = second_line(seen_before=seen, bounds=bounds, headline="y is wrong")
    assert said == ["2 earlier calls of this line: 0 … 9", "allowed 0 … 9", "In [7] line 12"]
    earlier = Observation(kind="earlier", text="earlier calls had 0 … 9")
    bound = Observation(kind=kind, text="10 classes")
    more = {"observations": (bound, earlier), "headline": "y is wrong", "seen_before": seen}
    said = ["earlier calls had 0 … 9", "10 classes"]
    assert second_line(bounds=bounds, **more) == [*said, "In [7] line 12"]
    # The size tells nothing of where the negative numbers end.
    below = Bounds(min=-10, max=9)
    assert second_line(bounds=below, **more) == [*said, "allowed -10 … 9", "In [7] line 12"]
    assert second_line(bounds=bounds, headline="y is not 0 … 9") == ["In [7] line 12"]


@pytest.mark.parametrize(
    ("count", "rows", "is_whole"),
    [(1, 1, False), (2, 1, True), (12, 1, True), (13, 1, False), (12, 2, False)],
)
def test_all_values_of_a_short_vector_are_shown(count: int, rows: int, is_whole: bool) -> None:
    values = tuple(range(count))
    grid = replace(one_row(values, tuple(int(it == 1) for it in values)), rows=rows)
    found = offenders(count, 1, first=[((0,), 1)], map=grid)
    first, *others = screen.build(make_report(offenders=found, expression="y.\nz")).facts
    assert (screen.plain(first) == f"y. z = {', '.join(map(str, values))}") is is_whole
    if is_whole:
        assert not any(" bad" in screen.plain(other) for other in others)
        assert [span.text for span in first if span.look == "badcode"] == ["1"]


@pytest.mark.parametrize(
    ("line", "cell", "is_said"),
    [(11, 7, True), (12, 7, False), (13, 7, False), (14, 7, True), (12, 6, True)],
)
def test_where_a_size_is_set_is_said_outside_the_failing_statement(
    line: int, cell: int, is_said: bool
) -> None:
    here = replace(make_report().source, end_line=13)
    bound = SourceSpan(cell=cell, line=line, text="net = make()")
    report = make_report(source=here, bound_source=bound, provenance=())
    said = [(mark.line, mark.said) for mark in screen.line_marks(report)]
    assert said == ([(line, "the size is set here")] if is_said else [])


@pytest.mark.parametrize(("line", "is_said"), [(11, True), (12, False)])
def test_a_failure_noticed_elsewhere_is_marked_unless_its_line_is(line: int, is_said: bool) -> None:
    forward = SourceSpan(cell=7, line=line, text="logits = net(x)")
    report = make_report(forward_source=forward, provenance=())
    said = [(mark.line, mark.said) for mark in screen.line_marks(report)]
    assert said == ([(12, "noticed here")] if is_said else [])
    for cell in (7, 6):  # the line of the same number in another cell is another line
        own = MarkedLine(cell=cell, line=12, text=CELL[3].strip(), mark="y is read here")
        seen = Observation(kind="device", text="y", sources=(own,))
        marked = screen.line_marks(replace(report, observations=(seen,)))
        also = ["noticed here"] if is_said and cell == 6 else []
        assert [mark.said for mark in marked] == ["y is read here", *also]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("they look 1-based", "They look 1-based."),
        ("a label is too large", "A label is too large."),
        ("x is too large", "x is too large."),
        ("logits is a name of the cell", "logits is a name of the cell."),
        ("y: log it", "y: log it."),  # a name alone is not what the headline says
        ("log it", "Log it."),  # a part of a name is none
        ("is it so?", "Is it so?"),
        ("and so on…", "And so on…"),
        ("", ""),
    ],
)
def test_a_sentence_begins_with_a_capital_letter_unless_with_code(text: str, said: str) -> None:
    action = screen.action_of(make_report(hints=(Hint(text=text),)))
    assert action is not None and action.reason == said


@pytest.mark.parametrize(
    ("fix", "at", "tried", "line"),
    [
        ("y = y - 1", None, True, "try: y = y - 1 before line 12"),
        ("y = y - 1", 10, True, "try: y = y - 1 after line 10"),
        ("y = y - 1", 10, None, "hint: y = y - 1 in line 10"),
        ("f(y - 1)", 10, True, "try: f(y - 1) in line 10"),
    ],
)
def test_a_statement_stands_before_the_failing_line_or_behind_a_maker(
    fix: str, at: int | None, tried: bool | None, line: str
) -> None:
    place = None if at is None else SourceSpan(cell=7, line=at, text="y = make()")
    action = screen.action_of(make_report(hints=(Hint(text="so", fix=fix, at=place, tried=tried),)))
    assert action is not None and action.line == line


@pytest.mark.parametrize("tried", [True, None])
def test_after_a_lost_device_an_edit_that_was_not_tried_is_no_step(tried: bool | None) -> None:
    hint = Hint(text="so", fix="F.cross_entropy(logits, y - 1)", tried=tried)
    action = screen.action_of(make_report(context_usable=False, hints=(hint,)))
    assert action is not None and action.label == ("try" if tried else "next")


@pytest.mark.parametrize(
    ("kind", "item", "outcome"),
    [
        ("device_assert", False, "Tested on copies: it runs."),
        ("nonfinite", False, "Tested on copies: values and gradients are finite."),
        ("host_error", True, "Tested on copies of this batch: it runs."),
    ],
)
def test_the_outcome_of_a_trial_says_what_was_tried(kind: str, item: bool, outcome: str) -> None:
    values = Observation(kind="values", text="3 of 32 labels are 10")
    seen = (values, *([Observation(kind="item", text="item 3 of the batch")] if item else []))
    hint = Hint(text="so", fix="f(y - 1)", tried=True)
    action = screen.action_of(make_report(kind=kind, hints=(hint,), observations=seen))
    assert action is not None and action.reason == f"So. {outcome}"


@pytest.mark.parametrize(("length", "is_marked"), [(479, True), (480, False)])
def test_nothing_is_marked_as_changed_in_very_long_code(length: int, is_marked: bool) -> None:
    typed = f"f({'a' * (length - 3)})"
    fix = f"{typed[:-1]}, {'b' * 40})"
    at = LineRef(cell=7, line=18, text=typed)
    action = screen.action_of(make_report(hints=(Hint(text="so", fix=fix, tried=True, at=at),)))
    assert action is not None and bool(action.changed) is is_marked


@pytest.mark.parametrize("prevented", [True, False])
def test_what_cuda_prints_is_said_of_a_launch_that_was_or_was_not(prevented: bool) -> None:
    facts = {fact.name: fact.text for fact in screen.details(make_report(prevented=prevented))}
    printed = [name for name in facts if name.startswith("CUDA")]
    assert printed == ["CUDA would print" if prevented else "CUDA printed"]


@pytest.mark.parametrize("simulated", [True, False])
def test_the_details_are_those_that_are_known(simulated: bool) -> None:
    environment = Environment(torch="2.13.0", simulated=simulated)
    limits = ("one is unknown", "another is")
    report = make_report(environment=environment, limits=limits, phase="unknown", explanation="")
    facts = screen.details(report)
    assert not {"phase", "module", "why"} & {fact.name for fact in facts}
    assert [fact.text for fact in facts if fact.name == "unknown"] == [*limits]
    (ran,) = [fact.text for fact in facts if fact.name == "ran on"]
    assert ran == ("torch 2.13.0; Rehearsal device. No GPU here." if simulated else "torch 2.13.0")
    (finding,) = [fact.text for fact in facts if fact.name == "finding"]
    assert finding == "device-side assert, proven"


def test_two_observations_of_one_kind_are_both_in_the_second_line() -> None:
    seen = [Observation(kind="write", text=f"write {at}") for at in range(6)]
    assert second_line(observations=tuple(seen)) == [
        *(f"write {at}" for at in range(5)),
        "In [7] line 12",
    ]


def test_an_edit_is_compared_with_the_failing_call_alone() -> None:
    here = source(("loss = f(x) * f(x, y)",), 0, "f(x)")
    hint = Hint(text="so", fix="f(x, y)", tried=True)
    action = screen.action_of(make_report(source=here, hints=(hint,)))
    assert action is not None
    assert [action.code[start:end] for start, end in action.changed] == [", y"]


def test_a_size_is_said_once_to_be_set() -> None:
    bound = SourceSpan(cell=3, line=2, text="net = nn.Linear(16, 10)")
    report = make_report(observations=tuple(observed()), bound_source=bound)
    said = [mark.said for mark in screen.line_marks(report)]
    assert said == ["10 set here", "10 is made here"]


def test_the_way_of_a_nan_to_its_backward_is_that_of_its_observations() -> None:
    steps = (step(11, "t.copy_(y)", "torch.Tensor.copy_"),)
    report = make_report(observations=tuple(observed()), provenance=steps, phase="backward")
    for kind, count in (("device_assert", 3), ("nonfinite", 2)):
        assert len(screen.line_marks(replace(report, kind=kind))) == count


# --- the call and the suspected line --------------------------------------------------------------


def typed(*lines: str, at: tuple[int, int], end: tuple[int, int], **parts: Any) -> SourceSpan:
    """Return a call that begins and ends at these lines and columns of a cell."""
    facts = {"column": at[1], "end_column": end[1], "text": "the text", **parts}
    context = tuple(CodeLine(line=number, text=line) for number, line in enumerate(lines, 1))
    return SourceSpan(cell=7, line=at[0], end_line=end[0], context=context, **facts)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (typed("y = f(x) + 1", at=(1, 4), end=(1, 8)), "f(x)"),
        (typed("y = f(", "    x,", "  ) + 1", at=(1, 4), end=(3, 3)), "f( x, )"),
        (typed("a", "y = f(x)", at=(2, 4), end=(2, 8)), "f(x)"),
        (typed("a", at=(2, 4), end=(2, 8)), "the text"),
        (typed("y = f(x)", at=(1, 4), end=(1, 8), column=None), "the text"),
        (typed("y = f(x)", at=(1, 4), end=(1, 8), end_column=None), "the text"),
        (typed("y = f(x)", at=(1, 4), end=(1, 8), column=None, text=None), ""),
    ],
)
def test_the_text_of_a_call_is_what_was_typed_on_one_line(source: SourceSpan, text: str) -> None:
    assert screen._call_text(source) == text


@pytest.mark.parametrize(
    ("kind", "place", "is_suspected"),
    [
        ("suspect", MarkedLine(cell=7, line=3, text="f(x)", mark="likely here"), True),
        ("bound", MarkedLine(cell=7, line=3, text="f(x)", mark="likely here"), False),
        ("suspect", MarkedLine(cell=7, line=9, text="f(x)", mark="likely here"), False),
        ("suspect", MarkedLine(cell=6, line=3, text="f(x)", mark="likely here"), False),
        ("others", MarkedLine(cell=7, line=3, text="f(x)", mark="likely here"), False),
        ("suspect", None, False),
    ],
)
def test_a_line_of_the_failing_cell_may_be_at_fault(
    kind: Any, place: MarkedLine | None, is_suspected: bool
) -> None:
    here = typed(*["a"] * 9, at=(9, 0), end=(9, 1))
    said = Observation(kind=kind, text="t", sources=() if place is None else (place,))
    other = Observation(kind="suspect", text="t", sources=(MarkedLine(cell=7, line=2, mark="m"),))
    report = make_report(source=here, observations=(said,))
    found = screen._suspected(report)
    assert (found is not None) is is_suspected
    if found is not None:
        expected = replace(here, line=3, end_line=3, column=None, end_column=None, text="f(x)")
        assert found == expected
        both = replace(report, observations=(said, other))
        assert screen._suspected(both) == expected
        forward = replace(report, forward_source=replace(expected, line=5, end_line=5))
        (block,) = screen.build(forward).blocks
        assert [row.number for row in block.rows if row.is_hot] == [5]
    noticed = [mark.line for mark in screen.line_marks(report) if mark.said == "noticed here"]
    assert noticed == ([9] if is_suspected else [])
    assert screen._suspected(replace(report, source=None)) is None


# --- tones, order and words -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "tone"),
    [
        ({"context_usable": False}, "bad"), ({"kind": "silent"}, "plain"),
        ({"deferred": True}, "ok"), ({"context_usable": None}, "plain"), ({}, "ok"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("simulated", [True, False])
def test_the_status_has_the_tone_of_what_became_of_cuda(
    facts: dict[str, Any], tone: str, simulated: bool
) -> None:
    environment = Environment(device="NVIDIA H200", simulated=simulated)
    status = screen.build(make_report(environment=environment, **facts)).status
    assert status is not None and (status.tone, status.is_rehearsal) == (tone, simulated)


@pytest.mark.parametrize(
    ("kind", "certainty", "tone", "sign"),
    [
        ("device_assert", "proven", "bad", "✗"), ("nonfinite", "unknown", "bad", "✗"),
        ("silent", "proven", "warn", "⚠"), ("silent", "likely", "likely", "?"),
    ],
)  # fmt: skip
def test_the_sign_says_how_bad_and_how_certain_it_is(
    kind: str, certainty: str, tone: str, sign: str
) -> None:
    parts = screen.build(make_report(kind=kind, certainty=certainty))
    assert (parts.tone, parts.sign) == (tone, sign)
    assert ("cause not established" in map(screen.plain, parts.facts)) is (certainty == "unknown")


@pytest.mark.parametrize(("length", "is_long"), [(screen.LONG, False), (screen.LONG + 1, True)])
def test_a_headline_is_long_beyond_a_limit(length: int, is_long: bool) -> None:
    assert screen.build(make_report(headline="y" * length)).is_long is is_long


@pytest.mark.parametrize(
    ("value", "position", "headline", "element"),
    [
        (0.1234567891, (17,), "y[17] = 0.1234567891 is bad", "y[17] = 0.1234567891"),
        (0.1234567891, (17,), "y[17] = 0.123457 is bad", "y[17] = 0.123457"),
        (9, (1, 0, 2), "z[1, 2] = 9 is bad", "z[1, 2] = 9"),  # as it was typed
        (9, (1, 0, 2), "z[1, 0, 2] = 9 is bad", "z[1, 0, 2] = 9"),  # as the op was given it
        (9, (1, 0, 2), "third[1, 0, 2] = 9 is bad", "third[1, 0, 2] = 9"),
        (9, (), "z = 9 is bad", "z = 9"),
    ],
)
def test_the_bad_element_may_be_written_as_it_was_typed_or_as_the_op_has_it(
    value: float, position: tuple[int, ...], headline: str, element: str
) -> None:
    tensors = (
        fact("self", "float32[3]", "x"), fact(None, "int64[2,3]", "z", bad_at=(1, 2)),
        fact("target", "int64[2,1,3]"), fact("weight", "float32[3]", "third"),
    )  # fmt: skip
    found = offenders(6, 1, first=[(position, value)])
    name = headline.partition(" ")[0].partition("[")[0]
    report = make_report(
        headline=headline,
        offenders=found,
        tensors=tensors,
        expression=None if name == "third" else name,
    )
    first = screen.build(report).headline[0]
    assert (first.text, first.look) == (element, "badcode")


def test_tensors_beside_the_line_are_told_with_the_one_at_fault_first() -> None:
    tensors = (fact("self", "float32[32,10]", "logits"), fact("target", "int64[32]", "y"))
    parts = screen.build(make_report(tensors=tensors))
    assert parts.loose == (("y", "i64[32], 3 bad", True), ("logits", "f32[32, 10]", False))


def test_the_notes_are_other_events_and_then_what_is_unknown() -> None:
    other = Observation(kind="others", text="1 more in this cell")
    report = make_report(observations=(other,), limits=("the graph\nis unknown",))
    assert screen.build(report).notes == ("1 more in this cell", "the graph is unknown")


def test_what_two_observations_say_of_a_line_is_said_once_and_cut() -> None:
    line = MarkedLine(cell=7, line=10, text=CELL[1].strip(), mark="m" * 91)
    seen = tuple(Observation(kind=kind, text="t", sources=(line,)) for kind in ("write", "graph"))
    marks = screen.line_marks(make_report(observations=seen, provenance=()))
    assert [mark.said for mark in marks] == ["m" * 89 + "…"]


@pytest.mark.parametrize(
    ("text", "looks"),
    [("`y` is `z`", "code plain code"), ("so `y` is", "plain code plain"), ("y", "plain")],
)
def test_what_stands_in_backticks_is_code(text: str, looks: str) -> None:
    spans = screen.spans_of(text)
    assert " ".join(span.look for span in spans) == looks
    assert screen.plain(spans) == text.replace("`", "")


NO_CELL = SourceSpan(file="/a/train.py", line=3, text="f(y)")


@pytest.mark.parametrize(
    ("here", "certainty", "reading", "reason"),
    [
        (source(("f(y)",), 0, "f(y)"), "proven", None, "Restart the kernel to use the GPU again."),
        (None, "proven", None, "Restart the kernel to use the GPU again."),
        (NO_CELL, "proven", None, "Start the process again to use the GPU again."),
        (
            NO_CELL,
            "proven",
            Hint(text="it was asked twice"),
            "Start the process again to use the GPU again. It was asked twice.",
        ),
        (
            NO_CELL,
            "likely",
            Hint(text="it was asked twice"),
            "Run the whole script with python -m cudalens: a full check names the op at fault if "
            "torch called it, and the value if a guard knows the op.",
        ),
    ],
)
def test_the_step_after_a_lost_device_is_that_of_a_notebook_or_a_script(
    here: SourceSpan | None, certainty: str, reading: Hint | None, reason: str
) -> None:
    frames = (user_frame("/a/train.py", 3, "f", "f(y)"),)
    report = make_report(
        source=here, certainty=certainty, context_usable=False, frames=frames,
        hints=(reading,) if reading else (),
    )  # fmt: skip
    action = screen.action_of(report)
    assert action is not None and (action.label, action.reason) == ("next", reason)


def test_behind_the_drawers_is_each_fact_that_the_first_screen_leaves_out() -> None:
    edit = Hint(text="they look 1-based", fix="f(y - 1)", tried=True)
    others = (Hint(text="or take more classes", fix="nn.Linear(16, 11)"), Hint(text="look at y"))
    report = make_report(
        exception=RaisedException(type="IndexError", message="y is\nbad"), module_path="net.3",
        hints=(edit, *others), limits=("the graph is unknown",), explanation="the reason",
        environment=Environment(device="NVIDIA H200", torch="2.13.0", rank=1),
    )  # fmt: skip
    assert [(it.name, it.text, it.is_code) for it in screen.details(report)] == [
        ("exception", "IndexError: y is bad", True),
        ("finding", "device-side assert, proven", False),
        ("operator", "F.cross_entropy → aten::nll_loss_forward, argument target", True),
        ("module", "net.3", True),
        ("phase", "forward", False),
        ("allowed", "0 … 9 or -100 (ignore_index)", False),
        ("CPU", "IndexError: Target 10 is out of bounds.", True),
        ("CUDA would print", "Assertion `t >= 0 && t < n_classes` failed.", True),
        ("why", "the reason", False),
        ("also", "nn.Linear(16, 11)  or take more classes", False),
        ("also", "look at y", False),
        ("ran on", "device NVIDIA H200, torch 2.13.0, rank 1", False),
        ("checked", "4 guarded calls, 412 ops recorded", False),
        ("unknown", "the graph is unknown", False),
    ]
