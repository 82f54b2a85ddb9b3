"""The terminal view: golden texts, alignment, widths, and harmlessness of what users write."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from rich.cells import cell_len

from cudalens.core.report import CodeLine, Offender, Offenders, OpName, Report, TensorFact
from cudalens.render import renderer
from cudalens.render.text import render
from tests.builders import CELL, REPRESENTATIVE, make_report, source, tensor
from tests.rendering import check_golden, hostile_texts, with_texts

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_text_is_the_golden_text(name: str) -> None:
    """Each representative report reads at 100 and at 60 columns as it was approved."""
    report = REPRESENTATIVE[name]()
    check_golden(f"{name}.txt", render(report) + "\n" + "─" * 60 + "\n" + render(report, width=60))


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_report_read_from_a_file_renders_the_same(name: str) -> None:
    """What to_dict wrote renders byte for byte as the report that wrote it."""
    report = REPRESENTATIVE[name]()
    assert render(Report.from_dict(report.to_dict())) == render(report)


@pytest.mark.parametrize("width", [30, 45, 60, 100, 160])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_no_line_is_wider_than_asked(name: str, width: int) -> None:
    """Every line fits the width, whatever must be cut or wrapped for it."""
    lines = render(REPRESENTATIVE[name](), width=width).splitlines()
    assert [line for line in lines if cell_len(line) > width] == []
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_colour_adds_only_colour(name: str) -> None:
    """Without its ANSI codes the coloured text is the plain one, and plain text has none."""
    report = REPRESENTATIVE[name]()
    plain = render(report)
    coloured = render(report, color=True)
    assert "\x1b" not in plain
    assert "\x1b[" in coloured
    assert [line.rstrip() for line in ANSI.sub("", coloured).splitlines()] == plain.splitlines()


def test_environment_does_not_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that steer terminals leave both forms alone."""
    before = render(make_report()), render(make_report(), color=True)
    for name, value in (
        ("NO_COLOR", "1"),
        ("FORCE_COLOR", "1"),
        ("TERM", "dumb"),
        ("COLUMNS", "20"),
        ("TTY_COMPATIBLE", "0"),
    ):
        monkeypatch.setenv(name, value)
    assert (render(make_report()), render(make_report(), color=True)) == before


def test_labels_hang_under_their_expressions() -> None:
    """Each corner stands in the column where its expression begins."""
    lines = render(make_report()).splitlines()
    code = next(line for line in lines if "F.cross_entropy(logits, y)" in line)
    bad = next(line for line in lines if "└ i64[32], 3 bad" in line)
    other = next(line for line in lines if "└ f32[32, 10]" in line)
    assert bad.index("└") == code.index(", y)") + 2
    assert other.index("└") == code.index("logits")
    assert bad[code.index("logits")] == "│"


@pytest.mark.parametrize("indent", ["    ", "\t", "\t  \t"])
@pytest.mark.parametrize("word", ["loss", "損失"])
def test_labels_hang_right_after_tabs_and_wide_characters(indent: str, word: str) -> None:
    """Columns of the source become terminal cells: tabs are drawn, wide characters count two."""
    line = f"{indent}{word} = f(y)"
    report = make_report(
        source=source((line,), 0, "f(y)"),
        tensors=(tensor(line, 9, "target", "y", shape=(3,), dtype="int64"),),
    )
    lines = render(report).splitlines()
    code = next(text for text in lines if "f(y)" in text)
    label = next(text for text in lines if "└ i64[3]" in text)
    assert label.index("└") == cell_len(code[: code.index("y)")])


def test_two_expressions_of_one_column_are_told_apart() -> None:
    """Where expressions begin together, the outer label carries its expression."""
    line = "out = table[rows]"
    outer = TensorFact(argument=None, shape=(2, 4), dtype="float32", span=(9, 6, 17))
    report = make_report(
        source=source((line,), 0, "table[rows]"),
        argument="indices",
        tensors=(outer, tensor(line, 9, "self", "table", shape=(8, 4), dtype="float32")),
    )
    text = render(report)
    assert "├ table: f32[8, 4]" in text
    assert "└ f32[2, 4]" in text


