"""Places in the user's code in words: as much as is known of each."""

from __future__ import annotations

import ast
import copy
import pickle
from typing import Any

import pytest

from cudalens.core.source_places import CodeLine, Expression, LineRef, SourceSpan, syntax


@pytest.mark.parametrize(
    ("facts", "where", "whole"),
    [
        ({"cell": 3, "line": 7, "text": "w += 1"}, "In [3] line 7", "In [3] line 7: w += 1"),
        ({"cell": 3, "file": "a.py", "line": 7}, "In [3] line 7", "In [3] line 7"),
        ({"file": "a.py", "line": 7, "text": "x"}, "a.py:7", "a.py:7: x"),
        ({"file": "a.py"}, "a.py", "a.py"), ({"line": 7}, "line 7", "line 7"),
        ({"cell": 0}, "In [0]", "In [0]"), ({"text": "x"}, "", ""), ({}, "", ""),
    ],
)  # fmt: skip
def test_a_line_in_words(facts: Any, where: str, whole: str) -> None:
    assert (LineRef(**facts).where, LineRef(**facts).format()) == (where, whole)


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (SourceSpan(cell=3, line=9), "line 7"), (SourceSpan(cell=4, line=9), "In [3] line 7"),
        (SourceSpan(cell=3, file="a.py"), "In [3] line 7"), (None, "In [3] line 7"),
    ],
)  # fmt: skip
def test_near_the_failing_line_the_number_is_enough(here: Any, words: str) -> None:
    assert LineRef(cell=3, line=7).near(here) == words


def test_the_line_of_a_statement_has_its_own_text_without_its_comment() -> None:
    context = (CodeLine(line=6, text="f("), CodeLine(line=7, text="    y)  # last"))
    span = SourceSpan(cell=3, line=7, text="f(", context=context)
    assert span.ref == LineRef(cell=3, line=7, text="y)  # last")  # no statement of its own
    span = SourceSpan(file="a.py", line=6, text="x = 1  # one")
    assert span.ref == LineRef(file="a.py", line=6, text="x = 1")
    assert SourceSpan(line=6).ref == LineRef(line=6)
    stale = SourceSpan(file="a.py", line=2, context=(CodeLine(line=2, text="# a new version"),))
    assert stale.ref == LineRef(file="a.py", line=2, text="")


def test_an_expression_is_its_text_with_its_syntax_beside() -> None:
    node = ast.parse("a + b", mode="eval").body
    text = Expression("a + b", node)
    assert text == "a + b"
    assert syntax(text) is node
    assert syntax("a + b") is syntax(None) is None
    for other in (copy.copy(text), pickle.loads(pickle.dumps(text))):
        assert (type(other), other) == (str, "a + b")
