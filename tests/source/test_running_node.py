"""The running expression: found by position, accepted only when it fits the code."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from cudalens.source import files
from cudalens.source.running_node import Running, column_of, running, running_segment
from cudalens.source.stack import place_of
from tests.probes import cell

SEEN: list[Running] = []


def look(*_: object) -> int:
    SEEN.append(running(place_of(sys._getframe(1))))
    return 1


class Looking:
    """Looks from inside operators, subscripts and methods."""

    def __getitem__(self, key: object) -> int:
        return look_from(sys._getframe(1))

    def __setitem__(self, key: object, value: object) -> None:
        look_from(sys._getframe(1))

    def __add__(self, other: object) -> Looking:
        look_from(sys._getframe(1))
        return self

    def same(self, *_: object) -> Looking:
        return self

    def method(self, *_: object) -> Looking:
        look_from(sys._getframe(1))
        return self


def look_from(frame: FrameType) -> int:
    SEEN.append(running(place_of(frame)))
    return 1


def runs(text: str) -> list[Running]:
    SEEN.clear()
    with cell(text) as code:
        exec(code, {"look": look, "it": Looking(), "same": lambda f: f})
    return list(SEEN)


@pytest.mark.parametrize(
    ("text", "call", "line"),
    [
        ("x = look(1)", "look(1)", "x = look(1)"),
        ("x = 1; y = look(x)", "look(x)", "x = 1; y = look(x)"),
        ("x = look(\n    1,\n    2,\n)", "look(1, 2)", "x = look("),
        ("x = [\n  0,\n  look(1)]", "look(1)", "x = ["),
        ("if look(1):\n    pass", "look(1)", "if look(1):"),
        ("for x in [look(1)]:\n    pass", "look(1)", "for x in [look(1)]:"),
        ("y = [look(x) for x in [1]]", "look(x)", "y = [look(x) for x in [1]]"),
        ("y = sum(look(x) for x in [1])", "look(x)", "y = sum(look(x) for x in [1])"),
        ("y = (lambda q: look(q))(1)", "look(q)", "y = (lambda q: look(q))(1)"),
        ("y = f'{look(1)} é'", "look(1)", "y = f'{look(1)} é'"),
        ("def g():\n    yield look(2)\nnext(g())", "look(2)", "yield look(2)"),
        ("it[1, 2]", "it[1, 2]", "it[1, 2]"),
        ("it[1] = 2", "it[1] = 2", "it[1] = 2"),
        ("y = it + 1", "it + 1", "y = it + 1"),
        ("it += 1", "it += 1", "it += 1"),
        ("y = (it\n  .same()\n  .method(3)\n)", "it.same().method(3)", "y = (it"),
        ("class C:\n    a = look(5)", "look(5)", "a = look(5)"),
        (
            "class C:\n    def f(self): look(self.__p)\n    __p = 1\nC().f()",
            "look(self.__p)",
            "def f(self): look(self.__p)",
        ),
    ],
)
def test_the_running_call_and_its_statement_are_found(text: str, call: str, line: str) -> None:
    (run,) = runs(text)
    assert (run.call_text, run.text) == (call, line)


def test_a_running_decorator_is_the_line_that_is_shown() -> None:
    (run,) = runs("@same\n@it.method\ndef f(): pass")
    assert run.text == "@it.method"


def test_two_calls_on_one_line_are_told_apart() -> None:
    first, second = runs("a, b = look(1), look(2)")
    assert (first.call_text, second.call_text) == ("look(1)", "look(2)")


def test_columns_count_characters_not_bytes() -> None:
    (run,) = runs("s = 'éé'; y = look(1)")
    position = run.place.position
    assert position is not None
    assert column_of(run.lines[0], position.column) == run.lines[0].index("look")


def test_a_source_that_changed_gives_the_line_and_no_expression() -> None:
    seen: list[FrameType] = []
    with cell("def f(): keep()\nf()") as code:
        exec(code, {"keep": lambda: seen.append(sys._getframe(1))})
        place = place_of(seen[0])
        assert running(place).call_text == "keep()"
        files.register_cell(place.filename, 7, ["def f(): show()", "f()"])
        changed = running(place)
        assert changed.call_text is None
        assert changed.text == "def f(): show()"


def test_without_a_source_nothing_is_known() -> None:
    seen: list[FrameType] = []
    exec(
        compile("keep()", "<no such file>", "exec"), {"keep": lambda: seen.append(sys._getframe(1))}
    )
    run = running(place_of(seen[0]))
    assert (run.text, run.call_text, run.scope) == (None, None, None)
    assert running_segment(run.place) is None
