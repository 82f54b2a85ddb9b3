"""Which other lines read the value that the running call got by a name."""

from __future__ import annotations

import ast
import sys
from typing import Any

import pytest

from cudalens.source.readers import other_readers
from cudalens.source.running_node import Running, running
from cudalens.source.stack import place_of
from tests.probes import cell


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("look(x)\nuse(x)", [3]),
        ("x = look(x)\nuse(x)", []),
        ("look(x)\nx = use(x)\nuse(x)", []),
        ("look(x)\nif x is None:\n    x = 1\nuse(x)", [3, 5]),
        ("use(x)\nx = look(x)", [2]),
        ("y = look(x)\nuse(x)", [3]),
        ("try:\n    look(x)\nfinally:\n    x = use(x)\nuse(x)", []),
        ("try:\n    look(x)\nfinally:\n    y = use(x)\nuse(x)", [5, 6]),
        ("try:\n    look(x)\nexcept ValueError:\n    x = 1\nuse(x)", [6]),
        ("try:\n    use(x)\nfinally:\n    x = 1\n    look(x)\n    use(x)", [3, 7]),
    ],
)
def test_a_name_that_is_bound_anew_is_another_value(body: str, lines: list[int]) -> None:
    found: list[Any] = []

    def look(x: object) -> object:
        run = running(place_of(sys._getframe(1)))
        found.append(other_readers(run, ast.parse("x", mode="eval").body)[0])
        return x

    text = "\n    ".join(body.splitlines())
    with cell(f"def run(x):\n    {text}") as code:
        names = {"look": look, "use": lambda x: x}
        exec(code, names)
        names["run"](1)  # type: ignore[operator]
    assert found == [lines]


@pytest.mark.parametrize(
    ("body", "every", "counting"),
    [
        # An index, a number added and a comparison with one need the numbers as they are.
        ("look(x)\ntable[x]", [3], [3]),
        ("look(x)\nx[0]", [3], []),
        ("look(x)\nx + 1", [3], [3]),
        ("look(x)\n1 + x", [3], [3]),
        ("look(x)\nx + table", [3], []),
        ("look(x)\nx == 1", [3], [3]),
        ("look(x)\n1 < x", [3], [3]),
        ("look(x)\nx == table", [3], []),
        # A cast, a move or a shape reads no number.
        ("look(x)\nx.long()", [], []),
        ("look(x)\nx.shape", [], []),
        ("look(x)\nx.sum()", [3], []),
        # What a comprehension's variable runs over has its values, in pairs with others too.
        ("[look(y) for y in x]\nuse(x)", [3], []),
        ("[look(y) for y in x.items]\nuse(x.items)", [3], []),
        ("[look(y) for y in x[0]]\nuse(x[0])", [3], []),
        ("[look(y) for y in use(x)]\nuse(x)", [], []),
        ("[look(y) for y, z in zip(x, table)]\nuse(x)\nuse(table)", [3], []),
        ("[look(y) for z, y in zip(table, x)]\nuse(x)\nuse(table)", [3], []),
        ("[look(y) for n, y in enumerate(x)]\nuse(x)", [3], []),
        ("[look(n) for n, y in enumerate(x)]\nuse(x)", [], []),
        ("[look(y) for y, z in [(x, 1)]]\nuse(x)", [], []),
        ("[look(y) for y, z in pairs(x)]\nuse(x)", [], []),
    ],
)
def test_lines_that_read_the_value_and_those_that_need_its_numbers(
    body: str, every: list[int], counting: list[int]
) -> None:
    found: list[Any] = []

    class Value:
        """Anything that can be read."""

        items: Any = property(lambda self: self)
        shape = 0

        def __getattr__(self, name: str) -> Any:
            return lambda: self

        def __getitem__(self, key: object) -> Any:
            if type(key) is int and key > 0:
                raise IndexError
            return self

        __add__ = __radd__ = __lt__ = __gt__ = lambda self, other: self

    def look(value: object) -> object:
        run = running(place_of(sys._getframe(1)))
        assert isinstance(run.node, ast.Call)
        found[:] = [other_readers(run, run.node.args[0])]
        return value

    text = "\n    ".join(body.splitlines())
    with cell(f"def run(x, table):\n    {text}") as code:
        names = {"look": look, "use": lambda value: value, "pairs": lambda value: [(value, 1)]}
        exec(code, names)
        names["run"](Value(), Value())  # type: ignore[operator]
    assert found == [(every, counting)]


def test_without_a_running_expression_no_line_is_known() -> None:
    run = Running(place=place_of(sys._getframe()), parents=(ast.parse("x"),))
    assert other_readers(run, ast.Name("x", ast.Load())) == ([], [])


@pytest.mark.parametrize(
    ("body", "every"),
    [
        # The whole assignment is the running one, of what is read the expression alone.
        ("table[x] = x + 1\nuse(x)", [3]),
        ("y = table[x], x\nuse(x)", [2, 3]),
        ("for _ in [1]:\n    table[x]\n    use(x)\n    x = 2\n    use(x)", [4]),
        ("if 1:\n    table[x]\nelse:\n    x = 2\nuse(x)", [6]),
        ("if 0:\n    0\nelse:\n    table[x]\n    x = 2\nuse(x)", []),
        ("try:\n    0\nfinally:\n    table[x]\n    x = 2\nuse(x)", []),
        ("table[x]\nx = y = 2\nuse(x)", []),
    ],
)
def test_a_running_subscript(body: str, every: list[int]) -> None:
    found: list[Any] = []

    class Table:
        def __getitem__(self, *_: object) -> None:
            run = running(place_of(sys._getframe(1)))
            assert isinstance(run.node, ast.Subscript)
            found.append(other_readers(run, run.node.slice)[0])

        __setitem__ = __getitem__

    text = "\n    ".join(body.splitlines())
    with cell(f"def run(x, table):\n    {text}") as code:
        exec(code, names := dict[str, Any](use=abs))
        names["run"](1, Table())
    assert found == [every]
