"""The terminal view: golden texts, alignment, widths, and harmlessness of what users write."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len

from cudalens.core.report import Hint, Observation, RankResult, Report, SourceSpan, TensorFact
from cudalens.core.report_types import MarkedLine
from cudalens.render.text import render
from tests.builders import CELL, REPRESENTATIVE, fact, make_report, source, tensor
from tests.rendering import check_golden, hostile_texts, with_texts

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_text_is_the_golden_text(name: str) -> None:
    """Each representative report reads at 84 and at 60 columns as it was approved."""
    report = REPRESENTATIVE[name]()
    check_golden(f"{name}.txt", render(report) + "\n" + "─" * 60 + "\n" + render(report, width=60))


@pytest.mark.parametrize("width", [30, 45, 60, 100, 160])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_no_line_is_wider_than_asked(name: str, width: int) -> None:
    lines = render(REPRESENTATIVE[name](), width=width).splitlines()
    assert [line for line in lines if cell_len(line) > width] == []
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_terminal_is_taken_to_have_thirty_columns_at_least() -> None:
    for name in ("labels", "host_error"):
        report = REPRESENTATIVE[name]()
        assert render(report, width=1) == render(report, width=30) != render(report, width=31)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_colour_adds_only_colour(name: str) -> None:
    report = REPRESENTATIVE[name]()
    plain = render(report)
    coloured = render(report, color=True)
    assert "\x1b" not in plain
    assert "\x1b[" in coloured
    assert [line.rstrip() for line in ANSI.sub("", coloured).splitlines()] == plain.splitlines()


def test_environment_does_not_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    before = render(make_report()), render(make_report(), color=True)
    for setting in ["NO_COLOR=1", "FORCE_COLOR=1", "TERM=dumb", "COLUMNS=20", "TTY_COMPATIBLE=0"]:
        monkeypatch.setenv(*setting.split("="))
    assert (render(make_report()), render(make_report(), color=True)) == before


def calling(line: str, call: str, *tensors: TensorFact, **facts: Any) -> Report:
    """Return the report of a call on a line of its own, with labels where none are given."""
    known = tensors or (tensor(line, 9, "target", "y", "int64[32]"),)
    return make_report(source=source((line,), 0, call), tensors=known, **facts)


def assert_label_hangs_below(expression: str, text: str) -> None:
    code = next(line for line in text.splitlines() if expression in line)
    label = next(line for line in text.splitlines() if "└ i64[32], 3 bad" in line)
    assert label.index("└") == cell_len(code[: code.index(expression)])


@pytest.mark.parametrize(
    "before",
    ["    loss = ", "\tloss = ", "\t  \tloss = ", "    損失 = ", "\t損失 = ", "s = '\x1b'; "],
)
def test_labels_hang_right_after_odd_characters(before: str) -> None:
    """Columns of the source become terminal cells.

    Tabs are drawn, wide characters count two, a control character becomes one visible sign.
    """
    text = render(calling(f"{before}f(y)", "f(y)"))
    assert_label_hangs_below("y)", text)
    assert ("'␛'" in text) == ("\x1b" in before)


def test_two_expressions_of_one_column_are_told_apart() -> None:
    """Where expressions begin together, the outer label carries its expression."""
    line = "out = table[rows]"
    outer = fact(None, "float32[2, 4]", span=(9, 6, 17))
    table = tensor(line, 9, "self", "table", "float32[8, 4]")
    text = render(calling(line, "table[rows]", outer, table, argument="indices"))
    assert "├ table: f32[8, 4]" in text
    assert "└ f32[2, 4]" in text


def test_devices_are_named_only_where_they_differ() -> None:
    line = "z = x + y"
    x = tensor(line, 9, "self", "x", "float32[2]", device="cpu")
    y = tensor(line, 9, "other", "y", "float32[2]", device="cuda:0")
    base = calling(line, "x + y", x, y, argument=None)
    assert "f32[2] cpu" in render(base)
    assert "f32[2] cuda:0" in render(base)
    same = replace(base, tensors=(replace(x, device="cuda:0"), y))
    assert "cuda:0" not in render(same)


def test_statement_longer_than_the_terminal_keeps_its_labels() -> None:
    """Where there is room nothing is cut; else the line goes on in the next row."""
    line = f"result = {'very_long_name_of_a_function_' * 3}(y)"
    report = calling(line, line.removeprefix("result = "))
    gutter = len("     9 │ ")
    needed = gutter + line.rindex("y") + len("└ i64[32], 3 bad")
    assert_label_hangs_below("y)", render(report, width=needed))
    at_its_left = render(report, width=needed - 1)
    assert line in at_its_left
    row = next(row for row in at_its_left.splitlines() if row.endswith("i64[32], 3 bad ┘"))
    assert row.index("┘") == gutter + line.rindex("y")
    assert line in render(report, width=gutter + len(line))
    cut = render(report, width=gutter + len(line) - 1)
    assert line not in cut
    assert "└ i64[32], 3 bad" in cut
    assert_label_hangs_below("y)", cut)


@pytest.mark.parametrize(
    ("labelled", "rows"),
    [
        ("pair(a, b)", ["x = function(first, second,", "    pair(a, b), y)"]),
        ("first", ["x = function(first, second, pair(a,", "    b), y)"]),
    ],
)
def test_a_line_goes_on_in_the_next_row_before_a_labelled_expression(
    labelled: str, rows: list[str]
) -> None:
    """It is cut at the last comma that fits, and not within what has a label."""
    line = "x = function(first, second, pair(a, b), y)"
    call = calling(line, line.removeprefix("x = "), tensor(line, 9, "input", labelled, "int64[3]"))
    text = render(call, width=len("     9 │ x = function(first, second, pair(a, "))
    code = (row.partition("│ ")[2] for row in text.splitlines())
    assert [row for row in code if row.endswith((",", "y)"))] == rows


def test_a_line_that_is_cut_says_so() -> None:
    line = f"f({'x, ' * 90}y)"
    code = "".join(row.partition("│ ")[2] for row in render(calling(line, line)).splitlines())
    assert code.count("x") < 90
    assert "x,…" in code or "x, …" in code or "x…" in code


def test_a_fix_goes_on_where_python_lets_it() -> None:
    """Copied from a terminal with its line breaks, it is the same code."""
    fix = "loss = F.cross_entropy(net(images)['a long name'], labels - 1, reduction='mean')"
    report = make_report(hints=(Hint(rule="x", text="y", fix=fix, tried=True),))
    for width in (44, 50, 60):
        text = render(report, width=width).partition("  try   before line 12:")[2]
        shown = text[: text.index("mean')") + len("mean')")].strip()
        assert "\n" in shown
        assert ast.dump(ast.parse(shown)) == ast.dump(ast.parse(fix))


def test_source_without_context_lists_its_tensors() -> None:
    report = make_report(source=replace(source(CELL, 3, "F.cross_entropy(logits, y)"), context=()))
    text = render(report)
    assert "12 │ loss = F.cross_entropy(logits, y)" in text
    assert "with  y i64[32], 3 bad · logits f32[32, 10]" in text


@pytest.mark.parametrize(
    ("inner", "is_shown"),
    [("float32[4, 4]", False), ("bool[4, 4]", True), ("float32[4, 5]", True)],
)
def test_a_librarys_own_form_of_a_labelled_tensor_is_not_told_again(
    inner: str, is_shown: bool
) -> None:
    """``nn.MultiheadAttention`` casts the mask of the line and transposes the rest."""
    line = "out = mha(x, attn_mask=m)"
    mask = tensor(line, 9, None, "m", "bool[4, 4]")
    inside = (fact("attn_mask", inner), fact("in_proj_weight", "float32[24, 8]"))
    text = render(calling(line, "mha(x, attn_mask=m)", mask, *inside, argument="attn_mask"))
    assert ("in_proj_weight" in text) == is_shown


@pytest.mark.parametrize(("count", "more"), [(4, []), (5, ["1 more"]), (200, ["196 more"])])
def test_very_many_tensors_stay_few_lines(count: int, more: list[str]) -> None:
    many = tuple(fact(f"tensors[{at}]", f"float32[{at}]") for at in range(count))
    text = render(make_report(tensors=many, argument="tensors[3]"))
    assert "tensors[3] f32[3], 3 bad" in text
    assert re.findall(r"\d+ more", text) == more
    assert len(text.splitlines()) < 30


@pytest.mark.parametrize(
    ("prevented", "usable", "said"),
    [
        (True, True, "CUDA is fine"),
        (False, True, "CUDA is fine"),
        (False, False, "CUDA is lost"),
        (True, None, "found before the launch"),
        (False, None, ""),
    ],
)
def test_state_of_cuda_is_said_only_as_known(
    prevented: bool, usable: bool | None, said: str
) -> None:
    text = render(make_report(prevented=prevented, context_usable=usable))
    assert said in text
    assert ("is fine" in text) == (usable is True)
    assert ("is lost" in text) == (usable is False)


@pytest.mark.parametrize(
    ("certainty", "said"),
    [("proven", "✗ y[17]"), ("likely", "? Likely: y[17]"), ("unknown", "cause not established")],
)
def test_certainty_is_never_rounded_up(certainty: str, said: str) -> None:
    text = render(make_report(certainty=certainty))
    assert said in text
    assert ("Likely" in text) == (certainty == "likely")
    assert ("not established" in text) == (certainty == "unknown")


def test_a_finding_of_one_operand_takes_fourteen_lines_and_ends_with_the_action() -> None:
    lines = render(make_report()).splitlines()
    assert len(lines) <= 14
    assert lines[-2].split() == ["try", "line", "12:", "F.cross_entropy(logits,", "y", "-", "1)"]


@pytest.mark.no_cover
def test_hostile_texts_are_drawn_harmlessly() -> None:
    report = make_report()
    for hostile in hostile_texts():
        text = render(with_texts(report, lambda _, hostile=hostile: hostile), width=60)  # type: ignore[misc]
        codes = {char for char in text if not char.isprintable() and char not in "\n\u200c\u200d"}
        assert codes <= {"\u00a0", "\u3000"}, hostile
        text.encode("utf-8")


def test_span_beyond_its_line_is_not_drawn() -> None:
    """A span that ends with its line hangs a label; one column further it is only listed."""
    fits = fact("target", "int64[3]", "y", span=(9, 3, 4))
    beyond = replace(fits, span=(9, 3, 5))
    assert "└ i64[3], 3 bad" in render(calling("f(y)", "f(y)", fits))
    text = render(calling("f(y)", "f(y)", beyond))
    assert "└" not in text
    assert "with  y i64[3], 3 bad" in text


def test_what_a_star_unpacks_is_named() -> None:
    """Under ``**batch`` each tensor goes by its key, alone or with others; whole names stay off."""
    line, call = "loss = model(**batch)", "model(**batch)"
    here = fact("ids", "int64[2]", 'batch["ids"]', span=(9, 15, 20))
    text = render(calling(line, call, here))
    assert '└ batch["ids"]: i64[2]' in text
    both = (here, replace(here, argument="box", expression='batch["box"]', shape=(4,)))
    text = render(calling(line, call, *both))
    assert '├ batch["box"]: i64[4]' in text or '├ batch["ids"]: i64[2]' in text
    assert "batch: " not in text
    whole = replace(here, expression="batch")
    assert "└ i64[2]" in render(calling(line, call, whole))


def mark(line: int, said: str, file: str | None = None) -> MarkedLine:
    """Return a mark at a line of the failing cell, or of a file."""
    return MarkedLine(cell=None if file else 7, file=file, line=line, text="n = 10", mark=said)


@pytest.mark.parametrize(
    ("first", "second", "marks", "rows"),
    [
        (
            "a = 1",
            "bb = 22",
            (mark(1, "m"), mark(2, "n")),
            ["    1 │ a = 1    ◂ m", "    2 │ bb = 22  ◂ n", "    3 │ f(y)"],
        ),
        (
            "s = '特'",
            "bb = 22",
            (mark(1, "m"), mark(2, "n")),
            ["    1 │ s = '特'  ◂ m", "    2 │ bb = 22   ◂ n", "    3 │ f(y)"],
        ),
        (
            "a = 1",
            "bb = 22",
            (mark(1, "m"), mark(1, "n")),
            ["    1 │ a = 1  ◂ m", "      │   ◂ n", "    2 │ bb = 22", "    3 │ f(y)"],
        ),
        (  # no mark stands where the longest line would put it
            "a = 1",
            "b" * 40,
            (mark(1, "m"), mark(2, "n")),
            ["    1 │ a = 1  ◂ m", f"    2 │ {'b' * 40}  ◂ n", "    3 │ f(y)"],
        ),
        (
            "a = 1",
            "bb = 22",
            (mark(10, "m", "訓練.py"), mark(12, "n", "訓練.py")),
            [
                *("In [7]   2 │ bb = 22", "         3 │ f(y)"),
                *("訓練.py 10 │ n = 10  ◂ m", "        12 │ n = 10  ◂ n"),
            ],
        ),
    ],
    ids=["one column", "wide letters", "two of a line", "a long line", "two files"],
)
def test_marks_stand_below_each_other_where_they_fit(
    first: str, second: str, marks: tuple[MarkedLine, ...], rows: list[str]
) -> None:
    seen = tuple(Observation(kind="device", text="t", sources=(it,)) for it in marks)
    here = source((first, second, "f(y)"), 2, "f(y)", first=1)
    report = make_report(source=here, tensors=(), observations=seen, provenance=())
    assert [row for row in render(report, width=60).splitlines() if "│" in row] == rows


@pytest.mark.parametrize(("width", "row"), [(40, "    1 │ f(y)  ◂ MM"), (39, "      │   ◂ MM")])
def test_a_mark_stands_beside_its_line_as_long_as_it_fits(width: int, row: str) -> None:
    said = "m" * 24
    seen = Observation(kind="device", text="t", sources=(mark(1, said),))
    here = source(("f(y)",), 0, "f(y)", first=1)
    report = make_report(source=here, tensors=(), observations=(seen,), provenance=())
    assert row.replace("MM", said) in render(report, width=width).splitlines()


def test_each_note_and_each_rank_has_a_line() -> None:
    limits = ("one is unknown", "another is")
    assert "\n  note  one is unknown\n  note  another is\n" in render(make_report(limits=limits))
    ranks = (RankResult(rank=0, outcome="ran on"), RankResult(rank=1, batch="batch 4", outcome="*"))
    assert "\n  rank 0  ran on\n  rank 1  batch 4 · *\n" in render(make_report(ranks=ranks))


@pytest.mark.parametrize("digits", [3, 30, 100, 1000])
def test_a_line_number_without_end_leaves_room_for_the_line(digits: int) -> None:
    """A report from elsewhere may hold any number."""
    source = SourceSpan(
        file="train.py", line=int("9" * digits), text="loss = F.cross_entropy(x, y)"
    )
    text = Report(headline="y[3] = 10 is outside", source=source).to_text(width=80)
    assert "y[3] = 10 is outside" in text
