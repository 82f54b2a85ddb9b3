"""Attempts at what may fail: one line for each failure, and the rest goes on."""

from __future__ import annotations

import sys

import pytest

from cudalens.core.limits import MAX_LINES, Limits, failure_line


def fails() -> int:
    raise ValueError("no\nmore")


def test_a_failure_is_one_line_and_what_takes_its_place() -> None:
    limits = Limits()
    assert limits.attempt("graph", lambda: 3) == 3
    assert limits.attempt("graph", fails) is limits.attempt("graph", fails) is None
    assert limits.attempt("history", fails, tuple) == ()
    assert limits.lines == [
        "graph unavailable: ValueError: no",
        "history unavailable: ValueError: no",
    ]


def test_what_is_of_another_class_is_a_failure_too() -> None:
    limits = Limits()
    assert limits.attempt("names", lambda: [1], tuple) == ()
    assert limits.attempt("names", lambda: None, tuple) == ()
    assert limits.attempt("place", lambda: 1, lambda: (None, None), kind=tuple) == (None, None)
    assert limits.attempt("place", lambda: (1, 2), lambda: (None, None), kind=tuple) == (1, 2)
    assert limits.lines == [
        "names unavailable: TypeError: it gave list",
        "names unavailable: TypeError: it gave NoneType",
        "place unavailable: TypeError: it gave int",
    ]


def test_a_line_is_kept_once_and_few_of_them() -> None:
    limits = Limits()
    for line in (None, "a", "a", *map(str, range(MAX_LINES + 1))):
        limits.add(line)
    assert limits.lines == ["a", *map(str, range(MAX_LINES - 1))]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError("of a handler")])
def test_what_is_no_failure_of_ours_goes_on(error: BaseException) -> None:
    def stops(number: int, frame: object) -> None:
        raise error

    with pytest.raises(type(error)):
        Limits().attempt("graph", lambda: stops(14, sys._getframe()))


def test_the_text_of_an_error_is_read_and_its_objects_are_not() -> None:
    class Hostile:
        def __str__(self) -> str:
            raise AssertionError("it was asked")

    assert failure_line("x", KeyError(Hostile())) == "x unavailable: KeyError: "

    class Text(str):
        __slots__ = ()

    assert failure_line("x", ValueError(Text("a"))) == "x unavailable: ValueError: "
    assert failure_line("x", ValueError("a", "b")) == "x unavailable: ValueError: a"
    assert failure_line("x", OSError(2, " gone ")) == "x unavailable: FileNotFoundError: gone"