def test_devices_are_named_only_where_they_differ() -> None:
    """One device is not worth a word, two are the point."""
    line = "z = x + y"
    x = tensor(line, 9, "self", "x", shape=(2,), dtype="float32", device="cpu")
    y = tensor(line, 9, "other", "y", shape=(2,), dtype="float32", device="cuda:0")
    base = make_report(source=source((line,), 0, "x + y"), argument=None, tensors=(x, y))
    assert "f32[2] cpu" in render(base)
    assert "f32[2] cuda:0" in render(base)
    same = replace(base, tensors=(replace(x, device="cuda:0"), y))
    assert "cuda:0" not in render(same)


def test_statement_longer_than_the_terminal_keeps_its_labels() -> None:
    """At the exact width nothing is cut; one column less and the window moves to the labels."""
    line = f"result = {'very_long_name_of_a_function_' * 3}(y)"
    report = make_report(
        source=source((line,), 0, line.removeprefix("result = ")),
        tensors=(tensor(line, 9, "target", "y", shape=(32,), dtype="int64"),),
    )
    gutter = len("    9 │ ")
    needed = gutter + line.rindex("y") + len("└ i64[32], 3 bad")
    whole = render(report, width=needed)
    assert line in whole
    cut = render(report, width=needed - 1)
    assert line not in cut
    assert "└ i64[32], 3 bad" in cut
    code = next(text for text in cut.splitlines() if "(y)" in text)
    label = next(text for text in cut.splitlines() if "└" in text)
    assert label.index("└") == code.index("y)")


def test_source_without_context_lists_its_tensors() -> None:
    """Where the columns cannot be drawn, the tensors are named under the line instead."""
    report = make_report(source=replace(source(CELL, 3, "F.cross_entropy(logits, y)"), context=()))
    text = render(report)
    assert "12 │ loss = F.cross_entropy(logits, y)" in text
    assert "with    logits f32[32, 10] · y i64[32], 3 bad" in text


def test_very_many_tensors_stay_few_lines() -> None:
    """A call with 200 tensors keeps the accused and counts the rest."""
    many = tuple(
        TensorFact(argument=f"tensors[{at}]", shape=(at,), dtype="float32") for at in range(200)
    )
    text = render(make_report(tensors=many, argument="tensors[3]"))
    assert "tensors[3] f32[3], 3 bad" in text
    assert "188 more" in text
    assert len(text.splitlines()) < 30


def test_offenders_beyond_the_listed_are_counted() -> None:
    """Six bad values are listed whole; with a seventh one is counted."""
    first = tuple(Offender(position=(at,), value=-1) for at in range(7))
    six = Offenders(count=6, total=9, first=first[:6])
    seven = Offenders(count=7, total=9, first=first)
    assert "more" not in render(make_report(offenders=six))
    assert "1 more" in render(make_report(offenders=seven))


@pytest.mark.parametrize(
    ("prevented", "usable", "said"),
    [
        (True, True, "CUDA    is fine: nothing was launched. It would have stopped with:"),
        (False, True, "CUDA    is fine. It printed:"),
        (False, False, "CUDA    is gone: restart the kernel. It printed:"),
        (True, None, "CUDA    nothing was launched. It would have stopped with:"),
        (False, None, "CUDA    It printed:"),
    ],
)
def test_state_of_cuda_is_said_only_as_known(
    prevented: bool, usable: bool | None, said: str
) -> None:
    """CUDA is called fine or gone only when that was established."""
    text = render(make_report(prevented=prevented, context_usable=usable))
    assert said in text
    assert ("is fine" in text) == (usable is True)


def test_silent_finding_wears_a_warning_sign() -> None:
    """A silent finding warns; every other kind is a cross."""
    assert render(make_report(kind="silent")).startswith("⚠ ")
    assert render(make_report(kind="nonfinite")).startswith("✗ ")


@pytest.mark.parametrize(
    ("certainty", "said"),
    [("proven", ""), ("likely", "likely, not proven"), ("unknown", "cause not established")],
)
def test_certainty_is_never_rounded_up(certainty: str, said: str) -> None:
    """What is not proven says so under the headline."""
    text = render(make_report(certainty=certainty))
    for reservation in ("likely, not proven", "cause not established"):
        assert (reservation in text) == (reservation == said)


