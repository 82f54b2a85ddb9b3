"""Which other lines read the value that the running call got by a name."""

from __future__ import annotations

import ast
import sys
from typing import Any

import pytest

from cudalens.source.readers import other_readers
from cudalens.source.running_node import running
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
