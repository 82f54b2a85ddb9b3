"""The lists of the command line: which rows, in which order, and what each says."""

from __future__ import annotations

from typing import Any

import pytest

from cudalens.core.report import Report, SourceSpan
from cudalens.core.report_types import Environment
from cudalens.render.tables import guard_list, markdown, matching, report_list


def row(name: str, frequency: str = "common", *, silent: bool = False, **more: Any) -> Any:
    facts = {"api": [name], "op": [f"aten::{name}"], "frequency": frequency, "silent": silent}
    return {**facts, "precondition": f"{name} is small", "source": "CUDA", **more}


def test_a_row_has_to_have_each_word_in_whatever_case() -> None:
    rows = [row("Embedding"), row("gather"), row("gather_nd")]
    assert matching(rows, []) == rows
    assert matching(rows, ["GATHER"]) == rows[1:]
    assert matching(rows, ["embedding"]) == rows[:1]
    assert matching(rows, ["gather", "_nd"]) == rows[2:]
    assert matching(rows, ["gather", "embedding"]) == []
    assert matching(rows, ["frequency"]) == []  # the names of the columns are no words of a row


def test_own_guards_come_first_and_warnings_last() -> None:
    rows = [
        row("warned", "very common", silent=True),
        row("seldom", "rare"),
        row("often", "very common"),
        row("own", "user"),
        row("between"),
    ]
    drawn = guard_list(rows, width=80, color=False)
    heads = [line for line in drawn.splitlines() if line and not line.startswith(" ")]
    assert heads == [
        "own  a guard of your own",
        "often  a very common error",
        "between  a common error",
        "seldom  a rare error",
        "warned  a warning: CUDA asserts nothing",
    ]


def test_overloads_of_an_op_are_one() -> None:
    ops = ["aten::gather", "aten::gather.out", "aten::index.Tensor"]
    drawn = guard_list([row("gather", op=ops)], width=80, color=False)
    assert drawn.splitlines() == [
        "gather  a common error",
        "  gather is small",
        "  gather, index · CUDA",
    ]


def test_each_report_is_listed_with_what_is_known_of_it() -> None:
    first = Report(headline="y is 10", kind="device_assert", certainty="proven")
    environment = Environment(rank=0)
    other = Report(headline="z is 3", kind="silent", certainty="likely", environment=environment)
    drawn = report_list([("a.json", first), ("b.json", other)], width=80, color=False)
    assert drawn.splitlines() == [
        "a.json",
        "  ✗ y is 10",
        "    device-side assert",
        "b.json",
        "  ⚠ z is 3",
        "    silently wrong result · rank 0 · likely cause",
    ]


def test_a_listed_report_has_its_place_and_no_line_breaks_of_others() -> None:
    known = Report(
        headline="y\nis 10",
        kind="cuda_error",
        certainty="unknown",
        source=SourceSpan(cell=7, line=3),
    )
    drawn = report_list([("a\nb.json", known)], width=80, color=False).splitlines()
    assert drawn[0] == "a b.json" and drawn[1] == "  ✗ y is 10"
    assert drawn[2] == "    CUDA error · In [7] line 3 · cause not established"


@pytest.mark.parametrize("width", [5, 20, 30])
def test_no_line_is_longer_than_the_terminal_and_none_is_cut_off(width: int) -> None:
    words = "each label is one of the classes of the input"
    drawn = guard_list([row("gather", precondition=words)], width=width, color=False)
    lines = drawn.splitlines()
    assert max(map(len, lines)) <= max(width, 20)
    assert words in " ".join(line.strip() for line in lines)
    listed = report_list([("a.json", Report(headline=words))], width=width, color=False)
    assert max(map(len, listed.splitlines())) <= max(width, 20)
    assert words in " ".join(line.strip() for line in listed.splitlines())


def test_facts_that_are_not_known_leave_no_mark() -> None:
    drawn = guard_list(
        [row("one", source=""), row("two", api=["F.two", "two"])], width=80, color=False
    )
    assert drawn.splitlines() == [
        "one  a common error", "  one is small", "  one", "",
        "F.two, two  a common error", "  two is small", "  two · CUDA",
    ]  # fmt: skip


def test_colours_are_there_where_they_are_asked_for() -> None:
    for is_coloured in (True, False):
        drawn = guard_list([row("one")], width=80, color=is_coloured)
        listed = report_list([("a.json", Report(headline="y"))], width=80, color=is_coloured)
        page = markdown("# Title\n\n**bold** text", width=40, color=is_coloured)
        assert all(("\x1b[" in text) is is_coloured for text in (drawn, listed, page))
        assert "Title" in page and "**" not in page