@pytest.mark.no_cover
def test_hostile_texts_are_drawn_harmlessly() -> None:
    """No text of a user's reaches the terminal as a control code or as markup."""
    report = make_report()
    for hostile in hostile_texts():
        text = render(with_texts(report, lambda _, hostile=hostile: hostile), width=60)  # type: ignore[misc]
        codes = {char for char in text if not char.isprintable() and char not in "\n\u200c\u200d"}
        assert codes <= {"\u00a0", "\u3000"}, hostile
        text.encode("utf-8")


def test_markup_of_the_terminal_library_is_plain_text() -> None:
    """Square brackets of a user's stay square brackets."""
    text = render(make_report(explanation="[bold red]x[/] :warning:"), color=True)
    assert "[bold red]x[/] :warning:" in ANSI.sub("", text)


def test_code_with_control_characters_keeps_its_columns() -> None:
    """A control character in the source becomes one visible sign, so that labels still fit."""
    line = "s = '\x1b'; f(y)"
    report = make_report(
        source=source((line,), 0, "f(y)"),
        tensors=(tensor(line, 9, "target", "y", shape=(3,), dtype="int64"),),
    )
    lines = render(report).splitlines()
    code = next(text for text in lines if "f(y)" in text)
    assert "'␛'" in code
    label = next(text for text in lines if "└ i64[3]" in text)
    assert label.index("└") == code.index("y)")


def test_span_beyond_its_line_is_not_drawn() -> None:
    """A span that ends with its line hangs a label; one column further it is only listed."""
    line = "f(y)"
    span = source((line,), 0, "f(y)")
    fits = TensorFact(argument="target", expression="y", shape=(3,), dtype="int64", span=(9, 3, 4))
    beyond = replace(fits, span=(9, 3, 5))
    assert "└ i64[3], 3 bad" in render(make_report(source=span, tensors=(fits,)))
    text = render(make_report(source=span, tensors=(beyond,)))
    assert "└" not in text
    assert "with    y i64[3], 3 bad" in text


def test_what_a_star_unpacks_is_named() -> None:
    """Under ``**batch`` each tensor goes by its key, alone or with others; whole names stay off."""
    line = "loss = model(**batch)"
    fact = TensorFact(argument="ids", expression='batch["ids"]', shape=(2,), dtype="int64")
    here = replace(fact, span=(9, 15, 20))
    span = source((line,), 0, "model(**batch)")
    text = render(make_report(source=span, tensors=(here,)))
    assert '└ batch["ids"]: i64[2]' in text
    both = (here, replace(here, argument="box", expression='batch["box"]', shape=(4,)))
    text = render(make_report(source=span, tensors=both))
    assert '├ batch["box"]: i64[4]' in text or '├ batch["ids"]: i64[2]' in text
    assert "batch: " not in text
    whole = replace(here, expression="batch")
    assert "└ i64[2]" in render(make_report(source=span, tensors=(whole,)))


def test_a_phase_does_not_stand_alone() -> None:
    """Where no op is known there is nothing to say a phase of."""
    nothing = make_report(op=OpName(), argument=None, module_path=None, offenders=None)
    lines = render(nothing).splitlines()
    assert "forward" not in (line.strip() for line in lines)
    known = replace(nothing, op=OpName(api="torch.load"))
    assert any(line.strip() == "torch.load · forward" for line in render(known).splitlines())


def test_unknown_view_is_refused_by_name() -> None:
    """The table of views says which there are."""
    assert renderer("text") is render
    with pytest.raises(ValueError, match="no renderer is called 'pdf': choose one of text, html"):
        renderer("pdf")


def test_lines_outside_the_statement_are_left_out() -> None:
    """The terminal shows the failing statement alone; the page has the lines around it."""
    span = replace(source(CELL, 3, "F.cross_entropy(logits, y)"), line=99, end_line=99)
    assert "99 │ loss = F.cross_entropy(logits, y)" in render(make_report(source=span))
    assert CodeLine(line=9, text=CELL[0]) in span.context
    assert CELL[0] not in render(make_report())
