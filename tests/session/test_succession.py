"""What a checked block hands on to the next one, and when that is forgotten."""

from __future__ import annotations

import ast
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cudalens.session import succession
from cudalens.session.succession import Succession
from cudalens.source import unchecked


class Recorder:
    """Hands itself on, and keeps what it follows."""

    def __init__(self) -> None:
        self.followed: list[Any] = []

    def follow(self, earlier: Any) -> None:
        self.followed.append(earlier)

    def handed_on(self) -> Any:
        return ("of", self)


def test_a_block_follows_the_one_before_it_once() -> None:
    chain, one, two, three = Succession(), Recorder(), Recorder(), Recorder()
    chain.begin(one)
    assert one.followed == []
    chain.end(one)
    chain.begin(two)
    assert two.followed == [("of", one)]
    chain.begin(three)  # inside the second
    assert three.followed == []
    chain.end(three)
    beside = Recorder()
    chain.begin(beside)  # of another thread, while the second is open
    assert beside.followed == []
    chain.end(beside)
    chain.end(two)
    last = Recorder()
    chain.begin(last)
    assert last.followed == [("of", two)]


@pytest.mark.parametrize("way", ["forgotten", "without a recorder", "not known"])
def test_what_was_handed_on_is_lost(way: str) -> None:
    chain, one, two = Succession(), Recorder(), Recorder()
    chain.begin(one)
    chain.end(None if way == "not known" else one)
    if way == "forgotten":
        chain.forget()
    elif way == "without a recorder":
        chain.begin(None)
        chain.end(None)
    chain.begin(two)
    assert two.followed == []


def test_an_end_without_a_beginning_is_harmless() -> None:
    chain, one, two = Succession(), Recorder(), Recorder()
    chain.end(None)
    chain.begin(one)
    chain.end(one)
    chain.begin(two)
    assert two.followed == [("of", one)]
    chain.end(two)
    chain.end(None)  # of a block that could not begin: what ran in it is not known
    three = Recorder()
    chain.begin(three)
    assert three.followed == []


@pytest.mark.parametrize(("answer", "kept"), [(True, True), (None, True), (False, False)])
def test_an_unchecked_cell_that_may_write_to_a_tensor_is_forgotten_before(
    monkeypatch: pytest.MonkeyPatch, answer: bool | None, kept: bool
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(unchecked, "is_next_checked", lambda them: asked.append(them) or answer)
    chain, one, two = Succession(), Recorder(), Recorder()
    chain.before_unchecked([])
    assert asked == []
    chain.begin(one)
    chain.end(one)
    statements: list[ast.stmt] = ast.parse("x = 1").body
    chain.before_unchecked(statements)
    assert asked == [statements]
    chain.begin(two)
    assert (two.followed != []) is kept


@pytest.mark.parametrize(
    ("found", "sees_cells", "cell", "error", "checked", "followed"),
    [
        (None, True, 3, None, True, False),
        (True, True, 3, None, True, True), (True, True, 3, None, False, False),
        (True, True, 3, None, None, True), (True, False, 3, None, None, False),
        (True, True, None, None, None, False), (False, True, 3, None, None, False),
        (False, False, None, None, True, True),
        (True, True, 3, ValueError(), False, True), (True, False, 3, ValueError(), True, False),
        (False, True, 3, ValueError(), True, False),
    ],
)  # fmt: skip
def test_whether_nothing_can_write_unseen_after_a_block(
    monkeypatch: pytest.MonkeyPatch, found: bool | None, sees_cells: bool, cell: int | None,
    error: Any, checked: bool | None, followed: bool,
) -> None:  # fmt: skip
    statements = None if found is None else ([], found)
    monkeypatch.setattr(unchecked, "statements_after", lambda filename, line: statements)
    monkeypatch.setattr(unchecked, "is_next_checked", lambda them: checked)
    monkeypatch.setattr(succession, "cell_number", lambda filename: cell)
    chain = Succession()
    chain.sees_cells = sees_cells
    assert chain.is_followed(sys._getframe(), error) is followed


def test_without_a_line_of_the_users_nothing_is_known() -> None:
    code = SimpleNamespace(co_filename="<string>")
    frame: Any = SimpleNamespace(f_code=code, f_back=None, f_lineno=1)
    assert Succession().is_followed(frame, None) is False
    assert Succession().is_followed(None, None) is False
