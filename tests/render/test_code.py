"""The code view: which lines are drawn, with which marks, and the labels that hang below them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.report import CodeLine, Report, SourceSpan, TensorFact
from cudalens.render.code import (
    MAX_LABELS,
    MAX_MARKED,
    MAX_STATEMENT,
    Block,
    LineMark,
    code_blocks,
    code_rows,
    unplaced_tensors,
    where_of,
)
from tests.builders import fact, make_report, source, tensor


def span(*lines: str, first: int = 1, at: int = 1, end: int | None = None) -> SourceSpan:
    """Return the failing statement from line ``at`` to line ``end`` of a cell with these lines."""
    context = tuple(CodeLine(line=first + i, text=line) for i, line in enumerate(lines))
    return SourceSpan(cell=7, line=at, end_line=end or at, text="", context=context)


def blocks(
    here: SourceSpan | None, *marks: LineMark, tensors: Any = (), fold: int = 100, **facts: Any
) -> tuple[Block, ...]:
    report = make_report(source=here, tensors=tensors, **facts)
    return code_blocks(report, marks, here, fold=fold, label_room=20)


def numbers(found: tuple[Block, ...]) -> list[int | None]:
    return [row.number for block in found for row in block.rows if not row.is_gap]


def texts(*tensors: TensorFact, line: str, call: str, fold: int = 100) -> list[str]:
    """Return the drawn rows of a line with these tensors."""
    report = make_report(source=source((line,), 0, call), tensors=tensors, argument=None)
    found = code_blocks(report, (), report.source, fold=fold, label_room=20)
    return [row.text for row in found[0].rows]


# --- which lines ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "at", "drawn"),
    [
        (("x = 1", "f(x)"), 2, [1, 2]),
        (("if x:", "    f(x)"), 2, [2]),
        (("    x = 1", "f(x)"), 2, [2]),
        (("", "f(x)"), 2, [2]),
        (("%%cudacheck", "f(x)"), 2, [2]),
        (("%time x = 1", "f(x)"), 2, [1, 2]),
        (("f(x)", "x = 1"), 1, [1]),
    ],
)
def test_the_line_before_is_drawn_where_it_is_of_the_same_block(
    lines: tuple[str, ...], at: int, drawn: list[int]
) -> None:
    assert numbers(blocks(span(*lines, at=at))) == drawn


def test_a_statement_of_several_lines_is_drawn_without_the_line_before() -> None:
    found = blocks(span("x = 1", "f(", "    x)", at=2, end=3))
    assert numbers(found) == [2, 3]
    assert [row.is_hot for row in found[0].rows] == [True, True]


def test_a_long_statement_is_cut_to_its_first_line_and_those_with_tensors() -> None:
    whole = [f"    a{at}," for at in range(MAX_STATEMENT)]
    assert numbers(blocks(span(*whole, end=MAX_STATEMENT))) == [*range(1, MAX_STATEMENT + 1)]
    longer = span(*whole, "    y)", end=MAX_STATEMENT + 1)
    y = fact("target", "int64[3]", "y", span=(MAX_STATEMENT + 1, 4, 5))
    found = blocks(longer, tensors=(y,))
    drawn = [row for row in found[0].rows if row.number is not None]
    assert [row.number for row in drawn] == [1, MAX_STATEMENT + 1]
    assert any(row.is_gap for row in found[0].rows)


def test_a_statement_without_context_has_its_own_text() -> None:
    here = SourceSpan(cell=7, line=3, text="f(y)")
    (block,) = blocks(here)
    assert [(row.number, row.text, row.is_hot) for row in block.rows] == [(3, "f(y)", True)]


def test_a_gap_stands_only_between_lines_that_do_not_follow_each_other() -> None:
    here = span("a()", "b()", "c()", "d()", at=4)
    for line, gaps in ((3, 0), (2, 0), (1, 1)):
        found = blocks(here, LineMark((7, None), line, "", "made here"))
        assert sum(row.is_gap for row in found[0].rows) == gaps


def test_marks_stand_beside_their_line_each_words_once() -> None:
    here = span("a()", "b()", at=2)
    marks = [LineMark((7, None), 1, "", said) for said in ("one", "two", "one")]
    (block,) = blocks(here, *marks)
    assert [row.marks for row in block.rows] == [("one", "two"), ()]


def test_a_mark_brings_the_text_of_its_line_unless_the_report_has_it() -> None:
    here = span("a()", at=1)
    (block,) = blocks(
        here, LineMark((7, None), 1, "other", "m"), LineMark((7, None), 9, "i()", "n")
    )
    assert [row.text for row in block.rows if row.number] == ["a()", "i()"]
    (block,) = blocks(here, LineMark((7, None), 9, "", "of no code"))
    assert numbers((block,)) == [1]
    forward = replace(span("b()", "  c()"), cell=3)
    marks = [LineMark((cell, None), line, "other", "m") for cell, line in ((3, 2), (4, 1))]
    found = blocks(here, *marks, forward_source=forward)
    assert [block.rows[0].text for block in found] == ["a()", "c()", "other"]


def test_only_so_many_lines_are_marked() -> None:
    marks = [LineMark((7, None), 10 * at, f"f{at}()", "m") for at in range(1, MAX_MARKED + 2)]
    found = blocks(span("a()"), *marks)
    assert len([number for number in numbers(found) if number and number > 1]) == MAX_MARKED


def test_each_cell_and_file_has_a_block_with_its_name() -> None:
    here = span("a()")
    assert [block.title for block in blocks(here)] == [""]
    other = LineMark((3, None), 2, "n = 1", "set here")
    file = LineMark((None, "net.py"), 5, "k = 2", "set there")
    found = blocks(here, other, file)
    assert [block.title for block in found] == ["In [7]", "In [3]", "net.py"]
    assert [[row.is_hot for row in block.rows] for block in found] == [[True], [False], [False]]


def test_two_files_of_one_name_are_told_apart() -> None:
    one, two = (LineMark((None, f"/{name}/net.py"), 5, "k = 2", "m") for name in "ab")
    between = LineMark((3, None), 2, "n = 1", "m")
    titles = [block.title for block in blocks(span("a()"), one, between, two)]
    assert titles == ["In [7]", "net.py", "In [3]", "net.py, another"]


def test_a_place_is_its_cell_or_file() -> None:
    assert where_of(None) == (None, None)
    assert where_of(SourceSpan(cell=3, line=1)) == (3, None)
    assert where_of(SourceSpan(file="a.py", line=1)) == (None, "a.py")


def test_the_common_indentation_is_left_out() -> None:
    found = blocks(span("        f(", "            x)", at=1, end=2))
    assert [row.text for row in found[0].rows] == ["f(", "    x)"]


# --- labels ---------------------------------------------------------------------------------------


def test_labels_that_fit_share_a_row() -> None:
    line = "loss = f(a, some_other_name)"
    a = fact("x", "int64[3]", "a", span=(9, 9, 10))
    b = tensor(line, 9, "y", "some_other_name", "int64[4]", device=None)
    rows = texts(a, b, line=line, call="f(a, some_other_name)")
    assert rows == [line, "         │  └ i64[4]", "         └ i64[3]"]
    wide = "loss = f(a,            some_other_name)"
    b = tensor(wide, 9, "y", "some_other_name", "int64[4]", device=None)
    rows = texts(a, b, line=wide, call="f(a,            some_other_name)")
    assert rows == [wide, "         └ i64[3]      └ i64[4]"]


def test_labels_of_a_line_have_rules_up_to_their_names() -> None:
    """A rule goes on through the rows of the labels further right, and ends at its own."""
    line = "f(a, bb, c)"
    facts = [
        tensor(line, 9, name, name, f"int64[{size}]", device=None)
        for name, size in (("a", 1), ("bb", 2), ("c", 3))
    ]
    rows = texts(*facts, line=line, call=line)
    assert rows == [line, "  │  │   └ i64[3]", "  │  └ i64[2]", "  └ i64[1]"]


def test_of_labels_in_one_column_the_upper_one_says_whose_it_is() -> None:
    line = "f(a.b.c)"
    inner = fact("x", "int64[1]", "a.b", span=(9, 2, 5))
    outer = fact("y", "int64[2]", "a.b.c", span=(9, 2, 7))
    rows = texts(inner, outer, line=line, call=line)
    assert rows == [line, "  ├ a.b: i64[1]", "  └ i64[2]"]


def test_a_label_beyond_the_fold_hangs_left_of_its_name() -> None:
    line = f"f(a, {' ' * 30}b)"
    a = fact("x", "int64[3]", "a", span=(9, 2, 3))
    b = tensor(line, 9, "y", "b", "int64[123456]", device=None)
    report = make_report(source=source((line,), 0, line), tensors=(a, b), argument="y")
    (found,) = code_blocks(report, (), report.source, fold=40, label_room=5)
    label = "i64[123456]"
    below = f"  │{' ' * (35 - 1 - 3 - len(label))}{label} ┘"
    assert [row.text for row in found.rows] == [line, below, "  └ i64[3]"]
    assert [row.pieces[-3 if at else -1].tone for at, row in enumerate(found.rows[::-1])] == [
        "label", "badlabel", "call",
    ]  # fmt: skip
    (found,) = code_blocks(report, (), report.source, fold=40, label_room=20)
    assert [row.text for row in found.rows] == [line, f"  └ i64[3]{' ' * 25}└ {label}"]


def test_a_label_needs_a_column_between_it_and_the_next() -> None:
    for blanks, count in ((7, 1), (6, 2)):
        line = f"f(a,{' ' * blanks}b)"
        a = fact("x", "int64[3]", "a", span=(9, 2, 3))
        b = tensor(line, 9, "y", "b", "int64[4]", device=None)
        assert len(texts(a, b, line=line, call=line)) - 1 == count, blanks


@pytest.mark.parametrize(("blanks", "is_left"), [(11, True), (10, False)])
def test_a_label_hangs_left_only_where_it_is_right_of_the_rules(blanks: int, is_left: bool) -> None:
    line = f"f(a,{' ' * blanks}b)"
    a = fact("x", "int64[3]", "a", span=(9, 2, 3))
    b = tensor(line, 9, "y", "b", "int64[123456]", device=None)
    report = make_report(source=source((line,), 0, line), tensors=(a, b), argument=None)
    (found,) = code_blocks(report, (), report.source, fold=20, label_room=0)
    assert ("  │i64[123456] ┘" in [row.text for row in found.rows]) is is_left


@pytest.mark.parametrize(("room", "is_left"), [(20, False), (5, True)])
def test_labels_with_wide_letters_stand_below_their_names(room: int, is_left: bool) -> None:
    """A letter that takes two columns of a terminal is one character."""
    line = f"f(特,{' ' * 30}特)"
    first, last = (fact("x", "int64[3]", "特[0]", span=(9, at, at + 1)) for at in (2, 34))
    report = make_report(source=source((line,), 0, line), tensors=(first, last), argument=None)
    (found,) = code_blocks(report, (), report.source, fold=40, label_room=room)
    label = "特[0]: i64[3]"
    assert found.rows[1].text == (
        f"  │{' ' * 18}{label} ┘" if is_left else f"  └ {label}{' ' * 18}└ {label}"
    )


def test_a_tensor_that_the_op_is_given_twice_has_one_label() -> None:
    twice = [fact(name, "int64[3]", "y", span=(9, 2, 3)) for name in ("self", "other")]
    assert texts(*twice, line="f(y)", call="f(y)") == ["f(y)", "  └ i64[3]"]


@pytest.mark.parametrize(
    ("cell", "line", "rows"), [(7, "f(y)", 2), (3, "f(y)", 1), (7, "g(1, y)", 1)]
)
def test_a_line_that_is_not_the_failing_one_has_no_labels(cell: int, line: str, rows: int) -> None:
    """The tensors' columns are those of the failing line: not of the forward call's."""
    y = fact("x", "int64[3]", "y", span=(9, 2, 3))
    report = make_report(source=source(("f(y)",), 0, "f(y)"), tensors=(y,))
    hot = source((line,), 0, line, cell=cell)
    (found,) = code_blocks(report, (), hot, fold=100, label_room=20)
    assert len(found.rows) == rows


def test_at_most_so_many_labels_and_the_tensor_at_fault_among_them() -> None:
    line = "f(" + ", ".join(f"a{at:02}" for at in range(12)) + ")"
    many = [tensor(line, 9, f"t{at}", f"a{at:02}", f"int64[{at + 1}]") for at in range(12)]
    here = source((line,), 0, line)
    report = make_report(source=here, tensors=tuple(many), argument="t11")
    found = code_blocks(report, (), here, fold=100, label_room=20)
    names = next(row.names for row in found[0].rows if row.names)
    assert len(names) == MAX_LABELS
    assert [name for name, _, is_bad in names if is_bad] == ["a11"]


def test_the_call_the_tensors_and_the_bad_one_have_their_looks() -> None:
    line = "z = f(a, y)"
    a = fact("input", "int64[3]", "a", span=(9, 6, 7))
    y = fact("target", "int64[3]", "y", span=(9, 9, 10))
    here = source((line,), 0, "f(a, y)")
    report = make_report(source=here, tensors=(a, y))
    row = code_blocks(report, (), here, fold=100, label_room=20)[0].rows[0]
    assert [(piece.text, piece.tone) for piece in row.pieces] == [
        ("z = ", "plain"),
        ("f(", "call"),
        ("a", "tensor"),
        (", ", "call"),
        ("y", "bad"),
        (")", "call"),
    ]


# --- a long failing line --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "fold", "rows"),
    [
        ("f(aaaa, bbbb, cccc)", 19, ["f(aaaa, bbbb, cccc)"]),
        ("f(aaaa, bbbb, cccc)", 18, ["f(aaaa, bbbb, ", "    cccc)"]),
        ("ffffffff(aaaaaaaaaaaa)", 20, ["ffffffff(", "    aaaaaaaaaaaa)"]),
        ("aaaaaa + bbbbbb + cccc", 20, ["aaaaaa + bbbbbb + ", "    cccc"]),
        ("f(a, " + "x" * 40, 40, ["f(a, " + "x" * 35, "    xxxxx"]),
        ("fffffff(a, " + "x" * 40, 40, ["fffffff(a, ", "    " + "x" * 36, "    xxxx"]),
        ("f(aaaaaaaaaaaaaaaa[0, ])", 22, ["f(aaaaaaaaaaaaaaaa[", "    0, ])"]),
        ("  f(aaaa, bbbb, cccc)", 18, ["f(aaaa, bbbb, ", "    cccc)"]),
    ],
)
def test_a_long_line_goes_on_below_after_a_comma_a_bracket_or_a_blank(
    line: str, fold: int, rows: list[str]
) -> None:
    found = blocks(source((line,), 0, line.strip()), fold=fold)[0].rows
    assert [row.text for row in found] == rows
    assert [row.number for row in found] == [9, *[None] * (len(rows) - 1)]
    assert all(row.is_hot for row in found)


def test_a_mark_stands_beside_the_first_part_of_its_line_alone() -> None:
    line = "f(aaaa, bbbb, cccc)"
    found = blocks(source((line,), 0, line), LineMark((7, None), 9, "", "m"), fold=18)[0].rows
    assert [row.marks for row in found] == [("m",), ()]


def test_a_name_with_a_label_is_not_cut_and_its_label_hangs_where_it_begins() -> None:
    line = "f(aaaa, some_name + 1, cccc)"
    at_fault = tensor(line, 9, "x", "some_name + 1", "int64[3]", device=None)
    rows = texts(at_fault, line=line, call=line, fold=20)
    assert rows == ["f(aaaa, ", "    some_name + 1, ", "    └ i64[3]", "    cccc)"]
    last = tensor(line, 9, "x", "cccc", "int64[3]", device=None)
    rows = texts(last, line=line, call=line, fold=24)
    assert rows == ["f(aaaa, some_name + 1, ", "    cccc)", "    └ i64[3]"]


def test_a_line_that_does_not_fail_is_cut_in_place_of_folded() -> None:
    here = source(("f(aaaa, bbbb, cccc)", "g()"), 1, "g()")
    mark = LineMark((7, None), 9, "", "made here")
    (block,) = blocks(here, mark, fold=18)
    assert [row.text for row in block.rows] == ["f(aaaa, bbbb, ccc…", "g()"]


# --- tensors that no line carries -----------------------------------------------------------------


def loose(*tensors: TensorFact, **facts: Any) -> list[str | None]:
    here = source(("f(y)",), 0, "f(y)")
    report: Report = make_report(source=here, tensors=tensors, **{"argument": "target", **facts})
    return [item.argument for item in unplaced_tensors(report)]


PLACED = fact("input", "float32[3]", "y", span=(9, 2, 3))


def test_tensors_that_no_line_carries_the_one_at_fault_first() -> None:
    a, b = fact("weight", "float32[2]"), fact("target", "int64[5]")
    assert loose(a, b) == ["target", "weight"]
    assert loose(PLACED, a) == ["weight"]
    assert loose(PLACED) == []
    inner = fact(None, "float32[3]", "y", span=(9, 2, 3))
    assert loose(inner, replace(PLACED, span=(9, 2, 4))) == []


@pytest.mark.parametrize(("expression", "shown"), [(None, []), ("y.view(-1)", ["target"])])
def test_beside_a_tensor_as_it_was_typed_the_op_s_own_form_is_not_told(
    expression: str | None, shown: list[str]
) -> None:
    typed = fact(None, "int64[2, 3]", "y", span=(9, 2, 3), bad_at=(0, 0))
    assert loose(typed, fact("target", "int64[6]", expression)) == shown


@pytest.mark.parametrize(
    ("other", "is_shown"),
    [
        (fact("weight", "float16[3]"), False),
        (fact("weight", "float32[3]"), True),
        (fact("weight", "float16[4]"), True),
        (fact("weight", "float16[3]", requires_grad=True), True),
        (fact("weight", "float16[3]", requires_grad=True, grad_fn="CatBackward0"), False),
    ],
)
def test_a_cast_form_of_a_drawn_tensor_is_not_told(other: TensorFact, is_shown: bool) -> None:
    assert (loose(PLACED, other) == ["weight"]) is is_shown


# --- a long line of code --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "first", "width", "rows"),
    [
        ("f(a, b)", 7, 7, ["f(a, b)"]),
        ("f(a, b)", 6, 6, ["f(a,", "b)"]),
        ("f(a, b, c)", 8, 8, ["f(a, b,", "c)"]),
        ("f(a, b, cc)", 5, 8, ["f(a,", "b, cc)"]),
        ("abc + defg", 4, 4, ["abc + defg"]),
        ("f('a b c', d)", 5, 5, ["f(", "'a b c',", "d)"]),
        ("f(f'a {b} c', d)", 5, 5, ["f(", "f'a {b} c',", "d)"]),
        ("f(aa )", 5, 5, ["f(", "aa )"]),  # a row begins with no closing bracket
        ("f(''' open", 3, 3, ["f(''' open"]),
        ("", 3, 3, [""]),
    ],
)
def test_code_is_broken_within_brackets_alone(
    code: str, first: int, width: int, rows: list[str]
) -> None:
    assert code_rows(code, first, width) == rows


# --- the bounds of labels and rows ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fold", "rows"),
    [
        (16, ["        f(aaaa, ", "        bbbb, ", "        cccc)"]),  # half of the width
        (40, ["        f(aaaa, bbbb, cccc)"]),
    ],
)
def test_a_line_far_to_the_right_goes_on_no_deeper_than_the_middle(
    fold: int, rows: list[str]
) -> None:
    line = "        f(aaaa, bbbb, cccc)"
    here = source(("x = 1", line), 1, line.strip())
    mark = LineMark((7, None), 9, "", "m")
    found = blocks(here, mark, fold=fold)[0].rows
    assert [row.text for row in found if row.number != 9] == rows


def test_spans_that_are_no_columns_of_the_line_have_no_label() -> None:
    line = "f(y)"
    for start, end in ((-1, 3), (3, 3), (3, 5)):
        y = fact("x", "int64[3]", "y", span=(9, start, end))
        assert texts(y, line=line, call=line) == [line]


@pytest.mark.parametrize(
    ("inner", "span", "arguments", "labels"),
    [
        ("float32[3, 3]", (9, 2, 7), (None, "input"), 1),
        ("float16[3, 3]", (9, 2, 7), (None, "input"), 2),
        ("float32[3, 4]", (9, 2, 7), (None, "input"), 2),
        ("float32[3, 3]", (9, 2, 3), (None, "input"), 2),
        ("float32[3, 3]", (9, 9, 14), (None, "input"), 2),
        ("float32[3, 3]", (9, 2, 7), (None, None), 2),
        ("float32[3, 3]", (9, 2, 7), ("mat2", "input"), 2),
    ],
)
def test_only_what_an_argument_moves_or_casts_has_no_label_of_its_own(
    inner: str, span: tuple[int, int, int], arguments: tuple[str | None, str | None], labels: int
) -> None:
    line = "f(x.t(), x.t())"
    x = fact(arguments[0], inner, "x", span=(9, 2, 3))
    outer = fact(arguments[1], "float32[3, 3]", "x.t()", span=span)
    rows = texts(x, outer, line=line, call=line)
    assert sum(row.count("[3, ") for row in rows) == labels


@pytest.mark.parametrize(
    ("expression", "label"),
    [("y", "└ i64[3]"), ("y[0]", "└ y[0]: i64[3]"), ("yy", "└ i64[3]"), (None, "└ i64[3]")],
)
def test_a_label_has_the_name_where_the_line_shows_its_container(
    expression: str | None, label: str
) -> None:
    y = fact("x", "int64[3]", expression, span=(9, 2, 3))
    assert texts(y, line="f(y)", call="f(y)") == ["f(y)", f"  {label}"]


def looks(report: Report) -> list[list[tuple[str, str]]]:
    (block,) = code_blocks(report, (), report.source, fold=100, label_room=20)
    return [[(it.text, it.tone) for it in row.pieces if it.text.strip()] for row in block.rows]


@pytest.mark.parametrize(
    ("argument", "bad_at", "tones"),
    [("x", None, ("bad", "badlabel")), (None, (0,), ("bad", "badlabel")),
     (None, None, ("tensor", "label"))],
)  # fmt: skip
def test_a_tensor_at_fault_and_one_as_it_was_typed_are_red(
    argument: str | None, bad_at: tuple[int, ...] | None, tones: tuple[str, str]
) -> None:
    y = fact("x", "int64[3]", "y", span=(9, 2, 3), bad_at=bad_at)
    report = make_report(
        source=source(("f(y)",), 0, "f(y)"), tensors=(y,), argument=argument, offenders=None
    )
    first, below = looks(report)
    assert first == [("f(", "call"), ("y", tones[0]), (")", "call")]
    assert below == [("└ ", "rule"), ("i64[3]", tones[1])]


@pytest.mark.parametrize("end_line", [9, None])
def test_a_call_of_one_line_has_its_look_up_to_its_end(end_line: int | None) -> None:
    here = replace(source(("z = f(a) + 1",), 0, "f(a)"), end_line=end_line)
    (drawn,) = looks(make_report(source=here, tensors=()))
    assert drawn == [("z = ", "plain"), ("f(a)", "call"), (" + 1", "plain")]


def test_a_call_of_several_lines_has_its_look_without_the_indentation() -> None:
    here = replace(source(("zz = f(", "    a,", "    xx) + 1"), 0, "f("), end_line=11)
    assert looks(make_report(source=here, tensors=())) == [
        [("zz = ", "plain"), ("f(", "call")],
        [("a,", "call")],
        [("xx)", "call"), (" + 1", "plain")],
    ]


def test_the_names_for_narrow_pages_stand_in_the_first_row_of_labels_alone() -> None:
    line = "f(a, bb)"
    facts = [tensor(line, 9, it, it, "int64[3]", device=None) for it in ("a", "bb")]
    report = make_report(
        source=source((line,), 0, line), tensors=facts, argument="a", offenders=None
    )
    (found,) = code_blocks(report, (), report.source, fold=100, label_room=20)
    assert [row.names for row in found.rows] == [
        (), (("a", "i64[3]", True), ("bb", "i64[3]", False)), (),
    ]  # fmt: skip
