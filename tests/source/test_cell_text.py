"""The lines of a cell as typed, beside those that the shell made of them."""

from __future__ import annotations

from typing import Any

import pytest

from cudalens.source.cell_text import counted_lines, is_tail, split_lines, typed_lines

RUN = "get_ipython().run_line_magic('ls', '')"


def test_a_line_break_at_the_end_begins_no_line() -> None:
    assert [split_lines(text) for text in ("a\nb\n", "a\n\n", "")] == [["a", "b"], ["a", ""], [""]]


def test_blank_lines_above_a_cell_count_only_above_the_magic() -> None:
    assert counted_lines("\n\na\n\nb", "%%m") == ["a", "", "b"]
    assert counted_lines("\n%%m\na", "%%m") == ["", "%%m", "a"]
    assert counted_lines("\n\n", "%%m") == ["", ""]


@pytest.mark.parametrize(
    ("lines", "of", "is_it"),
    [
        (["a"], ["%%m", "a"], True),
        (["a "], ["%%m", "", "a"], True),
        (["a"], ["x", "a"], False),
        (["a"], ["%%m", "b"], False),
        (["a"], ["a"], False),
    ],
)
def test_lines_behind_magics_alone(lines: list[str], of: list[str], is_it: bool) -> None:
    assert is_tail(lines, of) is is_it


@pytest.mark.parametrize(
    ("typed", "python", "wanted"),
    [
        (["a", "b"], "a\nb", ["a", "b"]),
        (["%ls", "b"], f"{RUN}\nb", ["%ls", "b"]),
        (["a", "b"], "a\nc", []),
        (["a"], "a\nb", []),
        (["%%time", "a"], f"{RUN}", ["%%time"]),
        ([" %%time", "a"], f"{RUN}", [" %%time"]),
        (["%time a", "b"], f"{RUN}", []),
        (["%%time", "b"], "a\nb", []),
        (["a?"], "# a?", ["a?"]),
        ([" a? "], " # a?", [" a? "]),
        (["# a ", "b"], "# a\nb ", ["# a ", "b"]),
    ],
)
def test_typed_lines_as_many_as_are_certain(
    typed: list[str], python: str, wanted: list[str]
) -> None:
    assert typed_lines(typed, python) == wanted


@pytest.mark.parametrize(
    ("raw", "text", "typed"),
    [
        ("%a\nb", "get_ipython().x\nb\n", ["%a", "b"]),
        ("\n\n%a", "get_ipython().x\n", ["%a"]),
        ("%%a\nb\nc", "get_ipython().x\n", ["%%a"]),
        ("\n%%cudacheck -r x\n%a", "#\n# %%cudacheck -r x\nget_ipython().x\n", ...),
        ("!a \\\n b\nc", "get_ipython().x\nc\n", []),
        (">>> %a\n>>> b", "get_ipython().x\nb\n", []),
    ],
)
def test_typed_lines_are_given_where_they_are_certain(raw: str, text: str, typed: Any) -> None:
    """A magic over several lines, or prompts that were pasted along, move or change the others."""
    lines = counted_lines(raw, "%%cudacheck")
    assert typed_lines(lines, text) == (raw.split("\n") if typed is ... else typed)
